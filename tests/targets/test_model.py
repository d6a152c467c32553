"""A spec becomes the model that the loop drives, elsewhere or in another dtype if asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispark.targets.model import open_target
from dispark.targets.random_weights import RandomWeights
from dispark.targets.spec import TargetSpec
from dispark.targets.tokenizer import ByteTokenizer

CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def test_open_target() -> None:
    spec = TargetSpec("mine", "random", {"random": RandomWeights("llama", CONFIG)}, device="cpu", max_context=50)
    model = open_target(spec)
    assert (model.name, model.max_context, model.vocab_size) == ("mine", 50, 262)
    assert set(model.stop_ids) == {257}
    assert model.vocab_fingerprint == ByteTokenizer().vocab_fingerprint
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    other = open_target(spec, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert other.dtype == torch.bfloat16


def test_what_is_no_spec_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tiny: is not a target; .*\+target@drafter\.model=tiny$"):
        open_target("tiny")  # type: ignore[arg-type]


def test_the_spec_says_how_calls_are_made() -> None:
    source = {"random": RandomWeights("llama", CONFIG)}
    spec = TargetSpec("mine", "random", source, device="cpu", token_bucket=8, slot_bucket=16, prefill_chunk=3)
    padded, plain = open_target(spec), open_target(spec, token_bucket=None, slot_bucket=None, prefill_chunk=512)
    seen: list[list[int]] = []
    for model in (padded, plain):
        calls: list[int] = []
        model.model.get_decoder().register_forward_pre_hook(
            lambda _module, _args, kwargs, calls=calls: calls.append(kwargs["position_ids"].shape[1]), with_kwargs=True
        )
        model.open(1, 20)
        logits, _ = model.prefill([0], [[1, 2, 3, 4, 5]])
        assert int(logits.argmax()) == 5 or logits.shape == (1, 262)
        seen.append(calls)
    assert seen == [[8, 8], [5]]  # five tokens: in two calls, each padded, or in one as it is
    with pytest.raises(ValueError, match=r"target.linear_backend=mkl: must be auto, stock or onednn"):
        open_target(TargetSpec("mine", "random", source, device="cpu", linear_backend="mkl"))


def test_open_target_reports_bad_options() -> None:
    spec = TargetSpec("mine", "random", {"random": RandomWeights("llama", CONFIG)}, device="cpu")
    with pytest.raises(ValueError, match="prefill_chunk=0"):
        open_target(spec, prefill_chunk=0)

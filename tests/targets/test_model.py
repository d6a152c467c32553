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


def test_open_target_reports_bad_options() -> None:
    spec = TargetSpec("mine", "random", {"random": RandomWeights("llama", CONFIG)}, device="cpu")
    with pytest.raises(ValueError, match="prefill_chunk=0"):
        open_target(spec, prefill_chunk=0)

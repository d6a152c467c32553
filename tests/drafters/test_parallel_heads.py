"""Heads on the target's last state, for each method that has them: which state they read, what they report, files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.toolbox import (
    LOOPING,
    decode_all,
    make_requests,
    open_tiny,
    outputs_of,
    varied_prompts,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from baselines.autoregressive import AutoregressiveDrafter
from baselines.blockwise import BlockwiseDrafter, BlockwiseShape
from baselines.medusa import MedusaDrafter, MedusaShape
from dispark.decoding.operators import can_pack
from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import draw, probabilities
from dispark.decoding.target import FINAL, TargetModel
from dispark.drafters.parallel_heads import ParallelHeadsDrafter
from dispark.types import Features, Outcome, Sampling

CPU = torch.device("cpu")
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
METHODS: dict[str, tuple[Any, Any]] = {
    "medusa": (MedusaDrafter, MedusaShape),
    "blockwise": (BlockwiseDrafter, BlockwiseShape),
}
every_method = pytest.mark.parametrize("method", METHODS)


@cache
def shared(name: str = "tiny", *overrides: str) -> TargetModel:
    return open_tiny(name, LOOPING, *overrides)


def make(method: str, *, checkpoint: str = "random", settings: dict[str, Any] | None = None, **shape: Any) -> Any:
    drafter, shapes = METHODS[method]
    return drafter(checkpoint, random=shapes(**({"num_heads": 3} | shape)), **(settings or {}))


@torch.inference_mode()
def last_state(target: TargetModel, ids: Sequence[int]) -> Tensor:
    """[1, D] state that the stock model's LM head reads at the last of `ids`, from scratch."""
    with target.stock() as model:
        return model.get_decoder()(torch.tensor([list(ids)])).last_hidden_state[0, -1:]


def propose(
    drafter: ParallelHeadsDrafter, rows: Sequence[int], sampling: Sampling, seed: int = 0
) -> tuple[Any, Tensor]:
    generators = RowGenerators([seed + row for row in rows], [1] * len(rows), CPU)
    with torch.inference_mode():
        draft = drafter.propose(rows, torch.zeros(len(rows), dtype=torch.int64), sampling, generators)
    return draft, generators.uniform("draft", drafter.draft_length)


def started(drafter: Any, prompts: dict[int, list[int]], target: TargetModel | None = None) -> Any:
    """The drafter after the prefill of these rows."""
    target = target or shared()
    drafter.bind(target, 5, 80)
    target.open(5, 80, drafter.feature_layers)
    with torch.inference_mode():
        _, features = target.prefill(list(prompts), list(prompts.values()))
        requests = make_requests(prompts.values())
        drafter.begin(list(prompts), requests, [0] * len(prompts), features)
    return drafter


@every_method
@pytest.mark.parametrize("name", ["tiny", "tiny_gemma3"])
def test_heads_read_the_position_before_the_anchor(method: str, name: str) -> None:
    target, drafter = shared(name), make(method)
    texts = {3: [5, 6, 7], 0: list(range(30)), 4: [9]}  # all that the target has seen
    started(drafter, texts, target)

    def check(rows: Sequence[int]) -> None:
        states = torch.cat([last_state(target, texts[row]) for row in rows])
        torch.testing.assert_close(drafter.logits(rows), drafter._head_logits(states), **TOLERANCE)

    check([3, 0, 4])
    check([4, 3])
    tokens = torch.randint(0, 256, (3, 4), generator=torch.Generator().manual_seed(1))
    for accepted in ([2, 0, 3], [0, 1, 0], [1, 3, 2]):
        rows = [0, 4, 3]
        with torch.inference_mode():
            _, features = target.verify(rows, tokens, [4, 2, 4])
        kept = [min(num, 1) if row == 4 else num for row, num in zip(rows, accepted, strict=True)]
        for row, num, new in zip(rows, kept, tokens.tolist(), strict=True):
            target.commit(row, 1 + num)
            texts[row] = texts[row] + new[: 1 + num]
        outcome = Outcome([[0]] * 3, kept, [None] * 3, [False] * 3)
        drafter.update(rows, outcome, features)
        check([3, 0, 4])
    assert drafter.feature_layers == (FINAL,)


@every_method
@pytest.mark.parametrize("size", [None, 40])
def test_tokens_are_drawn_from_the_reported_distributions(method: str, size: int | None) -> None:
    drafter = started(make(method, draft_vocab_size=size), {0: [1, 2, 3], 2: [4]})
    logits = drafter.logits([0, 2])
    assert logits.shape == (2, 3, size or shared().vocab_size)
    greedy, _ = propose(drafter, [0, 2], Sampling())
    assert greedy.probs_BGV is None
    assert torch.equal(greedy.tokens_BG, logits.argmax(-1))
    for sampling in (Sampling(1.0), Sampling(0.7, top_k=9, top_p=0.8)):
        draft, uniform_BG = propose(drafter, [0, 2], sampling)
        assert draft.lengths == [3, 3]
        assert draft.probs_BGV.shape == (2, 3, shared().vocab_size)
        torch.testing.assert_close(draft.probs_BGV[..., : logits.shape[-1]], probabilities(logits, sampling))
        assert float(draft.probs_BGV[..., logits.shape[-1] :].sum()) == 0.0
        for k in range(3):
            assert torch.equal(draft.tokens_BG[:, k], draw(draft.probs_BGV[:, k], uniform_BG[:, k]))
    drawn = [propose(drafter, [0, 2], Sampling(1.0), seed)[0].tokens_BG for seed in range(3)]
    assert not torch.equal(drawn[0], drawn[1]) or not torch.equal(drawn[0], drawn[2])


@every_method
@pytest.mark.parametrize("size", [None, 90])
@pytest.mark.parametrize("name", ["tiny", "tiny_qwen3", "tiny_gemma3"])
def test_greedy_text_is_the_autoregressive_one(method: str, size: int | None, name: str) -> None:
    requests = make_requests(varied_prompts(5), 14)
    drafter = make(method, draft_vocab_size=size)
    expected = outputs_of(decode_all(shared(name), AutoregressiveDrafter(), requests))
    assert outputs_of(decode_all(shared(name), drafter, requests, batch_size=3)) == expected


@every_method
def test_confidence_is_known_before_the_draw(method: str) -> None:
    def confidence(kind: str | None, sampling: Sampling) -> Any:
        drafter = started(make(method, settings={"confidence": kind}), {0: [1, 2, 3], 2: [4]})
        return propose(drafter, [0, 2], sampling)[0].confidence_BG

    laws = started(make(method), {0: [1, 2, 3], 2: [4]}).logits([0, 2]).double().softmax(-1)
    assert confidence(None, Sampling()) is None
    for sampling in (Sampling(), Sampling(0.5, top_k=2)):
        torch.testing.assert_close(confidence("peak", sampling).double(), laws.amax(-1), **TOLERANCE)
        entropy = -(laws * laws.log()).sum(-1)
        torch.testing.assert_close(confidence("entropy", sampling).double(), (-entropy).exp(), **TOLERANCE)
    with pytest.raises(
        ValueError, match=r"drafter.confidence=head: this drafter has no confidence head; allowed: peak"
    ):
        make(method, settings={"confidence": "head"})
    with pytest.raises(ValueError, match=r"drafter.confidence=sure: must be one of"):
        make(method, settings={"confidence": "sure"})


@every_method
@pytest.mark.parametrize("overrides", [(), ("target.dtype=bfloat16",)])
@pytest.mark.parametrize("size", [None, 50])
def test_a_saved_drafter_loads_to_the_same_drafts(
    method: str, overrides: tuple[str, ...], size: int | None, tmp_path: Path
) -> None:
    target = shared("tiny", *overrides)
    prompts = {0: [1, 2, 3], 1: [200, 100]}
    first = started(make(method, draft_vocab_size=size, seed=3), prompts, target)
    expected = first.logits([0, 1])
    first.save(tmp_path / "saved")
    second = started(make(method, checkpoint=str(tmp_path / "saved")), prompts, target)
    assert torch.equal(second.logits([0, 1]), expected)
    assert second.draft_length == first.draft_length == 3
    for sampling in (Sampling(), Sampling(1.0)):
        drafts = [propose(drafter, [0, 1], sampling)[0] for drafter in (first, second)]
        assert torch.equal(drafts[0].tokens_BG, drafts[1].tokens_BG)
    assert first.description["is_random"]
    assert first.description["layout"] is None
    assert second.description["layout"] == second.layout
    assert not second.description["is_random"]
    for key in ("num_parameters", "num_heads", "draft_vocab_size", "feature_layers"):
        assert first.description[key] == second.description[key]
    assert first.description["num_parameters"] == sum(p.numel() for p in first.network.parameters())
    assert len(second.description["weights_sha256"]) == 64


@every_method
def test_ids_of_a_reduced_vocabulary_are_mapped(method: str, tmp_path: Path) -> None:
    first = started(make(method, draft_vocab_size=4), {0: [1, 2, 3]})
    first.save(tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    ids = torch.tensor([3, 50, 51, 200])
    tensors["d2t"] = ids - torch.arange(4)
    tensors["t2d"] = torch.zeros(262, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, path)
    second = started(make(method, checkpoint=str(path.parent)), {0: [1, 2, 3]})
    draft, _ = propose(second, [0], Sampling())
    assert torch.equal(draft.tokens_BG, ids[second.logits([0]).argmax(-1)])
    sampled, _ = propose(second, [0], Sampling(1.0))
    assert torch.equal(sampled.probs_BGV[0].sum(0).nonzero().flatten(), ids)
    tensors["t2d"][0] = True
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"drafter.checkpoint=.*: t2d: marks other ids than d2t maps to; target tiny"):
        make(method, checkpoint=str(path.parent)).bind(shared(), 1, 16)


@every_method
def test_random_weights_are_announced_and_follow_their_seed_alone(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {0: [1, 2, 3]}
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING):
        logits = [started(make(method, seed=seed), prompts).logits([0]) for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert [record.getMessage() for record in caplog.records if "RANDOM WEIGHTS" in record.getMessage()] == [
        "drafter.checkpoint=random: RANDOM WEIGHTS, for speed only; acceptance means nothing"
    ] * 3


@every_method
def test_fewer_tokens_than_heads(method: str) -> None:
    whole = started(make(method), {0: [1, 2, 3]})
    short = started(make(method, settings={"draft_length": 2}), {0: [1, 2, 3]})
    assert (whole.draft_length, short.draft_length) == (3, 2)
    torch.testing.assert_close(short.logits([0]), whole.logits([0])[:, :2])
    for length in (0, 4):
        with pytest.raises(ValueError, match=rf"drafter.draft_length={length}: must be 1 to 3, one token a head"):
            make(method, settings={"draft_length": length})


@every_method
def test_shapes_are_checked(method: str) -> None:
    shape = METHODS[method][1]
    for field in fields(shape):
        low = 0 if field.name == "seed" else 1
        for value in (low - 1, 1.5, True):
            with pytest.raises(
                ValueError, match=rf"drafter.random.{field.name}={value}: must be a whole number >= {low}"
            ):
                shape(**{field.name: value})
    with pytest.raises(ValueError, match=r"drafter.random.draft_vocab_size=263: target tiny has 262 tokens"):
        make(method, draft_vocab_size=263).bind(shared(), 1, 16)


HIDDEN = "target.sources.random.config.hidden_size=32"
VOCAB = "+target.sources.random.config.vocab_size=300"


@every_method
@pytest.mark.parametrize(
    ("override", "message"),
    [
        (HIDDEN, "made for a hidden size of 64, but target tiny has 32"),
        (VOCAB, "made for a vocabulary of 262, but target tiny has 300 tokens"),
    ],
)
def test_another_target_is_refused_before_anything_is_decoded(
    method: str, override: str, message: str, tmp_path: Path
) -> None:
    started(make(method), {0: [1]}).save(tmp_path / "saved")
    other = open_tiny("tiny", LOOPING, override)
    other.prefill = None  # type: ignore[assignment, method-assign]
    drafter = make(method, checkpoint=str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=rf"^drafter.checkpoint=.*: {message}$"):
        decode_all(other, drafter, make_requests([[1, 2]], 4))


Change = Callable[[dict[str, Tensor], list[str]], None]


def _drop(tensors: dict[str, Tensor], names: list[str]) -> None:
    del tensors[names[0]]


def _add(tensors: dict[str, Tensor], names: list[str]) -> None:
    tensors["stranger"] = torch.zeros(2)


def _cut(tensors: dict[str, Tensor], names: list[str]) -> None:
    tensors[names[0]] = tensors[names[0]][:-1].clone()


@every_method
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, "1 missing: {0}"),
        (_add, "1 unused: stranger"),
        (_cut, r"1 of a wrong shape or type: {0} \[63.*\] instead of"),
    ],
)
def test_every_tensor_is_accounted_for(method: str, change: Change, message: str, tmp_path: Path) -> None:
    started(make(method), {0: [1]}).save(tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    tensors = load_file(path)
    names = sorted(name for name in tensors if name.endswith(("0.linear.weight", "w1.weight")))
    change(tensors, names)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"tensors don't fit the \w+ layout: " + message.format(names[0])):
        make(method, checkpoint=str(path.parent)).bind(shared(), 1, 16)


@every_method
def test_another_method_s_checkpoint_is_refused(method: str, tmp_path: Path) -> None:
    other = next(name for name in METHODS if name != method)
    started(make(other), {0: [1]}).save(tmp_path / "saved")
    layout = METHODS[other][0].layout
    with pytest.raises(ValueError, match=rf"has the {layout} layout; this drafter reads {METHODS[method][0].layout}"):
        make(method, checkpoint=str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())


@every_method
def test_a_row_taken_again_starts_with_its_own_prompt(method: str) -> None:
    target, drafter = shared(), make(method)
    started(drafter, {0: [1, 2, 3], 1: [4, 5]}, target)
    before = drafter.logits([0, 1])
    target.drop(1)
    drafter.drop([1])
    with torch.inference_mode():
        _, features = target.prefill([1], [[8, 8, 8]])
    drafter.begin([1], make_requests([[8, 8, 8]]), [0], Features(features.hidden_NF, features.lengths))
    after = drafter.logits([0, 1])
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1:], drafter._head_logits(last_state(target, [8, 8, 8])), **TOLERANCE)


@every_method
def test_another_target_gets_heads_of_its_own(method: str) -> None:
    narrow = open_tiny("tiny", LOOPING, HIDDEN)
    drafter = make(method)
    for target in (shared(), narrow, shared()):
        started(drafter, {0: [1, 2, 3]}, target)
        expected = started(make(method), {0: [1, 2, 3]}, target)
        assert torch.equal(drafter.logits([0]), expected.logits([0]))
        assert drafter.description == expected.description


@every_method
@pytest.mark.skipif(not can_pack(torch.zeros(1, dtype=torch.bfloat16)), reason="needs bfloat16 instructions")
def test_linear_layers_are_packed_where_the_target_s_are(method: str) -> None:
    logits = []
    for backend in ("onednn", "stock"):
        target = open_tiny("tiny", LOOPING, "target.dtype=bfloat16", linear_backend=backend)
        drafter = started(make(method), {0: [1, 2, 3]}, target)
        linears = [module for module in drafter.network.modules() if isinstance(module, torch.nn.Linear)]
        assert {"forward" in linear.__dict__ for linear in linears} == {backend == "onednn"}
        logits.append(drafter.logits([0]).float())
    torch.testing.assert_close(logits[0], logits[1], atol=0.1, rtol=0.1)

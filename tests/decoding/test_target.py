"""Packed calls against the untouched transformers model, recomputed from the whole prefix after every step.

Random programs of admissions, ragged appends, partial commits and drops run on Llama, Qwen3 and Gemma 3; Gemma's
window is 16 tokens, and the rows grow well beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from conformance.toolbox import load_tiny, open_tiny
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dispark.decoding.operators import can_pack
from dispark.decoding.target import EMBEDDING, FINAL, TargetModel
from dispark.targets.model import wrap

NAMES = ("tiny", "tiny_qwen3", "tiny_gemma3", "tiny_gemma4")
NUM_ROWS, NUM_SLOTS = 4, 72
ALL_LAYERS = (2, EMBEDDING, 0, FINAL, 1)
PROMPTS = [[7] * 3, list(range(40)), [1], list(range(200, 221)), list(range(60, 77))]
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}

# The same programs in every run, and no minutes of shrinking; add Phase.shrink to study a failure.
FUZZ = settings(
    derandomize=True, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=True
)


@cache
def shared(name: str, token_bucket: int | None = None, slot_bucket: int | None = None) -> TargetModel:
    return open_tiny(name, token_bucket=token_bucket, slot_bucket=slot_bucket)


@torch.inference_mode()
def stock_logits(target: TargetModel, ids: Sequence[int], num: int) -> Tensor:
    """[num, V]: the stock model's logits at the last `num` of `ids`, computed from scratch."""
    with target.stock() as model:
        return model(torch.tensor([list(ids)])).logits[0, -num:]


def packed_logits(target: TargetModel, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
    """One packed call; the logits of each row."""
    flat = torch.tensor([token for new in tokens for token in new])
    logits, features = target.forward(rows, flat, [len(new) for new in tokens])
    assert features.lengths == [len(new) for new in tokens]
    return list(logits.split(features.lengths))


class Mirror:
    """A target and, per row, the tokens that it has to have kept."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self.target.open(NUM_ROWS, NUM_SLOTS)
        self.kept: dict[int, list[int]] = {}

    def admit(self, prompts: dict[int, list[int]]) -> None:
        logits, features = self.target.prefill(list(prompts), list(prompts.values()))
        assert features.hidden_NF is None
        for (row, prompt), found in zip(prompts.items(), logits, strict=True):
            self.kept[row] = list(prompt)
            torch.testing.assert_close(found, stock_logits(self.target, prompt, 1)[0], **TOLERANCE)

    def append(self, new: dict[int, list[int]], num_kept: dict[int, int]) -> None:
        for row, found in zip(new, packed_logits(self.target, list(new), list(new.values())), strict=True):
            expected = stock_logits(self.target, self.kept[row] + new[row], len(new[row]))
            torch.testing.assert_close(found, expected, **TOLERANCE)
        for row, kept in num_kept.items():
            self.target.commit(row, kept)
            self.kept[row] += new[row][:kept]

    def drop(self, row: int) -> None:
        self.target.drop(row)
        del self.kept[row]

    def check(self) -> None:
        assert sorted(self.target.cache.rows) == sorted(self.kept)
        assert all(self.target.cache.length(row) == len(ids) for row, ids in self.kept.items())


tokens = st.integers(0, 255)


def run_program(mirror: Mirror, data: st.DataObject, num_steps: int) -> None:
    """Random steps: new rows when there is room, then a packed append to some of the rows, then drops."""
    for _ in range(num_steps):
        free = [row for row in range(NUM_ROWS) if row not in mirror.kept]
        if free and (not mirror.kept or data.draw(st.booleans(), label="admit")):
            chosen = data.draw(st.permutations(free))[: data.draw(st.integers(1, len(free)))]
            mirror.admit({row: data.draw(st.lists(tokens, min_size=1, max_size=22)) for row in chosen})
        members = data.draw(st.permutations(sorted(mirror.kept)))
        if data.draw(st.booleans(), label="some rows only"):
            members = members[: data.draw(st.integers(1, len(members)))]
        new, num_kept = {}, {}
        for row in members:
            room = NUM_SLOTS - len(mirror.kept[row])
            if room == 0:
                continue
            new[row] = data.draw(st.lists(tokens, min_size=1, max_size=min(9, room)))
            num_kept[row] = data.draw(st.integers(0, len(new[row])), label="kept")
        if new:
            mirror.append(new, num_kept)
        mirror.check()
        for row in sorted(mirror.kept):
            if data.draw(st.integers(0, 5), label="drop") == 0 or len(mirror.kept[row]) == NUM_SLOTS:
                mirror.drop(row)
        mirror.check()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(FUZZ, max_examples=12)
def test_random_programs_equal_the_recomputed_prefix(name: str, data: st.DataObject) -> None:
    run_program(Mirror(shared(name)), data, 6)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(FUZZ, max_examples=5)
def test_random_programs_with_padded_shapes(name: str, data: st.DataObject) -> None:
    run_program(Mirror(shared(name, token_bucket=16, slot_bucket=32)), data, 4)


@pytest.mark.parametrize("name", NAMES)
def test_rows_across_the_window_s_edge(name: str) -> None:
    mirror = Mirror(shared(name))
    generator = torch.Generator().manual_seed(3)

    def draw(num: int) -> list[int]:
        return torch.randint(0, 256, (num,), generator=generator).tolist()

    mirror.admit({0: draw(14), 1: draw(15), 2: draw(16), 3: draw(17)})
    mirror.append({row: draw(1) for row in range(4)}, dict.fromkeys(range(4), 1))
    mirror.append({0: draw(1), 1: draw(4), 2: draw(9), 3: draw(2)}, {0: 1, 1: 1, 2: 0, 3: 2})
    mirror.drop(1)
    mirror.append({0: draw(8), 2: draw(1), 3: draw(5)}, {0: 3, 2: 1, 3: 5})
    mirror.admit({1: draw(33)})
    mirror.append({row: draw(5) for row in (3, 1, 0, 2)}, {0: 5, 1: 4, 2: 3, 3: 2})
    mirror.append({row: draw(17) for row in range(4)}, dict.fromkeys(range(4), 17))
    mirror.append({row: draw(1) for row in range(4)}, {})
    mirror.check()


def ragged_call(target: TargetModel) -> list[Tensor]:
    """Logits of a ragged verify after ragged prompts."""
    target.open(len(PROMPTS), NUM_SLOTS)
    target.prefill(range(len(PROMPTS)), PROMPTS)
    drafts = torch.arange(5 * len(PROMPTS)).view(len(PROMPTS), 5)
    logits, features = target.verify(list(range(len(PROMPTS))), drafts, [1, 5, 3, 1, 2])
    assert logits.shape == (12, target.vocab_size)
    return list(logits.split(features.lengths))


@pytest.mark.parametrize("name", NAMES)
def test_paddings_and_splits_do_not_change_the_logits(name: str) -> None:
    target = shared(name)
    expected = [
        stock_logits(target, [*prompt, *range(5 * i, 5 * i + num)], num)
        for i, (prompt, num) in enumerate(zip(PROMPTS, [1, 5, 3, 1, 2], strict=True))
    ]
    padded = [shared(name, *buckets) for buckets in ((16, None), (None, 32), (7, 10), (1, 1))]
    before = target._max_waste
    for waste in (0.0, float("inf"), before):
        for model in (target, *padded):
            model._max_waste = waste
            for found, logits in zip(ragged_call(model), expected, strict=True):
                torch.testing.assert_close(found, logits, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_prefill_in_chunks(name: str, chunk: int) -> None:
    target, whole = open_tiny(name, prefill_chunk=chunk), shared(name)
    for model in (target, whole):
        model.open(len(PROMPTS), NUM_SLOTS, ALL_LAYERS)
    logits, features = target.prefill(range(len(PROMPTS)), PROMPTS)
    expected_logits, expected = whole.prefill(range(len(PROMPTS)), PROMPTS)
    assert features.lengths == expected.lengths == [len(prompt) for prompt in PROMPTS]
    assert features.hidden_NF is not None
    torch.testing.assert_close(logits, expected_logits, **TOLERANCE)
    torch.testing.assert_close(features.hidden_NF, expected.hidden_NF, **TOLERANCE)
    for row, prompt in enumerate(PROMPTS):
        assert target.cache.length(row) == len(prompt)
        torch.testing.assert_close(logits[row], stock_logits(target, prompt, 1)[0], **TOLERANCE)


@torch.inference_mode()
def hidden_states(target: TargetModel, ids: Sequence[int]) -> dict[int, Tensor]:
    """What transformers reports for the tapped layers, [len(ids), D] each."""
    with target.stock() as model:
        states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return {EMBEDDING: states[0][0], FINAL: states[-1][0]} | {i: states[i + 1][0] for i in range(target.num_layers - 1)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("token_bucket", [None, 16])
def test_features_are_transformers_hidden_states(name: str, token_bucket: int | None) -> None:
    target = shared(name, token_bucket)
    target.open(NUM_ROWS, NUM_SLOTS, ALL_LAYERS)
    prompts = {2: list(range(30)), 0: [5], 3: [9, 8, 7]}
    _, at_prefill = target.prefill(list(prompts), list(prompts.values()))
    drafts = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    _, at_verify = target.verify(list(prompts), drafts, [2, 3, 1])
    expected = []
    for (row, prompt), new in zip(prompts.items(), ([1, 2], [4, 5, 6], [7]), strict=True):
        states = hidden_states(target, prompt + new)
        expected.append(torch.cat([states[layer] for layer in ALL_LAYERS], dim=-1))
        assert target.cache.length(row) == len(prompt)
    for features, parts in (
        (at_prefill, [states[: len(ids)] for states, ids in zip(expected, prompts.values(), strict=True)]),
        (at_verify, [states[len(ids) :] for states, ids in zip(expected, prompts.values(), strict=True)]),
    ):
        assert features.lengths == [len(part) for part in parts]
        assert features.hidden_NF is not None
        assert features.hidden_NF.shape[1] == len(ALL_LAYERS) * target.hidden_size
        torch.testing.assert_close(features.hidden_NF, torch.cat(parts), **TOLERANCE)


@pytest.mark.parametrize("layers", [[3], [4], [-3], [0, 0], [-1, 1, -1]])
def test_layers_that_cannot_be_tapped(layers: list[int]) -> None:
    target = shared("tiny")
    with pytest.raises(ValueError, match=r"feature_layers=\["):
        target.open(1, 8, layers)
    target.open(1, 8)  # and the target is as usable as before
    assert target.prefill([0], [[1, 2]])[1].hidden_NF is None


def test_taps_are_set_anew_by_every_open() -> None:
    target = shared("tiny")
    widths = []
    for layers in ((0,), (), (2, 1)):
        target.open(1, 8, layers)
        hidden = target.prefill([0], [[1, 2]])[1].hidden_NF
        widths.append(None if hidden is None else hidden.shape[1] // target.hidden_size)
    assert widths == [1, None, 2]
    assert num_hooks(target) == 2


def num_hooks(target: TargetModel) -> int:
    return sum(len(module._forward_hooks) for module in target.model.modules())


def test_stock_gives_the_model_back_and_takes_it_again() -> None:
    target = open_tiny("tiny")
    target.open(2, 32, (0, 1))
    before = packed_call(target)
    with target.stock() as model:
        assert model is target.model
        assert model.config._attn_implementation == "sdpa"
        assert num_hooks(target) == 0
        generated = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert generated.shape == (1, 7)
    assert num_hooks(target) == 2
    target.open(2, 32, (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(packed_call(target), before, strict=True))


def test_stock_may_be_nested_and_a_model_wrapped_twice() -> None:
    loaded = load_tiny("tiny")
    first, second = wrap(loaded), wrap(loaded)
    with first.stock() as outer:
        with second.stock() as inner:
            assert inner is outer
            assert inner.config._attn_implementation == "sdpa"
        assert outer.config._attn_implementation == "sdpa"
    for target in (first, second):
        target.open(2, 32, (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(packed_call(first), packed_call(second), strict=True))


@pytest.mark.skipif(not can_pack(torch.zeros(1, dtype=torch.bfloat16)), reason="needs bfloat16 instructions")
def test_a_model_has_one_linear_backend() -> None:
    loaded = load_tiny("tiny", "target.dtype=bfloat16")
    wrap(loaded, linear_backend="onednn")
    with pytest.raises(ValueError, match=r"target.linear_backend=stock: this model already runs with onednn"):
        wrap(loaded, linear_backend="stock")


def test_room_is_what_slots_and_context_leave() -> None:
    target = open_tiny("tiny", "target.max_context=20")
    for num_slots, room in ((12, 9), (64, 17)):
        target.open(1, num_slots)
        target.prefill([0], [[1, 2, 3]])
        assert (target.length(0), target.room(0)) == (3, room)


def test_stock_takes_the_model_again_after_an_error() -> None:
    target = open_tiny("tiny")
    target.open(2, 32, (0, 1))
    before = packed_call(target)
    with pytest.raises(RuntimeError, match="on purpose"), target.stock():
        raise RuntimeError("on purpose")
    target.open(2, 32, (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(packed_call(target), before, strict=True))


def packed_call(target: TargetModel) -> tuple[Tensor, Tensor]:
    logits, features = target.prefill([0, 1], [[1, 2, 3], [4]])
    assert features.hidden_NF is not None
    return logits, features.hidden_NF


def test_rows_may_be_dropped_outside_of_the_loop() -> None:
    # The cache is filled under inference_mode; moving its rows has to work without it as well.
    mirror = Mirror(open_tiny("tiny"))
    mirror.admit({0: [1, 2, 3], 1: [4, 5]})
    mirror.drop(0)
    mirror.append({1: [6]}, {1: 1})


def test_a_sibling_has_rows_and_taps_of_its_own() -> None:
    target = shared("tiny")
    target.open(2, 32, (1,))
    target.prefill([0], [[1, 2, 3]])
    twin = target.sibling("twin")
    assert twin.name == "twin"
    assert target.name == "tiny"
    twin.open(3, 16)
    logits, features = twin.prefill([0, 2], [[9], [8, 7]])
    assert features.hidden_NF is None
    torch.testing.assert_close(logits[1], stock_logits(target, [8, 7], 1)[0], **TOLERANCE)
    logits, features = target.verify([0], torch.tensor([[4, 5]]), [2])
    torch.testing.assert_close(logits, stock_logits(target, [1, 2, 3, 4, 5], 2), **TOLERANCE)
    assert features.hidden_NF is not None
    torch.testing.assert_close(features.hidden_NF, hidden_states(target, [1, 2, 3, 4, 5])[1][3:], **TOLERANCE)
    assert (target.cache.num_rows, twin.cache.num_rows) == (2, 3)


def test_reopening_forgets_all_rows() -> None:
    target = shared("tiny")
    target.open(2, 16)
    target.prefill([0, 1], [[1, 2, 3], [4, 5]])
    for rows, slots in ((2, 16), (1, 16), (2, 8)):
        target.open(rows, slots)
        assert target.cache.rows == []
        logits, _ = target.prefill([0], [[6]])
        torch.testing.assert_close(logits[0], stock_logits(target, [6], 1)[0], **TOLERANCE)


def test_misuse_is_refused() -> None:
    fresh = open_tiny("tiny")
    with pytest.raises(ValueError, match=r"open\(\) comes before any call"):
        fresh.prefill([0], [[1]])
    fresh.open(2, 8)
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        fresh.prefill([0], [[]])
    fresh.open(2, 8)
    fresh.prefill([0], [[1, 2, 3]])
    with pytest.raises(ValueError, match="row 0 is active already"):
        fresh.prefill([0], [[1]])
    with pytest.raises(ValueError, match="row 0: 3 kept and 6 new tokens exceed 8 cache slots"):
        fresh.forward([0], torch.arange(6), [6])
    fresh.forward([0], torch.arange(5), [5])  # just fits
    with pytest.raises(ValueError, match="exceed 8 cache slots"):
        fresh.prefill([1], [list(range(9))])
    fresh.open(1, 8)
    fresh.admit(0)
    with pytest.raises(ValueError, match="all 1 rows are taken"):
        fresh.admit(1)


@pytest.mark.parametrize("option", ["token_bucket", "slot_bucket", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, -1])
def test_options_below_one_are_refused(option: str, value: int) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=f"target.{option}={value}: must be at least 1"):
        open_tiny("tiny", **options)


def test_the_facts_about_the_model() -> None:
    target = open_tiny("tiny", stop_ids=(257, 3, 3))
    assert target.stop_ids == {257, 3}
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.max_context) == (4, 64, 262, 1024)
    assert (target.device.type, target.dtype) == ("cpu", torch.float32)
    assert target.vocab_fingerprint


@pytest.mark.parametrize("name", NAMES)
def test_the_first_layers_alone(name: str) -> None:
    target = shared(name)
    target.open(2, NUM_SLOTS, (0, FINAL))
    target.prefill([0, 1], [list(range(30)), [5]])
    layers = target.model.get_decoder().layers
    with target.stock() as model, torch.inference_mode():
        states = model(torch.tensor([[*range(30), 7, 8]]), output_hidden_states=True).hidden_states
        expected = {n: model.lm_head(model.get_decoder().norm(states[n]))[0, -2:] for n in range(1, target.num_layers)}
    cap = getattr(target.model.config, "final_logit_softcapping", None)
    for num_layers, logits in expected.items():
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        found, features = target.forward([0], torch.tensor([7, 8]), [2], num_layers=num_layers)
        torch.testing.assert_close(found, logits, **TOLERANCE)
        assert features.hidden_NF is None
        assert target.model.get_decoder().layers is layers
    # Nothing of the shallow calls is left: the next one taps and sees all layers.
    found, features = target.forward([0], torch.tensor([7, 8]), [2])
    torch.testing.assert_close(found, stock_logits(target, [*range(30), 7, 8], 2), **TOLERANCE)
    assert features.hidden_NF is not None
    torch.testing.assert_close(features.hidden_NF[:, : target.hidden_size], states[1][0, -2:], **TOLERANCE)


@pytest.mark.parametrize("num_layers", [0, 5, -1])
def test_layers_that_are_not_there_to_run(num_layers: int) -> None:
    target = shared("tiny")
    target.open(1, 8)
    target.prefill([0], [[1]])
    with pytest.raises(ValueError, match=rf"num_layers={num_layers}: target tiny has layers 1 to 4 to run"):
        target.forward([0], torch.tensor([1]), [1], num_layers=num_layers)


def test_an_error_in_a_shallow_call_gives_the_layers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_tiny("tiny")
    target.open(1, 8)
    target.prefill([0], [[1]])
    layers = target.model.get_decoder().layers

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(layers[1], "forward", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            target.forward([0], torch.tensor([1]), [1], num_layers=2)
    assert target.model.get_decoder().layers is layers
    logits, _ = target.forward([0], torch.tensor([2]), [1])
    torch.testing.assert_close(logits, stock_logits(target, [1, 2], 1), **TOLERANCE)


def test_rewinding_forgets_what_was_committed() -> None:
    mirror = Mirror(open_tiny("tiny"))
    mirror.admit({0: [1, 2, 3], 1: [4, 5]})
    mirror.append({0: [6, 7], 1: [8, 9]}, {0: 2, 1: 1})
    mirror.target.rewind(0, 4)
    mirror.kept[0] = [1, 2, 3, 6]
    mirror.append({0: [9], 1: [6]}, {0: 1, 1: 0})
    mirror.check()
    with pytest.raises(AssertionError):
        mirror.target.rewind(1, 4)

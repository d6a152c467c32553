"""Feature-recurrent drafting, whatever the method: pairs, rollback, ragged rows, cost, sampling, saving, refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.toolbox import decode_all, make_request, make_requests, open_tiny, varied_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from baselines.eagle import EagleDrafter, EagleShape
from baselines.eagle3 import Eagle3Drafter, Eagle3Shape
from baselines.mtp import MtpDrafter, MtpShape
from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import draw
from dispark.decoding.target import FINAL, TargetModel
from dispark.drafters import recurrent
from dispark.drafters.recurrent import RecurrentDrafter
from dispark.types import Draft, Features, Outcome, Sampling

KINDS: dict[str, tuple[Any, Any]] = {
    "eagle3": (Eagle3Drafter, Eagle3Shape),
    "mtp": (MtpDrafter, MtpShape),
    "eagle": (EagleDrafter, EagleShape),
}
FAMILIES = ("tiny", "tiny_qwen3", "tiny_gemma3", "tiny_gemma4")
LENGTH = 3
GREEDY = Sampling()
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}


@cache
def target_of(name: str = "tiny", *overrides: str) -> TargetModel:
    return open_tiny(name, *overrides)


def make(kind: str, target: TargetModel, num_rows: int = 3, **settings: Any) -> Any:
    """A bound drafter with random weights; `shape` are arguments of its shape."""
    drafter_class, shape_class = KINDS[kind]
    settings.setdefault("draft_length", LENGTH)
    drafter = drafter_class(random=shape_class(**settings.pop("shape", {})), **settings)
    drafter.bind(target, num_rows, 80)
    return drafter


def width_of(drafter: RecurrentDrafter, target: TargetModel) -> int:
    return len(drafter.feature_layers) * target.hidden_size


def generators_of(rows: Sequence[int], num_round: int = 1) -> RowGenerators:
    return RowGenerators([100 + row for row in rows], [num_round] * len(rows), torch.device("cpu"))


@dataclass
class Text:
    """A made-up text: tokens, one feature a token, and how much of it has been emitted."""

    tokens: list[int]
    features: Tensor
    num_prompt: int
    num_emitted: int


def made_up(num_prompt: int, width: int, seed: int) -> Text:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 250, (60,), generator=generator).tolist()
    return Text(tokens, torch.randn(60, width, generator=generator), num_prompt, num_prompt + 1)


def begin(drafter: Any, texts: dict[int, Text]) -> None:
    """All texts at once, as after a prefill; everything that has been emitted but its last token is prompt."""
    cut = {row: text.num_emitted - 1 for row, text in texts.items()}
    hidden = torch.cat([text.features[: cut[row]] for row, text in texts.items()])
    requests = [make_request(text.tokens[: cut[row]], num=row) for row, text in texts.items()]
    first = [text.tokens[cut[row]] for row, text in texts.items()]
    drafter.begin(list(texts), requests, first, Features(hidden, list(cut.values())))


def propose(drafter: Any, texts: dict[int, Text], sampling: Sampling = GREEDY, num_round: int = 1) -> Draft:
    anchors = torch.tensor([text.tokens[text.num_emitted - 1] for text in texts.values()])
    draft: Draft = drafter.propose(list(texts), anchors, sampling, generators_of(list(texts), num_round))
    return draft


def update(drafter: Any, texts: dict[int, Text], accepted: Sequence[int], verified: Sequence[int]) -> None:
    """A round in which so many drafts were accepted of so many verified; features of the others are noise."""
    parts, emitted = [], []
    for text, num, total in zip(texts.values(), accepted, verified, strict=True):
        anchor = text.num_emitted - 1
        kept = text.features[anchor : anchor + 1 + num]
        parts.append(torch.cat([kept, torch.full((total - num, kept.shape[1]), 1e3)]))
        emitted.append(text.tokens[text.num_emitted : text.num_emitted + num + 1])
        text.num_emitted += num + 1
    outcome = Outcome(emitted, list(accepted), [None] * len(emitted), [False] * len(emitted))
    drafter.update(list(texts), outcome, Features(torch.cat(parts), [1 + total for total in verified]))


def logits_of(drafter: Any, texts: dict[int, Text], **options: Any) -> tuple[Draft, Tensor]:
    """A proposal and its logits, [B, G, V or V_draft]."""
    seen: list[Tensor] = []
    inner = drafter.logits

    def keep(hidden_BD: Tensor) -> Tensor:
        seen.append(inner(hidden_BD))
        return seen[-1]

    drafter.logits = keep
    draft = propose(drafter, texts, **options)
    del drafter.logits
    return draft, torch.stack(seen, dim=1)


# -- rounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_round_sees_the_emitted_text_and_nothing_else(kind: str, name: str) -> None:
    """After rounds of ragged rows with any number accepted, a draft is what a fresh drafter says of the same text."""
    target = target_of(name)
    drafter, fresh = make(kind, target), make(kind, target)
    width = width_of(drafter, target)
    texts = {row: made_up(num, width, seed=row) for row, num in ((0, 1), (1, 7), (2, 3))}
    begin(drafter, texts)
    for accepted, verified in (((0, 3, 1), (3, 3, 2)), ((2, 0, 0), (2, 3, 0)), ((3, 1, 3), (3, 2, 3)), ((), ())):
        draft, logits_BGV = logits_of(drafter, texts)
        assert draft.lengths == [LENGTH] * 3
        for i, (row, text) in enumerate(texts.items()):
            fresh.bind(target, 1, 80)
            begin(fresh, {row: text})
            alone, wanted_BGV = logits_of(fresh, {row: text})
            torch.testing.assert_close(logits_BGV[i], wanted_BGV[0], **CLOSE)
            assert torch.equal(draft.tokens_BG[i], alone.tokens_BG[0])
            assert drafter._packed.cache.length(row) == text.num_emitted - 1
        if accepted:
            update(drafter, texts, accepted, verified)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_and_order_matter(kind: str) -> None:
    """Otherwise the test above would pass for a drafter that ignores its context."""
    target = target_of()
    drafter = make(kind, target, num_rows=1)
    text = made_up(9, width_of(drafter, target), seed=1)
    begin(drafter, {0: text})
    _, logits = logits_of(drafter, {0: text})
    for change in ("feature", "token", "order"):
        other = Text(list(text.tokens), text.features.clone(), 9, 10)
        if change == "feature":
            other.features[2] += 1
        elif change == "token":
            other.tokens[3] = (other.tokens[3] + 1) % 250
        else:
            other.tokens[2], other.tokens[3] = text.tokens[3], text.tokens[2]
        drafter.bind(target, 1, 80)
        begin(drafter, {0: other})
        _, changed = logits_of(drafter, {0: other})
        assert (changed - logits).abs().max() > 1e-3, change


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_round_costs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward for what was emitted, one for each further token, none after the last; none outside of propose."""
    target = target_of()
    drafter = make(kind, target)
    calls: list[int] = []
    run = drafter._packed.run
    monkeypatch.setattr(drafter._packed, "run", lambda plan, inputs: calls.append(len(inputs)) or run(plan, inputs))
    texts = {row: made_up(4 + row, width_of(drafter, target), seed=row) for row in range(3)}
    begin(drafter, texts)
    assert calls == []
    propose(drafter, texts)
    assert calls == [4 + 5 + 6, 3, 3]
    calls.clear()
    update(drafter, texts, (1, 0, 3), (3, 3, 3))
    drafter.drop([2])
    assert calls == []
    assert set(drafter._pending) == {0, 1}  # a finished row's features are let go
    propose(drafter, {row: texts[row] for row in (0, 1)})
    assert calls == [2 + 1, 2, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts_go_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of()
    drafter = make(kind, target)
    texts = {row: made_up(num, width_of(drafter, target), seed=row) for row, num in ((0, 11), (1, 2), (2, 5))}
    begin(drafter, texts)
    _, whole = logits_of(drafter, texts)
    for chunk in (1, 4, 13):
        monkeypatch.setattr(recurrent, "CHUNK", chunk)
        drafter.bind(target, 3, 80)
        begin(drafter, texts)
        _, pieces = logits_of(drafter, texts)
        torch.testing.assert_close(pieces, whole, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_row_is_free_again(kind: str) -> None:
    target = target_of()
    drafter, fresh = make(kind, target), make(kind, target, num_rows=1)
    width = width_of(drafter, target)
    texts = {row: made_up(5, width, seed=row) for row in range(3)}
    begin(drafter, texts)
    propose(drafter, texts)
    update(drafter, texts, (1, 2, 0), (3, 3, 3))
    drafter.drop([0])
    texts[0] = made_up(8, width, seed=9)
    begin(drafter, {0: texts[0]})
    _, logits = logits_of(drafter, {row: texts[row] for row in (2, 1, 0)})
    begin(fresh, {0: texts[0]})
    _, wanted = logits_of(fresh, {0: texts[0]})
    torch.testing.assert_close(logits[2], wanted[0], **CLOSE)


# -- tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [None, 40])
def test_tokens_are_drawn_from_the_law_that_is_reported(kind: str, size: int | None) -> None:
    target = target_of()
    drafter = make(kind, target, shape={"draft_vocab_size": size})
    texts = {row: made_up(4, width_of(drafter, target), seed=row) for row in range(3)}
    begin(drafter, texts)
    sampling = Sampling(2.0, top_p=0.95)
    draft = propose(drafter, texts, sampling, num_round=2)
    assert draft.probs_BGV is not None
    assert draft.probs_BGV.dtype == torch.float32
    assert draft.probs_BGV.shape == (3, LENGTH, target.vocab_size)
    torch.testing.assert_close(draft.probs_BGV.sum(-1), torch.ones(3, LENGTH))
    if size is not None:
        assert draft.probs_BGV[..., size:].abs().max() == 0
    assert (draft.probs_BGV > 0).sum(-1).max() > 5  # not point masses
    uniform_BG = generators_of(list(texts), 2).uniform("draft", LENGTH)
    for k in range(LENGTH):
        assert torch.equal(draw(draft.probs_BGV[:, k], uniform_BG[:, k]), draft.tokens_BG[:, k])
    greedy = make(kind, target, shape={"draft_vocab_size": size})
    begin(greedy, texts)
    assert propose(greedy, texts).probs_BGV is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("confidence", ["peak", "entropy"])
def test_confidence_is_known_before_the_draw(kind: str, confidence: str) -> None:
    target = target_of()
    drafter = make(kind, target, confidence=confidence)
    texts = {0: made_up(4, width_of(drafter, target), seed=0)}
    begin(drafter, texts)
    draft, logits_BGV = logits_of(drafter, texts, sampling=Sampling(0.5))
    q = logits_BGV.softmax(-1)
    wanted = q.amax(-1) if confidence == "peak" else torch.exp((q * q.log()).sum(-1))
    assert draft.confidence_BG is not None
    torch.testing.assert_close(draft.confidence_BG, wanted)


# -- weights ------------------------------------------------------------------------------------------------------


def test_what_is_read_of_the_target() -> None:
    assert make("mtp", target_of()).feature_layers == (FINAL,)
    assert make("eagle", target_of()).feature_layers == (FINAL,)
    assert make("eagle3", target_of()).feature_layers == (0, 1, 2)
    assert make("eagle3", target_of(), shape={"feature_layers": [2, 0]}).feature_layers == (2, 0)


def test_default_lengths() -> None:
    assert (Eagle3Drafter().draft_length, MtpDrafter().draft_length, EagleDrafter().draft_length) == (4, 1, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_seeded_and_loudly_random(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    before = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING):
        first = make(kind, target_of())
    assert "RANDOM WEIGHTS" in caplog.text
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.description["is_random"]
    assert first.description["is_aliased"] == {"embed_tokens": True, "lm_head": True}
    assert make(kind, target_of()).description == first.description
    other = make(kind, target_of(), shape={"seed": 1}).description
    assert other["weights_sha256"] != first.description["weights_sha256"]


def drafts_of(drafter: Any, target: TargetModel, sampling: Sampling) -> list[Draft]:
    """Every draft of a small run."""
    found: list[Draft] = []
    inner = drafter.propose

    def keep(*arguments: Any) -> Draft:
        found.append(inner(*arguments))
        return found[-1]

    drafter.propose = keep
    decode_all(target, drafter, make_requests(varied_prompts(3), 8), sampling, batch_size=2)
    del drafter.propose
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", [{}, {"num_layers": 2, "draft_vocab_size": 99, "seed": 5}])
def test_saving_keeps_every_bit(kind: str, name: str, shape: dict[str, Any], tmp_path: Path) -> None:
    target = target_of(name)
    drafter = make(kind, target, shape=shape)
    drafter.save(tmp_path / "draft")
    again = KINDS[kind][0](str(tmp_path / "draft"), draft_length=LENGTH)
    for sampling in (GREEDY, Sampling(1.0)):
        first, second = drafts_of(drafter, target, sampling), drafts_of(again, target, sampling)
        assert len(first) == len(second) > 3
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.tokens_BG, b.tokens_BG)
            assert (a.probs_BGV is None) == (b.probs_BGV is None) == sampling.is_greedy
            assert a.probs_BGV is None or torch.equal(a.probs_BGV, b.probs_BGV)  # type: ignore[arg-type]
    assert not again.description["is_random"]
    assert again.description["num_parameters"] == drafter.description["num_parameters"]
    assert again.feature_layers == drafter.feature_layers


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind: str) -> None:
    """The network takes the target's dtype; rotary frequencies and q stay float32."""
    target = target_of("tiny", "target.dtype=bfloat16")
    drafter = make(kind, target)
    assert {p.dtype for p in drafter.network.parameters()} == {torch.bfloat16}
    assert drafter.network.stock._body[0].rotary_emb.inv_freq.dtype == torch.float32
    drafts = drafts_of(drafter, target, Sampling(1.0))
    assert len(drafts) > 3
    for draft in drafts:
        assert draft.probs_BGV is not None
        torch.testing.assert_close(draft.probs_BGV.sum(-1), torch.ones(len(draft.lengths), LENGTH))


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make("eagle3", target_of()).save(tmp_path / "draft")
    return tmp_path / "draft"


def refusal(folder: Path, target: TargetModel, drafter_class: Any = Eagle3Drafter) -> str:
    with pytest.raises(ValueError) as caught:
        drafter_class(str(folder)).bind(target, 1, 40)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_length": 0}, "drafter.draft_length=0: must be a whole number >= 1"),
        ({"draft_length": 1.5}, "drafter.draft_length=1.5: must be a whole number"),
        ({"confidence": "head"}, "drafter.confidence=head: this drafter has no confidence head"),
        ({"confidence": "sure"}, "drafter.confidence=sure: must be one of"),
        ({"checkpoint": "nowhere"}, "drafter.checkpoint=nowhere: must be a folder .* a pinned repository"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_are_refused(kind: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KINDS[kind][0](**settings)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_that_are_refused(kind: str) -> None:
    for key, value in (("num_layers", 0), ("num_layers", True), ("draft_vocab_size", 0)):
        with pytest.raises(ValueError, match=f"drafter.random.{key}={value}: must be a whole number >= 1"):
            KINDS[kind][1](**{key: value})
    with pytest.raises(ValueError, match="draft_vocab_size=1000: target tiny has 262 tokens"):
        make(kind, target_of(), shape={"draft_vocab_size": 1000})


def test_every_tensor_that_does_not_fit_is_named_at_once(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["fc.weight"], tensors["lm_head.weight"]
    tensors["norm.weight"] = torch.ones(3)
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][:-1].clone()
    tensors["spare.weight"] = torch.ones(1)
    save_file(tensors, saved / "model.safetensors")
    said = refusal(saved, target_of())
    for words in (
        "2 missing: fc.weight, lm_head.weight",
        "1 unused: spare.weight",
        "2 of a wrong shape or type: embed_tokens.weight [261, 64] instead of [262, 64], norm.weight [3]",
        "deepspec_eagle3 layout",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 300}, "made for a vocabulary of 300, but target tiny has 262"),
        ({"num_target_layers": 5}, "made for a target with a number of layers of 5, but target tiny has 4"),
        ({"target_hidden_size": 32}, "made for a hidden size of 32, but target tiny has 64"),
        ({"target_layer_ids": [0, 3]}, "reads layer 3 of the target"),
        ({"target_layer_ids": [0, 0]}, r"reads layers \[0, 0\] of target tiny; allowed: at least one, each once"),
        ({"target_layer_ids": None}, "target_layer_ids=None, of another type"),
        ({"ttt_length": "7"}, "ttt_length='7', of another type"),
        ({"draft_vocab_size": 50}, "1 missing: d2t"),
        ({"vocab_size": True}, "vocab_size=True, of another type"),
    ],
)
def test_configs_that_do_not_fit(saved: Path, change: dict[str, Any], words: str) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=words):
        Eagle3Drafter(str(saved)).bind(target_of(), 1, 40)


def test_a_checkpoint_of_another_method_is_refused(saved: Path) -> None:
    assert "has the deepspec_eagle3 layout; this drafter reads dispark" in refusal(saved, target_of(), MtpDrafter)
    assert "this drafter reads eagle" in refusal(saved, target_of(), EagleDrafter)
    make("mtp", target_of()).save(saved)
    assert "has the dispark layout; this drafter reads deepspec_eagle3" in refusal(saved, target_of())


def test_saving_comes_after_binding(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="comes after bind"):
        MtpDrafter().save(tmp_path)

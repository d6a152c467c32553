"""Copies where there is something to copy, the other drafter's tokens elsewhere, and the law of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.toolbox import GREEDY, decode_all, make_drafter, make_requests, open_tiny, outputs_of

from baselines.autoregressive import AutoregressiveDrafter
from baselines.draft_model import DraftModelDrafter
from baselines.lookup_first import LookupFirstDrafter
from baselines.ngram import NgramDrafter
from dispark.decoding.random import RowGenerators
from dispark.decoding.target import EMBEDDING
from dispark.types import Draft, Features, Sampling

TARGET = open_tiny("tiny")
LOOP, PLAIN = [5, 6, 7, 8, 5, 6, 7], [9, 1, 4]
T1 = Sampling(temperature=1.0)


def drafter(draft_length: int = 2) -> LookupFirstDrafter:
    return LookupFirstDrafter(NgramDrafter(draft_length=3, min_n=2), DraftModelDrafter(draft_length, confidence="peak"))


def begun(prompts: list[list[int]], sampling: Sampling, limit: int | None = None) -> tuple[Draft, Draft]:
    """(a draft for these prompts, whose first token is the last of each, and what the other drafter says alone)."""
    found = []
    for made in (drafter(), DraftModelDrafter(2, confidence="peak")):
        made.bind(TARGET, len(prompts), 40)
        rows, requests = list(range(len(prompts))), make_requests([prompt[:-1] for prompt in prompts])
        lengths = [len(request.prompt_ids) for request in requests]
        made.begin(rows, requests, [prompt[-1] for prompt in prompts], Features(None, lengths))
        anchors = torch.tensor([prompt[-1] for prompt in prompts])
        generators = RowGenerators([request.seed for request in requests], [1] * len(rows), TARGET.device)
        found.append(made.propose(rows, anchors, sampling, generators, limit))
    return found[0], found[1]


@pytest.mark.parametrize("sampling", [GREEDY, T1], ids=["greedy", "t1"])
def test_each_row_has_a_copy_or_what_the_other_drafter_says(sampling: Sampling) -> None:
    draft, alone = begun([PLAIN, LOOP, PLAIN[::-1]], sampling)
    assert draft.lengths == [2, 3, 2]
    assert draft.tokens_BG[1].tolist() == [8, 5, 6]
    for row in (0, 2):
        assert torch.equal(draft.tokens_BG[row, :2], alone.tokens_BG[row])
    assert draft.confidence_BG is not None
    assert alone.confidence_BG is not None
    assert draft.confidence_BG[1].tolist() == pytest.approx([0.8] * 3)
    torch.testing.assert_close(draft.confidence_BG[2, :2], alone.confidence_BG[2])
    if sampling.is_greedy:
        assert draft.probs_BGV is None
        return
    assert draft.probs_BGV is not None
    assert alone.probs_BGV is not None
    assert draft.probs_BGV[1].argmax(-1).tolist() == [8, 5, 6]
    assert draft.probs_BGV[1].amax(-1).tolist() == [1.0] * 3
    torch.testing.assert_close(draft.probs_BGV[0, :2], alone.probs_BGV[0])


def test_where_all_copy_nobody_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    made = drafter()
    monkeypatch.setattr(made._otherwise, "propose", None)
    made.bind(TARGET, 1, 40)
    made.begin([0], make_requests([LOOP[:-1]]), [7], Features(None, [6]))
    draft = made.propose([0], torch.tensor([7]), T1, RowGenerators([0], [1], TARGET.device))
    assert draft.tokens_BG.tolist() == [[8, 5, 6]]
    assert draft.probs_BGV is not None
    assert made.propose([0], torch.tensor([7]), GREEDY, RowGenerators([0], [1], TARGET.device), 1).lengths == [1]


def test_a_limit_holds_for_both() -> None:
    draft, _ = begun([PLAIN, LOOP], T1, 1)
    assert draft.lengths == [1, 1]
    draft, _ = begun([PLAIN, LOOP], T1, 0)
    assert draft.lengths == [0, 0]


@pytest.mark.parametrize("name", ["dispark", "eagle3", "medusa", "draft_model", "none"])
def test_texts_are_the_targets_whatever_the_other_drafter_is(name: str) -> None:
    """In rounds where other rows copied, a row's drafter is asked with some of its rows only."""
    looping = open_tiny("tiny", "target.sources.random.config.initializer_range=0.12")
    requests = make_requests([LOOP, PLAIN, LOOP * 3, [7]], 24)
    other = AutoregressiveDrafter() if name == "none" else make_drafter(name)
    made = LookupFirstDrafter(NgramDrafter(draft_length=4, min_n=1), other)
    expected = outputs_of(decode_all(looping, AutoregressiveDrafter(), requests))
    trace = decode_all(looping, made, requests, batch_size=3)
    assert outputs_of(trace) == expected
    assert any(line["num_accepted"] > 0 for line in trace.rounds)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lookup": DraftModelDrafter()}, r"drafter\.lookup: DraftModelDrafter doesn't copy; must be a lookup"),
        ({"lookup_confidence": 1.5}, r"drafter\.lookup_confidence=1\.5: must lie in 0 to 1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookupFirstDrafter(**{"lookup": NgramDrafter(), "otherwise": DraftModelDrafter(), **settings})


def test_a_lookup_reads_no_features() -> None:
    lookup = NgramDrafter()
    lookup.feature_layers = (EMBEDDING,)
    with pytest.raises(ValueError, match="doesn't copy"):
        LookupFirstDrafter(lookup, DraftModelDrafter())

"""Reduced draft vocabularies: the two stored forms agree, and what contradicts itself is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispark.drafters.vocabulary import DraftVocabulary


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(31, 40))
def test_round_trip(ids: set[int], vocab_size: int) -> None:
    wanted = torch.tensor(sorted(ids))
    made = DraftVocabulary(wanted, vocab_size)
    assert torch.equal(made.to_target(torch.arange(len(wanted))), wanted)
    assert torch.equal(made.t2d.nonzero().flatten(), wanted)
    again = DraftVocabulary.from_tensors(made.d2t, made.t2d, vocab_size)
    assert torch.equal(again.ids, wanted)
    wide = made.widen(torch.arange(1.0, len(wanted) + 1).expand(2, -1))
    assert wide.shape == (2, vocab_size)
    assert torch.equal(wide[1][wanted], torch.arange(1.0, len(wanted) + 1))
    assert wide.sum() == 2 * sum(range(1, len(wanted) + 1))


@pytest.mark.parametrize(
    ("ids", "words"),
    [([], "at least one"), ([0, 0], "distinct"), ([2, 1], "ascending"), ([-1, 0], "0..9"), ([3, 10], "0..9")],
)
def test_bad_ids(ids: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DraftVocabulary(torch.tensor(ids, dtype=torch.int64), 10)


def test_maps_that_contradict_each_other() -> None:
    made = DraftVocabulary(torch.tensor([1, 4]), 6)
    with pytest.raises(ValueError, match="t2d: marks other ids"):
        DraftVocabulary.from_tensors(made.d2t, made.t2d.roll(1), 6)
    with pytest.raises(ValueError, match="t2d: marks other ids"):
        DraftVocabulary.from_tensors(made.d2t, made.t2d[:5], 6)

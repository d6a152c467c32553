"""The ids of a reduced draft vocabulary."""

from __future__ import annotations

import pytest
import torch

from dispark.drafters.vocabulary import DraftVocabulary
from dispark.training.draft_ids import coverage, frequent_ids
from dispark.training.rows import TrainingRow

ROWS = [
    TrainingRow("a", "chat", "p", [9, 9, 9, 9], [3, 3, 5, 7], "stop"),
    TrainingRow("b", "chat", "p", [1], [5, 3, 6], "stop"),
]


def test_the_answers_most_frequent_ids_and_those_that_must_be_there() -> None:
    ids = frequent_ids(ROWS, 3, 12, {11})
    assert ids.tolist() == [3, 5, 11]
    assert coverage(ROWS, DraftVocabulary(ids, 12)) == pytest.approx(5 / 7)
    ids = frequent_ids(ROWS, 6, 12, {11})
    assert ids.tolist() == [0, 3, 5, 6, 7, 11]  # ties go to the smaller id
    assert coverage(ROWS, DraftVocabulary(ids, 12)) == coverage(ROWS, None) == 1


@pytest.mark.parametrize("size", [1, 13])
def test_sizes_that_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"draft_vocab_size={size}: must lie in 2 .. 12"):
        frequent_ids(ROWS, size, 12, {11})


def test_labels_as_draft_ids() -> None:
    vocabulary = DraftVocabulary(torch.tensor([2, 3, 7]), 9)
    found = vocabulary.to_draft(torch.tensor([[0, 2, 3], [7, 8, 5]]))
    assert found.tolist() == [[-1, 0, 1], [2, -1, -1]]
    assert vocabulary.to_target(torch.tensor([0, 1, 2])).tolist() == [2, 3, 7]

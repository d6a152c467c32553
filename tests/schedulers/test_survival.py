"""Survival of drafts, and the order in which a budget takes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispark.schedulers.survival import best_first, lengths_of, survival_of
from dispark.types import Draft


def draft_of(confidence: list[list[float]] | None, lengths: list[int]) -> Draft:
    width = 3 if confidence is None else len(confidence[0])
    values = None if confidence is None else torch.tensor(confidence)
    return Draft(torch.zeros(len(lengths), width, dtype=torch.int64), lengths, None, values)


def test_survival_is_the_running_product_and_ends_with_the_drafts() -> None:
    found = survival_of(draft_of([[0.5, 0.5, 0.5], [1.0, 0.25, 1.0]], [3, 2]), "any")
    assert found.tolist() == [[0.5, 0.25, 0.125], [1.0, 0.25, 0.0]]


def test_without_a_confidence_only_empty_drafts_will_do() -> None:
    assert survival_of(draft_of(None, [0, 0]), "any").tolist() == [[0.0] * 3] * 2
    with pytest.raises(ValueError, match=r"scheduler=mine: the drafter gives no confidence; allowed"):
        survival_of(draft_of(None, [0, 1]), "mine")


rows = st.lists(st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=6)


@given(rows, st.integers(0, 24))
def test_the_best_drafts_are_a_prefix_of_each_row(confidence: list[list[float]], budget: int) -> None:
    survival = survival_of(draft_of(confidence, [4] * len(confidence)), "any")
    order = best_first(survival)
    assert len(order) == np.count_nonzero(survival)
    admitted = order[:budget]
    lengths = lengths_of(admitted, survival.shape)
    assert sum(lengths) == len(admitted)
    assert sorted(admitted.tolist()) == sorted(4 * i + k for i, n in enumerate(lengths) for k in range(n))
    left = [survival[i, n] for i, n in enumerate(lengths) if n < 4]
    if len(admitted) and left:
        assert survival.ravel()[admitted].min() >= max(left)

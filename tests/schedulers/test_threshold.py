"""The static confidence rule: what it keeps, what it never looks at, and what it needs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispark.interfaces import Scheduler
from dispark.schedulers.threshold import ThresholdScheduler
from dispark.types import Draft, Load

LOAD = Load(1, 0, 0, [9])


def draft_of(confidence: list[float] | None, length: int | None = None) -> Draft:
    num = 4 if confidence is None else len(confidence)
    values = None if confidence is None else torch.tensor([confidence])
    return Draft(torch.zeros(1, num, dtype=torch.int64), [num if length is None else length], None, values)


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=8), st.integers(1, 64).map(lambda n: n / 64), st.data())
def test_it_keeps_the_sure_prefix(confidence: list[float], threshold: float, data: st.DataObject) -> None:
    scheduler = ThresholdScheduler(threshold)
    wanted = next((k for k, c in enumerate(confidence) if c < threshold), len(confidence))
    assert scheduler.choose(draft_of(confidence), LOAD) == [wanted]
    # Whether slot k is verified does not depend on anything behind it.
    k = data.draw(st.integers(0, len(confidence) - 1))
    changed = confidence[: k + 1] + data.draw(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=4))
    found = scheduler.choose(draft_of(changed), LOAD)[0]
    assert (found > k) == (wanted > k)


def test_lengths_bound_it_and_0_verifies_everything() -> None:
    assert ThresholdScheduler(0.5).choose(draft_of([0.9, 0.9, 0.9], 2), LOAD) == [2]
    assert ThresholdScheduler(0.0).choose(draft_of(None), LOAD) == [4]
    assert ThresholdScheduler(0.5).choose(draft_of(None, 0), LOAD) == [0]  # nothing drafted, nothing to judge
    assert isinstance(ThresholdScheduler(), Scheduler)
    assert ThresholdScheduler.is_lossless


def test_it_needs_a_confidence() -> None:
    with pytest.raises(ValueError, match=r"scheduler=threshold: the drafter gives no confidence; allowed"):
        ThresholdScheduler(0.1).choose(draft_of(None), LOAD)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, "high", True, float("nan")])
def test_bad_thresholds(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"scheduler.threshold=.*: must be a number from 0 to 1"):
        ThresholdScheduler(threshold)

"""The scheduler that looks at nothing but lengths."""

from __future__ import annotations

import pytest
import torch

from dispark.interfaces import Scheduler
from dispark.schedulers.fixed import FixedScheduler
from dispark.types import Draft, Load, Outcome

LOAD = Load(num_rows=3, num_waiting=0, step=0, context_lengths=[5, 6, 7])


def draft(lengths: list[int]) -> Draft:
    return Draft(torch.zeros(len(lengths), max(lengths, default=0), dtype=torch.int64), lengths)


@pytest.mark.parametrize(
    ("cap", "expected"), [(None, [4, 0, 2]), (9, [4, 0, 2]), (2, [2, 0, 2]), (1, [1, 0, 1]), (0, [0, 0, 0])]
)
def test_everything_up_to_the_cap(cap: int | None, expected: list[int]) -> None:
    scheduler: Scheduler = FixedScheduler(cap)
    given = draft([4, 0, 2])
    assert scheduler.choose(given, LOAD) == expected
    assert given.lengths == [4, 0, 2]
    scheduler.observe(Outcome([[1]], [0], [None], [False]), [1], 0.1)
    assert scheduler.choose(given, LOAD) == expected
    assert scheduler.is_lossless
    assert scheduler.choose(draft([]), LOAD) == []


def test_the_answer_is_a_list_of_its_own() -> None:
    given = draft([4, 2])
    FixedScheduler().choose(given, LOAD)[0] = 0
    assert given.lengths == [4, 2]


def test_a_negative_cap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheduler.max_verify_length=-1: must be a whole number >= 0, or null"):
        FixedScheduler(-1)

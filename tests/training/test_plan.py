"""What a step sees: fixed by seed and step, every row once an epoch, little padding."""

from __future__ import annotations

import random

import pytest

from dispark.training.plan import StepPlan, split_held_out, stream_seed

_RNG = random.Random(0)
LENGTHS = [_RNG.randint(5, 200) for _ in range(103)]


def test_an_epoch_holds_every_row_once() -> None:
    plan = StepPlan(LENGTHS, 4, 0)
    assert plan.num_batches == 25
    for epoch in (0, 1):
        batches = [plan.batch(epoch * 25 + i) for i in range(25)]
        assert {e for e, _ in batches} == {epoch}
        rows = [row for _, numbers in batches for row in numbers]
        assert len(rows) == len(set(rows)) == 100


def test_it_hangs_on_seed_and_step_only() -> None:
    forth = [StepPlan(LENGTHS, 4, 0).batch(i) for i in range(60)]
    back = StepPlan(LENGTHS, 4, 0)
    assert [back.batch(i) for i in reversed(range(60))][::-1] == forth
    assert [StepPlan(LENGTHS, 4, 1).batch(i) for i in range(60)] != forth
    assert forth[:25] != forth[25:50]


def test_rows_of_a_batch_are_of_like_length() -> None:
    plan = StepPlan(LENGTHS, 4, 0)
    padded = sum(4 * max(LENGTHS[row] for row in plan.batch(i)[1]) for i in range(25))
    real = sum(LENGTHS[row] for i in range(25) for row in plan.batch(i)[1])
    assert padded < 1.1 * real
    # But batches don't come in the order of their lengths.
    firsts = [LENGTHS[plan.batch(i)[1][0]] for i in range(25)]
    assert firsts != sorted(firsts)


def test_too_few_rows() -> None:
    with pytest.raises(ValueError, match="batch_rows=4: the data has 3 rows to train on"):
        StepPlan([5, 5, 5], 4, 0)


def test_seeds_of_different_purposes_differ() -> None:
    seeds = {stream_seed(0, "a"), stream_seed(0, "b"), stream_seed(1, "a"), stream_seed(0, "a", 1)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_held_out_rows_stay_held_out_when_the_data_grows() -> None:
    ids = [f"r/{i}" for i in range(50)]
    train, held_out = split_held_out(ids, 5)
    assert sorted(train + held_out) == list(range(50))
    assert len(held_out) == 5
    fewer, _ = split_held_out(ids[:40], 5)
    # What is trained on in the large set and was held out in the small one can't be avoided, the reverse can.
    assert all(i in fewer or i not in train for i in range(40) if i in held_out)
    assert split_held_out(ids, 0) == (list(range(50)), [])

"""Algorithm 1: what it admits, where it stops, what it never looks at, and how long it takes."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
import torch

from dispark.interfaces import Scheduler
from dispark.schedulers.hardware_aware import HardwareAwareScheduler, throughputs
from dispark.schedulers.step_cost import StepCost
from dispark.types import Draft, Load

FLAT = StepCost((1, 1000), (1.0, 1.0))
LINEAR = StepCost((1, 1000), (1.0, 1000.0))


def draft_of(confidence: list[list[float]], lengths: list[int] | None = None) -> Draft:
    num, width = len(confidence), len(confidence[0])
    return Draft(torch.zeros(num, width, dtype=torch.int64), lengths or [width] * num, None, torch.tensor(confidence))


def load_of(num: int) -> Load:
    return Load(num, 0, 0, [9] * num)


def choose(cost: StepCost, confidence: list[list[float]], lengths: list[int] | None = None) -> list[int]:
    return HardwareAwareScheduler(cost=cost).choose(draft_of(confidence, lengths), load_of(len(confidence)))


def test_a_free_step_verifies_all_that_has_a_chance_and_a_dear_one_nothing() -> None:
    confidence = [[0.9, 0.8, 0.0, 0.9], [0.1, 0.1, 0.1, 0.1]]
    assert choose(FLAT, confidence) == [2, 4]
    assert choose(FLAT, confidence, [1, 3]) == [1, 3]
    assert choose(LINEAR, confidence) == [0, 0]  # a token costs a token


def test_it_is_the_best_admission_up_to_the_first_that_does_not_pay() -> None:
    cost = StepCost((2, 3, 4, 5, 6, 7, 8), (1.0, 1.1, 1.3, 1.32, 2.0, 2.02, 2.1))
    confidence = [[0.9, 0.5, 0.4], [0.8, 0.7, 0.1]]
    survival = np.cumprod(np.array(confidence), axis=1)
    best = 2 / 1.0
    wanted = [0, 0]
    for flat in np.argsort(-survival.ravel(), kind="stable"):
        row = int(flat) // 3
        trial = [n + (i == row) for i, n in enumerate(wanted)]
        tau = 2 + sum(float(survival[i, :n].sum()) for i, n in enumerate(trial))
        rate = tau / float(cost.seconds_at(2 + sum(trial)))
        if rate <= best:
            break
        best, wanted = rate, trial
    assert choose(cost, confidence) == wanted
    assert 0 < sum(wanted) < 6


def test_where_no_dent_is_in_the_curve_it_is_the_best_of_all_lengths() -> None:
    cost = StepCost(tuple(range(2, 9)), tuple(1.0 + 0.12 * n**1.3 for n in range(7)))
    confidence = [[0.9, 0.6, 0.5], [0.7, 0.7, 0.7]]
    survival = np.cumprod(np.array(confidence), axis=1)

    def rate(lengths: tuple[int, ...]) -> float:
        tau = 2 + sum(float(survival[i, :n].sum()) for i, n in enumerate(lengths))
        return tau / float(cost.seconds_at(2 + sum(lengths)))

    best = max(product(range(4), repeat=2), key=rate)
    assert choose(cost, confidence) == list(best)


def test_throughputs() -> None:
    found = throughputs(np.array([0.9, 0.5]), 2, StepCost((2, 3, 4), (1.0, 2.0, 4.0)))
    assert found.tolist() == pytest.approx([2.0, 2.9 / 2, 3.4 / 4])


def test_nothing_drafted_is_nothing_verified() -> None:
    nothing = Draft(torch.zeros(2, 3, dtype=torch.int64), [0, 0])
    assert HardwareAwareScheduler(cost=FLAT).choose(nothing, load_of(2)) == [0, 0]
    empty = Draft(torch.zeros(2, 0, dtype=torch.int64), [0, 0])
    assert HardwareAwareScheduler(cost=FLAT).choose(empty, load_of(2)) == [0, 0]
    assert isinstance(HardwareAwareScheduler(cost=FLAT), Scheduler)


def test_256_rows_of_16_take_a_millisecond_or_so() -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(256, 16, generator=generator) * 0.3 + 0.7
    draft = Draft(torch.zeros(256, 16, dtype=torch.int64), [16] * 256, None, confidence)
    scheduler = HardwareAwareScheduler(cost=StepCost((1, 64, 512, 5000), (1.0, 1.2, 2.0, 15.0)))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        lengths = scheduler.choose(draft, load_of(256))
        seconds.append(time.perf_counter() - begin)
    assert 0 < sum(lengths) < 256 * 16
    assert min(seconds) < 0.01

"""The controller against a simulated engine whose best draft length is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dispark.schedulers.load_adaptive import LoadAdaptiveScheduler
from dispark.types import Draft, Load, Outcome, TelemetryReading

MOST = 5


class Engine:
    """Rounds of rows whose drafts survive with one chance a position, and take a + b tokens seconds."""

    def __init__(
        self, scheduler: LoadAdaptiveScheduler, rate: float, seconds: tuple[float, float], seed: int = 0
    ) -> None:
        self.scheduler, self.rate, self.seconds = scheduler, rate, seconds
        self.random = np.random.default_rng(seed)
        self.lengths: list[int] = []

    def run(self, num_rounds: int, rows: int = 1, **load: Any) -> list[int]:
        """The draft lengths of these rounds."""
        self.lengths = []
        for step in range(num_rounds):
            now = Load(rows, load.get("waiting", 0), step, [9] * rows, kv_share=load.get("kv"), draft_length=MOST)
            limit = self.scheduler.draft_limit(now)
            num = MOST if limit is None else min(MOST, limit)
            self.lengths.append(num)
            draft = Draft(torch.zeros(rows, num, dtype=torch.int64), [num] * rows)
            verify = self.scheduler.choose(draft, now)
            comes = self.random.random((rows, num)) < self.rate
            accepted = comes.cumprod(axis=1).sum(axis=1).tolist()
            outcome = Outcome([[0] * (n + 1) for n in accepted], accepted, [None] * rows, [False] * rows)
            a, b = self.seconds
            self.scheduler.observe(outcome, verify, a + b * rows * (1 + num))
        return self.lengths


def usual(lengths: list[int]) -> int:
    return int(np.bincount(lengths).argmax())


def test_all_of_it_where_tokens_are_free() -> None:
    engine = Engine(LoadAdaptiveScheduler(), rate=0.8, seconds=(1.0, 0.001))
    engine.run(100)
    assert usual(engine.run(100)) == MOST


def test_nothing_where_every_token_costs_and_little_survives() -> None:
    engine = Engine(LoadAdaptiveScheduler(), rate=0.3, seconds=(0.1, 1.0))
    engine.run(100)
    later = engine.run(200)
    assert usual(later) == 0
    assert max(later) > 0  # it goes on trying


def test_it_follows_the_number_of_rows() -> None:
    # One row: the fixed cost dominates. 64 rows: a token costs what it costs.
    engine = Engine(LoadAdaptiveScheduler(), rate=0.6, seconds=(1.0, 0.05))
    engine.run(100, rows=1)
    alone = usual(engine.run(60, rows=1))
    engine.run(200, rows=64)
    crowded = usual(engine.run(60, rows=64))
    engine.run(200, rows=1)
    again = usual(engine.run(60, rows=1))
    assert crowded < alone
    assert again >= alone - 1


@pytest.mark.parametrize(
    ("limits", "load", "reading"),
    [
        ({"queue": 2.0}, {"waiting": 9}, TelemetryReading()),
        ({"kv": 0.9}, {"kv": 0.95}, TelemetryReading()),
        ({"memory": 0.9}, {}, TelemetryReading(memory_share=0.99)),
        ({"utilisation": 0.5}, {}, TelemetryReading(utilisation=0.9)),
        ({"pcie_gb_per_s": 1.0}, {}, TelemetryReading(pcie_bytes_per_s=2e9)),
    ],
)
def test_a_strained_signal_takes_the_length_down_and_lets_it_up_again(
    limits: dict[str, float], load: dict[str, Any], reading: TelemetryReading
) -> None:
    telemetry: Any = SimpleNamespace(bind=lambda device: None, latest=lambda: reading)
    engine = Engine(LoadAdaptiveScheduler(limits=limits, telemetry=telemetry), rate=0.9, seconds=(1.0, 0.001))
    assert usual(engine.run(40, **load)[30:]) == 0
    reading = TelemetryReading()
    engine.run(40)
    assert usual(engine.run(40)) == MOST


def test_signals_that_are_not_known_do_nothing() -> None:
    limits = {"kv": 0.1, "memory": 0.1, "utilisation": 0.1, "pcie_gb_per_s": 0.1, "queue": None}
    engine = Engine(LoadAdaptiveScheduler(limits=limits), rate=0.9, seconds=(1.0, 0.001))
    assert usual(engine.run(60, waiting=100)) == MOST


def test_survival_behind_a_cut_is_not_counted_as_rejection() -> None:
    scheduler = LoadAdaptiveScheduler()
    load = Load(1, 0, 0, [9], draft_length=3)
    assert scheduler.draft_limit(load) == 3
    for finish, is_truncated in (("length", True), ("stop", False), ("stop_string", False)):
        scheduler.observe(Outcome([[1]], [1], [finish], [is_truncated]), [3], 0.1)  # type: ignore[list-item]
    assert scheduler.survival().tolist() == [1.0, 1.0, 1.0]
    scheduler.observe(Outcome([[1, 2]], [1], [None], [False]), [3], 0.1)
    assert scheduler.survival()[0] == 1.0
    assert scheduler.survival()[1] == pytest.approx(0.5)


def test_a_drafter_that_found_little_at_first_is_asked_for_more() -> None:
    """A lookup's first draft may be short; what the drafter can do at most is known from the start."""
    scheduler = LoadAdaptiveScheduler()
    load = Load(1, 0, 0, [9], draft_length=8)
    for found in (1, 8, 8, 8, 8, 8):
        limit = scheduler.draft_limit(load)
        assert limit is not None
        num = min(found, limit)
        scheduler.choose(Draft(torch.zeros(1, num, dtype=torch.int64), [num]), load)
        scheduler.observe(Outcome([[0] * (num + 1)], [num], [None], [False]), [num], 1.0 + 0.001 * num)
    assert scheduler.draft_limit(load) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, r"scheduler\.window=0: must be a whole number >= 1"),
        ({"probe_every": 1}, r"scheduler\.probe_every=1: must be a whole number >= 2"),
        ({"memory": 1.0}, r"scheduler\.memory=1\.0: must lie between 0 and 1"),
        ({"limits": {"luck": 1}}, r"scheduler\.limits\.luck: no such signal; allowed: utilisation, memory"),
        ({"limits": {"kv": 0}}, r"scheduler\.limits\.kv=0: must be a number above 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadAdaptiveScheduler(**settings)

"""The phase clock on time that passes by hand."""

from __future__ import annotations

import pytest
import torch

from dispark.measure import timing
from dispark.measure.timing import PHASES, PhaseClock


class HandTime:
    """Replaces the module's `time`."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.reading_s = 0.0  # what a reading itself takes

    def perf_counter(self) -> float:
        self.now_s += self.reading_s
        return self.now_s


@pytest.fixture
def hand_time(monkeypatch: pytest.MonkeyPatch) -> HandTime:
    hand = HandTime()
    monkeypatch.setattr(timing, "time", hand)
    return hand


def run_step(clock: PhaseClock, hand: HandTime, *spent: tuple[str, float]) -> dict[str, float]:
    """Spends seconds and marks their phase; the empty phase is time that nothing claims."""
    clock.start()
    for phase, seconds in spent:
        hand.now_s += seconds
        if phase:
            clock.mark(phase)
    return clock.stop()


def test_phases_host_time_and_wall_time(hand_time: HandTime) -> None:
    clock = PhaseClock(torch.device("cpu"))
    seconds = run_step(
        clock,
        hand_time,
        ("draft", 1.0),
        ("schedule", 0.25),
        ("verify", 4.0),
        ("accept", 0.5),
        ("commit", 0.125),
        ("", 2.0),
    )
    assert seconds == {
        "draft_s": 1.0,
        "schedule_s": 0.25,
        "verify_s": 4.0,
        "accept_s": 0.5,
        "commit_s": 0.125,
        "host_s": 2.0,
        "wall_s": 7.875,
    }


def test_a_phase_that_comes_twice_adds_up_and_others_are_zero(hand_time: HandTime) -> None:
    seconds = run_step(PhaseClock(torch.device("cpu")), hand_time, ("verify", 1.0), ("draft", 2.0), ("verify", 4.0))
    assert (seconds["verify_s"], seconds["draft_s"], seconds["commit_s"], seconds["host_s"]) == (5.0, 2.0, 0.0, 0.0)
    assert set(seconds) == {f"{phase}_s" for phase in PHASES} | {"host_s", "wall_s"}


def test_time_under_another_name_is_host_time(hand_time: HandTime) -> None:
    seconds = run_step(PhaseClock(torch.device("cpu")), hand_time, ("coffee", 3.0), ("draft", 1.0))
    assert (seconds["host_s"], seconds["draft_s"], seconds["wall_s"]) == (3.0, 1.0, 4.0)


def test_every_step_begins_at_zero(hand_time: HandTime) -> None:
    clock = PhaseClock(torch.device("cpu"))
    run_step(clock, hand_time, ("draft", 1.0))
    hand_time.now_s += 100.0
    assert run_step(clock, hand_time, ("verify", 2.0)) == dict.fromkeys(
        ("draft_s", "schedule_s", "accept_s", "commit_s", "host_s"), 0.0
    ) | {"verify_s": 2.0, "wall_s": 2.0}
    assert run_step(clock, hand_time)["wall_s"] == 0.0


def test_an_interruption_at_the_start_of_a_step_is_in_its_wall_time(hand_time: HandTime) -> None:
    hand_time.reading_s = 1.0
    seconds = run_step(PhaseClock(torch.device("cpu")), hand_time, ("draft", 2.0), ("verify", 4.0))
    assert (seconds["draft_s"], seconds["verify_s"], seconds["host_s"], seconds["wall_s"]) == (3.0, 5.0, 1.0, 9.0)


def test_on_the_real_clock_the_parts_make_up_the_wall() -> None:
    clock = PhaseClock(torch.device("cpu"))
    clock.start()
    for phase in PHASES:
        torch.ones(1000).sum()
        clock.mark(phase)
    seconds = clock.stop()
    wall_s = seconds.pop("wall_s")
    assert all(part >= 0.0 for part in seconds.values())
    assert sum(seconds.values()) == pytest.approx(wall_s, rel=1e-6, abs=1e-9)

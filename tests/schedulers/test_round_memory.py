"""What a memory of rounds concludes."""

from __future__ import annotations

from dispark.schedulers.round_memory import RoundMemory


def run(memory: RoundMemory, num: int, with_s: float, without_s: float, gain: float, rows: int = 4) -> list[bool]:
    """Rounds as the memory wants them: drafts take longer and emit more."""
    found = []
    for _ in range(num):
        drafts = memory.should_draft(rows)
        tokens, seconds = (round(rows * gain), with_s) if drafts else (rows, without_s)
        memory.observe(rows, tokens, seconds, estimate_s=0.75 * seconds, has_drafts=drafts)
        found.append(drafts)
    return found


def test_drafts_that_pay_are_kept_and_those_that_do_not_are_left_out() -> None:
    pays = run(RoundMemory(), 200, with_s=1.5, without_s=1.0, gain=2.0)
    assert 0.93 < sum(pays) / len(pays) < 1.0
    costs = run(RoundMemory(), 200, with_s=2.5, without_s=1.0, gain=2.0)
    assert sum(costs[20:]) / len(costs[20:]) < 0.05
    assert any(costs[40:])  # it goes on trying


def test_it_follows_a_change() -> None:
    memory = RoundMemory()
    run(memory, 100, with_s=2.5, without_s=1.0, gain=2.0)
    later = run(memory, 2000, with_s=1.2, without_s=1.0, gain=2.0)
    assert sum(later[-200:]) > 180


def test_numbers_of_rows_are_kept_apart() -> None:
    memory = RoundMemory()
    run(memory, 100, with_s=1.2, without_s=1.0, gain=2.0, rows=1)
    run(memory, 100, with_s=9.0, without_s=1.0, gain=2.0, rows=64)
    assert sum(run(memory, 30, 1.2, 1.0, 2.0, rows=1)) > 25
    assert sum(run(memory, 30, 9.0, 1.0, 2.0, rows=64)) < 5


def test_what_rounds_take_beyond_their_verify() -> None:
    memory = RoundMemory()
    assert memory.beyond_s(4) == 0.0
    memory.observe(4, 8, 1.0, estimate_s=0.75, has_drafts=True)
    assert memory.beyond_s(4) == 0.25
    memory.observe(4, 8, 0.5, estimate_s=0.75, has_drafts=True)  # never less than nothing
    assert 0.0 < memory.beyond_s(5) < 0.25
    assert memory.beyond_s(64) == 0.0

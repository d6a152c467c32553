"""The cache against a dict of lists: rows come, grow, roll back and go in any order, and keep what is theirs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dispark.decoding.ragged_cache import RaggedCache

ROWS, SLOTS, HEADS, WIDTH = 4, 9, 2, 3
NAMES = (0, 1, 2, 3, 7)


def write_tokens(cache: RaggedCache, row: int, values: list[float], layer: int = 0) -> None:
    """Writes one token per value after the row's kept ones; head h, lane w hold value + h / 10 + w / 100."""
    num = len(values)
    lane = torch.arange(HEADS).view(HEADS, 1, 1) / 10 + torch.arange(WIDTH) / 100
    keys = torch.tensor(values).view(1, num, 1) + lane
    start = cache.length(row)
    index = [
        (cache.place(row) * HEADS + head) * cache.num_slots + start + step
        for head in range(HEADS)
        for step in range(num)
    ]
    cache.write(layer, torch.tensor(index), keys, -keys)


def read_tokens(cache: RaggedCache, row: int, layer: int = 0) -> list[float]:
    """The kept tokens' values, after checking that all heads, lanes and values agree on them."""
    keys, values = cache.write(
        layer, torch.zeros(0, dtype=torch.int64), torch.zeros(HEADS, 0, WIDTH), torch.zeros(HEADS, 0, WIDTH)
    )
    kept = keys[cache.place(row), :, : cache.length(row)]
    assert torch.equal(values[cache.place(row), :, : cache.length(row)], -kept)
    lane = torch.arange(HEADS).view(HEADS, 1, 1) / 10 + torch.arange(WIDTH) / 100
    plain = (kept - lane).round(decimals=3)
    assert bool((plain == plain[:1, :, :1]).all())
    return plain[0, :, 0].tolist()


class Fuzz(RuleBasedStateMachine):
    """`truth` holds what each active row has to contain, for two layers that share the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RaggedCache(ROWS, SLOTS)
        self.truth: dict[int, list[float]] = {}
        self.next_value = 1

    @precondition(lambda self: len(self.truth) < ROWS)
    @rule(name=st.sampled_from(NAMES))
    def admit(self, name: int) -> None:
        if name in self.truth:
            with pytest.raises(ValueError, match="active already"):
                self.cache.admit(name)
            return
        self.cache.admit(name)
        self.truth[name] = []

    @precondition(lambda self: len(self.truth) == ROWS)
    @rule()
    def admit_when_full(self) -> None:
        with pytest.raises(ValueError, match="all 4 rows are taken"):
            self.cache.admit(99)

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.truth)))
        room = SLOTS - len(self.truth[row])
        num = data.draw(st.integers(0, room))
        kept = data.draw(st.integers(0, num))
        values = [float(self.next_value + i) for i in range(num)]
        self.next_value += num
        self.cache.check_room([row], [num])
        with pytest.raises(ValueError, match=f"row {row}: .* exceed {SLOTS} cache slots"):
            self.cache.check_room([row], [room + 1])
        if num:
            write_tokens(self.cache, row, values, layer=0)
            write_tokens(self.cache, row, values, layer=5)
        self.cache.set_length(row, len(self.truth[row]) + kept)
        self.truth[row] += values[:kept]

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.truth)))
        length = data.draw(st.integers(0, len(self.truth[row])))
        self.cache.set_length(row, length)
        del self.truth[row][length:]

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.truth)))
        self.cache.drop(row)
        del self.truth[row]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.truth.clear()

    @invariant()
    def rows_are_packed_and_hold_their_tokens(self) -> None:
        assert sorted(self.cache.rows) == sorted(self.truth)
        assert [self.cache.place(row) for row in self.cache.rows] == list(range(len(self.truth)))
        for row, values in self.truth.items():
            assert self.cache.length(row) == len(values)
            if values:
                assert read_tokens(self.cache, row, 0) == values
                assert read_tokens(self.cache, row, 5) == values


Fuzz.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestFuzz = Fuzz.TestCase


def test_dropping_moves_the_last_row_into_the_hole() -> None:
    cache = RaggedCache(3, 4)
    for row, value in ((5, 1.0), (6, 2.0), (7, 3.0)):
        cache.admit(row)
        write_tokens(cache, row, [value, value + 0.5])
        cache.set_length(row, 2)
    cache.drop(5)
    assert cache.rows == [7, 6]
    assert read_tokens(cache, 7) == [3.0, 3.5]
    assert read_tokens(cache, 6) == [2.0, 2.5]
    cache.admit(5)
    assert (cache.place(5), cache.length(5)) == (2, 0)


def test_memory_is_kept_over_clear_and_counted() -> None:
    cache = RaggedCache(2, 4)
    assert cache.bytes_per_slot() == 0
    cache.admit(0)
    write_tokens(cache, 0, [1.0])
    assert cache.bytes_per_slot() == 2 * HEADS * WIDTH * 4
    cache.clear()
    assert cache.rows == []
    assert cache.bytes_per_slot() == 2 * HEADS * WIDTH * 4


def test_layers_have_their_own_heads_and_widths() -> None:
    cache = RaggedCache(2, 4)
    keys, values = cache.write(3, torch.tensor([0]), torch.ones(1, 1, 8), torch.ones(1, 1, 5))
    assert (keys.shape, values.shape) == ((3, 1, 4, 8), (3, 1, 4, 5))
    assert cache.spare_place == 2
    assert float(keys.sum()) == 8.0  # all that was not written is zero


@pytest.mark.parametrize(("num_rows", "num_slots"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_below_one_are_refused(num_rows: int, num_slots: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RaggedCache(num_rows, num_slots)


def test_lengths_beyond_the_slots_are_our_own_mistake() -> None:
    cache = RaggedCache(1, 4)
    cache.admit(0)
    with pytest.raises(AssertionError):
        cache.set_length(0, 5)
    with pytest.raises(KeyError):
        cache.length(1)

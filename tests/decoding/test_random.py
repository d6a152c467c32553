"""The counter-based generator against published vectors and a slow one, and the promises made about its streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dispark.decoding.random import PURPOSES, RowGenerators, philox4x32

CPU = torch.device("cpu")
MASK = 0xFFFFFFFF


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in whole numbers, after the paper's figure."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right & MASK, (left >> 32) ^ c[3] ^ k[1], left & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


def uniform(seeds: list[int], rounds: list[int], purpose: str, num: int) -> np.ndarray:
    return RowGenerators(seeds, rounds, CPU).uniform(purpose, num).numpy()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    assert philox4x32(words(counter), words(key)).tolist() == words(expected).tolist()


@given(
    st.lists(st.integers(0, MASK), min_size=4, max_size=4),
    st.lists(st.integers(0, MASK), min_size=2, max_size=2),
)
def test_equals_the_slow_generator(counter: list[int], key: list[int]) -> None:
    fast = philox4x32(np.array(counter, dtype=np.uint32), np.array(key, dtype=np.uint32))
    assert fast.tolist() == slow_philox(counter, key)


def test_many_counters_under_one_key() -> None:
    counters = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    key = np.array([7, 9], dtype=np.uint32)
    expected = [[slow_philox(row, [7, 9]) for row in block] for block in counters.tolist()]
    assert philox4x32(counters, key).tolist() == expected


@given(
    st.integers(0, 2**64 - 1), st.integers(0, MASK), st.sampled_from(PURPOSES), st.integers(0, 9), st.integers(0, 40)
)
@settings(max_examples=60)
def test_a_draw_is_a_function_of_seed_purpose_round_and_index(
    seed: int, number: int, purpose: str, index: int, extra: int
) -> None:
    drawn = uniform([5, seed, 6], [1, number, 2], purpose, index + 1 + extra)[1, index]
    block = slow_philox([index // 2, PURPOSES.index(purpose), number, 0], [seed & MASK, seed >> 32])
    high, low = block[2 * (index % 2)], block[2 * (index % 2) + 1]
    assert drawn == ((high >> 5) * 2**26 + (low >> 6)) / 2**53


@pytest.mark.parametrize("purpose", PURPOSES)
def test_uniform_over_the_unit_interval(purpose: str) -> None:
    drawn = uniform(list(range(3000)), [1] * 3000, purpose, 7)
    assert drawn.dtype == np.float64
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > 1e-3
    assert stats.kstest(drawn[:, 6], "uniform").pvalue > 1e-3
    # The lowest of the 53 bits is used too.
    assert ((drawn.ravel() * 2**53) % 2).mean() == pytest.approx(0.5, abs=0.02)


def test_streams_are_independent() -> None:
    num = 4000
    seeds = list(range(num))
    columns = {purpose: uniform(seeds, [1] * num, purpose, 3) for purpose in PURPOSES}
    streams = [column for drawn in columns.values() for column in drawn.T]
    streams += list(uniform(seeds, [2] * num, "accept", 2).T)  # the next round
    streams += list(uniform([seed + 2**32 for seed in seeds], [1] * num, "accept", 2).T)  # the seed's upper half
    correlation = np.corrcoef(np.stack(streams)) - np.eye(len(streams))
    assert np.abs(correlation).max() < 5 / np.sqrt(num)
    assert len({stream[0] for stream in streams}) == len(streams)


def test_rounds_of_one_seed_are_uniform_and_uncorrelated() -> None:
    drawn = uniform([11] * 4000, list(range(4000)), "draft", 1)[:, 0]
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / np.sqrt(4000)


def test_the_batch_does_not_matter() -> None:
    alone = uniform([42], [3], "accept", 5)
    assert uniform([1, 42, 9], [8, 3, 3], "accept", 5)[1].tolist() == alone[0].tolist()
    assert uniform([42, 1], [3, 3], "accept", 5)[0].tolist() == alone[0].tolist()


def test_asking_for_more_starts_with_the_same_numbers() -> None:
    generators = RowGenerators([3, 4], [1, 1], CPU)
    longest = generators.uniform("draft", 9)
    for num in range(9):
        assert torch.equal(generators.uniform("draft", num), longest[:, :num])
    assert torch.equal(generators.uniform("draft", 9), longest)


def test_edges() -> None:
    assert uniform([1, 2], [1, 1], "first", 0).shape == (2, 0)
    assert uniform([], [], "first", 3).shape == (0, 3)
    assert uniform([2**64 - 1], [2**32 - 1], "first", 1).shape == (1, 1)
    with pytest.raises(ValueError, match="tuple"):
        uniform([1], [1], "no such purpose", 1)
    with pytest.raises(OverflowError):
        uniform([-1], [1], "first", 1)


def test_the_global_generators_are_left_alone() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    before = torch.get_rng_state().clone(), np.random.get_state(legacy=False)
    uniform([1, 2], [1, 1], "accept", 8)
    assert torch.equal(torch.get_rng_state(), before[0])
    after = np.random.get_state(legacy=False)
    assert str(after) == str(before[1])


def test_some_rows_draws_are_their_own() -> None:
    whole = RowGenerators([3, 5, 8], [1, 2, 3], torch.device("cpu"))
    assert torch.equal(whole.part([2, 0]).uniform("draft", 3), whole.uniform("draft", 3)[[2, 0]])

"""Loops are found, text is not called one, and only the pattern of equal ids matters."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispark.measure.degeneracy import (
    MAX_PERIOD,
    MIN_LOOP_TOKENS,
    MIN_OUTPUT_TOKENS,
    MIN_REPEATS,
    check,
    summarise,
)

PROSE = list(range(1000, 1000 + MIN_OUTPUT_TOKENS))  # no token twice


def words(seed: int, num_tokens: int, vocabulary: int) -> list[int]:
    return [random.Random(f"{seed}-{i}").randrange(vocabulary) for i in range(num_tokens)]


def test_a_loop_at_the_end():
    result = check(PROSE + [1, 2, 3] * 20)
    assert result.is_degenerate is True
    assert result.cause == "loop"
    assert result.trailing_period == 3
    assert result.num_loop_tokens == 60
    assert result.loop_share == result.trailing_loop_share == pytest.approx(60 / 124)


def test_a_stop_token_behind_the_loop_does_not_hide_it():
    result = check([*PROSE, *[1, 2, 3] * 20, 0])
    assert result.is_degenerate is True
    assert result.num_loop_tokens == 60
    assert result.trailing_period is None
    assert result.trailing_loop_share == 0.0


def test_two_loops_with_text_between_both_count():
    result = check([5] * 20 + PROSE + [1, 2] * 15)
    assert result.num_loop_tokens == 50
    assert result.trailing_period == 2
    assert result.trailing_loop_share == pytest.approx(30 / 114)


def test_unfinished_last_copy_belongs_to_the_loop():
    assert check(PROSE + [1, 2, 3, 4, 5] * 6 + [1, 2, 3]).num_loop_tokens == 33


def test_thresholds_of_a_loop():
    block = list(range(10))
    assert check(PROSE + block * MIN_REPEATS).num_loop_tokens == 10 * MIN_REPEATS
    assert check(PROSE + block * (MIN_REPEATS - 1)).num_loop_tokens == 0
    assert check(PROSE + [7] * MIN_LOOP_TOKENS).num_loop_tokens == MIN_LOOP_TOKENS
    assert check(PROSE + [7] * (MIN_LOOP_TOKENS - 1)).num_loop_tokens == 0
    longest = list(range(MAX_PERIOD))
    assert check(longest * MIN_REPEATS).trailing_period == MAX_PERIOD
    assert check(list(range(MAX_PERIOD + 1)) * MIN_REPEATS).num_loop_tokens == 0


def test_a_short_ruled_line_in_long_text_is_fine():
    assert check(list(range(300)) + [7] * 40 + list(range(400, 700))).is_degenerate is False


def test_near_loops_with_a_counter_are_caught():
    sentence = list(range(20))
    output = [token for i in range(20) for token in [*sentence, 5000 + i]]
    result = check(output)
    assert result.num_loop_tokens == 0
    assert result.cause == "near_loop"
    assert result.tail_distinct_4 < 0.3


def test_short_outputs_are_not_judged():
    assert check([1] * (MIN_OUTPUT_TOKENS - 1)).is_degenerate is None
    assert check([1] * (MIN_OUTPUT_TOKENS - 1)).cause is None
    assert check([1] * MIN_OUTPUT_TOKENS).is_degenerate is True


def test_empty_and_tiny_outputs():
    empty = check([])
    assert (empty.num_tokens, empty.loop_share, empty.trailing_loop_share) == (0, None, None)
    assert empty.distinct == (None,) * 4
    assert check([3]).distinct == (1.0, None, None, None)
    assert check([3, 3]).distinct == (0.5, 1.0, None, None)


def test_distinct_n_by_hand():
    assert check([1, 2, 1, 2, 1]).distinct == (2 / 5, 2 / 4, 2 / 3, 2 / 2)


@pytest.mark.parametrize("bad", [[[1, 2], [3, 4]], [[1], [2, 3]], [1.5, 2.0], ["a"], np.ones((2, 2), dtype=int)])
def test_bad_input_is_one_line(bad):
    with pytest.raises(ValueError, match=r"^output_ids: must be a flat sequence of whole numbers") as caught:
        check(bad)
    assert "\n" not in str(caught.value)


def test_arrays_tuples_and_huge_ids():
    output = [2**62, 5] * 40
    assert check(output) == check(tuple(output)) == check(np.array(output))
    assert check(np.array(output, dtype=np.uint64)) == check(output)


def test_ten_thousand_tokens_take_milliseconds():
    output = np.random.default_rng(0).integers(0, 50_000, 7_000).tolist() + list(range(100)) * 30
    check(output)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        check(output)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.1


@settings(max_examples=60, deadline=None)
@given(
    prefix=st.lists(st.integers(0, 500), max_size=120),
    block=st.lists(st.integers(0, 500), min_size=1, max_size=40),
    num_copies=st.integers(MIN_REPEATS, 60),
)
def test_an_appended_repeated_block_is_caught(prefix, block, num_copies):
    output = prefix + block * num_copies
    num_repeated = len(block) * num_copies
    result = check(output)
    if num_repeated < MIN_LOOP_TOKENS:
        return
    assert result.num_loop_tokens >= num_repeated
    assert result.trailing_loop_share >= num_repeated / len(output)
    assert result.trailing_period <= len(block)
    if len(output) >= MIN_OUTPUT_TOKENS and num_repeated >= 0.25 * len(output):
        assert result.cause == "loop"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_tokens=st.integers(MIN_OUTPUT_TOKENS, 600), vocabulary=st.integers(30, 50_000))
def test_random_text_is_not_degenerate(seed, num_tokens, vocabulary):
    result = check(words(seed, num_tokens, vocabulary))
    assert result.is_degenerate is False
    assert result.num_loop_tokens == 0


@settings(max_examples=60, deadline=None)
@given(output=st.lists(st.integers(0, 4), max_size=200), seed=st.integers(0, 10**6))
def test_only_the_pattern_of_equal_ids_matters(output, seed):
    renamed = random.Random(seed).sample(range(100_000), 5)
    assert check([renamed[token] for token in output]) == check(output)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=80))
def test_counts_match_a_plain_search(output):
    num_tokens, marked = len(output), set()
    for period in range(1, num_tokens // MIN_REPEATS + 1):
        for start in range(num_tokens):
            end = start + period
            while end < num_tokens and output[end] == output[end - period]:
                end += 1
            if end - start >= max(MIN_REPEATS * period, MIN_LOOP_TOKENS) and end <= num_tokens:
                marked.update(range(start, end))
    result = check(output)
    assert result.num_loop_tokens == len(marked)
    for n, ratio in enumerate(result.distinct, start=1):
        grams = [tuple(output[i : i + n]) for i in range(num_tokens - n + 1)]
        assert ratio == (len(set(grams)) / len(grams) if grams else None)


def test_summary_counts_judged_outputs_only():
    looping, healthy, short = [1, 2] * 50, list(range(100)), [1] * 10
    summary = summarise([looping, healthy, short])
    assert (summary.num_outputs, summary.num_judged, summary.num_degenerate) == (3, 2, 1)
    assert summary.degenerate_share == 0.5
    assert summary.loop_token_share == pytest.approx(0.5)
    assert summary.distinct[0] == pytest.approx((0.02 + 1.0) / 2)


def test_summary_pools_tokens_not_texts():
    assert summarise([[1] * 100, list(range(300))]).loop_token_share == pytest.approx(0.25)


@pytest.mark.parametrize("outputs", [[], [[1, 1, 1]], iter([])])
def test_summary_of_nothing_judged_is_none(outputs):
    summary = summarise(outputs)
    assert (summary.num_judged, summary.degenerate_share, summary.loop_token_share) == (0, None, None)
    assert summary.distinct == (None,) * 4

"""The bootstrap against SciPy's, its coverage, and what it says where there is nothing to say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispark.measure.stats import (
    Estimate,
    PromptSums,
    _draw_counts,
    bootstrap,
    geometric_mean,
    is_distinguishable,
    mean_over_tasks,
    quotient,
    ratio_of_ratios,
    ratio_of_sums,
    resample_sums,
)


def _prompts(num_prompts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rounds and emitted tokens of prompts that differ in length and in how easy they are."""
    generator = np.random.default_rng(seed)
    rounds = generator.integers(5, 60, num_prompts).astype(float)
    ease = generator.normal(2.5, 0.4, num_prompts)
    return rounds * ease, rounds


def test_resample_sums_draws_whole_prompts() -> None:
    values = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    sums = resample_sums(values, num_draws=500, seed=3)
    assert sums.shape == (500, 2)
    np.testing.assert_allclose(sums[:, 1], 10.0 * sums[:, 0])
    possible = {a + b + c for a in (1, 2, 4) for b in (1, 2, 4) for c in (1, 2, 4)}
    assert set(sums[:, 0]) <= possible
    assert len(set(sums[:, 0])) > 5
    np.testing.assert_allclose(sums[:, 0].mean(), 7.0, atol=0.3)


def test_resample_sums_is_seeded_and_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random((17, 3))
    whole = resample_sums(values, num_draws=200, seed=5)
    np.testing.assert_array_equal(whole, resample_sums(values, num_draws=200, seed=5))
    assert not np.array_equal(whole, resample_sums(values, num_draws=200, seed=6))
    monkeypatch.setattr("dispark.measure.stats._CHUNK_CELLS", 17 * 7)
    monkeypatch.setattr("dispark.measure.stats._draw_counts", _draw_counts.__wrapped__)
    np.testing.assert_allclose(whole, resample_sums(values, num_draws=200, seed=5))


@pytest.mark.parametrize("num_prompts", [8, 80])
def test_ratio_of_sums_agrees_with_scipy(num_prompts: int) -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    emitted, rounds = _prompts(num_prompts, seed=1)
    ours = ratio_of_sums(emitted, rounds, seed=0)
    theirs = scipy_stats.bootstrap(
        (emitted, rounds),
        lambda top, bottom, axis: top.sum(axis=axis) / bottom.sum(axis=axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(9),
    ).confidence_interval
    assert ours.value == pytest.approx(emitted.sum() / rounds.sum())
    width = theirs.high - theirs.low
    assert ours.low == pytest.approx(theirs.low, abs=0.05 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.05 * width)


def test_ratio_of_ratios_agrees_with_scipy() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(4)
    tokens = generator.integers(20, 200, 40).astype(float)
    slow = tokens * generator.normal(0.05, 0.002, 40)
    fast = slow / generator.normal(2.0, 0.3, 40)
    ours = ratio_of_ratios(tokens, fast, tokens, slow, seed=0)
    theirs = scipy_stats.bootstrap(
        (tokens, fast, slow),
        lambda t, f, s, axis: (t.sum(axis) / f.sum(axis)) / (t.sum(axis) / s.sum(axis)),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        rng=np.random.default_rng(2),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.value == pytest.approx(slow.sum() / fast.sum())
    assert ours.low == pytest.approx(theirs.low, abs=0.05 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.05 * width)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    hits = 0
    for trial in range(200):
        emitted, rounds = _prompts(40, seed=1000 + trial)
        estimate = ratio_of_sums(emitted, rounds, num_draws=600, seed=trial)
        assert estimate.low is not None
        assert estimate.high is not None
        hits += estimate.low <= 2.5 <= estimate.high
    assert 0.88 <= hits / 200 <= 0.99


def test_pairing_by_prompt_narrows_a_speedup() -> None:
    """Both arms slow down on the same prompts; redrawn together, that cancels."""
    generator = np.random.default_rng(0)
    tokens = np.full(50, 100.0)
    slow = generator.uniform(1.0, 9.0, 50)
    fast = slow / 2.0
    paired = ratio_of_ratios(tokens, fast, tokens, slow)
    assert paired.value == pytest.approx(2.0)
    assert paired.interval == pytest.approx([2.0, 2.0])
    mixed = ratio_of_ratios(tokens, generator.permutation(fast), tokens, slow)
    assert mixed.interval is not None
    assert mixed.interval[1] - mixed.interval[0] > 0.1


def test_one_prompt_has_a_value_and_no_interval() -> None:
    estimate = ratio_of_sums([6.0], [3.0])
    assert estimate == Estimate(2.0, reason="one prompt: nothing to redraw")
    assert estimate.interval is None
    assert is_distinguishable(estimate) is None


def test_no_prompts_zero_denominators_and_missing_values_have_no_figure() -> None:
    assert ratio_of_sums([], []) == Estimate(None, reason="there are no prompts")
    assert ratio_of_sums([0.0, 0.0], [0.0, 0.0]) == Estimate(None, reason="the denominator is zero")
    assert ratio_of_sums([1.0, 2.0], [0.0, 0.0]) == Estimate(None, reason="the denominator is zero")
    assert ratio_of_sums([1.0, float("nan")], [1.0, 1.0]) == Estimate(None, reason="a prompt has no measured value")


def test_interval_is_refused_where_many_draws_are_undefined() -> None:
    estimate = ratio_of_sums([0.0, 3.0], [0.0, 1.0], seed=0)
    assert estimate.value == 3.0
    assert estimate.interval is None
    assert estimate.reason is not None
    assert "25%" in estimate.reason or "24%" in estimate.reason or "26%" in estimate.reason


def test_level_changes_the_width() -> None:
    emitted, rounds = _prompts(30, seed=0)
    wide = ratio_of_sums(emitted, rounds, level=0.95).interval
    narrow = ratio_of_sums(emitted, rounds, level=0.5).interval
    assert wide is not None
    assert narrow is not None
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_bootstrap_takes_any_statistic_of_sums() -> None:
    values = np.random.default_rng(1).random((30, 1))
    estimate = bootstrap(values, lambda sums: sums[:, 0] / 30.0, seed=0)
    assert estimate.value == pytest.approx(values.mean())
    error = values.std() / math.sqrt(30)
    assert estimate.low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error + 0.01)
    assert estimate.high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error + 0.01)


def _tasks(*sizes: int, seed: int = 0) -> list[PromptSums]:
    return [PromptSums(np.stack(_prompts(size, seed + i), axis=1), quotient) for i, size in enumerate(sizes)]


def test_mean_over_tasks_counts_each_task_once() -> None:
    tasks = _tasks(12, 80)
    values = [task.estimate().value for task in tasks]
    assert mean_over_tasks(tasks).value == pytest.approx(np.mean(values))
    assert mean_over_tasks(tasks, is_geometric=True).value == pytest.approx(geometric_mean(values))
    for is_geometric in (False, True):
        estimate = mean_over_tasks(tasks, is_geometric=is_geometric)
        assert estimate.low < estimate.value < estimate.high
        assert estimate == mean_over_tasks(tasks, is_geometric=is_geometric)


def test_tasks_of_one_size_are_redrawn_on_their_own() -> None:
    """Shared draws would leave the interval of a mean of equal tasks as wide as that of one."""
    task = _tasks(40)[0]
    single, four = task.estimate(), mean_over_tasks([task] * 4)
    assert (four.high - four.low) / (single.high - single.low) == pytest.approx(0.5, abs=0.05)


def test_intervals_of_macro_means_cover_the_truth_about_as_often_as_they_say() -> None:
    hits = 0
    for seed in range(120):
        estimate = mean_over_tasks(_tasks(30, 30, 60, seed=10 * seed), num_draws=500, seed=seed)
        hits += estimate.low <= 2.5 <= estimate.high
    assert 106 <= hits <= 120


def test_a_macro_mean_lacks_what_a_task_lacks() -> None:
    tasks = _tasks(12, 80)
    nothing = PromptSums(np.zeros((0, 2)), quotient)
    single = PromptSums(np.array([[4.0, 2.0]]), quotient)
    assert mean_over_tasks([]) == Estimate(None, reason="there are no tasks")
    assert mean_over_tasks([*tasks, nothing]) == Estimate(None, reason="there are no prompts")
    estimate = mean_over_tasks([single, *tasks])
    assert estimate.value is not None
    assert (estimate.interval, estimate.reason) == (None, "one prompt: nothing to redraw")


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1.1, 1.3, True), (0.7, 0.9, True), (0.9, 1.1, False), (1.0, 1.2, False)]
)
def test_is_distinguishable_asks_whether_the_interval_excludes_one(low: float, high: float, expected: bool) -> None:
    assert is_distinguishable(Estimate(1.0, low, high)) is expected


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([3.0]) == pytest.approx(3.0)
    assert geometric_mean([]) is None
    assert geometric_mean([2.0, None]) is None
    assert geometric_mean([2.0, 0.0]) is None
    assert geometric_mean([2.0, float("nan")]) is None
    assert geometric_mean([2.0, float("inf")]) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=2, max_size=12), st.floats(0.5, 20.0))
def test_interval_holds_no_more_than_the_prompts_do_and_scales(pairs: list[tuple[int, int]], scale: float) -> None:
    top, bottom = np.array(pairs, dtype=float).T
    estimate = ratio_of_sums(top, bottom, num_draws=200)
    assert estimate.interval is not None
    ratios = top / bottom
    assert ratios.min() - 1e-9 <= estimate.interval[0] <= estimate.interval[1] <= ratios.max() + 1e-9
    scaled = ratio_of_sums(scale * top, bottom, num_draws=200)
    assert scaled.interval == pytest.approx([scale * end for end in estimate.interval])

"""Acceptance rates by position: by hand, against the closed form, and what cut rounds do to them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispark.measure.acceptance import (
    acceptance_at,
    conditional_acceptance_at,
    expected_acceptance_at,
    expected_matl,
    is_cut,
    is_stop_cut,
    observed_lengths,
)

RATES = (0.9, 0.8, 0.7, 0.6)


def make_rounds(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    """Rows of (num_verified, num_accepted_raw, num_accepted, num_emitted, end)."""
    columns = ["num_verified", "num_accepted_raw", "num_accepted", "num_emitted", "end"]
    return pd.DataFrame(rows, columns=columns)


HAND = make_rounds(
    [
        (3, 3, 3, 4, None),
        (2, 1, 1, 2, None),
        (0, 0, 0, 1, "stop"),  # the one token of this round is the stop token: nothing was cut
        (3, 0, 0, 1, None),
        (3, 3, 2, 2, "stop"),  # the second accepted draft is a stop token
        (2, 2, 2, 2, "length"),  # the bonus token fell behind the cap
    ]
)


def test_cut_rounds_are_told_from_whole_ones() -> None:
    assert is_cut(HAND).tolist() == [False, False, False, False, True, True]
    assert is_stop_cut(HAND).tolist() == [False, False, False, False, True, False]


def test_a_stop_cut_hides_what_is_behind_it_and_a_cap_does_not() -> None:
    verified, accepted = observed_lengths(HAND)
    assert verified.tolist() == [3, 2, 0, 3, 2, 2]
    assert accepted.tolist() == [3, 1, 0, 0, 2, 2]
    capped = make_rounds([(4, 4, 1, 1, "length"), (4, 4, 1, 1, "context"), (4, 4, 1, 1, "stop_string")])
    verified, accepted = observed_lengths(capped)
    assert verified.tolist() == [4, 4, 1]
    assert accepted.tolist() == [4, 4, 1]


def test_rates_by_hand() -> None:
    assert acceptance_at(HAND, 4) == [4 / 5, 3 / 5, 1 / 2, None]
    assert conditional_acceptance_at(HAND, 4) == [4 / 5, 3 / 4, 1.0, None]


def test_no_rounds_and_no_positions() -> None:
    assert acceptance_at(HAND.iloc[:0], 2) == [None, None]
    assert conditional_acceptance_at(HAND.iloc[:0], 2) == [None, None]
    assert acceptance_at(HAND, 0) == []


def test_closed_form() -> None:
    assert expected_acceptance_at(RATES) == pytest.approx([0.9, 0.72, 0.504, 0.3024])
    assert expected_matl(RATES) == pytest.approx(1 + 0.9 + 0.72 + 0.504 + 0.3024)
    assert expected_matl([]) == 1.0
    assert expected_matl([1.0] * 5) == 6.0
    assert expected_matl([0.0, 1.0]) == 1.0
    # Equal rates: the geometric sum of Leviathan et al. 2023, equation 1.
    assert expected_matl([0.8] * 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def simulate(num_requests: int, cap: int, stop_rate: float, seed: int) -> pd.DataFrame:
    """Requests of `cap` tokens whose drafts are accepted by RATES and are a stop token by stop_rate."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(num_requests):
        left, end = cap, None
        while end is None:
            hits = generator.random(len(RATES)) < RATES
            raw = int(np.cumprod(hits).sum())
            stops = np.flatnonzero(generator.random(raw + 1) < stop_rate)
            length = raw + 1
            if stops.size:
                length, end = int(stops[0]) + 1, "stop"
            if length >= left:
                end = "length" if length > left or end is None else end
                length = left
            left -= length
            rows.append((len(RATES), raw, min(raw, length), length, end))
    return make_rounds(rows)


def test_rates_of_simulated_rounds_meet_the_closed_form_despite_caps() -> None:
    rounds = simulate(num_requests=3000, cap=9, stop_rate=0.0, seed=0)
    assert is_cut(rounds).mean() > 0.15
    assert acceptance_at(rounds, 4) == pytest.approx(expected_acceptance_at(RATES), abs=0.015)
    assert conditional_acceptance_at(rounds, 4) == pytest.approx(RATES, abs=0.02)
    # Had the cut rounds been observed up to the cut only, survival of deep positions would come out low.
    kept = rounds.assign(num_accepted_raw=rounds["num_accepted"])
    assert acceptance_at(kept, 4)[3] < 0.27  # type: ignore[operator]


def test_conditional_rates_are_not_bent_by_stop_tokens() -> None:
    rounds = simulate(num_requests=4000, cap=1000, stop_rate=0.08, seed=1)
    assert is_stop_cut(rounds).mean() > 0.1
    assert conditional_acceptance_at(rounds, 4) == pytest.approx(RATES, abs=0.025)


counts = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=40)


@given(counts)
def test_rates_are_shares_and_agree_at_the_first_position(pairs: list[tuple[int, int]]) -> None:
    rounds = make_rounds([(v, min(a, v), min(a, v), min(a, v) + 1, None) for v, a in pairs])
    survival, conditional = acceptance_at(rounds, 5), conditional_acceptance_at(rounds, 5)
    assert survival[0] == conditional[0]
    assert all(rate is None or 0.0 <= rate <= 1.0 for rate in survival + conditional)
    assert [rate is None for rate in survival] == [max(v for v, _ in pairs) < k for k in range(1, 6)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_whole_rounds_that_verify_everything_have_survival_as_running_products(accepted: list[int]) -> None:
    rounds = make_rounds([(5, a, a, a + 1, None) for a in accepted])
    survival, conditional = acceptance_at(rounds, 5), conditional_acceptance_at(rounds, 5)
    assert all(later <= earlier for earlier, later in pairwise(survival))  # type: ignore[operator]
    known = [rate for rate in conditional if rate is not None]
    assert expected_acceptance_at(known) == pytest.approx(survival[: len(known)])
    assert all(rate == 0.0 for rate in survival[len(known) :])
    assert expected_matl(known) == pytest.approx(rounds["num_emitted"].mean())

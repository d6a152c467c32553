"""A drafter of known acceptance has the acceptance that it is told to have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.toolbox import decode_all, make_requests, open_tiny, outputs_of, varied_prompts
from scipy import stats

from baselines.autoregressive import AutoregressiveDrafter
from baselines.synthetic import SyntheticDrafter
from dispark.types import Sampling

RATES = (0.9, 0.8, 0.7, 0.6)


def test_acceptance_and_matl_follow_the_rates() -> None:
    target = open_tiny("tiny")
    trace = decode_all(target, SyntheticDrafter(RATES), make_requests(varied_prompts(64), 60), batch_size=64)
    uncut = [r for r in trace.rounds if r["end"] is None]
    assert len(uncut) > 800
    reached = len(uncut)
    for k, rate in enumerate(RATES):
        accepted = sum(r["num_accepted"] > k for r in uncut)
        interval = stats.binomtest(accepted, reached).proportion_ci(0.9999)
        assert interval.low <= rate <= interval.high, f"position {k + 1}: {accepted} of {reached}"
        assert interval.high - interval.low < 0.2
        reached = accepted
    emitted = torch.tensor([float(r["num_emitted"]) for r in uncut])
    expected = 1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7 + 0.9 * 0.8 * 0.7 * 0.6
    assert float(emitted.mean()) == pytest.approx(expected, abs=4 * float(emitted.std()) / len(uncut) ** 0.5)


@pytest.mark.parametrize(
    ("rates", "accepted"), [((1.0, 1.0, 0.0), 2), ((0.0, 1.0), 0), ((1.0,), 1), ((1, 1, 1, 1, 1), 5)]
)
def test_certain_rates_accept_exactly(rates: tuple[float, ...], accepted: int) -> None:
    target = open_tiny("tiny")
    requests = make_requests(varied_prompts(5), 30)
    trace = decode_all(target, SyntheticDrafter(rates), requests)
    assert {r["num_accepted"] for r in trace.rounds if r["end"] is None} == {accepted}
    assert outputs_of(trace) == outputs_of(decode_all(target, AutoregressiveDrafter(), requests))


def test_other_temperatures_are_refused() -> None:
    message = r"drafter=synthetic with sampling.temperature=0.5: it serves temperature 0 only"
    with pytest.raises(ValueError, match=message):
        decode_all(open_tiny("tiny"), SyntheticDrafter(RATES), make_requests([[1, 2]]), Sampling(0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": []}, r"drafter.rates=\[\]: must be a non-empty list"),
        ({"rates": [0.5, 1.1]}, r"drafter.rates=\[0.5, 1.1\]"),
        ({"rates": [-0.1]}, r"drafter.rates=\[-0.1\]"),
        ({"rates": [float("nan")]}, "drafter.rates="),
        ({"rates": [0.5], "draft_cost_s": -1.0}, "drafter.draft_cost_s=-1.0"),
        ({"rates": [0.5], "draft_cost_s": float("inf")}, "drafter.draft_cost_s=inf"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyntheticDrafter(**options)


def test_its_own_facts() -> None:
    drafter = SyntheticDrafter([1, 0.5], draft_cost_s=0.25)
    assert (drafter.draft_length, drafter.rates, drafter.draft_cost_s) == (2, (1.0, 0.5), 0.25)
    assert (drafter.proposal, drafter.feature_layers) == ("deterministic", ())

"""The summary of the run that is worked out by hand, its invariants, and simulated rounds against the closed form."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_run import Run, make_hand_run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dispark.measure.acceptance import expected_acceptance_at, expected_matl
from dispark.measure.metrics import energy_per_token, summarise
from dispark.measure.views import deepspec_view, vllm_view
from dispark.types import EnergyReading


@pytest.fixture
def hand_run() -> Run:
    return make_hand_run()


def summarise_hand(run: Run, arm: str = "ngram", **options: Any) -> dict[str, Any]:
    return summarise(run.rounds, run.steps, run.requests, arm=arm, draft_length=3 if arm == "ngram" else 0, **options)


def test_counts_and_matl_by_hand(hand_run: Run) -> None:
    summary = summarise_hand(hand_run)
    assert summary["num_prompts"] == summary["num_requests"] == 3
    assert summary["num_repeats"] == 1
    assert summary["num_output_tokens"] == 15
    assert summary["num_rounds"] == 6
    assert summary["num_drafted"] == 14
    assert summary["num_verified"] == 13
    assert summary["num_accepted"] == 8
    assert summary["num_emitted"] == 12
    assert summary["matl"] == pytest.approx(12 / 6)
    assert summary["matl_uncut"] == pytest.approx(15 / 6)
    assert summary["matl_macro"] == pytest.approx((7 / 3 + 3 / 2 + 2 / 1) / 3)
    assert summary["mean_accepted"] == pytest.approx(8 / 6)
    assert summary["mean_draft_length"] == pytest.approx(14 / 6)
    assert summary["mean_verify_length"] == pytest.approx(13 / 6)
    assert summary["wasted_verify_share"] == pytest.approx(5 / 13)
    assert summary["unverified_draft_share"] == pytest.approx(1 / 14)
    assert summary["truncated_share"] == pytest.approx(1 / 6)


def test_acceptance_by_hand(hand_run: Run) -> None:
    summary = summarise_hand(hand_run)
    assert summary["acceptance_at"] == pytest.approx([4 / 5, 3 / 5, 1 / 2])
    assert summary["conditional_acceptance_at"] == pytest.approx([4 / 5, 3 / 4, 1.0])
    for name in ("acceptance_at", "conditional_acceptance_at"):
        intervals = summary[f"{name}_ci"]
        assert len(intervals) == 3
        for rate, interval in zip(summary[name], intervals, strict=True):
            assert interval is None or interval[0] - 1e-9 <= rate <= interval[1] + 1e-9
    # Only one prompt accepted two drafts and had the third verified: nothing to redraw.
    assert summary["conditional_acceptance_at_ci"][2] is None


def test_speed_by_hand(hand_run: Run) -> None:
    summary = summarise_hand(hand_run)
    assert summary["throughput_tokens_per_s"] == pytest.approx(15 / 4.5)
    assert summary["decode_throughput_tokens_per_s"] == pytest.approx(4.0)
    assert summary["speedup"] == pytest.approx(5 / 3)
    assert summary["speedup_ci"][0] > 1.0
    assert summary["is_speedup_distinguishable"] is True
    assert summary["decode_speedup"] == pytest.approx(2.0)
    assert summary["speedup_vs_generate"] == pytest.approx(20 / 9)
    assert summary["speedup_vs"]["transformers.generate"]["speedup"] == summary["speedup_vs_generate"]
    assert summary["host_share"] == pytest.approx(0.2)
    assert summary["itl_s_p50"] == pytest.approx(0.25)


def test_splits_by_hand(hand_run: Run) -> None:
    summary = summarise_hand(hand_run)
    chat, code = summary["per_task"]
    assert (chat["task"], code["task"]) == ("chat", "code")
    assert chat["matl"] == pytest.approx(7 / 3)
    assert chat["matl_ci"] is None
    assert "one prompt" in chat["reasons"]["matl_ci"]
    assert code["matl"] == pytest.approx(5 / 3)
    assert code["speedup"] == pytest.approx((7 / 2.5) / (7 / 3.5))
    assert [(row["task"], row["category"]) for row in summary["per_category"]] == [
        ("chat", "writing"),
        ("code", "python"),
        ("code", "sql"),
    ]
    assert [row["num_rounds"] for row in summary["per_category"]] == [3, 2, 1]
    assert sum(row["num_emitted"] for row in summary["per_task"]) == summary["num_emitted"]


def test_the_baseline_emits_one_token_a_round_and_has_no_speedup(hand_run: Run) -> None:
    summary = summarise_hand(hand_run, arm="none")
    assert summary["matl"] == summary["matl_macro"] == summary["matl_uncut"] == 1.0
    assert summary["matl_ci"] == [1.0, 1.0]
    assert summary["acceptance_at"] == []
    assert summary["speedup"] is None
    assert summary["is_speedup_distinguishable"] is None
    assert summary["reasons"]["speedup"] == "this is the reference arm"
    assert summary["wasted_verify_share"] is None
    assert set(summary["speedup_vs"]) == {"ngram", "transformers.generate"}


def test_an_arm_with_request_times_only(hand_run: Run) -> None:
    summary = summarise_hand(hand_run, arm="transformers.generate")
    assert summary["matl"] is None
    assert summary["reasons"]["matl"] == "this arm recorded no rounds"
    assert summary["throughput_tokens_per_s"] == pytest.approx(1.5)
    assert summary["decode_throughput_tokens_per_s"] is None
    assert summary["speedup"] == pytest.approx(0.75)
    assert summary["phase_share"] is None
    assert summary["truncated_share"] is None


def test_requests_that_end_at_prefill_have_no_rounds(hand_run: Run) -> None:
    """Empty round and step frames come without columns, as they do from a run that wrote none."""
    requests = hand_run.requests[hand_run.requests["arm"] == "ngram"].assign(num_output_tokens=1, decode_s=0.0)
    summary = summarise(pd.DataFrame(), pd.DataFrame(), requests, arm="ngram", draft_length=3)
    assert summary["matl"] is None
    assert summary["acceptance_at"] == [None, None, None]
    assert summary["decode_throughput_tokens_per_s"] is None
    assert summary["throughput_tokens_per_s"] == pytest.approx(3 / 1.5)
    assert summary["reasons"]["speedup"] == "the run has no arm none"
    assert summary["speedup_vs_generate"] is None


def test_an_unknown_arm_is_refused(hand_run: Run) -> None:
    with pytest.raises(ValueError, match=r"arm=eagle: .* recorded arms: ngram, none, transformers.generate"):
        summarise_hand(hand_run, arm="eagle")
    with pytest.raises(ValueError, match="recorded arms: no arm at all"):
        summarise(pd.DataFrame(), pd.DataFrame(), pd.DataFrame({"arm": []}), arm="ngram", draft_length=1)


def test_summary_is_json_and_seeded(hand_run: Run) -> None:
    reading = asdict(EnergyReading(30.0, 4.5, "rapl", "cpu", idle_power_w=2.0))
    text = json.dumps(summarise_hand(hand_run, energy=reading), allow_nan=False)
    assert text == json.dumps(summarise_hand(hand_run, energy=json.loads(json.dumps(reading))))
    assert summarise_hand(hand_run, seed=1)["matl"] == json.loads(text)["matl"]


def test_energy_by_hand(hand_run: Run) -> None:
    reading = asdict(EnergyReading(30.0, 4.5, "rapl", "cpu package", idle_power_w=2.0))
    summary = summarise_hand(hand_run, energy=reading)
    assert summary["joules_per_token"] == pytest.approx(30.0 / 15)
    assert summary["net_energy_j"] == pytest.approx(30.0 - 2.0 * 4.5)
    assert summary["net_joules_per_token"] == pytest.approx(21.0 / 15)
    assert (summary["energy_source"], summary["energy_scope"]) == ("rapl", "cpu package")


def test_missing_energy_is_none_with_a_reason_and_an_estimate_stays_apart(hand_run: Run) -> None:
    reading = asdict(
        EnergyReading(None, 4.5, "none", "nothing", reason="no sensor", estimated_energy_j=45.0, warnings=("short",))
    )
    summary = summarise_hand(hand_run, energy=reading)
    assert summary["joules_per_token"] is None
    assert summary["reasons"]["joules_per_token"] == summary["reasons"]["net_joules_per_token"] == "no sensor"
    assert summary["estimated_energy_j"] == 45.0
    assert "short" in summary["warnings"]
    assert summarise_hand(hand_run)["reasons"]["joules_per_token"] == "no energy reading was taken"


def test_energy_without_idle_power_or_tokens() -> None:
    reading = asdict(EnergyReading(30.0, 4.5, "rapl", "cpu package"))
    gross = energy_per_token(reading, 10)
    assert gross["joules_per_token"] == pytest.approx(3.0)
    assert gross["net_joules_per_token"] is None
    assert gross["reasons"] == {"net_joules_per_token": "idle power was not measured"}
    none = energy_per_token(reading, 0)
    assert none["joules_per_token"] is None
    assert none["energy_j"] == 30.0
    assert none["reasons"]["joules_per_token"] == "no token was emitted"


def test_records_that_contradict_each_other_are_called_out(hand_run: Run) -> None:
    assert summarise_hand(hand_run)["warnings"] == ["3 prompts: intervals from fewer than 10 are too narrow"]
    hand_run.steps["host_s"] = 0.0
    hand_run.requests["num_output_tokens"] += 1
    hand_run.requests["decode_s"] *= 2
    warnings = " | ".join(summarise_hand(hand_run)["warnings"])
    assert "phases add up to 94.0% of the wall time" in warnings
    assert "rounds emitted 12 tokens, requests hold 15 beyond their first" in warnings
    assert "time shares add up to 166.7% of the wall time" in warnings


def simulate(
    rates: tuple[float, ...], num_prompts: int, num_rounds: int, seed: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rounds of a drafter that is accepted by the given conditional rates; each prompt's last round is cut by a cap."""
    generator = np.random.default_rng(seed)
    hits = generator.random((num_prompts * num_rounds, len(rates))) < np.array(rates)
    raw = np.cumprod(hits, axis=1).sum(axis=1)
    prompt = np.repeat(np.arange(num_prompts), num_rounds)
    is_last = np.arange(len(raw)) % num_rounds == num_rounds - 1
    emitted = np.where(is_last, 1, raw + 1)
    accepted = np.minimum(raw, emitted)
    rounds = pd.DataFrame(
        {
            "arm": "synthetic",
            "repeat": 0,
            "request_id": [f"{i}#0" for i in prompt],
            "prompt_id": [str(i) for i in prompt],
            "task": "toy",
            "category": "toy",
            "num_drafted": len(rates),
            "num_verified": len(rates),
            "num_accepted_raw": raw,
            "num_accepted": accepted,
            "num_emitted": emitted,
            "end": np.where(is_last, "length", None),
            "is_truncated": is_last & (emitted < raw + 1),
        }
    )
    tokens = rounds.groupby("prompt_id", sort=False)["num_emitted"].sum() + 1
    requests = pd.DataFrame({"arm": "synthetic", "repeat": 0, "prompt_id": tokens.index, "task": "toy"})
    requests["request_id"] = requests["prompt_id"] + "#0"
    requests["category"] = "toy"
    requests["num_output_tokens"] = tokens.to_numpy()
    return rounds, requests.assign(prefill_s=0.1, decode_s=1.0, ttft_s=0.1, latency_s=1.1, num_rounds=num_rounds)


def test_simulated_rounds_lie_within_their_intervals_of_the_closed_form() -> None:
    rates = (0.9, 0.8, 0.7, 0.6)
    rounds, requests = simulate(rates, num_prompts=60, num_rounds=40, seed=0)
    summary = summarise(rounds, pd.DataFrame(), requests, arm="synthetic", draft_length=4)
    low, high = summary["matl_uncut_ci"]
    assert low <= expected_matl(rates) <= high
    assert high - low < 0.2
    # Cut rounds emit less than was granted, so MATL itself lies a little lower.
    assert summary["matl"] < summary["matl_uncut"]
    for name, truth in (("acceptance_at", expected_acceptance_at(rates)), ("conditional_acceptance_at", rates)):
        for (below, above), rate in zip(summary[f"{name}_ci"], truth, strict=True):
            assert below <= rate <= above
            assert above - below < 0.1
    # A wrong closed form would be caught: the mean rate in the geometric formula.
    mean_rate = float(np.mean(rates))
    assert not low <= expected_matl([mean_rate] * 4) <= high


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), st.integers(2, 5), st.integers(1, 6), st.integers(0, 999))
@example([0.25, 0.75, 0.0, 0.0, 0.0], 4, 6, 642)
def test_invariants_of_any_run(rates: list[float], num_prompts: int, num_rounds: int, seed: int) -> None:
    rounds, requests = simulate(tuple(rates), num_prompts, num_rounds, seed)
    length = len(rates)
    summary = summarise(rounds, pd.DataFrame(), requests, arm="synthetic", draft_length=length)
    assert 1.0 <= summary["matl"] <= summary["matl_uncut"] <= length + 1
    assert 1.0 <= summary["matl_ci"][0] <= summary["matl_ci"][1] <= length + 1
    assert summary["num_emitted"] == summary["num_output_tokens"] - summary["num_requests"]
    assert summary["num_accepted"] <= summary["num_verified"] <= summary["num_drafted"]
    # Each figure is a division of its own, so a round off may stand between equal ones.
    assert summary["mean_accepted"] - 1e-12 <= summary["matl"] <= summary["mean_accepted"] + 1 + 1e-12
    survival = summary["acceptance_at"]
    assert survival == sorted(survival, reverse=True)
    assert 0.0 <= summary["wasted_verify_share"] <= 1.0


def test_every_figure_is_defined(hand_run: Run) -> None:
    """METRICS.md names each key of a summary; the ends of intervals go with their figure."""
    text = (Path(__file__).parents[2] / "METRICS.md").read_text(encoding="utf-8")
    summary = summarise_hand(hand_run) | summarise_hand(hand_run)["per_task"][0]
    general = {"reasons", "warnings", "task", "category"}
    names = {key.removesuffix("_ci") for key in summary} - general
    assert [name for name in sorted(names) if f"`{name}`" not in text and f"`{name}[" not in text] == []


def test_the_worked_example_of_metrics_md() -> None:
    rows = [
        ("A", 3, 3, 3, 4, None),
        ("A", 2, 1, 1, 2, None),
        ("A", 0, 0, 0, 1, "stop"),
        ("B", 3, 0, 0, 1, None),
        ("B", 3, 3, 2, 2, "stop"),
    ]
    columns = ["prompt_id", "num_verified", "num_accepted_raw", "num_accepted", "num_emitted", "end"]
    rounds = pd.DataFrame(rows, columns=columns)
    head = {"arm": "x", "repeat": 0, "turn": 0, "task": "t", "category": "c"}
    rounds = rounds.assign(**head, request_id=rounds["prompt_id"], num_drafted=3, is_truncated=False)
    requests = pd.DataFrame({"prompt_id": ["A", "B"], "request_id": ["A", "B"], "num_output_tokens": [8, 4]})
    requests = requests.assign(**head, num_rounds=[3, 2], prefill_s=0.1, decode_s=1.0, ttft_s=0.1, latency_s=1.1)
    summary = summarise(rounds, pd.DataFrame(), requests, arm="x", draft_length=3)
    assert summary["matl"] == 2.0
    assert summary["mean_accepted"] == pytest.approx(6 / 5)
    assert summary["matl_macro"] == pytest.approx(1.917, abs=1e-3)
    assert summary["matl_uncut"] == pytest.approx(2.4)
    assert summary["wasted_verify_share"] == pytest.approx(5 / 11)
    assert summary["acceptance_at"] == [3 / 4, 2 / 4, 1 / 2]
    assert summary["conditional_acceptance_at"] == [3 / 4, 2 / 3, 1.0]
    assert deepspec_view(rounds, requests, arm="x", draft_length=3)["accept_len"] == 2.0
    assert vllm_view(rounds, arm="x", draft_length=3)["mean_acceptance_length"] == 2.75

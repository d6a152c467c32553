"""Token rates, speed-ups, latencies and phases of the run that is worked out by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hand_run import Run, make_hand_run

from dispark.measure.throughput import (
    PHASES,
    busy_s,
    latencies,
    of_arm,
    other_arms,
    phase_split,
    prompt_totals,
    speedup,
    sum_by_prompt,
    throughput_tokens_per_s,
    what_if_throughput_tokens_per_s,
)


@pytest.fixture
def hand_run() -> Run:
    return make_hand_run()


def test_throughput_by_hand(hand_run: Run) -> None:
    # ngram: 8 + 4 + 3 tokens in 2.0 + 1.5 + 1.0 s; without prefill 7 + 3 + 2 tokens in 1.5 + 1.0 + 0.5 s.
    assert throughput_tokens_per_s(hand_run.requests, arm="ngram").value == pytest.approx(15 / 4.5)
    assert throughput_tokens_per_s(hand_run.requests, arm="ngram", is_decode_only=True).value == pytest.approx(4.0)
    assert throughput_tokens_per_s(hand_run.requests, arm="none").value == pytest.approx(2.0)
    assert throughput_tokens_per_s(hand_run.requests, arm="none", is_decode_only=True).value == pytest.approx(2.0)
    assert throughput_tokens_per_s(hand_run.requests, arm="transformers.generate").value == pytest.approx(1.5)


def test_an_arm_timed_as_a_whole_has_no_decode_throughput(hand_run: Run) -> None:
    estimate = throughput_tokens_per_s(hand_run.requests, arm="transformers.generate", is_decode_only=True)
    assert estimate.value is None
    assert estimate.reason is not None
    assert "decode time" in estimate.reason


def test_speedup_by_hand(hand_run: Run) -> None:
    assert speedup(hand_run.requests, arm="ngram").value == pytest.approx((15 / 4.5) / 2.0)
    assert speedup(hand_run.requests, arm="ngram", is_decode_only=True).value == pytest.approx(2.0)
    versus = speedup(hand_run.requests, arm="ngram", reference="transformers.generate")
    assert versus.value == pytest.approx((15 / 4.5) / 1.5)
    assert versus.interval is not None
    assert versus.interval[0] <= versus.value <= versus.interval[1]


def test_speedup_uses_the_prompts_that_both_arms_ran(hand_run: Run) -> None:
    requests = hand_run.requests
    partial = requests[(requests["arm"] != "none") | (requests["prompt_id"] != "p3")]
    assert speedup(partial, arm="ngram").value == pytest.approx((12 / 3.5) / (12 / 6.0))
    apart = requests[(requests["arm"] == "ngram") == (requests["prompt_id"] == "p1")]
    assert speedup(apart, arm="ngram").reason == "no prompt was run in both ngram and none"


def test_speedup_says_why_there_is_none(hand_run: Run) -> None:
    assert speedup(hand_run.requests, arm="none").reason == "this is the reference arm"
    assert speedup(of_arm(hand_run.requests, "ngram"), arm="ngram").reason == "the run has no arm none"


def test_repeats_and_turns_of_a_prompt_are_one_unit(hand_run: Run) -> None:
    twice = pd.concat([hand_run.requests, hand_run.requests.assign(repeat=1)])
    totals = prompt_totals(of_arm(twice, "ngram"))
    assert totals["tokens"].tolist() == [16, 8, 6]
    assert totals["seconds"].tolist() == pytest.approx([4.0, 3.0, 2.0])
    assert speedup(twice, arm="ngram") == speedup(hand_run.requests, arm="ngram")


def test_prompts_of_two_tasks_may_share_an_id() -> None:
    frame = pd.DataFrame({"task": ["a", "b", "a"], "prompt_id": ["1", "1", "1"]})
    sums = sum_by_prompt(frame, {"x": [1, 10, 100]})
    assert sums["x"].to_dict() == {("a", "1"): 101.0, ("b", "1"): 10.0}


def test_a_missing_time_is_not_counted_as_zero(hand_run: Run) -> None:
    requests = hand_run.requests.copy()
    requests.loc[(requests["arm"] == "ngram") & (requests["prompt_id"] == "p2"), ["decode_s", "latency_s"]] = np.nan
    assert np.isnan(busy_s(of_arm(requests, "ngram"))).sum() == 1
    estimate = throughput_tokens_per_s(requests, arm="ngram")
    assert estimate.value is None
    assert speedup(requests, arm="ngram").value is None


def test_latencies_by_hand(hand_run: Run) -> None:
    # Mean gaps between tokens: 1.5 s / 7, 1.0 s / 3 and 0.5 s / 2.
    figures = latencies(of_arm(hand_run.requests, "ngram"))
    assert figures["ttft_s_p50"] == figures["ttft_s_p95"] == pytest.approx(0.5)
    assert figures["itl_s_p50"] == pytest.approx(0.25)
    assert figures["itl_s_p95"] == pytest.approx(0.25 + 0.9 * (1 / 3 - 0.25))
    assert figures["latency_s_p50"] == pytest.approx(1.5)
    generate = latencies(of_arm(hand_run.requests, "transformers.generate"))
    assert generate["ttft_s_p50"] is None
    assert generate["itl_s_p50"] is None
    assert generate["latency_s_p50"] == pytest.approx(2.5)


def test_one_token_requests_have_no_time_between_tokens() -> None:
    one = pd.DataFrame({"num_output_tokens": [1], "ttft_s": [0.2], "latency_s": [0.2]})
    assert latencies(one)["itl_s_p50"] is None
    assert latencies(one)["ttft_s_p50"] == pytest.approx(0.2)


def test_phase_split_by_hand(hand_run: Run) -> None:
    split = phase_split(of_arm(hand_run.steps, "ngram"))
    assert split["num_steps"] == 6
    assert split["phase_share"] == pytest.approx(
        {"draft": 0.2, "schedule": 0.04, "verify": 0.6, "accept": 0.04, "commit": 0.06, "host": 0.06}
    )
    assert set(split["phase_share"]) == set(PHASES)
    assert split["host_share"] == pytest.approx(0.2)
    assert split["phase_sum_error"] == pytest.approx(0.0)
    assert split["prefill_share"] == pytest.approx(1.5 / 4.5)
    assert split["draft_s_mean"] == pytest.approx(0.1)
    assert split["verify_s_mean"] == pytest.approx(0.3)
    assert split["round_s_mean"] == pytest.approx(0.5)
    assert split["num_rows_mean"] == 1.0
    assert split["num_tokens_mean"] == pytest.approx((4 + 3 + 1 + 4 + 4 + 3) / 6)


def test_phase_split_shows_time_that_no_phase_holds(hand_run: Run) -> None:
    steps = of_arm(hand_run.steps, "ngram").assign(host_s=0.0)
    split = phase_split(steps)
    assert split["phase_sum_error"] == pytest.approx(-0.06)
    assert split["host_share"] == pytest.approx(0.2)


def test_phase_split_without_rounds_is_none(hand_run: Run) -> None:
    for steps in (hand_run.steps.iloc[:0], pd.DataFrame(), hand_run.steps.query("kind == 'prefill'")):
        split = phase_split(steps)
        assert split["num_steps"] == 0
        assert split["phase_share"] is None
        assert split["host_share"] is None


def test_what_if_replaces_the_draft_phase_alone(hand_run: Run) -> None:
    steps, rounds = of_arm(hand_run.steps, "ngram"), of_arm(hand_run.rounds, "ngram")
    # 12 tokens; 6 rounds of 0.5 s, of which drafting took 0.1 s.
    assert what_if_throughput_tokens_per_s(steps, rounds, 0.1) == pytest.approx(12 / 3.0)
    assert what_if_throughput_tokens_per_s(steps, rounds, 0.0) == pytest.approx(12 / 2.4)
    assert what_if_throughput_tokens_per_s(steps, rounds, 0.6) == pytest.approx(12 / 6.0)
    assert what_if_throughput_tokens_per_s(steps, rounds.iloc[:0], 0.1) is None
    assert what_if_throughput_tokens_per_s(pd.DataFrame(), rounds, 0.1) is None


@pytest.mark.parametrize("cost", [-0.1, float("nan")])
def test_what_if_refuses_a_cost_that_is_none(hand_run: Run, cost: float) -> None:
    with pytest.raises(ValueError, match=r"draft_cost_s=.*must be seconds >= 0"):
        what_if_throughput_tokens_per_s(hand_run.steps, hand_run.rounds, cost)


def test_other_arms_keep_their_order(hand_run: Run) -> None:
    assert other_arms(hand_run.requests, ()) == ["ngram", "none", "transformers.generate"]
    assert other_arms(hand_run.requests, ("ngram", "none")) == ["transformers.generate"]

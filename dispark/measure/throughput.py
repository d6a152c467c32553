"""Tokens per second, speed-ups, latencies and the phase split of a round.

Every arm is counted the same way: tokens are the lengths of the recorded token ids, never of text tokenised again, and
time is the request's share of the steps it took part in, so shares add up to the wall time of the pass whatever the
number of rows. An arm that decodes outside the loop records one latency a request, and that is its time.

The frames are those of a run directory. The module can't tell whether the machine was quiet, and it compares arms of
one run only; arms of different runs met different clocks and neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dispark.measure.stats import Estimate, Floats, PromptSums, quotient_of_quotients, ratio_of_sums

BASELINE_ARM = "none"
GENERATE_ARM = "transformers.generate"
PHASES = ("draft", "schedule", "verify", "accept", "commit", "host")
PROMPT_KEY = ["task", "prompt_id"]


def of_arm(frame: pd.DataFrame, arm: str) -> pd.DataFrame:
    """The rows of one arm; an empty frame where the arm recorded none."""
    return frame[frame["arm"] == arm] if "arm" in frame.columns else frame


def sum_by_prompt(frame: pd.DataFrame, columns: dict[str, npt.ArrayLike]) -> pd.DataFrame:
    """Sums each column over the rows of a prompt; a missing value makes its prompt's sum NaN instead of vanishing.

    Args:
        frame: rows with the columns task and prompt_id.
        columns: one value a row of the frame, by the name of the sum.

    Returns:
        One row a prompt, indexed by (task, prompt_id) in sorted order.
    """
    groups = frame.groupby(PROMPT_KEY, sort=True)
    codes = groups.ngroup().to_numpy()
    index = groups.size().index
    sums = {
        name: np.bincount(codes, weights=np.asarray(values, dtype=np.float64), minlength=len(index))
        for name, values in columns.items()
    }
    return pd.DataFrame(sums, index=index)


def busy_s(requests: pd.DataFrame) -> Floats:
    """Seconds of each request [R]: prefill_s + decode_s, or latency_s where there is no such split; NaN if neither."""
    split = _floats(requests, "prefill_s") + _floats(requests, "decode_s")
    return np.where(split > 0.0, split, _floats(requests, "latency_s"))


def prompt_totals(requests: pd.DataFrame, *, is_decode_only: bool = False) -> pd.DataFrame:
    """Tokens and seconds of one arm by prompt, over turns and repeats.

    Args:
        requests: requests of one arm.
        is_decode_only: leave out prefill and the first token of each request, which prefill gives.

    Returns:
        Columns `tokens` and `seconds`, one row a prompt.
    """
    tokens = requests["num_output_tokens"].to_numpy(np.int64)
    if is_decode_only:
        return sum_by_prompt(requests, {"tokens": np.maximum(tokens - 1, 0), "seconds": _floats(requests, "decode_s")})
    return sum_by_prompt(requests, {"tokens": tokens, "seconds": busy_s(requests)})


def throughput_tokens_per_s(
    requests: pd.DataFrame, *, arm: str, is_decode_only: bool = False, seed: int = 0
) -> Estimate:
    """Output tokens of an arm over its seconds, prefill in both unless `is_decode_only`."""
    totals = prompt_totals(of_arm(requests, arm), is_decode_only=is_decode_only)
    estimate = ratio_of_sums(totals["tokens"], totals["seconds"], seed=seed)
    # No decode seconds at all means that the arm was timed as a whole, not that decoding took no time.
    return estimate if estimate.value is not None else Estimate(None, reason=_why_no_time(estimate, is_decode_only))


def speedup(
    requests: pd.DataFrame, *, arm: str, reference: str = BASELINE_ARM, is_decode_only: bool = False, seed: int = 0
) -> Estimate:
    """Throughput of an arm over that of another arm of the same run, ratio of sums, paired by prompt.

    Prompts that only one of the arms ran are left out of both.
    """
    if arm == reference:
        return Estimate(None, reason="this is the reference arm")
    if of_arm(requests, reference).empty:
        return Estimate(None, reason=f"the run has no arm {reference}")
    sums = speedup_sums(requests, arm=arm, reference=reference, is_decode_only=is_decode_only)
    if not len(sums.values_PQ):
        return Estimate(None, reason=f"no prompt was run in both {arm} and {reference}")
    estimate = sums.estimate(seed)
    return estimate if estimate.value is not None else Estimate(None, reason=_why_no_time(estimate, is_decode_only))


def speedup_sums(
    requests: pd.DataFrame, *, arm: str, reference: str = BASELINE_ARM, is_decode_only: bool = False
) -> PromptSums:
    """What each prompt that both arms ran adds to `speedup`."""
    totals = [prompt_totals(of_arm(requests, each), is_decode_only=is_decode_only) for each in (arm, reference)]
    both = totals[0].join(totals[1], how="inner", rsuffix="_reference")
    return PromptSums(both.to_numpy(np.float64), quotient_of_quotients)


def latencies(requests: pd.DataFrame) -> dict[str, float | None]:
    """Medians and 95th percentiles over the requests of one arm, in seconds.

    `ttft_s` is the time to the first token. `itl_s` of a request is (latency_s - ttft_s) / (tokens - 1), its mean time
    between tokens: inside a round tokens arrive at once, so single gaps would say little. One-token requests have none.
    """
    ttft, latency = _floats(requests, "ttft_s"), _floats(requests, "latency_s")
    gaps = requests["num_output_tokens"].to_numpy(np.float64) - 1.0
    itl = np.divide(latency - ttft, gaps, out=np.full(len(gaps), np.nan), where=gaps > 0)
    figures: dict[str, float | None] = {}
    for name, values in (("ttft_s", ttft), ("itl_s", itl), ("latency_s", latency)):
        known = values[np.isfinite(values)]
        for percent in (50, 95):
            figures[f"{name}_p{percent}"] = float(np.percentile(known, percent)) if known.size else None
    return figures


def phase_split(steps: pd.DataFrame) -> dict[str, Any]:
    """Where the time of rounds goes, over the round steps of one arm.

    Returns:
        `phase_share` by phase (of the wall time of round steps), `host_share` (all but draft and verify),
        `phase_sum_error` (sum of the phases over wall time, minus 1), `prefill_share` (prefill steps' part of all wall
        time), means a step (`draft_s_mean`, `verify_s_mean`, `round_s_mean`, `num_rows_mean`, `num_tokens_mean`) and
        `num_steps`. Values are None where there are no round steps.
    """
    empty: dict[str, Any] = dict.fromkeys(
        ("phase_share", "host_share", "phase_sum_error", "prefill_share", "draft_s_mean", "verify_s_mean")
    )
    empty |= dict.fromkeys(("round_s_mean", "num_rows_mean", "num_tokens_mean"))
    rounds = steps[steps["kind"] == "round"] if "kind" in steps.columns else steps
    wall = float(rounds["wall_s"].sum()) if len(rounds) else 0.0
    if wall <= 0.0:
        return {**empty, "num_steps": 0}
    seconds = {phase: float(rounds[f"{phase}_s"].sum()) for phase in PHASES}
    return {
        "num_steps": len(rounds),
        "phase_share": {phase: value / wall for phase, value in seconds.items()},
        "host_share": 1.0 - (seconds["draft"] + seconds["verify"]) / wall,
        "phase_sum_error": sum(seconds.values()) / wall - 1.0,
        "prefill_share": 1.0 - wall / float(steps["wall_s"].sum()),
        "draft_s_mean": seconds["draft"] / len(rounds),
        "verify_s_mean": seconds["verify"] / len(rounds),
        "round_s_mean": wall / len(rounds),
        "num_rows_mean": float(rounds["num_rows"].mean()),
        "num_tokens_mean": float(rounds["num_tokens"].mean()),
    }


def what_if_throughput_tokens_per_s(steps: pd.DataFrame, rounds: pd.DataFrame, draft_cost_s: float) -> float | None:
    """Decode throughput if every draft phase had cost `draft_cost_s` instead of what was measured.

    A what-if for drafters whose own cost means nothing (an oracle that accepts by a given rate): never a measured
    throughput, and to be printed under this name only.

    Args:
        steps: steps of one arm.
        rounds: rounds of the same arm.
        draft_cost_s: seconds of one draft phase, that is of one loop step for all its rows.

    Returns:
        Emitted tokens over the round steps' wall time with the draft phase replaced; None without rounds.

    Raises:
        ValueError: the cost is negative or not a number.
    """
    if not draft_cost_s >= 0.0:
        raise ValueError(f"draft_cost_s={draft_cost_s}: must be seconds >= 0")
    loop = steps[steps["kind"] == "round"] if "kind" in steps.columns else steps
    if loop.empty or rounds.empty:
        return None
    seconds = float((loop["wall_s"] - loop["draft_s"]).sum()) + draft_cost_s * len(loop)
    return float(rounds["num_emitted"].sum()) / seconds if seconds > 0.0 else None


def other_arms(requests: pd.DataFrame, known: Sequence[str]) -> list[str]:
    """Arms of the run that are not in `known`, in the order of their first request."""
    return [str(arm) for arm in requests["arm"].unique() if arm not in known]


def _floats(frame: pd.DataFrame, column: str) -> Floats:
    if column not in frame.columns:
        return np.full(len(frame), np.nan)
    return pd.to_numeric(frame[column]).to_numpy(np.float64, na_value=np.nan)


def _why_no_time(estimate: Estimate, is_decode_only: bool) -> str:
    kind = "decode time" if is_decode_only else "time or token"
    return f"no {kind} was recorded ({estimate.reason})"

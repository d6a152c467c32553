"""The summary of one arm of a run: every figure that is printed, from the recorded rounds, steps and requests.

METRICS.md defines each name. A figure that can't be had is None and its reason stands under its name in `reasons`.
Nothing here measures or reads files, and nothing depends on which drafter or scheduler made the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dispark.measure.acceptance import acceptance_at, conditional_acceptance_at, position_counts
from dispark.measure.stats import Estimate, bootstrap, is_distinguishable, ratio_of_sums
from dispark.measure.throughput import (
    BASELINE_ARM,
    GENERATE_ARM,
    latencies,
    of_arm,
    other_arms,
    phase_split,
    speedup,
    sum_by_prompt,
    throughput_tokens_per_s,
)

MIN_PROMPTS = 10
MAX_PHASE_SUM_ERROR = 0.02
COUNTERS = ("num_drafted", "num_verified", "num_accepted", "num_emitted")


def summarise(
    rounds: pd.DataFrame,
    steps: pd.DataFrame,
    requests: pd.DataFrame,
    *,
    arm: str,
    baseline: str = BASELINE_ARM,
    draft_length: int,
    seed: int = 0,
    energy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything there is to say about one arm, ready for JSON.

    Args:
        rounds: one row a (row, round) of all arms of the run.
        steps: one row a loop step of all arms.
        requests: one row an (arm, repeat, request).
        arm: the arm to summarise.
        baseline: the arm that speed-ups are taken against.
        draft_length: G; per-position lists have this length.
        seed: seed of the bootstrap.
        energy: the arm's energy reading in its stored form, or None where none was taken.

    Raises:
        ValueError: the arm has no request.
    """
    mine = of_arm(requests, arm)
    if mine.empty:
        known = ", ".join(other_arms(requests, ())) if "arm" in requests.columns else ""
        raise ValueError(f"arm={arm}: no request of this arm was recorded; recorded arms: {known or 'no arm at all'}")
    arm_rounds, arm_steps = of_arm(rounds, arm), of_arm(steps, arm)
    summary: dict[str, Any] = {"arm": arm, "baseline": baseline, "draft_length": draft_length}
    whole = _group(arm_rounds, requests, arm=arm, baseline=baseline, seed=seed)
    summary |= whole | {"reasons": dict(whole["reasons"])}
    summary |= _drafting(arm_rounds)
    _add_positions(summary, arm_rounds, draft_length, seed)
    others = other_arms(requests, (arm, baseline))
    summary["speedup_vs"] = {other: _versus(requests, arm, other, seed) for other in others}
    generate = summary["speedup_vs"].get(GENERATE_ARM, {})
    for key in ("speedup", "speedup_ci", "is_speedup_distinguishable"):
        summary[key.replace("speedup", "speedup_vs_generate")] = generate.get(key)
    summary |= latencies(mine)
    summary |= phase_split(arm_steps)
    reading = energy_per_token(energy, summary["num_output_tokens"])
    summary["reasons"] |= reading.pop("reasons")
    summary |= reading
    for key, columns in (("per_task", ["task"]), ("per_category", ["task", "category"])):
        summary[key] = _splits(arm_rounds, requests, columns, whole, arm=arm, baseline=baseline, seed=seed)
    summary["warnings"] = _warnings(summary, arm_steps, mine) + [
        str(line) for line in (energy or {}).get("warnings", ())
    ]
    return summary


def energy_per_token(energy: Mapping[str, Any] | None, num_output_tokens: int) -> dict[str, Any]:
    """Joules an output token over the whole window, prefill included: gross, and net of idle power.

    An estimate from configured watts keeps its own key, `estimated_energy_j`, and never fills a measured one.

    Args:
        energy: a reading as stored: energy_j, window_s, source, scope, idle_power_w, reason, estimated_energy_j.
        num_output_tokens: output tokens of the same window, first tokens included.
    """
    reading = dict(energy or {})
    gross, idle_w, window_s = reading.get("energy_j"), reading.get("idle_power_w"), reading.get("window_s")
    net = None if gross is None or idle_w is None or window_s is None else gross - idle_w * window_s
    reasons: dict[str, str] = {}
    if gross is None:
        reasons["joules_per_token"] = str(reading.get("reason") or "no energy reading was taken")
        reasons["net_joules_per_token"] = reasons["joules_per_token"]
    elif net is None:
        reasons["net_joules_per_token"] = "idle power was not measured"
    if not num_output_tokens:
        reasons["joules_per_token"] = reasons["net_joules_per_token"] = "no token was emitted"

    def per_token(joules: float | None) -> float | None:
        return None if joules is None or not num_output_tokens else joules / num_output_tokens

    return {
        "energy_j": gross,
        "net_energy_j": net,
        "joules_per_token": per_token(gross),
        "net_joules_per_token": per_token(net),
        "estimated_energy_j": reading.get("estimated_energy_j"),
        "energy_window_s": window_s,
        "energy_source": reading.get("source"),
        "energy_scope": reading.get("scope"),
        "reasons": reasons,
    }


def _group(rounds: pd.DataFrame, requests: pd.DataFrame, *, arm: str, baseline: str, seed: int) -> dict[str, Any]:
    """The figures that make sense for any subset of prompts: counts, MATL, throughput and speed-up."""
    mine = of_arm(requests, arm)
    group: dict[str, Any] = {
        "num_prompts": len(mine[["task", "prompt_id"]].drop_duplicates()),
        "num_requests": len(mine),
        "num_repeats": int(mine["repeat"].nunique()),
        "num_output_tokens": int(mine["num_output_tokens"].sum()),
        "num_rounds": len(rounds),
        **{name: int(rounds[name].sum()) if len(rounds) else 0 for name in COUNTERS},
        "reasons": {},
    }
    matl = matl_uncut = Estimate(None, reason="this arm recorded no rounds")
    group["matl_macro"] = None
    if len(rounds):
        sums = sum_by_prompt(
            rounds,
            {
                "emitted": rounds["num_emitted"],
                "granted": rounds["num_accepted_raw"] + 1,
                "rounds": np.ones(len(rounds)),
            },
        )
        matl = ratio_of_sums(sums["emitted"], sums["rounds"], seed=seed)
        matl_uncut = ratio_of_sums(sums["granted"], sums["rounds"], seed=seed)
        group["matl_macro"] = float(rounds.groupby(["repeat", "request_id"])["num_emitted"].mean().mean())
    _add(group, "matl", matl)
    _add(group, "matl_uncut", matl_uncut)
    group["mean_accepted"] = group["num_accepted"] / len(rounds) if len(rounds) else None
    for prefix, is_decode_only in (("", False), ("decode_", True)):
        rate = throughput_tokens_per_s(requests, arm=arm, is_decode_only=is_decode_only, seed=seed)
        _add(group, f"{prefix}throughput_tokens_per_s", rate)
        ratio = speedup(requests, arm=arm, reference=baseline, is_decode_only=is_decode_only, seed=seed)
        _add(group, f"{prefix}speedup", ratio)
        group[f"is_{prefix}speedup_distinguishable"] = is_distinguishable(ratio)
    return group


def _drafting(rounds: pd.DataFrame) -> dict[str, Any]:
    """How much was drafted, verified and thrown away."""
    if rounds.empty:
        names = ("mean_draft_length", "mean_verify_length", "wasted_verify_share", "unverified_draft_share")
        return dict.fromkeys((*names, "truncated_share"))
    drafted, verified, accepted = (float(rounds[name].sum()) for name in COUNTERS[:3])
    return {
        "mean_draft_length": drafted / len(rounds),
        "mean_verify_length": verified / len(rounds),
        "wasted_verify_share": 1.0 - accepted / verified if verified else None,
        "unverified_draft_share": 1.0 - verified / drafted if drafted else None,
        "truncated_share": float(rounds["is_truncated"].mean()),
    }


def _add_positions(summary: dict[str, Any], rounds: pd.DataFrame, draft_length: int, seed: int) -> None:
    """Both acceptance rates by position, with intervals; one set of draws serves every position."""
    for name in ("acceptance_at", "conditional_acceptance_at"):
        summary[name] = summary[f"{name}_ci"] = [None] * draft_length
    if rounds.empty or not draft_length:
        return
    summary["acceptance_at"] = acceptance_at(rounds, draft_length)
    summary["conditional_acceptance_at"] = conditional_acceptance_at(rounds, draft_length)
    counts = position_counts(rounds, draft_length)
    for name, tries_RG in (("acceptance_at", counts.verified_RG), ("conditional_acceptance_at", counts.reached_RG)):
        intervals = []
        for position in range(draft_length):
            hits, tries = counts.accepted_RG[:, position], tries_RG[:, position]
            # A prompt that never got this deep says nothing about the position: leave it out of the draws.
            sums = sum_by_prompt(rounds, {"hits": hits, "tries": tries}).query("tries > 0")
            intervals.append(bootstrap(sums.to_numpy(), lambda drawn: drawn[:, 0] / drawn[:, 1], seed=seed).interval)
        summary[f"{name}_ci"] = intervals


def _versus(requests: pd.DataFrame, arm: str, other: str, seed: int) -> dict[str, Any]:
    ratio = speedup(requests, arm=arm, reference=other, seed=seed)
    return {
        "speedup": ratio.value,
        "speedup_ci": ratio.interval,
        "is_speedup_distinguishable": is_distinguishable(ratio),
        "reason": ratio.reason,
    }


def _splits(
    rounds: pd.DataFrame,
    requests: pd.DataFrame,
    columns: list[str],
    whole: dict[str, Any],
    *,
    arm: str,
    baseline: str,
    seed: int,
) -> list[dict[str, Any]]:
    """One group row for each value of the columns, in sorted order; the whole run's row where there is one value."""
    found = sorted(set(of_arm(requests, arm)[columns].astype(str).itertuples(index=False, name=None)))
    if len(found) == 1:
        return [dict(zip(columns, found[0], strict=True)) | whole]
    rows = []
    for values in found:
        part_requests, part_rounds = requests, rounds
        for column, value in zip(columns, values, strict=True):
            part_requests = part_requests[part_requests[column].astype(str) == value]
            if len(part_rounds):
                part_rounds = part_rounds[part_rounds[column].astype(str) == value]
        labels = dict(zip(columns, values, strict=True))
        rows.append(labels | _group(part_rounds, part_requests, arm=arm, baseline=baseline, seed=seed))
    return rows


def _warnings(summary: dict[str, Any], steps: pd.DataFrame, requests: pd.DataFrame) -> list[str]:
    """What makes the figures doubtful: records that contradict each other, and too few prompts."""
    found = []
    if summary["num_prompts"] < MIN_PROMPTS:
        found.append(f"{summary['num_prompts']} prompts: intervals from fewer than {MIN_PROMPTS} are too narrow")
    error = summary["phase_sum_error"]
    if error is not None and abs(error) > MAX_PHASE_SUM_ERROR:
        found.append(f"the phases add up to {1 + error:.1%} of the wall time of the rounds")
    num_decoded = int(np.maximum(requests["num_output_tokens"].to_numpy(np.int64) - 1, 0).sum())
    if summary["num_rounds"] and summary["num_emitted"] != num_decoded:
        found.append(f"rounds emitted {summary['num_emitted']} tokens, requests hold {num_decoded} beyond their first")
    if len(steps) and {"prefill_s", "decode_s"} <= set(requests.columns):
        shares = float(requests[["prefill_s", "decode_s"]].sum().sum())
        wall = float(steps["wall_s"].sum())
        if wall > 0.0 and abs(shares / wall - 1.0) > MAX_PHASE_SUM_ERROR:
            found.append(f"the requests' time shares add up to {shares / wall:.1%} of the wall time of the steps")
    return found


def _add(summary: dict[str, Any], name: str, estimate: Estimate) -> None:
    summary[name] = estimate.value
    summary[f"{name}_ci"] = estimate.interval
    if estimate.reason is not None:
        summary["reasons"][name if estimate.value is None else f"{name}_ci"] = estimate.reason

"""The same run as other tools would print it, recomputed from the raw rounds and requests.

Each function follows one tool's way of counting, so that a published figure can be set beside ours and a difference
explained. None of these figures is used elsewhere in the project; METRICS.md lists how each differs from ours. What
can't be redone from the records is said in the function: these are views of our run, not runs of those tools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from dispark.measure.acceptance import is_stop_cut
from dispark.measure.stats import Floats
from dispark.measure.throughput import BASELINE_ARM, busy_s, of_arm

CountTokens = Callable[[str], int]


def deepspec_view(rounds: pd.DataFrame, requests: pd.DataFrame, *, arm: str, draft_length: int) -> dict[str, Any]:
    """DeepSpec's evaluation table: first turns only, pooled over rounds, bonus token included.

    A round that ends on an accepted stop token counts its accepted drafts only, as if nothing had been proposed behind
    it. A last round that overshoots the cap counts whole. Stop strings are unknown to that tool: such rounds count
    whole too. A loop that drafts less near the cap can't be made to overshoot again.

    Returns:
        num_samples, `#propose`, accept_len, verify_rate and `accept_rate@k` for k = 0..draft_length - 1, which is
        prefix survival of position k + 1; None where no round proposed that deep.
    """
    first_requests, first_rounds = _first_turns(of_arm(requests, arm)), _first_turns(of_arm(rounds, arm))
    view: dict[str, Any] = {"num_samples": len(first_requests), "#propose": None, "accept_len": None}
    view |= {"verify_rate": None} | {f"accept_rate@{k}": None for k in range(draft_length)}
    if first_rounds.empty:
        return view
    stopped = is_stop_cut(first_rounds, ("stop",))
    kept = first_rounds["num_accepted"].to_numpy(np.int64)
    accepted = np.where(stopped, kept, first_rounds["num_accepted_raw"].to_numpy(np.int64))
    proposed = np.where(stopped, kept, first_rounds["num_verified"].to_numpy(np.int64))
    lengths = accepted + np.where(stopped, 0, 1)
    view["#propose"] = float(proposed.mean())
    view["accept_len"] = float(lengths.mean())
    view["verify_rate"] = float(lengths.sum() / (proposed.sum() + len(first_rounds)))
    for k in range(draft_length):
        view[f"accept_rate@{k}"] = _share(int((accepted > k).sum()), int((proposed > k).sum()))
    return view


def spec_bench_view(
    rounds: pd.DataFrame,
    requests: pd.DataFrame,
    *,
    arm: str,
    baseline: str = BASELINE_ARM,
    count_text_tokens: CountTokens | None = None,
) -> dict[str, Any]:
    """Spec-Bench's report: pooled step lengths, and plain means over questions of tokens over seconds.

    A question is all turns of a prompt in one repeat, with prefill inside the seconds. That tool counts the baseline's
    tokens again from its decoded text, minus one a turn, and the method's from ids.

    Args:
        rounds: rounds of all arms.
        requests: requests of all arms.
        arm: the method.
        baseline: the arm that stands for autoregressive decoding.
        count_text_tokens: length of a text in tokens as the target's tokenizer counts it, for the recount; without it
            the baseline keeps its count of ids and `is_baseline_recounted` is False.
    """
    mine, other = of_arm(requests, arm), of_arm(requests, baseline)
    arm_rounds = of_arm(rounds, arm)
    other_tokens = other["num_output_tokens"].to_numpy(np.float64)
    if count_text_tokens is not None:
        other_tokens = np.array([count_text_tokens(text) - 1 for text in other["text"]], dtype=np.float64)
    speed = _mean_question_speed(mine, mine["num_output_tokens"].to_numpy(np.float64))
    baseline_speed = _mean_question_speed(other, other_tokens)
    return {
        "mean_accepted_tokens": float(arm_rounds["num_emitted"].mean()) if len(arm_rounds) else None,
        "tokens_per_s": speed,
        "baseline_tokens_per_s": baseline_speed,
        "speedup": None if speed is None or not baseline_speed else speed / baseline_speed,
        "is_baseline_recounted": count_text_tokens is not None,
    }


def vllm_view(rounds: pd.DataFrame, *, arm: str, draft_length: int) -> dict[str, Any]:
    """vLLM's log line: 1 + accepted over drafts, pooled, before stop tokens and caps are looked at.

    Only rounds that verified at least one draft count as drafts, so rounds without a proposal, which emit one token,
    are left out. The rate of a position is over all drafts, however short. Without any draft the figures are None,
    where that tool shows "nan" or 1.
    """
    drafts = of_arm(rounds, arm)
    drafts = drafts[drafts["num_verified"] > 0] if len(drafts) else drafts
    if drafts.empty:
        empty: dict[str, Any] = dict.fromkeys(("mean_acceptance_length", "draft_acceptance_rate"))
        return {"num_drafts": 0, **empty, "per_position_acceptance_rate": [None] * draft_length}
    accepted = drafts["num_accepted_raw"].to_numpy(np.int64)
    return {
        "num_drafts": len(drafts),
        "mean_acceptance_length": 1.0 + float(accepted.mean()),
        "draft_acceptance_rate": _share(int(accepted.sum()), int(drafts["num_verified"].sum())),
        "per_position_acceptance_rate": [float((accepted >= k).mean()) for k in range(1, draft_length + 1)],
    }


def specforge_view(requests: pd.DataFrame, *, arm: str) -> dict[str, float | None]:
    """SpecForge's two figures, both completion tokens over verify steps with the first token of prefill among them.

    `average_acceptance_length` is what its benchmark command prints: the mean over first-turn responses of each one's
    ratio. `accept_length` is what its later reports and older scripts print: all tokens over all verify steps.
    """
    mine = of_arm(requests, arm)
    mine = mine[mine["num_rounds"] > 0]
    if mine.empty:
        return {"average_acceptance_length": None, "accept_length": None}
    first = _first_turns(mine)
    return {
        "average_acceptance_length": float((first["num_output_tokens"] / first["num_rounds"]).mean()),
        "accept_length": float(mine["num_output_tokens"].sum() / mine["num_rounds"].sum()),
    }


def zlab_view(
    rounds: pd.DataFrame, requests: pd.DataFrame, *, arm: str, baseline: str = BASELINE_ARM, draft_length: int
) -> dict[str, Any]:
    """The summary of z-lab's DFlash benchmark: macro means over responses.

    `average_acceptance_length` is the mean over responses of each one's mean tokens a round, cut at stop tokens and
    caps. Throughput is one over the mean over responses of decode seconds a token, where the first token counts as a
    token although its prefill is not in the seconds. The histogram runs over lengths 0..draft_length + 1, pooled.
    """
    arm_rounds = of_arm(rounds, arm)
    seconds, baseline_seconds = _mean_token_s(of_arm(requests, arm)), _mean_token_s(of_arm(requests, baseline))
    view: dict[str, Any] = {
        "average_acceptance_length": None,
        "throughput": None if not seconds else 1.0 / seconds,
        "baseline_throughput": None if not baseline_seconds else 1.0 / baseline_seconds,
        "decoding_speedup": None if not seconds or not baseline_seconds else baseline_seconds / seconds,
        "acceptance_length_histogram": None,
    }
    if len(arm_rounds):
        lengths = arm_rounds.groupby(["repeat", "request_id"])["num_emitted"].mean()
        view["average_acceptance_length"] = float(lengths.mean())
        counts = np.bincount(arm_rounds["num_emitted"].to_numpy(np.int64), minlength=draft_length + 2)
        view["acceptance_length_histogram"] = [float(count) / len(arm_rounds) for count in counts]
    return view


def all_views(
    rounds: pd.DataFrame,
    requests: pd.DataFrame,
    *,
    arm: str,
    draft_length: int,
    baseline: str = BASELINE_ARM,
    count_text_tokens: CountTokens | None = None,
) -> dict[str, dict[str, Any]]:
    """Every view of one arm, by tool."""
    return {
        "deepspec": deepspec_view(rounds, requests, arm=arm, draft_length=draft_length),
        "spec_bench": spec_bench_view(
            rounds, requests, arm=arm, baseline=baseline, count_text_tokens=count_text_tokens
        ),
        "vllm": vllm_view(rounds, arm=arm, draft_length=draft_length),
        "specforge": specforge_view(requests, arm=arm),
        "zlab": zlab_view(rounds, requests, arm=arm, baseline=baseline, draft_length=draft_length),
    }


def _first_turns(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["turn"] == frame["turn"].min()] if len(frame) else frame


def _mean_question_speed(requests: pd.DataFrame, tokens: Floats) -> float | None:
    if requests.empty:
        return None
    timed = requests[["task", "prompt_id", "repeat"]].assign(tokens=tokens, seconds=busy_s(requests))
    sums = timed.groupby(["task", "prompt_id", "repeat"])[["tokens", "seconds"]].sum(min_count=1)
    speeds = (sums["tokens"] / sums["seconds"]).replace([np.inf, -np.inf], np.nan).dropna()
    return float(speeds.mean()) if len(speeds) else None


def _mean_token_s(requests: pd.DataFrame) -> float | None:
    timed = requests[requests["num_output_tokens"] > 0]
    if timed.empty or "decode_s" not in timed.columns:
        return None
    mean = float((timed["decode_s"].astype(float) / timed["num_output_tokens"]).mean())
    return mean if np.isfinite(mean) and mean > 0.0 else None


def _share(hits: int, tries: int) -> float | None:
    return hits / tries if tries else None

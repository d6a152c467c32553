"""What users saw and what the system did, from the records of serving passes. METRICS.md, section 11, defines them.

Frames in, plain dicts out. It knows neither models nor schedulers, and times are what the loop's clock wrote down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dispark.decoding.rows import Trace
from dispark.measure.stats import Estimate, ratio_of_ratios, ratio_of_sums
from dispark.serving.source import ServingSource

QUANTILES = (0.5, 0.95, 0.99)
_SAME_S = 1e-9  # sums of times that are the same differ by rounding
FORMATS = {
    "tok/s": ".1f",
    "tok/s/user": ".1f",
    "TTFT p50": ".2f",
    "p95": ".2f",
    "ITL p50 ms": ".0f",
    "MATL": ".2f",
    "drafted": ".2f",
    "verified": ".2f",
    "wasted": ".0%",
    "rows": ".1f",
}
_ROUND_KEYS = ("request_id", "prompt_id", "round", "step", "num_drafted", "num_verified", "num_accepted", "num_emitted")


@dataclass(frozen=True)
class Sla:
    """What a served request has to keep to count as good; None asks for nothing.

    Args:
        ttft_s: first token within so many seconds of arrival.
        tokens_per_s: at least so many tokens a second from the first on.
    """

    ttft_s: float | None = None
    tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        for key in ("ttft_s", "tokens_per_s"):
            value = getattr(self, key)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < float("inf")):
                raise ValueError(f"sla.{key}={value}: must be a number above 0, or null to ask for nothing")


def check_arms(plain: Mapping[str, Any], parts: Sequence[str], needs: str) -> None:
    """Raises ValueError for an SLA with other keys, an arm that lacks one of its parts, which `needs` says in words,
    and a baseline that is none of the arms."""
    if unknown := sorted(set(plain["sla"]) - {"ttft_s", "tokens_per_s"}):
        raise ValueError(f"sla.{unknown[0]}: no such key; allowed: ttft_s, tokens_per_s")
    Sla(**plain["sla"])
    for name, node in plain["arms"].items():
        if not isinstance(node, dict) or not set(parts) <= set(node):
            raise ValueError(f"arms.{name}: must have {needs}")
    if plain["baseline"] is not None and plain["baseline"] not in plain["arms"]:
        raise ValueError(f"baseline={plain['baseline']}: must be one of the arms: {', '.join(plain['arms'])}")


@dataclass(frozen=True)
class Passes:
    """All passes of one arm, a row a request, a row's round and a step, each with `repeat`.

    Args:
        max_in_flight: users of a closed loop, None in an open one.
        block_tokens, row_tokens: tokens of a block of the cache's budget, and of a row of full length.
        spare_tokens: that a request reserves beyond its prompt and answer.
    """

    requests: pd.DataFrame
    rounds: pd.DataFrame
    steps: pd.DataFrame
    max_in_flight: int | None
    block_tokens: int
    row_tokens: int
    spare_tokens: int


def frames_of(source: ServingSource, trace: Trace, repeat: int) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(requests, rounds, steps) of one pass; times count from the start of the pass.

    Raises:
        ValueError: nothing at all could be served.
    """
    if not trace.steps:
        reasons = [visit.error for visit in source.visits.values() if visit.error is not None]
        raise ValueError(f"no request could be served: {reasons[0] if reasons else 'there is none'}")
    steps = pd.DataFrame(trace.steps)
    steps["end_s"] -= source.start_s
    ends = dict(zip(steps["step"], steps["end_s"], strict=True))
    rounds = pd.DataFrame(trace.rounds) if trace.rounds else pd.DataFrame({key: [] for key in _ROUND_KEYS})
    emitted: dict[str, list[float]] = {}
    for line in trace.rounds:
        emitted.setdefault(line["request_id"], []).append(ends[line["step"]])
    requests = []
    for visit in source.visits.values():
        request, record = visit.request, visit.record
        row: dict[str, Any] = {
            "request_id": request.request_id,
            "prompt_id": request.prompt_id,
            "num_prompt_tokens": len(request.prompt_ids),
            "max_new_tokens": request.max_new_tokens,
            "arrived_s": visit.arrived_s - source.start_s,
            "error": visit.error,
            "finish_reason": None if record is None else record.finish_reason,
            "num_output_tokens": 0 if record is None else len(record.output_ids),
        }
        if record is not None and record.prefill_step is not None and visit.admitted_s is not None:
            times = [ends[record.prefill_step], *emitted.get(request.request_id, [])]
            num_later, span_s = row["num_output_tokens"] - 1, times[-1] - times[0]
            row |= {
                "prefill_step": record.prefill_step,
                "queue_s": visit.admitted_s - visit.arrived_s,
                "ttft_s": times[0] - row["arrived_s"],
                "latency_s": times[-1] - row["arrived_s"],
                "tokens_per_s": num_later / span_s if num_later > 0 and span_s > 0 else None,
                "itl_s": np.diff(times).tolist(),
                "output_ids": record.output_ids,
            }
        requests.append(row)
    tag = {"repeat": repeat}
    return pd.DataFrame(requests).assign(**tag), rounds.assign(**tag), steps.assign(**tag)


def summarise_arms(arms: Mapping[str, Passes], baseline: str, sla: Sla) -> dict[str, dict[str, Any]]:
    """All figures of every arm; `ratio` is of its throughput to the baseline's, None for itself and in open loops."""
    sums = {name: steady_sums(passes) for name, passes in arms.items()}
    found = {}
    for name, passes in arms.items():
        ratio = Estimate(None)
        if name != baseline and passes.max_in_flight is not None:
            ratio = ratio_to(sums[name], sums[baseline])
        found[name] = summarise(passes, sla) | {"ratio": ratio.value, "ratio_ci": ratio.interval}
    return found


def summarise(passes: Passes, sla: Sla) -> dict[str, Any]:
    """The figures of one arm alone; None where there is nothing to measure."""
    requests, rounds = passes.requests, passes.rounds
    served = requests[requests["error"].isna() & requests["finish_reason"].notna()]
    whole = served[served["finish_reason"] != "cancelled"]
    gaps = np.array([gap for each in served.get("itl_s", []) if isinstance(each, list) for gap in each])
    verified, accepted = int(rounds["num_verified"].sum()), int(rounds["num_accepted"].sum())
    good = _is_good(whole, sla)
    makespan = sum(float(group["end_s"].max()) for _, group in passes.steps.groupby("repeat"))
    found: dict[str, Any] = {
        "num_requests": len(requests),
        "num_served": len(whole),
        "num_cancelled": len(served) - len(whole),
        "num_failed": int(requests["error"].notna().sum()),
        "num_tokens": int(served["num_output_tokens"].sum()),
        "makespan_s": makespan,
        "matl": float(rounds["num_emitted"].sum() / len(rounds)) if len(rounds) else None,
        "mean_draft_length": float(rounds["num_drafted"].mean()) if len(rounds) else None,
        "verify_budget": verified / len(rounds) if len(rounds) else None,
        "wasted_verify_share": 1 - accepted / verified if verified else None,
        "mean_rows": _mean_rows(passes),
        "goodput_requests_per_s": float(good.sum()) / makespan if makespan > 0 else None,
        "goodput_share": float(good.sum()) / len(requests) if len(requests) else None,
    }
    sums = steady_sums(passes)
    throughput = throughput_of(sums)
    found |= {
        "throughput_tokens_per_s": throughput.value if passes.max_in_flight else found["num_tokens"] / makespan,
        "throughput_ci": throughput.interval if passes.max_in_flight else None,
    }
    for name in ("ttft_s", "queue_s", "latency_s"):
        found |= _quantiles(name, _values(served, name), QUANTILES)
    found |= _quantiles("itl_s", gaps, QUANTILES)
    # Of speeds the bad end is the low one.
    found |= _quantiles("tokens_per_s", _values(served, "tokens_per_s"), tuple(1 - q for q in QUANTILES), QUANTILES)
    return found | _occupancy(passes)


def steady_sums(passes: Passes) -> pd.DataFrame:
    """(tokens, seconds) by prompt in the steady part, summed over passes: from the first round to the last with all
    users in the system. A step's seconds are shared alike by its rows. In an open loop everything counts."""
    parts = []
    for repeat, steps in passes.steps.groupby("repeat"):
        requests = passes.requests[passes.requests["repeat"] == repeat]
        window = _steady(steps, requests, passes.max_in_flight)
        share_s = (window["wall_s"] / window["num_rows"]).to_dict()
        rounds = passes.rounds[(passes.rounds["repeat"] == repeat) & passes.rounds["step"].isin(window.index)]
        parts.append(
            pd.DataFrame(
                {
                    "prompt_id": rounds["prompt_id"],
                    "tokens": rounds["num_emitted"],
                    "seconds": rounds["step"].map(share_s),
                }
            )
        )
        if "prefill_step" in requests:
            first = requests[requests["prefill_step"].isin(window.index)]
            seconds = first["prefill_step"].map(share_s)
            parts.append(pd.DataFrame({"prompt_id": first["prompt_id"], "tokens": 1, "seconds": seconds}))
    return pd.concat(parts).groupby("prompt_id")[["tokens", "seconds"]].sum()


def throughput_of(sums: pd.DataFrame) -> Estimate:
    """Tokens a second; the interval redraws prompts."""
    return ratio_of_sums(sums["tokens"].to_numpy(), sums["seconds"].to_numpy())


def ratio_to(sums: pd.DataFrame, other: pd.DataFrame) -> Estimate:
    """Throughput of one arm over that of another, the prompts of both redrawn together."""
    both = sums.join(other, rsuffix="_other", how="inner")
    columns = [both[name].to_numpy() for name in ("tokens", "seconds", "tokens_other", "seconds_other")]
    return ratio_of_ratios(*columns)


def _steady(steps: pd.DataFrame, requests: pd.DataFrame, max_in_flight: int | None) -> pd.DataFrame:
    """The steps of the steady part by number: a closed loop is steady until a user leaves whom nobody follows, whether
    all users are in decoding or some wait for room."""
    numbered = steps.set_index("step").sort_index()
    rounds = numbered[numbered["kind"] == "round"]
    if max_in_flight is None or not len(rounds):
        return numbered
    ended_s = (requests["arrived_s"] + requests["latency_s"]).dropna() if "latency_s" in requests else pd.Series()
    after = ended_s[ended_s > requests["arrived_s"].max() + _SAME_S]
    end_s = float(after.min()) if len(after) else float("inf")
    within = rounds[rounds["end_s"] <= end_s + _SAME_S]
    return numbered.loc[rounds.index[0] : within.index[-1]] if len(within) else numbered


def _mean_rows(passes: Passes) -> float | None:
    """Rows in decoding, weighted by time."""
    rounds = passes.steps[passes.steps["kind"] == "round"]
    seconds = float(rounds["wall_s"].sum())
    return float((rounds["num_rows"] * rounds["wall_s"]).sum()) / seconds if seconds > 0 else None


def _is_good(served: pd.DataFrame, sla: Sla) -> pd.Series[bool]:
    good = pd.Series(True, index=served.index)
    if sla.ttft_s is not None:
        good &= served["ttft_s"] <= sla.ttft_s
    if sla.tokens_per_s is not None:  # an answer of one token has no speed and can't be too slow
        good &= served["tokens_per_s"].astype(float).fillna(np.inf) >= sla.tokens_per_s
    return good


def _occupancy(passes: Passes) -> dict[str, Any]:
    """Mean tokens of room in rounds: held, in blocks that hold any, reserved, and in rows of full length."""
    if not len(passes.rounds):
        return {}
    known = passes.requests.set_index(["repeat", "request_id"])
    rounds = passes.rounds.sort_values(["repeat", "request_id", "round"])
    keys = pd.MultiIndex.from_frame(rounds[["repeat", "request_id"]])
    prompts = known["num_prompt_tokens"].reindex(keys).to_numpy()
    caps = known["max_new_tokens"].reindex(keys).to_numpy()
    before = rounds.groupby(["repeat", "request_id"])["num_emitted"].cumsum() - rounds["num_emitted"]
    held = prompts + before.to_numpy()  # the anchor is not in the cache yet
    block = passes.block_tokens
    room = pd.DataFrame(
        {
            "repeat": rounds["repeat"].to_numpy(),
            "step": rounds["step"].to_numpy(),
            "kv_held_tokens": held,
            "kv_paged_tokens": -(-held // block) * block,
            "kv_reserved_tokens": -(-(prompts + caps + passes.spare_tokens) // block) * block,
            "kv_contiguous_tokens": passes.row_tokens,
        }
    )
    means = room.groupby(["repeat", "step"]).sum().mean()
    shares = {
        f"kv_{name}_fragmentation": 1 - means["kv_held_tokens"] / means[f"kv_{name}_tokens"]
        for name in ("paged", "reserved", "contiguous")
    }
    return {str(key): float(value) for key, value in means.items()} | {key: float(v) for key, v in shares.items()}


def _values(frame: pd.DataFrame, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return frame[name].dropna().to_numpy(np.float64) if name in frame else np.zeros(0)


def _quantiles(
    name: str,
    values: np.ndarray[Any, np.dtype[np.float64]],
    quantiles: tuple[float, ...],
    names: tuple[float, ...] | None = None,
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for q, called in zip(quantiles, names or quantiles, strict=True):
        found[f"{name}_p{round(100 * called)}"] = float(np.quantile(values, q)) if len(values) else None
    return found


def headline_of(path: Path, run: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """What a command's last line says of a run: some figures of every arm."""
    arms = {name: {key: figures[key] for key in keys} for name, figures in run["arms"].items()}
    return {"run": str(path), "arrivals": run["arrivals"], "baseline": run["baseline"], "arms": arms}


def table_row(arm: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The line of an arm that is printed."""
    interval = figures["throughput_ci"]
    return {
        "arm": arm,
        "tok/s": figures["throughput_tokens_per_s"],
        "interval": None if interval is None else f"[{interval[0]:.1f}, {interval[1]:.1f}]",
        "ratio": _ratio_text(figures["ratio"], figures["ratio_ci"]),
        "tok/s/user": figures["tokens_per_s_p50"],
        "TTFT p50": figures["ttft_s_p50"],
        "p95": figures["ttft_s_p95"],
        "ITL p50 ms": None if figures["itl_s_p50"] is None else 1e3 * figures["itl_s_p50"],
        "MATL": figures["matl"],
        "drafted": figures["mean_draft_length"],
        "verified": figures["verify_budget"],
        "wasted": figures["wasted_verify_share"],
        "rows": figures["mean_rows"],
    } | ({"lossless": figures["losslessness"]} if "losslessness" in figures else {})


def _ratio_text(ratio: float | None, interval: Sequence[float] | None) -> str | None:
    if ratio is None:
        return None
    return f"{ratio:.2f}x" if interval is None else f"{ratio:.2f}x [{interval[0]:.2f}, {interval[1]:.2f}]"

"""Puts finished runs side by side: one row a run, macro rows over tasks, and ratios against a chosen run.

Every figure is computed anew from the raw records of each run, so runs of different ages share one set of definitions.
A speed-up is always against the run's own autoregressive arm; ratios between runs are paired by prompt, but the clocks
of two runs may differ, so `speedup_ratio` is to be trusted before `throughput_ratio`. Runs that decoded other prompts
or other weights under the same names are refused, because their difference would say nothing about the drafters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dispark.measure.stats import (
    Estimate,
    Floats,
    PromptSums,
    geometric_mean,
    is_distinguishable,
    mean_over_tasks,
    quotient,
    quotient_of_quotients,
)
from dispark.measure.throughput import (
    BASELINE_ARM,
    GENERATE_ARM,
    PROMPT_KEY,
    of_arm,
    prompt_totals,
    speedup_sums,
    sum_by_prompt,
)
from dispark.runs.loaded import LoadedRun, find_runs, load_runs
from dispark.runs.report import render
from dispark.runs.settings import differing_settings

__all__ = ["LoadedRun", "compare", "compare_arms", "find_runs", "load_runs", "render", "run_compare"]

_SETTINGS = ("target", "dtype", "drafter", "scheduler", "verifier", "sampling", "batch_size")
_GROUPED = (*_SETTINGS, "settings")
_RATIOS = ("speedup_ratio", "throughput_ratio", "matl_ratio")
_SPEEDUPS = ("speedup", "decode_speedup", "speedup_vs_generate")
_COPIED = (
    "num_prompts",
    "num_rounds",
    "matl",
    "matl_ci",
    "matl_macro",
    "mean_accepted",
    "throughput_tokens_per_s",
    "decode_throughput_tokens_per_s",
    "speedup",
    "speedup_ci",
    "is_speedup_distinguishable",
    "decode_speedup",
    "decode_speedup_ci",
    "speedup_vs_generate",
    "speedup_vs_generate_ci",
    "is_speedup_vs_generate_distinguishable",
    "host_share",
    "joules_per_token",
    "net_joules_per_token",
)
_HEADLINE = (
    "run",
    "target",
    "task",
    "drafter",
    "settings",
    "matl",
    "matl_ci",
    "throughput_tokens_per_s",
    "speedup",
    "speedup_ci",
    "is_speedup_distinguishable",
    "joules_per_token",
    "losslessness",
    *_RATIOS,
)


def compare(
    runs: Sequence[LoadedRun], baseline: LoadedRun | str | None = None, force: bool = False, seed: int = 0
) -> pd.DataFrame:
    """One row a run, then a macro row for each setting that ran two tasks or more.

    Args:
        runs: finished runs.
        baseline: what the others are set against: a run, its key or folder, or a drafter's name, which means for each
            run the run of that drafter on the same target and task; None leaves the ratio columns out.
        force: compare although prompts or weights differ.
        seed: seed of the bootstrap.

    Returns:
        Raw figures, full precision, None where missing; `attrs["notes"]` holds what a reader has to know.

    Raises:
        ValueError: fingerprints or weights differ and force is not set, or the baseline is not among the runs.
    """
    notes = _check_alike(runs, force)
    rows, sums = [], []
    for run, settings in zip(runs, differing_settings(runs), strict=True):
        row, own = _row(run, seed) | {"settings": settings}, _own_sums(run)
        if baseline is not None:
            other = _baseline_of(run, runs, baseline)
            against, ratios = _against(run, other, force, seed)
            row, own = row | against, own | ratios
        rows.append(row)
        sums.append(own)
    rows += _macro_rows(rows, sums, seed)
    notes += _run_warnings(runs, seed)
    frame = pd.DataFrame(rows, dtype=object)
    frame.attrs["notes"] = notes
    return frame


def compare_arms(run: LoadedRun, seed: int = 0) -> pd.DataFrame:
    """One row for each arm of one run, in the form of `compare`: the autoregressive arm first, outside arms last."""
    frame = pd.DataFrame([_row(run, seed, arm) for arm in run.arms], dtype=object)
    frame.attrs["notes"] = list(run.summary(seed)["warnings"])
    return frame


def run_compare(
    paths: Sequence[str],
    baseline: str | None = None,
    force: bool = False,
    csv: str | None = None,
    markdown: str | None = None,
) -> dict[str, Any]:
    """The command: prints the table, writes it to the files asked for, and returns the headline figures for JSON.

    Raises:
        ValueError: as `load_runs` and `compare`, or a file can't be written.
    """
    runs = load_runs(paths)
    frame = compare(runs, baseline=baseline, force=force)
    print(render(frame, "text"))
    for key, path, form in (("csv", csv, "csv"), ("markdown", markdown, "markdown")):
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(render(frame, form), encoding="utf-8")
            except OSError as error:
                raise ValueError(f"{key}={path}: cannot be written ({error.strerror})") from error
    headline = [{key: row[key] for key in _HEADLINE if key in row} for row in frame.to_dict("records")]
    return {"num_runs": len(runs), "unfinished": find_runs(paths)[1], "notes": frame.attrs["notes"], "rows": headline}


def _row(run: LoadedRun, seed: int, arm: str | None = None) -> dict[str, Any]:
    """The row of an arm, by default the run's own."""
    summary = run.summary(seed, arm)
    config = run.run.get("config") or {}
    provenance = run.run.get("provenance") or {}
    row: dict[str, Any] = {"run": run.run.get("key") or run.path.name, "is_macro": False}
    row |= {key: run.label(key) for key in ("target", "task", "drafter", "scheduler", "verifier", "sampling")}
    if arm is not None and arm != run.arm:
        row["drafter"] = arm
    row["has_random_weights"] = run.has_random_weights and row["drafter"] == run.label("drafter")
    row |= {"dtype": provenance.get("dtype"), "device": provenance.get("device")}
    row |= {"batch_size": config.get("batch_size"), "max_new_tokens": config.get("max_new_tokens")}
    row |= {key: summary[key] for key in _COPIED}
    row["energy_reason"] = summary["reasons"].get("joules_per_token")
    row["losslessness"] = run.of("losslessness", arm).get("verdict")
    row["degenerate_share"] = run.of("degeneracy", arm).get("degenerate_share")
    memory = run.of("memory", arm)
    device_bytes = memory.get("peak_device_bytes")
    row["peak_memory_bytes"] = memory.get("peak_host_bytes") if device_bytes is None else device_bytes
    row["memory_scope"] = "host" if device_bytes is None else "device"
    return row


def _own_sums(run: LoadedRun) -> dict[str, PromptSums]:
    """What the prompts add to the figures of a run's own arm, for macro rows."""
    sums = {"matl": PromptSums(_rounds_by_prompt(run).to_numpy(np.float64), quotient)}
    sums["speedup"] = speedup_sums(run.requests, arm=run.arm)
    sums["decode_speedup"] = speedup_sums(run.requests, arm=run.arm, is_decode_only=True)
    sums["speedup_vs_generate"] = speedup_sums(run.requests, arm=run.arm, reference=GENERATE_ARM)
    return sums


def _rounds_by_prompt(run: LoadedRun) -> pd.DataFrame:
    """Emitted tokens and rounds of a run's own arm, one row a prompt; none where no answer had a second token."""
    rounds = of_arm(run.rounds, run.arm)
    if rounds.empty:
        rounds = pd.DataFrame({key: pd.Series(dtype=float) for key in (*PROMPT_KEY, "num_emitted")})
    return sum_by_prompt(rounds, {"emitted": rounds["num_emitted"], "rounds": np.ones(len(rounds))})


def _against(
    run: LoadedRun, other: LoadedRun | None, force: bool, seed: int
) -> tuple[dict[str, Any], dict[str, PromptSums]]:
    """Ratios of a run to another one, over the prompts that both ran; None with a reason where there are none."""
    sums: dict[str, PromptSums] = {}
    if other is None or other is run:
        reason = "this is the baseline" if other is run else "the baseline did not run this task"
        reasons = dict.fromkeys(_RATIOS, reason)
    elif run.run.get("fingerprint") != other.run.get("fingerprint") and not force:
        raise ValueError(
            f"baseline={other.path.name}: its prompts differ from those of {run.path.name} "
            "(fingerprints); force=true compares them all the same"
        )
    else:
        reasons = dict.fromkeys(_RATIOS, "no prompt was run in both")
        sums = {name: part for name, part in _ratio_sums(run, other).items() if len(part.values_PQ)}
        has_speedup = [each.arm != BASELINE_ARM and BASELINE_ARM in each.arms for each in (run, other)]
        if not all(has_speedup):
            reasons["speedup_ratio"] = "one of the runs has no speed-up"
    row: dict[str, Any] = {"baseline": None if other is None else other.label("drafter")}
    for name in _RATIOS:
        row |= _cells(name, sums[name].estimate(seed) if name in sums else Estimate(None, reason=reasons[name]))
    return row, sums


def _cells(name: str, estimate: Estimate) -> dict[str, Any]:
    """An estimated ratio as cells of a row."""
    return {
        name: estimate.value,
        f"{name}_ci": estimate.interval,
        f"{name}_reason": estimate.reason,
        f"is_{name}_distinguishable": is_distinguishable(estimate),
    }


def _ratio_sums(run: LoadedRun, other: LoadedRun) -> dict[str, PromptSums]:
    """What the prompts of two runs add to the ratios of them, each paired by prompt."""
    totals = [prompt_totals(of_arm(each.requests, arm)) for each in (run, other) for arm in (each.arm, BASELINE_ARM)]
    sums = {"throughput_ratio": PromptSums(_paired([totals[0], totals[2]]), quotient_of_quotients)}
    if BASELINE_ARM not in (run.arm, other.arm):

        def relative(sums_DQ: Floats) -> Floats:
            rates = sums_DQ[:, 0::2] / sums_DQ[:, 1::2]
            return (rates[:, 0] / rates[:, 1]) / (rates[:, 2] / rates[:, 3])

        sums["speedup_ratio"] = PromptSums(_paired(totals), relative)
    rounds = _paired([_rounds_by_prompt(each) for each in (run, other)])
    return sums | {"matl_ratio": PromptSums(rounds, quotient_of_quotients)}


def _paired(frames: Sequence[pd.DataFrame]) -> np.ndarray:
    """The frames' columns side by side, for the prompts that are in all of them."""
    numbered = [frame.add_suffix(f"_{i}") for i, frame in enumerate(frames)]
    return pd.concat(numbered, axis=1, join="inner").to_numpy(np.float64)


def _macro_rows(
    rows: Sequence[dict[str, Any]], sums: Sequence[dict[str, PromptSums]], seed: int
) -> list[dict[str, Any]]:
    """Per setting: geometric mean of the ratios and plain mean of the MATLs over its tasks, each task once.

    Intervals redraw the prompts of each task; a setting that ran a task more than once has none.
    """
    groups: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(tuple(row[key] for key in _GROUPED), {}).setdefault(row["task"], []).append(i)
    macro = []
    for setting, tasks in groups.items():
        if len(tasks) < 2:
            continue
        mean: dict[str, Any] = dict.fromkeys(rows[0]) | dict(zip(_GROUPED, setting, strict=True))
        mean |= {"run": "macro", "is_macro": True, "task": f"macro of {len(tasks)} tasks"}
        members = [[rows[i] for i in numbers] for numbers in tasks.values()]
        mean["has_random_weights"] = any(row["has_random_weights"] for task in members for row in task)
        for key in (*_SPEEDUPS, *_RATIOS):
            if key in mean:
                mean[key] = geometric_mean([geometric_mean([row[key] for row in task]) for task in members])
        for key in ("matl", "mean_accepted"):
            mean[key] = _mean([_mean([row[key] for row in task]) for task in members])
        if all(len(numbers) == 1 for numbers in tasks.values()):
            parts = [sums[numbers[0]] for numbers in tasks.values()]
            for key in ("matl", *_SPEEDUPS, *_RATIOS):
                if mean.get(key) is None or not all(key in part for part in parts):
                    continue
                each = [part[key] for part in parts]
                estimate = mean_over_tasks(each, is_geometric=key != "matl", seed=seed)
                mean[f"{key}_ci"] = estimate.interval
                if key != "matl":
                    mean[f"is_{key}_distinguishable"] = is_distinguishable(estimate)
        macro.append(mean)
    return macro


def _check_alike(runs: Sequence[LoadedRun], force: bool) -> list[str]:
    """Refuses what can't be compared and notes what makes speeds hard to compare."""
    notes = []
    groups: dict[tuple[str, str], list[LoadedRun]] = {}
    for run in runs:
        groups.setdefault((run.label("target"), run.label("task")), []).append(run)
    for (target, task), group in groups.items():
        for what, values in (
            ("prompts (fingerprint)", {str(run.run.get("fingerprint")): run for run in group}),
            ("target weights (hash)", {str(run.weights_hash): run for run in group}),
        ):
            if len(values) < 2:
                continue
            found = "; ".join(f"{value[:12]} in {run.path.name}" for value, run in values.items())
            message = f"target {target}, task {task}: {what} differ between runs: {found}"
            if not force:
                raise ValueError(f"runs: {message}; compare fewer runs, or set force=true")
            notes.append(f"forced: {message}")
    for name, kinds in (
        ("max_new_tokens", {_config(run, "max_new_tokens") for run in runs}),
        ("batch_size", {_config(run, "batch_size") for run in runs}),
        ("hardware", {_hardware(run) for run in runs}),
    ):
        if len(kinds) > 1:
            notes.append(f"the runs differ in {name}: {', '.join(sorted(map(str, kinds)))}")
    return notes


def _run_warnings(runs: Sequence[LoadedRun], seed: int) -> list[str]:
    """What makes single runs doubtful, each said once; with the runs' folders unless it holds for all."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for warning in run.summary(seed)["warnings"]:
            found.setdefault(warning, []).append(run.path.name)
    return [
        warning if len(names) == len(runs) else f"{', '.join(names)}: {warning}" for warning, names in found.items()
    ]


def _baseline_of(run: LoadedRun, runs: Sequence[LoadedRun], baseline: LoadedRun | str) -> LoadedRun | None:
    """The run that `baseline` names for this run, or None where it has none on this task."""
    if isinstance(baseline, LoadedRun):
        return baseline if baseline.label("task") == run.label("task") else None
    drafters = {each.label("drafter") for each in runs}
    named = [each for each in runs if _is_called(each, baseline)]
    if not named:
        allowed = ", ".join(sorted(drafters))
        raise ValueError(f"baseline={baseline}: not among the runs; allowed: a run's key or folder, or {allowed}")
    same = [each for each in named if each.label("task") == run.label("task")]
    if baseline in drafters:
        # Several runs may go by a drafter's name: take the one with the most settings in common, the run itself first.
        same = [each for each in same if each.label("target") == run.label("target")]

        def distance(each: LoadedRun) -> int:
            return sum(_setting(each, k) != _setting(run, k) for k in _SETTINGS if k != "drafter")

        same.sort(key=distance)
        same = [each for each in same if distance(each) == distance(same[0])]
        if len(same) > 1:
            keys = ", ".join(str(each.run.get("key")) for each in same)
            where = f"target {run.label('target')}, task {run.label('task')}"
            raise ValueError(
                f"baseline={baseline}: {len(same)} runs go by this name on {where}; name one by key: {keys}"
            )
    return same[0] if same else None


def _is_called(run: LoadedRun, name: str) -> bool:
    names = (run.label("drafter"), run.run.get("key"), run.run.get("run_key"), run.path.name)
    return name in names or Path(name).resolve() == run.path.resolve()


def _setting(run: LoadedRun, key: str) -> Any:
    if key == "dtype":
        return (run.run.get("provenance") or {}).get("dtype")
    return _config(run, key) if key == "batch_size" else run.label(key)


def _config(run: LoadedRun, key: str) -> Any:
    return (run.run.get("config") or {}).get(key)


def _hardware(run: LoadedRun) -> str:
    provenance = run.run.get("provenance") or {}
    for part, key in (("gpu", "name"), ("cpu", "model")):
        if isinstance(provenance.get(part), Mapping) and provenance[part].get(key):
            return str(provenance[part][key])
    return "unknown"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None

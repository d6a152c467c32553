"""`dispark calibrate`: fits temperatures for a drafter's confidences on prompts, and reports on others.

Every second prompt is for fitting, the rest for the report. Drafts are verified whole, so each round says for every
position whether it survived. Intervals redraw the prompts of the report; the fit stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig
from tqdm import tqdm

from dispark.checks import check_file, check_seed
from dispark.config import build, choices
from dispark.decoding.loop import DecodingLoop
from dispark.decoding.target import TargetModel
from dispark.drafters.confidence import CONFIDENCES
from dispark.interfaces import Drafter
from dispark.measure.stats import Estimate
from dispark.runs.files import dumps, write_atomic, write_text
from dispark.runs.table import to_text
from dispark.schedulers import calibration_file
from dispark.schedulers.calibration import Floats, Observations, fit
from dispark.schedulers.calibration_file import Fit
from dispark.schedulers.calibration_report import Rounds, diagrams, report
from dispark.targets.model import wrap
from dispark.targets.spec import LoadedTarget, load
from dispark.tasks.conversation import ConversationSource, check_lengths, context_need, render_fingerprint
from dispark.types import Draft, Load, Outcome, Prompt, Sampling


class ConfidenceRecorder:
    """A scheduler that verifies everything and keeps what was promised, row after row."""

    is_lossless = True

    def __init__(self) -> None:
        self.confidences: list[Floats] = []

    def bind(self, target: TargetModel) -> None:
        """Needs nothing of the target."""

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can."""
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """All of every draft. Raises ValueError for a draft without confidences."""
        if any(draft.lengths):
            if draft.confidence_BG is None:
                raise ValueError("drafter.confidence: this drafter gives none, so there is nothing to calibrate")
            self.confidences += list(draft.confidence_BG.double().cpu().numpy())
        else:
            self.confidences += [np.zeros(0)] * len(draft.lengths)
        return list(draft.lengths)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """The trace tells what came."""


def observations(trace_rounds: Sequence[Mapping[str, Any]], confidences: Sequence[Floats], width: int) -> Observations:
    """Promises and outcomes of a pass that verified every draft; a verify that the room cut short ends what is known.

    Args:
        trace_rounds: the loop's lines, a round of a row each.
        confidences: of the same rounds, in the same order.
        width: positions.
    """
    confidence_NG = np.zeros((len(trace_rounds), width))
    survived, known = [], []
    for i, (line, promised) in enumerate(zip(trace_rounds, confidences, strict=True)):
        num = line["num_drafted"]
        confidence_NG[i, :num] = promised[:num]
        survived.append(line["num_accepted_raw"])
        known.append(num if line["num_accepted_raw"] < line["num_verified"] else line["num_verified"])
    return Observations(confidence_NG, np.array(survived, dtype=np.int64), np.array(known, dtype=np.int64))


def run_calibrate(cfg: DictConfig) -> dict[str, Any]:
    """Fits, reports, writes the file and returns the headline figures.

    Raises:
        ValueError: a setting is refused, or the drafter has no such confidence.
    """
    _check(cfg)
    sampling: Sampling = build(cfg.sampling)
    drafters = _drafters(cfg)
    path = _path(cfg)
    check_file(path, "out")
    if path.is_file():
        calibration_file.load(path, f"out={path}")  # others' fits in there stay
    for key in ("rounds", "report"):
        if cfg[key] is not None:
            check_file(Path(cfg[key]), key)
    loaded = load(build(cfg.target))
    target = wrap(loaded)
    prompts, skipped = check_lengths(build(cfg.task).prompts(), loaded.tokenizer, loaded.max_context, "skip")
    if len(prompts) < 4:
        raise ValueError(f"task: has {len(prompts)} prompts that fit; at least 4 are needed, half of them to fit on")
    grid = np.geomspace(cfg.grid_low, cfg.grid_high, cfg.grid_size).round(6).tolist()
    fits, table, curves = [], [], {}
    seen: dict[str, Rounds] = {}
    for kind, drafter in drafters.items():
        found, fingerprint = _decode(cfg, loaded, target, drafter, sampling, prompts, kind)
        seen[kind] = found
        is_fit_N = found.prompt_N % 2 == 0
        ours, others = found.part(is_fit_N), found.part(~is_fit_N)
        calibration = fit(ours.observed, grid, cfg.num_bins)
        fits.append(
            Fit(
                kind,
                sampling,
                calibration,
                (getattr(drafter, "description", None) or {}).get("weights_sha256"),
                loaded.weights_sha256,
                {
                    "grid": [cfg.grid_low, cfg.grid_high, cfg.grid_size],
                    "num_bins": cfg.num_bins,
                    "task": choices().get("task"),
                    "fingerprint": fingerprint,
                    "num_prompts": len(set(ours.prompt_N.tolist())),
                    "num_rounds": len(ours.prompt_N),
                    "max_new_tokens": cfg.max_new_tokens,
                    "seed": cfg.seed,
                },
            )
        )
        lines = report(others, calibration, cfg.num_bins, cfg.seed)
        table += [{"confidence": kind, **line} for line in lines]
        curves[kind] = diagrams(others.observed, calibration, cfg.num_bins)
    if cfg.rounds is not None:
        write_rounds(Path(cfg.rounds), seen)
    calibration_file.save(path, fits)
    print(to_text(pd.DataFrame([_shown(line) for line in table], dtype=object)))
    means = {
        kind: {
            name: float(np.mean([line[name].value for line in table if line["confidence"] == kind]))
            for name in ("ece_before", "ece_after")
        }
        for kind in drafters
    }
    plain = [{key: asdict(v) if isinstance(v, Estimate) else v for key, v in line.items()} for line in table]
    result = {
        "out": str(path),
        "sampling": asdict(sampling),
        "mean_ece": means,
        "positions": plain,
        "reliability": curves,
        "num_skipped_prompts": len(skipped),
    }
    if cfg.report is not None:
        write_text(Path(cfg.report), dumps(result, indent=1) + "\n")
    return result


def write_rounds(path: Path, seen: Mapping[str, Rounds]) -> None:
    """Every round as it was promised, before any calibration, and as it came, for simulations: a Parquet file."""
    frames = []
    for kind, rounds in seen.items():
        o = rounds.observed
        frames.append(
            pd.DataFrame(
                {
                    "confidence": kind,
                    "prompt_id": rounds.prompt_N,
                    "promised": list(o.confidence_NG),
                    "num_survived": o.num_survived_N,
                    "num_known": o.num_known_N,
                }
            )
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda to: pd.concat(frames).to_parquet(to, compression="zstd", index=False))


def _decode(
    cfg: DictConfig,
    loaded: LoadedTarget,
    target: TargetModel,
    drafter: Drafter,
    sampling: Sampling,
    prompts: Sequence[Prompt],
    kind: str,
) -> tuple[Rounds, str]:
    """(every round with drafts, the fingerprint of what was asked)."""
    context = min(loaded.max_context, max(context_need(p, loaded.tokenizer, cfg.max_new_tokens) for p in prompts))
    recorder = ConfidenceRecorder()
    loop = DecodingLoop(
        target,
        drafter,
        recorder,
        build(cfg.verifier),
        sampling,
        decode=loaded.tokenizer.decode,
        batch_size=cfg.batch_size,
        num_slots=context + drafter.draft_length + 1,
        max_context=context,
    )
    source = ConversationSource(
        prompts,
        loaded.tokenizer,
        cfg.max_new_tokens,
        cfg.seed,
        stop_strings=[*loaded.stop_strings, *cfg.stop_strings],
        max_context=context,
    )
    with tqdm(total=len(prompts), desc=f"calibrate {kind}", unit="prompt", mininterval=5) as bar:
        finish = source.finish

        def finished(record: Any) -> None:
            finish(record)
            bar.update(record.request.turn == 0)

        source.finish = finished  # type: ignore[method-assign]
        trace = loop.run(source)
    observed = observations(trace.rounds, recorder.confidences, drafter.draft_length)
    number = {prompt.prompt_id: i for i, prompt in enumerate(prompts)}
    prompt_N = np.array([number[line["prompt_id"]] for line in trace.rounds], dtype=np.int64)
    has_drafts = observed.num_known_N > 0
    return Rounds(observed, prompt_N).part(has_drafts), render_fingerprint(source.rendered)


def _drafters(cfg: DictConfig) -> dict[str, Drafter]:
    """A drafter for each kind of confidence: those that were asked for, or all that it has."""
    if "confidence" not in cfg.drafter:
        name = choices().get("drafter", cfg.drafter.get("_target_"))
        raise ValueError(f"drafter={name}: gives no confidence, so there is nothing to calibrate")
    wanted = cfg.confidences
    if wanted is not None and not wanted:
        raise ValueError(f"confidences=[]: must name at least one of {', '.join(CONFIDENCES)}, or null for all it has")
    found: dict[str, Drafter] = {}
    for kind in CONFIDENCES if wanted is None else wanted:
        if kind not in CONFIDENCES:
            raise ValueError(f"confidences=[{kind}]: must be of {', '.join(CONFIDENCES)}")
        try:
            found[kind] = build(cfg.drafter, confidence=kind)
        except ValueError as error:
            if wanted is None and kind == "head" and str(error).startswith("drafter.confidence=head"):
                continue
            raise
    return found


def _path(cfg: DictConfig) -> Path:
    """Where the file goes: `out`, or beside the checkpoint."""
    if cfg.out is not None:
        return Path(cfg.out)
    checkpoint = Path(str(cfg.drafter.get("checkpoint") or ""))
    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"out=null: drafter.checkpoint={checkpoint} is no folder to put it beside; give out=FILE")
    return checkpoint / calibration_file.NAME


def _check(cfg: DictConfig) -> None:
    check_seed(cfg.seed)
    for key in ("num_bins", "batch_size", "max_new_tokens", "grid_size"):
        if cfg[key] < 1:
            raise ValueError(f"{key}={cfg[key]}: must be a whole number >= 1")
    if not 0.0 < cfg.grid_low <= 1.0 <= cfg.grid_high < float("inf"):
        raise ValueError(f"grid_low={cfg.grid_low}, grid_high={cfg.grid_high}: need 0 < grid_low <= 1 <= grid_high")


def _shown(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the printed table: percentages, before -> after."""
    cells = {
        "confidence": line["confidence"],
        "position": line["position"],
        "temperature": f"{line['temperature']:.2f}",
        "survives": f"{line['survives']:.1%}",
        "rounds": line["num_rounds"],
    }
    for name in ("ece", "auc", "brier"):
        cells[name] = f"{_cell(line[f'{name}_before'])} -> {_cell(line[f'{name}_after'])}"
    return cells


def _cell(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    interval = "" if estimate.interval is None else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f}{interval}"

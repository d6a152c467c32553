"""Calibrations as a file beside a checkpoint, and what they hold for.

Confidences mean different things by kind, by sampling settings and by drafter, so each fit is stored with all three and
used for no other. It knows neither how to fit (calibration.py) nor who asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dispark.runs.files import dumps, write_text
from dispark.schedulers.calibration import Calibration
from dispark.types import Sampling

NAME = "calibration.json"
_VERSION = 1


@dataclass(frozen=True)
class Fit:
    """One calibration.

    Args:
        confidence: kind, as in `drafter.confidence`.
        sampling: settings of the rounds it was fitted on.
        calibration: temperatures by position.
        drafter_sha256, target_sha256: of the weights; None for a drafter without any of its own.
        fitted_on: grid, bins, and the prompts and rounds; for people, and for the record.
    """

    confidence: str
    sampling: Sampling
    calibration: Calibration
    drafter_sha256: str | None
    target_sha256: str
    fitted_on: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, Sampling]:
        return self.confidence, self.sampling


def save(path: Path, fits: Sequence[Fit]) -> None:
    """Writes fits; those of other kinds and samplings that the file holds for the same weights stay.

    Raises:
        ValueError: the file is there and is no calibration.
    """
    kept = load(path, str(path)) if path.is_file() else []
    new = {fit.place for fit in fits}
    weights = {(fit.drafter_sha256, fit.target_sha256) for fit in fits}
    kept = [fit for fit in kept if fit.place not in new and (fit.drafter_sha256, fit.target_sha256) in weights]
    lines = [
        {
            "confidence": fit.confidence,
            "sampling": asdict(fit.sampling),
            "temperatures": list(fit.calibration.temperatures),
            "drafter_sha256": fit.drafter_sha256,
            "target_sha256": fit.target_sha256,
            "fitted_on": fit.fitted_on,
        }
        for fit in [*kept, *fits]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, dumps({"version": _VERSION, "fits": lines}, indent=1) + "\n")


def load(path: Path, key: str) -> list[Fit]:
    """All fits of a file.

    Args:
        path: the file.
        key: what named it, for messages.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"{key}: there is no file {path}; 'dispark calibrate' writes one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}")
        return [
            Fit(
                line["confidence"],
                Sampling(**line["sampling"]),
                Calibration(tuple(line["temperatures"])),
                line["drafter_sha256"],
                line["target_sha256"],
                line["fitted_on"],
            )
            for line in content["fits"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{key}: {path} is no calibration of this version: {error}") from error


def choose(fits: Sequence[Fit], confidence: str, sampling: Sampling, key: str) -> Fit:
    """The fit of a kind and of sampling settings. Raises ValueError, naming those that there are, if there is none."""
    for fit in fits:
        if fit.place == (confidence, sampling):
            return fit
    there = ", ".join(f"{fit.confidence} at {words(fit.sampling)}" for fit in fits)
    raise ValueError(f"{key}: holds no calibration of {confidence} at {words(sampling)}; it has {there or 'none'}")


def words(sampling: Sampling) -> str:
    """Sampling settings in short."""
    parts = [f"temperature {sampling.temperature:g}"]
    parts += [f"{name} {value:g}" for name in ("top_k", "top_p") if (value := getattr(sampling, name)) is not None]
    return " ".join(parts)

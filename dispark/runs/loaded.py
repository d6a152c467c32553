"""Reads finished runs back for tables and figures: run.json beside the frames, and the arm that the run is about.

It takes run folders as the store wrote them and knows nothing about what the figures mean. Unfinished and failed runs
are never read, only named.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from dispark.measure.metrics import summarise
from dispark.measure.throughput import BASELINE_ARM, of_arm
from dispark.runs.store import StoredRun, load

log = logging.getLogger(__name__)

_REPAIR = "remove the folder, or run with overwrite=true"


@dataclass
class LoadedRun:
    """A finished run with its frames; `arm` is its drafter's arm, or the autoregressive one if there is no other."""

    stored: StoredRun
    _summaries: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def path(self) -> Path:
        return self.stored.path

    @property
    def run(self) -> dict[str, Any]:
        return self.stored.run

    @cached_property
    def rounds(self) -> pd.DataFrame:
        return self.stored.rounds()

    @cached_property
    def steps(self) -> pd.DataFrame:
        return self.stored.steps()

    @cached_property
    def requests(self) -> pd.DataFrame:
        rows = self.stored.requests()
        if not rows:
            raise ValueError(f"{self.path}: requests.jsonl has no line; {_REPAIR}")
        if any(not isinstance(row, dict) or not {"arm", "repeat", "request_id"} <= set(row) for row in rows):
            raise ValueError(f"{self.path}: requests.jsonl has lines without arm, repeat and request_id; {_REPAIR}")
        return pd.DataFrame([{key: value for key, value in row.items() if key != "output_ids"} for row in rows])

    @cached_property
    def arm(self) -> str:
        # Arms that decode outside the loop are named after a library call, with a dot.
        arms = [arm for arm in self.requests["arm"].unique() if arm != BASELINE_ARM and "." not in arm]
        if len(arms) > 1 and self.label("drafter") in arms:
            return self.label("drafter")
        return str(arms[0]) if arms else BASELINE_ARM

    @property
    def arms(self) -> list[str]:
        """All arms: the autoregressive one, the run's own, then those that decode outside the loop."""
        rank = {BASELINE_ARM: 0, self.arm: 1}
        return sorted(map(str, self.requests["arm"].unique()), key=lambda arm: (rank.get(arm, 2), arm))

    def draft_length(self, arm: str) -> int:
        """Most tokens that the arm drafted in a round; 0 for an arm without rounds."""
        drafted = of_arm(self.rounds, arm)
        return int(drafted["num_drafted"].max()) if len(drafted) else 0

    def label(self, key: str) -> str:
        """A part of the run in a word: target, task, drafter, scheduler, verifier or sampling."""
        return _label(self.run.get(key))

    def summary(self, seed: int = 0, arm: str | None = None) -> dict[str, Any]:
        """The summary of an arm, by default the run's own, computed from the records."""
        key = (arm or self.arm, seed)
        if key not in self._summaries:
            self._summaries[key] = summarise(
                self.rounds,
                self.steps,
                self.requests,
                arm=key[0],
                draft_length=self.draft_length(key[0]),
                seed=seed,
                energy=self.of("energy", arm),
            )
        return self._summaries[key]

    def of(self, part: str, arm: str | None = None) -> Mapping[str, Any]:
        """What run.json holds about an arm, by default the run's own: energy, memory, losslessness or degeneracy."""
        return (self.run.get(part) or {}).get(arm or self.arm) or {}

    @property
    def has_random_weights(self) -> bool:
        """Whether the drafter was made with random weights, for speed only."""
        return bool((self.run.get("drafter_weights") or {}).get("is_random"))

    @property
    def weights_hash(self) -> str | None:
        """Hash of the target's weights, wherever run.json keeps it."""
        provenance = self.run.get("provenance") or {}
        for place in (provenance, provenance.get("extra"), self.run.get("target"), self.run):
            for key, value in place.items() if isinstance(place, Mapping) else ():
                if key.startswith("weights") and isinstance(value, str):
                    return value
        return None


def find_runs(paths: Iterable[str | Path]) -> tuple[list[LoadedRun], dict[str, str]]:
    """Finished runs under the paths, and what is unfinished or failed there: reason by folder.

    Args:
        paths: run folders, folders that hold runs at any depth, or glob patterns of either.

    Raises:
        ValueError: a path matches nothing, or a run is damaged.
    """
    finished: dict[Path, LoadedRun] = {}
    unfinished: dict[str, str] = {}
    for folder in _folders(paths):
        for stored in load(folder):
            if "kind" in stored.run:  # of dispark serve or simulate, which are read elsewhere
                continue
            finished.setdefault(stored.path.resolve(), LoadedRun(stored))
        for config in sorted(folder.rglob("config.yaml")):
            place = config.parent
            is_whole = (place / "done").is_file() and (place / "run.json").is_file()
            if not is_whole and not any(p.startswith(".") for p in place.relative_to(folder).parts):
                unfinished[str(place)] = _why_unfinished(place)
    return list(finished.values()), unfinished


def load_runs(paths: Iterable[str | Path]) -> list[LoadedRun]:
    """Finished runs under the paths; unfinished and failed ones are logged as warnings.

    Raises:
        ValueError: a path matches nothing, there is no finished run, or a run is damaged.
    """
    paths = list(paths)
    runs, unfinished = find_runs(paths)
    for place, reason in unfinished.items():
        log.warning("%s: left out, %s", place, reason)
    if not runs:
        where = ", ".join(map(str, paths))
        raise ValueError(f"runs={where}: no finished run there ({len(unfinished)} unfinished); give folders of runs")
    return runs


def _label(value: Any) -> str:
    """A word for a name, a group with a name, or sampling settings."""
    if not isinstance(value, Mapping):
        return "-" if value is None else str(value)
    if value.get("name"):
        return str(value["name"])
    if "temperature" in value:
        if not value["temperature"]:
            return "greedy"
        limits = "".join(f" {key}={value[key]}" for key in ("top_k", "top_p") if value.get(key) is not None)
        return f"T={value['temperature']:g}{limits}"
    return " ".join(f"{key}={item}" for key, item in value.items())


def _folders(paths: Iterable[str | Path]) -> list[Path]:
    folders = []
    for path in paths:
        matches = [path] if Path(path).is_dir() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        found = [Path(match) for match in matches if Path(match).is_dir()]
        if not found:
            raise ValueError(f"runs={path}: no such folder; give folders of runs")
        folders += found
    return folders


def _why_unfinished(place: Path) -> str:
    if (place / "done").is_file():
        return "damaged: run.json is missing"
    error = place / "error.txt"
    if not error.is_file():
        return "unfinished"
    lines = error.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"failed: {lines[-1]}" if lines else "failed"

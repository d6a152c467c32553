"""Verifies exactly what will be accepted: the bound that no scheduler can pass, from a run that was recorded before.

A run with everything verified, of the same drafter on the same prompts at temperature 0, tells at every place of every
text how many drafts the target accepts there. This scheduler reads that and verifies so many: nothing is wasted, and
the texts stay. It can't be deployed, and it is not lossless in general: at temperatures above 0 what it knows are the
very draws that it decides about.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from dispark.decoding.target import TargetModel
from dispark.types import AGAIN, Draft, Load, Outcome

log = logging.getLogger(__name__)

Accepted = dict[str, dict[int, int]]  # by request: by tokens it had before the round, accepted drafts


class OracleScheduler:
    """Args: path: folder of the recorded run, of `dispark bench` with scheduler=fixed and greedy sampling."""

    is_lossless = False

    def __init__(self, path: str) -> None:
        self._key = f"scheduler.path={path}"
        self._accepted = read_run(Path(path), self._key)
        self._names: list[str] = []
        self._num_tokens: dict[str, int] = {}
        self._has_warned = False

    def bind(self, target: TargetModel) -> None:
        """All texts begin anew."""
        self._num_tokens = {}

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can."""
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """What was accepted at each row's place; the whole draft where the record doesn't go there, with a warning.

        Raises:
            ValueError: a request that the run didn't have.
        """
        self._names = load.request_ids
        self.check_requests(self._names)
        found = []
        for name, length in zip(self._names, draft.lengths, strict=True):
            num = self._accepted[name.partition(AGAIN)[0]].get(self._num_tokens.setdefault(name, 1))
            if num is None and length > 0 and not self._has_warned:
                log.warning("%s: %s parts from its record; drafts are verified whole there", self._key, name)
                self._has_warned = True
            found.append(length if num is None else min(num, length))
        return found

    def check_requests(self, names: Sequence[str]) -> None:
        """Raises ValueError for a request that the run didn't have."""
        for name in names:
            if name.partition(AGAIN)[0] not in self._accepted:
                raise ValueError(f"{self._key}: has no request {name}; it must be a run of the same task")

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Follows the texts."""
        for name, tokens in zip(self._names, outcome.emitted, strict=True):
            self._num_tokens[name] += len(tokens)


def read_run(folder: Path, key: str) -> Accepted:
    """Accepted drafts that the text kept, at every place of the texts of a recorded run's own arm.

    Raises:
        ValueError: no finished run, or one that can't tell.
    """
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        rounds = pd.read_parquet(folder / "rounds.parquet")
        arm, sampling, scheduler = run["drafter"], run["sampling"], run["scheduler"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{key}: is no folder of a finished run: {error}") from error
    if sampling["temperature"] != 0.0:
        raise ValueError(f"{key}: was recorded at temperature {sampling['temperature']}; must be 0")
    if scheduler != "fixed" or _max_verify_length(run) is not None:
        raise ValueError(f"{key}: was recorded with scheduler={scheduler}; must be fixed, which verifies everything")
    found: Accepted = {}
    mine = rounds[(rounds["arm"] == arm) & (rounds["repeat"] == 0)]
    for name, group in mine.sort_values("round").groupby("request_id", sort=False):
        before = 1 + group["num_emitted"].cumsum() - group["num_emitted"]
        found[str(name)] = dict(zip(before.tolist(), group["num_accepted"].tolist(), strict=True))
    if not found:
        raise ValueError(f"{key}: has no rounds of its drafter {arm}")
    return found


def _max_verify_length(run: Mapping[str, object]) -> object:
    config = run["config"]
    assert isinstance(config, dict)
    return config["scheduler"].get("max_verify_length")

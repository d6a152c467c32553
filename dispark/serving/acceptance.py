"""What drafts promise and what comes of them, for a simulation: rounds that were recorded, or rates that are assumed.

A simulated request is given the rounds of one recorded prompt, from a random place on and round again, so that easy
texts stay easy and what confidence and acceptance have to do with each other stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]

_MOST_TURNS = 100


class Acceptance(Protocol):
    """A supply of rounds."""

    draft_length: int

    def rounds(self, request_id: str, seed: int) -> RoundStream:
        """Those of a new request."""


class RoundStream(Protocol):
    """Rounds of one request."""

    def next(self) -> tuple[Floats, int]:
        """(confidence of each draft given those before, how many the target would accept)."""


class RecordedAcceptance:
    """Rounds that `dispark calibrate rounds=FILE` wrote.

    Args:
        path: the file.
        confidence: which kind of confidence.
        draft_length: the first so many drafts of each round; None takes all.

    Raises:
        ValueError: no such file, or one without whole rounds of that kind.
    """

    def __init__(self, path: str, confidence: str = "head", draft_length: int | None = None) -> None:
        key = f"acceptance.path={path}"
        try:
            frame = pd.read_parquet(Path(path).expanduser())
            frame = frame[frame["confidence"] == confidence]
            whole = frame[frame["num_known"] == frame["promised"].map(len)]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{key}: holds no recorded rounds; dispark calibrate rounds=FILE writes them") from error
        if not len(whole):
            raise ValueError(f"{key}: has no whole rounds of confidence {confidence}")
        longest = max(map(len, whole["promised"]))
        if draft_length is not None and not 1 <= draft_length <= longest:
            raise ValueError(f"acceptance.draft_length={draft_length}: must lie in 1 to {longest}, as was recorded")
        self.draft_length = longest if draft_length is None else draft_length
        whole = whole[whole["promised"].map(len) == longest]
        self._prompts = [
            (np.stack(group["promised"].to_list()).astype(np.float64), group["num_survived"].to_numpy(np.int64))
            for _, group in whole.groupby("prompt_id", sort=True)
        ]

    def rounds(self, request_id: str, seed: int) -> RoundStream:
        """See Acceptance."""
        generator = np.random.default_rng(seed % 2**32)
        promised, survived = self._prompts[generator.integers(len(self._prompts))]
        return _Recorded(promised[:, : self.draft_length], survived, int(generator.integers(len(survived))))


class _Recorded:
    def __init__(self, promised: Floats, survived: npt.NDArray[np.int64], place: int) -> None:
        self._promised, self._survived, self._place = promised, survived, place

    def next(self) -> tuple[Floats, int]:
        place, self._place = self._place, (self._place + 1) % len(self._survived)
        return self._promised[place], min(int(self._survived[place]), self._promised.shape[1])


class AssumedAcceptance:
    """Stated conditional acceptance by position, with confidences that are right on average.

    Each request has an ease of its own, each draft scatters around it; a confidence is the very chance it is drawn by.
    The rates are what comes out over all rounds of many requests of one length with every draft verified: that hard
    requests take more rounds, and that later positions are reached by the easy ones, is reckoned with.

    Args:
        rates: conditional acceptance at positions 1, 2, ...
        spread: standard deviation of both, in logits; 0 makes every draft alike.
    """

    def __init__(self, rates: Sequence[float], spread: float = 1.0) -> None:
        if not rates or not all(0.0 < rate < 1.0 for rate in rates):
            raise ValueError(f"acceptance.rates={list(rates)}: must be numbers between 0 and 1, at least one")
        if not spread >= 0.0:
            raise ValueError(f"acceptance.spread={spread}: must be a number >= 0")
        self.draft_length = len(rates)
        self._logits, self._spread = _solved(np.asarray(rates, dtype=np.float64), spread), spread

    def rounds(self, request_id: str, seed: int) -> RoundStream:
        """See Acceptance."""
        generator = np.random.default_rng(seed % 2**32)
        return _Assumed(self._logits + self._spread * generator.normal(), self._spread, generator)


class _Assumed:
    def __init__(self, logits: Floats, spread: float, generator: np.random.Generator) -> None:
        self._logits, self._spread, self._generator = logits, spread, generator

    def next(self) -> tuple[Floats, int]:
        logits = self._logits + self._spread * self._generator.normal(size=self._logits.shape)
        confidence: Floats = 1.0 / (1.0 + np.exp(-logits))
        comes = self._generator.random(len(confidence)) < confidence
        return confidence, int(comes.cumprod().sum())


def _solved(rates: Floats, spread: float) -> Floats:
    """Logits at which the rates come out.

    With ease e, position k survives with chance p_k(e), the mean over its scatter; S_k = p_1 ... p_k. A request of
    ease e takes 1 / (1 + sum of S_k(e)) rounds a token, and over all rounds so weighted the conditional rate at k is
    mean S_k / mean S_(k-1). Each position is found by halving, given those before it and the weights; the weights
    follow from all positions, until nothing moves.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    weights = weights / weights.sum()

    def chance(logit: float) -> Floats:
        """[E] by ease."""
        found: Floats = (weights / (1.0 + np.exp(-(logit + spread * (nodes[:, None] + nodes))))).sum(axis=1)
        return found

    logits = np.log(rates / (1.0 - rates))
    rounds = weights
    for _ in range(_MOST_TURNS):
        before, survives, total = logits.copy(), np.ones(len(nodes)), np.ones(len(nodes))
        for k, rate in enumerate(rates):
            reached = rounds * survives
            low, high = -40.0, 40.0
            for _ in range(60):
                middle = (low + high) / 2
                is_low = float(reached @ chance(middle)) < rate * float(reached.sum())
                low, high = (middle, high) if is_low else (low, middle)
            logits[k] = (low + high) / 2
            survives = survives * chance(logits[k])
            total = total + survives
        rounds = weights / total
        rounds = rounds / rounds.sum()
        if float(np.abs(logits - before).max()) < 1e-9:
            break
    return logits

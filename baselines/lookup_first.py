"""Copies where a text repeats itself, and asks another drafter where it doesn't.

A lookup costs nothing and is nearly always right inside a loop, a list or a quotation, where learned drafters of a few
layers are not; elsewhere it mostly finds nothing, or nonsense (SuffixDecoding, Oliaro et al. 2024, falls back on a
learned drafter likewise). Row by row, whatever the lookup finds is the draft. A copied token is a point mass, so next
to drafts that are sampled it is verified as q = 1: the law of what comes out stays the target's.

It knows neither how lookups are done nor what the other drafter is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.types import Draft, Features, Outcome, Request, Sampling


class LookupFirstDrafter:
    """Two drafters, the second for rows that the first has nothing for.

    Args:
        lookup: a drafter that copies; its proposals are "deterministic" and need no features.
        otherwise: any drafter.
        lookup_confidence: what a copied token promises to survive with, beside the other drafter's own confidences.

    Raises:
        ValueError: the first drafter samples or reads features, or the confidence is no chance.
    """

    def __init__(self, lookup: Drafter, otherwise: Drafter, lookup_confidence: float = 0.8) -> None:
        if lookup.proposal != "deterministic" or lookup.feature_layers:
            raise ValueError(f"drafter.lookup: {type(lookup).__name__} doesn't copy; must be a lookup, as ngram is")
        if not 0.0 <= lookup_confidence <= 1.0:
            raise ValueError(f"drafter.lookup_confidence={lookup_confidence}: must lie in 0 to 1")
        self._lookup, self._otherwise, self._lookup_confidence = lookup, otherwise, lookup_confidence
        self.draft_length = max(lookup.draft_length, otherwise.draft_length)
        self.proposal: Literal["sampled", "deterministic"] = otherwise.proposal
        self._vocab_size = 0

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Those of the other drafter, which may know them once it is bound."""
        return self._otherwise.feature_layers

    @property
    def description(self) -> Any:
        """Of the other drafter's weights; None where it has none."""
        return getattr(self._otherwise, "description", None)

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Binds both."""
        self._vocab_size = target.vocab_size
        for drafter in (self._lookup, self._otherwise):
            drafter.bind(target, num_rows, num_slots)
        self.draft_length = max(self._lookup.draft_length, self._otherwise.draft_length)

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """Both begin."""
        for drafter in (self._lookup, self._otherwise):
            drafter.begin(rows, requests, first_tokens, features)

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """What the lookup finds; the other drafter works for the rows that are left, if there are any."""
        found = self._lookup.propose(rows, anchors_B, sampling, generators, _at_most(self._lookup, limit))
        left = [i for i, length in enumerate(found.lengths) if length == 0]
        most = _at_most(self._otherwise, limit)
        if not left or most == 0:
            return self._joined(found, None, left, sampling)
        names, index = [rows[i] for i in left], torch.tensor(left, device=anchors_B.device)
        drafted = self._otherwise.propose(names, anchors_B[index], sampling, generators.part(left), most)
        return self._joined(found, drafted, left, sampling)

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """Both learn what was emitted."""
        for drafter in (self._lookup, self._otherwise):
            drafter.update(rows, outcome, features)

    def drop(self, rows: Sequence[int]) -> None:
        """Both forget the rows."""
        for drafter in (self._lookup, self._otherwise):
            drafter.drop(rows)

    def _joined(self, found: Draft, drafted: Draft | None, left: Sequence[int], sampling: Sampling) -> Draft:
        """One draft of both, copied rows with point masses where the other drafter's tokens come with a law."""
        lengths, device = list(found.lengths), found.tokens_BG.device
        width = max(found.tokens_BG.shape[1], 0 if drafted is None else drafted.tokens_BG.shape[1])
        tokens_BG = F.pad(found.tokens_BG, (0, width - found.tokens_BG.shape[1]))
        has_law = self.proposal == "sampled" and not sampling.is_greedy and width > 0
        confidence_BG: Tensor | None = torch.full(tokens_BG.shape, self._lookup_confidence, device=device)
        if drafted is None:
            probs_BGV = F.one_hot(tokens_BG, self._vocab_size).float() if has_law else None
            return Draft(tokens_BG, lengths, probs_BGV, confidence_BG)
        for i, length in zip(left, drafted.lengths, strict=True):
            lengths[i] = length
        index, num = torch.tensor(left, device=device), drafted.tokens_BG.shape[1]
        tokens_BG[index, :num] = drafted.tokens_BG
        probs_BGV = F.one_hot(tokens_BG, self._vocab_size).float() if has_law else None
        if probs_BGV is not None and drafted.probs_BGV is not None:
            probs_BGV = probs_BGV.to(drafted.probs_BGV.dtype)
            probs_BGV[index, :num] = drafted.probs_BGV
        if drafted.confidence_BG is None:
            confidence_BG = None
        elif confidence_BG is not None:
            confidence_BG = confidence_BG.to(drafted.confidence_BG.dtype)
            confidence_BG[index, :num] = drafted.confidence_BG
        return Draft(tokens_BG, lengths, probs_BGV, confidence_BG)


def _at_most(drafter: Drafter, limit: int | None) -> int:
    return drafter.draft_length if limit is None else min(limit, drafter.draft_length)

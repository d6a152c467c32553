"""Autoregressive decoding as a drafter that never drafts: every round verifies the anchor alone.

So the baseline runs in the very loop, cache and clock of the methods it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.target import TargetModel
from dispark.types import Draft, Features, Outcome, Request, Sampling, no_draft


class AutoregressiveDrafter:
    """Proposes nothing."""

    draft_length = 0
    feature_layers: tuple[int, ...] = ()
    proposal: Literal["sampled", "deterministic"] = "deterministic"

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Needs nothing from the target."""

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """Keeps no state."""

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """An empty draft."""
        return no_draft(anchors_B)

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """Keeps no state."""

    def drop(self, rows: Sequence[int]) -> None:
        """Keeps no state."""

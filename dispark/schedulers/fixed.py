"""Verifies everything that was drafted, or at most a fixed number of tokens of it.

It looks at nothing but the draft's lengths, so it can't anticipate anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispark.decoding.target import TargetModel
from dispark.types import Draft, Load, Outcome


class FixedScheduler:
    """verify_length = min(drafted, max_verify_length).

    Args:
        max_verify_length: cap on verified drafts per row, or None for no cap.
    """

    is_lossless = True

    def __init__(self, max_verify_length: int | None = None) -> None:
        if max_verify_length is not None and max_verify_length < 0:
            raise ValueError(
                f"scheduler.max_verify_length={max_verify_length}: must be a whole number >= 0, or null for no cap"
            )
        self.max_verify_length = max_verify_length

    def bind(self, target: TargetModel) -> None:
        """Needs nothing of the target."""

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can."""
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """See `dispark.interfaces.Scheduler`."""
        if self.max_verify_length is None:
            return list(draft.lengths)
        return [min(length, self.max_verify_length) for length in draft.lengths]

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Learns nothing."""

"""Verifies a draft up to the first token whose confidence is below a threshold (DSpark's static rule).

The rule looks at each slot's own conditional confidence, not at the product. Whether token k is verified depends on the
confidences of tokens 1..k, which are known before token k is drawn, so the rule doesn't anticipate.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispark.decoding.target import TargetModel
from dispark.types import Draft, Load, Outcome


class ThresholdScheduler:
    """Args: threshold: in [0, 1]; 0 verifies everything."""

    is_lossless = True

    def __init__(self, threshold: float = 0.5) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0.0 <= threshold <= 1.0:
            raise ValueError(f"scheduler.threshold={threshold}: must be a number from 0 to 1")
        self._threshold = float(threshold)

    def bind(self, target: TargetModel) -> None:
        """Needs nothing of the target."""

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can."""
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """The number of leading drafts at or above the threshold, per row.

        Raises:
            ValueError: the drafter gives no confidence.
        """
        if self._threshold == 0.0 or not any(draft.lengths):  # the autoregressive arm drafts nothing
            return list(draft.lengths)
        if draft.confidence_BG is None:
            raise ValueError(
                "scheduler=threshold: the drafter gives no confidence; allowed: a drafter with confidence=head, peak "
                "or entropy, or scheduler=fixed"
            )
        is_sure_BG = draft.confidence_BG >= self._threshold
        num_sure = is_sure_BG.int().cumprod(-1).sum(-1).tolist()  # a device sync of its own
        return [min(n, length) for n, length in zip(num_sure, draft.lengths, strict=True)]

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Nothing to learn."""

"""Verifies by tiers of confidence: much at once where the drafter is sure, token by token where it is not.

A draft is walked from its front. The confidence of the next token names a tier, the tier says how many tokens are
verified before the next look, and a tier of 0 tokens ends the walk. Whether token k is verified hangs on confidences up
to token k alone, which are known before it is drawn, so the rule doesn't anticipate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dispark.decoding.target import TargetModel
from dispark.types import Draft, Load, Outcome


class TieredScheduler:
    """Args: tiers: each with `confidence`, the least that it takes, in [0, 1], and `tokens`, how many to verify before
    the next look, null for all that are left; from the surest down, the last with confidence 0."""

    is_lossless = True

    def __init__(self, tiers: Sequence[Mapping[str, Any]]) -> None:
        self._tiers = [_tier(tier, i) for i, tier in enumerate(tiers)]
        bounds = [bound for bound, _ in self._tiers]
        if not bounds or bounds != sorted(set(bounds), reverse=True) or bounds[-1] != 0.0:
            raise ValueError(
                f"scheduler.tiers: confidences {bounds} must fall from tier to tier and end at 0, at least one tier"
            )

    def bind(self, target: TargetModel) -> None:
        """Needs nothing of the target."""

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can."""
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """See `dispark.interfaces.Scheduler`.

        Raises:
            ValueError: the drafter gives no confidence.
        """
        if not any(draft.lengths):
            return list(draft.lengths)
        if draft.confidence_BG is None:
            raise ValueError(
                "scheduler=tiered: the drafter gives no confidence; allowed: a drafter with confidence=head, peak or "
                "entropy, or scheduler=fixed"
            )
        rows = draft.confidence_BG.tolist()  # a device sync of its own
        return [self._walk(row, length) for row, length in zip(rows, draft.lengths, strict=True)]

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Nothing to learn."""

    def _walk(self, confidence: Sequence[float], length: int) -> int:
        at = 0
        while at < length:
            tokens = next(tokens for bound, tokens in self._tiers if confidence[at] >= bound)
            if tokens == 0:
                break
            at = length if tokens is None else min(length, at + tokens)
        return at


def _tier(tier: Mapping[str, Any], index: int) -> tuple[float, int | None]:
    """(confidence, tokens). Raises ValueError for anything else."""
    key = f"scheduler.tiers[{index}]"
    if not isinstance(tier, Mapping) or set(tier) != {"confidence", "tokens"}:
        raise ValueError(f"{key}={tier}: must have confidence and tokens")
    bound, tokens = tier["confidence"], tier["tokens"]
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0.0 <= bound <= 1.0:
        raise ValueError(f"{key}.confidence={bound}: must be a number from 0 to 1")
    if tokens is not None and (type(tokens) is not int or tokens < 0):
        raise ValueError(f"{key}.tokens={tokens}: must be a whole number >= 0, or null for all")
    return float(bound), tokens

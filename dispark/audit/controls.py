"""Negative controls: compositions that are not lossless, which an audit has to find; one has published numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dispark.audit.world import Tokens, Vector
from dispark.decoding.target import TargetModel
from dispark.schedulers.hardware_aware import HardwareAwareScheduler, throughputs
from dispark.schedulers.step_cost import StepCost
from dispark.schedulers.survival import best_first, lengths_of, survival_of
from dispark.types import Draft, Load, Outcome, Sampling


@dataclass(frozen=True)
class AppendixAWorld:
    """The counterexample of Cheng et al. 2026, Appendix A: tokens A = 0 and B = 1, p = (0.7, 0.3), q = (0.5, 0.5)."""

    vocab_size: int = 2
    draft_length: int = 2
    num_rows: int = 1
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    proposal: Literal["sampled", "deterministic"] = "sampled"

    def target_logits(self, row: int, prefix: Tokens) -> Tensor:
        return torch.tensor([0.7, 0.3], dtype=torch.float64).log()

    def draft_probs(self, row: int, text: Tokens, drafted: Tokens) -> Vector:
        return np.array([0.5, 0.5])

    def drawn_probs(self, row: int, text: Tokens, drafted: Tokens) -> Vector:
        return np.array([0.5, 0.5])

    def confidence(self, row: int, text: Tokens, drafted: Tokens) -> float | None:
        tokens = text + drafted
        if not tokens:
            return 0.8
        return 0.9 if tokens[-1] == 0 else 0.0

    def num_drafted(self, row: int, text: Tokens) -> int:
        return self.draft_length


# SPS(1, 2, 3) = 1.0, 0.5, 0.45.
APPENDIX_A_COST = StepCost((1, 2, 3), (1.0, 1 / 0.5, 1 / 0.45))
# First token: what the target says, and what comes out without the early stop.
APPENDIX_A_RIGHT, APPENDIX_A_WRONG = (0.7, 0.3), (0.85, 0.15)


class WithoutStopScheduler(HardwareAwareScheduler):
    """Algorithm 1 without its early stop: the best of the whole curve, in the same step."""

    is_lossless = False

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can."""
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """See `dispark.interfaces.Scheduler`."""
        survival = survival_of(draft, "without_stop")
        order = best_first(survival)
        cost = self._costs.of(len(draft.lengths))
        best = int(throughputs(survival.ravel()[order], len(draft.lengths), cost).argmax())
        return lengths_of(order[:best], survival.shape)


class RetrospectiveScheduler:
    """Ranks each draft by the confidence behind it, which knows the draft itself."""

    is_lossless = False

    def bind(self, target: TargetModel) -> None:
        """Needs nothing of the target."""

    def draft_limit(self, load: Load) -> int | None:
        """As many as the drafter can."""
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """See `dispark.interfaces.Scheduler`."""
        assert draft.confidence_BG is not None
        behind = torch.cat([draft.confidence_BG[:, 1:], draft.confidence_BG[:, -1:]], dim=1)
        return [int(n) for n in (behind >= 0.5).int().cumprod(-1).sum(-1)]

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Nothing to learn."""

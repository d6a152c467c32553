"""Losses of block-parallel drafters (DSpark, Cheng et al. 2026, section 3; DFlash is the cross entropy alone).

Five parts, each a weighted mean over supervised slots:

- cross entropy against the text's own token;
- the L1 distance between draft and target distributions (twice their total variation);
- soft cross entropy against the target's distribution (its gradient is that of the KL divergence);
- binary cross entropy of the confidence against the chance that the token is accepted, 1 - L1 / 2, which gets no
  gradient;
- the smooth L1 distance between the final state behind the base logits and the target's: the regression of EAGLE (Li et
  al. 2024), which neither DSpark nor DFlash has.

Slot k of a block weighs w_k. The paper writes w_k = exp(-(k - 1) / block size), k from 1; DeepSpec's code takes
exp(-k / 4), k from 0: `decay` is either. A token that a reduced vocabulary lacks has no cross entropy; its slot counts
in the other parts.

It knows neither networks nor data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dispark.training.distances import ProbsAt, SlotWeights, distances

_EPSILON = 1e-6  # in a denominator that may be 0 where nothing is supervised


@dataclass(frozen=True)
class BlockLossWeights:
    """Factors of the parts, and how slots decay: exp(-k / decay), k from 0; None weighs all alike."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0
    soft: float = 0.0
    state: float = 0.0

    def __post_init__(self) -> None:
        keys = ("ce", "l1", "confidence", "soft", "state")
        for key in keys:
            if not getattr(self, key) >= 0:
                raise ValueError(f"loss.{key}={getattr(self, key)}: must be at least 0")
        if not sum(getattr(self, key) for key in keys) > 0:
            raise ValueError(f"loss.{'=0, '.join(keys)}=0: at least one must be above 0")
        if self.decay is not None and not self.decay > 0:
            raise ValueError(f"loss.decay={self.decay}: must be above 0, or null for no decay")

    def slots(self, num_slots: int, device: torch.device) -> Tensor:
        """float32 [G] weights of a block's slots."""
        if self.decay is None:
            return torch.ones(num_slots, device=device)
        return torch.exp(-torch.arange(num_slots, device=device, dtype=torch.float32) / self.decay)


@dataclass(frozen=True)
class BlockLoss:
    """The total, with gradient, and its parts before their factors, scalars without; accept_BAG are float32 1 - L1 / 2
    of every slot, is_right_BAG whether the two most likely tokens agree."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    soft: Tensor
    confidence: Tensor
    state: Tensor
    accept_BAG: Tensor
    is_right_BAG: Tensor


@dataclass(frozen=True)
class BlockTruth:
    """What the slots are held against.

    Args:
        probs_at: the target's float32 probabilities of what can be drafted, for a slice of the B * A * G slots.
        outside_BAG: float32 the target's mass on what can't be drafted.
        best_BAG: int64 draft ids of the target's most likely tokens.
        labels_BAG: int64 the text's own tokens as draft ids, -1 where they can't be drafted.
        is_supervised_BAG: bool.
        states_BAGD: the target's normalised final states that `probs_at` come from; None where they aren't compared.
    """

    probs_at: ProbsAt
    outside_BAG: Tensor
    best_BAG: Tensor
    labels_BAG: Tensor
    is_supervised_BAG: Tensor
    states_BAGD: Tensor | None = None


def block_loss(
    logits_BAGV: Tensor,
    truth: BlockTruth,
    confidence_BAG: Tensor | None,
    weights: BlockLossWeights,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    hidden_BAGD: Tensor | None = None,
) -> BlockLoss:
    """One batch's loss.

    Args:
        logits_BAGV: the drafter's, corrected.
        truth: for the same slots.
        confidence_BAG: float32 logits, or None without a confidence head.
        weights: of parts and slots.
        reduce: adds the sums of weights of all processes that share the batch.
        hidden_BAGD: the drafter's final states, for `weights.state`.
    """
    labels, seen = truth.labels_BAG, truth.is_supervised_BAG
    weight_BAG = seen.float() * weights.slots(labels.shape[-1], labels.device)
    label_weight_BAG = weight_BAG * (labels >= 0)
    sums = reduce(torch.stack([weight_BAG.sum(), label_weight_BAG.sum()])) + _EPSILON
    slot_S, label_S = (weight_BAG / sums[0]).flatten(), (label_weight_BAG / sums[1]).flatten()
    found = distances(
        logits_BAGV.flatten(0, -2),
        truth.probs_at,
        truth.outside_BAG.flatten(),
        truth.best_BAG.flatten(),
        labels.flatten(),
        SlotWeights(weights.ce * label_S, weights.l1 * slot_S, weights.soft * slot_S),
    )
    total, accept_S = found.total, found.accept_S
    confidence = torch.zeros((), device=labels.device)
    if confidence_BAG is not None:
        each_S = F.binary_cross_entropy_with_logits(confidence_BAG.flatten(), accept_S, reduction="none")
        confidence = (each_S * slot_S).sum()
        total = total + weights.confidence * confidence
    state = torch.zeros((), device=labels.device)
    if weights.state and hidden_BAGD is not None and truth.states_BAGD is not None:
        state = (state_distance(hidden_BAGD, truth.states_BAGD).flatten() * slot_S).sum()
        total = total + weights.state * state
    return BlockLoss(
        total=total,
        ce=(found.ce_S * label_S).sum(),
        l1=(found.l1_S * slot_S).sum(),
        soft=(found.soft_S * slot_S).sum(),
        confidence=confidence.detach(),
        state=state.detach(),
        accept_BAG=accept_S.view_as(weight_BAG),
        is_right_BAG=found.is_right_S.view_as(seen),
    )


def state_distance(hidden_BAGD: Tensor, truth_BAGD: Tensor) -> Tensor:
    """float32 [B, A, G] smooth L1 distance, a mean over D, in units of the root mean square of each true state."""
    truth = truth_BAGD.float()
    unit = truth.square().mean(-1, keepdim=True).sqrt().clamp_min(_EPSILON)
    each: Tensor = F.smooth_l1_loss(hidden_BAGD.float() / unit, truth / unit, reduction="none")
    return each.mean(-1)

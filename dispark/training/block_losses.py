"""Losses of block-parallel drafters (DSpark, Cheng et al. 2026, section 3; DFlash is the cross entropy alone).

Three parts, each a weighted mean over supervised slots: cross entropy against the text's own token, the L1 distance
between draft and target distributions (twice their total variation), and binary cross entropy of the confidence
against the chance that the token is accepted, 1 - L1 / 2, which gets no gradient. Slot k of a block weighs w_k. The
paper writes w_k = exp(-(k - 1) / block size), k from 1; DeepSpec's code takes exp(-k / 4), k from 0.

It knows neither networks nor data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_EPSILON = 1e-6  # in a denominator that may be 0 where nothing is supervised


@dataclass(frozen=True)
class BlockLossWeights:
    """Factors of the three parts, and how slots decay: exp(-k / decay), k from 0; None weighs all alike."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0

    def __post_init__(self) -> None:
        for key in ("ce", "l1", "confidence"):
            if getattr(self, key) < 0:
                raise ValueError(f"loss.{key}={getattr(self, key)}: must be at least 0")
        if self.decay is not None and self.decay <= 0:
            raise ValueError(f"loss.decay={self.decay}: must be above 0, or null for no decay")

    def slots(self, num_slots: int, device: torch.device) -> Tensor:
        """float32 [G] weights of a block's slots."""
        if self.decay is None:
            return torch.ones(num_slots, device=device)
        return torch.exp(-torch.arange(num_slots, device=device, dtype=torch.float32) / self.decay)


@dataclass(frozen=True)
class BlockLoss:
    """The total and its parts before their factors, scalars; accept_BAG are float32 1 - L1 / 2 of every slot."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    confidence: Tensor
    accept_BAG: Tensor


def block_loss(
    logits_BAGV: Tensor,
    target_logits_BAGV: Tensor,
    labels_BAG: Tensor,
    is_supervised_BAG: Tensor,
    confidence_BAG: Tensor | None,
    weights: BlockLossWeights,
) -> BlockLoss:
    """One batch's loss.

    Args:
        logits_BAGV: the drafter's, corrected.
        target_logits_BAGV: the target's for the same tokens.
        labels_BAG: int64 indices into V.
        is_supervised_BAG: bool.
        confidence_BAG: float32 logits, or None without a confidence head.
        weights: of parts and slots.
    """
    weight_BAG = is_supervised_BAG.float() * weights.slots(labels_BAG.shape[-1], labels_BAG.device)
    total_weight = weight_BAG.sum() + _EPSILON

    def mean(values_BAG: Tensor) -> Tensor:
        return (values_BAG * weight_BAG).sum() / total_weight

    ce = mean(
        F.cross_entropy(logits_BAGV.float().flatten(0, -2), labels_BAG.flatten(), reduction="none").view_as(weight_BAG)
    )
    l1_BAG = (logits_BAGV.float().softmax(-1) - target_logits_BAGV.float().softmax(-1)).abs().sum(-1)
    accept_BAG = (1 - 0.5 * l1_BAG).clamp(0, 1).detach()
    l1 = mean(l1_BAG)
    confidence = torch.zeros((), device=l1.device)
    if confidence_BAG is not None:
        confidence = mean(F.binary_cross_entropy_with_logits(confidence_BAG, accept_BAG, reduction="none"))
    total = weights.ce * ce + weights.l1 * l1 + weights.confidence * confidence
    return BlockLoss(total, ce, l1, confidence, accept_BAG)


def mean_accepted(accept_BAG: Tensor, is_supervised_BAG: Tensor) -> Tensor:
    """Expected tokens a round, the target's own included: 1 + the summed products of acceptance, over real blocks."""
    survival = (accept_BAG * is_supervised_BAG).cumprod(-1).sum(-1)
    is_block = is_supervised_BAG[..., 0]
    return 1 + (survival * is_block).sum() / is_block.sum().clamp(min=1)

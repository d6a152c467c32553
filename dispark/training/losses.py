"""Loss of feature-recurrent drafters: soft cross entropy of each step of a training-time test (Eagle-3).

Li et al. 2025, section 3. A step's loss is summed over supervised positions and divided by ALL positions of the batch,
as in DeepSpec's code, so a sequence weighs by the share of it that is supervised. Steps decay: total = sum_s decay^s *
loss_s.

It knows neither networks nor data; block-parallel drafters have block_losses.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TttLoss:
    """The total, and by step: loss, acceptance and accuracy, scalars.

    `acceptance` is the mean of sum_v min(p, q), the chance that a sampled draft is accepted; `accuracy` the share of
    positions whose argmax is the target's. Both are means over supervised positions, without gradient, 0 where there
    are none.
    """

    total: Tensor
    steps: tuple[Tensor, ...]
    acceptance: tuple[Tensor, ...]
    accuracy: tuple[Tensor, ...]


def soft_cross_entropy(logits_BTV: Tensor, probs_BTV: Tensor, is_supervised_BT: Tensor) -> Tensor:
    """Scalar -sum_v p log q, summed over supervised positions and divided by B * T.

    Args:
        logits_BTV: the drafter's.
        probs_BTV: float32, the target's.
        is_supervised_BT: bool.
    """
    entropy_BT = -(probs_BTV * logits_BTV.float().log_softmax(-1)).sum(-1)
    # Not multiplied: rows that see nothing may hold anything.
    return entropy_BT.masked_fill(~is_supervised_BT, 0.0).sum() / is_supervised_BT.numel()


def ttt_loss(
    logits: Sequence[Tensor], probs: Sequence[Tensor], is_supervised: Sequence[Tensor], decay: float = 0.8
) -> TttLoss:
    """One batch's loss.

    Args:
        logits: by step [B, T, V], the drafter's.
        probs: by step float32 [B, T, V], the target's for the same tokens.
        is_supervised: by step bool [B, T].
        decay: factor from one step to the next.

    Raises:
        ValueError: a decay that isn't above 0.
    """
    if not decay > 0:
        raise ValueError(f"loss.decay={decay}: must be above 0 (1 weighs all steps alike)")
    rounds = list(zip(logits, probs, is_supervised, strict=True))
    losses = tuple(soft_cross_entropy(*parts) for parts in rounds)
    total = torch.stack([decay**s * loss for s, loss in enumerate(losses)]).sum()
    scores = [_scores(*parts) for parts in rounds]
    return TttLoss(total, losses, tuple(a for a, _ in scores), tuple(b for _, b in scores))


@torch.no_grad()
def _scores(logits_BTV: Tensor, probs_BTV: Tensor, is_supervised_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(acceptance, accuracy) of a step."""
    overlap_BT = torch.minimum(probs_BTV, logits_BTV.float().softmax(-1)).sum(-1)
    is_right_BT = logits_BTV.argmax(-1) == probs_BTV.argmax(-1)
    num = is_supervised_BT.sum().clamp(min=1)
    found = [(value * is_supervised_BT).sum() / num for value in (overlap_BT, is_right_BT)]
    return found[0], found[1]

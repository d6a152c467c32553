"""Distances between a drafter's and the target's distributions, with gradients in closed form.

For each slot, with draft logits z, q = softmax(z), the target's p, a label y and a weight each:

- cross entropy  -log q[y]:             gradient q - onehot(y)
- L1             sum_v |q - p|:         gradient q * (s - sum_v s q), s = sign(q - p)
- soft cross entropy  -sum_v p log q:   gradient q * sum_v p - p (that of the KL divergence of q from p)

With factors on p (a reduced vocabulary's p, renormalised) these are between q and p times its factor; what is accepted
is about p itself all the same.

Written out like this, loss and gradient take one visit to each slot's logits, a few slots at a time, and nothing of
the size of the vocabulary but the gradient itself is kept. Mass of p outside of what can be drafted adds to L1.

It knows nothing of blocks, steps and networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 64  # slots at a time

# Rows of target probabilities, float32 [C, V], for a slice of slots.
ProbsAt = Callable[[slice], Tensor]


@dataclass(frozen=True)
class SlotWeights:
    """float32 [S] factors of each slot's cross entropy, L1 and soft cross entropy; they hold all normalisation."""

    ce_S: Tensor
    l1_S: Tensor
    soft_S: Tensor


@dataclass(frozen=True)
class Distances:
    """The weighted sum, a scalar with gradient, and without: float32 [S] of each slot.

    `accept_S` is sum_v min(p, q), the chance that a sampled draft is accepted: 1 - L1 / 2 without factors on p;
    `is_right_S` (bool) tells whether the target's most likely token is the drafter's (or as likely as that).
    """

    total: Tensor
    ce_S: Tensor
    l1_S: Tensor
    soft_S: Tensor
    accept_S: Tensor
    is_right_S: Tensor


def distances(
    logits_SV: Tensor,
    probs_at: ProbsAt,
    outside_S: Tensor,
    best_S: Tensor,
    labels_S: Tensor,
    w: SlotWeights,
    factors_S: Tensor | None = None,
) -> Distances:
    """Compares S slots.

    Args:
        logits_SV: the drafter's, in any floating dtype.
        probs_at: the target's probabilities of the same ids.
        outside_S: float32 the target's mass on other ids.
        best_S: int64 index of the target's most likely token, -1 where it isn't among these ids.
        labels_S: int64 index into V, or -1 where the token can't be drafted; its cross entropy is then 0.
        w: weights.
        factors_S: float32 on the target's probabilities, for all but `accept_S`; None for 1.
    """
    total, ce, l1, soft, accept, right = _Distances.apply(
        logits_SV, probs_at, outside_S, best_S, labels_S, w.ce_S, w.l1_S, w.soft_S, factors_S
    )
    return Distances(total, ce, l1, soft, accept, right)


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_SV: Tensor,
        probs_at: ProbsAt,
        outside_S: Tensor,
        best_S: Tensor,
        labels_S: Tensor,
        ce_weight_S: Tensor,
        l1_weight_S: Tensor,
        soft_weight_S: Tensor,
        factors_S: Tensor | None,
    ) -> tuple[Tensor, ...]:
        num = logits_SV.shape[0]
        grad_SV = torch.empty_like(logits_SV) if logits_SV.requires_grad else None
        ce_S, l1_S, soft_S, accept_S = (torch.zeros(num, device=logits_SV.device) for _ in range(4))
        right_S = torch.zeros(num, dtype=torch.bool, device=logits_SV.device)
        for low in range(0, num, _CHUNK):
            part = slice(low, min(low + _CHUNK, num))
            z = logits_SV[part].float()
            p = probs_at(part)
            label = labels_S[part].clamp_min(0).unsqueeze(-1)
            has_label = (labels_S[part] >= 0).float()
            most = z.amax(-1, keepdim=True)
            q = (z - most).exp_()
            scale = q.sum(-1, keepdim=True)
            lse = scale.log() + most
            q.div_(scale)
            if factors_S is not None:
                accept_S[part] = torch.minimum(p, q).sum(-1)
                p = p * factors_S[part].unsqueeze(-1)
            mass = p.sum(-1, keepdim=True)
            ce_S[part] = (lse - z.gather(-1, label)).squeeze(-1) * has_label
            soft_S[part] = (mass * lse).squeeze(-1) - torch.einsum("sv,sv->s", p, z)
            best = best_S[part].unsqueeze(-1)
            right_S[part] = ((z.gather(-1, best.clamp_min(0)) >= most) & (best >= 0)).squeeze(-1)
            difference = q - p
            l1_S[part] = difference.abs().sum(-1) + outside_S[part]
            if factors_S is None:
                accept_S[part] = (1 - 0.5 * l1_S[part]).clamp_(0, 1)
            if grad_SV is None:
                continue
            a, b, c = (w[part].unsqueeze(-1) for w in (ce_weight_S, l1_weight_S, soft_weight_S))
            a = a * has_label.unsqueeze(-1)
            sign = difference.sign_()
            inner = torch.einsum("sv,sv->s", sign, q).unsqueeze(-1)
            # q * (a + b (s - inner) + c mass) - c p - a onehot
            gradient = sign.mul_(b).add_(a + c * mass - b * inner).mul_(q).sub_(p * c)
            gradient.scatter_add_(-1, label, -a)
            grad_SV[part] = gradient
        ctx.grad_SV = grad_SV
        total = (ce_weight_S * ce_S + l1_weight_S * l1_S + soft_weight_S * soft_S).sum()
        ctx.mark_non_differentiable(ce_S, l1_S, soft_S, accept_S, right_S)
        return total, ce_S, l1_S, soft_S, accept_S, right_S

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        grad_SV = ctx.grad_SV
        ctx.grad_SV = None
        return (grad_SV * grads[0].to(grad_SV.dtype), *[None] * 8)

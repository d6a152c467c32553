"""From logits to the distribution that is sampled, and from a distribution and a uniform to a token.

The same `probabilities` shapes the target's p and every drafter's q, in float32, and tokens are drawn from that very
float32 tensor by inverting its cumulative sum: what is reported is what was sampled. It knows nothing about rows,
drafts or acceptance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispark.types import Sampling


def probabilities(logits_MV: Tensor, sampling: Sampling) -> Tensor:
    """float32 [M, V] distributions after temperature, then top-k, then top-p.

    Greedy sampling gives the one-hot of the first argmax. Ties with the k-th logit are kept by top-k; top-p keeps the
    smallest set of most likely tokens whose mass reaches top_p, at least one.
    """
    if sampling.is_greedy:
        hot = torch.zeros(logits_MV.shape, dtype=torch.float32, device=logits_MV.device)
        return hot.scatter_(-1, logits_MV.argmax(-1, keepdim=True), 1.0)
    logits = logits_MV.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        floor = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1).cumsum(-1)
        # A token stays while the mass before it has not reached top_p, so the first always stays.
        is_tail = (mass - ordered.softmax(-1)) >= sampling.top_p
        is_tail[..., 0] = False
        logits = logits.masked_fill(torch.zeros_like(is_tail).scatter_(-1, order, is_tail), float("-inf"))
    return logits.softmax(-1)


def draw(weights_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """int64 [M] tokens by inversion: token v is drawn for exactly its share of the unit interval.

    Args:
        weights_MV: float32 non-negative weights with a positive sum per row; they need not be normalised.
        uniform_M: float64 uniforms in [0, 1).
    """
    cdf = weights_MV.double().cumsum(-1)
    total = cdf[..., -1:]
    # The last representable number below the total keeps a rounded-up product off a trailing zero-weight token.
    goal = torch.minimum(uniform_M.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, goal, right=True).squeeze(-1).clamp_(max=weights_MV.shape[-1] - 1)


def next_token(logits_MV: Tensor, sampling: Sampling, uniform_M: Tensor) -> Tensor:
    """int64 [M]: one draw per row of logits; greedy ignores the uniforms."""
    if sampling.is_greedy:
        return logits_MV.argmax(-1)
    return draw(probabilities(logits_MV, sampling), uniform_M)

"""From logits to the distribution that is sampled, and from a distribution and a uniform to a token.

The same `probabilities` shapes the target's p and every drafter's q, in float32, and tokens are drawn from that very
float32 tensor by inverting its cumulative sum: what is reported is what was sampled. It knows nothing about rows,
drafts or acceptance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispark.types import Sampling

_NUCLEUS_TOKENS = 256  # candidates that top-p looks at before it sorts a whole vocabulary


def probabilities(logits_MV: Tensor, sampling: Sampling) -> Tensor:
    """float32 [M, V] distributions after temperature, then top-k, then top-p; float64 of float64 logits.

    Greedy sampling gives the one-hot of the first argmax. Ties with the k-th logit are kept by top-k; top-p keeps the
    smallest set of most likely tokens whose mass reaches top_p, at least one.
    """
    if sampling.is_greedy:
        hot = torch.zeros(logits_MV.shape, dtype=torch.float32, device=logits_MV.device)
        return hot.scatter_(-1, logits_MV.argmax(-1, keepdim=True), 1.0)
    logits = (logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        floor = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        logits = _nucleus(logits, sampling.top_p)
    return logits.softmax(-1)


def _nucleus(logits_MV: Tensor, top_p: float) -> Tensor:
    """The logits with -inf outside of the smallest set of most likely tokens whose mass reaches `top_p`; equally likely
    ones enter by ascending id."""
    # Sorting a vocabulary is what sampling costs on a CPU. On a CUDA device it is cheap, and asking whether the few
    # best tokens were enough would wait for it.
    if logits_MV.device.type != "cpu" or logits_MV.shape[-1] < 4 * _NUCLEUS_TOKENS:
        return _nucleus_of(logits_MV, logits_MV, None, top_p)[0]
    values_MC, ids_MC = logits_MV.topk(_NUCLEUS_TOKENS, dim=-1)
    cut_MV, least_M = _nucleus_of(logits_MV, values_MC, ids_MC, top_p)
    # A set that ends above the least candidate is whole. One that doesn't may go on, or have other tokens of that rank.
    is_open_M = least_M <= values_MC[..., -1]
    if bool(is_open_M.any()):
        cut_MV[is_open_M] = _nucleus_of(logits_MV[is_open_M], logits_MV[is_open_M], None, top_p)[0]
    return cut_MV


def _nucleus_of(logits_MV: Tensor, values_MC: Tensor, ids_MC: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """(the cut logits, the least logit that stayed) from C candidates, which are all tokens where `ids_MC` is None."""
    if ids_MC is not None:  # topk gives equal values in any order
        ids_MC, by_id = ids_MC.sort(dim=-1)
        values_MC = values_MC.gather(-1, by_id)
    values_MC, order_MC = values_MC.sort(dim=-1, descending=True, stable=True)
    ids_MC = order_MC if ids_MC is None else ids_MC.gather(-1, order_MC)
    probs_MC = (values_MC - logits_MV.logsumexp(-1, keepdim=True)).exp()
    # A token stays while the mass before it has not reached top_p, so the first always stays.
    is_kept_MC = (probs_MC.cumsum(-1) - probs_MC) < top_p
    is_kept_MC[..., 0] = True
    cut_MV = torch.full_like(logits_MV, float("-inf"))
    cut_MV.scatter_(-1, ids_MC, values_MC.masked_fill(~is_kept_MC, float("-inf")))
    least_M = values_MC.masked_fill(~is_kept_MC, float("inf")).amin(-1)
    return cut_MV, least_M


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

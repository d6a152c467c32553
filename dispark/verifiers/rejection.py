"""Rejection sampling: keeps the target's distribution exactly (Leviathan et al. 2023; Chen et al. 2023).

Draft token x at position k is accepted with probability min(1, p_k(x) / q_k(x)); at the first rejection the next token
comes from norm(max(p_k - q_k, 0)); if every verified draft is accepted it comes from p after the last one. A point mass
is the case q(x) = 1. p is shaped by the same sampling settings as q, in float32.

It knows nothing about how the draft was made, and trusts that q is what the tokens were drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import draw, probabilities
from dispark.types import Draft, Sampling, Verdict
from dispark.verifiers.greedy import GreedyVerifier
from dispark.verifiers.packed import count_accepted, packed_index, with_next


class RejectionVerifier:
    """Serves any temperature and both proposal types; at temperature 0 it is greedy verification."""

    is_lossless = True

    def __init__(self) -> None:
        self._greedy = GreedyVerifier()

    def check(self, sampling: Sampling, proposal: str) -> None:
        """Raises ValueError for an unknown proposal type."""
        if proposal not in ("sampled", "deterministic"):
            raise ValueError(f"drafter.proposal={proposal}: must be sampled or deterministic")

    def accept(
        self,
        draft: Draft,
        target_logits_NV: Tensor,
        verify_lengths: Sequence[int],
        sampling: Sampling,
        generators: RowGenerators,
    ) -> Verdict:
        """See `dispark.interfaces.Verifier`."""
        if sampling.is_greedy:
            return self._greedy.accept(draft, target_logits_NV, verify_lengths, sampling, generators)
        num_drafts = draft.tokens_BG.shape[1]
        index_BT, verify_length_B = packed_index(verify_lengths, num_drafts + 1, target_logits_NV.device)
        probs_NV = probabilities(target_logits_NV, sampling)

        p_BG = probs_NV[index_BT[:, :-1], draft.tokens_BG]
        q_BG = torch.ones_like(p_BG)
        if draft.probs_BGV is not None:
            q_BG = draft.probs_BGV.gather(-1, draft.tokens_BG.unsqueeze(-1)).squeeze(-1)
        # u < p / q without the division.
        is_accepted_BG = generators.uniform("accept", num_drafts) * q_BG < p_BG
        num_accepted_B = count_accepted(is_accepted_BG, verify_length_B)

        weights_BV = probs_NV[index_BT.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)]
        if num_drafts > 0:
            is_rejected_B = num_accepted_B < verify_length_B
            at_B = num_accepted_B.clamp(max=num_drafts - 1)
            weights_BV = torch.where(is_rejected_B.unsqueeze(1), _residual(weights_BV, draft, at_B), weights_BV)
        next_B = draw(weights_BV, generators.uniform("recover", 1).squeeze(1))
        return Verdict(with_next(draft.tokens_BG, num_accepted_B, next_B), num_accepted_B)


def _residual(p_BV: Tensor, draft: Draft, at_B: Tensor) -> Tensor:
    """float32 [B, V]: max(p - q, 0) at each row's rejected position, unnormalised."""
    rows = torch.arange(at_B.shape[0], device=at_B.device)
    if draft.probs_BGV is None:
        left_BV = p_BV.scatter(1, draft.tokens_BG[rows, at_B].unsqueeze(1), 0.0)
    else:
        left_BV = (p_BV - draft.probs_BGV[rows, at_B]).clamp_(min=0.0)
    # p == q has no residual; rounding can still reject there, and then p itself is what is left.
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)

"""Greedy verification: a draft token is accepted while it is the target's argmax.

It is lossless for temperature 0 and refuses anything else. It knows nothing about how the draft was made.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.types import Draft, Sampling, Verdict
from dispark.verifiers.packed import count_accepted, packed_index, with_next


class GreedyVerifier:
    """Keeps the longest prefix of argmaxes; the next token is the argmax after it (Stern et al. 2018, section 3)."""

    is_lossless = True

    def check(self, sampling: Sampling, proposal: str) -> None:
        """Raises ValueError unless sampling is greedy."""
        if not sampling.is_greedy:
            raise ValueError(
                f"verifier=greedy with sampling.temperature={sampling.temperature}: it serves temperature 0 only; "
                f"use verifier=rejection"
            )

    def accept(
        self,
        draft: Draft,
        target_logits_NV: Tensor,
        verify_lengths: Sequence[int],
        sampling: Sampling,
        generators: RowGenerators,
    ) -> Verdict:
        """See `dispark.interfaces.Verifier`."""
        width = draft.tokens_BG.shape[1] + 1
        index_BT, verify_length_B = packed_index(verify_lengths, width, target_logits_NV.device)
        best_BT = target_logits_NV.argmax(-1)[index_BT]
        num_accepted_B = count_accepted(draft.tokens_BG == best_BT[:, :-1], verify_length_B)
        next_B = best_BT.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)
        return Verdict(with_next(draft.tokens_BG, num_accepted_B, next_B), num_accepted_B)

"""What the target says at the positions that are supervised, computed once a batch for all drafters in training.

A drafter with a reduced vocabulary is taught the target's probabilities of the ids that it can draft, and how much mass
lies outside of them: that mass can never be matched, so it counts as distance.

It knows neither drafters nor losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dispark.drafters.vocabulary import DraftVocabulary
from dispark.training.ends import FrozenEnds

_CHUNK = 64  # positions at a time: logits over the whole vocabulary don't outgrow a cache


@dataclass(frozen=True)
class TeacherLaws:
    """Distributions of M positions over what can be drafted.

    Args:
        probs_MV: float32 [M, V or V_draft], the target's probabilities, not renormalised.
        outside_M: float32 mass on ids that can't be drafted.
        top_M: int64 target id of the most likely token.
        best_M: int64 index into `probs_MV` of that token, -1 where it can't be drafted.
    """

    probs_MV: Tensor
    outside_M: Tensor
    top_M: Tensor
    best_M: Tensor


class Teacher:
    """The target's distributions after some positions of a batch.

    Args:
        final_BTD: the target's normalised final states.
        needed_BT: bool, positions whose next token may have to be drafted.
        ends: over the target's whole vocabulary.
        known_BT2: what `summarise` says of every position, where that is known already: a reduced vocabulary then
            needs the logits of its own ids only.

    `states_MD` are the final states of the M positions, in the order of the laws.
    """

    def __init__(self, final_BTD: Tensor, needed_BT: Tensor, ends: FrozenEnds, known_BT2: Tensor | None = None) -> None:
        self.states_MD = final_BTD[needed_BT]
        self._known_M2 = None if known_BT2 is None else known_BT2[needed_BT]
        self._ends = ends
        self._laws: dict[bytes, TeacherLaws] = {}
        number = needed_BT.flatten().cumsum(0) - 1
        self._index_BT = torch.where(needed_BT.flatten(), number, -1).view_as(needed_BT)

    def index(self, positions_BM: Tensor) -> Tensor:
        """int64 [B, ...] rows of `laws` for positions of each sequence, -1 where nothing was asked for."""
        flat = positions_BM.flatten(1)
        return self._index_BT.gather(1, flat).view_as(positions_BM)

    @torch.no_grad()
    def laws(self, vocabulary: DraftVocabulary | None) -> TeacherLaws:
        """Over the ids that can be drafted; computed once for each vocabulary."""
        key = b"" if vocabulary is None else vocabulary.d2t.cpu().numpy().tobytes()
        if key not in self._laws:
            num = len(self.states_MD)
            parts = [self._chunk(slice(low, low + _CHUNK), vocabulary) for low in range(0, max(num, 1), _CHUNK)]
            self._laws[key] = TeacherLaws(*(torch.cat(values) for values in zip(*parts, strict=True)))
        return self._laws[key]

    def _chunk(self, part: slice, vocabulary: DraftVocabulary | None) -> tuple[Tensor, ...]:
        states_MD = self.states_MD[part]
        if vocabulary is not None and self._known_M2 is not None:
            known_M2 = self._known_M2[part]
            logits_MV = self._ends.of(vocabulary).logits(states_MD).float()
            kept_MV, top_M = (logits_MV - known_M2[:, :1]).exp(), known_M2[:, 1].long()
            return kept_MV, (1 - kept_MV.sum(-1)).clamp_min(0), top_M, vocabulary.to_draft(top_M)
        probs_MV = self._ends.logits(states_MD).float().softmax(-1)
        top_M = probs_MV.argmax(-1)
        if vocabulary is None:
            return probs_MV, probs_MV.new_zeros(len(probs_MV)), top_M, top_M
        kept_MV = probs_MV[:, vocabulary.ids.to(probs_MV.device)]
        return kept_MV, (1 - kept_MV.sum(-1)).clamp_min(0), top_M, vocabulary.to_draft(top_M)


@torch.no_grad()
def summarise(states_MD: Tensor, ends: FrozenEnds) -> Tensor:
    """float32 [M, 2]: logarithm of the sum of exponentials of a position's logits, and the id of the largest.

    Args:
        states_MD: final states.
        ends: over the target's whole vocabulary.
    """
    found = []
    for states in states_MD.split(4 * _CHUNK):  # long enough for the matmul, which is most of it here
        logits_MV = ends.logits(states).float()
        found.append(torch.stack([logits_MV.logsumexp(-1), logits_MV.argmax(-1).float()], dim=-1))
    return torch.cat(found)

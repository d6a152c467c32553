"""A reduced draft vocabulary: the ids that a drafter can propose, and how they map to the target's.

Stored as in Eagle-3's checkpoints: `d2t` [V_draft] int64 are offsets (target id = draft id + d2t[draft id]), `t2d` [V]
bool marks the target ids that can be drafted. A token outside of it has q = 0 and is never proposed, so decoding stays
lossless.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DraftVocabulary(nn.Module):
    """Ascending target ids of the draft ids.

    Args:
        ids: int64 [V_draft], ascending and distinct.
        vocab_size: V, the target's.

    Raises:
        ValueError: ids out of order or range.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        super().__init__()
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise ValueError(f"d2t: target ids must lie in 0..{vocab_size - 1} and be at least one")
        if bool((ids[1:] <= ids[:-1]).any()):
            raise ValueError("d2t: target ids must be distinct and ascending")
        self.vocab_size = vocab_size
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
        is_drafted[ids] = True
        self.register_buffer("t2d", is_drafted)

    @classmethod
    def from_tensors(cls, d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> DraftVocabulary:
        """Reads the tensors of a checkpoint.

        Raises:
            ValueError: the two contradict each other, or don't fit the vocabulary.
        """
        ids = d2t.long() + torch.arange(len(d2t))
        made = cls(ids, vocab_size)
        if t2d is not None and (t2d.shape[0] != vocab_size or not torch.equal(t2d.bool(), made.t2d)):
            raise ValueError("t2d: marks other ids than d2t maps to")
        return made

    @property
    def ids(self) -> Tensor:
        """int64 [V_draft] target ids."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""
        return draft_ids + self.d2t[draft_ids]

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft ids of target ids, any shape; -1 for those that can't be drafted."""
        found = torch.searchsorted(self.ids, target_ids).clamp_max(len(self.d2t) - 1)
        return torch.where(self.t2d[target_ids], found, -1)

    def widen(self, probs: Tensor) -> Tensor:
        """[..., V_draft] probabilities over the target's vocabulary, 0 where nothing can be drafted."""
        wide = torch.zeros((*probs.shape[:-1], self.vocab_size), dtype=probs.dtype, device=probs.device)
        wide[..., self.ids] = probs
        return wide

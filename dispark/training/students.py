"""Drafters in training: what the trainer asks of each, and what they share.

A student holds the network that learns (in the target's dtype; the optimizer keeps float32 masters), turns a batch of
the feature stream into a loss, and predicts greedily under teacher forcing, which the parity check compares with what
the saved drafter does in the decoding loop.

How batches are made and optimizers step is not known here; the students of each kind of network are in
block_student.py, recurrent_student.py and heads_student.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dispark.decoding.target import TargetModel
from dispark.drafters.vocabulary import DraftVocabulary
from dispark.training.features import FeatureBatch
from dispark.training.plan import stream_seed

# Adds a tensor of all processes that share the batch.
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StudentLoss:
    """One batch.

    Args:
        total: scalar with gradient, normalised over all processes.
        parts: scalars without gradient, likewise, by name.
        accept_G: float32 summed chance that the draft of each slot is accepted, over supervised slots.
        right_G: float32 supervised slots whose most likely token is the target's.
        count_G: float32 supervised slots.
        num_anchors: chains or blocks of this process.
    """

    total: Tensor
    parts: dict[str, Tensor]
    accept_G: Tensor
    right_G: Tensor
    count_G: Tensor
    num_anchors: int


class LearnedDrafter(Protocol):
    """What a student's drafter tells of its ids."""

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that can be drafted, None is all; known before anything is made."""

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """Those ids, known after `start`; None is all."""


class Student(Protocol):
    """What the trainer uses."""

    lr: float
    feature_layers: tuple[int, ...]
    network: nn.Module

    @property
    def drafter(self) -> LearnedDrafter:
        """What is trained."""

    @property
    def own_lrs(self) -> Mapping[str, float]:
        """Peak learning rates of single parameters, by name, where they aren't `lr`; known after `start`."""

    def start(self, target: TargetModel, draft_ids: Tensor | None) -> None:
        """Makes the float32 network; `draft_ids` where there is a reduced vocabulary."""

    def loss(self, batch: FeatureBatch, seeds: list[int], reduce: Reduce) -> StudentLoss:
        """Of a batch; `seeds` are one a row, for anchors drawn anew at every visit."""

    def predict(self, batch: FeatureBatch, row: int, anchors_A: Tensor) -> Tensor:
        """int64 [A, G] the most likely draft tokens (target ids) behind each anchor of a row, along the row's text."""

    def save(self, folder: Path) -> None:
        """Writes a checkpoint that the drafter loads."""


def draw_anchors(loss_mask_BT: Tensor, num: int, seeds: list[int]) -> tuple[Tensor, Tensor]:
    """Up to `num` ascending anchors a row: supervised positions before supervised ones, without replacement.

    Returns:
        (int64 [B, A] positions, bool [B, A] false where a row has fewer; such places repeat position 0).
    """
    mask_BT = loss_mask_BT.cpu()
    drawn = []
    for mask_T, seed in zip(mask_BT, seeds, strict=True):
        candidates = (mask_T[:-1] & mask_T[1:]).nonzero().squeeze(-1)
        generator = torch.Generator().manual_seed(stream_seed(seed, "anchors"))
        chosen = candidates[torch.randperm(len(candidates), generator=generator)[:num]]
        drawn.append(chosen.sort().values)
    most = max(1, max(map(len, drawn)))
    anchors_BA = torch.zeros(len(drawn), most, dtype=torch.int64)
    is_real_BA = torch.zeros(len(drawn), most, dtype=torch.bool)
    for i, chosen in enumerate(drawn):
        anchors_BA[i, : len(chosen)] = chosen
        is_real_BA[i, : len(chosen)] = True
    return anchors_BA.to(loss_mask_BT.device), is_real_BA.to(loss_mask_BT.device)


def slot_sums(accept: Tensor, right: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(accept_G, right_G, count_G) of [..., G] slots."""
    seen = seen.flatten(0, -2).float()
    return (accept.flatten(0, -2) * seen).sum(0), (right.flatten(0, -2) * seen).sum(0), seen.sum(0)


def as_target_ids(draft_ids: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    """Target ids of the argmax over what can be drafted."""
    return draft_ids if vocabulary is None else vocabulary.to_target(draft_ids)


def check_positive(settings: dict[str, Any]) -> None:
    """Raises ValueError for a setting that isn't above 0, by its name."""
    for key, value in settings.items():
        if not value > 0:
            raise ValueError(f"{key}={value}: must be above 0")

"""Trains drafters with parallel heads (Medusa, blockwise): head i guesses from the state at t the token at t + 2 + i.

Cross entropy against the text's own tokens, with factors decay^i as in the authors' first recipe (Cai et al. 2024,
section 2.2.1), or soft cross entropy against the target's distributions. The target stays frozen. Positions are drawn
anew at every visit of a row, as anchors are for block drafters.

It knows neither data nor optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispark.decoding.target import FINAL, TargetModel
from dispark.drafters.parallel_heads import ParallelHeadsDrafter
from dispark.training.distances import SlotWeights, distances
from dispark.training.ends import FrozenEnds
from dispark.training.features import FeatureBatch
from dispark.training.recurrent_student import ChainLossWeights
from dispark.training.students import Reduce, StudentLoss, as_target_ids, check_positive, draw_anchors, slot_sums


class HeadsStudent:
    """Parallel heads in training.

    Args:
        drafter: what to train: fresh (`checkpoint=random`) or a checkpoint to go on from.
        loss: parts of the loss; `decay` is from one head to the next, a head's mean is over its supervised positions.
        num_anchors: positions a row and visit at most.
        lr: peak learning rate.
    """

    def __init__(
        self,
        drafter: ParallelHeadsDrafter,
        loss: ChainLossWeights | None = None,
        num_anchors: int = 64,
        lr: float = 1e-3,
    ) -> None:
        check_positive({"num_anchors": num_anchors, "lr": lr})
        self.drafter, self.lr = drafter, lr
        self._weights = ChainLossWeights(soft=0.0, ce=1.0, mean_over="supervised") if loss is None else loss
        if self._weights.mean_over != "supervised":
            raise ValueError(f"loss.mean_over={self._weights.mean_over}: must be supervised for heads")
        self._num_anchors = num_anchors
        self.feature_layers = (FINAL,)

    @property
    def own_lrs(self) -> Mapping[str, float]:
        """See Student."""
        return {}

    def start(self, target: TargetModel, draft_ids: Tensor | None) -> None:
        """See Student."""
        self.network: nn.Module = self.drafter.start(target, draft_ids)
        self._vocabulary = self.drafter.vocabulary
        self._ends = FrozenEnds(target, self._vocabulary)

    def loss(self, batch: FeatureBatch, seeds: list[int], reduce: Reduce) -> StudentLoss:
        """See Student."""
        anchors_BA, is_real_BA = draw_anchors(batch.loss_mask_BT, self._num_anchors, seeds)
        hidden_BAD = _at(batch.states[FINAL], (anchors_BA - 1).clamp_min(0))
        logits_BAGV = self._logits(hidden_BAD.flatten(0, 1)).unflatten(0, anchors_BA.shape)
        num_slots = logits_BAGV.shape[2]
        length = batch.tokens_BT.shape[1]
        wanted_BAG = anchors_BA.unsqueeze(-1) + torch.arange(1, num_slots + 1, device=anchors_BA.device)
        positions_BAG = wanted_BAG.clamp_max(length - 1)
        labels_BAG = _at(batch.tokens_BT.unsqueeze(-1), positions_BAG).squeeze(-1)
        seen_BAG = _at(batch.loss_mask_BT.unsqueeze(-1), positions_BAG).squeeze(-1) & (wanted_BAG < length)
        seen_BAG &= is_real_BA.unsqueeze(-1)
        laws = batch.teacher.laws(self._vocabulary)
        index_BAG = batch.teacher.index(positions_BAG - 1).clamp_min(0)
        if self._vocabulary is not None:
            labels_BAG = self._vocabulary.to_draft(labels_BAG)
        # Each head's own mean, then the factors of the heads.
        count_G = reduce(seen_BAG.float().sum((0, 1))) + 1e-6
        label_count_G = reduce((seen_BAG & (labels_BAG >= 0)).float().sum((0, 1))) + 1e-6
        decay_G = self._weights.decay ** torch.arange(num_slots, device=count_G.device)
        slot_S = (seen_BAG / count_G * decay_G).flatten()
        label_S = (seen_BAG / label_count_G * decay_G).flatten()
        index_S = index_BAG.flatten()
        w = self._weights
        found = distances(
            logits_BAGV.flatten(0, 2),
            lambda part: laws.probs_MV[index_S[part]],
            laws.outside_M[index_S],
            laws.best_M[index_S],
            labels_BAG.flatten(),
            SlotWeights(w.ce * label_S, w.l1 * slot_S, w.soft * slot_S),
        )
        sums = slot_sums(
            found.accept_S.view_as(slot_S).view(seen_BAG.shape), found.is_right_S.view(seen_BAG.shape), seen_BAG
        )
        parts = {"loss": found.total.detach(), "ce": (found.ce_S * label_S).sum()}
        return StudentLoss(found.total, parts, *sums, num_anchors=int(is_real_BA.sum()))

    @torch.no_grad()
    def predict(self, batch: FeatureBatch, row: int, anchors_A: Tensor) -> Tensor:
        """See Student."""
        logits_AGV = self._logits(batch.states[FINAL][row, anchors_A - 1])
        return as_target_ids(logits_AGV.argmax(-1), self._vocabulary)

    def save(self, folder: Path) -> None:
        """See Student."""
        self.drafter.save(folder)

    def _logits(self, hidden_MD: Tensor) -> Tensor:
        """[M, G, V_draft] of all heads."""
        return self.drafter.train_logits(hidden_MD, self._ends)


def _at(values_BTX: Tensor, positions: Tensor) -> Tensor:
    """[B, ..., X] the values at int64 [B, ...] positions of each sequence."""
    flat: Any = positions.flatten(1).unsqueeze(-1).expand(-1, -1, values_BTX.shape[-1])
    return values_BTX.gather(1, flat).view(*positions.shape, values_BTX.shape[-1])

"""Trains block-parallel drafters (DSpark, DFlash): blocks at anchors drawn anew at every visit of a row.

It knows neither data nor optimizers; forward and loss are in blocks.py and block_losses.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import RANDOM
from dispark.drafters.semi_autoregressive import SemiAutoregressiveDrafter
from dispark.training.block_losses import BlockLossWeights, BlockTruth, block_loss
from dispark.training.blocks import BlockBatch, BlockOutput, forward_blocks
from dispark.training.ends import FrozenEnds
from dispark.training.features import FeatureBatch
from dispark.training.starts import start_from_target
from dispark.training.students import Reduce, StudentLoss, as_target_ids, check_positive, draw_anchors, slot_sums


class BlockStudent:
    """A block-parallel drafter in training.

    Args:
        drafter: what to train: fresh (`checkpoint=random`) or a checkpoint to go on from.
        loss: parts of the loss.
        num_anchors: blocks a row and visit at most.
        lr: peak learning rate.
        backbone_lr: that of layers, norms and context projection; None is `lr`.
        start_layers: target layers that a fresh drafter's layers start from, see starts.py; None starts at random.
    """

    def __init__(
        self,
        drafter: SemiAutoregressiveDrafter,
        loss: BlockLossWeights | None = None,
        num_anchors: int = 64,
        lr: float = 3e-3,
        backbone_lr: float | None = None,
        start_layers: list[int] | None = None,
    ) -> None:
        check_positive(
            {"num_anchors": num_anchors, "lr": lr} | ({} if backbone_lr is None else {"backbone_lr": backbone_lr})
        )
        self.drafter, self.lr = drafter, lr
        self._backbone_lr, self._start_layers = backbone_lr, start_layers
        self._weights = BlockLossWeights() if loss is None else loss
        self._num_anchors = num_anchors

    def start(self, target: TargetModel, draft_ids: Tensor | None) -> None:
        """See Student."""
        self.network = self.drafter.start(target, draft_ids)
        if self._start_layers is not None and self.drafter.checkpoint == RANDOM:
            start_from_target(self.network, target, self._start_layers)
        self.feature_layers = self.drafter.feature_layers
        self._ends = FrozenEnds(target, self.network.vocabulary)

    @property
    def own_lrs(self) -> Mapping[str, float]:
        """See Student."""
        if self._backbone_lr is None:
            return {}
        heads = ("markov_head.", "confidence_head.")
        names = [name for name, _ in self.network.named_parameters() if not name.startswith(heads)]
        return dict.fromkeys(names, self._backbone_lr)

    def loss(self, batch: FeatureBatch, seeds: list[int], reduce: Reduce) -> StudentLoss:
        """See Student."""
        anchors_BA, is_real_BA = draw_anchors(batch.loss_mask_BT, self._num_anchors, seeds)
        out = self._forward(batch, anchors_BA, is_real_BA)
        truth = self._truth(batch, out)
        found = block_loss(out.logits_BAGV, truth, out.confidence_BAG, self._weights, reduce, out.hidden_BAGD)
        parts = {"loss": found.total.detach(), "ce": found.ce, "l1": found.l1}
        if self._weights.soft:
            parts["soft"] = found.soft
        if self._weights.state:
            parts["state"] = found.state
        if out.confidence_BAG is not None:
            parts["confidence"] = found.confidence
        sums = slot_sums(found.accept_BAG, found.is_right_BAG, out.is_supervised_BAG)
        return StudentLoss(found.total, parts, *sums, num_anchors=int(is_real_BA.sum()))

    @torch.no_grad()
    def predict(self, batch: FeatureBatch, row: int, anchors_A: Tensor) -> Tensor:
        """See Student."""
        one = slice(row, row + 1)
        blocks = BlockBatch(
            batch.tokens_BT[one],
            batch.features(self.feature_layers)[one],
            batch.loss_mask_BT[one],
            anchors_A.unsqueeze(0),
            torch.ones_like(anchors_A, dtype=torch.bool).unsqueeze(0),
        )
        logits_AGV = forward_blocks(self.network, self._ends, blocks).logits_BAGV[0]
        return as_target_ids(logits_AGV.argmax(-1), self.network.vocabulary)

    def save(self, folder: Path) -> None:
        """See Student."""
        self.drafter.save(folder, has_ends=False)

    def _forward(self, batch: FeatureBatch, anchors_BA: Tensor, is_real_BA: Tensor) -> BlockOutput:
        features = batch.features(self.feature_layers)
        blocks = BlockBatch(batch.tokens_BT, features, batch.loss_mask_BT, anchors_BA, is_real_BA)
        return forward_blocks(self.network, self._ends, blocks)

    def _truth(self, batch: FeatureBatch, out: BlockOutput) -> BlockTruth:
        """The target's law one position before each label."""
        vocabulary = self.network.vocabulary
        laws = batch.teacher.laws(vocabulary)
        index_BAG = batch.teacher.index(out.positions_BAG - 1).clamp_min(0)  # unsupervised slots weigh nothing
        index_S = index_BAG.flatten()
        labels = out.labels_BAG if vocabulary is None else vocabulary.to_draft(out.labels_BAG)
        return BlockTruth(
            lambda part: laws.probs_MV[index_S[part]],
            laws.outside_M[index_BAG],
            laws.best_M[index_BAG],
            labels,
            out.is_supervised_BAG,
            batch.teacher.states_MD[index_BAG] if self._weights.state else None,
        )

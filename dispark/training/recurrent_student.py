"""Trains feature-recurrent drafters (Eagle-3, Eagle, MTP) by training-time test: as many steps as they will draft.

With one step it is the training of a single MTP module. A step's loss is a mean over ALL positions of the batch, as in
DeepSpec's code, or over supervised ones; steps decay. With a reduced vocabulary the target's distribution is
renormalised on it, and positions whose most likely token it lacks are left out (Li et al. 2025); the figures are over
all supervised positions and the target's own distribution. The last draft of an answer has no token of the text to be
held against, so it has no cross entropy.

It knows neither data nor optimizers; the forward is in eagle3_ttt.py, the losses' gradients in distances.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dispark.decoding.target import TargetModel
from dispark.drafters.recurrent import RecurrentDrafter
from dispark.training.distances import Distances, SlotWeights, distances
from dispark.training.eagle3_ttt import TttBatch, shift_left, supervised, ttt_states
from dispark.training.ends import FrozenEnds
from dispark.training.features import FeatureBatch
from dispark.training.students import Reduce, StudentLoss, as_target_ids, check_positive
from dispark.training.teacher import TeacherLaws


@dataclass(frozen=True)
class ChainLossWeights:
    """Factors of soft cross entropy, cross entropy and L1, the decay from one step to the next, and what a step's sum
    is divided by: `all` positions or `supervised` ones."""

    soft: float = 1.0
    ce: float = 0.0
    l1: float = 0.0
    decay: float = 0.8
    mean_over: str = "all"

    def __post_init__(self) -> None:
        for key in ("soft", "ce", "l1"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"loss.{key}={getattr(self, key)}: must be at least 0")
        if not self.soft + self.ce + self.l1 > 0:
            raise ValueError("loss.soft=0, ce=0, l1=0: at least one must be above 0")
        if not self.decay > 0:
            raise ValueError(f"loss.decay={self.decay}: must be above 0 (1 weighs all steps alike)")
        if self.mean_over not in ("all", "supervised"):
            raise ValueError(f"loss.mean_over={self.mean_over}: must be all or supervised")


class RecurrentStudent:
    """A feature-recurrent drafter in training.

    Args:
        drafter: what to train: fresh (`checkpoint=random`) or a checkpoint to go on from.
        loss: parts of the loss.
        num_steps: of the training-time test; None is the drafter's draft_length.
        lr: peak learning rate.
    """

    def __init__(
        self,
        drafter: RecurrentDrafter,
        loss: ChainLossWeights | None = None,
        num_steps: int | None = None,
        lr: float = 3e-3,
    ) -> None:
        self.drafter, self.lr = drafter, lr
        self._num_steps = drafter.draft_length if num_steps is None else num_steps
        check_positive({"num_steps": self._num_steps, "lr": lr})
        self._weights = ChainLossWeights() if loss is None else loss

    @property
    def own_lrs(self) -> Mapping[str, float]:
        """See Student."""
        return {}

    def start(self, target: TargetModel, draft_ids: Tensor | None) -> None:
        """See Student."""
        self.network = self.drafter.start(target, draft_ids)
        self.feature_layers = self.drafter.feature_layers
        self._vocabulary = self.drafter.vocabulary
        self._ends = FrozenEnds(target, self._vocabulary)

    def loss(self, batch: FeatureBatch, seeds: list[int], reduce: Reduce) -> StudentLoss:
        """See Student; every supervised position is used, so the seeds are not."""
        sequences = self._sequences(batch)
        laws = batch.teacher.laws(self._vocabulary)
        position_BT = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device).expand_as(batch.tokens_BT)
        num_all = reduce(torch.tensor(float(position_BT.numel()), device=position_BT.device))
        total = torch.zeros((), device=position_BT.device)
        parts: dict[str, Tensor] = {}
        is_answer_BT = batch.loss_mask_BT & batch.is_real_BT
        accept, right, count = [], [], []
        for s, (_, hidden_BTD) in enumerate(ttt_states(self.network, self._ends, sequences, self._num_steps)):
            ahead_BT = (position_BT + 1 + s).clamp_max(position_BT.shape[1] - 1)
            index_BT = batch.teacher.index(ahead_BT)
            seen_BT = supervised(sequences, s) & (index_BT >= 0)
            labels_BT = shift_left(batch.tokens_BT, s + 2).masked_fill(~shift_left(is_answer_BT, s + 2), -1)
            found = self._compare(hidden_BTD, seen_BT, index_BT, labels_BT, laws, num_all, reduce)
            total = total + self._weights.decay**s * found.total
            parts[f"step{s}"] = found.total.detach()
            accept.append(found.accept_S.sum())
            right.append(found.is_right_S.float().sum())
            count.append(seen_BT.float().sum())
        parts = {"loss": total.detach(), **parts}
        stacked = [torch.stack(values).detach() for values in (accept, right, count)]
        return StudentLoss(total, parts, stacked[0], stacked[1], stacked[2], num_anchors=int(count[0]))

    def _compare(
        self,
        hidden_BTD: Tensor,
        seen_BT: Tensor,
        index_BT: Tensor,
        labels_BT: Tensor,
        laws: TeacherLaws,
        num_all: Tensor,
        reduce: Reduce,
    ) -> Distances:
        """Of the supervised positions; labels are -1 where the text has none."""
        index_S, labels_S = index_BT[seen_BT], labels_BT[seen_BT]
        is_taught_S, factors_S = torch.ones_like(index_S, dtype=torch.bool), None
        if self._vocabulary is not None:
            is_taught_S = laws.best_M[index_S] >= 0
            factors_S = 1 / (1 - laws.outside_M[index_S]).clamp_min(1e-6)
            labels_S = torch.where(labels_S >= 0, self._vocabulary.to_draft(labels_S.clamp_min(0)), -1)
        has_label_S = is_taught_S & (labels_S >= 0)
        each = [num_all, num_all]
        if self._weights.mean_over == "supervised":
            each = list(reduce(torch.stack([is_taught_S.float().sum(), has_label_S.float().sum()])) + 1e-6)
        slot_S, label_S = is_taught_S / each[0], has_label_S / each[1]
        w = self._weights
        return distances(
            self._ends.logits(self.network.read(hidden_BTD[seen_BT])),
            lambda part: laws.probs_MV[index_S[part]],
            torch.zeros_like(slot_S),
            laws.best_M[index_S],
            labels_S,
            SlotWeights(w.ce * label_S, w.l1 * slot_S, w.soft * slot_S),
            factors_S,
        )

    def _sequences(self, batch: FeatureBatch) -> TttBatch:
        features = batch.features(self.feature_layers)
        return TttBatch(batch.tokens_BT, batch.is_real_BT, batch.loss_mask_BT, features)

    @torch.no_grad()
    def predict(self, batch: FeatureBatch, row: int, anchors_A: Tensor) -> Tensor:
        """See Student; the chain behind anchor p starts from the state at p - 1."""
        one = slice(row, row + 1)
        all_rows = self._sequences(batch)
        sequences = TttBatch(
            all_rows.tokens_BT[one], all_rows.is_real_BT[one], all_rows.loss_mask_BT[one], all_rows.features_BTF[one]
        )
        drafts = []
        for _, hidden_BTD in ttt_states(self.network, self._ends, sequences, self.drafter.draft_length):
            logits_AV = self._ends.logits(self.network.read(hidden_BTD[0, anchors_A - 1]))
            drafts.append(as_target_ids(logits_AV.argmax(-1), self._vocabulary))
        return torch.stack(drafts, dim=1)

    def save(self, folder: Path) -> None:
        """See Student."""
        self.drafter.save(folder, has_ends=False)

"""The feature stream: what the target makes of training text, one forward shared by all drafters in training.

Online: rows go through the target when they are needed. Nothing is kept, so the stream needs no room and starts at
once; a forward of the target costs about as much as a step of one small drafter. feature_cache.py keeps the states.

It knows neither drafters nor losses. Which rows come when is plan.py's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dispark.decoding.target import FINAL, TargetModel
from dispark.training.ends import FrozenEnds
from dispark.training.rows import TrainingRow
from dispark.training.teacher import Teacher


@dataclass(frozen=True)
class FeatureBatch:
    """Sequences, right-padded, with what the target made of them.

    Args:
        tokens_BT: int64.
        is_real_BT: bool, false on padding.
        loss_mask_BT: bool, true where a token may be supervised.
        states: [B, T, D] by target layer, FINAL included; outside of any graph.
        teacher: the target's distributions.
        row_ids: names of the rows.
    """

    tokens_BT: Tensor
    is_real_BT: Tensor
    loss_mask_BT: Tensor
    states: dict[int, Tensor]
    teacher: Teacher
    row_ids: list[str]

    def features(self, layers: Sequence[int]) -> Tensor:
        """[B, T, len(layers) * D], side by side in the given order."""
        parts = [self.states[layer] for layer in layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class FeatureStream:
    """Runs rows through the target.

    Args:
        target: in inference mode; its rows are this stream's while a batch is made.
        layers: that the drafters read; FINAL is added.
        max_tokens: longer rows are cut to so many tokens.
    """

    def __init__(self, target: TargetModel, layers: Sequence[int], max_tokens: int) -> None:
        self.layers = tuple(dict.fromkeys([*layers, FINAL]))
        self.target, self.max_tokens = target, max_tokens
        self.ends = FrozenEnds(target)

    def num_tokens(self, rows: Sequence[TrainingRow]) -> int:
        """Tokens that a batch of these rows is padded to."""
        return min(self.max_tokens, max(len(row.tokens) for row in rows))

    def states(self, rows: Sequence[TrainingRow]) -> list[Tensor]:
        """[T, len(layers) * D] of each row, the layers side by side."""
        texts = [row.tokens[: self.max_tokens] for row in rows]
        lengths = [len(text) for text in texts]
        self.target.open(len(rows), max(lengths), self.layers)
        _, features = self.target.prefill(range(len(rows)), texts)
        assert features.hidden_NF is not None
        # A clone: what inference mode made can't be saved for a backward pass.
        return list(features.hidden_NF.clone().split(lengths))

    def summaries(self, rows: Sequence[TrainingRow]) -> list[Tensor] | None:
        """What teacher.py's `summarise` says of each row's positions, where it is known already."""
        return None

    def batch(self, rows: Sequence[TrainingRow], num_tokens: int | None = None) -> FeatureBatch:
        """The rows as one batch, padded to `num_tokens`, or to the longest."""
        device = self.target.device
        texts = [row.tokens[: self.max_tokens] for row in rows]
        lengths = [len(text) for text in texts]
        width = max(lengths) if num_tokens is None else num_tokens
        side_by_side_BTF = _padded(self.states(rows), width)
        states = dict(zip(self.layers, side_by_side_BTF.chunk(len(self.layers), dim=-1), strict=True))
        tokens_BT = _padded([torch.tensor(text) for text in texts], width).to(device)
        masks = [torch.tensor(row.loss_mask[: self.max_tokens]) for row in rows]
        loss_mask_BT = _padded(masks, width).to(device)
        is_real_BT = torch.arange(width, device=device) < torch.tensor(lengths, device=device).unsqueeze(1)
        # A law is asked for before a supervised token, or (training-time test) at one.
        needed_BT = loss_mask_BT.clone()
        needed_BT[:, :-1] |= loss_mask_BT[:, 1:]
        known = self.summaries(rows)
        teacher = Teacher(states[FINAL], needed_BT, self.ends, None if known is None else _padded(known, width))
        return FeatureBatch(tokens_BT, is_real_BT, loss_mask_BT, states, teacher, [row.row_id for row in rows])


def _padded(parts: Sequence[Tensor], width: int) -> Tensor:
    """[B, width, ...] of [T, ...] parts, zeros behind each."""
    out = parts[0].new_zeros((len(parts), width, *parts[0].shape[1:]))
    for i, part in enumerate(parts):
        out[i, : len(part)] = part
    return out

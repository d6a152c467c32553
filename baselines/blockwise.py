"""Blockwise parallel decoding: heads that guess the next tokens at once, through the target's own LM head
(Stern et al. 2018).

In the paper heads p_1 .. p_k guess the next k tokens; the longest prefix of guesses that p_1, which alone is the model
proper, agrees with is kept. Here p_1 is the untouched target, so head i + 1 of the paper is draft i, and keeping what
p_1 agrees with is what verification does. The other heads are h + W2 relu(W1 h + b1) + b2, a residual feed-forward
layer on the target's final hidden state h, and share its projection to the vocabulary.

The paper decodes greedily, also by looser rules (agreement within the top k, or within a distance), puts p_1 behind a
feed-forward layer as well, and trains heads with or without the model. Exact agreement is kept here; at temperature > 0
each head's token is drawn from its own distribution and verified by rejection, which the paper does not do.

The layout of checkpoints is this project's own: none was published. The module does not know how heads are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import RANDOM, Checkpoint
from dispark.drafters.network import TokenEnds, check_vocabulary
from dispark.drafters.parallel_heads import HeadsShape, ParallelHeadsDrafter, check_hidden_size

KIND = "blockwise"


@dataclass(frozen=True)
class BlockwiseShape(HeadsShape):
    """Heads to be made with random weights (`checkpoint=random`).

    Args:
        width: of the hidden layer of a head; None is the target's hidden size.
    """

    width: int | None = None


class FeedForwardHead(nn.Module):
    """h + W2 relu(W1 h + b1) + b2.

    Args:
        hidden_size: of h.
        width: of the layer between.
    """

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, width)
        self.w2 = nn.Linear(width, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        residual: Tensor = self.w2(F.relu(self.w1(hidden)))
        return hidden + residual


class BlockwiseHeads(nn.Module):
    """Heads 2 .. k + 1 of the paper, without the projection that they share (`heads.<i>.w1.weight` ...)."""

    def __init__(self, num_heads: int, hidden_size: int, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(FeedForwardHead(hidden_size, width) for _ in range(num_heads))
        self.width = width

    def states(self, hidden_BD: Tensor, num: int) -> Tensor:
        """[B, num, D] states of the first `num` heads, to be projected."""
        return torch.stack([self.heads[i](hidden_BD) for i in range(num)], dim=1)


class BlockwiseDrafter(ParallelHeadsDrafter):
    """Drafts with one feed-forward head a token.

    Args:
        checkpoint: a folder, a pinned repository (`owner/name@revision`), or `random`.
        draft_length: tokens proposed a round, at most one a head; None is all of them.
        confidence: peak, entropy, or None for none.
        random: what `checkpoint=random` makes.

    Raises:
        ValueError: a setting is out of range, or the checkpoint can't be read.
    """

    layout: ClassVar[str] = "dispark"
    network: BlockwiseHeads

    def __init__(
        self,
        checkpoint: str = RANDOM,
        draft_length: int | None = None,
        confidence: str | None = None,
        random: BlockwiseShape | None = None,
    ) -> None:
        shape = BlockwiseShape() if random is None else random
        super().__init__(checkpoint, draft_length, confidence, shape)
        self._width = shape.width

    def _num_heads(self, file: Checkpoint) -> int:
        kind = file.config["dispark_kind"]
        if kind != KIND:
            raise ValueError(f"drafter.checkpoint={file.name}: config.json has dispark_kind={kind}; must be {KIND}")
        return _positive(file, "num_heads")

    def _network(self, target: TargetModel, tensors: Mapping[str, Tensor] | None, num_ids: int) -> BlockwiseHeads:
        width = target.hidden_size if self._width is None else self._width
        num_heads = self._shape.num_heads
        if self._file is not None:
            num_heads, width = (_positive(self._file, key) for key in ("num_heads", "width"))
            check_hidden_size(_positive(self._file, "hidden_size"), target, self.checkpoint)
            check_vocabulary(_positive(self._file, "vocab_size"), target, self.checkpoint)
        self._ends = TokenEnds(target, vocabulary=self._vocabulary)
        return BlockwiseHeads(num_heads, target.hidden_size, width)

    def _start_heads(self, target: TargetModel) -> None:
        """Every head starts as the target's own, which guesses one token too few."""
        with torch.no_grad():
            for name, weight in self.network.named_parameters():
                if ".w2." in name:
                    weight.zero_()

    def train_logits(self, hidden_MD: Tensor, ends: Any) -> Tensor:
        logits: Tensor = ends.logits(self.network.states(hidden_MD, len(self.network.heads)))
        return logits

    def _head_logits(self, hidden_BD: Tensor, num_heads: int | None = None) -> Tensor:
        num_heads = self.draft_length if num_heads is None else num_heads
        return self._ends.logits(self.network.states(hidden_BD, num_heads))

    def _facts(self) -> dict[str, Any]:
        return {
            "num_heads": len(self.network.heads),
            "width": self.network.width,
            "is_aliased": self._ends.is_aliased,
        }

    def _saved_config(self, target: TargetModel) -> dict[str, Any]:
        return {
            "dispark_kind": KIND,
            "num_heads": len(self.network.heads),
            "width": self.network.width,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
        }


def _positive(file: Checkpoint, key: str) -> int:
    """A number of config.json.

    Raises:
        ValueError: it is missing, no whole number, or below 1.
    """
    value: int = file.need(key, int)
    if value < 1:
        raise ValueError(f"drafter.checkpoint={file.name}: config.json has {key}={value}; must be at least 1")
    return value

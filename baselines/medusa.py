"""Medusa: extra heads on the target's last hidden state, each guessing one token further ahead (Cai et al. 2024).

Head i is a few residual blocks x + silu(W x + b) and a linear layer of its own to the vocabulary, read at the position
before the anchor; it guesses the token i + 1 places behind the anchor. The authors verify a tree of the heads' best
guesses and, at temperature > 0, accept by a "typical" rule that changes the target's distribution. Here the heads draft
a chain, and verification is exact.

A file's heads give logits as they are: where a target caps its own, nothing is capped here, as the authors' code knows
no caps. The module does not know trees and the authors' acceptance rule.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import RANDOM, Checkpoint
from dispark.drafters.network import check_vocabulary
from dispark.drafters.parallel_heads import HeadsShape, ParallelHeadsDrafter, check_hidden_size

log = logging.getLogger(__name__)

PREFIX = "medusa_head."
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)")
_LAST = re.compile(r"(\d+)\.(\d+)\.weight")
_BASE = ("model.", "lm_head.")  # where a merged checkpoint keeps the model that the heads were trained with


@dataclass(frozen=True)
class MedusaShape(HeadsShape):
    """Heads to be made with random weights (`checkpoint=random`).

    Args:
        num_layers: residual blocks of a head.
    """

    num_layers: int = 1


class ResidualBlock(nn.Module):
    """x + silu(W x + b); `width` is that of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + F.silu(self.linear(inputs))


class MedusaHeads(nn.ModuleList):
    """Heads with the authors' names: `<head>.<layer>.linear.weight` and `<head>.<num_layers>.weight`.

    Args:
        num_heads: heads.
        num_layers: residual blocks of each.
        hidden_size: D, of the states that they read.
        num_ids: ids that can be drafted.
    """

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, num_ids: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        for _ in range(num_heads):
            blocks = [ResidualBlock(hidden_size) for _ in range(num_layers)]
            self.append(nn.Sequential(*blocks, nn.Linear(hidden_size, num_ids, bias=False)))

    def logits(self, hidden_BD: Tensor, num: int) -> Tensor:
        """[B, num, V_draft] of the first `num` heads."""
        return torch.stack([self[i](hidden_BD) for i in range(num)], dim=1)


class MedusaDrafter(ParallelHeadsDrafter):
    """Drafts a chain with Medusa heads.

    Args:
        checkpoint: a folder, a pinned repository (`owner/name@revision`), or `random`; the authors' `.pt` files,
            safetensors, and files merged with the base model, of which the heads alone are read.
        draft_length: tokens proposed a round, at most one a head; None is all of them.
        confidence: peak, entropy, or None for none.
        random: what `checkpoint=random` makes.

    Raises:
        ValueError: a setting is out of range, or the checkpoint can't be read.
    """

    layout: ClassVar[str] = "medusa"
    network: MedusaHeads

    def __init__(
        self,
        checkpoint: str = RANDOM,
        draft_length: int | None = None,
        confidence: str | None = None,
        random: MedusaShape | None = None,
    ) -> None:
        shape = MedusaShape() if random is None else random
        super().__init__(checkpoint, draft_length, confidence, shape)
        self._num_layers = shape.num_layers
        if self._file is not None:
            _check_counts(self._file)

    def _num_heads(self, file: Checkpoint) -> int:
        return count(_bare(file))[0]

    def _tensors(self, file: Checkpoint) -> dict[str, Tensor]:
        return _bare(file)

    def _network(self, target: TargetModel, tensors: Mapping[str, Tensor] | None, num_ids: int) -> MedusaHeads:
        if tensors is None:
            return MedusaHeads(self._shape.num_heads, self._num_layers, target.hidden_size, num_ids)
        ends = [tensor for name, tensor in tensors.items() if _LAST.fullmatch(name) and tensor.dim() == 2]
        # Sizes on which the file agrees with itself tell its target; any other disorder is for `fill` to list.
        sizes, widths = ({tensor.shape[axis] for tensor in ends} for axis in (0, 1))
        if len(widths) == 1:
            check_hidden_size(widths.pop(), target, self.checkpoint)
        if len(sizes) == 1 and num_ids == target.vocab_size:
            check_vocabulary(sizes.pop(), target, self.checkpoint)
        return MedusaHeads(*count(tensors), target.hidden_size, num_ids)

    def _start_heads(self, target: TargetModel) -> None:
        """As the authors train: every head starts as the target's own."""
        rows = target.model.get_output_embeddings().weight.detach()
        if self._vocabulary is not None:
            rows = rows[self._vocabulary.ids.to(rows.device)]
        with torch.no_grad():
            for name, weight in self.network.named_parameters():
                if _LAST.fullmatch(name):
                    weight.copy_(rows)
                else:
                    weight.zero_()

    def train_logits(self, hidden_MD: Tensor, ends: Any) -> Tensor:
        return self.network.logits(hidden_MD, len(self.network))

    def _head_logits(self, hidden_BD: Tensor, num_heads: int | None = None) -> Tensor:
        return self.network.logits(hidden_BD, self.draft_length if num_heads is None else num_heads)

    def _facts(self) -> dict[str, Any]:
        return {"num_heads": len(self.network), "num_layers": self.network.num_layers}

    def _saved_config(self, target: TargetModel) -> dict[str, Any]:
        return {
            "base_model_name_or_path": target.name,
            "medusa_num_heads": len(self.network),
            "medusa_num_layers": self.network.num_layers,
        }


def count(names: Mapping[str, Any]) -> tuple[int, int]:
    """(heads, residual blocks of a head) that the tensors' names show."""
    blocks = [match for name in names if (match := _BLOCK.fullmatch(name))]
    ends = [match for name in names if (match := _LAST.fullmatch(name))]
    return 1 + max(int(match[1]) for match in blocks + ends), 1 + max(int(match[2]) for match in blocks)


def _bare(file: Checkpoint) -> dict[str, Tensor]:
    """The tensors without the prefix, and without the base model of a merged checkpoint.

    Raises:
        ValueError: a tensor is there under both names.
    """
    is_merged = any(name.startswith(PREFIX) for name in file.tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        if is_merged and name.startswith(_BASE):
            continue
        bare = name.removeprefix(PREFIX)
        if bare in found:
            raise ValueError(f"drafter.checkpoint={file.name}: tensor {bare} is there with and without {PREFIX}")
        found[bare] = tensor
    return found


def _check_counts(file: Checkpoint) -> None:
    """Says where config.json counts otherwise than the tensors, which are believed (published files do)."""
    for key, found in zip(("medusa_num_heads", "medusa_num_layers"), count(_bare(file)), strict=True):
        said = file.config.get(key)
        if said is not None and said != found:
            log.warning(
                "drafter.checkpoint=%s: config.json says %s=%s, but the tensors are of %s; these are taken",
                file.name,
                key,
                said,
                found,
            )
    if any(name.startswith(_BASE) for name in file.tensors):
        log.warning(
            "drafter.checkpoint=%s: is merged with a base model, which is not read; its heads fit that model only",
            file.name,
        )

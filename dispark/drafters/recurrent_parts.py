"""A feature-recurrent drafter in memory: made with random weights, loaded from a checkpoint, saved to one.

Every tensor of a checkpoint is accounted for, those of the two ends and of the reduced vocabulary included. It knows
nothing of rows and rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import Checkpoint, fill, in_dtype, save_checkpoint
from dispark.drafters.network import TokenEnds, place, pop_vocabulary
from dispark.drafters.recurrent_config import EMBEDDING_TENSOR, HEAD_TENSOR, RecurrentConfig
from dispark.drafters.recurrent_network import RecurrentNetwork
from dispark.drafters.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class RecurrentParts:
    """A drafter on its device: network, the two ends, and the reduced draft vocabulary, if any."""

    network: RecurrentNetwork
    ends: TokenEnds
    vocabulary: DraftVocabulary | None


def make_parts(
    config: RecurrentConfig, target: TargetModel, seed: int, draft_ids: Tensor | None = None
) -> RecurrentParts:
    """Random weights between the target's own ends; `draft_ids`, or the first ones, can be drafted."""
    if draft_ids is None and config.draft_vocab_size is not None:
        draft_ids = torch.arange(config.draft_vocab_size)
    vocabulary = None if draft_ids is None else DraftVocabulary(draft_ids, target.vocab_size).to(target.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = config.network(target)
    place(network, target)
    return RecurrentParts(network, TokenEnds(target, vocabulary=vocabulary), vocabulary)


def load_parts(
    checkpoint: Checkpoint, config: RecurrentConfig, tensors: Mapping[str, Tensor], target: TargetModel
) -> RecurrentParts:
    """A checkpoint's drafter in the target's dtype and on its device, every tensor accounted for.

    Args:
        checkpoint: for messages.
        config: what its config.json says.
        tensors: the checkpoint's, under the network's names.
        target: what it drafts for.

    Raises:
        ValueError: it doesn't fit the target, or its tensors don't fit its layout.
    """
    network = config.network(target)
    _fill_all(network, tensors, _shapes_of_ends(config, tensors, target), checkpoint)
    place(network, target)
    vocabulary = pop_vocabulary(dict(tensors), target, checkpoint.name)
    if vocabulary is not None:
        vocabulary = vocabulary.to(target.device)
    ends = TokenEnds(target, tensors.get(EMBEDDING_TENSOR), tensors.get(HEAD_TENSOR), vocabulary)
    return RecurrentParts(network, ends, vocabulary)


def _shapes_of_ends(
    config: RecurrentConfig, tensors: Mapping[str, Tensor], target: TargetModel
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors beside the network's that the file has to hold, or may hold and does."""
    width, size = config.layers.hidden_size, config.draft_vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING_TENSOR: (target.vocab_size, width),
        HEAD_TENSOR: (target.vocab_size if size is None else size, width),
    }
    needs = set(config.needs)
    if width != target.hidden_size:
        needs |= {EMBEDDING_TENSOR, HEAD_TENSOR}  # the target's own would not fit
    if size is not None:
        shapes |= {"d2t": (size,), "t2d": (target.vocab_size,)}
        needs.add("d2t")
    return {name: shape for name, shape in shapes.items() if name in needs or name in tensors}


def _fill_all(
    network: RecurrentNetwork, tensors: Mapping[str, Tensor], others: Mapping[str, tuple[int, ...]], source: Checkpoint
) -> None:
    """Fills the network; tensors of other owners are compared along with its own, so that one message lists all."""
    frame = nn.Module()
    for name, child in network.named_children():
        frame.add_module(name, child)
    for name, shape in others.items():
        owner, _, leaf = name.rpartition(".")
        holder = frame
        if owner:
            holder = nn.Module()
            frame.add_module(owner, holder)
        holder.register_buffer(leaf, torch.empty(shape, device="meta"))
    fill(frame, tensors, source.name, source.layout)


def save_parts(
    folder: Path,
    parts: RecurrentParts,
    config: RecurrentConfig,
    target: TargetModel,
    keys: Mapping[str, Any],
    has_ends: bool,
) -> None:
    """Writes a checkpoint that drafts bit for bit the same.

    Args:
        folder: made where absent.
        parts, config: the drafter.
        target: that it drafts for.
        keys: of config.json beside the layers' and the target's; None leaves one out.
        has_ends: write embedding and head even where they are the target's.
    """
    width, vocabulary = config.layers.hidden_size, parts.vocabulary
    own = {
        "dtype": str(target.dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "target_hidden_size": None if width == target.hidden_size else target.hidden_size,
        "draft_vocab_size": None if vocabulary is None else len(vocabulary.d2t),
    }
    given = {key: value for key, value in (own | dict(keys)).items() if value is not None}
    is_aliased = parts.ends.is_aliased
    ends = {
        name: weight
        for name, weight in parts.ends.weights().items()
        if has_ends or not is_aliased[name.removesuffix(".weight")]
    }
    maps = {} if vocabulary is None else vocabulary.state_dict()
    network = in_dtype(parts.network.state_dict(), target.dtype)
    save_checkpoint(folder, config.layers.to_dict() | given, network | ends | maps)

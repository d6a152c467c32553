"""What a feature-recurrent drafter consists of: told by a checkpoint's config.json, or by a shape for random weights.

It knows no tensors but their presence: those are compared in recurrent_parts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dispark.decoding.target import FINAL, TargetModel
from dispark.drafters.checkpoint import Checkpoint
from dispark.drafters.network import check_vocabulary
from dispark.drafters.recurrent_network import RecurrentNetwork

EMBEDDING_TENSOR, HEAD_TENSOR = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class RecurrentConfig:
    """What a drafter consists of, whatever file said so.

    Args:
        layers: stock config of its layers.
        draft_length: tokens that it was trained to draft; None is unknown.
        draft_vocab_size: ids that can be drafted; None is all.
        needs: names of the ends (EMBEDDING_TENSOR, HEAD_TENSOR) that its file has to hold.
        vocab_size, target_hidden_size, num_target_layers: of the target it was made for; None is unknown.
    """

    layers: Any
    draft_length: int | None = None
    draft_vocab_size: int | None = None
    needs: tuple[str, ...] = ()
    vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None

    def features(self, target: TargetModel) -> tuple[int, ...]:
        """Layers of a target that it reads; the final normalised state unless a method says otherwise."""
        return (FINAL,)

    def network(self, target: TargetModel) -> RecurrentNetwork:
        """The network, with random weights."""
        raise NotImplementedError

    def check_target(self, target: TargetModel, name: str) -> None:
        """Refuses another target than the one that the drafter was made for.

        Raises:
            ValueError: hidden size, number of layers or vocabulary doesn't fit.
        """
        width = self.layers.hidden_size if self.target_hidden_size is None else self.target_hidden_size
        for what, own, targets in (
            ("a hidden size", width, target.hidden_size),
            ("a target with a number of layers", self.num_target_layers, target.num_layers),
        ):
            if own is not None and own != targets:
                raise ValueError(
                    f"drafter.checkpoint={name}: made for {what} of {own}, but target {target.name} has {targets}"
                )
        if self.vocab_size is not None:
            check_vocabulary(self.vocab_size, target, name)


def target_keys(checkpoint: Checkpoint, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What config.json says about the target, and the draft vocabulary: arguments of RecurrentConfig.

    Args:
        checkpoint: whose config.json is read.
        config: a part of it that has the vocabulary's size; None is all of it.

    Raises:
        ValueError: a value is no whole number.
    """
    found: dict[str, Any] = {}
    for key, source in (
        ("target_hidden_size", checkpoint.config),
        ("num_target_layers", checkpoint.config),
        ("vocab_size", checkpoint.config if config is None else config),
        ("draft_vocab_size", checkpoint.config),
    ):
        if source.get(key) is not None:
            found[key] = checkpoint.need(key, int, source)
    has_maps = "d2t" in checkpoint.tensors
    if has_maps:
        found.setdefault("draft_vocab_size", len(checkpoint.tensors["d2t"]))
    elif found.get("draft_vocab_size") == found.get("vocab_size"):
        found.pop("draft_vocab_size", None)  # not reduced
    return found


@dataclass(frozen=True)
class RecurrentShape:
    """A drafter to be made with random weights (`checkpoint=random`).

    Args:
        num_layers: draft layers.
        draft_vocab_size: the first so many ids can be drafted; None is all.
        seed: draws the weights.
    """

    num_layers: int = 1
    draft_vocab_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for key, value in (("num_layers", self.num_layers), ("draft_vocab_size", self.draft_vocab_size)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"drafter.random.{key}={value}: must be a whole number >= 1")

    def check_target(self, target: TargetModel) -> None:
        """Raises ValueError where more ids are to be drafted than the target has."""
        if self.draft_vocab_size is not None and self.draft_vocab_size > target.vocab_size:
            raise ValueError(
                f"drafter.random.draft_vocab_size={self.draft_vocab_size}: target {target.name} has "
                f"{target.vocab_size} tokens"
            )


class ConfigMaker(Protocol):
    """A method's shape: RecurrentShape with the config that it stands for on a target."""

    seed: int
    draft_vocab_size: int | None

    def config(self, target: TargetModel) -> RecurrentConfig: ...

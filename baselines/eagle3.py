"""Eagle-3 (Li et al. 2025): one layer over the token's embedding and a state that fuses low, middle and high features.

The attention of the first layer reads cat[input_layernorm(embedding), hidden_norm(state)], twice the usual width; its
residual is the state as it is. The layer's un-normed output recurs, and the head reads it through `norm`. Features of
the target pass through `fc` once, drafted states don't. Drafting is a chain here; the authors also draft trees.

Three layouts load: DeepSpec's (five features, the full vocabulary, copies of the target's ends), the authors' and
SpecForge's (`midlayer.`, a reduced vocabulary), and that of the speculators library. The latter two name features by
the layers they ENTER, so their layer i is the output of layer i - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from baselines.eagle import authors_layers
from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import RANDOM, Checkpoint
from dispark.drafters.layers import layers_from, layers_like, norm_like
from dispark.drafters.network import check_features
from dispark.drafters.recurrent import Reader, RecurrentDrafter
from dispark.drafters.recurrent_config import (
    EMBEDDING_TENSOR,
    HEAD_TENSOR,
    RecurrentConfig,
    RecurrentShape,
    target_keys,
)
from dispark.drafters.recurrent_network import RecurrentNetwork
from dispark.drafters.semi_autoregressive import spread_layers

_AUX = "eagle_aux_hidden_state_layer_ids"
_STEP_LOSS_DECAY = 0.8  # of DeepSpec's training; its files name it


class PairNorm(nn.Module):
    """Stands where a stock layer norms its input, and gives the attention both normed halves.

    Args:
        token_norm: the stock norm, whose weight keeps its name in the state dict.
        hidden_norm: registered by the caller; None where the state comes normed.
    """

    def __init__(self, token_norm: nn.Module, hidden_norm: nn.Module | None) -> None:
        super().__init__()
        self.weight = token_norm.weight
        self._norms = (token_norm, hidden_norm)  # in a tuple: their weights are registered already
        self.embedded: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., 2 D] of the states [..., D] and the embeddings that were left in `embedded`, which serve once."""
        assert self.embedded is not None, "the embeddings come before the call"
        token_norm, hidden_norm = self._norms
        tokens = token_norm(self.embedded.reshape(hidden.shape))
        self.embedded = None
        return torch.cat([tokens, hidden if hidden_norm is None else hidden_norm(hidden)], dim=-1)


class Eagle3Network(RecurrentNetwork):
    """Named as in DeepSpec's files, which differ from the authors' by `layers.0` for `midlayer`.

    Args:
        config: stock config of the layers.
        feature_width: of the target's features, side by side.
        norm_before_residual: the residual is the normed state, as the speculators library may train it.
    """

    def __init__(self, config: Any, feature_width: int, norm_before_residual: bool = False) -> None:
        super().__init__(config)
        width, first = config.hidden_size, self._first
        self.norm = self.stock.norm
        self.fc = nn.Linear(feature_width, width, bias=False)
        for name in ("q_proj", "k_proj", "v_proj"):
            if (stock := getattr(first.self_attn, name)) is not None:  # Gemma 4 may take its keys for values
                wide = nn.Linear(2 * width, stock.out_features, bias=stock.bias is not None)
                setattr(first.self_attn, name, wide)
        first.hidden_norm = norm_like(self.norm, width, config.rms_norm_eps)
        first.input_layernorm = PairNorm(first.input_layernorm, None if norm_before_residual else first.hidden_norm)
        self._norm_before_residual = norm_before_residual

    @property
    def _first(self) -> Any:
        return self.layers[0]

    def project(self, features: Tensor) -> Tensor:
        states: Tensor = self.fc(features)
        return states

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The states; the embeddings meet them inside the first layer."""
        self._first.input_layernorm.embedded = embedded
        return self._first.hidden_norm(hidden) if self._norm_before_residual else hidden

    def read(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.norm(hidden)
        return normed


@dataclass(frozen=True)
class Eagle3Config(RecurrentConfig):
    """What an Eagle-3 drafter consists of.

    Args:
        feature_layers: target layers whose outputs make the features; None is the authors' choice for any target.
        norm_before_residual: see Eagle3Network.
    """

    feature_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False

    def features(self, target: TargetModel) -> tuple[int, ...]:
        return authors_features(target.num_layers) if self.feature_layers is None else self.feature_layers

    def network(self, target: TargetModel) -> Eagle3Network:
        width = len(self.features(target)) * target.hidden_size
        return Eagle3Network(self.layers, width, self.norm_before_residual)

    def check_target(self, target: TargetModel, name: str) -> None:
        """Raises ValueError: see RecurrentConfig; or a feature can't be read, or comes twice."""
        super().check_target(target, name)
        layers = self.features(target)
        check_features(layers, target, name)
        if not layers or len(set(layers)) < len(layers):
            raise ValueError(
                f"drafter.checkpoint={name}: reads layers {list(layers)} of target {target.name}; allowed: at least "
                f"one, each once (the authors' choice needs a target of 7 layers, this one has {target.num_layers})"
            )


def authors_features(num_layers: int) -> tuple[int, ...]:
    """The states that enter layers 2, L // 2 and L - 3 of L, by the layers that put them out."""
    return 1, num_layers // 2 - 1, num_layers - 4


def read_deepspec(checkpoint: Checkpoint) -> Eagle3Config:
    """DeepSpec's config.json.

    Raises:
        ValueError: a key is missing or of another type.
    """
    c = checkpoint
    return Eagle3Config(
        layers=layers_from(c.config, c.need("model_type", str)),
        draft_length=c.need("ttt_length", int),
        feature_layers=tuple(c.need("target_layer_ids", list)),
        norm_before_residual=c.config.get("norm_before_residual") is True,
        needs=() if c.config.get("has_target_ends") is False else (EMBEDDING_TENSOR, HEAD_TENSOR),
        **target_keys(c),
    )


def read_authors(checkpoint: Checkpoint) -> Eagle3Config:
    """config.json of the authors and of SpecForge; the embedding is the target's unless the file has one.

    Raises:
        ValueError: a key is of another type.
    """
    c = checkpoint
    nested = c.config.get("eagle_config") or {}
    return Eagle3Config(
        layers=authors_layers(c, c.config | {"num_hidden_layers": 1}),
        feature_layers=_entered(c, nested if _AUX in nested else c.config),
        needs=(HEAD_TENSOR,),
        **target_keys(c),
    )


def read_speculators(checkpoint: Checkpoint) -> Eagle3Config:
    """config.json of the speculators library, whose layer has a config of its own.

    Raises:
        ValueError: a key is missing or of another type.
    """
    c = checkpoint
    own: dict[str, Any] = c.need("transformer_layer_config", dict)
    return Eagle3Config(
        layers=authors_layers(c, own),
        feature_layers=_entered(c, c.config),
        norm_before_residual=c.config.get("norm_before_residual") is True,
        needs=(HEAD_TENSOR,),
        **target_keys(c, own),
    )


def _entered(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Feature layers, where config.json names those that the features enter."""
    if not config.get(_AUX):
        return None
    return tuple(layer - 1 for layer in checkpoint.need(_AUX, list, config))


@dataclass(frozen=True)
class Eagle3Shape(RecurrentShape):
    """Args: see RecurrentShape; `feature_layers` are the target layers to read, None spreads five over the target."""

    feature_layers: list[int] | None = None

    def config(self, target: TargetModel) -> Eagle3Config:
        """The config of such a drafter; raises ValueError where it can't draft for the target."""
        self.check_target(target)
        layers = spread_layers(target.num_layers) if self.feature_layers is None else self.feature_layers
        return Eagle3Config(
            layers=layers_like(target.model.config, self.num_layers),
            draft_vocab_size=self.draft_vocab_size,
            feature_layers=tuple(layers),
        )


class Eagle3Drafter(RecurrentDrafter):
    """Args: see RecurrentDrafter; files of three layouts load, and `save` writes DeepSpec's."""

    readers: ClassVar[dict[str, Reader]] = {
        "deepspec_eagle3": read_deepspec,
        "eagle3": read_authors,
        "speculators_eagle3": read_speculators,
    }
    saves_ends: ClassVar[bool] = True  # as DeepSpec's loader needs

    def __init__(
        self,
        checkpoint: str = RANDOM,
        draft_length: int | None = None,
        confidence: str | None = None,
        random: Eagle3Shape | None = None,
    ) -> None:
        super().__init__(checkpoint, draft_length, confidence, Eagle3Shape() if random is None else random)

    def rename(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The authors' `midlayer` is `layers.0` here, and in messages."""
        renamed = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
        return tensors if len(renamed) < len(tensors) else renamed

    def saved_keys(self) -> dict[str, Any]:
        config = self.config
        assert isinstance(config, Eagle3Config)
        family = type(config.layers).__name__.removesuffix("Config").removesuffix("Text")
        return {
            "architectures": [f"{family}Eagle3Model"],
            "draft_num_hidden_layers": config.layers.num_hidden_layers,
            "target_layer_ids": list(self.feature_layers),
            "ttt_length": self.draft_length,
            "step_loss_decay": _STEP_LOSS_DECAY,
            "norm_before_residual": config.norm_before_residual or None,
        }

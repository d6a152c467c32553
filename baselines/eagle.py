"""EAGLE, the first form (Li et al. 2024): one layer continues the target's last hidden states, and its head reads them.

A linear layer mixes the token's embedding and the state before it; the decoder layer behind it has no input norm, and
nothing norms its output: the target's head reads it as it is, and it recurs as it is. Drafting is a chain here, where
the authors draft trees.

Their files hold the layer, `fc` (with or without a bias) and perhaps a copy of the target's embedding.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import RANDOM, Checkpoint
from dispark.drafters.layers import layers_from, layers_like
from dispark.drafters.recurrent import Reader, RecurrentDrafter
from dispark.drafters.recurrent_config import RecurrentConfig, RecurrentShape, target_keys
from dispark.drafters.recurrent_network import RecurrentNetwork
from dispark.targets.architectures import SUPPORTED

AUTHORS_ROPE_THETA = 10000.0


def authors_layers(checkpoint: Checkpoint, config: dict[str, Any] | None = None) -> Any:
    """The stock config of one draft layer as the EAGLE code understands config.json.

    It is a Llama layer unless the file says more: a name of another family alone does not bring that family's query and
    key norms. The rotary base is the draft's own `rope_theta`, or 10000, whatever the target uses.

    Args:
        checkpoint: whose tensors tell.
        config: the layer's keys, where they are a part of config.json.
    """
    given = copy.deepcopy(checkpoint.config if config is None else config)  # the stock class writes into nested keys
    kind = given.get("model_type")
    has_query_norm = any(name.endswith("self_attn.q_norm.weight") for name in checkpoint.tensors)
    if kind not in SUPPORTED or (kind == "qwen3" and not has_query_norm):
        kind = "llama"
    if not given.get("rope_parameters"):
        given.setdefault("rope_theta", AUTHORS_ROPE_THETA)
    return layers_from(given | {"model_type": kind}, kind)


class EagleNetwork(RecurrentNetwork):
    """Named as the authors' files: `fc`, `layers.0`.

    Args:
        config: stock config of the layers.
        has_bias: whether `fc` has one.
    """

    def __init__(self, config: Any, has_bias: bool) -> None:
        super().__init__(config)
        first: Any = self.layers[0]
        first.input_layernorm = nn.Identity()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=has_bias)

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.fc(torch.cat([embedded, hidden], dim=-1))
        return mixed


@dataclass(frozen=True)
class EagleConfig(RecurrentConfig):
    """Args: see RecurrentConfig; `has_bias` tells of `fc`."""

    has_bias: bool = True

    def network(self, target: TargetModel) -> EagleNetwork:
        return EagleNetwork(self.layers, self.has_bias)


def read_eagle(checkpoint: Checkpoint) -> EagleConfig:
    """The authors' config.json; `bias` is told from the tensors, as older files don't name it.

    Raises:
        ValueError: a key is of another type.
    """
    return EagleConfig(
        layers=authors_layers(checkpoint),
        has_bias="fc.bias" in checkpoint.tensors,
        **target_keys(checkpoint),
    )


@dataclass(frozen=True)
class EagleShape(RecurrentShape):
    """Args: see RecurrentShape."""

    def config(self, target: TargetModel) -> EagleConfig:
        """The config of such a drafter; raises ValueError where it can't draft for the target."""
        self.check_target(target)
        layers = layers_like(target.model.config, self.num_layers)
        return EagleConfig(layers=layers, draft_vocab_size=self.draft_vocab_size)


class EagleDrafter(RecurrentDrafter):
    """Args: see RecurrentDrafter; a file in the authors' layout loads, and `save` writes one."""

    readers: ClassVar[dict[str, Reader]] = {"eagle": read_eagle}

    def __init__(
        self,
        checkpoint: str = RANDOM,
        draft_length: int | None = None,
        confidence: str | None = None,
        random: EagleShape | None = None,
    ) -> None:
        super().__init__(checkpoint, draft_length, confidence, EagleShape() if random is None else random)

    def saved_keys(self) -> dict[str, Any]:
        assert isinstance(self.config, EagleConfig)
        return {"architectures": ["LlamaForCausalLM"], "bias": self.config.has_bias}

"""Multi-token prediction as DeepSeek-V3 trains it (DeepSeek-AI 2024, section 2.2), with one module applied again.

The module norms the token's embedding and the target's final state, projects the two to one, runs a decoder layer and
norms the result, which the target's head reads. With draft_length 1 this is MTP-1; beyond, the module takes its own
normed output where the target's normed state was. (Other modules for later tokens, as in training with several depths,
are not loaded.)

No layout was published apart from whole models, so files are in this project's own, `"dispark_kind": "mtp"`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import RANDOM, Checkpoint
from dispark.drafters.layers import layers_from, layers_like, norm_like
from dispark.drafters.recurrent import Reader, RecurrentDrafter
from dispark.drafters.recurrent_config import RecurrentConfig, RecurrentShape, target_keys
from dispark.drafters.recurrent_network import RecurrentNetwork

KIND = "mtp"


class MtpNetwork(RecurrentNetwork):
    """`enorm`, `hnorm`, `eh_proj` (names of DeepSeek-V3), `layers`, and `norm`, its `shared_head.norm`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.norm = self.stock.norm
        self.enorm = norm_like(self.norm, width, config.rms_norm_eps)
        self.hnorm = norm_like(self.norm, width, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return mixed

    def recur(self, outputs: Tensor) -> Tensor:
        normed: Tensor = self.norm(outputs)
        return normed


@dataclass(frozen=True)
class MtpConfig(RecurrentConfig):
    """Args: see RecurrentConfig."""

    def network(self, target: TargetModel) -> MtpNetwork:
        return MtpNetwork(self.layers)


def read_mtp(checkpoint: Checkpoint) -> MtpConfig:
    """This project's config.json.

    Raises:
        ValueError: the file holds another kind of drafter, or a key is missing or of another type.
    """
    kind = checkpoint.need("dispark_kind")
    if kind != KIND:
        raise ValueError(f"drafter.checkpoint={checkpoint.name}: holds dispark_kind={kind}; this drafter reads {KIND}")
    return MtpConfig(
        layers=layers_from(checkpoint.config, checkpoint.need("model_type", str)),
        draft_length=checkpoint.need("draft_length", int),
        **target_keys(checkpoint),
    )


@dataclass(frozen=True)
class MtpShape(RecurrentShape):
    """Args: see RecurrentShape."""

    def config(self, target: TargetModel) -> MtpConfig:
        """The config of such a drafter; raises ValueError where it can't draft for the target."""
        self.check_target(target)
        layers = layers_like(target.model.config, self.num_layers)
        return MtpConfig(layers=layers, draft_vocab_size=self.draft_vocab_size)


class MtpDrafter(RecurrentDrafter):
    """Args: see RecurrentDrafter; a file that `save` wrote loads."""

    readers: ClassVar[dict[str, Reader]] = {"dispark": read_mtp}
    default_length: ClassVar[int] = 1

    def __init__(
        self,
        checkpoint: str = RANDOM,
        draft_length: int | None = None,
        confidence: str | None = None,
        random: MtpShape | None = None,
    ) -> None:
        super().__init__(checkpoint, draft_length, confidence, MtpShape() if random is None else random)

    def saved_keys(self) -> dict[str, Any]:
        return {"dispark_kind": KIND, "draft_length": self.draft_length}

"""DFlash: the block-parallel backbone alone, every slot drafted independently of the others.

Two conventions, told apart by the checkpoint's layout. DeepSpec's feeds the anchor and block_size - 1 masks and drafts
from every slot; the authors' (z-lab) counts the anchor in block_size and drafts from the mask slots only, each of them
the token at its own position, so a block drafts one token less. The authors' files hold neither embedding nor head.
"""

from __future__ import annotations

from typing import Any, ClassVar

from dispark.drafters.checkpoint import RANDOM, Checkpoint
from dispark.drafters.layers import layers_from
from dispark.drafters.network import BlockConfig, read_deepspec
from dispark.drafters.semi_autoregressive import BlockShape, Reader, SemiAutoregressiveDrafter


def read_zlab(checkpoint: Checkpoint) -> BlockConfig:
    """The authors' config.json; layers to read are derived where it names none.

    Raises:
        ValueError: a key is missing or of another type.
    """
    c = checkpoint
    own: dict[str, Any] = c.need("dflash_config", dict)
    num_target_layers = c.need("num_target_layers", int)
    layers = own.get("target_layer_ids") or default_layers(c.need("num_hidden_layers", int), num_target_layers)
    return BlockConfig(
        layers=layers_from(c.config, c.need("model_type", str)),
        feature_layers=tuple(layers),
        block_size=c.need("block_size", int),
        mask_token_id=c.need("mask_token_id", int, own),
        anchor_predicts=False,
        num_target_layers=num_target_layers,
    )


def default_layers(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """As many layers as the draft has, evenly from the second to the third from the end; one is the middle layer."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    low, high = 1, num_target_layers - 3
    return [round(low + i * (high - low) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


class DFlashDrafter(SemiAutoregressiveDrafter):
    """Args: see SemiAutoregressiveDrafter; a file of either convention loads, `random` makes one of `convention`.

    Args:
        convention: deepspec or zlab, for checkpoint=random.
    """

    readers: ClassVar[dict[str, Reader]] = {"deepspec_block": read_deepspec, "zlab_dflash": read_zlab}

    def __init__(
        self,
        checkpoint: str = RANDOM,
        draft_length: int | None = None,
        confidence: str | None = None,
        random: BlockShape | None = None,
        convention: str = "deepspec",
    ) -> None:
        if convention not in ("deepspec", "zlab"):
            raise ValueError(f"drafter.convention={convention}: must be deepspec or zlab")
        shape = BlockShape(head="none", has_confidence=False) if random is None else random
        if shape.head != "none":
            raise ValueError(f"drafter.random.head={shape.head}: DFlash has none; drafter=dispark takes one")
        super().__init__(checkpoint, draft_length, None, confidence, shape, anchor_predicts=convention == "deepspec")
        if self._config is not None and self._config.head != "none":
            raise ValueError(f"drafter.checkpoint={checkpoint}: has a {self._config.head} head; use drafter=dispark")

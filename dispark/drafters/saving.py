"""Writes a block-parallel drafter as its authors' tools read it.

DeepSpec's layout where every slot drafts, z-lab's where the anchor's slot doesn't. DeepSpec's files hold copies of the
target's embedding and head; left out (`has_ends=False`) a file is a tenth of the size and says so in its config, and
the target's own serve when it is loaded here. Reduced vocabularies add d2t and t2d, and leave both out as well.

It knows nothing about training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import in_dtype, save_checkpoint
from dispark.drafters.network import BlockConfig, BlockNetwork

_FAMILIES = {"qwen3": "Qwen3", "gemma4_text": "Gemma4", "llama": "Llama", "gemma3_text": "Gemma3"}
_HEAD_TYPES = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}


def block_keys(config: BlockConfig, target: TargetModel, has_ends: bool) -> dict[str, Any]:
    """config.json of a drafter.

    Args:
        config: of the network.
        target: that it was made for.
        has_ends: whether the file will hold embedding and head.
    """
    keys: dict[str, Any] = dict(config.layers.to_dict())
    keys |= {
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "num_target_layers": target.num_layers,
        "block_size": config.block_size,
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    if not config.anchor_predicts:
        own = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.feature_layers)}
        return keys | {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    keys |= {
        "architectures": [f"{_FAMILIES[config.layers.model_type]}DSparkModel"],
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.feature_layers),
        "num_anchors": 512,  # DeepSpec's loader wants it; only its training reads it
        "markov_rank": config.rank,
        "enable_confidence_head": config.confidence != "none",
        "target_model_type": target.model.config.model_type,
    }
    if config.rank:
        keys["markov_head_type"] = _HEAD_TYPES[config.head]
    if config.confidence != "none":
        keys["confidence_head_with_markov"] = config.confidence == "markov"
    if config.draft_vocab_size is not None:
        keys["draft_vocab_size"] = config.draft_vocab_size
    if not has_ends:
        keys["has_target_ends"] = False
    return keys


def save_block(folder: Path, network: BlockNetwork, target: TargetModel, has_ends: bool = True) -> None:
    """Writes config.json and model.safetensors.

    Args:
        folder: made where absent.
        network: with its weights.
        target: gives embedding and head.
        has_ends: write copies of both, as DeepSpec's loader needs; not done for z-lab's layout or a reduced vocabulary.
    """
    has_ends = has_ends and network.config.anchor_predicts and network.vocabulary is None
    tensors: dict[str, Tensor] = in_dtype(network.state_dict(), target.dtype)
    if has_ends:
        tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight
        tensors["lm_head.weight"] = target.model.get_output_embeddings().weight
    if network.vocabulary is not None:
        tensors |= {"d2t": network.vocabulary.d2t, "t2d": network.vocabulary.t2d}
    save_checkpoint(folder, block_keys(network.config, target, has_ends), tensors)

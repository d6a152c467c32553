"""Which stock `transformers` models the packed loop can drive, and why the others are refused.

The loop flattens all rows into one sequence, keeps keys and values in its own slots and replaces the attention function
of a stock model. That is right only if tokens of different positions meet nowhere but in softmax attention, if the mask
is causal (with or without a sliding window), and if a token's rotation depends on its own position alone. Each check
below names the config key that breaks one of these.

This module knows configs only: it loads no weights, and a checkpoint whose own code differs from the stock model of the
same type is beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dispark.targets.quiet import first_line

# model_type -> (config class, causal LM class), by name so that importing this module stays cheap.
SUPPORTED: dict[str, tuple[str, str]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4_text": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
}

LAYER_TYPES = ("full_attention", "sliding_attention")

# Frequencies that are fixed when the model is built. "dynamic" and "longrope" recompute them from the longest position
# of the call, which would make a row's result depend on the rows beside it.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_architecture(config: Any, name: str = "") -> str:
    """Checks that the packed loop can drive this model.

    Args:
        config: a `transformers` config object (only attributes are read).
        name: the target's name, for the message.

    Returns:
        The model type, a key of SUPPORTED.

    Raises:
        ValueError: in one line, the architecture, the config key that rules it out, and what is supported.
    """
    model_type = getattr(config, "model_type", None)
    architectures = getattr(config, "architectures", None) or [model_type]
    reason = _refusal(config, model_type)
    if reason is None:
        return str(model_type)
    where = f"target {name}: " if name else ""
    supported = ", ".join(f"{kind} ({classes[1]})" for kind, classes in SUPPORTED.items())
    raise ValueError(f"{where}architecture {architectures[0]} is not supported: {reason}; supported: {supported}")


def _refusal(config: Any, model_type: Any) -> str | None:
    """The first reason why the loop can't drive this config, most telling first; None if it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "is_encoder_decoder=true (the loop decodes decoder-only models)"
    for key in _EXPERT_KEYS:
        if getattr(config, key, None):
            return f"{key}={getattr(config, key)} (mixture of experts)"
    text_config = getattr(config, "text_config", None)
    if text_config is not None and model_type not in SUPPORTED:
        kind = text_config.get("model_type") if isinstance(text_config, Mapping) else text_config.model_type
        return f"model_type={model_type} is multi-modal (save its text part, {kind}, on its own to use it)"
    layer_types = getattr(config, "layer_types", None) or []
    other = sorted({kind for kind in layer_types if kind not in LAYER_TYPES})
    if other:
        return f"layer_types has {', '.join(other)} (allowed: {', '.join(LAYER_TYPES)})"
    if getattr(config, "num_kv_shared_layers", None):
        return f"num_kv_shared_layers={config.num_kv_shared_layers} (layers that share keys and values)"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"attn_logit_softcapping={config.attn_logit_softcapping} (attention scores are capped)"
    is_bidirectional = getattr(config, "use_bidirectional_attention", None)
    if is_bidirectional not in (None, False, "vision"):  # "vision" means between the tokens of an image
        return f"use_bidirectional_attention={is_bidirectional} (attention is not causal)"
    if getattr(config, "quantization_config", None) is not None:
        return "quantization_config is set (use the unquantized checkpoint)"
    if model_type not in SUPPORTED:
        return f"model_type={model_type}"
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type not in ROPE_TYPES:
            return f"rope_type={rope_type} (allowed: {', '.join(ROPE_TYPES)})"
    return None


def _rope_types(parameters: Any) -> list[str]:
    """Rope types named in a config: one for the model, or one for each layer type."""
    if not isinstance(parameters, Mapping):
        return []
    if "rope_type" in parameters:
        return [str(parameters["rope_type"])]
    return [str(part.get("rope_type", "default")) for part in parameters.values() if isinstance(part, Mapping)]


def load_config(folder: Path, name: str = "") -> Any:
    """Reads config.json of a model folder and checks its architecture; code that comes with a model is never run.

    Raises:
        ValueError: there is no readable config, `transformers` doesn't know the model, or the loop can't drive it.
    """
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"target {name}: {path} is missing; a model folder has config.json and *.safetensors files")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises OSError, ValueError, KeyError and validation errors of its own
        supported = ", ".join(SUPPORTED)
        raise ValueError(f"target {name}: {path}: {first_line(error)}; supported: {supported}") from error
    check_architecture(config, name)
    return config


def config_class(architecture: str) -> Any:
    """The stock config class of a supported model type.

    Raises:
        ValueError: the model type is not one of SUPPORTED.
    """
    return _stock_class(architecture, 0)


def model_class(architecture: str) -> Any:
    """The stock causal LM class of a supported model type; raises ValueError for any other."""
    return _stock_class(architecture, 1)


def _stock_class(architecture: str, which: int) -> Any:
    import transformers  # deferred: its import takes over a second, which a command's help text need not pay

    if architecture not in SUPPORTED:
        raise ValueError(f"architecture={architecture}: must be one of {', '.join(SUPPORTED)}")
    return getattr(transformers, SUPPORTED[architecture][which])

"""Which models the loop takes, and the one line that refuses the others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from dispark.targets.architectures import SUPPORTED, check_architecture, config_class, load_config, model_class

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_supported_configs_pass(architecture: str) -> None:
    config = config_class(architecture)(**SMALL)
    assert check_architecture(config) == architecture
    assert model_class(architecture).config_class is config_class(architecture)


def test_sliding_windows_pass() -> None:
    config = transformers.Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "sliding_attention" in config.layer_types
    assert check_architecture(config) == "qwen3"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.GPT2Config(), "model_type=gpt2"),
        (transformers.T5Config(), "is_encoder_decoder=true"),
        (transformers.MixtralConfig(), "num_experts=8 (mixture of experts)"),
        (transformers.Qwen3MoeConfig(), "num_experts=128"),
        (transformers.DeepseekV3Config(), "_experts=256"),
        (transformers.Gemma2Config(), "attn_logit_softcapping=50.0"),
        (transformers.Gemma3Config(), "model_type=gemma3 is multi-modal (save its text part, gemma3_text"),
        (transformers.Gemma3TextConfig(attn_logit_softcapping=30.0), "attn_logit_softcapping=30.0"),
        (transformers.Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (transformers.Gemma3nTextConfig(), "num_kv_shared_layers=15"),
        (transformers.Gemma4UnifiedConfig(), "model_type=gemma4_unified is multi-modal"),
        (transformers.Gemma4UnifiedTextConfig(), "model_type=gemma4_unified_text"),
        (transformers.Qwen3NextConfig(num_experts=0), "layer_types has linear_attention"),
        (transformers.LlamaConfig(quantization_config={"quant_method": "awq"}), "quantization_config"),
        (SimpleNamespace(model_type="llama", layer_types=["linear_attention"]), "layer_types has linear_attention"),
        (SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "dynamic"}), "rope_type=dynamic"),
        (SimpleNamespace(model_type="gemma3_text", rope_parameters={"a": {"rope_type": "longrope"}}), "longrope"),
        (SimpleNamespace(), "model_type=None"),
    ],
    ids=lambda value: getattr(value, "model_type", None) or "",
)
def test_unsupported_configs_are_refused_in_one_line(config: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_architecture(config, "mine")
    message = str(caught.value)
    assert words in message
    assert "target mine" in message
    assert "\n" not in message
    assert "llama (LlamaForCausalLM)" in message


def test_unknown_architecture_name() -> None:
    with pytest.raises(ValueError, match="architecture=gpt2: must be one of llama, qwen3, gemma3_text"):
        config_class("gpt2")


def test_load_config_reads_a_folder(tmp_path: Path) -> None:
    transformers.LlamaConfig(**SMALL).save_pretrained(tmp_path)
    assert load_config(tmp_path).hidden_size == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "config.json is missing"),
        ("{", "not a valid JSON"),
        ("{}", "model_type"),
        (json.dumps({"model_type": "brand_new"}), "brand_new"),
        (json.dumps({"model_type": "brand_new", "auto_map": {"AutoConfig": "code.Config"}}), "custom code"),
        (json.dumps({"model_type": "llama", "hidden_size": "wide"}), "hidden_size"),
        (json.dumps({"model_type": "gpt2"}), "model_type=gpt2"),
    ],
)
def test_load_config_refuses_in_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        load_config(tmp_path, "mine")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

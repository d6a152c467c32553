"""Random targets: the same numbers every time, and settings that are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispark.targets.random_weights import RandomWeights
from dispark.targets.tokenizer import ByteTokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_same_seed_same_weights(architecture: str) -> None:
    first, digest = RandomWeights(architecture, SMALL).build("mine", torch.float32)
    torch.manual_seed(123)
    second, again = RandomWeights(architecture, SMALL).build("mine", torch.float32)
    assert digest == again
    for one, two in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two)
    _, other = RandomWeights(architecture, SMALL, seed=1).build("mine", torch.float32)
    assert other != digest


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    RandomWeights("llama", SMALL).build("mine", torch.float32)
    assert torch.equal(torch.rand(3), expected)


def test_hash_of_a_fixed_config_depends_on_values_not_on_dtype() -> None:
    source = RandomWeights("llama", SMALL)
    single, digest = source.build("mine", torch.float32)
    half, same = source.build("mine", torch.bfloat16)
    assert digest == same == source.fetch("mine").sha256
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(half.model.norm.weight.float(), single.model.norm.weight)


def test_byte_vocabulary_and_its_special_ids() -> None:
    tokens = ByteTokenizer()
    model, _ = RandomWeights("llama", SMALL).build("mine", torch.float32)
    assert model.config.vocab_size == tokens.vocab_size
    assert model.generation_config.eos_token_id == tokens.eos_id
    padded, _ = RandomWeights("llama", {**SMALL, "vocab_size": 512}).build("mine", torch.float32)
    assert padded.config.vocab_size == 512


def test_without_a_tokenizer_there_are_no_inherited_ids() -> None:
    model, _ = RandomWeights("llama", {**SMALL, "vocab_size": 40}, tokenizer=None).build("mine", torch.float32)
    assert model.generation_config.eos_token_id is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"architecture": "gpt2", "config": {}}, "architecture=gpt2: must be one of llama"),
        ({"architecture": "llama", "config": {"hidden_siz": 8}}, "config.hidden_siz: is not a key of LlamaConfig"),
        ({"architecture": "llama", "config": {}, "tokenizer": "bpe"}, "tokenizer=bpe: must be bytes or null"),
        ({"architecture": "llama", "config": {}, "tokenizer": None}, "config.vocab_size: is required"),
        ({"architecture": "llama", "config": {}, "seed": "x"}, "seed='x'"),
        ({"architecture": "llama", "config": {}, "seed": True}, "seed=True"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RandomWeights(**settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 100}, "config.vocab_size=100: must be at least 262"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 33}, "not a multiple of the number of attention heads"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
    ],
)
def test_configs_that_make_no_model(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        RandomWeights("llama", {**SMALL, **changes}).build("mine", torch.float32)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("target mine: ")

"""GGUF files of known models come back as the same models."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dispark.targets.conversion import convert_gguf

from .fakes import byte_level_vocab, random_model, write_gemma3_gguf, write_llama_gguf


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 27)[None]).logits


def test_llama_weights_config_and_logits_survive(gguf: Path, llama: Any, tmp_path: Path) -> None:
    convert_gguf(gguf, tmp_path / "model", torch.float32)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in llama.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter), name
    assert torch.allclose(logits(back), logits(llama), atol=1e-5)
    assert back.config.tie_word_embeddings
    assert getattr(back.config, "quantization_config", None) is None
    assert back.generation_config.eos_token_id == 2
    assert {path.suffix for path in (tmp_path / "model").iterdir()} == {".json", ".safetensors", ".jinja"}


def test_untied_output_survives(tmp_path: Path) -> None:
    model = random_model("llama", len(byte_level_vocab()), tie_word_embeddings=False)
    write_llama_gguf(tmp_path / "untied.gguf", model)
    convert_gguf(tmp_path / "untied.gguf", tmp_path / "model", torch.float32)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(back.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(back.lm_head.weight, back.model.embed_tokens.weight)


def test_quantized_blocks_are_expanded(llama: Any, tmp_path: Path) -> None:
    write_llama_gguf(tmp_path / "q8.gguf", llama, quantized="ffn_gate")
    convert_gguf(tmp_path / "q8.gguf", tmp_path / "model", torch.float32)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ours = back.model.layers[1].mlp.gate_proj.weight
    theirs = llama.model.layers[1].mlp.gate_proj.weight
    assert ours.shape == theirs.shape
    assert 0 < (ours - theirs).abs().max() < theirs.abs().max() / 100


def test_storage_dtype(gguf: Path, tmp_path: Path) -> None:
    convert_gguf(gguf, tmp_path / "model", torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_tokenizer_splits_digits_first_and_keeps_its_template(gguf: Path, tmp_path: Path) -> None:
    convert_gguf(gguf, tmp_path / "model", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("\n\n12  3 he<|im_end|>")["input_ids"])
    assert pieces == ["ĊĊ", "1", "2", "ĠĠ", "3", "Ġ", "he", "<|im_end|>"]
    assert tokenizer.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


def test_gemma3_norms_windows_and_bos_survive(tmp_path: Path) -> None:
    model = random_model("gemma3_text", 64, num_hidden_layers=7, sliding_window=4, query_pre_attn_scalar=8)
    write_gemma3_gguf(tmp_path / "gemma.gguf", model)
    convert_gguf(tmp_path / "gemma.gguf", tmp_path / "model", torch.float32)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, parameter in model.named_parameters():
        assert torch.allclose(back.get_parameter(name), parameter, atol=1e-6), name
    assert back.config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert back.config.sliding_window == 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("he a")["input_ids"][0] == tokenizer.bos_token_id == 2
    assert tokenizer.decode(tokenizer("he a", add_special_tokens=False)["input_ids"]) == "he a"


def test_an_unknown_splitting_rule_is_logged(llama: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_llama_gguf(tmp_path / "odd.gguf", llama, pre="odd-rule")
    with caplog.at_level(logging.WARNING, logger="dispark"):
        convert_gguf(tmp_path / "odd.gguf", tmp_path / "model", torch.float32)
    assert "odd-rule" in caplog.text


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_a_truncated_file_is_one_line(gguf: Path, tmp_path: Path, keep: int) -> None:
    (tmp_path / "cut.gguf").write_bytes(gguf.read_bytes()[:keep])
    with pytest.raises(ValueError) as caught:
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "model", torch.float32)
    assert str(caught.value).startswith("cut.gguf can't be read as a GGUF model")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_nothing_is_printed(gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    convert_gguf(gguf, tmp_path / "model", torch.float32)
    assert capfd.readouterr() == ("", "")

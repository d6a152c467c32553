"""Small stand-ins: GGUF files of random models, wheels that carry them, a model folder, builds for the cache."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from dispark.targets.architectures import config_class, model_class

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "h e"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
)


def random_model(architecture: str, vocab_size: int, **changes: Any) -> Any:
    """A float32 model whose every weight is random, norms too, so that no conversion error can hide."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    model = model_class(architecture)(config_class(architecture)(vocab_size=vocab_size, **{**sizes, **changes}))
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    return model.eval()


def byte_level_vocab() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIALS, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


def write_llama_gguf(path: Path, model: Any, quantized: str | None = None, pre: str = "smollm") -> None:
    """Writes a Llama with a byte-level tokenizer; tensors whose name contains `quantized` become Q8_0 blocks."""
    config, tokens = model.config, byte_level_vocab()
    writer = GGUFWriter(path, "llama")
    _write_sizes(writer, config)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, array in _arrays(model):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            # GGUF keeps the two halves of a rotated pair side by side.
            array = array.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
        _add(writer, _gguf_name(name, names), array, quantized)
    _finish(writer)


def write_gemma3_gguf(path: Path, model: Any) -> None:
    """Writes a Gemma 3 with a sentencepiece tokenizer; GGUF stores 1 + the norm weights."""
    config = model.config
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "▁a"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *letters]
    tokens += [f"<unused{index}>" for index in range(config.vocab_size - len(tokens))]
    writer = GGUFWriter(path, "gemma3")
    _write_sizes(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([3] * 4 + [1] * len(letters) + [3] * (len(tokens) - 4 - len(letters)))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }
    for name, array in _arrays(model):
        _add(writer, _gguf_name(name, names), array + 1 if "norm" in name else array, None)
    _finish(writer)


def write_wheel(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    """A minimal wheel that pip accepts."""
    stem = f"{name.replace('-', '_')}-{version}"
    path, info = folder / f"{stem}-py3-none-any.whl", f"{stem}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in [*contents, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in contents.items():
            archive.writestr(zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0)), data)
    return path


def _write_sizes(writer: GGUFWriter, config: Any) -> None:
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])


def _arrays(model: Any) -> list[tuple[str, np.ndarray]]:
    return [(name, parameter.detach().numpy()) for name, parameter in model.named_parameters()]


def _gguf_name(name: str, norms: dict[str, str]) -> str:
    name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
    name = name.replace("model.layers.", "blk.").replace("lm_head", "output")
    for ours, theirs in norms.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    for part in "qkv":
        name = name.replace(f"self_attn.{part}_proj", f"attn_{part}")
    name = name.replace("self_attn.o_proj", "attn_output")
    for part in ("gate", "up", "down"):
        name = name.replace(f"mlp.{part}_proj", f"ffn_{part}")
    return name


def _add(writer: GGUFWriter, name: str, array: np.ndarray, quantized: str | None) -> None:
    array = np.ascontiguousarray(array, dtype=np.float32)
    if quantized is not None and quantized in name:
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, array)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

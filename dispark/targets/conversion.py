"""Turns a GGUF file into what `transformers` loads fast: safetensors, config, tokenizer and chat template.

The quantized blocks are expanded once, in float32, and rounded to the storage dtype; the result is a plain dense model.
Quality is that of the quantized file: this can't bring back what quantization took away. The tokenizer is rebuilt from
the file's metadata, and the one gap known in that step (digit splitting, see `_split_digits`) is closed here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from dispark.targets.architectures import check_architecture
from dispark.targets.quiet import first_line, quiet_transformers

log = logging.getLogger(__name__)

# Raised whenever the files written for the same GGUF change, so that cached conversions are made anew.
CONVERSION_VERSION = 1

# Names under tokenizer.ggml.pre that the rebuilt tokenizer splits as the original does, "smollm" with our repair.
_KNOWN_SPLITS = ("default", "gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "qwen2")


def convert_gguf(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """Writes the model in `gguf` to the new folder `folder`.

    Raises:
        ValueError: the file can't be read, or its architecture is not supported.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    try:
        with quiet_transformers():
            split = _pre_tokenizer_name(gguf)
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model, info = AutoModelForCausalLM.from_pretrained(
                **source,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
    except Exception as error:  # a damaged file surfaces as anything from KeyError to struct.error
        raise ValueError(f"{gguf.name} can't be read as a GGUF model: {first_line(error)}") from error
    check_architecture(model.config, gguf.stem)
    # The library fills what is missing with random numbers and only warns.
    absent = sorted(info["missing_keys"])
    if absent:
        raise ValueError(f"{gguf.name} lacks {len(absent)} weights, the first is {absent[0]}")
    if split == "smollm":
        _split_digits(tokenizer)
    elif split is not None and split not in _KNOWN_SPLITS:
        log.warning("%s: unknown pre-tokenizer %r; its text may be split unlike the original", gguf.name, split)
    model = model.to(dtype)
    model.config.dtype = str(dtype).removeprefix("torch.")
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _pre_tokenizer_name(gguf: Path) -> str | None:
    """tokenizer.ggml.pre of the file: how text is split before merging, by name; None for other tokenizer kinds."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    if fields["tokenizer.ggml.model"].contents() != "gpt2" or "tokenizer.ggml.pre" not in fields:
        return None
    return str(fields["tokenizer.ggml.pre"].contents())


def _split_digits(tokenizer: Any) -> None:
    r"""Splits off every digit before anything else, as the SmolLM2 tokenizer does.

    `transformers` rebuilds this tokenizer with plain GPT-2 splitting. No token has two digits, so numbers come out the
    same, but white space before a digit doesn't: "\n\n1" became "\n", "\n", "1" instead of "\n\n", "1".
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )

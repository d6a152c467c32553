"""What a checkpoint that travels is made of: weights in a quarter of float32's room, and a config without private keys.

A matrix W is stored as int8 Q under its own name and one float32 scale a row under `<name>.int8_scale`, W = Q * scale,
scale = max |row| / 127. Vectors and small tensors stay as they are. A loader that knows this gets float32 back; others
see int8 where they expect floats and refuse.

It knows neither layouts nor drafters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dispark.runs.files import write_atomic, write_text

SCALE = ".int8_scale"
_MIN_ELEMENTS = 4096


def compress(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 with scales, others unchanged."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point() or tensor.numel() < _MIN_ELEMENTS:
            found[name] = tensor
            continue
        rows = tensor.float()
        scale = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        found[name] = (rows / scale.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
        found[name + SCALE] = scale
    return found


def expand(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """What `compress` was given, to within half a step of each row's scale, in float32.

    Raises:
        ValueError: a scale without its matrix, or of another number of rows.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE)}
    for name, scale in tensors.items():
        if not name.endswith(SCALE):
            continue
        matrix = found.get(name.removesuffix(SCALE))
        if matrix is None or matrix.dtype != torch.int8 or matrix.shape[:1] != scale.shape:
            raise ValueError(f"drafter.checkpoint={where}: {name} has no int8 matrix of as many rows beside it")
        found[name.removesuffix(SCALE)] = matrix.float() * scale.float().unsqueeze(1)
    return found


def portable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without private keys: in those transformers keeps the path that a target was loaded from."""
    return {key: value for key, value in config.items() if not key.startswith("_")}


def write_compact(source: Path, folder: Path) -> int:
    """Copies a checkpoint with its weights as int8, and its card; returns the bytes of the weights.

    Raises:
        FileNotFoundError: the source has no config.json or model.safetensors.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = compress(load_file(source / "model.safetensors"))
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.json", json.dumps(portable(config), indent=2) + "\n")
    write_atomic(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    if (source / "README.md").is_file():
        shutil.copyfile(source / "README.md", folder / "README.md")
    return (folder / "model.safetensors").stat().st_size

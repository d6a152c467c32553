"""Draft checkpoints: where they lie, whose layout they have, and that every tensor is accounted for.

A checkpoint is a folder, or a repository of the hub with a pinned revision (`owner/name@revision`), with a config.json
and weights. Its layout is told from both. Weights are safetensors; where a published checkpoint has only a `.bin` or
`.pt` file, torch's weights-only reader takes it. Nothing pickled is ever executed, and no code that comes with a
checkpoint is run.

It does not know what the tensors are for: drafters say which names they have, and `fill` compares.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dispark.drafters.storage import expand, portable
from dispark.runs.files import write_atomic, write_text
from dispark.targets.cache import file_sha256, weights_sha256
from dispark.targets.quiet import first_line

log = logging.getLogger(__name__)

RANDOM = "random"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+@[\w./-]+")
_PLAIN = ("*.safetensors", "*.json")
_PICKLED = ("*.bin", "*.pt")  # fetched only where there is nothing better; read by torch's weights-only reader
_LISTED = 8  # names in a message

LAYOUTS = {
    "deepspec_block": "DSpark or DFlash as DeepSpec saves them",
    "deepspec_eagle3": "Eagle3 as DeepSpec saves it",
    "zlab_dflash": "DFlash as its authors save it",
    "eagle3": "EAGLE-3 as its authors and SpecForge save it",
    "speculators_eagle3": "EAGLE-3 as the speculators library saves it",
    "eagle": "EAGLE, the first form, as its authors save it",
    "medusa": "Medusa heads, with or without the prefix medusa_head.",
    "dispark": "heads and layers as this project saves them where no published layout exists",
}


@dataclass(frozen=True)
class Checkpoint:
    """A draft checkpoint in memory, on the CPU, as stored.

    Args:
        name: what the user wrote, for messages and results.
        layout: a key of LAYOUTS.
        config: config.json.
        tensors: by name.
        sha256: of the weights.
    """

    name: str
    layout: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    sha256: str

    def need(self, key: str, kind: type | tuple[type, ...] = object, config: Mapping[str, Any] | None = None) -> Any:
        """A key of config.json that has to be there.

        Raises:
            ValueError: it is missing or of another type.
        """
        source = self.config if config is None else config
        if key not in source:
            raise ValueError(f"drafter.checkpoint={self.name}: config.json lacks {key}, which this layout needs")
        value = source[key]
        is_bool_for_number = isinstance(value, bool) and kind is int
        if not isinstance(value, kind) or is_bool_for_number:
            raise ValueError(f"drafter.checkpoint={self.name}: config.json has {key}={value!r}, of another type")
        return value


def find_folder(where: str) -> Path:
    """The folder of a checkpoint, downloaded to the hub's cache if it is a repository.

    Raises:
        ValueError: neither a folder nor `owner/name@revision`, or the download failed.
    """
    folder = Path(where).expanduser()
    if folder.is_dir():
        return folder
    if _HUB_ID.fullmatch(where):
        from dispark.targets.hub import download

        repo_id, _, revision = where.partition("@")
        folder = download(repo_id, revision, _PLAIN)
        has_plain = any(folder.glob("*.safetensors"))
        return folder if has_plain else download(repo_id, revision, (*_PLAIN, *_PICKLED))
    raise ValueError(
        f"drafter.checkpoint={where}: must be a folder with config.json and weights, a pinned repository "
        f"(owner/name@revision), or {RANDOM}"
    )


def read_config(where: str) -> tuple[Path, dict[str, Any]]:
    """The folder and config.json of a checkpoint.

    Raises:
        ValueError: see `find_folder`; or there is no readable config.json.
    """
    folder = find_folder(where)
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"drafter.checkpoint={where}: {path} is missing") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"drafter.checkpoint={where}: {path} can't be read as JSON: {first_line(error)}") from error
    if not isinstance(config, dict):
        raise ValueError(f"drafter.checkpoint={where}: {path} must hold a JSON object")
    return folder, config


def open_checkpoint(where: str) -> Checkpoint:
    """Reads a checkpoint and tells its layout.

    Raises:
        ValueError: it can't be found or read, or its layout is none of LAYOUTS.
    """
    folder, config = read_config(where)
    files = _weight_files(folder, where)
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in _read(path, where).items():
            if name in tensors:
                raise ValueError(f"drafter.checkpoint={where}: tensor {name} is in more than one file")
            tensors[name.removeprefix("_orig_mod.")] = tensor
    digests = {path.name: file_sha256(path) for path in files}
    digest = weights_sha256(digests) if files[0].suffix == ".safetensors" else digests[files[0].name]
    tensors = expand(tensors, where)
    return Checkpoint(where, detect_layout(config, tensors, where), config, tensors, digest)


def check_layout(file: Checkpoint, known: Iterable[str]) -> None:
    """Raises ValueError where a checkpoint's layout is none of those that a drafter reads."""
    if file.layout not in (names := list(known)):
        wanted = "; ".join(f"{name} ({LAYOUTS[name]})" for name in names)
        raise ValueError(f"drafter.checkpoint={file.name}: has the {file.layout} layout; this drafter reads {wanted}")


def _weight_files(folder: Path, where: str) -> list[Path]:
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return shards
    others = sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    if len(others) == 1:
        return others
    found = "none" if not others else ", ".join(path.name for path in others)
    raise ValueError(f"drafter.checkpoint={where}: needs *.safetensors, or one .bin or .pt file; found {found}")


def _read(path: Path, where: str) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise ValueError(f"drafter.checkpoint={where}: {path.name} is damaged: {first_line(error)}") from error
    except Exception as error:  # what the weights-only reader refuses, it refuses with errors of pickle
        raise ValueError(
            f"drafter.checkpoint={where}: {path.name} holds more than tensors and is not read: {first_line(error)}"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"drafter.checkpoint={where}: {path.name} is not a plain dictionary of tensors")
    return loaded


def detect_layout(config: Mapping[str, Any], names: Iterable[str], where: str) -> str:
    """A key of LAYOUTS, told from config.json and the tensors' names.

    Raises:
        ValueError: no layout fits.
    """
    known = set(names)
    if "dispark_kind" in config:
        return "dispark"
    if "speculators_model_type" in config and config["speculators_model_type"] == "eagle3":
        return "speculators_eagle3"
    if "dflash_config" in config or "DFlashDraftModel" in (config.get("architectures") or []):
        return "zlab_dflash"
    if any(name.startswith("midlayer.") for name in known):
        return "eagle3"
    if "ttt_length" in config and "layers.0.hidden_norm.weight" in known:
        return "deepspec_eagle3"
    if "markov_rank" in config:
        return "deepspec_block"
    if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= known and "layers.0.input_layernorm.weight" not in known:
        return "eagle"
    if any(re.fullmatch(r"(medusa_head\.)?\d+\.\d+\.linear\.weight", name) for name in known):
        return "medusa"
    shown = ", ".join(sorted(known)[:4]) or "none"
    raise ValueError(
        f"drafter.checkpoint={where}: unknown layout (architectures={config.get('architectures')}, tensors {shown}, "
        f"...); known: {'; '.join(LAYOUTS.values())}"
    )


def fill(module: nn.Module, tensors: Mapping[str, Tensor], name: str, layout: str) -> None:
    """Copies tensors into a module's parameters and buffers of the same names, in the module's dtype.

    Args:
        module: whose state dict has exactly the names that have to be there.
        tensors: named as in the module.
        name, layout: for the message.

    Raises:
        ValueError: one message that lists every missing, unused, misshapen and not finite tensor.
    """
    own = module.state_dict()
    missing = sorted(set(own) - set(tensors))
    unused = sorted(set(tensors) - set(own))
    wrong = [
        f"{key} {list(tensors[key].shape)} instead of {list(own[key].shape)}"
        for key in sorted(set(own) & set(tensors))
        if tensors[key].shape != own[key].shape
    ]
    wrong += [
        f"{key} {str(tensors[key].dtype).removeprefix('torch.')} instead of floating point"
        for key in sorted(set(own) & set(tensors))
        if key not in ("d2t", "t2d") and own[key].is_floating_point() and not tensors[key].is_floating_point()
    ]
    broken = [
        key
        for key in sorted(set(own) & set(tensors))
        if tensors[key].is_floating_point() and not bool(tensors[key].isfinite().all())
    ]
    kinds = {"missing": missing, "unused": unused, "of a wrong shape or type": wrong}
    problems = [
        f"{len(items)} {kind}: {', '.join(items[:_LISTED])}{', ...' if len(items) > _LISTED else ''}"
        for kind, items in (kinds | {"with NaN or infinite values": broken}).items()
        if items
    ]
    if problems:
        raise ValueError(f"drafter.checkpoint={name}: tensors don't fit the {layout} layout: {'; '.join(problems)}")
    with torch.no_grad():
        for key, value in own.items():
            value.copy_(tensors[key])


def state_sha256(module: nn.Module) -> str:
    """sha256 over names and values of a module's state, in float32, for drafters that no file holds."""
    digest = hashlib.sha256()
    for key, value in sorted(module.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def warn_random() -> None:
    """Says loudly that a drafter has random weights."""
    log.warning("drafter.checkpoint=random: RANDOM WEIGHTS, for speed only; acceptance means nothing")


def describe(name: str, file: Checkpoint | None, network: nn.Module) -> dict[str, Any]:
    """What results say of every learned drafter's weights; `file` is None for random ones."""
    return {
        "checkpoint": name,
        "is_random": file is None,
        "weights_sha256": state_sha256(network) if file is None else file.sha256,
        "layout": None if file is None else file.layout,
        "num_parameters": sum(p.numel() for p in network.parameters()),
    }


def in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point tensors in the dtype that a checkpoint has, others as they are."""
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in tensors.items()}


def save_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes config.json and model.safetensors, each atomically; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    # Contiguous copies: aliased or sliced tensors can't be stored as they are.
    plain = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    write_text(folder / "config.json", json.dumps(portable(config), indent=2) + "\n")
    write_atomic(folder / "model.safetensors", lambda path: save_file(plain, path, metadata={"format": "pt"}))

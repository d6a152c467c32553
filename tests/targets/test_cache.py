"""The cache: atomic, verified, repaired; robust to kills and to other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dispark.targets import cache
from dispark.targets.cache import MANIFEST, fetch_entry, problems, read_manifest, weights_sha256

DESCRIPTION = {"kind": "test"}

CHILD = """
import os, sys, time
from pathlib import Path
from dispark.targets.cache import fetch_entry

def build(folder, is_repair):
    with open(os.environ["BUILDS"], "a") as log:
        log.write("x")
    path = folder / "model.safetensors"
    path.write_bytes(b"half")
    if sys.argv[1] == "die":
        os._exit(9)
    time.sleep(0.7)
    path.write_bytes(b"whole")
    return [path]

print(fetch_entry("m", {}, build).status)
"""


def build(folder: Path, is_repair: bool) -> list[Path]:
    (folder / "model").mkdir()
    (folder / "scratch").write_text("left over")
    for name, data in (("model.safetensors", b"weights"), ("config.json", b"{}")):
        (folder / "model" / name).write_bytes(data)
    return list((folder / "model").iterdir())


def must_not_build(folder: Path, is_repair: bool) -> list[Path]:
    raise AssertionError("nothing was to be built")


def test_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISPARK_CACHE", str(tmp_path))
    assert cache.cache_root() == tmp_path.resolve()
    monkeypatch.setenv("DISPARK_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_root() == (tmp_path / ".cache" / "dispark").resolve()


def test_first_fetch_builds_second_does_nothing(cache_dir: Path) -> None:
    first = fetch_entry("m", DESCRIPTION, build)
    assert (first.status, first.bytes) == ("downloaded", 9)
    assert first.folder == cache_dir / "targets" / "m" / "model"
    assert first.sha256 == cache.file_sha256(first.folder / "model.safetensors")
    second = fetch_entry("m", DESCRIPTION, must_not_build)
    assert (second.status, second.folder, second.sha256) == ("present", first.folder, first.sha256)
    assert problems("m", is_full=True) == []
    assert not list((cache_dir / "partial").iterdir())


def test_manifest_holds_sizes_hashes_source_and_versions(cache_dir: Path) -> None:
    fetch_entry("m", DESCRIPTION, build)
    manifest = read_manifest("m")
    assert manifest["source"] == DESCRIPTION
    assert set(manifest["files"]) == {"model.safetensors", "config.json"}
    assert manifest["files"]["config.json"]["bytes"] == 2
    assert {"transformers", "torch", "gguf", "dispark"} <= set(manifest["versions"])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b"wei"), "has 3 bytes instead of 7"),
        (lambda path: path.write_bytes(b"wEights"), "is corrupt"),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
    ],
)
def test_damage_is_seen_quickly_and_repaired(cache_dir: Path, damage: object, words: str) -> None:
    folder = fetch_entry("m", DESCRIPTION, build).folder
    assert folder is not None
    assert callable(damage)
    damage(folder / "model.safetensors")
    found = problems("m", is_full=False)
    assert len(found) == 1
    assert words in found[0]
    assert "model.safetensors" in found[0]
    seen: list[bool] = []

    def rebuild(at: Path, is_repair: bool) -> list[Path]:
        seen.append(is_repair)
        return build(at, is_repair)

    assert fetch_entry("m", DESCRIPTION, rebuild).status == "repaired"
    assert seen == [True]
    assert problems("m", is_full=True) == []
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_silent_rot_is_seen_by_the_full_check_only(cache_dir: Path) -> None:
    folder = fetch_entry("m", DESCRIPTION, build).folder
    assert folder is not None
    path = folder / "model.safetensors"
    stat = path.stat()
    path.write_bytes(b"wEights")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert problems("m", is_full=False) == []
    assert len(problems("m", is_full=True)) == 1
    assert fetch_entry("m", DESCRIPTION, build).status == "repaired"


def test_a_copied_cache_with_new_times_is_sound(cache_dir: Path) -> None:
    folder = fetch_entry("m", DESCRIPTION, build).folder
    assert folder is not None
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert problems("m", is_full=False) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"format": 99, "files": {"a": 1}})])
def test_damaged_manifest_is_repaired(cache_dir: Path, text: str) -> None:
    fetch_entry("m", DESCRIPTION, build)
    (cache_dir / "targets" / "m" / MANIFEST).write_text(text)
    assert "manifest is missing or damaged" in problems("m", is_full=False)[0]
    assert fetch_entry("m", DESCRIPTION, build).status == "repaired"


def test_a_failed_build_leaves_nothing(cache_dir: Path) -> None:
    def fail(folder: Path, is_repair: bool) -> list[Path]:
        (folder / "model.safetensors").write_bytes(b"half")
        raise ValueError("no network")

    with pytest.raises(ValueError, match=r"^no network$"):
        fetch_entry("m", DESCRIPTION, fail)
    assert not (cache_dir / "targets").exists()
    assert not list((cache_dir / "partial").iterdir())


def test_a_failed_repair_keeps_the_damaged_entry(cache_dir: Path) -> None:
    folder = fetch_entry("m", DESCRIPTION, build).folder
    assert folder is not None
    (folder / "config.json").unlink()

    def fail(at: Path, is_repair: bool) -> list[Path]:
        raise ValueError("no network")

    with pytest.raises(ValueError, match="no network"):
        fetch_entry("m", DESCRIPTION, fail)
    assert (folder / "model.safetensors").exists()
    assert fetch_entry("m", DESCRIPTION, build).status == "repaired"


def test_files_elsewhere_are_only_referred_to(cache_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = elsewhere / "model.safetensors"
    path.write_bytes(b"big")
    report = fetch_entry("m", DESCRIPTION, lambda folder, is_repair: [path])
    assert report.folder == elsewhere
    path.write_bytes(b"bad")
    assert "is corrupt" in problems("m", is_full=False)[0]


def test_a_full_disk_or_bad_root_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DISPARK_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"DISPARK_CACHE=.*file: can't be written"):
        fetch_entry("m", DESCRIPTION, build)
    monkeypatch.setenv("DISPARK_CACHE", str(tmp_path / "full"))

    def full(folder: Path, is_repair: bool) -> list[Path]:
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"DISPARK_CACHE=.*No space left on device"):
        fetch_entry("m", DESCRIPTION, full)


def _start(cache_dir: Path, builds: Path, mode: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "DISPARK_CACHE": str(cache_dir), "BUILDS": str(builds)}
    command = [sys.executable, "-c", CHILD, mode]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_two_processes_build_once(cache_dir: Path, tmp_path: Path) -> None:
    children = [_start(cache_dir, tmp_path / "builds", "live") for _ in range(2)]
    statuses = sorted(child.communicate(timeout=60)[0].strip() for child in children)
    assert statuses == ["downloaded", "present"]
    assert (tmp_path / "builds").read_text() == "x"


def test_a_killed_fetch_is_cleaned_up(cache_dir: Path, tmp_path: Path) -> None:
    child = _start(cache_dir, tmp_path / "builds", "die")
    child.communicate(timeout=60)
    assert child.returncode == 9
    assert (cache_dir / "partial" / "m" / "model.safetensors").read_bytes() == b"half"
    assert not (cache_dir / "targets").exists()
    assert fetch_entry("m", DESCRIPTION, build).status == "downloaded"
    assert not list((cache_dir / "partial").iterdir())


def test_leftovers_of_a_killed_repair_are_removed_from_a_sound_entry(cache_dir: Path) -> None:
    fetch_entry("m", DESCRIPTION, build)
    (cache_dir / "partial" / "m.old").mkdir()
    assert fetch_entry("m", DESCRIPTION, must_not_build).status == "present"
    assert not list((cache_dir / "partial").iterdir())


def test_weights_hash_counts_safetensors_only() -> None:
    assert weights_sha256({"model.safetensors": "aa", "config.json": "bb"}) == "aa"
    sharded = weights_sha256({"b.safetensors": "bb", "a.safetensors": "aa"})
    assert sharded == weights_sha256({"a.safetensors": "aa", "b.safetensors": "bb", "x.json": "c"})
    assert sharded != weights_sha256({"a.safetensors": "bb", "b.safetensors": "aa"})


def test_report_is_ready_for_json(cache_dir: Path) -> None:
    report = fetch_entry("m", DESCRIPTION, build)
    assert json.loads(json.dumps(report.as_dict()))["folder"] == str(report.folder)

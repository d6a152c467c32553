"""Pinned wheels through a real pip, from a folder instead of an index."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from dispark.targets import wheels
from dispark.targets.cache import file_sha256
from dispark.targets.wheels import download, join_members, parse_packages

from .fakes import write_wheel


def package(name: str, wheel: Path | None, *members: str, sha256: str = "0" * 64) -> dict[str, Any]:
    digest = sha256 if wheel is None else file_sha256(wheel)
    return {"name": name, "version": "1.0", "sha256": digest, "members": list(members)}


def test_parts_are_downloaded_and_joined_in_order(index: Path, tmp_path: Path) -> None:
    first = write_wheel(index, "tiny-one", {"one/a": b"ab", "one/b": b"cd"})
    second = write_wheel(index, "tiny-two", {"two/c": b"e"})
    packages = parse_packages([package("Tiny.Two", second, "two/c"), package("tiny-one", first, "one/b", "one/a")])
    found = download(packages, tmp_path / "wheels")
    assert [wheel.name for wheel in found] == [second.name, first.name]
    joined = tmp_path / "joined"
    size, digest = join_members(packages, found, joined)
    assert joined.read_bytes() == b"ecdab"
    assert (size, digest) == (5, file_sha256(joined))


def test_a_wrong_hash_is_retried_once_then_refused(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index, "tiny-one", {"one/a": b"ab"})
    calls: list[list[str]] = []
    pip = wheels._pip_download

    def counted(requirements: Any, folder: Path, options: Any) -> None:
        calls.append(list(options))
        pip(requirements, folder, options)

    monkeypatch.setattr(wheels, "_pip_download", counted)
    with pytest.raises(
        ValueError, match=r"tiny-one==1.0: the downloaded wheel has sha256 .* expected 000.*tried twice"
    ):
        download(parse_packages([package("tiny-one", None, "one/a")]), tmp_path / "wheels")
    assert calls == [[], ["--no-cache-dir"]]


def test_a_download_that_broke_once_is_mended(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(index, "tiny-one", {"one/a": b"ab"})
    pip = wheels._pip_download

    def truncating(requirements: Any, folder: Path, options: Any) -> None:
        pip(requirements, folder, options)
        if not options:
            path = next(folder.glob("*.whl"))
            path.write_bytes(path.read_bytes()[:-10])

    monkeypatch.setattr(wheels, "_pip_download", truncating)
    found = download(parse_packages([package("tiny-one", wheel, "one/a")]), tmp_path / "wheels")
    assert file_sha256(found[0]) == file_sha256(wheel)


def test_an_unreachable_package_is_one_line(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        download(parse_packages([package("tiny-absent", None, "x")]), tmp_path / "wheels")
    message = str(caught.value)
    assert message.startswith("pip could not download tiny-absent==1.0: No matching distribution found")
    assert "\n" not in message


def test_without_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"tiny-one==1.0 needs pip"):
        download(parse_packages([package("tiny-one", None, "x")]), tmp_path / "wheels")


def test_a_wheel_without_the_member_or_no_zip_at_all(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "tiny-one", {"one/a": b"ab"})
    packages = parse_packages([package("tiny-one", wheel, "one/zzz")])
    with pytest.raises(ValueError, match=r"tiny-one==1.0: .*can't be unpacked.*one/zzz"):
        join_members(packages, [wheel], tmp_path / "joined")
    wheel.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match="can't be unpacked"):
        join_members(packages, [wheel], tmp_path / "joined")


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ([], r"packages=\[\]"),
        (["tiny"], r"packages\[0\]='tiny': must have exactly the keys name, version, sha256, members"),
        ([{"name": "a", "version": "1"}], r"packages\[0\]=.*exactly the keys"),
        ([package("a", None)], r"packages\[0\].members=\[\]"),
        ([package("a", None, "x"), {**package("b", None, "x"), "hash": 1}], r"packages\[1\]"),
        ([{**package("a", None, "x"), "members": "x"}], r"packages\[0\].members='x'"),
    ],
)
def test_malformed_package_lists(packages: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_packages(packages)

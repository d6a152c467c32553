"""The folder of fetched models: built atomically, checked against a manifest, repaired when broken.

Layout under the root (DISPARK_CACHE, else ~/.cache/dispark): `targets/<entry>/` holds MANIFEST.json and, unless the
manifest points elsewhere, the model's files; `partial/` holds what is being built, `locks/` one lock per entry. An
entry appears by a rename, so it is complete or absent; whoever holds the lock may treat leftovers in partial/ as dead.

A quick check (on every load) compares sizes and modification times and hashes only files whose time has changed; a full
check (on fetch) hashes everything. So a load doesn't see bits that rot on the disk without a write; a fetch does. This
module knows nothing about how an entry is built or what is in it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
_FORMAT = 1

# build(folder, is_repair) puts the model's files somewhere under the empty `folder`, or leaves them elsewhere, and
# returns them; all are in one folder. is_repair says that what was there before did not pass the check.
Build = Callable[[Path, bool], list[Path]]


@dataclass(frozen=True)
class FetchReport:
    """What a fetch did.

    Args:
        status: "downloaded", "present" (nothing to do) or "repaired" (it was there but broken).
        folder: where the model's files are; None for a model that has none.
        seconds: wall time of the call.
        bytes: size of all files; None where there are none.
        sha256: hash of the weights, see `weights_sha256`.
    """

    status: Literal["downloaded", "present", "repaired"]
    folder: Path | None
    seconds: float
    bytes: int | None
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "folder": None if self.folder is None else str(self.folder)}


def cache_root() -> Path:
    """DISPARK_CACHE if it is set, else ~/.cache/dispark."""
    return Path(os.environ.get("DISPARK_CACHE") or "~/.cache/dispark").expanduser().resolve()


def entry_folder(entry: str) -> Path:
    return cache_root() / "targets" / entry


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def weights_sha256(files: dict[str, str]) -> str:
    """One hash for a model's weights, given sha256 by file name; files other than *.safetensors don't count.

    It is the file's own hash where there is one file, else the sha256 of the "<sha256>  <name>" lines in name order.
    """
    shards = sorted((name, digest) for name, digest in files.items() if name.endswith(".safetensors"))
    if len(shards) == 1:
        return shards[0][1]
    return hashlib.sha256("".join(f"{digest}  {name}\n" for name, digest in shards).encode()).hexdigest()


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide what a conversion writes."""
    found = {}
    for library in ("dispark", "transformers", "torch", "safetensors", "tokenizers", "gguf", "huggingface_hub"):
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "not installed"
    return found


def read_manifest(entry: str) -> dict[str, Any]:
    """The manifest of an entry.

    Raises:
        ValueError: it is missing or unreadable (one line, without the remedy).
    """
    path = entry_folder(entry) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT or not manifest["files"]:
            raise ValueError("unknown format or no files")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: the manifest is missing or damaged ({error})") from error
    return manifest


def model_folder(entry: str, manifest: dict[str, Any]) -> Path:
    """Where the files of an entry are: the entry itself, or the folder that its manifest names."""
    return entry_folder(entry) / manifest["folder"]


def problems(entry: str, is_full: bool) -> list[str]:
    """What is wrong with a cached entry, one line a file; empty if it is sound."""
    try:
        manifest = read_manifest(entry)
    except ValueError as error:
        return [str(error)]
    folder, found = model_folder(entry, manifest), []
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            found.append(f"{path} is missing")
            continue
        stat = path.stat()
        if stat.st_size != expected["bytes"]:
            found.append(f"{path} has {stat.st_size} bytes instead of {expected['bytes']}")
        elif (is_full or stat.st_mtime_ns != expected["mtime_ns"]) and file_sha256(path) != expected["sha256"]:
            found.append(f"{path} is corrupt: its sha256 is not the one it was stored with")
    return found


def fetch_entry(entry: str, description: dict[str, Any], build: Build) -> FetchReport:
    """Makes sure that an entry is there and sound, building it if it isn't.

    Safe against other processes doing the same and against having been killed half way in an earlier try.

    Raises:
        ValueError: the cache can't be written, or `build` failed with one.
    """
    started = time.perf_counter()
    folder, partial = entry_folder(entry), cache_root() / "partial" / entry
    retired = partial.with_name(f"{entry}.old")
    is_clean = not partial.exists() and not retired.exists()
    # Without the lock first: a sound entry must also serve from a cache that this user may only read.
    if is_clean and folder.exists() and not problems(entry, is_full=True):
        return _report("present", entry, read_manifest(entry), started)
    with _locked(entry):
        for leftover in (partial, retired):
            shutil.rmtree(leftover, ignore_errors=True)
        is_repair = folder.exists()
        if is_repair:
            wrong = problems(entry, is_full=True)
            if not wrong:
                return _report("present", entry, read_manifest(entry), started)
            log.warning("%s; fetching it again", "; ".join(wrong))
        try:
            with _disk_errors():
                partial.mkdir(parents=True)
                manifest = _write_manifest(partial, build(partial, is_repair), description)
                folder.parent.mkdir(parents=True, exist_ok=True)
                if is_repair:
                    folder.rename(retired)
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(retired, ignore_errors=True)
        return _report("repaired" if is_repair else "downloaded", entry, manifest, started)


def _report(
    status: Literal["downloaded", "present", "repaired"], entry: str, manifest: dict[str, Any], started: float
) -> FetchReport:
    return FetchReport(
        status=status,
        folder=model_folder(entry, manifest),
        seconds=time.perf_counter() - started,
        bytes=sum(part["bytes"] for part in manifest["files"].values()),
        sha256=manifest["weights_sha256"],
    )


def _write_manifest(partial: Path, built: list[Path], description: dict[str, Any]) -> dict[str, Any]:
    """Hashes what was built and writes MANIFEST.json into `partial`; its folder is relative if the files are inside."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(built):
        stat = path.stat()
        files[path.name] = {"bytes": stat.st_size, "sha256": file_sha256(path), "mtime_ns": stat.st_mtime_ns}
    assert files, "a build returns at least one file"
    folder = built[0].parent
    manifest = {
        "format": _FORMAT,
        "source": description,
        "versions": library_versions(),
        "folder": folder.relative_to(partial).as_posix() if folder.is_relative_to(partial) else str(folder),
        "weights_sha256": weights_sha256({name: part["sha256"] for name, part in files.items()}),
        "files": files,
    }
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


@contextmanager
def _locked(entry: str) -> Iterator[None]:
    """Holds the entry's lock file; the system frees it when a process dies."""
    with _disk_errors():
        path = cache_root() / "locks" / f"{entry}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0.5)
        except Timeout:
            log.info("another process is fetching %s; waiting for it", entry)
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turns a full or read-only disk into one line that names the setting."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"DISPARK_CACHE={cache_root()}: can't be written ({error.strerror or error})") from error

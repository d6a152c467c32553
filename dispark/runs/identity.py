"""What a run's config points at: prompt files, checkpoints, and code from outside of the project.

A config names them by path or module, so the same words may mean something else tomorrow. Their hashes enter the run's
key, else a finished run would be taken for the answer to a question that it was not asked.

It does not know what the files mean, and says nothing about data that the hub serves: pin those by revision.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dispark.targets.cache import file_sha256

OWN_PACKAGES = ("dispark", "baselines")
_PATH_KEYS = ("path", "checkpoint", "profile", "powercap", "calibration")
_OF_ANOTHER_KEY = ("calibration.json",)  # lies in a checkpoint's folder and is no part of the drafter
_SKIPPED_GROUPS = ("paths", "tracker", "hydra", "meter")


def is_own(target: str) -> bool:
    """Whether a `_target_` or module name belongs to this project, whose tests then cover it."""
    return target.split(".", 1)[0] in OWN_PACKAGES


def content_hashes(resolved: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of everything on disk that a resolved config points at, by its key; what isn't there is left out.

    Args:
        resolved: the config as plain containers.
    """
    found: dict[str, str] = {}
    for key, value in _walk({k: v for k, v in resolved.items() if k not in _SKIPPED_GROUPS}):
        name = key.rsplit(".", 1)[-1]
        if name == "_target_" and not is_own(value):
            digest = _module_sha256(value)
        elif name in _PATH_KEYS:
            digest = _path_sha256(Path(value).expanduser())
        else:
            continue
        if digest is not None:
            found[key] = digest
    return found


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every text in nested containers with its dotted key."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _walk(value, f"{prefix}{key}.")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _walk(value, f"{prefix}{index}.")
    elif isinstance(node, str):
        yield prefix.removesuffix("."), node


def _module_sha256(target: str) -> str | None:
    """Of the file that defines the longest importable module in a dotted name; what that file imports is not seen."""
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:end]))
        except (ImportError, ValueError, AttributeError):
            continue
        except Exception:  # importing a parent package runs its code, which may fail in any way
            return None
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            return file_sha256(Path(spec.origin))
    return None


def _path_sha256(path: Path) -> str | None:
    """Of a file, or of the names and contents of a folder's own files."""
    try:
        if path.is_file():
            return file_sha256(path)
        if not path.is_dir():
            return None
        files = sorted(file for file in path.iterdir() if file.is_file() and file.name not in _OF_ANOTHER_KEY)
        lines = "".join(f"{file_sha256(file)}  {file.name}\n" for file in files)
    except OSError:
        return None
    return hashlib.sha256(lines.encode()).hexdigest()

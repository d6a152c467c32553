"""Plain file work under the run store: atomic writes, JSON that never holds a NaN, a lock, tolerant JSONL.

Knows nothing about runs, metrics or configs. The lock is an advisory `flock`: the kernel frees it when its process
dies, however it dies, so a killed job leaves nothing to clean up. Where the file system (or Windows) has no such lock,
work goes on without one and a warning says so.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

# A note with this start on an exception says where its traceback was kept.
TRACEBACK_NOTE = "full traceback: "

_POLL_S = 0.2


def to_jsonable(value: Any) -> Any:
    """Turns dataclasses, NumPy values, tensors, paths and sets into what JSON holds; NaN and infinities become None."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((to_jsonable(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_jsonable(dataclasses.asdict(value))
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, tensors
        return to_jsonable(value.tolist())
    return str(value)


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON, readable in any language's characters."""
    return json.dumps(to_jsonable(value), ensure_ascii=False, allow_nan=False, indent=indent)


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a temporary neighbour, syncs and renames it: readers see the old file or the new one.

    Raises:
        OSError: it can't be written, on a full disk for example; its filename is set.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename is None:  # as from every write, which knows no name
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text atomically."""
    write_atomic(path, lambda temporary: _fill(temporary, text))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a last line that a crash cut short is left out.

    Raises:
        ValueError: a line before the last is not a JSON object; names the file and the line.
    """
    *lines, tail = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_parse(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    try:
        last = json.loads(tail)
    except json.JSONDecodeError:
        return rows
    return [*rows, last] if isinstance(last, dict) else rows


def check_writable(folder: Path, key: str = "paths.runs") -> None:
    """Makes the folder and writes a probe into it.

    Raises:
        ValueError: it can't be made or written; names the key, the folder and the reason.
    """
    probe = folder / f".probe.{os.getpid()}.{time.monotonic_ns()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{key}={folder}: cannot be written ({error.strerror}); give a folder that can be") from error


@contextmanager
def locked(path: Path, what: str, timeout_s: float | None = None) -> Iterator[None]:
    """Holds an exclusive lock on `path`, waiting for its present holder and saying so once.

    Args:
        path: the lock file; it exists only while somebody holds or awaits the lock.
        what: named in the message while waiting.
        timeout_s: how long to wait at most; None waits for ever.

    Raises:
        TimeoutError: the holder outlasted timeout_s.
    """
    handle = _acquire(path, what, timeout_s)
    try:
        yield
    finally:
        if handle is not None:
            path.unlink(missing_ok=True)  # while still held: a waiter then sees that its file is gone and starts afresh
            os.close(handle)


def _acquire(path: Path, what: str, timeout_s: float | None) -> int | None:
    if fcntl is None:
        return None
    began, has_warned = time.monotonic(), False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace") or "another process"
            os.close(handle)
            if not has_warned:
                log.info("%s: waiting for %s, which runs the same config", what, holder)
                has_warned = True
            if timeout_s is not None and time.monotonic() - began > timeout_s:
                raise TimeoutError(f"{what}: {holder} still runs the same config after {timeout_s:g} s") from None
            time.sleep(_POLL_S)
            continue
        except OSError as error:
            os.close(handle)
            log.warning("%s: no file locks here (%s); don't run the same config twice at a time", what, error.strerror)
            return None
        if _is_same_file(handle, path):
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return handle
        os.close(handle)


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _fill(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: is not JSON ({error.msg})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: must be a JSON object")
    return row

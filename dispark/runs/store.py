"""The run directory, the one source of truth: written while a run lasts, read by every table and figure.

A run lives in `<root>/<slug>-<key>`; the key is a hash of the resolved config without what can't change a result, so
the same command finds its own result again. Inside: `config.yaml`, `requests.jsonl` (a line per request, flushed at
once: what is left after a crash), `rounds.parquet`, `steps.parquet`, `run.json`, `log.txt`, `error.txt` after a
failure, and `done`, which is written last. A run without `done` is unfinished: starting it again clears what it left.

It does not know what the numbers mean; see METRICS.md for those. Files it did not write itself are never deleted.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pandas as pd
from omegaconf import OmegaConf

from dispark.runs.files import (
    TRACEBACK_NOTE,
    check_writable,
    dumps,
    locked,
    read_jsonl,
    to_jsonable,
    write_atomic,
    write_text,
)

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
# Parts of the config that can't change a result and so are no part of a run's identity.
NOT_IDENTITY = ("tracker", "paths", "hydra", "overwrite", "name")

_RESULTS = (
    "done",
    "run.json",
    "rounds.parquet",
    "steps.parquet",
    "requests.jsonl",
    "error.txt",
    "log.txt",
    "config.yaml",
)
_PREVIOUS = ".previous"  # a finished result while `overwrite` makes another


def run_key(resolved: Mapping[str, Any], contents: Mapping[str, str] | None = None) -> str:
    """The run's identity: 12 hex digits over the resolved config without the parts in NOT_IDENTITY.

    Args:
        resolved: the config as plain containers.
        contents: hashes of the files that it points at, see identity.py.
    """
    from dispark.measure.provenance import config_hash  # not at the top: it asks the hardware

    extra = {"contents": dict(contents)} if contents else {}
    return config_hash({**resolved, **extra}, exclude=NOT_IDENTITY)


class RunStore:
    """One run's directory.

    Args:
        root: folder of all runs (`paths.runs`).
        key: the run's identity, see `run_key`.
        slug: readable part of the folder's name; may hold slashes.
    """

    def __init__(self, root: str | Path, key: str, slug: str = "run") -> None:
        self.root = Path(root)
        self.key = key
        self.slug = slug
        self.path = self.root / f"{slug}-{key}"
        self._requests: IO[str] | None = None

    @property
    def is_done(self) -> bool:
        return (self.path / "done").is_file() and (self.path / "run.json").is_file()

    @contextmanager
    def attempt(self, config: Mapping[str, Any], overwrite: bool = False, resume: bool = False) -> Iterator[bool]:
        """Everything round the work of a run: skip what is done, lock, begin, log to log.txt, keep the traceback.

        Yields True when the work has to be done; the body then ends with `write_run` and `mark_done`. Yields False when
        the result is there already, also when another process finished it while this one waited for the lock.

        Raises:
            ValueError: the directory can't be written.
        """
        if self.is_done and not overwrite:
            log.info("%s: skipped (done); overwrite=true runs it again", self.path)
            yield False
            return
        check_writable(self.path)
        before = self._finished_at()
        with locked(self.path / "lock", str(self.path)):
            if not self.is_done and self._restore():
                log.warning("%s: an attempt to replace this result was killed; the result is back", self.path)
            if self.is_done and (not overwrite or self._finished_at() != before):
                log.info("%s: skipped (done meanwhile by another process)", self.path)
                yield False
                return
            self.begin(config, resume=resume)
            with self._log_file():
                try:
                    yield True
                except BaseException as error:
                    self.fail(error)
                    raise
                finally:
                    self._close()

    def begin(self, config: Mapping[str, Any], resume: bool = False) -> list[dict[str, Any]]:
        """Makes the directory, clears an earlier attempt and writes config.yaml.

        Args:
            config: the resolved config as plain containers.
            resume: keep the whole lines of an unfinished attempt's requests.jsonl.

        Returns:
            The rows kept, empty unless `resume`.

        Raises:
            ValueError: the directory can't be written.
        """
        check_writable(self.path)
        self._close()
        kept = self.path / "requests.jsonl"
        rows = read_jsonl(kept) if resume and kept.is_file() and not self.is_done else []
        if self.is_done:
            self._set_aside()
        for name in _RESULTS:
            (self.path / name).unlink(missing_ok=True)
        for leftover in self.path.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        write_text(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(_escape(to_jsonable(dict(config))))))
        if rows:
            write_text(kept, "".join(f"{dumps(row)}\n" for row in rows))
        return rows

    def append_request(self, row: Mapping[str, Any]) -> None:
        """Adds a line to requests.jsonl and hands it to the system at once, so that it outlives a killed process."""
        if self._requests is None:
            self._requests = (self.path / "requests.jsonl").open("a", encoding="utf-8", newline="\n")
        self._requests.write(f"{dumps(row)}\n")
        self._requests.flush()

    def write_rounds(self, rounds: pd.DataFrame) -> None:
        """One row per round and request."""
        self._write_frame("rounds.parquet", rounds)

    def write_steps(self, steps: pd.DataFrame) -> None:
        """One row per packed call of the loop, with its phase split."""
        self._write_frame("steps.parquet", steps)

    def write_run(self, run: Mapping[str, Any]) -> None:
        """run.json: config, provenance and summary of the whole run; values that JSON lacks (NaN) become null."""
        head = {"schema_version": SCHEMA_VERSION, "key": self.key, "slug": self.slug}
        write_text(self.path / "run.json", dumps({**head, **run}, indent=1) + "\n")

    def mark_done(self) -> None:
        """The run is whole; only now do readers see it."""
        assert (self.path / "run.json").is_file(), "write_run comes before mark_done"
        self._close()
        write_text(self.path / "done", datetime.now(UTC).isoformat(timespec="microseconds") + "\n")
        shutil.rmtree(self.path / _PREVIOUS, ignore_errors=True)

    def fail(self, error: BaseException) -> Path:
        """Keeps the traceback in error.txt and notes its place on the exception; a full disk only gives a warning."""
        self._close()
        has_previous = self._restore()
        path = self.path / ("error_rerun.txt" if has_previous else "error.txt")
        try:
            write_text(path, "".join(traceback.format_exception(error)))
            error.add_note(f"{TRACEBACK_NOTE}{path}")
        except OSError as second:
            log.warning("%s: could not be written (%s)", path, second.strerror)
        return path

    def read(self) -> StoredRun:
        """The finished run."""
        return _read(self.path)

    def _set_aside(self) -> None:
        """Keeps a finished result until a new one is done, whatever happens to the attempt."""
        aside = self.path / _PREVIOUS
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        # The marker goes first and comes back last: a result without it is never read.
        for name in _RESULTS:
            if (self.path / name).is_file():
                (self.path / name).rename(aside / name)

    def _restore(self) -> bool:
        """Brings a finished result back that an attempt to replace it left aside; whether there was one."""
        aside = self.path / _PREVIOUS
        if not (aside / "done").is_file():
            return False
        for name in _RESULTS:
            (self.path / name).unlink(missing_ok=True)
        for name in reversed(_RESULTS):
            if (aside / name).is_file():
                (aside / name).rename(self.path / name)
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def _write_frame(self, name: str, frame: pd.DataFrame) -> None:
        write_atomic(self.path / name, lambda path: frame.to_parquet(path, compression="zstd", index=False))

    def _finished_at(self) -> str | None:
        marker = self.path / "done"
        return marker.read_text(encoding="utf-8") if marker.is_file() else None

    def _close(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None

    @contextmanager
    def _log_file(self) -> Iterator[None]:
        handler = logging.FileHandler(self.path / "log.txt", mode="w", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()


@dataclass(frozen=True)
class StoredRun:
    """A finished run, read back. `run` is run.json; the frames are read when asked for."""

    path: Path
    run: dict[str, Any]

    def rounds(self) -> pd.DataFrame:
        """rounds.parquet; raises ValueError where it is missing."""
        return self._frame("rounds.parquet")

    def steps(self) -> pd.DataFrame:
        """steps.parquet; raises ValueError where it is missing."""
        return self._frame("steps.parquet")

    def requests(self) -> list[dict[str, Any]]:
        """requests.jsonl, but for a last line that was cut short."""
        path = self.path / "requests.jsonl"
        return read_jsonl(path) if path.is_file() else []

    def _frame(self, name: str) -> pd.DataFrame:
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"{path}: is missing from a finished run; remove the folder, or run with overwrite=true")
        return pd.read_parquet(path)


def load(root: str | Path) -> Iterator[StoredRun]:
    """Finished runs in a folder, searched to any depth, in the order of their paths; a run's own folder works as well.

    Raises:
        ValueError: the folder does not exist, or a run in it was written by a newer version or is damaged.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise ValueError(f"runs={root}: no such folder")
    for marker in sorted(folder.rglob("done")):
        if (marker.parent / "run.json").is_file():
            yield _read(marker.parent)


def _escape(value: Any) -> Any:
    """Keeps a literal "${" in resolved values from being read as an interpolation when the file is loaded again."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _read(path: Path) -> StoredRun:
    file = path / "run.json"
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{file}: cannot be read as JSON ({error}); remove the folder, or run with overwrite=true"
        ) from error
    version = run.get("schema_version") if isinstance(run, dict) else None
    if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
        raise ValueError(f"{file}: schema_version={version}, this version of dispark reads 1 to {SCHEMA_VERSION}")
    return StoredRun(path, run)

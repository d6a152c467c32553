"""Task suites from the Hugging Face Hub, or from local JSONL files that hold the same prompts.

The nine tasks of the DSpark paper are built here, under DeepSpec's protocol: first turn only, no system prompt, and
rows chosen by `select_rows`. DeepSpec does not pin the revisions of the datasets that it converted, so the authority is
the hash of its converted files: whatever the source, the prompts must hash to `content_sha256`. This module does not
download until `prompts` is called, and knows nothing about rendering.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dispark.tasks.rows import (
    Row,
    check_choice,
    check_count,
    check_turns,
    hash_rows,
    iter_objects,
    parse_rows,
    read_lines,
    select_rows,
    to_prompts,
)
from dispark.tasks.templates import Template
from dispark.types import Prompt

log = logging.getLogger(__name__)

SOURCES = ("hub", "jsonl")
_REACH_S = 5.0  # one request with this timeout decides whether the Hub is there; its client alone retries for 24 s


class HubSuite:
    """One dataset of the Hub as a task.

    Args:
        name: name of the suite and of its task, and the file name looked for in a folder.
        version: version of this definition.
        repo_id: "owner/dataset".
        revision: commit of the dataset; a branch name works but is logged as not pinned.
        template: turns a dataset row into turns (see `templates.py`).
        config_name, split: what `datasets.load_dataset` takes; ignored where `files` is given.
        files: JSONL files of the repository to read one after the other, for repositories that `datasets` can't load.
        source: "hub", or "jsonl" for local files with finished prompts.
        path: for "jsonl", a file, or a folder that holds "<name>.jsonl".
        content_sha256: leading hex digits that the hash of all rows must have (see `hash_rows`); None checks nothing.
        cap, select_seed: row selection (see `select_rows`).
        first_turn_only: drops the turns after the first.
        limit: the first so many of the selected prompts; None takes all.

    Raises:
        ValueError: a bad argument here; an unreachable, missing or different dataset when the prompts are read.
    """

    def __init__(
        self,
        name: str,
        version: str,
        repo_id: str,
        revision: str,
        template: Template,
        split: str = "train",
        config_name: str | None = None,
        files: list[str] | None = None,
        source: str = "hub",
        path: str | None = None,
        content_sha256: str | None = None,
        cap: int | None = None,
        select_seed: int | None = 980406,
        first_turn_only: bool = True,
        limit: int | None = None,
    ) -> None:
        check_choice("task.source", source, SOURCES)
        if source == "jsonl" and not path:
            raise ValueError(f"task.path={path}: task.source=jsonl needs a file, or a folder that holds {name}.jsonl")
        if source == "hub" and path:
            raise ValueError(f"task.path={path}: is only read with task.source=jsonl; set that, or task.path=null")
        if not isinstance(revision, str) or not revision:
            raise ValueError(f"task.revision={revision}: must be a commit hash of {repo_id}")
        if content_sha256 is not None and not re.fullmatch(r"[0-9a-f]{8,64}", str(content_sha256)):
            raise ValueError(f"task.content_sha256={content_sha256}: must be 8 to 64 hex digits, or null for no check")
        if not callable(template):
            raise ValueError(f"task.template={template}: must be a node with a _target_ of dispark.tasks.templates")
        check_count("task.cap", cap)
        check_count("task.limit", limit)
        self.name = name
        self.version = str(version)
        self.repo_id = repo_id
        self.revision = revision
        self.template = template
        self.split = split
        self.config_name = config_name
        self.files = files
        self.source = source
        self.path = path
        self.content_sha256 = content_sha256
        self.cap = cap
        self.select_seed = select_seed
        self.first_turn_only = first_turn_only
        self.limit = limit

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a full commit hash, which can't move."""
        return re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None

    def prompts(self) -> list[Prompt]:
        """The selected prompts.

        Raises:
            ValueError: the source can't be read, a row is unusable, or the rows don't hash to `content_sha256`.
        """
        rows = self._local_rows() if self.source == "jsonl" else self._hub_rows()
        found = hash_rows(rows)
        if self.content_sha256 is not None and not found.startswith(self.content_sha256):
            raise ValueError(
                f"task.content_sha256={self.content_sha256}: the {len(rows)} prompts read hash to {found[:16]}; "
                "allowed: the reference prompts, or null to use these unchecked"
            )
        kept = [rows[index] for index in select_rows(len(rows), self.cap, self.select_seed)]
        return to_prompts(kept, self.name, self.first_turn_only)[: self.limit]

    def _local_rows(self) -> list[Row]:
        assert self.path is not None
        path = Path(self.path).expanduser()
        file = path / f"{self.name}.jsonl" if path.is_dir() else path
        return parse_rows(read_lines(file), str(file))

    def _hub_rows(self) -> list[Row]:
        where = f"{self.repo_id}@{self.revision}"
        if not self.is_pinned:
            log.warning("%s is not pinned: the rows may change; use a commit hash", where)
        rows: list[Row] = []
        for value in load_hub_rows(self.repo_id, self.revision, self.config_name, self.split, self.files):
            rows.append(Row(len(rows), None, None, check_turns(self.template(value), f"{where} row {len(rows)}")))
        if not rows:
            raise ValueError(f"{where}: no rows in split {self.split}")
        return rows


def load_hub_rows(
    repo_id: str, revision: str, config_name: str | None, split: str, files: list[str] | None
) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a Hub dataset.

    Raises:
        ValueError: the Hub can't be reached within seconds and the cache has no copy, or the dataset, revision,
            configuration or file does not exist there, or a line of a file is broken.
    """
    if files is None:
        yield from _load_split(repo_id, revision, config_name, split)
        return
    for file in files:
        with _download(repo_id, revision, file).open("rb") as lines:
            for _, value in iter_objects(lines, f"{repo_id}/{file}"):
                yield value


def _load_split(repo_id: str, revision: str, config_name: str | None, split: str) -> Iterable[Mapping[str, Any]]:
    import datasets

    _reach_hub(repo_id, revision)
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(repo_id, config_name, split=split, revision=revision)
    except Exception as error:  # its errors share no base class
        raise _unavailable(repo_id, revision, error) from error
    return rows


def _download(repo_id: str, revision: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo_id, file, repo_type="dataset", revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        _reach_hub(repo_id, revision)
    try:
        return Path(hf_hub_download(repo_id, file, repo_type="dataset", revision=revision))
    except Exception as error:  # transport errors and errors of the Hub share no base class
        raise _unavailable(repo_id, revision, error) from error


def _reach_hub(repo_id: str, revision: str) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        return  # the loaders then read the cache, or say at once that it lacks the dataset
    try:
        HfApi().dataset_info(repo_id, revision=revision, timeout=_REACH_S)
    except Exception as error:  # the client's transport errors share no base class with the standard library
        raise _unavailable(repo_id, revision, error) from error


def _unavailable(repo_id: str, revision: str, error: Exception) -> ValueError:
    reason = (str(error).strip() or type(error).__name__).split("\n")[0]
    return ValueError(
        f"task.repo_id={repo_id} at task.revision={revision}: not available ({reason[:200]}); allowed: a dataset that "
        "can be reached or is cached (then set HF_HUB_OFFLINE=1), or task.source=jsonl with task.path"
    )

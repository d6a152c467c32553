"""Task suites: the prompts shipped with the package, and JSONL files of the user's.

A suite is a named, versioned list of prompts. The version of the shipped prompts is raised with any change of their
text, which a test enforces; the fingerprint of the rendered ids, stored with each run, pins more than the version does.
This module does not know tokenizers, chat templates or lengths in tokens.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from dispark.tasks.rows import (
    FORMATS,
    check_choice,
    check_count,
    check_unique,
    parse_rows,
    read_lines,
    select_rows,
    to_prompts,
)
from dispark.types import Prompt

SHIPPED = ("chat", "code", "math", "translation", "summarization", "qa", "rag")


class PackagedSuite:
    """Prompts written for this project and shipped in the package.

    The seven files stand for Spec-Bench's six families and for the math, code and chat domains of the DSpark paper.
    They are small on purpose: enough to compare methods on one machine, not to reproduce a published number.

    Args:
        name: the suite's name in results.
        suites: shipped files to read, in this order; each is a task of its own in the results.
        version: version of the shipped prompts.
        per_suite: the first so many prompts of each file; None takes all.
        limit: the first so many prompts of the whole list; None takes all.

    Raises:
        ValueError: an unknown, repeated or missing file name, or a count below 1.
    """

    def __init__(
        self, name: str, suites: list[str], version: str, per_suite: int | None = None, limit: int | None = None
    ) -> None:
        if not isinstance(suites, list | tuple) or not suites:
            raise ValueError(f"task.suites={suites}: must be a list of one or more of {', '.join(SHIPPED)}")
        for suite in suites:
            check_choice("task.suites", suite, SHIPPED)
        if len(set(suites)) < len(suites):
            raise ValueError(f"task.suites={list(suites)}: must not name a suite twice")
        check_count("task.per_suite", per_suite)
        check_count("task.limit", limit)
        self.name = name
        self.version = str(version)
        self.suites = tuple(suites)
        self.per_suite = per_suite
        self.limit = limit

    def prompts(self) -> list[Prompt]:
        """The prompts, file after file."""
        folder = importlib.resources.files("dispark.tasks") / "prompts"
        prompts: list[Prompt] = []
        for suite in self.suites:
            lines = (folder / f"{suite}.jsonl").read_bytes().split(b"\n")
            prompts += to_prompts(parse_rows(lines, f"{suite}.jsonl", "dispark"), suite)[: self.per_suite]
        return prompts[: self.limit]


class JsonlSuite:
    """Prompts of a JSONL file, or of every `*.jsonl` file in a folder, which are then tasks of their own.

    Args:
        path: the file or the folder; "~" is expanded.
        format: "deepspec" ({"turns": [...]}), "specbench" ({"question_id", "category", "turns"}; EAGLE's too),
            "dispark" ({"prompt_id", "category", "turns"}) or "auto" (told by the first row of each file).
        limit: the first so many prompts of the whole list, after the selection; None takes all.
        name: the suite's name, and for a single file the task's; None takes the name of the file or folder.
        select_seed: with `cap`, shuffles the rows of a file that has more (see `select_rows`).
        cap: at most so many rows of each file; None takes all.
        first_turn_only: drops the turns after the first, as DeepSpec's protocol does.
        version: the user's own version label.

    Raises:
        ValueError: a bad argument here; a missing or broken file when the prompts are read.
    """

    def __init__(
        self,
        path: str | Path | None,
        format: str = "auto",
        limit: int | None = None,
        name: str | None = None,
        select_seed: int | None = None,
        cap: int | None = None,
        first_turn_only: bool = False,
        version: str = "1",
    ) -> None:
        if not isinstance(path, str | Path) or not str(path).strip():
            raise ValueError(f"task.path={path}: must be a JSONL file or a folder of *.jsonl files")
        check_choice("task.format", format, FORMATS)
        check_count("task.limit", limit)
        check_count("task.cap", cap)
        self.path = Path(path).expanduser()
        self.format = format
        self.limit = limit
        self.name = name or self.path.stem or self.path.resolve().stem
        self.select_seed = select_seed
        self.cap = cap
        self.first_turn_only = first_turn_only
        self.version = str(version)

    def prompts(self) -> list[Prompt]:
        """The selected prompts, file after file in the order of their names.

        Raises:
            ValueError: nothing at the path, a folder without JSONL files, or a broken file (see `parse_rows`).
        """
        prompts: list[Prompt] = []
        for file in self._files():
            rows = parse_rows(read_lines(file), str(file), self.format)
            kept = [rows[index] for index in select_rows(len(rows), self.cap, self.select_seed)]
            task = file.stem if self.path.is_dir() else self.name
            prompts += to_prompts(kept, task, self.first_turn_only)
        check_unique(prompts, f"task.path={self.path}")
        return prompts[: self.limit]

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        files = sorted(file for file in self.path.glob("*.jsonl") if file.is_file() and not file.name.startswith("."))
        if not files:
            raise ValueError(f"task.path={self.path}: no *.jsonl file in this folder: must hold at least one")
        return files

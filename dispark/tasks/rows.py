"""Reads JSONL prompt files and picks rows; the one reader behind every task suite.

Three spellings of a row are known: DeepSpec (`turns`), Spec-Bench and EAGLE (`question_id`, `category`, `turns`) and
ours (`prompt_id`, `category`, `turns`). This module does not know what a task is for, how a Hub dataset's columns
become a prompt, or how a prompt is rendered for a model.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispark.types import Prompt

FORMATS = ("auto", "deepspec", "specbench", "dispark")
_ID_KEYS = {"deepspec": None, "specbench": "question_id", "dispark": "prompt_id"}


@dataclass(frozen=True)
class Row:
    """One conversation of a file: its place among the rows, its own id (or None), its category (or None), its turns."""

    index: int
    row_id: str | None
    category: str | None
    turns: tuple[str, ...]


def check_count(key: str, value: Any) -> None:
    """Raises ValueError unless `value` is None or a whole number >= 1."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{key}={value}: must be a whole number >= 1, or null for all")


def check_choice(key: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{key}={value}: must be one of {', '.join(allowed)}")


def check_unique(prompts: Sequence[Prompt], origin: str) -> None:
    """Raises ValueError when two prompts have the same id."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise ValueError(f"{origin}: prompt id {prompt.prompt_id} occurs twice: must be unique")
        seen.add(prompt.prompt_id)


def select_rows(num_rows: int, cap: int | None, seed: int | None) -> list[int]:
    """Indices of the rows that a run uses, in the order it uses them.

    DeepSpec's protocol: file order, unless there are more rows than `cap`; then the index list is shuffled with
    Python's `random.Random(seed)` and the first `cap` are kept. Without a seed the first `cap` are kept in file order.

    Raises:
        ValueError: `cap` is below 1.
    """
    check_count("task.cap", cap)
    indices = list(range(num_rows))
    if cap is None or num_rows <= cap:
        return indices
    if seed is not None:
        random.Random(seed).shuffle(indices)
    return indices[:cap]


def check_turns(turns: Any, where: str) -> tuple[str, ...]:
    """Returns the turns of a row as a tuple.

    Raises:
        ValueError: not a list, an empty list, or a turn that is not a string, is blank, or is not valid Unicode. The
            message starts with `where`.
    """
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: turns={_short(turns)}: must be a list of at least one string")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, str):
            raise ValueError(f"{where}: turn {number} is {_short(turn)}: must be a string")
        if not turn.strip():
            raise ValueError(f"{where}: turn {number} is blank: must hold text")
        try:
            turn.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: turn {number} holds half a surrogate pair: must be valid Unicode") from error
    return tuple(turns)


def read_lines(path: Path) -> list[bytes]:
    r"""Reads a file and cuts it at "\n" only: prompts contain U+2028 and its like, at which `str.splitlines` cuts too.

    Raises:
        ValueError: the file is missing or unreadable, or is none (a pipe or a device may never end).
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"task.path={path}: is not a regular file: must be a readable JSONL file")
        return path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"task.path={path}: {error.strerror or error}: must be a readable JSONL file") from error


def iter_objects(lines: Iterable[bytes], origin: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the JSON object of each line that is not blank, with its 1-based line number.

    Raises:
        ValueError: a line that is not UTF-8, not JSON or not an object; the message names file and line.
    """
    for number, line in enumerate(lines, start=1):
        where = f"{origin} line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: byte {error.start} is not UTF-8: must be UTF-8 text") from error
        if not text:
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where}: broken JSON ({error.msg} at column {error.colno}): must be one JSON object a line"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: unusable JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {_short(value)}: must be a JSON object")
        yield number, value


def parse_rows(lines: Iterable[bytes], origin: str, row_format: str = "auto") -> list[Row]:
    """Reads the rows of one file.

    Args:
        lines: the file's lines.
        origin: the file's name, for messages.
        row_format: "deepspec", "specbench", "dispark", or "auto", which looks at the keys of the first row.

    Raises:
        ValueError: see `iter_objects` and `check_turns`; also no row at all, an unknown format, a missing or odd id,
            and an id met twice.
    """
    check_choice("task.format", row_format, FORMATS)
    rows: list[Row] = []
    seen: dict[str, int] = {}
    for number, value in iter_objects(lines, origin):
        where = f"{origin} line {number}"
        if row_format == "auto":
            row_format = "dispark" if "prompt_id" in value else "specbench" if "question_id" in value else "deepspec"
        if "turns" not in value:
            raise ValueError(f"{where}: no key `turns` (format {row_format}): must be a list of strings")
        turns = check_turns(value["turns"], where)
        id_key = _ID_KEYS[row_format]
        row_id = None if id_key is None else _check_id(value.get(id_key), id_key, where)
        if row_id is not None:
            if row_id in seen:
                raise ValueError(f"{where}: {id_key}={row_id} stands on line {seen[row_id]} too: must be unique")
            seen[row_id] = number
        category = None if row_format == "deepspec" else value.get("category")
        if category is not None and (not isinstance(category, str) or not category):
            raise ValueError(f"{where}: category={_short(category)}: must be a string, or be left out")
        rows.append(Row(len(rows), row_id, category, turns))
    if not rows:
        raise ValueError(f"{origin}: the file is empty: must hold one JSON object a line")
    return rows


def to_prompts(rows: Iterable[Row], task: str, first_turn_only: bool = False) -> list[Prompt]:
    """Turns rows into prompts named "<task>/<id or index>"; an id that already starts with "<task>/" is kept."""
    prompts = []
    for row in rows:
        own = str(row.index) if row.row_id is None else row.row_id
        prompt_id = own if own.startswith(f"{task}/") else f"{task}/{own}"
        turns = row.turns[:1] if first_turn_only else row.turns
        prompts.append(Prompt(prompt_id, task, row.category or task, turns))
    return prompts


def hash_rows(rows: Iterable[Row]) -> str:
    """Hex sha256 of the turns in DeepSpec's spelling of a file, which makes rows of any source comparable with it."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update((json.dumps({"turns": list(row.turns)}, ensure_ascii=False) + "\n").encode("utf-8"))
    return digest.hexdigest()


def _check_id(value: Any, key: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ValueError(f"{where}: {key}={_short(value)}: must be a whole number or a non-empty string")
    return str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""Training rows: a conversation as token ids with what the target answered, kept line by line and then as a data set.

While data is made every finished row is a line of rows.jsonl, flushed at once: a killed run loses none and makes none
twice. `finish` turns the lines into Parquet, ordered by their ids, with a fingerprint of all of it. Supervised are the
answer's tokens, the one that ends the turn included.

It knows neither models nor prompts' origins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from dispark.runs.files import dumps, read_jsonl, write_text

ROWS, PARQUET, META = "rows.jsonl", "data.parquet", "data.json"


@dataclass(frozen=True)
class TrainingRow:
    """One conversation.

    Args:
        row_id: unique in the data set, and the same whenever it is made again.
        kind: what it is about, for the share of each.
        prompt: the user's turn as text.
        prompt_ids: all ids before the answer, template included.
        output_ids: the answer's ids, with the token that ends the turn if there is one.
        finish_reason: how the answer ended: stop, stop_string, length or context.
    """

    row_id: str
    kind: str
    prompt: str
    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.output_ids:
            raise ValueError(f"row {self.row_id}: needs at least one prompt token and one answer token")

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt_ids, *self.output_ids]

    @property
    def loss_mask(self) -> list[bool]:
        """True for the answer's tokens."""
        return [False] * len(self.prompt_ids) + [True] * len(self.output_ids)


class RowWriter:
    """Appends rows to a folder and knows which are there.

    Args:
        folder: made where absent.
        settings: what decides the rows; a folder made with others is refused.

    Raises:
        ValueError: the folder holds rows that other settings made.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._settings = json.loads(dumps(dict(settings)))
        self._note = folder / "settings.json"
        self.rows = [_row(line) for line in self._lines()]
        is_other = self._note.is_file() and json.loads(self._note.read_text(encoding="utf-8")) != self._settings
        if self.rows and is_other:
            raise ValueError(f"out={folder}: holds rows that were made with other settings; choose another folder")
        self._file: IO[str] | None = None

    def _lines(self) -> list[dict[str, Any]]:
        path = self.folder / ROWS
        if not path.is_file():
            return []
        lines = read_jsonl(path)  # a last line that was cut short is left out
        write_text(path, "".join(f"{dumps(line)}\n" for line in lines))
        return lines

    @property
    def done(self) -> set[str]:
        """Ids of the rows that are there."""
        return {row.row_id for row in self.rows}

    def append(self, row: TrainingRow) -> None:
        """Writes a row through to the system at once."""
        if self._file is None:
            write_text(self._note, dumps(self._settings, indent=1) + "\n")
            self._file = (self.folder / ROWS).open("a", encoding="utf-8", newline="\n")
        self._file.write(f"{dumps(asdict(row))}\n")
        self._file.flush()
        self.rows.append(row)

    def finish(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Writes data.parquet and data.json and returns the latter: counts, shares, fingerprint, settings, `extra`.

        Raises:
            ValueError: there is no row.
        """
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self.rows:
            raise ValueError(f"out={self.folder}: no row was made; loosen the filters or ask for more")
        from datasets import Dataset  # deferred: its import takes a second

        rows = sorted(self.rows, key=lambda row: row.row_id)
        Dataset.from_list([asdict(row) for row in rows]).to_parquet(self.folder / PARQUET)
        meta = {**describe(rows), "settings": self._settings, **extra}
        write_text(self.folder / META, dumps(meta, indent=1) + "\n")
        return meta


def fingerprint(rows: Iterable[TrainingRow]) -> str:
    """Hex sha256 over ids and tokens of the rows, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.row_id, row.prompt_ids, row.output_ids]).encode())
    return digest.hexdigest()


def read_rows(folder: str | Path, key: str = "data") -> Iterator[TrainingRow]:
    """The rows of a finished data set, in order.

    Args:
        folder: where it is.
        key: that named the folder, for the error.

    Raises:
        ValueError: there is none in the folder.
    """
    path = Path(folder) / PARQUET
    if not path.is_file():
        raise ValueError(f"{key}={folder}: has no {PARQUET}; 'dispark data' makes one")
    from datasets import Dataset

    for line in Dataset.from_parquet(str(path)):
        yield _row(line)


def read_meta(folder: str | Path) -> dict[str, Any]:
    """data.json of a finished data set.

    Raises:
        ValueError: there is none in the folder.
    """
    path = Path(folder) / META
    if not path.is_file():
        raise ValueError(f"data={folder}: has no {META}; 'dispark data' makes one")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def read_all(folders: Sequence[str | Path]) -> tuple[list[TrainingRow], list[dict[str, Any]]]:
    """(rows, each folder's data.json) of one or more data sets; a prompt that an earlier one has is left out.

    Rows of further folders get the folder's number before their ids, which may be the same in all of them.

    Raises:
        ValueError: a folder holds no finished data set.
    """
    found: list[TrainingRow] = []
    seen: set[tuple[int, ...]] = set()
    for number, folder in enumerate(folders):
        for row in read_rows(folder):
            if (prompt := tuple(row.prompt_ids)) not in seen:
                seen.add(prompt)
                found.append(replace(row, row_id=f"{number}/{row.row_id}") if number else row)
    return found, [read_meta(folder) for folder in folders]


def describe(rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """Counts, shares and fingerprint of rows."""
    kinds, reasons = (sorted({getattr(row, key) for row in rows}) for key in ("kind", "finish_reason"))
    return {
        "num_rows": len(rows),
        "num_prompt_tokens": sum(len(row.prompt_ids) for row in rows),
        "num_answer_tokens": sum(len(row.output_ids) for row in rows),
        "num_by_kind": {kind: sum(row.kind == kind for row in rows) for kind in kinds},
        "num_by_finish": {reason: sum(row.finish_reason == reason for row in rows) for reason in reasons},
        "fingerprint": fingerprint(rows),
    }


def _row(line: Mapping[str, Any]) -> TrainingRow:
    return TrainingRow(**{key: line[key] for key in TrainingRow.__dataclass_fields__})

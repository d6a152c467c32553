"""Rows on disk: none lost, none doubled, whatever happens to the process; and what is read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dispark.training.rows import RowWriter, TrainingRow, describe, fingerprint, read_all, read_rows

SETTINGS = {"seed": 0, "prompts": {"counts": {"code": 3}}}


def row(number: int, **changes: object) -> TrainingRow:
    values: dict[str, object] = {
        "row_id": f"r/{number:03d}",
        "kind": "code" if number % 2 else "math",
        "prompt": f"prompt {number}",
        "prompt_ids": [1, 2, number],
        "output_ids": [number, 4],
        "finish_reason": "stop",
    }
    return TrainingRow(**{**values, **changes})  # type: ignore[arg-type]


def test_the_answer_is_supervised_to_its_last_token() -> None:
    one = row(7)
    assert one.tokens == [1, 2, 7, 7, 4]
    assert one.loss_mask == [False, False, False, True, True]
    for key in ("prompt_ids", "output_ids"):
        with pytest.raises(ValueError, match=r"row r/007: needs at least one prompt token and one answer token"):
            row(7, **{key: []})


def test_rows_come_back_in_the_order_of_their_ids(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path, SETTINGS)
    for number in (3, 1, 2):
        writer.append(row(number))
    meta = writer.finish({"extra": 1})
    assert list(read_rows(tmp_path)) == [row(1), row(2), row(3)]
    assert meta["num_rows"] == 3
    assert meta["num_answer_tokens"] == 6
    assert meta["num_by_kind"] == {"code": 2, "math": 1}
    assert meta["num_by_finish"] == {"stop": 3}
    assert meta["extra"] == 1
    assert json.loads((tmp_path / "data.json").read_text()) == meta


def test_a_killed_run_goes_on_without_loss_or_doubles(tmp_path: Path) -> None:
    whole = RowWriter(tmp_path / "whole", SETTINGS)
    killed = RowWriter(tmp_path / "killed", SETTINGS)
    for number in range(4):
        whole.append(row(number))
    for number in (0, 2):
        killed.append(row(number))
    with (tmp_path / "killed" / "rows.jsonl").open("a") as file:
        file.write('{"row_id": "r/00')  # torn in the middle of a write
    again = RowWriter(tmp_path / "killed", SETTINGS)
    assert again.done == {"r/000", "r/002"}
    for number in (3, 1):
        again.append(row(number))
    assert again.finish({})["fingerprint"] == whole.finish({})["fingerprint"]
    lines = (tmp_path / "killed" / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 4


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    RowWriter(tmp_path, {**SETTINGS, "seed": 9})  # a run that made nothing binds nobody
    RowWriter(tmp_path, SETTINGS).append(row(1))
    RowWriter(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=r"out=.*: holds rows that were made with other settings"):
        RowWriter(tmp_path, {**SETTINGS, "seed": 1})


def test_fingerprints_see_ids_and_order() -> None:
    prints = {
        fingerprint(rows)
        for rows in ([row(1), row(2)], [row(2), row(1)], [row(1)], [row(1), row(2, output_ids=[2, 5])])
    }
    assert len(prints) == 4


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data=.*: has no data.parquet; 'dispark data' makes one"):
        list(read_rows(tmp_path))
    with pytest.raises(ValueError, match="no row was made"):
        RowWriter(tmp_path, SETTINGS).finish({})


def test_several_data_sets_as_one(tmp_path: Path) -> None:
    for name, rows in (("a", [row(1), row(2)]), ("b", [row(1), row(2, prompt_ids=[8, 8]), row(3)])):
        writer = RowWriter(tmp_path / name, SETTINGS)
        for one in rows:
            writer.append(one)
        writer.finish({})
    found, metas = read_all([tmp_path / "a", tmp_path / "b"])
    assert [one.row_id for one in found] == ["r/001", "r/002", "1/r/002", "1/r/003"]
    assert [meta["num_rows"] for meta in metas] == [2, 3]
    assert describe(found)["num_by_kind"] == {"code": 2, "math": 2}
    assert describe(found)["fingerprint"] != metas[0]["fingerprint"]
    assert describe(read_all([tmp_path / "a"])[0])["fingerprint"] == metas[0]["fingerprint"]

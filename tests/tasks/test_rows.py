"""Row selection against DeepSpec's vectors, and the JSONL reader with everything that can be wrong in a file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dispark.tasks.rows import (
    Row,
    check_unique,
    hash_rows,
    iter_objects,
    parse_rows,
    read_lines,
    select_rows,
    to_prompts,
)

# rows, cap, first eight indices, leading digits of the sha256 of the comma-joined list
VECTORS = {
    "gsm8k": (1319, 500, [435, 902, 303, 1168, 403, 611, 608, 977], "d4875ff29c335f30"),
    "mbpp": (257, 256, [94, 116, 115, 25, 150, 131, 83, 71], "6e44c49e22b0543c"),
    "livecodebench": (1055, 500, [14, 570, 218, 658, 367, 627, 938, 213], "ce56dff9994548bf"),
    "arena-hard-v2": (750, 500, [228, 712, 412, 332, 388, 552, 282, 210], "c1407fdf64601169"),
    "alpaca": (52002, 500, [45033, 9101, 16635, 314, 9367, 10954, 30862, 50945], "410347b61bfe4865"),
}


def lines(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


@pytest.mark.parametrize("task", VECTORS)
def test_select_rows_reproduces_deepspec(task: str) -> None:
    num_rows, cap, first, sha = VECTORS[task]
    chosen = select_rows(num_rows, cap, 980406)
    assert chosen[:8] == first
    assert len(chosen) == len(set(chosen)) == cap
    assert hashlib.sha256(",".join(map(str, chosen)).encode()).hexdigest().startswith(sha)


def test_mbpp_drops_one_row() -> None:
    assert set(range(257)) - set(select_rows(257, 256, 980406)) == {121}


@pytest.mark.parametrize(("num_rows", "cap"), [(30, 30), (80, 100), (5, None), (0, 3), (1, 1)])
def test_select_rows_keeps_file_order_when_nothing_is_cut(num_rows: int, cap: int | None) -> None:
    assert select_rows(num_rows, cap, 980406) == list(range(num_rows))


def test_select_rows_depends_on_the_seed_and_cuts_in_order_without_one() -> None:
    assert select_rows(100, 10, 1) != select_rows(100, 10, 2)
    assert select_rows(100, 10, None) == list(range(10))


@pytest.mark.parametrize("cap", [0, -1, True, 2.5, "3"])
def test_select_rows_refuses_a_bad_cap(cap: Any) -> None:
    with pytest.raises(ValueError, match=r"task\.cap=.*whole number >= 1"):
        select_rows(10, cap, 0)


def test_formats_are_told_by_the_first_row() -> None:
    assert parse_rows(lines({"turns": ["a"]}), "f")[0] == Row(0, None, None, ("a",))
    spec = parse_rows(lines({"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": [1]}), "f")
    assert spec == [Row(0, "81", "writing", ("a", "b"))]
    ours = parse_rows(lines({"prompt_id": "qa/0", "category": "x", "turns": ["a"]}), "f")
    assert ours[0].row_id == "qa/0"


def test_deepspec_format_ignores_other_fields() -> None:
    row = parse_rows(lines({"turns": ["a"], "question_id": None, "category": 3}), "f", "deepspec")[0]
    assert (row.row_id, row.category) == (None, None)


def test_category_defaults_to_the_task() -> None:
    second = {"question_id": "z", "category": "qa", "turns": ["b"]}
    rows = parse_rows(lines({"question_id": 1, "turns": ["a"]}, second), "f")
    assert [(p.prompt_id, p.task, p.category) for p in to_prompts(rows, "t")] == [("t/1", "t", "t"), ("t/z", "t", "qa")]


def test_prompt_ids_keep_the_row_index_and_a_prefix_that_is_there() -> None:
    rows = [Row(7, None, None, ("a", "b")), Row(8, "qa/3", None, ("c",))]
    assert [p.prompt_id for p in to_prompts(rows, "qa")] == ["qa/7", "qa/3"]
    assert to_prompts(rows, "qa", first_turn_only=True)[0].turns == ("a",)


def test_line_separators_inside_a_prompt_do_not_cut_the_row(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\x0bfive\rsix\nseven"
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n", encoding="utf-8", newline="")
    assert parse_rows(read_lines(file), "x")[0].turns == (text,)


def test_blank_lines_windows_ends_and_a_byte_order_mark_are_harmless() -> None:
    data = b"\xef\xbb\xbf" + b'{"turns": ["a"]}\r\n\n  \r\n{"turns": ["b"]}'
    rows = parse_rows(data.split(b"\n"), "f")
    assert [(row.index, row.turns) for row in rows] == [(0, ("a",)), (1, ("b",))]
    assert [number for number, _ in iter_objects(data.split(b"\n"), "f")] == [1, 4]


BAD = {
    "empty": (b"", "f.jsonl: the file is empty"),
    "blank": (b"\n \n", "f.jsonl: the file is empty"),
    "broken": (b'{"turns": ["a"]}\n{"turns": ["b"', r"f\.jsonl line 2: broken JSON"),
    "not an object": (b'["turns"]', r"f\.jsonl line 1: \['turns'\]: must be a JSON object"),
    "not utf-8": (b'{"turns": ["\xff"]}', r"f\.jsonl line 1: byte 12 is not UTF-8"),
    "huge number": (b'{"turns": ["a"], "x": ' + b"9" * 5000 + b"}", r"f\.jsonl line 1: unusable JSON"),
    "too deep": (b"[" * 200_000, r"f\.jsonl line 1: (unusable|broken) JSON"),
    "no turns": (b'{"prompt": "a"}', r"f\.jsonl line 1: no key `turns` \(format deepspec\)"),
    "turns are a string": (b'{"turns": "abc"}', r"line 1: turns='abc': must be a list"),
    "turns are null": (b'{"turns": null}', r"line 1: turns=None: must be a list"),
    "no turn": (b'{"turns": []}', r"line 1: turns=\[\]: must be a list of at least one"),
    "number as turn": (b'{"turns": ["a", 5]}', r"line 1: turn 2 is 5: must be a string"),
    "blank turn": (b'{"turns": [" \\n"]}', r"line 1: turn 1 is blank"),
    "half a pair": (b'{"turns": ["\\ud83d"]}', r"line 1: turn 1 holds half a surrogate pair"),
    "id missing later": (b'{"question_id": 1, "turns": ["a"]}\n{"turns": ["b"]}', r"line 2: question_id=None"),
    "id is a truth value": (b'{"question_id": true, "turns": ["a"]}', r"line 1: question_id=True"),
    "id is empty": (b'{"prompt_id": "", "turns": ["a"]}', r"line 1: prompt_id=''"),
    "id twice": (b'{"question_id": 1, "turns": ["a"]}\n{"question_id": "1", "turns": ["b"]}', r"line 2: .*line 1 too"),
    "category is a number": (b'{"question_id": 1, "category": 4, "turns": ["a"]}', r"line 1: category=4"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_file_gives_one_line_with_file_and_line_number(case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        parse_rows(data.split(b"\n"), "f.jsonl")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_unknown_format_names_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=r"task\.format=csv: must be one of auto, deepspec, specbench, dispark"):
        parse_rows(lines({"turns": ["a"]}), "f", "csv")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task\.path=.*no\.jsonl: No such file"):
        read_lines(tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match=r"task\.path=.*must be a readable JSONL file"):
        read_lines(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_may_never_end_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"^task.path={path}: is not a regular file"):
            read_lines(path)


def test_check_unique_names_the_id() -> None:
    prompts = to_prompts([Row(0, "a", None, ("x",)), Row(1, "t/a", None, ("y",))], "t")
    with pytest.raises(ValueError, match="prompt id t/a occurs twice"):
        check_unique(prompts, "t")


def test_hash_rows_is_the_hash_of_deepspecs_spelling() -> None:
    data = '{"turns": ["é\u2028", "b"]}\n'.encode()
    rows = parse_rows(data.split(b"\n"), "f")
    assert hash_rows(rows) == hashlib.sha256(data).hexdigest()
    assert hash_rows(rows) != hash_rows([Row(0, None, None, ("é\u2028",))])

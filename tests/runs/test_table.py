"""Text, Markdown and CSV from a frame: alignment, missing values, odd content."""

from __future__ import annotations

import csv
import io

import numpy as np
import pandas as pd
import pytest

from dispark.runs.table import format_cell, is_missing, to_csv, to_markdown, to_text

FRAME = pd.DataFrame(
    {
        "name": ["ngram", "none"],
        "matl": [2.3456, None],
        "num": [7, 12],
        "is_good": [True, False],
        "ci": [[1.0, 2.0], None],
    },
    dtype=object,
)


def test_text_is_aligned() -> None:
    text = to_text(FRAME, {"matl": ".2f", "ci": lambda ends: f"{ends[0]:.1f}..{ends[1]:.1f}"})
    assert text == "\n".join(
        [
            "name   matl  num  is_good  ci",
            "-----  ----  ---  -------  --------",
            "ngram  2.35    7  yes      1.0..2.0",
            "none      -   12  no       -",
        ]
    )


def test_markdown_has_a_rule_and_escapes() -> None:
    frame = pd.DataFrame({"a|b": ["x|y", "two\nlines"], "n": [1.5, np.nan]})
    assert to_markdown(frame, {"n": ".1f"}) == "\n".join(
        ["| a\\|b | n |", "| --- | ---: |", "| x\\|y | 1.5 |", "| two<br>lines | - |"]
    )


def test_csv_keeps_precision_and_leaves_missing_fields_empty() -> None:
    rows = list(csv.reader(io.StringIO(to_csv(FRAME))))
    assert rows[0] == ["name", "matl", "num", "is_good", "ci"]
    assert rows[1][:4] == ["ngram", "2.3456", "7", "yes"]
    assert rows[2] == ["none", "", "12", "no", ""]
    back = pd.read_csv(io.StringIO(to_csv(pd.DataFrame({"x": [0.1 + 0.2, None]}))))
    assert back["x"][0] == 0.1 + 0.2
    assert np.isnan(back["x"][1])


def test_csv_quotes_what_needs_it() -> None:
    text = to_csv(pd.DataFrame({"a,b": ['say "x"', "1\n2"]}))
    assert list(csv.reader(io.StringIO(text))) == [["a,b"], ['say "x"'], ["1\n2"]]


@pytest.mark.parametrize("missing", [None, float("nan"), np.nan, pd.NA, pd.NaT, np.float64("nan")])
def test_missing_values_are_a_dash_whatever_their_type(missing: object) -> None:
    assert is_missing(missing)
    assert format_cell(missing, ".2f") == "-"
    assert format_cell(missing, str) == "-"


@pytest.mark.parametrize("value", [0, 0.0, "", [], [None], False, {}])
def test_zeros_and_empty_things_are_not_missing(value: object) -> None:
    assert not is_missing(value)


def test_cells_of_any_type() -> None:
    assert format_cell(3.14159, ".2f") == "3.14"
    assert format_cell(np.float32(0.5), ".2f") == "0.50"
    assert format_cell(np.int64(3), ".1f") == "3.0"
    assert format_cell("text", ".2f") == "text"
    assert format_cell(True, ".2f") == "yes"
    assert format_cell(0.25, lambda share: f"{share:.0%}") == "25%"
    assert format_cell([1, 2]) == "[1, 2]"


def test_empty_frames() -> None:
    assert to_text(pd.DataFrame()) == to_markdown(pd.DataFrame()) == to_csv(pd.DataFrame()) == ""
    header_only = pd.DataFrame({"a": [], "b": []})
    assert to_text(header_only) == "a  b\n-  -"
    assert to_markdown(header_only) == "| a | b |\n| --- | --- |"
    assert to_csv(header_only) == "a,b\n"


def test_wide_characters_take_two_columns() -> None:
    lines = to_text(pd.DataFrame({"a": ["日本", "x"], "b": ["1", "2"]})).split("\n")
    assert lines[2] == "日本  1"
    assert lines[3] == "x     2"


def test_duplicate_column_names_and_whole_numbers_beside_gaps() -> None:
    frame = pd.DataFrame([[1, 2], [3, 4]], columns=["x", "x"])
    assert to_text(frame).split("\n")[2:] == ["1  2", "3  4"]


def test_a_format_for_an_unknown_column_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="typo"):
        to_text(FRAME, {"typo": ".2f"})

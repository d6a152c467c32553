"""How a row of a Hub dataset becomes the turns of a prompt.

The wordings are those of DeepSpec's evaluation files, found by looking at the files; a rebuilt task is compared with
them through a hash (see `hub.py`). A template knows column names and text, not where the rows come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Template(Protocol):
    """Builds the turns of one prompt from one dataset row."""

    def __call__(self, row: Mapping[str, Any]) -> list[str]: ...


def take(row: Mapping[str, Any], column: str) -> Any:
    """Returns a column's value.

    Raises:
        ValueError: the row has no such column.
    """
    if column not in row:
        raise ValueError(f"task.template column {column} is missing: the dataset has {', '.join(sorted(row))}")
    return row[column]


class ColumnTemplate:
    """One turn: a text column between a fixed prefix and a fixed suffix."""

    def __init__(self, column: str, prefix: str = "", suffix: str = "") -> None:
        self.column = column
        self.prefix = prefix
        self.suffix = suffix

    def __call__(self, row: Mapping[str, Any]) -> list[str]:
        return [f"{self.prefix}{take(row, self.column)}{self.suffix}"]


class TurnsTemplate:
    """Several turns: a column that holds the list of them."""

    def __init__(self, column: str) -> None:
        self.column = column

    def __call__(self, row: Mapping[str, Any]) -> list[str]:
        return list(take(row, self.column))


class InstructionTemplate:
    """Alpaca's rows: an instruction, and under "Input:" its input where there is one."""

    def __call__(self, row: Mapping[str, Any]) -> list[str]:
        instruction, context = take(row, "instruction"), take(row, "input")
        return [f"{instruction}\n\nInput:\n{context}" if context else instruction]


class CodeProblemTemplate:
    """LiveCodeBench's rows: a problem and a code block to fill, which holds the starter code where the row has some."""

    INTRODUCTION = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
        "correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program"
    )

    def __call__(self, row: Mapping[str, Any]) -> list[str]:
        problem, starter = take(row, "question_content"), take(row, "starter_code")
        task = "Use the following code structure:" if starter else "Write your code in the following format:"
        block = starter or "# YOUR CODE HERE"
        return [
            f"{self.INTRODUCTION}\n\n### Question:\n{problem}\n\n### Format: {task}\n```python\n{block}\n```\n\n"
            "### Answer: (use the provided format with backticks)"
        ]

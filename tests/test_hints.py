"""Annotations against settings, and how they read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, List, Literal, NewType, Optional, Protocol, Union  # noqa: UP035

import numpy as np
import pytest
import torch

from dispark.hints import accepts, describe, parameter_hints, shown, suggest

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]

Count = NewType("Count", int)


@dataclass
class Shape:
    size: int
    parts: list[Shape] | None = None


NODE = f"a node with _target_: {__name__}.Shape, or null"


class HasName(Protocol):
    name: str


@pytest.mark.parametrize(
    ("hint", "good", "bad", "words"),
    [
        (int, [0, -3], [1.0, "1", True, None, [1]], "a whole number"),
        (float, [0, 1.5, float("inf")], ["1", True, None], "a number"),
        (str, ["", "a"], [1, None, True, ["a"]], "a string"),
        (bool, [True, False], [0, 1, "true", "maybe", None], "true or false"),
        (int | None, [1, None], [1.5, "null", False], "a whole number, or null"),
        (Optional[str], ["a", None], [5], "a string, or null"),  # noqa: UP045
        (Union[int, str], [1, "a"], [1.5, None], "a whole number or a string"),  # noqa: UP007
        (None, [None], [0], "null"),
        (list[str], [[], ["a"], ("a",)], ["abc", [1], [["a"]], {"a": 1}, None], "a list of strings"),
        (List[float], [[1, 2.5]], [0.5, ["a"], [True]], "a list of numbers"),  # noqa: UP006
        (Sequence[str], [["a"]], ["abc", [1]], "a list of strings"),
        (tuple[int, ...], [[1, 2], []], [1, ["a"]], "a list of whole numbers"),
        (tuple[int, str], [[1, "a"]], [[1], ["a", 1]], "a list of 2: a whole number, a string"),
        (list, [[1, "a"]], ["abc"], "a list"),
        (list[Any], [[1, "a"]], ["abc"], "a list"),
        (list[list[int]], [[[1]]], [[1]], "a list of lists of whole numbers"),
        (list[int] | None, [None, [1]], [["a"]], "a list of whole numbers, or null"),
        (dict[str, Any], [{}, {"a": [1]}], [5, "a", [1]], "a mapping"),
        (Mapping[str, int], [{"a": 1}], [{"a": "b"}, {1: 1}], "a mapping of whole numbers"),
        (dict, [{1: 2}], [5], "a mapping"),
        (Literal["first", "last"], ["first"], ["other", None, 1], "one of first, last"),
        (Literal[1], [1], [True, 1.0], "one of 1"),
        (Literal["a"] | None, ["a", None], ["b"], "one of a, or null"),
        (Path, ["a"], [5, None], "a path"),
        (str | Path | None, ["a", None], [5], "a path, or null"),
        (Annotated[int, "note"], [1], ["a"], "a whole number"),
        (Count, [1], ["a"], "a whole number"),
        (Shape | None, [None, Shape(1)], [5, "a", {"size": 1}, [1]], NODE),
        (Callable[[], float], [], [5, "a"], "an object that can be called"),
        (Any, [1, "a", None, [1]], [], "an object"),
        (object, [1, None], [], "an object"),
        (HasName, [1, "a"], [], "an object"),
        (torch.device, ["cpu", 5], [], "an object"),
        (int | HasName, ["a"], [], "a whole number or an object"),
    ],
)  # fmt: skip
def test_accepts_and_describe(hint: Any, good: list[Any], bad: list[Any], words: str) -> None:
    assert [value for value in good if not accepts(value, hint)] == []
    assert [value for value in bad if accepts(value, hint)] == []
    assert describe(hint) == words


@pytest.mark.parametrize("hint", [int, list[str], bool | None, dict[str, int], Shape])
def test_objects_and_inner_nodes_pass(hint: Any) -> None:
    for value in (np.int64(3), np.zeros(2), torch.zeros(2), Path("a"), {"_target_": "a.B"}):
        assert accepts(value, hint)


def test_shown_is_yaml() -> None:
    assert [shown(value) for value in (None, True, 1.5, "a", "", ["a", None], {"a": [True]})] == [
        "null", "true", "1.5", "a", "''", "[a, null]", "{a: [true]}",
    ]  # fmt: skip
    assert shown("x" * 100) == "x" * 57 + "..."


def test_annotations_are_evaluated_one_by_one() -> None:
    def function(a: int, b: Unknown, c: list[str] = None, *args: int, d: Sequence[float], e=1):  # type: ignore  # noqa: RUF013
        """Only type checkers know `Unknown`; c may be null, as its default is."""

    hints = parameter_hints(function)
    assert (hints["a"], hints["b"], hints["d"], hints["e"]) == (int, Any, Sequence[float], Any)
    assert accepts(None, hints["c"])
    assert not accepts("abc", hints["c"])
    wrapped = functools.wraps(function)(lambda *args, **kwargs: None)
    assert parameter_hints(wrapped)["d"] == Sequence[float]


def test_constructors_of_dataclasses_and_builtins() -> None:
    assert parameter_hints(Shape) == {"size": int, "parts": list[Shape] | None}
    with pytest.raises(ValueError):
        parameter_hints(dict)


def test_suggest() -> None:
    assert suggest("ngarm", ["none", "ngram"]) == "did you mean ngram? allowed: ngram, none"
    assert suggest("zzz", ["none"]) == "allowed: none"
    assert suggest("zzz", []) == "allowed: nothing"

"""Nodes against the constructors they name: names, types, imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dispark import config  # noqa: F401  (makes dispark.conf importable)
from dispark.nodes import check_node, locate
from dispark.targets.spec import TargetSpec


class Part:
    """Stands for any class that a YAML may name."""

    def __init__(self, size: int, label: str = "", spec: TargetSpec | None = None, rest: Any = None) -> None:
        self.size = size

    @classmethod
    def square(cls, size: float) -> Part:
        return cls(int(size**2))


def keyed(*, size: int, **others: Any) -> None:
    """Takes any setting."""


PART = f"{__name__}.Part"


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": PART, "size": 1},
        {"_target_": Part, "size": 1},
        {"_target_": f"{PART}.square", "size": 1},
        {"_target_": f"{__name__}.keyed", "size": 1, "other": "x"},
        {"_target_": "builtins.dict", "anything": [1]},
        {"_target_": PART, "_partial_": True},
        {"_target_": PART, "_args_": [1]},
        {"_target_": PART, "size": 1, "rest": {"_target_": PART, "size": "abc"}, "_recursive_": False},
    ],
)
def test_sound_nodes_pass(node: dict[str, Any]) -> None:
    check_node(node, "drafter")


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({"size": 1.5}, "drafter.size=1.5: must be a whole number"),
        ({"size": 1, "rest": [{"_target_": PART, "size": True}]}, "drafter.rest[0].size=true: must be a whole number"),
        ({"size": 1, "label": 7}, "drafter.label=7: must be a string; as text: 'drafter.label=\"7\"'"),
        ({"size": 1, "spec": 5}, "drafter.spec=5: must be a node with _target_: dispark.targets.spec.TargetSpec"),
        ({"size": 1, "lable": "a"}, f"drafter.lable: {PART} has no such setting; did you mean label? allowed: "),
        ({"label": "a"}, f"drafter.size: must be given, {PART} needs it"),
        ({"_target_": 5}, "drafter._target_=5: must be a dotted name"),
        ({"_target_": "a..b"}, "drafter._target_=a..b: must be a dotted name"),
        ({"_target_": f"{PART}.__doc__"}, f"drafter._target_={PART}.__doc__: is a str; must name a class"),
        ({"_target_": __name__}, f"drafter._target_={__name__}: is a module; must name a class or a function"),
        ({"_target_": f"{PART}.sqare"}, f"drafter._target_={PART}.sqare: {PART} has no sqare; did you mean square?"),
        ({"_target_": "dispark.nods.X"}, "drafter._target_=dispark.nods.X: dispark has no nods; did you mean nodes?"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(node: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_node({"_target_": PART, **node}, "drafter")
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_target_is_chosen_as_an_option() -> None:
    with pytest.raises(ValueError, match=r"with \+target@drafter.spec=tiny$"):
        check_node({"_target_": PART, "size": 1, "spec": "tiny"}, "drafter")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax; {file}, line 2"),
        ("\n\ny = undefined\n", "NameError: name 'undefined' is not defined; {file}, line 3"),
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'; {file}, line 1"),
        ("raise SystemExit(3)\n", "SystemExit: 3; {file}, line 1"),
    ],
)
def test_an_import_error_names_its_cause(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"broken_{abs(hash(source))}"
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError) as caught:
        locate(f"{name}.Drafter", "drafter._target_")
    assert str(caught.value) == (
        f"drafter._target_={name}.Drafter: module {name} cannot be imported ({reason.format(file=file)})"
    )


def test_folders_without_an_init_are_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare_methods" / "inner").mkdir(parents=True)
    (tmp_path / "bare_methods" / "inner" / "mine.py").write_text("class Drafter: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert locate("bare_methods.inner.mine.Drafter", "_target_").__name__ == "Drafter"


def test_an_absent_module_has_no_place() -> None:
    with pytest.raises(ValueError) as caught:
        locate("no_such_package.Drafter", "_target_")
    assert str(caught.value).endswith("(ModuleNotFoundError: No module named 'no_such_package')")

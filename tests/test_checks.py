"""What is refused of a composed config before a run begins."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from dispark import schema
from dispark.checks import check_groups, check_top_level, validate
from dispark.schema import BenchConfig, CompareConfig


def bench_config(**changes: Any) -> DictConfig:
    groups: dict[str, Any] = {group: {"_target_": "x"} for group in schema.groups("bench")}
    groups["paths"] = {"runs": "somewhere"}
    return OmegaConf.merge(OmegaConf.structured(BenchConfig), groups, changes)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be a whole number >= 1"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"batch_size": 4097}, "batch_size=4097: must be at most 4096"),
        ({"max_new_tokens": 1_000_001}, "max_new_tokens=1000001: must be at most 1000000"),
        ({"repeats": 0}, "repeats=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"warmup": -1}, "warmup=-1: must be a whole number >= 0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"on_overlong": "cut"}, "on_overlong=cut: must be one of"),
        ({"stop_strings": ["a", ""]}, "stop_strings"),
        ({"name": " "}, "name"),
        ({"stop_strings": [["a"]]}, "stop_strings=[[a]]: must be a list of strings"),
        ({"paths": {"runs": None}}, "paths.runs=null: must be the path of a folder"),
        ({"paths": {"runs": ""}}, "paths.runs='': must be the path of a folder"),
        ({"paths": {"runs": ["a"]}}, "paths.runs=[a]: must be the path of a folder"),
        ({"task": {"path": "???"}}, "task.path: must be given"),
        ({"task": {"path": "${nowhere}"}}, "task.path: Interpolation key 'nowhere' not found"),
    ],
)
def test_validate_names_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        validate(bench_config(**changes))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_validate_accepts_the_boundaries() -> None:
    validate(bench_config(seed=2**63 - 1, max_new_tokens=1, batch_size=1, warmup=0, name="x", stop_strings=["\n"]))
    validate(bench_config(max_new_tokens=1_000_000, batch_size=4096))


def test_a_group_holds_a_mapping() -> None:
    cfg = bench_config()
    cfg.drafter = ["a", "b"]
    with pytest.raises(ValueError, match=r"^drafter=\[a, b\]: an option of group drafter must hold a mapping"):
        validate(cfg)


def test_compare_is_checked_like_bench() -> None:
    cfg = OmegaConf.merge(OmegaConf.structured(CompareConfig), {"paths": {"runs": "a"}, "runs": ["${paths.runs}"]})
    assert check_top_level(cfg, "compare")["runs"] == ["a"]
    cfg.paths.runs = None
    with pytest.raises(ValueError, match=r"^paths.runs=null: "):
        check_top_level(cfg, "compare")


def test_groups_are_held_against_what_they_name() -> None:
    sampling = {"_target_": "dispark.types.Sampling", "temperature": 1}
    check_groups({"sampling": sampling, "seed": 3, "paths": {"runs": "a"}})
    with pytest.raises(ValueError, match=r"^sampling.temperature=abc: must be a number$"):
        check_groups({"sampling": sampling | {"temperature": "abc"}})
    with pytest.raises(ValueError, match=r"^task: has no _target_; an option of group task must name a class$"):
        check_groups({"task": {}})

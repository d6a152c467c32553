"""Profiles: interpolation between rows, files, and the hardware that they hold for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conformance.toolbox import open_tiny

from dispark.schedulers.profile import Profile, StepCosts, Table, identity_of
from dispark.schedulers.step_cost import StepCost

# 1 and 4 rows, 1 and 2 tokens each; medians 1.0, 1.5 and 4.0, 6.0.
SAMPLES = (((1.0, 9.0, 0.5), (1.5,)), ((4.0,), (6.0,)))
TABLE = Table((1, 4), (1, 2), SAMPLES)


def profile_of(**identity: Any) -> Profile:
    return Profile(identity, 16, TABLE)


def test_costs_of_rows_that_were_and_were_not_measured() -> None:
    profile = profile_of()
    assert profile.cost(1) == StepCost((1, 2), (1.0, 1.5))
    assert profile.cost(4) == StepCost((4, 8), (4.0, 6.0))
    assert profile.cost(2) == StepCost((2, 4), (2.0, 3.0))
    assert profile.cost(6) == StepCost((6, 12), (6.0, 9.0))


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    drafts = {"a": TABLE, "b": Table((1,), (1, 2, 3), (((0.1,), (0.2,), (0.3,)),))}
    profile = Profile(identity_of(open_tiny()), 16, TABLE, {8: (0.5, 0.6)}, drafts)
    profile.save(tmp_path / "deep" / "p.json")
    found = Profile.load(tmp_path / "deep" / "p.json", "k")
    assert found == profile
    found.check(open_tiny(), "k")


def test_another_target_or_other_hardware_is_refused() -> None:
    target = open_tiny()
    own = identity_of(target)
    for key, value in (("target", "huge"), ("num_threads", 999), ("dtype", "int1")):
        with pytest.raises(ValueError, match=rf"^key=p: was measured for {key} {value}, here it is .*'dispark profile"):
            profile_of(**(own | {key: value})).check(target, "key=p")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "is not a profile of dispark"),
        ("[]", "is not a profile of dispark"),
        (json.dumps({"version": 9}), "version 9"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=f"^key=p: .*{words}"):
        Profile.load(tmp_path / "p.json", "key=p")
    with pytest.raises(ValueError, match=r"^key=q: there is no such file; 'dispark profile' measures one"):
        Profile.load(tmp_path / "q.json", "key=q")


@pytest.mark.parametrize(
    ("rows", "tokens", "words"),
    [((4, 1), (1, 2), r"rows=\[4, 1\]"), ((1, 4), (0, 2), r"tokens=\[0, 2\]"), ((1, 2, 4), (1, 2), "its samples")],
)
def test_tables_that_make_no_sense(rows: tuple[int, ...], tokens: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Table(rows, tokens, SAMPLES)


def test_costs_come_from_a_file_or_a_table(tmp_path: Path) -> None:
    target, path = open_tiny(), tmp_path / "p.json"
    Profile(identity_of(target), 16, TABLE).save(path)
    costs = StepCosts(str(path))
    costs.bind(target)
    assert costs.of(2) == StepCost((2, 4), (2.0, 3.0))
    fixed = StepCosts(cost=StepCost((1,), (1.0,)))
    fixed.bind(target)
    assert fixed.of(7) == StepCost((1,), (1.0,))
    profile_of(target="other").save(path)
    with pytest.raises(ValueError, match=r"scheduler.profile=.*p.json: was measured for"):
        costs.bind(target)
    for words in ({}, {"profile": "x", "cost": StepCost((1,), (1.0,))}):
        with pytest.raises(ValueError, match=r"scheduler.profile=.*must be a file that 'dispark profile' wrote"):
            StepCosts(**words)

"""What a config points at is part of a run's identity: prompt files, checkpoints, code from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from dispark.runs.identity import content_hashes, is_own
from dispark.runs.store import run_key


def test_files_and_folders_count_by_content(tmp_path: Path) -> None:
    prompts, draft = tmp_path / "p.jsonl", tmp_path / "draft"
    prompts.write_text("one")
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    config = {
        "task": {"_target_": "dispark.tasks.suite.JsonlSuite", "path": str(prompts)},
        "drafter": {"_target_": "dispark.x.Y", "checkpoint": str(draft), "inner": [{"path": str(tmp_path / "absent")}]},
        "paths": {"path": str(prompts)},
    }
    found = content_hashes(config)
    assert set(found) == {"task.path", "drafter.checkpoint"}
    keys = {run_key(config, found)}
    prompts.write_text("two")
    keys.add(run_key(config, content_hashes(config)))
    (draft / "config.json").rename(draft / "other.json")
    keys.add(run_key(config, content_hashes(config)))
    assert len(keys) == 3
    assert run_key(config, content_hashes(config)) in keys


def test_code_from_outside_counts_and_the_project_s_own_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "outside_module.py"
    module.write_text("class Drafter: ...\n")
    config = {"drafter": {"_target_": "outside_module.Drafter"}, "verifier": {"_target_": "dispark.verifiers.x.Y"}}
    first = content_hashes(config)
    assert set(first) == {"drafter._target_"}
    module.write_text("class Drafter: pass\n")
    assert content_hashes(config) != first
    assert content_hashes({"drafter": {"_target_": "no_such_module.Drafter"}}) == {}


def test_random_and_hub_checkpoints_are_named_by_the_config() -> None:
    assert content_hashes({"drafter": {"checkpoint": "random"}, "other": {"checkpoint": "owner/name@c0ffee"}}) == {}
    assert run_key({"a": 1}) == run_key({"a": 1}, {})


@pytest.mark.parametrize(
    ("name", "own"), [("dispark.a.B", True), ("baselines.a", True), ("disparker.a", False), ("m", False)]
)
def test_is_own(name: str, own: bool) -> None:
    assert is_own(name) is own

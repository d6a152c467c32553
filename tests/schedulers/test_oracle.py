"""A recorded run, replayed: nothing verified in vain, the same texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dispark.cli import main
from dispark.schedulers.oracle import OracleScheduler

pytestmark = pytest.mark.usefixtures("clean_logging")

WORDS = ["bench", "target=tiny", "target.dtype=float32", "drafter=ngram", "task=smoke", "max_new_tokens=24", "chunk=16"]
LOOPING = "target.sources.random.config.initializer_range=0.12"


def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> dict[str, Any]:
    assert main([*WORDS, LOOPING, f"paths.runs={tmp_path / 'runs'}", *words]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    run: dict[str, Any] = json.loads((Path(line["run"]) / "run.json").read_text(encoding="utf-8"))
    return run | {"path": line["run"]}


def test_a_replay_wastes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = bench(capsys, tmp_path)
    oracle = bench(capsys, tmp_path, "scheduler=oracle", f"scheduler.path={fixed['path']}")
    assert fixed["summary"]["wasted_verify_share"] > 0
    assert oracle["summary"]["wasted_verify_share"] == 0
    assert oracle["summary"]["matl"] == fixed["summary"]["matl"]
    assert oracle["losslessness"]["ngram"]["verdict"] == "lossless"
    # Another task's requests are not in the record.
    words = [*WORDS, LOOPING, "task=chat", "task.limit=8", "scheduler=oracle", f"scheduler.path={fixed['path']}"]
    assert main([*words, f"paths.runs={tmp_path / 'others'}"]) == 2
    assert "has no request" in capsys.readouterr().err


def test_records_that_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "scheduler=oracle", f"paths.runs={tmp_path}"]) == 2
    assert "scheduler.path: must be given" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"scheduler\.path=.*: is no folder of a finished run"):
        OracleScheduler(str(tmp_path))
    warm = bench(capsys, tmp_path, "sampling=t1", "task.limit=1")
    with pytest.raises(ValueError, match=r"was recorded at temperature 1\.0; must be 0"):
        OracleScheduler(warm["path"])
    short = bench(capsys, tmp_path, "scheduler.max_verify_length=1", "task.limit=1")
    with pytest.raises(ValueError, match="was recorded with scheduler=fixed; must be fixed, which verifies everything"):
        OracleScheduler(short["path"])

"""The W&B sink against the real library, offline: nothing here reaches a network, and no failure leaves `log_run`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dispark.interfaces import Tracker, TrainingTracker
from dispark.runs.tracking import NullTracker, WandbTracker, acceptance_rows, curves, scalars

SUMMARY: dict[str, Any] = {
    "matl": 2.5,
    "energy_j": None,
    "speedup": {"value": 1.2, "ci": [1.1, 1.3], "is_distinguishable": True},
    "acceptance_at": [0.9, 0.8],
    "conditional_acceptance_at": [0.9, None],
}
ROWS = pd.DataFrame({"task": ["chat", "code"], "matl": [2.0, float("nan")], "speedup_ci": [[1.0, 2.0], None]})


def a_run(index: int) -> dict[str, Any]:
    return {
        "key": f"{index:012x}",
        "slug": f"tiny/chat/d{index}/s0",
        "choices": {"target": "tiny", "task": "chat", "drafter": f"d{index}"},
        "config": {"seed": index, "drafter": {"max_n": 3}},
        "provenance": {"git_sha": "abc"},
        "summary": SUMMARY,
    }


# W&B starts a service process and keeps global state, so each scenario has a process of its own.
SWEEP = """
import json, logging, sys
import pandas as pd
from dispark.runs.tracking import WandbTracker
logging.basicConfig(level=logging.INFO)
folder, runs, rows, settings = sys.argv[1], *map(json.loads, sys.argv[2:])
for run in runs:
    WandbTracker(dir=folder, **settings).log_run(run, pd.DataFrame(rows))
"""


def sweep(folder: Path, runs: list[dict[str, Any]], env: dict[str, str], **settings: Any) -> str:
    arguments = [
        json.dumps(value) for value in (runs, ROWS.astype(object).where(ROWS.notna(), None).to_dict("list"), settings)
    ]
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, str(folder), *arguments],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder.parent), **env},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stderr


def wandb_cli(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "wandb", *words]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout + done.stderr


def test_trackers_fit_the_protocol() -> None:
    assert isinstance(NullTracker(), Tracker)
    assert isinstance(WandbTracker(), Tracker)
    assert isinstance(NullTracker(), TrainingTracker)
    assert isinstance(WandbTracker(), TrainingTracker)
    NullTracker().log_run({}, ROWS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "disabled"}, "tracker.mode=disabled: must be one of offline, online"),
        ({"timeout_s": 0}, "tracker.timeout_s=0: must be a number of seconds above 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WandbTracker(**settings)


def test_an_offline_sweep_leaves_complete_runs(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    log = sweep(folder, [a_run(index) for index in range(4)], {}, tags=["mine"], group="monday")
    assert log.count("tracker: W&B run") == 4, log
    runs = sorted(folder.glob("wandb/offline-run-*"))
    assert [path.name[-12:] for path in runs] == [f"{index:012x}" for index in range(4)]
    listed = wandb_cli(folder, "sync", "--dry-run")
    assert "Would sync 4 run(s)" in listed
    summary = json.loads(wandb_cli(folder, "leet", "inspect", "--summary", "--json", str(runs[2])))
    assert "exit code 0" in wandb_cli(folder, "leet", "inspect", "--summary", str(runs[2]))
    assert "1.2" in json.dumps(summary)
    records = [json.loads(line) for line in wandb_cli(folder, "leet", "inspect", "--json", str(runs[2])).splitlines()]
    (record,) = [record["run"] for record in records if record["type"] == "run"]
    assert (record["run_id"], record["run_group"], record["job_type"]) == ("000000000002", "monday", "bench")
    assert record["display_name"] == "tiny/chat/d2/s0"
    assert record["tags"] == ["mine", "tiny", "chat", "d2"]
    config = record["config"]["update"]
    assert (config["seed"], config["drafter"]) == (2, {"max_n": 3})
    assert config["choices"]["drafter"] == "d2"
    tables = {path.name.split("_")[0]: json.loads(path.read_text()) for path in runs[2].rglob("*.table.json")}
    assert tables["tasks"]["columns"] == ["task", "matl", "speedup_ci"]
    assert tables["tasks"]["data"] == [["chat", 2.0, "[1.0, 2.0]"], ["code", None, None]]
    assert tables["acceptance"]["data"] == [["all", 1, 0.9, 0.9], ["all", 2, 0.8, None]]


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}, "CommError"),
        ({"WANDB_BASE_URL": "http://127.0.0.1:9"}, "UsageError"),  # nobody is logged in
    ],
)
def test_an_unreachable_server_costs_seconds_and_no_run(tmp_path: Path, env: dict[str, str], reason: str) -> None:
    folder = tmp_path / "runs"
    log = sweep(folder, [a_run(0), a_run(1)], env, mode="online", timeout_s=1)
    assert log.count("tracker: W&B cannot be reached") == 1, log  # the second job does not ask again
    assert reason in log
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2
    assert list(folder.glob("wandb/run-*")) == []


def test_a_failing_library_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import fails
    with caplog.at_level(logging.WARNING):
        WandbTracker(dir=str(tmp_path)).log_run(a_run(0), ROWS)
    assert "W&B did not take the run (ModuleNotFoundError" in caplog.text
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "wandb", object())
    WandbTracker(dir=str(tmp_path / "file" / "x")).log_run(a_run(0), ROWS)
    assert "NotADirectoryError" in caplog.text


TRAINING = """
import sys
from dispark.runs.tracking import WandbTracker
run = {"key": "abc", "slug": "train/tiny/dispark/s0", "config": {"steps": 2}}
with WandbTracker(dir=sys.argv[1]).training(run) as take:
    for step in (1, 2):
        take({"kind": "train", "student": "dispark", "step": step, "loss": 3.5 / step, "accept_at": [0.5, None]})
"""


def test_a_training_leaves_its_curves(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", TRAINING, str(tmp_path / "w")], env=env, check=True, timeout=60)
    (folder,) = (tmp_path / "w").glob("wandb/offline-run-*-abc")
    kept = next(folder.glob("*.wandb")).read_bytes()
    for words in (b"train/tiny/dispark/s0", b"dispark/train/loss", b"dispark/train/accept_at/1"):
        assert words in kept


def test_a_failing_library_does_not_stop_a_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Session:
        def log(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("no disk")

        def finish(self) -> None:
            raise RuntimeError("still none")

    monkeypatch.setattr(WandbTracker, "_start", lambda *_: Session())
    with WandbTracker(dir=str(tmp_path)).training({}) as take:
        take({"kind": "train", "student": "a", "step": 1})
        take({"kind": "train", "student": "a", "step": 2})
    assert caplog.text.count("takes no more lines (RuntimeError: no disk)") == 1
    assert "did not end the training (RuntimeError: still none)" in caplog.text


def test_curves_have_one_name_a_figure() -> None:
    line = {"kind": "held_out", "student": "a", "step": 4, "loss": 1.0, "accept_at": [0.5, None], "parity/x": None}
    assert dict(curves(line)) == {"a/held_out/loss": 1.0, "a/held_out/accept_at/1": 0.5}


def test_scalars_are_flat_and_present() -> None:
    assert dict(scalars(SUMMARY)) == {"matl": 2.5, "speedup/value": 1.2, "speedup/is_distinguishable": True}
    assert dict(scalars({})) == {}


def test_acceptance_rows_cover_scopes_and_uneven_lists() -> None:
    rows = pd.DataFrame({"task": ["chat", "code"], "acceptance_at": [[0.5], None]})
    found = acceptance_rows(
        {"arms": {"ngram": {"acceptance_at": [0.7, 0.6], "conditional_acceptance_at": [0.7]}}}, rows
    )
    assert found == [
        {"scope": "arms/ngram", "k": 1, "acceptance_at": 0.7, "conditional_acceptance_at": 0.7},
        {"scope": "arms/ngram", "k": 2, "acceptance_at": 0.6, "conditional_acceptance_at": None},
        {"scope": "chat", "k": 1, "acceptance_at": 0.5, "conditional_acceptance_at": None},
    ]
    assert acceptance_rows({}, pd.DataFrame({"task": ["chat"]})) == []

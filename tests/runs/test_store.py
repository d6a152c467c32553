"""The run directory: what is in it, when it counts as done, who may write it, and what a crash leaves."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from dispark.runs.store import SCHEMA_VERSION, RunStore, load, run_key

CONFIG: dict[str, Any] = {"seed": 0, "drafter": {"max_n": 3}, "stop_strings": ["${x", "a: b", "é${seed}", "\\${y}"]}
KEY = "0123456789ab"


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(tmp_path / "runs", KEY, "tiny/chat/ngram/s0")


def finish(store: RunStore, **run: Any) -> None:
    store.begin(CONFIG)
    store.append_request({"request_id": "a#0", "text": "héé\n"})
    store.write_rounds(pd.DataFrame({"row": [0, 1], "num_accepted": [2, 0]}))
    store.write_steps(pd.DataFrame({"step": [0], "draft_s": [0.5]}))
    store.write_run(run)
    store.mark_done()


def test_a_finished_run_reads_back(store: RunStore) -> None:
    assert not store.is_done
    finish(store, summary={"matl": np.float64(2.5), "energy_j": float("nan")}, schema_note=None)
    assert store.is_done
    assert store.path == store.root / f"tiny/chat/ngram/s0-{KEY}"
    (stored,) = load(store.root)
    assert stored == store.read()
    assert stored.run["schema_version"] == SCHEMA_VERSION
    assert (stored.run["key"], stored.run["slug"]) == (KEY, "tiny/chat/ngram/s0")
    assert stored.run["summary"] == {"matl": 2.5, "energy_j": None}
    assert stored.requests() == [{"request_id": "a#0", "text": "héé\n"}]
    assert stored.rounds()["num_accepted"].tolist() == [2, 0]
    assert stored.steps()["draft_s"].tolist() == [0.5]
    assert OmegaConf.to_container(OmegaConf.load(store.path / "config.yaml"), resolve=True) == CONFIG
    names = {"config.yaml", "requests.jsonl", "rounds.parquet", "steps.parquet", "run.json", "done"}
    assert {entry.name for entry in store.path.iterdir()} == names


def test_parquet_is_zstd_and_may_be_empty(store: RunStore) -> None:
    store.begin(CONFIG)
    store.write_rounds(pd.DataFrame({"row": pd.Series([], dtype="int64"), "accepted": pd.Series([], dtype=object)}))
    metadata = pq.read_metadata(store.path / "rounds.parquet")
    assert (metadata.num_rows, metadata.num_columns) == (0, 2)
    store.write_rounds(pd.DataFrame({"row": [1]}))
    assert pq.read_metadata(store.path / "rounds.parquet").row_group(0).column(0).compression == "ZSTD"


def test_a_run_without_frames_is_damaged(store: RunStore) -> None:
    store.begin(CONFIG)
    store.write_run({})
    store.mark_done()
    stored = store.read()
    assert stored.requests() == []
    for frame in (stored.rounds, stored.steps):
        with pytest.raises(ValueError, match=r"\.parquet: is missing from a finished run; .*overwrite=true"):
            frame()


def test_requests_are_on_disk_at_once_and_a_torn_line_is_left_out(store: RunStore) -> None:
    store.begin(CONFIG)
    store.append_request({"n": 1})
    store.append_request({"n": 2})
    file = store.path / "requests.jsonl"
    assert len(file.read_text().splitlines()) == 2  # before any close
    with file.open("a") as handle:
        handle.write('{"n": 3, "te')
    again = RunStore(store.root, KEY, store.slug)
    assert again.begin(CONFIG, resume=True) == [{"n": 1}, {"n": 2}]
    again.append_request({"n": 3})
    again.write_run({})
    again.mark_done()
    assert [row["n"] for row in again.read().requests()] == [1, 2, 3]


def test_begin_clears_an_earlier_attempt_but_nobody_elses_files(store: RunStore) -> None:
    finish(store)
    (store.path / "error.txt").touch()
    (store.path / ".run.json.1.tmp").touch()
    (store.path / "my notes.txt").touch()
    assert store.begin(CONFIG) == []
    assert not store.is_done
    assert {entry.name for entry in store.path.iterdir()} == {"config.yaml", "my notes.txt", ".previous"}
    store.write_run({})
    store.mark_done()
    assert not (store.path / ".previous").exists()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_result_outlives_a_failed_attempt_to_replace_it(
    store: RunStore, is_killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    finish(store, summary={"by": "the first"})
    before = {file.name: file.read_bytes() for file in store.path.iterdir()}

    def work() -> None:
        with store.attempt(CONFIG, overwrite=True):
            store.append_request({"n": "second"})
            store.write_run({"summary": {"by": "the second"}})
            raise RuntimeError("kaboom")

    if is_killed:  # nothing of the handlers runs
        store.begin(CONFIG)
        store.append_request({"n": "second"})
        store._close()
        assert not store.is_done
        with store.attempt(CONFIG) as is_needed:
            assert not is_needed
        assert "an attempt to replace this result was killed; the result is back" in caplog.text
    else:
        with pytest.raises(RuntimeError, match="kaboom"):
            work()
        assert "kaboom" in (store.path / "error_rerun.txt").read_text()
    assert store.read().run["summary"] == {"by": "the first"}
    after = {file.name: file.read_bytes() for file in store.path.iterdir() if file.name in before}
    assert after == before
    with store.attempt(CONFIG) as is_needed:
        assert not is_needed


def test_resume_ignores_a_finished_run(store: RunStore) -> None:
    finish(store)
    assert store.begin(CONFIG, resume=True) == []


def test_done_needs_run_json(store: RunStore) -> None:
    finish(store)
    (store.path / "run.json").unlink()
    assert not store.is_done
    assert list(load(store.root)) == []
    store.begin(CONFIG)
    with pytest.raises(AssertionError):
        store.mark_done()


def test_unwritable_root_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^paths\.runs=.*cannot be written \(Not a directory\)"):
        RunStore(tmp_path / "file", KEY).begin(CONFIG)


def test_attempt_runs_once(store: RunStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for expected in (True, False):
        with store.attempt(CONFIG) as is_needed:
            assert is_needed is expected
            if is_needed:
                logging.getLogger("dispark.test").warning("inside")
                store.write_run({})
                store.mark_done()
    assert "skipped (done)" in caplog.text
    logging.getLogger("dispark.test").warning("outside")
    text = (store.path / "log.txt").read_text()
    assert "WARNING dispark.test: inside" in text
    assert "outside" not in text
    assert not (store.path / "lock").exists()
    with store.attempt(CONFIG, overwrite=True) as is_needed:
        assert is_needed
        assert not store.is_done


def test_skipping_takes_milliseconds(store: RunStore) -> None:
    finish(store)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        with store.attempt(CONFIG) as is_needed:
            assert not is_needed
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.05


@pytest.mark.parametrize("error", [RuntimeError("kaboom"), KeyboardInterrupt()])
def test_a_failed_attempt_keeps_its_traceback(store: RunStore, error: BaseException) -> None:
    def work() -> None:
        with store.attempt(CONFIG):
            store.append_request({"n": 1})
            raise error

    with pytest.raises(type(error)) as caught:
        work()
    text = (store.path / "error.txt").read_text()
    assert text.startswith("Traceback")
    assert type(error).__name__ in text
    assert caught.value.__notes__ == [f"full traceback: {store.path / 'error.txt'}"]
    assert not store.is_done
    assert list(load(store.root)) == []
    assert not (store.path / "lock").exists()
    with store.attempt(CONFIG) as is_needed:
        assert is_needed
        assert not (store.path / "error.txt").exists()


def test_fail_never_hides_the_first_error(store: RunStore, caplog: pytest.LogCaptureFixture) -> None:
    store.fail(RuntimeError("no folder yet"))
    assert "error.txt: could not be written" in caplog.text


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_attempt_waits_and_then_skips(store: RunStore, overwrite: bool) -> None:
    finish(store, summary={"by": "an earlier run"}) if overwrite else None
    started, seen = threading.Event(), []

    def second() -> None:
        other = RunStore(store.root, KEY, store.slug)
        started.wait()
        with other.attempt(CONFIG, overwrite=overwrite) as is_needed:
            seen.append(is_needed)

    thread = threading.Thread(target=second)
    thread.start()
    with store.attempt(CONFIG, overwrite=overwrite) as is_needed:
        assert is_needed
        started.set()
        time.sleep(0.3)
        assert seen == []
        store.write_run({"summary": {"by": "the first"}})
        store.mark_done()
    thread.join(10)
    assert seen == [False]
    assert store.read().run["summary"] == {"by": "the first"}


def test_two_processes_with_one_key_work_once(tmp_path: Path) -> None:
    code = """
import sys, time
from dispark.runs.store import RunStore
store = RunStore(sys.argv[1], "k", "a/b")
with store.attempt({}) as is_needed:
    if is_needed:
        with open(sys.argv[1] + ".calls", "a") as calls:
            calls.write("x")
        time.sleep(0.3)
        store.write_run({})
        store.mark_done()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "runs")]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert (tmp_path / "runs.calls").read_text() == "x"


def test_load_orders_runs_and_takes_a_single_folder(tmp_path: Path) -> None:
    for name in ("b", "a"):
        finish(RunStore(tmp_path, KEY, f"{name}/s0"), name=name)
    RunStore(tmp_path, "unfinished").begin(CONFIG)
    assert [stored.run["name"] for stored in load(tmp_path)] == ["a", "b"]
    (stored,) = load(tmp_path / "a" / f"s0-{KEY}")
    assert stored.run["name"] == "a"
    assert list(load(tmp_path / "run-unfinished")) == []


def test_load_refuses_what_it_cannot_read(store: RunStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        next(load(tmp_path / "absent"))
    finish(store)
    file = store.path / "run.json"
    for text, message in (
        (json.dumps({"schema_version": SCHEMA_VERSION + 1}), rf"schema_version={SCHEMA_VERSION + 1}"),
        (json.dumps({}), "schema_version=None"),
        ("[]", "schema_version=None"),
        ('{"sche', "cannot be read as JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            next(load(store.root))


def test_run_key_ignores_what_cannot_change_a_result() -> None:
    base = {"seed": 0, "drafter": {"max_n": 3}}
    extra = {"tracker": {"mode": "online"}, "paths": {"runs": "x"}, "hydra": {}, "overwrite": True, "name": "n"}
    assert run_key(base) == run_key({**extra, "drafter": {"max_n": 3}, "seed": 0})
    assert len(run_key(base)) == 12
    assert run_key(base) != run_key({"seed": 1, "drafter": {"max_n": 3}})
    assert run_key(base) != run_key({"seed": 0, "drafter": {"max_n": 4}})

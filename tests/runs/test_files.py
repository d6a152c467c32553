"""Atomic writes, strict JSON, tolerant JSONL, and a lock that a killed holder can't keep."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispark.runs.files import check_writable, dumps, locked, read_jsonl, to_jsonable, write_atomic, write_text


@dataclass
class Pair:
    left: Any
    right: Any


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (2**70, 2**70),
        (float("nan"), None),
        (float("-inf"), None),
        (np.float32(1.5), 1.5),
        (np.float64("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1.0, np.nan]]), [[1.0, None]]),
        ((1, (2,)), [1, [2]]),
        ({3, 1}, [1, 3]),
        ({1: Path("a/b")}, {"1": "a/b"}),
        (Pair(1, Pair("ä", None)), {"left": 1, "right": {"left": "ä", "right": None}}),
        ([], []),
    ],
)
def test_to_jsonable(value: Any, expected: Any) -> None:
    plain = to_jsonable(value)
    assert plain == expected
    assert json.loads(dumps(value)) == plain


def test_dumps_keeps_characters_and_lines(tmp_path: Path) -> None:
    text = dumps({"text": "naïve\u2028line\nnext"})
    assert "\n" not in text
    assert "naïve" in text


def test_write_text_replaces_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    def fill(path: Path) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError) as caught:
        write_atomic(tmp_path / "run.json", fill)
    assert caught.value.filename == str(tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text(path, "old")

    def broken(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomic(path, broken)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", []),
        ('{"a": 1}\n', [{"a": 1}]),
        ('{"a": 1}\n{"a": 2}', [{"a": 1}, {"a": 2}]),
        ('{"a": 1}\n{"a": "to', [{"a": 1}]),
        ('{"a": 1}\n12', [{"a": 1}]),
        ('{"a": 1}\n\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ('{"a": "x\u2028y\x85z"}\n', [{"a": "x\u2028y\x85z"}]),
    ],
)
def test_read_jsonl_leaves_out_a_torn_last_line(tmp_path: Path, text: str, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    assert read_jsonl(path) == rows


def test_read_jsonl_survives_half_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": 1}\n{"a": "ä'.encode()[:-1])
    assert read_jsonl(path) == [{"a": 1}]


@pytest.mark.parametrize(
    ("text", "reason"), [('{"a": \n{"a": 2}\n', "is not JSON"), ('[1]\n{"a": 2}\n', "JSON object")]
)
def test_read_jsonl_names_a_broken_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 1: .*{reason}"):
        read_jsonl(path)


def test_check_writable(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^paths\.runs=.*file/x: cannot be written \(Not a directory\)"):
        check_writable(tmp_path / "file" / "x")


def test_lock_excludes_and_disappears(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    inside, most, threads = [0], [0], []

    def work() -> None:
        with locked(path, "test"):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.02)
            inside[0] -= 1

    for _ in range(4):
        threads.append(threading.Thread(target=work))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert not path.exists()


def test_lock_times_out_and_names_the_holder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lock"
    with (
        caplog.at_level("INFO"),
        locked(path, "first"),
        pytest.raises(TimeoutError, match=f"process {os.getpid()} on "),
        locked(path, "second", timeout_s=0.0),
    ):
        pass
    assert "second: waiting for process" in caplog.text
    with locked(path, "third", timeout_s=0.0):
        assert path.exists()


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import sys, time; from pathlib import Path; from dispark.runs.files import locked\n"
    code += "with locked(Path(sys.argv[1]), 'child'): print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(TimeoutError), locked(path, "test", timeout_s=0.0):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert path.exists()  # its file is left, its lock is not
    with locked(path, "test", timeout_s=5.0):
        pass
    assert not path.exists()


def test_without_file_locks_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path / "lock", "test"), locked(tmp_path / "lock", "test"):
        pass
    assert "no file locks here (Function not implemented)" in caplog.text
    monkeypatch.setattr("dispark.runs.files.fcntl", None)
    with locked(tmp_path / "lock", "test"):
        pass

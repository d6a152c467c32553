"""A user's mistakes through the command line: one line that names key, value and what is allowed, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dispark.cli import main

pytestmark = pytest.mark.usefixtures("clean_logging")


def errors_of(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith(("dispark: error:", "Traceback"))]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["drafter=eagel"], ["drafter=eagel", "allowed:", "ngram"]),
        (["drafter=ngran"], ["drafter=ngran", "did you mean ngram"]),
        (["max_new_tokens=many"], ["max_new_tokens", "many", "Integer"]),
        (["max_new_token=4"], ["max_new_token", "did you mean max_new_tokens"]),
        (["task=jsonl", "task.path=/no/such/file.jsonl"], ["task.path", "/no/such/file.jsonl", "readable JSONL"]),
        (["drafter=draft_model"], ["drafter.model", "49152", "same number"]),
        (["drafter.draft_length=-3"], ["drafter.draft_length=-3", "at least 1"]),
        (["drafter.draft_lenght=3"], ["drafter.draft_lenght"]),
        (["max_new_tokens=-1"], ["max_new_tokens=-1", ">= 1"]),
        (["batch_size=0"], ["batch_size=0", ">= 1"]),
        (["sampling.temperature=-1"], ["sampling.temperature=-1", ">= 0"]),
        (["sampling.top_p=1.5"], ["sampling.top_p=1.5", "(0, 1]"]),
        (["scheduler.max_verify_length=-1"], ["scheduler.max_verify_length=-1", ">= 0"]),
        (["target.max_context=80"], ["80", "on_overlong=skip"]),
        (["target.dtype=float12"], ["target.dtype=float12", "bfloat16"]),
        (["target.device=tpu"], ["target.device=tpu", "cuda:N"]),
        (["stop_strings=['']"], ["stop_strings", "at least one character"]),
    ],
)
def test_one_line_with_key_value_and_allowed(
    words: list[str], named: list[str], runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "target=tiny", "task.limit=2", *words]) == 2
    (line,) = errors_of(capfd)
    for word in named:
        assert word in line


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", ["the file is empty", "one JSON object a line"]),
        (b'{"turns": ["a"]}\n{"turns": ["b"\n', ["line 2", "one JSON object a line"]),
        (b'{"turns": []}\n', ["line 1", "turns"]),
        (json.dumps({"turns": ["word " * 3000]}).encode(), ["15004 tokens", "at most 1023"]),
    ],
)
def test_bad_prompt_files(
    content: bytes, named: list[str], tmp_path: Path, runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    assert main(["bench", "target=tiny", "task=jsonl", f"task.path={file}"]) == 2
    (line,) = errors_of(capfd)
    assert "prompts" in line
    for word in named:
        assert word in line


def test_results_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["bench", "target=tiny", f"paths.runs={tmp_path / 'file' / 'runs'}"]) == 2
    (line,) = errors_of(capfd)
    assert "paths.runs=" in line

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
        (["max_new_tokens=many"], ["max_new_tokens=many", "must be a whole number"]),
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
        (["batch_size=5000"], ["batch_size=5000", "at most 4096"]),
        (["max_new_tokens=1000001"], ["max_new_tokens=1000001", "at most 1000000"]),
        (["target.sources.random.architecture=gpt2"], ["random.architecture=gpt2", "must be one of llama"]),
        (["+target.sources.random.config.foo=1"], ["random.config.foo", "is not a key of LlamaConfig"]),
        (["task=paper_gsm8k", "task.template=foo"], ["task.template=foo", "dispark.tasks.templates"]),
    ],
)
def test_one_line_with_key_value_and_allowed(
    words: list[str], named: list[str], runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "target=tiny", "task.limit=2", *words]) == 2
    (line,) = errors_of(capfd)
    for word in named:
        assert word in line


WHOLE, NUMBER, SWITCH, TEXT, TEXTS = (
    "a whole number", "a number", "true or false", "a string", "a list of strings",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("drafter.draft_length=1.5", WHOLE),
        ("drafter.draft_length=abc", WHOLE),
        ("drafter.min_n=1.5", WHOLE),
        ("drafter.match=other", "one of first, last"),
        ("drafter.is_cut_at_stop=maybe", SWITCH),
        ("scheduler.max_verify_length=1.5", f"{WHOLE}, or null"),
        ("scheduler.max_verify_length=abc", f"{WHOLE}, or null"),
        ("sampling.top_k=true", f"{WHOLE}, or null"),
        ("sampling.temperature=abc", NUMBER),
        ("sampling.temperature=null", NUMBER),
        ("sampling.temperature=true", NUMBER),
        ("sampling.top_p=abc", f"{NUMBER}, or null"),
        ("sampling.top_p=true", f"{NUMBER}, or null"),
        ("target.token_bucket=abc", f"{WHOLE}, or null"),
        ("target.slot_bucket=1.5", f"{WHOLE}, or null"),
        ("target.prefill_chunk=null", WHOLE),
        ("target.stop_strings=User", TEXTS),
        ("target.stop_strings=[[a]]", TEXTS),
        ("target.sources.random.seed=abc", WHOLE),
        ("target.sources.random.config=5", "a mapping"),
        ("+target.extra_stop_tokens=foo", TEXTS),
        ("+target.template_kwargs=5", "a mapping"),
        ("meter.idle_s=abc", NUMBER),
        ("task.name=[a]", TEXT),
        ("task=jsonl task.path=x task.first_turn_only=maybe", SWITCH),
        ("task=jsonl task.path=x task.select_seed=abc", f"{WHOLE}, or null"),
        ("drafter=synthetic drafter.rates=0.5", "a list of numbers"),
        ("drafter=synthetic drafter.rates=[a]", "a list of numbers"),
        ("drafter=dispark drafter.random=5", "a node with _target_: dispark.drafters.semi_autoregressive.BlockShape"),
        ("drafter=draft_model drafter.model=[a]", "a mapping"),
        ("tracker=wandb tracker.tags=abc", TEXTS),
        ("tracker=wandb tracker.timeout_s=abc", NUMBER),
        ("stop_strings=[[a]]", TEXTS),
        ("stop_strings=User", TEXTS),
        ("seed=true", WHOLE),
        ("overwrite=maybe", SWITCH),
        ("name=[a]", f"{TEXT}, or null"),
        ("paths.runs=null", "the path of a folder"),
        ("paths.runs=5", "the path of a folder"),
        ("paths.runs=[a]", "the path of a folder"),
    ],
)
def test_a_value_of_the_wrong_type(words: str, allowed: str, runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = words.split()
    assert main(["bench", "target=tiny", *given]) == 2
    (line,) = errors_of(capfd)
    assert line.startswith(f"dispark: error: {given[-1].lstrip('+')}: must be {allowed}")
    assert not runs_dir.exists()


@pytest.mark.parametrize("words", ["baseline=[a,b]", "csv=[a]", "markdown=[a]"])
def test_compare_says_it_alike(words: str, runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", words]) == 2
    assert errors_of(capfd) == [f"dispark: error: {words}: must be a string, or null"]


@pytest.mark.parametrize("command", ["bench", "fetch", "compare"])
def test_results_need_a_folder(
    command: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["paths.runs=null"], ['paths.runs=""'], ["~paths.runs"], ["-m", "paths.runs=null"]):
        assert main([command, *words]) == 2
        (line,) = errors_of(capfd)
        assert line.startswith("dispark: error: paths.runs=")
    monkeypatch.setenv("DISPARK_RUNS", "")
    assert main([command]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("drafter", "plus"), [("draft_model", ""), ("draft_target", "+")])
def test_a_draft_model_is_chosen_as_a_target(
    drafter: str, plus: str, runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "target=tiny", "task.limit=1", "max_new_tokens=2", f"drafter={drafter}"]
    assert main([*words, "drafter.model=tiny"]) == 2
    (line,) = errors_of(capfd)
    assert line.endswith(f" {plus}target@drafter.model=tiny")
    assert main([*words, f"{plus}target@drafter.model=tiny"]) == 0


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

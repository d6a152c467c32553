"""The shipped prompts, and suites over files and folders of the user's."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from dispark.interfaces import TaskSuite
from dispark.tasks.rows import parse_rows
from dispark.tasks.suite import SHIPPED, JsonlSuite, PackagedSuite
from dispark.types import Prompt

# Raise the version in conf/task/*.yaml together with these hashes whenever a shipped prompt changes.
VERSION = "1"
SHA256 = {
    "chat": "1f6c1ded583a74cd",
    "code": "b37489ef056707bb",
    "math": "a50b864a1f5cc894",
    "translation": "73217d7199303d29",
    "summarization": "71df9ed3a2fff56e",
    "qa": "2eb5b3b20b33aa85",
    "rag": "eec0b078d57c5041",
}


def shipped(suite: str) -> list[Prompt]:
    return PackagedSuite(suite, [suite], VERSION).prompts()


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def overlap(first: set[tuple[str, ...]], second: set[tuple[str, ...]]) -> float:
    """Share of the smaller set's five-word runs that the other set has too."""
    return len(first & second) / min(len(first), len(second))


@pytest.mark.parametrize("suite", SHIPPED)
def test_shipped_prompts_change_only_with_their_version(suite: str) -> None:
    data = (importlib.resources.files("dispark.tasks") / "prompts" / f"{suite}.jsonl").read_bytes()
    assert hashlib.sha256(data).hexdigest()[:16] == SHA256[suite], "raise the version in conf/task and here"


@pytest.mark.parametrize("suite", SHIPPED)
def test_shipped_suite_is_valid(suite: str) -> None:
    prompts = shipped(suite)
    assert len(prompts) >= 16
    assert [prompt.prompt_id for prompt in prompts] == [f"{suite}/{index}" for index in range(len(prompts))]
    assert all(prompt.task == suite and prompt.category != suite for prompt in prompts)
    assert all(turn == turn.strip() for prompt in prompts for turn in prompt.turns)


def test_chat_has_two_turn_prompts_and_the_other_suites_have_none() -> None:
    assert sum(len(prompt.turns) == 2 for prompt in shipped("chat")) >= 5
    assert all(len(prompt.turns) == 1 for suite in SHIPPED if suite != "chat" for prompt in shipped(suite))


def test_shipped_prompts_vary_in_length() -> None:
    words = [len(" ".join(prompt.turns).split()) for suite in SHIPPED for prompt in shipped(suite)]
    assert min(words) <= 10
    assert max(words) >= 400
    assert sum(100 <= count <= 400 for count in words) >= 20


def test_texts_to_summarize_have_80_to_400_words() -> None:
    for prompt in shipped("summarization"):
        assert 80 <= len(prompt.turns[0].split("\n\n", 1)[1].split()) <= 400, prompt.prompt_id


def test_rag_prompts_have_numbered_passages_and_a_question() -> None:
    for prompt in shipped("rag"):
        assert all(f"[{number}] " in prompt.turns[0] for number in (1, 2, 3)), prompt.prompt_id
        assert re.search(r"^(Questions?|Message):", prompt.turns[0], re.MULTILINE), prompt.prompt_id


def test_no_two_shipped_prompts_are_nearly_the_same() -> None:
    sets = [(p.prompt_id, shingles(" ".join(p.turns))) for suite in SHIPPED for p in shipped(suite)]
    close = [(a, b) for (a, first), (b, second) in combinations(sets, 2) if overlap(first, second) > 0.3]
    assert not close


def test_shipped_prompts_are_not_taken_from_the_reference_data(data_folder: Path) -> None:
    known: set[tuple[str, ...]] = set()
    for file in sorted(data_folder.glob("*/*.jsonl")):
        for prompt in JsonlSuite(file).prompts():
            known.update(*(shingles(turn) for turn in prompt.turns))
    assert len(known) > 100_000
    for suite in SHIPPED:
        for prompt in shipped(suite):
            for turn in prompt.turns:
                assert overlap(shingles(turn), known) < 0.3, prompt.prompt_id


def test_packaged_suite_cuts_per_suite_and_in_total() -> None:
    suite = PackagedSuite("smoke", list(SHIPPED), VERSION, per_suite=2)
    assert isinstance(suite, TaskSuite)
    prompts = suite.prompts()
    assert [prompt.prompt_id for prompt in prompts[:4]] == ["chat/0", "chat/1", "code/0", "code/1"]
    assert len(prompts) == 14
    assert any(len(prompt.turns) == 2 for prompt in prompts), "smoke must exercise a follow-up turn"
    assert PackagedSuite("smoke", list(SHIPPED), VERSION, per_suite=2, limit=3).prompts() == prompts[:3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suites": []}, r"task\.suites=\[\]"),
        ({"suites": "chat"}, r"task\.suites=chat"),
        ({"suites": ["chat", "poems"]}, r"task\.suites=poems: must be one of chat, code"),
        ({"suites": ["qa", "qa"]}, "must not name a suite twice"),
        ({"suites": ["qa"], "limit": 0}, r"task\.limit=0"),
        ({"suites": ["qa"], "per_suite": -2}, r"task\.per_suite=-2"),
    ],
)
def test_packaged_suite_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackagedSuite(name="x", version="1", **settings)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_jsonl_file_is_one_task_named_after_it(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", {"turns": ["a", "b"]}, {"turns": ["c"]})
    suite = JsonlSuite(str(file))
    assert isinstance(suite, TaskSuite)
    assert (suite.name, suite.version) == ("mine", "1")
    assert suite.prompts() == [Prompt("mine/0", "mine", "mine", ("a", "b")), Prompt("mine/1", "mine", "mine", ("c",))]
    assert JsonlSuite(file, first_turn_only=True, limit=1, name="t").prompts() == [Prompt("t/0", "t", "t", ("a",))]


def test_jsonl_folder_reads_each_file_as_a_task(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", {"turns": ["x"]}, {"turns": ["y"]}, {"turns": ["z"]})
    write(tmp_path / "a.jsonl", {"question_id": 5, "category": "c", "turns": ["q"]})
    write(tmp_path / "._a.jsonl", "not ours")
    (tmp_path / "notes.txt").write_text("ignored")
    ids = [prompt.prompt_id for prompt in JsonlSuite(tmp_path, name="both").prompts()]
    assert ids == ["a/5", "b/0", "b/1", "b/2"]
    assert [p.prompt_id for p in JsonlSuite(tmp_path, cap=2).prompts()] == ["a/5", "b/0", "b/1"]
    assert [p.prompt_id for p in JsonlSuite(tmp_path, limit=2).prompts()] == ["a/5", "b/0"]


def test_jsonl_selection_keeps_the_index_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "gsm8k.jsonl", *({"turns": [f"q{index}"]} for index in range(1319)))
    prompts = JsonlSuite(file, cap=500, select_seed=980406).prompts()
    assert [prompt.prompt_id for prompt in prompts[:3]] == ["gsm8k/435", "gsm8k/902", "gsm8k/303"]
    assert prompts[0].turns == ("q435",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": None}, r"task\.path=None: must be a JSONL file or a folder"),
        ({"path": " "}, r"task\.path="),
        ({"path": "x.jsonl", "format": "csv"}, r"task\.format=csv"),
        ({"path": "x.jsonl", "limit": 0}, r"task\.limit=0"),
        ({"path": "x.jsonl", "limit": True}, r"task\.limit=True"),
        ({"path": "x.jsonl", "cap": "5"}, r"task\.cap=5"),
    ],
)
def test_jsonl_suite_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JsonlSuite(**settings)


def test_jsonl_suite_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task\.path=.*none\.jsonl: No such file"):
        JsonlSuite(tmp_path / "none.jsonl").prompts()
    with pytest.raises(ValueError, match=r"no \*\.jsonl file in this folder"):
        JsonlSuite(tmp_path).prompts()
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl: the file is empty"):
        JsonlSuite(tmp_path).prompts()


def test_every_reference_file_is_read_whole(data_folder: Path) -> None:
    files = sorted(data_folder.glob("*/*.jsonl"))
    assert files
    for file in files:
        prompts = JsonlSuite(file).prompts()
        assert len(prompts) == file.read_bytes().count(b"\n"), file.name
        assert all(prompt.turns and prompt.task == file.stem for prompt in prompts)
    folder = JsonlSuite(data_folder / "deepspec", cap=3).prompts()
    assert len(folder) == 3 * len(list((data_folder / "deepspec").glob("*.jsonl")))


def test_spec_bench_keeps_its_ids_and_categories(data_folder: Path) -> None:
    prompts = JsonlSuite(data_folder / "specbench" / "question.jsonl", name="specbench").prompts()
    assert len(prompts) == 480
    assert prompts[0].prompt_id == "specbench/81"
    assert {"writing", "translation", "summarization", "qa", "math_reasoning", "rag"} <= {p.category for p in prompts}


def test_every_task_yaml_builds(conf_task: Path) -> None:
    files = sorted(conf_task.glob("*.yaml"))
    assert {file.stem for file in files} >= {*SHIPPED, "all", "smoke", "jsonl"}
    for file in files:
        config = OmegaConf.load(file)
        assert {"_target_", "name", "version", "limit"} <= set(config), file.name
        if file.stem == "jsonl":
            config.path = "x.jsonl"
        suite = instantiate(config, _convert_="all")
        assert isinstance(suite, TaskSuite), file.name
        assert suite.name
        assert suite.version
        text = file.read_text(encoding="utf-8")
        assert text.count("\n") <= 40
        if isinstance(suite, PackagedSuite):
            assert suite.version == VERSION, file.name
            assert len(suite.prompts()) == int(next(n for n in re.findall(r"(\d+)(?: prompts| in all)", text)))


def test_packaged_files_are_read_by_the_jsonl_suite_alike() -> None:
    folder = importlib.resources.files("dispark.tasks") / "prompts"
    for suite in SHIPPED:
        rows = parse_rows((folder / f"{suite}.jsonl").read_bytes().split(b"\n"), suite)
        assert [row.row_id for row in rows] == [prompt.prompt_id for prompt in shipped(suite)]

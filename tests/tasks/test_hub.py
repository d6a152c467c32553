"""The paper's nine tasks: from local files, from dataset rows rebuilt out of them, and without any network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from dispark.tasks import hub
from dispark.tasks.hub import HubSuite
from dispark.tasks.rows import parse_rows, read_lines
from dispark.tasks.templates import ColumnTemplate, TurnsTemplate

CAPS = {
    "gsm8k": 500,
    "math500": 500,
    "aime25": 30,
    "humaneval": 164,
    "mbpp": 256,
    "livecodebench": 500,
    "mt-bench": 80,
    "alpaca": 500,
    "arena-hard-v2": 500,
}
FIRST = {"gsm8k": 435, "mbpp": 94, "livecodebench": 14, "arena-hard-v2": 228}


def paper(conf_task: Path, name: str, **settings: Any) -> HubSuite:
    config = OmegaConf.load(conf_task / f"paper_{name.replace('-', '_')}.yaml")
    suite = instantiate(OmegaConf.merge(config, settings), _convert_="all")
    assert isinstance(suite, HubSuite)
    return suite


def make(**settings: Any) -> HubSuite:
    base: dict[str, Any] = {
        "name": "t",
        "version": "1",
        "repo_id": "owner/data",
        "revision": "0" * 40,
        "template": ColumnTemplate("text"),
    }
    return HubSuite(**(base | settings))


def reference_file(data_folder: Path, name: str) -> Path:
    file = data_folder / "deepspec" / f"{name}.jsonl"
    if not file.is_file():
        pytest.skip(f"no {file.name} in the reference data")
    return file


def cut(text: str, start: str, end: str) -> str:
    assert text.startswith(start)
    assert text.endswith(end)
    return text[len(start) : len(text) - len(end)]


def columns(name: str, turns: tuple[str, ...]) -> dict[str, Any]:
    """Undoes a task's prompt format, as the dataset's row must have looked."""
    text = turns[0]
    if name in ("gsm8k", "math500", "aime25"):
        suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
        assert len(suffix) == 71
        return {"question" if name == "gsm8k" else "problem": cut(text, "", suffix)}
    if name == "humaneval":
        head = text[: text.index("```python\n")]
        assert len(head) == 82
        return {"prompt": cut(text, head + "```python\n", "\n```")}
    if name == "livecodebench":
        start = text.index("### Question:\n") + len("### Question:\n")
        question, _, tail = text[start:].rpartition("\n\n### Format: ")
        code = tail.split("```python\n", 1)[1].rsplit("\n```\n\n### Answer:", 1)[0]
        return {"question_content": question, "starter_code": "" if code == "# YOUR CODE HERE" else code}
    return {"prompt": list(turns) if name == "mt-bench" else text}


def test_there_is_one_yaml_for_each_paper_task(conf_task: Path) -> None:
    assert {file.stem for file in conf_task.glob("paper_*.yaml")} == {
        f"paper_{name.replace('-', '_')}" for name in CAPS
    }


@pytest.mark.parametrize("name", CAPS)
def test_paper_task_follows_the_protocol(conf_task: Path, name: str) -> None:
    suite = paper(conf_task, name)
    assert (suite.name, suite.cap, suite.select_seed) == (name, CAPS[name], 980406)
    assert suite.first_turn_only
    assert suite.is_pinned
    assert suite.source == "hub"
    assert suite.limit is None
    assert (suite.content_sha256 is None) == (name == "alpaca")


@pytest.mark.parametrize("name", [name for name in CAPS if name != "alpaca"])
def test_paper_task_from_a_local_folder(conf_task: Path, data_folder: Path, name: str) -> None:
    file = reference_file(data_folder, name)
    prompts = paper(conf_task, name, source="jsonl", path=str(file.parent)).prompts()
    assert len(prompts) == CAPS[name]
    assert all(len(prompt.turns) == 1 and prompt.task == prompt.category == name for prompt in prompts)
    assert prompts[0].prompt_id == f"{name}/{FIRST.get(name, 0)}"
    rows = parse_rows(read_lines(file), name)
    assert prompts[0].turns == rows[FIRST.get(name, 0)].turns[:1]
    assert paper(conf_task, name, source="jsonl", path=str(file), limit=2).prompts() == prompts[:2]


@pytest.mark.parametrize("name", [name for name in CAPS if name != "alpaca"])
def test_template_rebuilds_the_reference_file(
    conf_task: Path, data_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that the file must have been made of go through the task's template and must hash to the reference."""
    rows = [columns(name, row.turns) for row in parse_rows(read_lines(reference_file(data_folder, name)), name)]
    monkeypatch.setattr(hub, "load_hub_rows", lambda *_: iter(rows))
    prompts = paper(conf_task, name).prompts()
    local = paper(conf_task, name, source="jsonl", path=str(data_folder / "deepspec")).prompts()
    assert prompts == local


def test_other_prompts_than_the_reference_are_refused_unless_asked_for(conf_task: Path, tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"turns": ["What is 1 + 1?"]}) + "\n")
    with pytest.raises(ValueError, match=r"task\.content_sha256=63330a20a17f416f: the 1 prompts read hash to"):
        paper(conf_task, "gsm8k", source="jsonl", path=str(tmp_path)).prompts()
    suite = paper(conf_task, "gsm8k", source="jsonl", path=str(tmp_path), content_sha256=None)
    assert [prompt.prompt_id for prompt in suite.prompts()] == ["gsm8k/0"]


def test_a_folder_without_the_tasks_file_names_it(conf_task: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"task\.path=.*math500\.jsonl: No such file"):
        paper(conf_task, "math500", source="jsonl", path=str(tmp_path)).prompts()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "s3"}, r"task\.source=s3: must be one of hub, jsonl"),
        ({"source": "jsonl"}, r"task\.path=None: task\.source=jsonl needs a file"),
        ({"path": "x.jsonl"}, r"task\.path=x\.jsonl: is only read with task\.source=jsonl"),
        ({"revision": ""}, r"task\.revision=: must be a commit hash of owner/data"),
        ({"revision": None}, r"task\.revision=None"),
        ({"content_sha256": "xyz"}, r"task\.content_sha256=xyz: must be 8 to 64 hex digits"),
        ({"cap": 0}, r"task\.cap=0"),
        ({"limit": -1}, r"task\.limit=-1"),
        ({"template": "foo"}, r"task\.template=foo: must be a node with a _target_"),
    ],
)
def test_hub_suite_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_hub_rows_are_checked_and_selected(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Any] = []

    def rows(*arguments: Any) -> Iterator[Mapping[str, Any]]:
        asked.append(arguments)
        yield from ({"text": ["a", "b"]}, {"text": ["c"]})

    monkeypatch.setattr(hub, "load_hub_rows", rows)
    suite = make(
        template=TurnsTemplate("text"), split="test", config_name="main", first_turn_only=False, revision="main"
    )
    assert [(prompt.prompt_id, prompt.turns) for prompt in suite.prompts()] == [("t/0", ("a", "b")), ("t/1", ("c",))]
    assert asked == [("owner/data", "main", "main", "test", None)]
    assert "owner/data@main is not pinned" in caplog.text
    monkeypatch.setattr(hub, "load_hub_rows", lambda *_: iter([{"text": " "}]))
    with pytest.raises(ValueError, match=r"owner/data@0{40} row 0: turn 1 is blank"):
        make().prompts()
    monkeypatch.setattr(hub, "load_hub_rows", lambda *_: iter([]))
    with pytest.raises(ValueError, match="no rows in split train"):
        make().prompts()


def test_files_of_a_repository_are_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, texts in (("a.jsonl", ["x\u2028y"]), ("b.jsonl", ["z", "w"])):
        data = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        (tmp_path / name).write_text(data, encoding="utf-8")
    monkeypatch.setattr(hub, "_download", lambda repo, revision, file: tmp_path / file)
    assert [prompt.turns[0] for prompt in make(files=["b.jsonl", "a.jsonl"]).prompts()] == ["z", "w", "x\u2028y"]


def test_split_is_loaded_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: dict[str, Any] = {}

    def load_dataset(path: str, name: str | None, **settings: Any) -> list[dict[str, str]]:
        asked.update(settings, path=path, name=name)
        return [{"text": "a"}]

    monkeypatch.setattr(hub, "_reach_hub", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert make(split="test", config_name="main").prompts()[0].turns == ("a",)
    assert asked == {"path": "owner/data", "name": "main", "split": "test", "revision": "0" * 40}

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("BuilderConfig 'x' not found.\nAvailable: ['main']")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"task\.repo_id=owner/data .*BuilderConfig 'x' not found\.\)") as caught:
        make().prompts()
    assert "\n" not in str(caught.value)


def test_offline_mode_reads_the_cache_or_says_so_at_once(conf_task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for name in ("mbpp", "arena-hard-v2"):
        suite = paper(conf_task, name, repo_id="dispark-test/not-cached")
        with pytest.raises(ValueError, match=r"task\.repo_id=dispark-test/not-cached .*not available") as caught:
            suite.prompts()
        assert "\n" not in str(caught.value)


def test_an_unreachable_hub_gives_one_line_within_seconds(conf_task: Path, tmp_path: Path) -> None:
    """Port 9 of this host stands for a Hub that does not answer; the client alone would retry for 24 s."""
    code = (
        "import sys, time, datasets\n"
        "from hydra.utils import instantiate\n"
        "from omegaconf import OmegaConf\n"
        "for file in sys.argv[1:]:\n"
        "    suite = instantiate(OmegaConf.load(file), _convert_='all')\n"
        "    start = time.monotonic()\n"
        "    try: suite.prompts()\n"
        "    except ValueError as error: print(time.monotonic() - start, error)\n"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [
        sys.executable,
        "-c",
        code,
        *(str(conf_task / f"paper_{task}.yaml") for task in ("mbpp", "arena_hard_v2")),
    ]
    done = subprocess.run(command, env=env, cwd=conf_task.parents[1], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        seconds, _, message = line.partition(" ")
        assert float(seconds) < 10
        assert message.startswith("task.repo_id=")
        assert "not available" in message
        assert "task.source=jsonl" in message

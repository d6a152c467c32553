"""Where conversations start: stable ids, fixed orders, and what a Hub dataset's rows become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dispark.training import seeds as module
from dispark.training.data import evaluation_prompts
from dispark.training.rows import RowWriter, TrainingRow
from dispark.training.seeds import (
    HubSource,
    JsonlSource,
    MixedSource,
    RowsSource,
    SelfSource,
    TemplateSource,
    first_user_turn,
)

PIN = "a" * 40
ROWS = [
    {"conversations": [{"from": "human", "value": " Hello? "}, {"from": "gpt", "value": "Hi."}]},
    {"conversations": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]},
    {"conversations": [{"from": "gpt", "value": "I start."}]},
    {"conversations": []},
    {"conversations": [{"role": "user", "content": "   "}]},
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def rows(*arguments: Any) -> Iterator[Mapping[str, Any]]:
        asked.append(arguments)
        return iter(ROWS)

    monkeypatch.setattr(module, "load_hub_rows", rows)
    return asked


def test_first_user_turns_of_a_hub_dataset(hub: list[tuple[Any, ...]]) -> None:
    found = HubSource("owner/data", PIN, kind="mix").seeds(0)
    assert {(seed.row_id, seed.text) for seed in found} == {("hub/0", "Hello?"), ("hub/1", "Why?")}
    assert {seed.kind for seed in found} == {"mix"}
    assert hub == [("owner/data", PIN, None, "train", None)]
    assert len(HubSource("owner/data", PIN, limit=1).seeds(0)) == 1


def test_a_branch_is_said_to_move(hub: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture) -> None:
    HubSource("owner/data", "main").seeds(0)
    assert "is not pinned" in caplog.text


def test_hub_mistakes(hub: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"prompts.column=messages: owner/data has conversations"):
        HubSource("owner/data", PIN, column="messages").seeds(0)
    with pytest.raises(ValueError, match=r"prompts.limit=0"):
        HubSource("owner/data", PIN, limit=0)
    monkeypatch.setattr(module, "load_hub_rows", lambda *_: iter(ROWS[2:]))
    with pytest.raises(ValueError, match="has no conversation that starts with a user's turn"):
        HubSource("owner/data", PIN).seeds(0)


@pytest.mark.parametrize("value", [None, "text", [3], [{"role": "user", "content": 4}], [{"role": "assistant"}]])
def test_what_is_no_conversation(value: Any) -> None:
    assert first_user_turn(value) is None


def test_more_of_a_kind_holds_the_fewer() -> None:
    few, many = (TemplateSource({"math": num, "chat": 2}).seeds(0) for num in (5, 9))
    assert {(s.row_id, s.text) for s in few} <= {(s.row_id, s.text) for s in many}


def test_a_mixture_has_all_of_its_sources_everywhere() -> None:
    sources = {"a": TemplateSource({"math": 40}), "b": SelfSource({"code": 40})}
    found = MixedSource(sources).seeds(3)
    assert len(found) == 80
    assert found == MixedSource(sources).seeds(3)
    assert 5 < sum(seed.kind == "math" for seed in found[:40]) < 35


def test_turns_to_be_written_are_about_many_things() -> None:
    found = SelfSource({"code": 200, "math": 100}).seeds(0)
    assert all(seed.text is None for seed in found)
    assert len({seed.steer for seed in found if seed.kind == "code"}) > 60
    assert not any("{" in str(seed.steer) for seed in found)


def test_counts_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prompts.counts.poetry: must be one of chat, code"):
        TemplateSource({"poetry": 3})
    with pytest.raises(ValueError, match=r"prompts.counts.math=-1: must be a whole number >= 0"):
        SelfSource({"math": -1})


def test_complaints_name_the_keys_of_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^prompts.path=/nowhere"):
        JsonlSource("/nowhere").seeds(0)
    with pytest.raises(ValueError, match=r"^prompts.limit=0"):
        JsonlSource("/nowhere", limit=0)
    with pytest.raises(ValueError, match=r"^exclude=/nowhere"):
        evaluation_prompts(["/nowhere"])
    file = tmp_path / "own.jsonl"
    file.write_text('{"turns": ["First?", "Second?"]}\n')
    assert [(seed.kind, seed.text) for seed in JsonlSource(str(file), kind="mine").seeds(0)] == [("mine", "First?")]


def test_rows_that_are_there_are_asked_again(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path, {})
    for number, kind in enumerate(("chat", "code", "math")):
        writer.append(TrainingRow(f"self/{kind}/{number}", kind, f"Turn {number}?", [1, 2], [3], "length"))
    writer.finish({})
    found = RowsSource(str(tmp_path), limit=2).seeds(0)
    assert [(seed.row_id, seed.kind, seed.text) for seed in found] == [
        ("self/chat/0", "chat", "Turn 0?"),
        ("self/code/1", "code", "Turn 1?"),
    ]
    assert len(RowsSource(str(tmp_path)).seeds(0)) == 3
    with pytest.raises(ValueError, match=r"^prompts.path=/nowhere: has no data.parquet"):
        RowsSource("/nowhere").seeds(0)
    with pytest.raises(ValueError, match=r"^prompts.limit=0"):
        RowsSource("/nowhere", limit=0)

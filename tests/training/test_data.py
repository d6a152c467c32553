"""`dispark data` on the tiny target, end to end: rows, resumption, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module

import dispark.config
from dispark.targets.tokenizer import ByteTokenizer
from dispark.training.data import Synthesis, run_data
from dispark.training.rows import read_rows
from dispark.training.synthesis import user_header

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    dispark.config.make_conf_importable()

    def go(*overrides: str) -> dict[str, Any]:
        words = ["target=tiny", "target.device=cpu", "max_new_tokens=12", "batch_size=4", "part=3", f"out={tmp_path}/d"]
        words += [
            "prompts=templates",
            "prompts.counts={code: 4, math: 3, chat: 2, qa: 0, translation: 0, summarization: 0}",
        ]
        with initialize_config_module("dispark.conf", version_base="1.3"):
            return run_data(compose("data", overrides=[*words, *overrides]))

    return go


def test_every_template_is_answered(run: Run, tmp_path: Path) -> None:
    meta = run()
    rows = list(read_rows(tmp_path / "d"))
    assert meta["num_rows"] == len(rows)
    assert meta["num_rows"] + sum(meta["refused"].values()) == meta["num_seeds"] == 9
    tokenizer = ByteTokenizer()
    for row in rows:
        assert row.prompt_ids == tokenizer.render([{"role": "user", "content": row.prompt}])
        assert 1 <= len(row.output_ids) <= 12
        assert (row.output_ids[-1] == tokenizer.eos_id) == (row.finish_reason == "stop")
    assert run() == meta  # nothing is left to do


def test_a_stopped_run_goes_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispark.training.rows import RowWriter

    whole = run(f"out={tmp_path}/whole")
    append, count = RowWriter.append, [0]

    def stop_after_five(self: RowWriter, row: Any) -> None:
        append(self, row)
        count[0] += 1
        if count[0] == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(RowWriter, "append", stop_after_five)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(RowWriter, "append", append)
    again = run()
    # In float32 the batch around a request does not change its text, so even the fingerprint is the same.
    assert again["fingerprint"] == whole["fingerprint"]


def test_a_run_that_ran_out_of_time_is_whole_and_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = [0]

    def is_over(self: Synthesis) -> bool:
        count[0] += 1
        return count[0] > 5

    with monkeypatch.context() as patched:
        patched.setattr(Synthesis, "_is_over", is_over)
        first = run("minutes=10")
    assert 1 <= first["num_rows"] < 9
    assert len(list(read_rows(tmp_path / "d"))) == first["num_rows"]
    assert run()["fingerprint"] == run(f"out={tmp_path}/whole")["fingerprint"]
    with pytest.raises(ValueError, match=r"minutes=0(\.0)?: must be above 0, or null"):
        run("minutes=0")


def test_more_of_the_same_is_another_data_set(run: Run) -> None:
    run()
    with pytest.raises(ValueError, match="made with other settings"):
        run("seed=1")


def test_excluded_prompts_are_left_out(run: Run, tmp_path: Path) -> None:
    from dispark.training.prompts import template_prompts

    file = tmp_path / "suite.jsonl"
    import json

    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in template_prompts("math", 3, 0)))
    meta = run(f"exclude=[{file}]")
    assert meta["refused"]["evaluation"] >= 3
    assert "math" not in meta["num_by_kind"]


def test_other_prompts_to_keep_out_are_another_data_set(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt_id": "a", "turns": ["one"]}\n')
    run(f"exclude=[{path}]")
    path.write_text('{"prompt_id": "a", "turns": ["one"]}\n{"prompt_id": "b", "turns": ["two"]}\n')
    with pytest.raises(ValueError, match="holds rows that were made with other settings"):
        run(f"exclude=[{path}]")


def test_an_answer_ends_with_a_stop_string(run: Run, tmp_path: Path) -> None:
    run(f"out={tmp_path}/whole")
    tokenizer = ByteTokenizer()
    texts = {row.row_id: tokenizer.decode(row.output_ids) for row in read_rows(tmp_path / "whole")}
    stop = next(match.group() for match in map(re.compile(r"[A-Za-z0-9]").search, texts.values()) if match)
    run(f"target.stop_strings=['{stop}']")
    for row in read_rows(tmp_path / "d"):
        whole = texts[row.row_id]
        end = whole.find(stop) + 1 or len(whole)
        assert tokenizer.decode(row.output_ids) == whole[:end]
        assert (row.finish_reason == "stop_string") == (stop in whole)


def test_turns_that_the_target_writes_are_judged(run: Run) -> None:
    # A random model over bytes writes noise, which the filter has to refuse: no row is left.
    with pytest.raises(ValueError, match="no row was made"):
        run(
            "prompts=self",
            "prompts.counts={code: 4, math: 2, chat: 0, qa: 0, translation: 0, summarization: 0}",
            "max_turn_tokens=20",
        )


def test_the_user_header_is_what_all_user_turns_share() -> None:
    tokenizer = ByteTokenizer()
    header = user_header(tokenizer, None)
    assert tokenizer.render([{"role": "user", "content": "abc"}])[: len(header)] == header
    assert header == tokenizer.render([{"role": "user", "content": "q"}])[: len(header)]
    longer = user_header(tokenizer, "Be brief.")
    assert tokenizer.decode(longer).startswith("Be brief.")

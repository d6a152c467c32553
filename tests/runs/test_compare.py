"""Comparisons of stored runs: rows, macro rows, ratios, refusals, and the files that the command writes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from runs.toolbox import write_run

from dispark.measure.stats import geometric_mean
from dispark.runs.compare import compare, compare_arms, find_runs, load_runs, render, run_compare
from dispark.runs.store import RunStore


def rows_of(frame: pd.DataFrame) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["drafter"], row["task"]): row for row in frame.to_dict("records")}  # type: ignore[misc]


def test_one_row_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram")
    frame = compare(load_runs([tmp_path]))
    assert len(frame) == 1
    row = frame.to_dict("records")[0]
    assert row["target"] == "toy"
    assert row["sampling"] == "greedy"
    assert row["dtype"] == "float32"
    assert row["matl"] == 2.0
    assert row["matl_ci"] == [2.0, 2.0]
    assert row["speedup"] == pytest.approx(2.0, rel=0.02)
    assert row["speedup_ci"][0] < row["speedup"] < row["speedup_ci"][1]
    assert row["is_speedup_distinguishable"] is True
    assert row["speedup_vs_generate"] is None
    assert row["joules_per_token"] is None
    assert row["energy_reason"] == "no sensor here"
    assert row["losslessness"] == "identical"
    assert row["degenerate_share"] == 0.25
    assert row["peak_memory_bytes"] == 3 * 2**29
    assert row["memory_scope"] == "host"


def test_an_autoregressive_run_has_a_row_without_a_speedup(tmp_path: Path) -> None:
    write_run(tmp_path, "none")
    row = compare(load_runs([tmp_path])).to_dict("records")[0]
    assert row["matl"] == 1.0
    assert row["throughput_tokens_per_s"] == pytest.approx(10.0)
    assert row["speedup"] is None


def test_a_run_without_rounds_has_no_matl(tmp_path: Path) -> None:
    """One new token an answer: it came with the prompt."""
    path = write_run(tmp_path, "ngram")
    write_run(tmp_path, "none")
    pd.DataFrame().to_parquet(path / "rounds.parquet")
    frame = compare(load_runs([tmp_path]))
    assert rows_of(frame)["ngram", "chat"]["matl"] is None
    assert rows_of(frame)["none", "chat"]["matl"] == 1.0
    assert "ngram" in render(frame)


def test_arms_of_one_run_are_rows_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram", factor=2.0)
    run = load_runs([tmp_path])[0]
    outside = run.requests.query("arm == 'none'").assign(arm="transformers.generate", prefill_s=None, decode_s=None)
    run.requests = pd.concat([outside.assign(latency_s=2.0), run.requests])
    assert run.arms == ["none", "ngram", "transformers.generate"]
    frame = compare_arms(run)
    assert list(frame["drafter"]) == run.arms
    assert frame["matl"].tolist() == [1.0, 2.0, None]
    assert frame["speedup"].isna().tolist() == [True, False, False]
    assert frame["speedup_vs_generate"].notna().tolist() == [True, True, False]
    text = render(frame)
    assert "vs generate" in text
    assert "(a) no J/token: no sensor here" in text


def test_macro_rows_are_geometric_for_speedups_and_plain_for_matl(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram", "chat", matl=2, factor=1.5)
    write_run(tmp_path, "ngram", "code", matl=6, factor=6.0)
    write_run(tmp_path, "other", "chat", factor=1.2)
    frame = compare(load_runs([tmp_path]))
    rows = rows_of(frame)
    assert list(frame["is_macro"]) == [False, False, False, True]
    macro = rows["ngram", "macro of 2 tasks"]
    chat, code = rows["ngram", "chat"]["speedup"], rows["ngram", "code"]["speedup"]
    assert macro["speedup"] == pytest.approx(geometric_mean([chat, code]))
    assert macro["speedup"] < (chat + code) / 2
    assert macro["matl"] == pytest.approx((rows["ngram", "chat"]["matl"] + rows["ngram", "code"]["matl"]) / 2)
    assert macro["throughput_tokens_per_s"] is None
    assert ("other", "macro of 1 tasks") not in rows


def test_macro_rows_have_intervals_that_redraw_prompts_within_tasks(tmp_path: Path) -> None:
    for task in ("chat", "code"):
        write_run(tmp_path, "ngram", task, matl=2, factor=1.5)
        write_run(tmp_path, "eagle", task, matl=6, factor=3.0)
        write_run(tmp_path, "dud", task, matl=2, factor=1.5)
    frame = compare(load_runs([tmp_path]), baseline="ngram")
    rows = rows_of(frame)
    macro, chat, code = (rows["eagle", task] for task in ("macro of 2 tasks", "chat", "code"))
    for key in ("matl", "speedup", "decode_speedup", "speedup_ratio", "throughput_ratio", "matl_ratio"):
        low, high = macro[f"{key}_ci"]
        assert low <= macro[key] <= high
    # The mean of two tasks is known better than either alone.
    widths = [row["speedup_ci"][1] - row["speedup_ci"][0] for row in (macro, chat, code)]
    assert widths[0] < 0.85 * min(widths[1:])
    assert macro["is_speedup_ratio_distinguishable"] is True
    assert macro["is_matl_ratio_distinguishable"] is True
    dud = rows["dud", "macro of 2 tasks"]
    assert dud["matl_ratio"] == 1.0
    assert dud["matl_ratio_ci"] == [1.0, 1.0]
    assert dud["is_matl_ratio_distinguishable"] is False
    assert macro["speedup_vs_generate"] is None
    assert macro["speedup_vs_generate_ci"] is None
    baseline = rows["ngram", "macro of 2 tasks"]
    assert baseline["matl_ratio"] is None
    assert baseline["matl_ratio_ci"] is None
    assert "macro of 2 tasks" in render(frame)


def test_runs_of_another_seed_count_their_task_once_in_the_macro_row(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "ngram", "chat", factor=1.0)
    write_run(tmp_path / "b", "ngram", "chat", factor=4.0)
    write_run(tmp_path / "a", "ngram", "code", factor=2.0)
    macro = compare(load_runs([tmp_path])).to_dict("records")[-1]
    assert macro["task"] == "macro of 2 tasks"
    assert macro["speedup"] == pytest.approx(2.0, rel=0.03)
    assert macro["speedup_ci"] is None  # the same prompts twice


def test_a_macro_speedup_is_missing_where_one_of_its_tasks_has_none(tmp_path: Path) -> None:
    write_run(tmp_path, "none", "chat")
    write_run(tmp_path, "none", "code")
    macro = compare(load_runs([tmp_path])).to_dict("records")[-1]
    assert macro["is_macro"]
    assert macro["speedup"] is None
    assert macro["matl"] == 1.0


def test_ratios_against_a_drafter_are_paired_by_task(tmp_path: Path) -> None:
    for task in ("chat", "code"):
        write_run(tmp_path, "ngram", task, matl=2, factor=1.5)
        write_run(tmp_path, "eagle", task, matl=6, factor=3.0, slow=2.0)
    frame = compare(load_runs([tmp_path]), baseline="ngram")
    rows = rows_of(frame)
    row = rows["eagle", "chat"]
    assert row["baseline"] == "ngram"
    # Twice the speed-up, but on a machine at half speed: the tokens/s are the same.
    assert row["speedup_ratio"] == pytest.approx(2.0)
    assert row["is_speedup_ratio_distinguishable"] is True
    assert row["throughput_ratio"] == pytest.approx(1.0)
    assert row["is_throughput_ratio_distinguishable"] is False
    assert row["matl_ratio"] == pytest.approx(row["matl"] / rows["ngram", "chat"]["matl"])
    assert rows["ngram", "chat"]["speedup_ratio"] is None
    assert rows["ngram", "chat"]["speedup_ratio_reason"] == "this is the baseline"
    assert rows["eagle", "macro of 2 tasks"]["speedup_ratio"] == pytest.approx(2.0)


def test_a_baseline_may_be_a_run_its_key_or_its_folder(tmp_path: Path) -> None:
    path = write_run(tmp_path, "ngram", factor=1.5)
    write_run(tmp_path, "eagle", factor=3.0)
    write_run(tmp_path, "eagle", "code", factor=3.0)
    runs = load_runs([tmp_path])
    ngram = next(run for run in runs if run.arm == "ngram")
    for baseline in (ngram, ngram.run["key"], path.name, str(path)):
        rows = rows_of(compare(runs, baseline=baseline))
        assert rows["eagle", "chat"]["speedup_ratio"] == pytest.approx(2.0)
        assert rows["eagle", "code"]["speedup_ratio"] is None
        assert rows["eagle", "code"]["speedup_ratio_reason"] == "the baseline did not run this task"


def test_an_unknown_baseline_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram")
    with pytest.raises(ValueError, match=r"baseline=medusa: not among the runs; allowed: .*ngram"):
        compare(load_runs([tmp_path]), baseline="medusa")


def test_an_autoregressive_baseline_has_rates_but_no_speedup_to_compare(tmp_path: Path) -> None:
    write_run(tmp_path, "none")
    write_run(tmp_path, "ngram", factor=2.0)
    row = rows_of(compare(load_runs([tmp_path]), baseline="none"))["ngram", "chat"]
    assert row["throughput_ratio"] == pytest.approx(2.0, rel=0.02)
    assert row["matl_ratio"] == pytest.approx(2.0)
    assert row["speedup_ratio"] is None
    assert row["speedup_ratio_reason"] == "one of the runs has no speed-up"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"fingerprint": "cc33"}, "prompts"),
        ({"fingerprint": None}, "prompts"),
        ({"provenance": {"extra": {"weights_sha256": "w2"}}}, "target weights"),
        ({"provenance": {}}, "target weights"),
    ],
)
def test_runs_that_say_nothing_about_each_other_are_refused_unless_forced(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    write_run(tmp_path, "ngram")
    write_run(tmp_path, "eagle", **changes)
    runs = load_runs([tmp_path])
    with pytest.raises(ValueError, match=rf"target toy, task chat: {what} .*force=true") as error:
        compare(runs)
    assert "\n" not in str(error.value)
    frame = compare(runs, force=True)
    assert len(frame) == 2
    assert any(what in note for note in frame.attrs["notes"])


def test_other_tasks_and_other_targets_may_differ(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram", "chat")
    write_run(tmp_path, "ngram", "code")
    write_run(tmp_path / "b", "ngram", "chat", target={"name": "bigger"}, fingerprint="dd44")
    frame = compare(load_runs([tmp_path]))
    assert set(frame["target"]) == {"toy", "bigger"}


def test_a_baseline_with_other_prompts_is_refused_unless_forced(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram")
    other = write_run(tmp_path / "b", "eagle", target="bigger", fingerprint="dd44")
    runs = load_runs([tmp_path])
    with pytest.raises(ValueError, match=r"baseline=.*prompts differ .*force=true"):
        compare(runs, baseline=str(other))
    assert compare(runs, baseline=str(other), force=True)["matl_ratio"].notna().any()


def test_differing_settings_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram")
    write_run(tmp_path, "eagle", config={"batch_size": 8, "max_new_tokens": 64})
    notes = compare(load_runs([tmp_path])).attrs["notes"]
    assert notes == ["the runs differ in batch_size: 1, 8"]


def test_unfinished_and_failed_runs_are_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_run(tmp_path, "ngram")
    half = write_run(tmp_path, "eagle", is_done=False)
    broken = RunStore(tmp_path, key="broken", slug="toy/chat/medusa")
    broken.begin({})
    broken.fail(RuntimeError("out of memory"))
    hidden = tmp_path / ".hydra"
    hidden.mkdir()
    (hidden / "config.yaml").write_text("a: 1")
    runs, unfinished = find_runs([tmp_path])
    assert [run.arm for run in runs] == ["ngram"]
    assert unfinished == {str(half): "unfinished", str(broken.path): "failed: RuntimeError: out of memory"}
    with caplog.at_level(logging.WARNING):
        assert len(load_runs([tmp_path])) == 1
    assert "out of memory" in caplog.text


def test_paths_may_be_runs_parents_or_globs_and_count_once(tmp_path: Path) -> None:
    first = write_run(tmp_path, "ngram")
    write_run(tmp_path, "eagle")
    assert len(load_runs([first])) == 1
    assert len(load_runs([str(tmp_path), str(first)])) == 2
    assert len(load_runs([f"{tmp_path}/toy/chat/ngram-*"])) == 1
    assert len(load_runs([f"{tmp_path}/**"])) == 2


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runs=.*nowhere: no such folder"):
        load_runs([tmp_path / "nowhere"])
    write_run(tmp_path, "ngram", is_done=False)
    with pytest.raises(ValueError, match=r"no finished run there \(1 unfinished\)"):
        load_runs([tmp_path])


def test_a_run_without_requests_is_refused_by_name(tmp_path: Path) -> None:
    path = write_run(tmp_path, "ngram")
    (path / "requests.jsonl").write_text("")
    with pytest.raises(ValueError, match=rf"{path.name}: requests.jsonl has no line"):
        compare(load_runs([tmp_path]))


def test_text_shows_shared_settings_intervals_and_notes(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram", factor=2.0)
    write_run(tmp_path, "dud", factor=1.0)
    text = render(compare(load_runs([tmp_path]), baseline="ngram"))
    head, *lines = text.split("\n")
    assert head.startswith("target toy, dtype float32, device cpu, scheduler fixed, verifier greedy, sampling greedy")
    assert lines[0].split()[:4] == ["task", "drafter", "MATL", "tok/s"]
    assert "vs generate" not in lines[0]
    dud = next(line for line in lines if "dud" in line)
    assert "1.00x [" in dud
    assert "n.d." in dud
    assert "- (a)" in dud
    assert "1.50 GiB host" in dud
    assert "n.d.: not distinguishable from 1" in text
    assert "(a) no J/token: no sensor here" in text
    assert "/ baseline: against the run of ngram" in text


def test_settings_that_differ_become_columns(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram")
    write_run(tmp_path, "eagle", sampling={"temperature": 0.7, "top_p": 0.9})
    text = render(compare(load_runs([tmp_path])))
    assert "sampling" in text.split("\n")[1]
    assert "T=0.7 top_p=0.9" in text


def test_csv_is_one_value_a_field_and_reads_back(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram")
    frame = compare(load_runs([tmp_path]))
    (tmp_path / "x.csv").write_text(render(frame, "csv"))
    back = pd.read_csv(tmp_path / "x.csv")
    assert back["speedup"][0] == frame["speedup"][0]
    assert back["speedup_low"][0] == frame["speedup_ci"][0][0]
    assert back["speedup_high"][0] == frame["speedup_ci"][0][1]
    assert pd.isna(back["joules_per_token"][0])


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "ngram")
    with pytest.raises(ValueError, match="format=xlsx: must be one of text, csv, markdown"):
        render(compare(load_runs([tmp_path])), "xlsx")


def test_the_command_prints_writes_and_returns_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs", "ngram")
    write_run(tmp_path / "runs", "eagle", is_done=False)
    csv_file, markdown_file = tmp_path / "out" / "t.csv", tmp_path / "out" / "t.md"
    result = run_compare([str(tmp_path / "runs")], csv=str(csv_file), markdown=str(markdown_file))
    assert "ngram" in capsys.readouterr().out
    assert csv_file.read_text().startswith("run,is_macro,target")
    assert "| --- |" in markdown_file.read_text()
    json.dumps(result, allow_nan=False)
    assert result["num_runs"] == 1
    assert len(result["unfinished"]) == 1
    assert result["rows"][0]["drafter"] == "ngram"
    assert result["rows"][0]["speedup"] == pytest.approx(2.0, rel=0.02)
    assert "speedup_ratio" not in result["rows"][0]


def test_an_unwritable_file_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "ngram")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"csv=.*cannot be written"):
        run_compare([str(tmp_path / "runs")], csv=str(tmp_path / "file" / "t.csv"))


def test_settings_tell_runs_of_one_name_apart(tmp_path: Path) -> None:
    def config(length: int, seed: int) -> dict[str, Any]:
        return {"batch_size": 1, "max_new_tokens": 64, "seed": seed, "drafter": {"draft_length": length}}

    for task in ("chat", "code"):
        for i, (length, seed) in enumerate([(2, 0), (8, 0), (8, 1)]):
            write_run(tmp_path / str(i), "ngram", task, config=config(length, seed), key=f"{task}{i}", matl=2 + i)
    frame = compare(load_runs([tmp_path]))
    runs = frame[~frame.is_macro.astype(bool)]
    assert set(runs.settings) == {"draft_length=2, seed=0", "draft_length=8, seed=0", "draft_length=8, seed=1"}
    macro = frame[frame.is_macro.astype(bool)]
    assert len(macro) == 3  # a macro row never mixes settings
    assert len(set(macro.matl)) == 3
    assert "draft_length=8, seed=1" in render(frame)
    with pytest.raises(
        ValueError, match=r"baseline=ngram: 3 runs go by this name .*; name one by key: chat0, chat1, chat2"
    ):
        compare(load_runs([tmp_path / "*"]), baseline="ngram")


def test_warnings_of_a_run_are_shown_with_it(tmp_path: Path) -> None:
    path, whole = write_run(tmp_path, "ngram"), write_run(tmp_path, "eagle")
    assert compare(load_runs([tmp_path])).attrs["notes"] == []
    lines = (path / "requests.jsonl").read_text().splitlines()
    (path / "requests.jsonl").write_text("\n".join(lines[:-2]) + "\n")
    (note,) = compare(load_runs([tmp_path])).attrs["notes"]
    assert note.startswith(f"{path.name}: rounds emitted ")
    assert whole.name not in note


def test_damaged_runs_are_named(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a", "ngram"), write_run(tmp_path / "b", "eagle")
    (first / "run.json").unlink()
    finished, unfinished = find_runs([tmp_path])
    assert [run.path for run in finished] == [second]
    assert unfinished == {str(first): "damaged: run.json is missing"}
    (second / "requests.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match=r"lines without arm, repeat and request_id; remove the folder, or run with"):
        compare(load_runs([second]))

"""The command on a small target: loads, budgets, cancellations, what is stored and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dispark.cli import main

pytestmark = pytest.mark.usefixtures("clean_logging")

LOOPING = "target.sources.random.config.initializer_range=0.12"
BASE = ["serve", "target=tiny", "target.dtype=float32", LOOPING, "task=smoke", "max_new_tokens=16", "meter=none"]


def serve(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> dict[str, Any]:
    assert main([*BASE, f"out={tmp_path / 'runs'}", *words]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    run: dict[str, Any] = json.loads((Path(line["run"]) / "run.json").read_text(encoding="utf-8"))
    return run | {"path": Path(line["run"])}


def requests_of(run: dict[str, Any]) -> pd.DataFrame:
    lines = (run["path"] / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    return pd.DataFrame([json.loads(line) for line in lines])


def test_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = serve(capsys, tmp_path, "arrivals.concurrency=3", "num_requests=20", "sla.ttft_s=1000")
    arms = run["arms"]
    assert list(arms) == ["none", "ngram"]
    for figures in arms.values():
        assert figures["num_served"] == figures["num_requests"] == 40  # 20 requests, forth and back
        assert figures["throughput_tokens_per_s"] > 0
        assert figures["goodput_share"] == 1.0
        assert figures["mean_rows"] <= 3
        assert figures["ttft_s_p50"] <= figures["ttft_s_p95"] <= figures["latency_s_p99"]
        assert figures["tokens_per_s_p99"] <= figures["tokens_per_s_p50"]
        assert 0 <= figures["kv_paged_fragmentation"] <= figures["kv_reserved_fragmentation"]
        assert figures["kv_reserved_tokens"] <= figures["kv_contiguous_tokens"]
    assert arms["none"]["matl"] == 1.0
    assert arms["none"]["verify_budget"] == 0.0
    assert arms["ngram"]["matl"] > 1.0
    assert arms["ngram"]["ratio_ci"][0] < arms["ngram"]["ratio"] < arms["ngram"]["ratio_ci"][1]
    assert run["losslessness"]["ngram"]["verdict"] == "lossless"
    rounds = pd.read_parquet(run["path"] / "rounds.parquet")
    assert rounds.groupby(["arm", "repeat", "step"]).size().max() == 3
    # The same command finds it done.
    assert serve(capsys, tmp_path, "arrivals.concurrency=3", "num_requests=20", "sla.ttft_s=1000") == run


def test_texts_are_those_of_each_request_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "num_requests=30",
        "min_new_tokens=1",
        "cancel_share=0.3",
        "kv_blocks=150",
        "block_tokens=8",
        "arm=[ngram]",
    ]
    crowd = requests_of(serve(capsys, tmp_path, "arrivals.concurrency=8", *words))
    alone = requests_of(serve(capsys, tmp_path, "arrivals.concurrency=1", *words)).query("repeat == 0")
    texts = dict(zip(alone["request_id"], alone["output_ids"], strict=True))
    assert len(texts) == 30
    assert len(crowd) == 60
    assert {row.finish_reason for row in crowd.itertuples()} >= {"length", "cancelled"}
    for row in crowd.itertuples():
        assert row.output_ids == texts[row.request_id], row.request_id
        assert len(row.output_ids) <= row.max_new_tokens


def test_a_small_budget_makes_requests_wait_and_never_overflows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["arm=[none]", "num_requests=12", "arrivals=poisson", "arrivals.rate=1000", "max_rows=6", "block_tokens=8"]
    free = serve(capsys, tmp_path, *words)
    longest = int(requests_of(free)["num_prompt_tokens"].max())
    blocks = -(-(longest + 16 + 1) // 8)
    tight = serve(capsys, tmp_path, *words, f"kv_blocks={blocks}")
    assert tight["arms"]["none"]["mean_rows"] < free["arms"]["none"]["mean_rows"]
    assert tight["arms"]["none"]["queue_s_p95"] > 0
    rounds = pd.read_parquet(tight["path"] / "rounds.parquet")
    requests = requests_of(tight).set_index(["repeat", "request_id"])
    for (repeat, _), rows in rounds.groupby(["repeat", "step"]):
        known = [requests.loc[(repeat, name)] for name in rows["request_id"]]
        assert sum(-(-(row.num_prompt_tokens + 16 + 1) // 8) for row in known) <= blocks
    # One that can't ever fit fails, and the rest is served.
    poor = serve(capsys, tmp_path, *words, f"kv_blocks={blocks - 1}")
    assert poor["arms"]["none"]["num_failed"] > 0
    assert poor["arms"]["none"]["num_served"] > 0
    errors = requests_of(poor)["error"].dropna()
    assert all("more than all blocks of the budget" in error for error in errors)


def test_a_trace_with_a_burst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"at_s": at, "max_new_tokens": cap} for at, cap in ((0.0, 4), (0.0, 5), (0.0, 6), (0.3, 7))]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    run = serve(capsys, tmp_path, "arm=[none]", "arrivals=trace", f"arrivals.path={path}", "max_rows=2")
    requests = requests_of(run).query("repeat == 0")
    assert requests["max_new_tokens"].tolist() == [4, 5, 6, 7]
    assert requests["arrived_s"].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.3])
    assert run["arms"]["none"]["throughput_ci"] is None
    assert run["arms"]["none"]["makespan_s"] > 0.6  # twice 0.3 s, gap and all


def test_a_scheduler_per_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["arm=[none,dispark_3,dispark_load_adaptive]", "num_requests=8", "arrivals.concurrency=4"]
    run = serve(capsys, tmp_path, *words)
    assert run["arms"]["dispark_3"]["mean_draft_length"] == 3.0
    assert run["arms"]["dispark_load_adaptive"]["mean_draft_length"] < 7.0  # random weights: nothing is accepted
    assert all(verdict["verdict"] == "lossless" for verdict in run["losslessness"].values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["arm=[]"], "arms: must be given"),
        (["arrivals.concurrency=0"], "arrivals.concurrency=0: must be a whole number >= 1"),
        (["arrivals=trace"], "arrivals.path: must be given"),
        (["max_rows=0"], "max_rows=0: must be a whole number >= 1"),
        (["min_new_tokens=99"], "min_new_tokens=99: must be at most max_new_tokens=16"),
        (["cancel_share=1.5"], "cancel_share=1.5: must lie in 0 to 1"),
        (["kv_blocks=0"], "kv_blocks=0: must be a whole number >= 1, or null"),
        (["kv_blocks=1", "block_tokens=1"], "no request could be served: needs room for"),
        (["+sla.speed=3"], "sla.speed: no such key; allowed: ttft_s, tokens_per_s"),
        (["sla.ttft_s=0"], "sla.ttft_s=0: must be a number above 0"),
        (["baseline=eagle"], "baseline=eagle: must be one of the arms: none, ngram"),
    ],
)
def test_bad_settings(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, f"out={tmp_path}", *words]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]

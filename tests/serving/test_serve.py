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


def test_a_float64_target_has_its_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = serve(capsys, tmp_path, "target.dtype=float64", "num_requests=4")
    assert {verdict["verdict"] for verdict in run["losslessness"].values()} == {"lossless"}


def test_sampled_arms_have_verdicts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = serve(capsys, tmp_path, "sampling=t1", "num_requests=4")
    assert {verdict["verdict"] for verdict in run["losslessness"].values()} == {"lossless"}
    assert {figures["losslessness"] for figures in run["arms"].values()} == {"lossless"}
    assert {line["lossless"] for line in run["table"]} == {"lossless"}


def test_every_arm_reserves_room_for_its_own_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = serve(capsys, tmp_path, "num_requests=6", "block_tokens=1", "arrivals.concurrency=1")
    held = {name: figures["kv_reserved_tokens"] for name, figures in run["arms"].items()}
    prompts = requests_of(run).query("arm == 'none' and repeat == 0")
    rounds = pd.read_parquet(run["path"] / "rounds.parquet").query("arm == 'none' and repeat == 0")
    room = prompts.set_index("request_id")["num_prompt_tokens"] + 16 + 1
    assert held["none"] == pytest.approx(room.reindex(rounds["request_id"]).mean())
    assert held["ngram"] > held["none"]


def test_an_oracle_knows_prompts_that_are_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = ["bench", *BASE[1:], "drafter=ngram", f"paths.runs={tmp_path / 'bench'}"]
    assert main(bench) == 0
    path = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]
    lines = map(json.loads, (Path(path) / "requests.jsonl").open(encoding="utf-8"))
    num = len({line["request_id"] for line in lines})
    words = ["arm=[ngram]", "scheduler@arms.ngram.scheduler=oracle"]
    words += [f"arms.ngram.scheduler.path={path}", f"num_requests={num + 3}"]
    run = serve(capsys, tmp_path, *words)
    assert run["arms"]["ngram"]["wasted_verify_share"] == 0.0
    assert main([*BASE, f"out={tmp_path / 'others'}", "warmup=0", "task=chat", "arm=[none,ngram]", *words[1:]]) == 2
    assert "has no request" in capsys.readouterr().err
    assert not list((tmp_path / "others").rglob("requests.jsonl")), "it was refused before a pass"


def test_what_an_arm_lacks_is_said_before_the_first_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["arm=[none,dispark_hardware_aware]", "warmup=0", f"out={tmp_path}", "num_requests=4"]
    profile = f"arms.dispark_hardware_aware.scheduler.profile={tmp_path / 'none.json'}"
    assert main([*BASE, *words, profile]) == 2
    assert "there is no such file; 'dispark profile' measures one" in capsys.readouterr().err
    assert not list(tmp_path.rglob("requests.jsonl"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=-1"], "seed=-1: must lie in 0 .. 2**63 - 1"),
        (["sla.ttft_s=2s"], "sla.ttft_s=2s: must be a number above 0"),
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

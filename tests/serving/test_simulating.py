"""The command: arms on engines, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dispark.cli import main
from dispark.schedulers.profile import Profile, Table

pytestmark = pytest.mark.usefixtures("clean_logging")

BASE = ["simulate", "prompt_tokens=[10,20]", "answer_tokens=[10,30]"]
ARMS = "simulated=[none,mtp_1,dispark_all,dispark_hardware_aware,dispark_hardware_aware_async]"


def simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> dict[str, Any]:
    assert main([*BASE, f"out={tmp_path / 'out'}", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_all_arms_on_a_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, tmp_path, ARMS, "arrivals.concurrency=4")
    assert found["is_simulated"]
    arms = found["arms"]
    assert arms["none"]["matl"] == 1.0
    assert 1.5 < arms["mtp_1"]["matl"] < 2.0
    assert arms["dispark_all"]["matl"] > 3.0
    # Few users on a large device: drafts are nearly free, so DiSpark is the faster the more it verifies.
    assert (
        arms["dispark_all"]["tokens_per_s_p50"] > arms["mtp_1"]["tokens_per_s_p50"] > arms["none"]["tokens_per_s_p50"]
    )
    run = json.loads((Path(found["run"]) / "run.json").read_text(encoding="utf-8"))
    assert run["is_simulated"]
    assert run["arms"]["dispark_all"]["ratio_ci"][0] > 1.0
    assert simulate(capsys, tmp_path, ARMS, "arrivals.concurrency=4") == found


def test_budgets_fall_with_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulated=[dispark_hardware_aware]", "hardware@engine.hardware=a100", "network@engine.network=qwen3_14b"]
    budgets = [
        simulate(capsys, tmp_path, *words, f"arrivals.concurrency={users}")["arms"]["dispark_hardware_aware"][
            "verify_budget"
        ]
        for users in (1, 64, 512)
    ]
    assert budgets[0] > budgets[1] > budgets[2]


def test_this_machine_as_it_was_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify = Table((1, 8), (1, 2, 6), (((1.0,), (1.1,), (1.4,)), ((2.0,), (2.6,), (5.0,))))
    draft = Table((1, 8), (1, 5), (((0.1,), (0.2,)), ((0.2,), (0.5,))))
    path = tmp_path / "p.json"
    Profile({}, 8, verify, {16: (0.5,), 64: (1.5,)}, {"dispark": draft}).save(path)
    words = ["engine=measured", f"engine.path={path}", "simulated=[none,dispark_hardware_aware]"]
    found = simulate(capsys, tmp_path, *words, "arrivals.concurrency=2", "num_requests=12")
    assert found["arms"]["dispark_hardware_aware"]["throughput_tokens_per_s"] > 0
    assert main([*BASE, f"out={tmp_path / 'out'}", *words, "simulated=[mtp_1]"]) == 2
    assert "has no times of drafter mtp, only of: dispark" in capsys.readouterr().err


def test_a_trace_s_own_lengths_size_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 0.0, "max_new_tokens": 400}\n{"at_s": 0.0}\n', encoding="utf-8")
    found = simulate(capsys, tmp_path, "arrivals=trace", f"arrivals.path={path}", "simulated=[none]")
    run = json.loads((Path(found["run"]) / "run.json").read_text(encoding="utf-8"))
    assert run["arms"]["none"]["kv_contiguous_fragmentation"] >= 0
    assert run["arms"]["none"]["kv_contiguous_tokens"] >= 410


@pytest.mark.parametrize("network", ["qwen3_4b", "qwen3_8b", "qwen3_14b", "v4_flash_like", "v4_pro_like"])
@pytest.mark.parametrize("hardware", ["a100", "h100", "h200", "h200_8"])
def test_every_engine_composes(hardware: str, network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"hardware@engine.hardware={hardware}", f"network@engine.network={network}", "arrivals=poisson"]
    found = simulate(capsys, tmp_path, *words, "num_requests=4", "arrivals.rate=100")
    assert found["arms"]["mtp_1"]["throughput_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompt_tokens=[5]"], "prompt_tokens=[5]: must be [low, high] with 1 <= low <= high"),
        (["answer_tokens=[5,2]"], "answer_tokens=[5, 2]: must be [low, high]"),
        (["baseline=none"], "baseline=none: must be one of the arms: mtp_1, dispark_hardware_aware"),
        (["kv_blocks=0"], "kv_blocks=0: must be a whole number >= 1, or null"),
        (["hardware@engine.hardware=h300"], "h300"),
        (["engine.hardware.bandwidth=0"], "bandwidth=0"),
        (["engine.hardware.efficiency=70"], "efficiency=70"),
        (["seed=-1"], "seed=-1: must lie in 0 .. 2**63 - 1"),
        (["arms.mtp_1.drafting.overhead_s=-1"], "drafting.overhead_s=-1"),
        (["arms.dispark_hardware_aware.scheduler.learns=perhaps"], "learns"),
        (["+arms.dispark_hardware_aware.scheduler.luck=1"], "luck"),
    ],
)
def test_bad_settings(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, f"out={tmp_path}", *words]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]

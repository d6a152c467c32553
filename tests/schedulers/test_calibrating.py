"""The command on a small target with random drafters: files, tables, messages, and what bench makes of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dispark.cli import main
from dispark.schedulers import calibration_file
from dispark.schedulers.calibrating import observations
from dispark.serving.acceptance import RecordedAcceptance

pytestmark = pytest.mark.usefixtures("clean_logging")

SHORT = ["target=tiny", "task=smoke", "max_new_tokens=12"]


def calibrate(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["calibrate", *SHORT, *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_what_a_round_says_of_each_position() -> None:
    def line(drafted: int, verified: int, accepted: int) -> dict[str, int]:
        return {"num_drafted": drafted, "num_verified": verified, "num_accepted_raw": accepted}

    # Rejected at the second; cut short by the room; all accepted; nothing drafted.
    lines = [line(3, 3, 1), line(3, 2, 2), line(3, 3, 3), line(0, 0, 0)]
    promised = [np.array([0.9, 0.8, 0.7])] * 3 + [np.zeros(0)]
    found = observations(lines, promised, 4)
    assert found.num_survived_N.tolist() == [1, 2, 3, 0]
    assert found.num_known_N.tolist() == [3, 2, 3, 0]
    assert found.confidence_NG[0].tolist() == [0.9, 0.8, 0.7, 0.0]


def test_all_kinds_of_a_drafter_with_a_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    found = calibrate(capsys, "drafter=dispark", f"out={out}", f"rounds={tmp_path / 'rounds.parquet'}")
    assert set(found["mean_ece"]) == {"head", "peak", "entropy"}
    assert len(found["positions"]) == 3 * 7
    assert {len(curve) for curve in found["reliability"].values()} == {7}
    fits = calibration_file.load(out, "k")
    assert [fit.confidence for fit in fits] == ["head", "peak", "entropy"]
    assert all(fit.fitted_on["num_prompts"] * 2 in (14, 15, 16) for fit in fits)
    recorded = RecordedAcceptance(str(tmp_path / "rounds.parquet"), "peak", draft_length=3)
    promised, accepted = recorded.rounds("a", seed=1).next()
    assert promised.shape == (3,)
    assert 0 <= accepted <= 3
    # Random confidences promise what never comes: the fit has to help on prompts that it has not seen.
    for kind in ("head", "peak", "entropy"):
        assert found["mean_ece"][kind]["ece_after"] <= found["mean_ece"][kind]["ece_before"] + 1e-9


def test_bench_uses_the_file_and_keeps_the_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    calibrate(capsys, "drafter=dispark", "confidences=[head]", "sampling=greedy", f"out={out}")
    words = ["bench", *SHORT, "drafter=dispark", "scheduler=threshold", "scheduler.threshold=0.2", "chunk=16"]
    words += ["target.dtype=float32", "task.limit=4", f"paths.runs={tmp_path / 'runs'}"]

    def verified(*more: str) -> tuple[float, str]:
        assert main([*words, *more]) == 0
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        run = json.loads((Path(line["run"]) / "run.json").read_text(encoding="utf-8"))
        return run["summary"]["mean_verify_length"], line["losslessness"]

    plain, _ = verified()
    calibrated, verdict = verified(f"calibration={out}")
    assert verdict == "lossless"
    assert calibrated < plain  # the random head promises about a half each time, and nothing is ever accepted
    # Another sampling, another drafter: one line each.
    for more, message in (
        (["sampling=t1"], "holds no calibration of head at temperature 1; it has head at temperature 0"),
        (["drafter.random.seed=5"], "was fitted for a drafter of other weights"),
        (["target.sources.random.seed=5"], "was fitted for a target of other weights"),
        (["drafter.confidence=null"], "this drafter gives no confidence"),
    ):
        assert main([*words, f"calibration={out}", *more]) == 2
        assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_the_file_lies_beside_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from conformance.toolbox import open_tiny

    from dispark.drafters.semi_autoregressive import BlockShape, SemiAutoregressiveDrafter

    drafter = SemiAutoregressiveDrafter("random", random=BlockShape(num_layers=1, block_size=3, rank=4))
    drafter.bind(open_tiny(), 1, 64)
    drafter.save(tmp_path / "ckpt")
    words = ["drafter=dispark", f"checkpoint={tmp_path / 'ckpt'}", "confidences=[peak]", "sampling=greedy"]
    assert calibrate(capsys, *words)["out"] == str(tmp_path / "ckpt" / "calibration.json")
    bench = ["bench", *SHORT, "drafter=dispark", f"checkpoint={tmp_path / 'ckpt'}", "drafter.confidence=peak"]
    bench += ["task.limit=1", "scheduler=threshold", f"paths.runs={tmp_path / 'runs'}"]
    assert main([*bench, "calibration=checkpoint"]) == 0
    assert main([*bench, "checkpoint=null", "calibration=checkpoint"]) == 2
    assert "calibration=checkpoint: drafter.checkpoint=random is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drafter=ngram"], "drafter=ngram: gives no confidence, so there is nothing to calibrate"),
        (["drafter=dispark"], "out=null: drafter.checkpoint=random is no folder to put it beside; give out=FILE"),
        (["drafter=eagle3", "confidences=[head]"], "drafter.confidence=head: this drafter has no confidence head"),
        (["confidences=[luck]"], "confidences=[luck]: must be of head, peak, entropy"),
        (["confidences=[]"], "confidences=[]: must name at least one of head, peak, entropy"),
        (["out=."], "out=.: is a folder; must name a file"),
        (["out=c.json", "report=."], "report=.: is a folder; must name a file"),
        (["out=notes.json"], "out=notes.json: notes.json is no calibration of this version"),
        (["out=c.json", "seed=-1"], "seed=-1: must lie in 0 .. 2**63 - 1"),
        (["num_bins=0"], "num_bins=0: must be a whole number >= 1"),
        (["grid_low=2"], "grid_low=2.0, grid_high=5.0: need 0 < grid_low <= 1 <= grid_high"),
        (["task.limit=1", "out=c.json"], "task: has 1 prompts that fit; at least 4 are needed"),
    ],
)
def test_bad_settings(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.json").write_text("{}", encoding="utf-8")
    assert main(["calibrate", *SHORT, *words]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]

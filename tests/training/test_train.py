"""`dispark train` on the tiny target, end to end: every student learns and decodes, runs resume exactly, processes
share the work, and what goes wrong is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from safetensors.torch import load_file

import dispark.config
from dispark.config import build
from dispark.runs.files import read_jsonl
from dispark.targets.spec import load
from dispark.training import blocks, trainer
from dispark.training.attention import BlockCall
from dispark.training.data import run_data
from dispark.training.rows import read_rows
from dispark.training.train import flushed_denormals, run_train

REPO = Path(__file__).resolve().parents[2]
STUDENTS = sorted(path.stem for path in (REPO / "conf" / "student").glob("*.yaml"))

Train = Callable[..., dict[str, Any]]


def composed(command: str, words: list[str]) -> Any:
    dispark.config.make_conf_importable()
    with initialize_config_module("dispark.conf", version_base="1.3"):
        return compose(command, overrides=["target=tiny", "target.device=cpu", *words])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of the tiny target; its random weights write noise, of which something can be learnt all the same."""
    out = tmp_path_factory.mktemp("data")
    counts = "prompts.counts={code: 0, math: 24, chat: 12, qa: 6, translation: 0, summarization: 0}"
    run_data(composed("data", ["prompts=templates", counts, "max_new_tokens=24", f"out={out}"]))
    return out


def words_for(data: Path, out: Path, students: list[str], *extra: str) -> list[str]:
    words = [
        f"student=[{','.join(students)}]",
        f"data={data}",
        f"out={out}",
        "held_out=6",
        "parity_rows=3",
        "parity_tolerance=0",
    ]
    words += ["parity_tokens=12", "steps=6", "checkpoint_every=3", "log_every=2"]
    for name in students:
        words += [f"students.{name}.drafter.random.draft_vocab_size=120"]
        if name.startswith("dispark"):
            words += [f"students.{name}.drafter.random.rank=8"]
    return [*words, *extra]


@pytest.fixture
def train(data: Path, tmp_path: Path) -> Train:
    def go(students: list[str], *extra: str) -> dict[str, Any]:
        return run_train(composed("train", words_for(data, tmp_path / "run", students, *extra)))

    return go


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", STUDENTS)
def test_every_student_learns_and_decodes(name: str, train: Train, tmp_path: Path) -> None:
    result = train([name], "steps=24", "checkpoint_every=24", "log_every=4")
    assert result["is_finished"]
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 6
    assert min(losses[3:]) < losses[0]
    held_out = result["held_out"][name]
    # In float32 nothing may differ between training and decoding.
    assert held_out["parity/num_slots"] > 0
    assert held_out["parity/num_different"] == 0
    assert held_out["parity/simulated_accepted"] == held_out["parity/loop_accepted"]
    assert 0 < held_out["accept_at"][0] < 1
    assert (tmp_path / "run" / name / "README.md").read_text().startswith(f"# {name}, a drafter for tiny")


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_gemma3", "tiny_gemma4"])
def test_every_family_of_targets(family: str, tmp_path: Path) -> None:
    """Data, training and decoding without a line of code of their own."""
    target = [f"target={family}"]
    counts = "prompts.counts={code: 0, math: 20, chat: 0, qa: 0, translation: 0, summarization: 0}"
    run_data(composed("data", [*target, "prompts=templates", counts, "max_new_tokens=16", f"out={tmp_path}/data"]))
    students = ["dispark", "eagle3", "mtp", "medusa"]
    result = run_train(composed("train", [*target, *words_for(tmp_path / "data", tmp_path / "run", students)]))
    for name in students:
        assert result["held_out"][name]["parity/num_slots"] > 0
        assert result["held_out"][name]["parity/num_different"] == 0


def test_a_trained_drafter_is_loaded_by_name(train: Train, tmp_path: Path) -> None:
    train(["dispark"])
    cfg = composed("bench", ["drafter=dispark", f"drafter.checkpoint={tmp_path}/run/dispark"])
    drafter = build(cfg.drafter)
    assert drafter.draft_length == 7


def test_students_side_by_side_are_as_alone(train: Train, tmp_path: Path, data: Path) -> None:
    """One feature stream serves all; nobody's weights hang on who else is trained."""
    train(["dispark", "eagle3", "medusa"])
    for name in ("dispark", "eagle3", "medusa"):
        run_train(composed("train", words_for(data, tmp_path / f"alone_{name}", [name])))
        both = weights(tmp_path / "run" / name), weights(tmp_path / f"alone_{name}" / name)
        assert all(torch.equal(both[0][key], both[1][key]) for key in both[1])


def test_checkpoints_go_on_being_trained(train: Train, tmp_path: Path, data: Path) -> None:
    train(["dflash"])
    first = weights(tmp_path / "run" / "dflash")
    words = words_for(data, tmp_path / "more", ["dflash"], f"students.dflash.drafter.checkpoint={tmp_path}/run/dflash")
    run_train(composed("train", [*words, "students.dflash.lr=1e-9"]))
    second = weights(tmp_path / "more" / "dflash")
    assert all(torch.allclose(first[key].float(), second[key].float(), atol=1e-6) for key in first)


@pytest.mark.parametrize("name", ["dispark", "dflash"])
def test_block_drafters_start_from_target_layers_with_rates_of_their_own(
    name: str, train: Train, data: Path, tmp_path: Path
) -> None:
    settings = [f"students.{name}.{word}" for word in ("start_layers=[1,2]", "backbone_lr=1e-9", "loss.state=1.0")]
    first = train([name], *settings)["held_out"][name]
    assert first["state"] > 0
    layer = build(composed("train", [f"student=[{name}]"]).target)
    saved = weights(tmp_path / "run" / name)
    own = saved["layers.1.mlp.up_proj.weight"]
    theirs = load(layer).model.get_decoder().layers[2].mlp.up_proj.weight
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-6)  # hardly moved; the heads have their own rate
    # A checkpoint goes on from what it is.
    onward = words_for(data, tmp_path / "on", [name], f"students.{name}.drafter.checkpoint={tmp_path / 'run' / name}")
    run_train(composed("train", [*onward, f"students.{name}.start_layers=[0,0]", f"students.{name}.lr=1e-9"]))
    torch.testing.assert_close(weights(tmp_path / "on" / name)["layers.1.mlp.up_proj.weight"], own, rtol=0, atol=1e-6)


def test_features_from_disk_train_the_same(train: Train, tmp_path: Path, data: Path) -> None:
    """But for the rounding of the states to bfloat16."""
    cache = f"feature_cache={tmp_path}/cache"
    first = train(["dispark", "mtp"])
    second = run_train(composed("train", words_for(data, tmp_path / "cached", ["dispark", "mtp"], cache)))
    for name in ("dispark", "mtp"):
        assert second["held_out"][name]["loss"] == pytest.approx(first["held_out"][name]["loss"], rel=2e-2)
        assert second["held_out"][name]["parity/num_different"] == 0
    assert run_train(composed("train", words_for(data, tmp_path / "again", ["dispark", "mtp"], cache)))["is_finished"]


# -- resuming -------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_left_as_it_is(train: Train, tmp_path: Path) -> None:
    first = train(["dispark"])
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert train(["dispark"])["held_out"] == first["held_out"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_run_that_ran_out_of_time_goes_on(train: Train, tmp_path: Path, data: Path) -> None:
    result = train(["dispark"], "minutes=1e-6")
    assert not result["is_finished"]
    assert result["step"] == 1
    assert train(["dispark"])["is_finished"]
    run_train(composed("train", words_for(data, tmp_path / "whole", ["dispark"])))
    both = weights(tmp_path / "run" / "dispark"), weights(tmp_path / "whole" / "dispark")
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])


@pytest.mark.parametrize("ema", ["null", "0.8"])
def test_killed_at_any_moment_and_resumed_it_ends_bit_for_bit_the_same(data: Path, tmp_path: Path, ema: str) -> None:
    extra = ["steps=40", "checkpoint_every=4", "log_every=4", f"optimizer.ema={ema}"]
    students = ["dispark", "mtp"]
    whole = words_for(data, tmp_path / "whole", students, *extra)
    run_train(composed("train", whole))
    words = words_for(data, tmp_path / "killed", students, *extra)
    command = [sys.executable, "-m", "dispark", "train", "target=tiny", "target.device=cpu", *words]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "killed" / "state").is_dir() or not list((tmp_path / "killed" / "state").glob("step-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.15)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run_train(composed("train", words))
    for name in students:
        both = weights(tmp_path / "whole" / name), weights(tmp_path / "killed" / name)
        assert all(torch.equal(both[0][key], both[1][key]) for key in both[0]), name
    steps = [
        (line["kind"], line["student"], line["step"]) for line in read_jsonl(tmp_path / "killed" / "metrics.jsonl")
    ]
    assert len(steps) == len(set(steps))
    assert [s for s in steps if s[0] == "train" and s[1] == "mtp"] == [("train", "mtp", 4 * i) for i in range(1, 11)]


def test_other_settings_need_another_folder(train: Train) -> None:
    train(["dispark"])
    for words in (["steps=5"], ["steps=9", "batch_rows=3"], ["batch_rows=3"]):
        with pytest.raises(ValueError, match=r"out=.*holds a run of other settings \(.*steps alone can be raised"):
            train(["dispark"], *words)
    assert train(["dispark"], "steps=5", "overwrite=true")["step"] == 5


def test_a_finished_run_goes_on_for_more_steps(train: Train, tmp_path: Path) -> None:
    run, first = tmp_path / "run", train(["dispark"])
    before = read_jsonl(run / "metrics.jsonl")
    for _ in range(2):  # the same command finds what is done
        last = train(["dispark"], "steps=9")
        assert (last["step"], last["is_finished"]) == (9, True)
        assert last["totals"]["anchors/dispark"] > first["totals"]["anchors/dispark"]
        assert json.loads((run / "run.json").read_text())["extended"] == [{"steps": 6, "until": 6}]
    lines = read_jsonl(run / "metrics.jsonl")
    assert lines[: len(before)] == before
    rates = {line["step"]: line["lr"] for line in lines if line["kind"] == "train"}
    assert rates[8] > rates[6]  # the schedule is that of 9 steps, from step 6 on
    assert "planned with 6 steps until step 6" in (run / "dispark" / "README.md").read_text()


def test_what_was_to_be_done_with_a_state_is_done_when_the_run_goes_on(
    train: Train, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the last checkpoint, between a student's weights and another's."""
    students, save, count = ["dispark", "mtp"], trainer.MasterAdamW.use_average, [0]

    def killed(self: Any, is_on: bool) -> None:
        count[0] += 1
        if count[0] == 5:  # twice for each of two students at step 3
            raise KeyboardInterrupt
        save(self, is_on)

    monkeypatch.setattr(trainer.MasterAdamW, "use_average", killed)
    with pytest.raises(KeyboardInterrupt):
        train(students)
    monkeypatch.undo()
    again = train(students)
    assert (again["step"], again["is_finished"]) == (6, True)
    run_train(composed("train", words_for(data, tmp_path / "whole", students)))
    for name in students:
        both = weights(tmp_path / "run" / name), weights(tmp_path / "whole" / name)
        assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])
        assert again["held_out"][name]["step"] == 6
    lines = [(line["kind"], line["student"], line["step"]) for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert len(lines) == len(set(lines))


def test_a_run_killed_before_its_first_state_begins_anew(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, count = trainer.MasterAdamW.step, [0]

    def killed(self: Any, factor: float) -> float:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return step(self, factor)

    monkeypatch.setattr(trainer.MasterAdamW, "step", killed)
    with pytest.raises(KeyboardInterrupt):
        train(["dispark"], "log_every=1")
    monkeypatch.undo()
    train(["dispark"], "log_every=1", "batch_rows=3")  # nothing is there yet that other settings could spoil
    steps = [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_more_rows_or_batches_a_step(train: Train, tmp_path: Path, data: Path) -> None:
    """Two batches a step give the mean of their gradients, as the sums over batches say."""
    assert train(["dispark"], "accumulate=2", "batch_rows=3")["is_finished"]
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert last["epoch"] == pytest.approx(12 / 12)


# -- several processes ----------------------------------------------------------------------------------------------


def test_two_processes_train_what_one_trains(data: Path, tmp_path: Path) -> None:
    students = ["dispark", "eagle3", "medusa", "mtp"]
    run_train(composed("train", words_for(data, tmp_path / "one", students)))
    words = words_for(data, tmp_path / "two", students)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dispark"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [*command, "train", "target=tiny", "target.device=cpu", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in students:
        one, two = weights(tmp_path / "one" / name), weights(tmp_path / "two" / name)
        for key in one:
            torch.testing.assert_close(two[key].float(), one[key].float(), rtol=2e-3, atol=2e-4)
    figures = [
        [line for line in read_jsonl(tmp_path / run / "metrics.jsonl") if line["kind"] == "train"]
        for run in ("one", "two")
    ]
    for one, two in zip(*figures, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert two["anchors"] == one["anchors"]
        assert two["accept_at"] == pytest.approx(one["accept_at"], rel=1e-2)
    # The state of two processes is one that a single process goes on from.
    longer = [*words, "parity_tokens=13"]
    assert run_train(composed("train", longer))["is_finished"]


# -- what goes wrong ------------------------------------------------------------------------------------------------


class OffByOne(BlockCall):
    """Sees the anchor's own feature, which decoding does not have yet."""

    def __init__(self, past: Any, anchors_BA: Any, size: int) -> None:
        super().__init__(past, anchors_BA + 1, size)


def test_a_mask_that_is_off_by_one_is_caught(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BlockCall", OffByOne)
    with pytest.raises(ValueError, match=r"students.dispark: step 3: what decodes is not what was trained"):
        train(["dispark"])


def test_what_is_not_what_decodes_is_refused_again_at_the_last_step(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BlockCall", OffByOne)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"students.dispark: step 6: what decodes is not what was trained"):
            train(["dispark"], "checkpoint_every=6")
    monkeypatch.undo()
    assert train(["dispark"], "checkpoint_every=6")["is_finished"]


def test_texts_that_training_cuts_are_whole_where_decoding_is_compared(train: Train, data: Path) -> None:
    """Rows whose prompts fill all there is have nothing to learn from."""
    lengths = sorted(len(row.prompt_ids) for row in read_rows(data))
    result = train(["dispark", "medusa"], f"max_tokens={lengths[-3]}", "parity_tokens=24")
    assert json.loads((Path(result["out"]) / "run.json").read_text())["data"]["num_rows"] < len(lengths)
    found = result["held_out"]
    assert all(line["parity/num_slots"] > 0 and line["parity/num_different"] == 0 for line in found.values())


def test_features_of_another_layer_are_caught(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispark.training.features import FeatureBatch

    features = FeatureBatch.features
    monkeypatch.setattr(FeatureBatch, "features", lambda self, layers: features(self, list(reversed(layers))))
    with pytest.raises(ValueError, match=r"students.eagle3: step 3: what decodes is not what was trained"):
        train(["eagle3"])


def test_a_loss_that_is_not_a_number_stops_with_the_last_state(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, count = trainer.MasterAdamW.step, [0]

    def broken(self: Any, factor: float) -> float:
        count[0] += 1
        if count[0] == 5:
            self.masters[0].grad[:] = float("nan")
        return step(self, factor)

    monkeypatch.setattr(trainer.MasterAdamW, "step", broken)
    with pytest.raises(ValueError, match=r"students.dispark: step 4: its gradients are not finite .*step-00000003"):
        train(["dispark"])
    good = weights(tmp_path / "run" / "dispark")
    assert all(bool(torch.isfinite(value.float()).all()) for value in good.values())
    monkeypatch.setattr(trainer.MasterAdamW, "step", step)
    assert train(["dispark"])["is_finished"]


def test_a_loss_that_diverges_stops(train: Train) -> None:
    with pytest.raises(ValueError, match=r"students.dflash: step \d+: its loss diverges: .* on average"):
        train(["dflash"], "students.dflash.lr=50", "optimizer.warmup=0", "steps=40", "log_every=1", "divergence=1.05")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps=0"], r"steps=0: must be a whole number >= 1"),
        (["held_out=-1"], r"held_out=-1"),
        (["minutes=0"], r"minutes=0(\.0)?: must be above 0, or null"),
        (["divergence=0.5"], r"divergence=0.5: must be above 1, or null"),
        (["parity_tokens=1"], r"parity_tokens=1: must be a whole number >= 2"),
        (["parity_tolerance=2"], r"parity_tolerance=2(\.0)?: must lie in 0 .. 1"),
        (["max_tokens=9"], r"max_tokens=9: no prompt of the data is shorter than that"),
        (["max_tokens=3"], r"max_tokens=3: must be at least 8"),
        (["batch_rows=500"], r"batch_rows=500: the data has \d+ rows to train on"),
        (["students.dispark.backbone_lr=0"], r"backbone_lr=0(\.0)?: must be above 0"),
        (["students.dispark.loss.state=-1"], r"loss.state=-1(\.0)?: must be at least 0"),
        (["students.dispark.start_layers=[1]"], r"start_layers=\[1\]: must name 2 layers"),
        (["students.dispark.lr=0"], r"students.dispark.*lr=0(\.0)?: must be above 0"),
        (["students.dispark.drafter.random.draft_vocab_size=900"], r"draft_vocab_size=900"),
        (["data=/nowhere"], r"data=/nowhere: has no data.parquet; 'dispark data' makes one"),
        (["optimizer.schedule=none"], r"optimizer.*schedule=none: must be cosine or constant"),
    ],
)
def test_bad_settings(train: Train, tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(["dispark"], *words)
    assert not (tmp_path / "run" / "settings.json").exists()  # what was refused doesn't keep the folder


def test_a_folder_of_something_else(data: Path) -> None:
    before = sorted(path.name for path in data.iterdir())
    for words in ([], ["overwrite=true"]):
        with pytest.raises(ValueError, match=r"out=.*: holds something else than a training run"):
            run_train(composed("train", words_for(data, data, ["dispark"], *words)))
    assert sorted(path.name for path in data.iterdir()) == before


def test_data_of_another_target(train: Train, data: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(data, other)
    meta = json.loads((other / "data.json").read_text())
    meta["settings"]["target"]["name"] = "somebody"
    (other / "data.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"was made by target somebody, but this is tiny"):
        train(["dispark"], f"data={other}")


def test_denormals_are_flushed_while_training_only() -> None:
    small = torch.tensor([2e-38])
    with flushed_denormals():
        assert float(small / 4) == 0.0
    assert float(small / 4) > 0.0

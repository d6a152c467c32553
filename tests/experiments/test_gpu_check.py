"""The GPU check without a GPU: its output, its bookkeeping, and what it says about texts and waits, on a tiny model.

The debug mode that shows waits is replayed; times and energy are tested in test_gpu_check_figures.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dispark.decoding import loop
from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import draw, probabilities
from dispark.targets.architectures import config_class, model_class
from dispark.targets.sources import entry_name
from dispark.targets.tokenizer import ByteTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from gpu_check import correctness, run, speed, syncs
from gpu_check.common import (
    GREEDY,
    QUICK,
    SMOLLM2_SHAPE,
    Budget,
    Subject,
    build,
    decode,
    find_subject,
    first_difference,
    make_requests,
    read_spec,
)

REPO = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SCRIPT = REPO / "experiments" / "gpu_check" / "run.py"
WAIT = "called a synchronizing CUDA operation (message of the debug mode)"


# -- the script ---------------------------------------------------------------------------------------------------


def test_without_a_device_it_says_so_and_imports_nothing_heavy(tmp_path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['run.py', '--out', {str(tmp_path / 'out')!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0, stop.code\n"
        "heavy = {'transformers', 'hydra', 'pandas', 'datasets', 'wandb'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.strip().splitlines()
    assert "no CUDA device" in first
    assert json.loads(last)["status"] == "no CUDA device"
    assert json.loads((tmp_path / "out" / "gpu_check.json").read_text()) == json.loads(last)


def test_dry_run_on_the_cpu_ends_in_one_json_line(tmp_path, capsys):
    code = run.main(["--device", "cpu", "--target", "tiny", "--quick", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert code == 0
    assert lines[0].startswith("*** tiny has random weights")
    assert json.loads((tmp_path / "gpu_check.json").read_text()) == result
    statuses = {name: section["status"] for name, section in result["sections"].items()}
    on_cuda = ("board", "syncs", "energy", "speed_large")
    assert statuses == {"correctness": "ok", "speed": "ok"} | dict.fromkeys(on_cuda, "skipped")
    assert all("cpu" in result["sections"][name]["reason"] for name in on_cuda)
    assert result["status"] == "ok"
    assert result["provenance"]["versions"]["torch"]

    arms = result["sections"]["correctness"]["greedy_fp32_against_cpu"]["arms"]
    assert len(arms) == 7
    assert all(arm["num_identical"] == arm["num_texts"] == QUICK.num_requests for arm in arms.values())
    fast = result["sections"]["speed"]
    assert set(fast["against_generate"]["tokens_per_s"]) == {"none", "ngram", "generate", "prompt_lookup"}
    assert set(fast["batches"]) == {"b1", "b4"}
    assert fast["batches"]["b4"]["none"]["num_rows_mean"] == 4.0
    assert fast["batches"]["b1"]["none_over_none_b1"] == 1.0
    assert fast["batches"]["b4"]["none"]["matl"] == 1.0


def test_wrong_arguments_end_in_one_line(tmp_path, capsys):
    assert run.main(["--device", "cpu", "--target", "tinny"]) == 2
    assert "--target=tinny: no such target; allowed: " in capsys.readouterr().err
    assert run.main(["--device", "cup", "--target", "tiny"]) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        run.main(["--out", str(tmp_path / "file" / "out")])
    assert stop.value.code == 2
    assert "can't be written" in capsys.readouterr().err


def test_sections_are_skipped_broken_and_failed_apart(tmp_path, capsys):
    now = [0.0]
    budget = Budget(100.0, lambda: now[0])

    def slow() -> dict:
        now[0] = 95.0
        return {"is_ok": True, "figure": float("nan")}

    def broken() -> dict:
        raise RuntimeError("no\nsuch kernel")

    parts = [
        ("broken", 1.0, broken),
        ("failed", 1.0, lambda: {"is_ok": False}),
        ("slow", 50.0, slow),
        ("late", 10.0, lambda: pytest.fail("must not start")),
    ]
    result = run.run_sections(parts, budget, {"status": "running"}, tmp_path)
    capsys.readouterr()
    found = {name: section["status"] for name, section in result["sections"].items()}
    assert found == {"broken": "error", "failed": "fail", "slow": "ok", "late": "skipped"}
    assert result["status"] == "error"
    assert result["sections"]["broken"]["reason"] == "RuntimeError: no such kernel"
    assert result["sections"]["late"]["reason"] == "needs about 10 s, and 5 s of the budget are left"
    stored = json.loads((tmp_path / "gpu_check.json").read_text())
    assert stored["sections"]["slow"]["figure"] is None  # NaN is no JSON
    assert run.run_sections(parts[3:], budget, {}, None)["status"] == "skipped"
    assert run.run_sections(parts[1:3], Budget(100.0), {}, None)["status"] == "fail"


def test_floats_are_rounded_and_counts_are_not():
    assert run.rounded({"a": [1.23456789e-7, 123456789], "b": True}) == {"a": [1.23457e-07, 123456789], "b": True}


# -- targets and requests -----------------------------------------------------------------------------------------


def test_a_target_that_is_not_cached_is_replaced_loudly(tmp_path, monkeypatch):
    monkeypatch.setenv("DISPARK_CACHE", str(tmp_path))
    subject = find_subject("smollm2_135m")
    assert (subject.weights, subject.spec.name) == ("random", "smollm2_135m_random")
    assert "not in the cache" in subject.note
    assert "RANDOM WEIGHTS" in subject.note
    source = read_spec("smollm2_135m").sources["wheel"]
    folder = tmp_path / "targets" / entry_name(source)
    folder.mkdir(parents=True)
    assert "damaged in the cache" in find_subject("smollm2_135m").note
    with pytest.raises(ValueError, match="only smollm2_135m has a stand-in"):
        find_subject("qwen3_4b")


@pytest.mark.parametrize(
    ("architecture", "shape", "billions"),
    [("llama", SMOLLM2_SHAPE, 0.134515), (speed.LARGE_ARCHITECTURE, speed.LARGE_SHAPE, 4.022)],
)
def test_stand_ins_have_the_size_that_they_claim(architecture, shape, billions):
    with torch.device("meta"):
        model = model_class(architecture)(config_class(architecture)(**shape))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_build_makes_inner_objects_first():
    node = {"_target_": "types.SimpleNamespace", "inner": [{"_target_": "pathlib.PurePath"}], "plain": {"a": 1}}
    made = build(node)
    assert made.inner[0].as_posix() == "."
    assert made.plain == {"a": 1}


def test_requests_are_short_ragged_and_repeat_when_they_must():
    many = make_requests(ByteTokenizer(), 300, 4, max_prompt=100)
    lengths = [len(request.prompt_ids) for request in many]
    assert len(many) == 300
    assert max(lengths) <= 100
    assert len(set(lengths)) > 5
    assert len({request.request_id for request in many}) == 300
    assert len({request.prompt_ids for request in many}) < 300
    with pytest.raises(ValueError, match="max_prompt=1"):
        make_requests(ByteTokenizer(), 1, 4, max_prompt=1)


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


# -- correctness --------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_called_real_by_both_models(target, requests):
    reference = decode(target, "none", requests, 3).records
    wrong = [replace(record, output_ids=list(record.output_ids)) for record in reference]
    wrong[1].output_ids[4] = (wrong[1].output_ids[4] + 1) % 256
    found = correctness.compare_with_cpu(target, target, reference, {"right": reference, "wrong": wrong})
    assert found["arms"]["right"]["verdict"] == "lossless"
    assert found["arms"]["wrong"]["verdict"] == "real"
    assert found["arms"]["wrong"]["num_real_by_cpu"] >= 1
    assert found["arms"]["wrong"]["first_differences"] == {wrong[1].request.request_id: 4}
    assert not found["is_ok"]


def test_ragged_calls_are_held_to_the_stock_model(tiny, target):
    assert correctness.ragged(target)["is_ok"]
    other = replace(tiny.spec.sources["random"], seed=1)
    stranger = Subject(replace(tiny.spec, sources={"random": other}), "random").open(CPU)
    found = correctness.between_devices(target, stranger)
    assert not found["is_ok"]
    assert found["max_relative_error"] > 0.1
    assert not correctness._error(torch.tensor([float("nan")]), torch.ones(1))["is_ok"]


@pytest.mark.parametrize("place", [0, 3])
def test_border_distance_is_that_of_the_loops_own_draw(target, requests, place):
    record = decode(target, "none", requests[:1], 1, correctness.WARM).records[0]
    target.open(1, 400)
    logits, _ = target.prefill([0], [[*requests[0].prompt_ids, *record.output_ids[:place]]])
    probs = probabilities(logits, correctness.WARM)
    uniform = RowGenerators([0], [place], CPU).uniform("first" if place == 0 else "recover", 1)[:, 0]
    token = int(draw(probs, uniform))
    assert (requests[0].seed, token) == (0, record.output_ids[place])
    likely = probs[0].nonzero()[:, 0].tolist()
    number = likely.index(token)
    cdf = probs[0].double().cumsum(0) / probs[0].double().sum()
    for other in likely[max(0, number - 1) : number + 2]:
        text = [*record.output_ids[:place], other]
        if other != token:
            border = float(cdf[min(token, other)])
            found = correctness.border_distance(target, requests[0], record.output_ids, text)
            assert found == pytest.approx(abs(border - float(uniform)), abs=1e-6)
    assert len(likely) > 1
    assert correctness.border_distance(target, requests[0], record.output_ids, record.output_ids[:3]) == 1.0


def test_sampling_that_depends_on_the_batch_fails(target, requests, monkeypatch):
    def by_batch(target, drafter, requests, batch_size, sampling=GREEDY, num_slots=None):
        shifted = [replace(r, seed=r.seed + 1000 * (batch_size == 1)) for r in requests]
        return decode(target, drafter, shifted, batch_size, sampling)

    assert correctness.sampling(target, requests)["is_ok"]
    monkeypatch.setattr(correctness, "decode", by_batch)
    found = correctness.sampling(target, requests)
    assert not found["is_ok"]
    assert found["drafters"]["none"]["num_identical_b1_b8"] < 3
    assert max(found["drafters"]["none"]["border_distances"]) > correctness.CDF_TOLERANCE


def test_low_precision_bound_is_wider_for_random_weights_only(tiny, requests):
    target = tiny.open(CPU, "bfloat16")
    strict = correctness.low_precision(target, requests, is_random=False)
    loose = correctness.low_precision(target, requests, is_random=True)
    assert strict["bound_ulps"] == correctness.NEAR_TIE_ULPS[torch.bfloat16]
    assert loose["bound_ulps"] == max(strict["bound_ulps"], 2 * loose["noise_ulps"])
    assert loose["noise_ulps"] > 0


# -- syncs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch):
    """The debug mode replayed: the loop's two copies to the host warn, as they would on a GPU."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *arguments: None)
    for name in ("to_host", "next_token"):
        real = getattr(loop, name)

        def warning(*arguments, real=real):
            if modes[-1] == "warn":
                warnings.warn(WAIT, stacklevel=2)
            return real(*arguments)

        monkeypatch.setattr(loop, name, warning)
    return modes


def test_prefill_waits_drop_out(tiny, waits):
    found = syncs.run_syncs(tiny, CPU, QUICK)
    assert found["is_ok"]
    for part in found["drafters"].values():
        assert part["syncs_per_round"] == 1.0
        assert list(part["places"].values()) == [1.0]
        assert next(iter(part["places"])).startswith("dispark/decoding/loop.py:")
        assert "to_host(verdict)" in next(iter(part["places"]))
    assert waits[-1] == "default"


def test_a_second_wait_in_a_round_is_found(tiny, waits, monkeypatch):
    real = loop.outcome_of

    def waiting(cuts):
        if waits[-1] == "warn":
            warnings.warn(WAIT, stacklevel=2)
            warnings.warn("something else", stacklevel=2)
        torch.cuda.synchronize()
        return real(cuts)

    monkeypatch.setattr(loop, "outcome_of", waiting)
    found = syncs.run_syncs(tiny, CPU, QUICK)
    assert not found["is_ok"]
    assert found["drafters"]["none"]["syncs_per_round"] == 2.0
    assert found["drafters"]["none"]["explicit_synchronize_per_round"] == 1.0


def test_counter_restores_everything_after_an_error():
    modes: list[str] = []
    cuda = SimpleNamespace(synchronize=len)
    counter = syncs.SyncCounter(cuda, modes.append)

    def fail() -> None:
        with counter:
            cuda.synchronize("abc")
            warnings.warn(WAIT, stacklevel=1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert modes == ["warn", "default"]
    assert cuda.synchronize is len
    assert sum(counter.implicit.values()) == sum(counter.explicit.values()) == 1
    assert next(iter(counter.explicit)).startswith("tests/experiments/test_gpu_check.py:")


def test_passes_of_like_length_say_nothing():
    with pytest.raises(ValueError, match="must have more"):
        syncs.per_round(syncs.Count(4), syncs.Count(4))

"""The GPU check's figures without a GPU: races, single calls, joules a token, and which board a device is.

The boards' sensors are replayed with stand-ins; the rest runs on a tiny model on the CPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dispark.measure import nvml as nvml_module
from dispark.types import EnergyReading

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

from gpu_check import calls, energy, speed
from gpu_check.common import QUICK, Budget, decode

CPU = torch.device("cpu")


# -- speed --------------------------------------------------------------------------------------------------------


def test_race_goes_forth_and_back_after_a_warm_up():
    order: list[str] = []

    def arm(name: str):
        return lambda: order.append(name) or 5

    speeds = speed.race({"a": arm("a"), "b": arm("b")}, 2, CPU)
    assert "".join(order) == "ab" + "abba" * 2
    assert [len(values) for values in speeds.values()] == [4, 4]
    assert speed.ratio([2.0, 6.0, 3.0], [1.0, 2.0, 3.0]) == {"median": 2.0, "low": 1.0, "high": 3.0}


def test_summary_counts_rounds_only(target, requests):
    trace = decode(target, "ngram", requests, 3)
    summary = speed.summary_of(trace)
    seconds = sum(step["wall_s"] for step in trace.steps[1:])
    emitted = sum(len(record.output_ids) - 1 for record in trace.records)
    assert trace.steps[0]["kind"] == "prefill"
    assert summary["decode_tokens_per_s"] == pytest.approx(emitted / seconds)
    assert summary["matl"] == pytest.approx(emitted / len(trace.rounds))


def test_large_target_is_measured_like_the_other_one():
    small = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    shape = speed.LARGE_SHAPE | small | {"num_attention_heads": 4, "num_key_value_heads": 2}
    large = speed.random_target(CPU, speed.LARGE_ARCHITECTURE, shape, torch.bfloat16)
    assert large.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    asked = speed.random_requests(large.vocab_size, [3, 9, 4, 5], 4)
    found = speed.measure(large, large, asked, replace(QUICK, batch_tokens=4), Budget(1e6))
    assert found["batches"]["b4"]["none"]["num_rows_mean"] == 4.0
    late = speed.measure(large, large, asked, replace(QUICK, batch_tokens=4), Budget(0.0))
    assert {part["status"] for part in late["batches"].values()} == {"skipped"}


def test_call_costs_cover_every_linear_layer(target):
    seen: list[torch.nn.Module] = []
    layers = [module for module in target.model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [layer.register_forward_hook(lambda module, *_: seen.append(module)) for layer in layers]
    calls.linears(target, 3)()
    for hook in hooks:
        hook.remove()
    assert len(layers) == 4 * 7 + 1
    assert sorted(map(id, seen)) == sorted(map(id, layers))
    found = calls.call_costs(target, 2)
    assert all(value > 0 for value in found["seconds"].values())
    ratio = found["seconds"]["forward_split"] / found["seconds"]["forward_single"]
    assert found["packed_cost"] == ratio
    assert found["linears_as_graph"][1] == {"seconds": None, "reason": "needs a CUDA device"}
    assert found["weights_floor"]["weight_bytes"] == sum(layer.weight.numel() * 4 for layer in layers)


# -- energy and the board -----------------------------------------------------------------------------------------


class Meter:
    """Replays one reading; counts its windows."""

    min_window_s = 2.0

    def __init__(self, joules: float | None, window_s: float = 10.0) -> None:
        reason = "no sensor" if joules is None else None
        self.reading = EnergyReading(joules, window_s, "fake", "board", 5.0, reason)
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> EnergyReading:
        self.calls.append("stop")
        return self.reading


def test_window_divides_by_the_tokens_of_its_passes():
    meters = {energy.COUNTER: Meter(200.0), energy.POLLED: Meter(160.0)}
    found = energy.window(lambda: 25, meters, 0.0, CPU)
    assert (found["num_passes"], found["num_tokens"]) == (1, 25)
    assert found["sensors"][energy.COUNTER]["joules_per_token"] == 8.0
    assert found["sensors"][energy.COUNTER]["net_joules_per_token"] == 6.0
    assert found["counter_over_polling"] == 1.25
    assert all(meter.calls == ["start", "stop"] for meter in meters.values())
    several = energy.window(lambda: 1, {energy.POLLED: Meter(1.0)}, 0.02, CPU)
    assert several["num_passes"] == several["num_tokens"] > 1


def test_missing_joules_stay_none_with_a_reason(tiny):
    found = energy.window(lambda: 25, {energy.COUNTER: Meter(None), energy.POLLED: Meter(9.0, 0.5)}, 0.0, CPU)
    sensors = found["sensors"]
    assert sensors[energy.COUNTER]["joules_per_token"] is None
    assert sensors[energy.COUNTER]["reasons"]["joules_per_token"] == "no sensor"
    assert "add up to 0.50 s" in sensors[energy.POLLED]["reasons"]["joules_per_token"]
    assert found["counter_over_polling"] is None

    whole = energy.run_energy(tiny, CPU, replace(QUICK, energy_s=0.0))
    assert set(whole["arms"]) == {"none_b1", "ngram_b1", "none_b16", "ngram_b16"}
    assert not whole["has_counter"]
    assert not whole["has_polling"]
    for arm in whole["arms"].values():
        assert arm["num_tokens"] > 0
        assert arm["sensors"][energy.COUNTER]["joules_per_token"] is None
        assert "not on an NVIDIA board" in arm["sensors"][energy.COUNTER]["reason"]


class Board:
    """pynvml and torch.cuda around one board whose memory grows when a block is taken."""

    def __init__(self, name: str = "GPU X", grows: bool = True, uuid: str | None = "aaaa") -> None:
        self.used, self._grows, self._name = 1000, grows, name
        self.properties = SimpleNamespace(name="GPU X", uuid=uuid)
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
        self.nvmlDeviceGetIndex = lambda handle: 3
        self.nvmlDeviceGetName = lambda handle: self._name
        self.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=self.used)
        self.get_device_properties = lambda device: self.properties
        self.device_count = lambda: 1
        self.empty_cache = lambda: None

    def take(self, device: torch.device, num_bytes: int) -> None:
        self.used += num_bytes if self._grows else 0


@pytest.mark.parametrize(
    ("board", "is_ok"),
    [
        (Board(), True),
        (Board(grows=False), False),
        (Board(name="GPU Y"), False),
        (Board(uuid=None), None),
    ],
)
def test_mapping_is_checked_by_memory_and_name(board, is_ok, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml_module, "_torch_uuid", lambda index: "GPU-aaaa")
    found = energy.check_mapping(torch.device("cuda:0"), board, board, board.take)
    assert found["is_ok"] is is_ok
    assert found["scope"] == "gpu board 3"
    assert (found["reason"] is None) == (is_ok is not None)


def test_mapping_without_a_driver_is_unknown_not_wrong():
    def fail() -> None:
        raise OSError("no driver")

    found = energy.check_mapping(torch.device("cuda:0"), SimpleNamespace(nvmlInit=fail))
    assert found == {"is_ok": None, "reason": "nvmlInit: no driver"}


def test_board_section_needs_a_device():
    assert energy.run_board(CPU)["status"] == "skipped"
    peak = energy.check_peak_reset(CPU)
    assert peak["is_ok"] is None
    assert "CPU" in peak["reason"]

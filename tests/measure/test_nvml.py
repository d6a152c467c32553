"""The right board for a torch device, and the sensors on it, replayed without a driver."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch

from dispark.measure.nvml import STATE_KEYS, NvmlCounter, NvmlPower, device_state, open_board
from dispark.measure.sensors import SensorError


def no_uuid(index: int) -> None:
    return None


def scope(nvml, device="cuda:0", environ=None, uuid_of=no_uuid) -> str:
    return open_board(device, nvml, environ or {}, uuid_of).scope


def test_uuid_from_torch_wins_over_any_index(make_nvml):
    nvml = make_nvml(num_boards=3)
    found = scope(nvml, "cuda:0", {"CUDA_VISIBLE_DEVICES": "1"}, lambda index: "GPU-2aaa-bbbb")
    assert found == "gpu board 2"


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "cuda:1", "gpu board 1"),
        (None, "cuda", "gpu board 0"),
        ("2,0", "cuda:0", "gpu board 2"),
        ("2, 0", "cuda:1", "gpu board 0"),
        ("GPU-1aaa-bbbb", "cuda:0", "gpu board 1"),
        ("0,GPU-2a", "cuda:1", "gpu board 2"),
    ],
)
def test_visible_devices_map_to_boards(make_nvml, visible, device, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert scope(make_nvml(num_boards=3), device, environ) == expected


@pytest.mark.parametrize(
    ("visible", "device", "message"),
    [
        ("", "cuda:0", "has no device 0"),
        ("0", "cuda:1", "has no device 1"),
        ("0,-1,1", "cuda:1", "has no device 1"),
        ("MIG-1234", "cuda:0", "MIG slice"),
        ("GPU-", "cuda:0", "names 3 boards"),
        ("GPU-zzz", "cuda:0", "names 0 boards"),
        ("7", "cuda:0", "nvmlDeviceGetHandleByIndex: Invalid Argument"),
    ],
)
def test_unmappable_devices_are_refused(make_nvml, visible, device, message):
    with pytest.raises(SensorError, match=message):
        scope(make_nvml(num_boards=3), device, {"CUDA_VISIBLE_DEVICES": visible})


def test_mig_mode_is_refused_and_its_absence_is_not(make_nvml):
    nvml = make_nvml()
    nvml.mig_mode = [1, 1]
    with pytest.raises(SensorError, match="MIG mode"):
        scope(nvml)
    nvml.mig_mode = [0, 1]
    assert scope(nvml) == "gpu board 0"


def test_choice_by_index_among_several_boards_is_noted(make_nvml):
    nvml = make_nvml(num_boards=2)
    assert "by index" in open_board("cuda:1", nvml, {}, no_uuid).doubts()[0]
    assert open_board("cuda:1", nvml, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, no_uuid).doubts() == []
    assert open_board("cuda:0", make_nvml(), {}, no_uuid).doubts() == []


def test_cpu_missing_library_and_old_binding_are_reasons(make_nvml):
    with pytest.raises(SensorError, match="the work runs on cpu"):
        scope(make_nvml(), "cpu")
    with pytest.raises(SensorError, match="nvmlInit: NVML Shared Library Not Found"):
        scope(make_nvml(nvmlInit="NVML Shared Library Not Found"))
    with pytest.raises(SensorError, match="nvmlInit"):
        scope(object())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_the_real_binding_without_a_driver_is_a_reason():
    pytest.importorskip("pynvml")
    with pytest.raises(SensorError, match="nvmlInit: "):
        open_board("cuda:0", environ={})


def test_counter_reads_joules(make_nvml):
    nvml = make_nvml()
    nvml.energy_mj = [5, 1_000, 251_500]
    counter = NvmlCounter(open_board("cuda:0", nvml, {}, no_uuid))
    counter.begin()
    assert counter.end() == pytest.approx(250.5)


def test_counter_that_goes_back_is_an_error(make_nvml):
    nvml = make_nvml()
    nvml.energy_mj = [0, 9_000, 100]
    counter = NvmlCounter(open_board("cuda:0", nvml, {}, no_uuid))
    counter.begin()
    with pytest.raises(SensorError, match="driver was reloaded"):
        counter.end()


def test_power_is_integrated_by_trapezoids(make_nvml, clock):
    nvml = make_nvml()
    power = NvmlPower(open_board("cuda:0", nvml, {}, no_uuid), 1000.0, clock)
    assert power.scope == "gpu board 0, instantaneous power"
    nvml.power_w = 100.0
    power.begin()
    clock.now_s += 2.0
    nvml.power_w = 300.0
    power.sample()
    clock.now_s += 1.0
    nvml.power_w = 100.0
    assert power.end() == pytest.approx(2.0 * 200.0 + 1.0 * 200.0)
    assert power.warnings() == []


def test_second_power_window_starts_from_nothing(make_nvml, clock):
    power = NvmlPower(open_board("cuda:0", make_nvml(), {}, no_uuid), 1000.0, clock)
    for _ in range(2):  # the first one is left open, as after a crash
        power.begin()
        clock.now_s += 1.0
    assert power.end() == pytest.approx(200.0)


def test_averaged_power_is_the_fallback_and_is_said(make_nvml, clock):
    nvml = make_nvml()
    nvml.has_instant_power = False
    power = NvmlPower(open_board("cuda:0", nvml, {}, no_uuid), 1000.0, clock)
    power.begin()
    clock.now_s += 1.0
    assert power.end() == pytest.approx(200.0)
    assert power.scope.endswith("averaged power")
    assert "running average" in power.warnings()[0]


def test_a_starved_poller_is_said(make_nvml, clock):
    power = NvmlPower(open_board("cuda:0", make_nvml(), {}, no_uuid), 0.1, clock)
    power.begin()
    power._ticker.stop()  # from here on only the edge samples come
    clock.now_s += 30.0
    power.end()
    assert any("polling paused" in warning for warning in power.warnings())


def test_polling_runs_on_its_own_thread_and_ends(make_nvml):
    nvml = make_nvml()
    power = NvmlPower(open_board("cuda:0", nvml, {}, no_uuid), 0.01)
    started = time.perf_counter()
    power.begin()
    thread = power._ticker._thread
    begun = time.perf_counter()
    while nvml.calls.count("nvmlDeviceGetFieldValues") < 6 and time.perf_counter() < started + 10.0:
        time.sleep(0.01)
    ended = time.perf_counter()
    joules = power.end()
    assert nvml.calls.count("nvmlDeviceGetFieldValues") >= 6
    assert (ended - begun) * 200.0 <= joules <= (time.perf_counter() - started) * 200.0
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_a_sensor_lost_while_polling_is_an_error(make_nvml):
    nvml = make_nvml()
    power = NvmlPower(open_board("cuda:0", nvml, {}, no_uuid), 0.01)
    power.begin()
    nvml.failures["nvmlDeviceGetFieldValues"] = "GPU is lost"
    power._ticker._thread.join(timeout=10.0)
    with pytest.raises(SensorError, match="GPU is lost"):
        power.end()


def test_an_abandoned_poller_dies_with_its_sensor(make_nvml):
    power = NvmlPower(open_board("cuda:0", make_nvml(), {}, no_uuid), 0.01)
    power.begin()
    thread = power._ticker._thread
    del power
    gc.collect()
    thread.join(timeout=10.0)
    assert not thread.is_alive()


def test_other_processes_are_counted(make_nvml, monkeypatch):
    nvml = make_nvml()
    board = open_board("cuda:0", nvml, {}, no_uuid)
    nvml.pids = [os.getpid(), 1, 2]
    assert board.num_other_processes() == 2
    assert "2 other process(es)" in board.doubts()[0]
    nvml.pids = [1]
    assert board.num_other_processes() == 1
    # With a context of our own, an unknown number stands for this process as the host sees it.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert board.num_other_processes() == 0
    nvml.pids = []
    assert board.num_other_processes() is None


def test_slowdown_is_a_doubt_but_the_power_cap_is_not(make_nvml):
    nvml = make_nvml()
    board = open_board("cuda:0", nvml, {}, no_uuid)
    nvml.throttle_bits = 0x4
    assert board.doubts() == []
    nvml.throttle_bits = 0x40 | 0x4
    assert board.doubts() == ["gpu board 0 was slowed down at the window's end: hw_thermal_slowdown"]
    assert board.throttle_reasons() == ["sw_power_cap", "hw_thermal_slowdown"]


def test_state_reads_what_it_can(make_nvml):
    state = device_state("cuda:0", make_nvml(nvmlDeviceGetTemperature="Not Supported"))
    assert set(state) == {*STATE_KEYS, "reason"}
    assert state["reason"] is None
    assert state["name"] == "Fake Board"
    assert state["power_limit_w"] == 700.0
    assert state["sm_clock_mhz"] == 1980
    assert state["throttle_reasons"] == []
    assert state["num_other_processes"] == 0
    assert state["temperature_c"] is None
    assert state["persistence_mode"] is None  # this fake, like an old binding, has no such function


def test_state_without_a_board_is_none_with_a_reason():
    state = device_state("cpu")
    assert "the work runs on cpu" in state.pop("reason")
    assert set(state.values()) == {None}

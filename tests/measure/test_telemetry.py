"""Readings of the process and of a fake board, and that nothing waits for them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dispark import interfaces
from dispark.measure.nvml import open_board
from dispark.measure.sensors import SensorError
from dispark.measure.telemetry import AutoTelemetry, NullTelemetry
from dispark.protocols import check_protocol
from dispark.types import TelemetryReading


@pytest.mark.parametrize("telemetry", [NullTelemetry(), AutoTelemetry()])
def test_they_keep_the_protocol(telemetry: Any) -> None:
    check_protocol(telemetry, interfaces.Telemetry, "telemetry")
    assert telemetry.latest() == TelemetryReading()


def test_a_process_that_works_is_seen_to_work() -> None:
    telemetry = AutoTelemetry(interval_s=60.0)
    telemetry.bind("cpu")
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    telemetry.sample()
    busy = telemetry.latest()
    assert busy.utilisation is not None
    assert 0.0 < busy.utilisation <= 1.0
    assert busy.memory_share is not None
    assert 0.0 < busy.memory_share < 1.0
    assert busy.pcie_bytes_per_s is None
    time.sleep(0.1)
    telemetry.sample()
    idle = telemetry.latest()
    assert idle.utilisation is not None
    assert idle.utilisation < busy.utilisation


def test_samples_come_by_themselves() -> None:
    telemetry = AutoTelemetry(interval_s=0.01)
    telemetry.bind("cpu")
    telemetry.bind("cpu")
    first, until = telemetry.latest(), time.monotonic() + 5.0
    while telemetry.latest() == first and time.monotonic() < until:
        time.sleep(0.01)
    assert telemetry.latest() != first


def test_memory_is_resident_pages_over_all(tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("900 120 3 4 5 6 7\n")
    telemetry = AutoTelemetry(interval_s=60.0, proc=tmp_path)
    telemetry.bind("cpu")
    assert telemetry.latest().memory_share == 120 / os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "statm").unlink()
    telemetry.sample()
    assert telemetry.latest().memory_share is None


def test_a_board(make_nvml: Any) -> None:
    nvml = make_nvml()

    def board(device: torch.device | str) -> Any:
        return open_board(device, nvml, {}, lambda index: None)

    telemetry = AutoTelemetry(interval_s=60.0, open_device=board)
    telemetry.bind("cuda:0")
    assert telemetry.latest() == TelemetryReading(0.75, 0.25, 3_500_000.0)
    nvml.failures["nvmlDeviceGetPcieThroughput"] = "Not Supported"
    telemetry.sample()
    assert telemetry.latest() == TelemetryReading(0.75, 0.25, None)


def test_no_board_reads_nothing() -> None:
    def none(device: torch.device | str) -> Any:
        raise SensorError("no driver")

    telemetry = AutoTelemetry(open_device=none)
    telemetry.bind("cuda:0")
    assert telemetry.latest() == TelemetryReading()


@pytest.mark.parametrize("interval", [0.0, -1.0, float("inf")])
def test_bad_intervals(interval: float) -> None:
    with pytest.raises(ValueError, match=r"telemetry\.interval_s=.*: must be a number of seconds above 0"):
        AutoTelemetry(interval)

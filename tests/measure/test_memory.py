"""Peaks per window: the process's own, and replayed ones for what this machine lacks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dispark.measure.memory import MemoryMeter, PeakMemory, combine

MIB = 2**20


class Cuda:
    """torch.cuda's memory functions over a list of allocations."""

    def __init__(self) -> None:
        self.peak, self.reserved, self.num_resets = 500, 900, 0

    def reset_peak_memory_stats(self, device) -> None:
        self.num_resets += 1
        self.peak = self.reserved = 100

    def max_memory_allocated(self, device) -> int:
        return self.peak

    def max_memory_reserved(self, device) -> int:
        return self.reserved


def write_proc(folder: Path, hwm_kb: int | None, rss_kb: int) -> Path:
    lines = ["Name:\tpython", f"VmRSS:\t{rss_kb} kB"] + ([] if hwm_kb is None else [f"VmHWM:\t{hwm_kb} kB"])
    (folder / "status").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc/self/clear_refs")
def test_real_peak_belongs_to_its_window():
    meter = MemoryMeter("cpu")
    meter.start()
    block = np.ones(128 * MIB, dtype=np.uint8)
    high = meter.stop()
    del block
    meter.start()
    low = meter.stop()
    if high.host_scope != "window":
        pytest.skip("this kernel does not reset the high-water mark")
    assert low.host_scope == "window"
    assert high.peak_host_bytes - low.peak_host_bytes > 100 * MIB
    assert high.peak_device_bytes is None
    assert "CPU" in high.device_reason


def test_working_reset_is_a_window(tmp_path):
    meter = MemoryMeter("cpu", write_proc(tmp_path, 2048, 2000))
    meter.start()
    assert (tmp_path / "clear_refs").read_text() == "5"
    write_proc(tmp_path, 4096, 2000)
    peak = meter.stop()
    assert (peak.peak_host_bytes, peak.host_scope, peak.host_reason) == (4096 * 1024, "window", None)


def test_ignored_reset_is_said(tmp_path):
    meter = MemoryMeter("cpu", write_proc(tmp_path, 900_000, 2000))
    meter.start()
    peak = meter.stop()
    assert (peak.peak_host_bytes, peak.host_scope) == (900_000 * 1024, "process start")


def test_refused_reset_is_said(tmp_path):
    (tmp_path / "clear_refs").mkdir()  # can't be written, not even by root
    meter = MemoryMeter("cpu", write_proc(tmp_path, 2048, 2000))
    meter.start()
    assert meter.stop().host_scope == "process start"


@pytest.mark.parametrize("content", [None, "VmHWM:\n", "VmHWM: many kB\n"])
def test_without_procfs_the_process_peak_is_taken(tmp_path, content):
    pytest.importorskip("resource")
    if content is not None:
        (tmp_path / "status").write_text(content)
    meter = MemoryMeter("cpu", tmp_path / "absent" if content is None else tmp_path)
    meter.start()
    peak = meter.stop()
    assert peak.host_scope == "process start"
    assert peak.peak_host_bytes > 10 * MIB


def test_no_source_at_all_is_none_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    meter = MemoryMeter("cpu", tmp_path / "absent")
    meter.start()
    peak = meter.stop()
    assert peak.peak_host_bytes is None
    assert peak.host_reason == "this platform tells no peak resident set"


def test_device_peak_is_reset_and_read():
    cuda = Cuda()
    meter = MemoryMeter("cuda:0", cuda=cuda)
    meter.start()
    cuda.peak, cuda.reserved = 300, 400
    peak = meter.stop()
    assert cuda.num_resets == 1
    assert (peak.peak_device_bytes, peak.peak_device_reserved_bytes, peak.device_reason) == (300, 400, None)


def test_device_failures_are_reasons():
    def fail(device):
        raise RuntimeError("CUDA error:\n out of luck")

    broken = SimpleNamespace(reset_peak_memory_stats=fail)
    meter = MemoryMeter("cuda", cuda=broken)
    meter.start()
    peak = meter.stop()
    assert peak.peak_device_bytes is None
    assert peak.device_reason == "RuntimeError: CUDA error: out of luck"
    cuda = Cuda()
    cuda.max_memory_reserved = fail
    meter = MemoryMeter("cuda", cuda=cuda)
    meter.start()
    assert meter.stop().peak_device_bytes is None
    assert "keeps no peak for device type meta" in MemoryMeter("meta").stop().device_reason


def peak(device=1, host=1, scope="window", reason=None) -> PeakMemory:
    return PeakMemory(device, device, reason, host, scope, None)


def test_combine_takes_the_highest_and_keeps_gaps():
    assert combine([peak(3, 5), peak(7, 2)]) == peak(7, 5)
    assert combine([peak(), peak(scope="process start")]).host_scope == "process start"
    lost = combine([peak(3), peak(None, 9, reason="gone")])
    assert (lost.peak_device_bytes, lost.device_reason, lost.peak_host_bytes) == (None, "gone", 9)


def test_combine_of_nothing():
    with pytest.raises(ValueError, match="at least one window"):
        combine([])

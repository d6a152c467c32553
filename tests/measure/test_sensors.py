"""RAPL over a fake powercap folder: which domains count, wraps, and unreadable files."""

from __future__ import annotations

import time

import pytest

from dispark.measure import sensors
from dispark.measure.sensors import RaplSensor, SensorError, Ticker


def test_packages_are_summed_and_nothing_twice(powercap):
    powercap.domain("intel-rapl:1", "package-1", 7_000_000)
    powercap.domain("intel-rapl:0", "package-0", 1_000_000)
    powercap.domain("intel-rapl:0:0", "core", 1)
    powercap.domain("intel-rapl:0:1", "dram", 1)
    powercap.domain("intel-rapl:2", "psys", 1)
    powercap.domain("intel-rapl-mmio:0", "package-0", 1)
    sensor = RaplSensor(powercap.root)
    assert sensor.scope == "cpu packages package-0, package-1"
    sensor.begin()
    powercap.domain("intel-rapl:0", "package-0", 3_500_000)
    powercap.domain("intel-rapl:1", "package-1", 8_000_000)
    powercap.domain("intel-rapl:0:0", "core", 9_000_000)
    powercap.domain("intel-rapl:2", "psys", 9_000_000)
    assert sensor.end() == pytest.approx(3.5)
    assert sensor.warnings() == []


def test_wrap_is_bridged(powercap):
    powercap.domain("intel-rapl:0", "package-0", 9_000_000, 10_000_000)
    sensor = RaplSensor(powercap.root)
    sensor.begin()
    powercap.domain("intel-rapl:0", "package-0", 500_000, 10_000_000)
    assert sensor.end() == pytest.approx(1.5)


def test_two_wraps_are_seen_by_the_reads_inside_the_window(powercap):
    powercap.domain("intel-rapl:0", "package-0", 0, 10_000_000)
    sensor = RaplSensor(powercap.root, tick_s=1000.0)
    sensor.begin()
    for energy_uj in (6_000_000, 2_000_000, 8_000_000, 4_000_000):  # 6 J a step
        powercap.domain("intel-rapl:0", "package-0", energy_uj, 10_000_000)
        sensor._advance()
    assert sensor.end() == pytest.approx(24.0)


def test_ticks_come_from_a_thread(powercap):
    powercap.domain("intel-rapl:0", "package-0", 0)
    sensor = RaplSensor(powercap.root, tick_s=0.01)
    sensor.begin()
    powercap.domain("intel-rapl:0", "package-0", 4_000_000)
    deadline = time.monotonic() + 10.0
    while sensor._packages[0].total_uj == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sensor._packages[0].total_uj == 4_000_000
    assert sensor.end() == pytest.approx(4.0)


def test_default_tick_is_shorter_than_a_wrap_at_a_kilowatt(powercap):
    powercap.domain("intel-rapl:0", "package-0", 0, 65_532_610_987)
    assert RaplSensor(powercap.root)._tick_s == pytest.approx(32.77, abs=0.01)
    powercap.domain("intel-rapl:0", "package-0", 0, 262_143_328_850)
    assert RaplSensor(powercap.root)._tick_s == 60.0


@pytest.mark.parametrize(("range_uj", "now_uj"), [(None, 5), (0, 5), (10, 5)])
def test_going_back_without_a_usable_range_is_an_error(powercap, range_uj, now_uj):
    powercap.domain("intel-rapl:0", "package-0", 1_000_000, range_uj)
    sensor = RaplSensor(powercap.root, tick_s=1000.0)
    sensor.begin()
    powercap.domain("intel-rapl:0", "package-0", now_uj, range_uj)
    with pytest.raises(SensorError, match="went back"):
        sensor.end()


def test_absent_folder_and_folder_without_packages(powercap):
    with pytest.raises(SensorError, match="no intel-rapl package domain"):
        RaplSensor(powercap.root / "absent")
    powercap.domain("intel-rapl:0", "psys", 1)
    with pytest.raises(SensorError, match="no intel-rapl package domain"):
        RaplSensor(powercap.root)


def test_one_unreadable_package_refuses_the_whole(powercap, monkeypatch):
    powercap.domain("intel-rapl:0", "package-0", 1)
    powercap.domain("intel-rapl:1", "package-1", 1)
    locked = powercap.root / "intel-rapl:1" / "energy_uj"
    read_text = type(locked).read_text

    def guarded(path, *args, **options):
        if path == locked:
            raise PermissionError(13, "Permission denied")
        return read_text(path, *args, **options)

    monkeypatch.setattr(sensors.Path, "read_text", guarded)
    with pytest.raises(SensorError, match="energy_uj is not readable by this user"):
        RaplSensor(powercap.root)


def test_garbage_and_vanished_counters_are_errors(powercap):
    powercap.domain("intel-rapl:0", "package-0", 1)
    sensor = RaplSensor(powercap.root)
    sensor.begin()
    counter = powercap.root / "intel-rapl:0" / "energy_uj"
    counter.write_text("none\n")
    with pytest.raises(SensorError, match="holds 'none'"):
        sensor.end()
    counter.unlink()
    with pytest.raises(SensorError, match="No such file"):
        sensor.begin()


def test_ticker_keeps_the_first_error_for_stop():
    class Owner:
        calls = 0

        def fail(self) -> None:
            self.calls += 1
            raise ZeroDivisionError("bad")

    owner = Owner()
    ticker = Ticker(owner.fail, 0.01)
    ticker._thread.join(timeout=10.0)
    with pytest.raises(SensorError, match="ZeroDivisionError: bad"):
        ticker.stop()
    assert owner.calls == 1

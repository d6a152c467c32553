"""Meters over replayed sensors: values, reasons, and that nothing ever ends a run."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

import dispark.measure.energy as energy
from dispark.interfaces import EnergyMeter
from dispark.measure.energy import AutoMeter, NullMeter, NvmlCounterMeter, NvmlPowerMeter, RaplMeter, combine
from dispark.measure.windows import SHORT_WINDOW

CONF = Path(__file__).resolve().parents[2] / "conf" / "meter"
METERS = [AutoMeter, NvmlCounterMeter, NvmlPowerMeter, RaplMeter, NullMeter]


@pytest.fixture(autouse=True)
def _no_visible_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def measure(meter, clock, seconds=5.0):
    meter.start()
    clock.now_s += seconds
    return meter.stop()


@pytest.mark.parametrize("meter_class", METERS)
def test_meters_fit_the_protocol(meter_class):
    assert isinstance(meter_class(), EnergyMeter)


def test_counter_meter(make_nvml, clock):
    meter = NvmlCounterMeter(nvml=make_nvml(), clock=clock, sleep=clock.sleep)
    meter.bind("cuda:0")
    reading = measure(meter, clock)
    assert reading.energy_j == pytest.approx(1000.0)
    assert reading.window_s == pytest.approx(5.0)
    assert (reading.source, reading.scope, reading.reason) == ("nvml_counter", "gpu board 0", None)
    assert reading.warnings == ()
    assert reading.idle_power_w is None
    assert reading.estimated_energy_j is None


def test_counter_replay_is_read_once_at_each_edge(make_nvml, clock):
    nvml = make_nvml()
    nvml.energy_mj = [1_000, 2_000, 12_000, 50_000, 53_000]  # the probe, then two windows
    meter = NvmlCounterMeter(nvml=nvml, clock=clock)
    meter.bind("cuda:0")
    assert [measure(meter, clock).energy_j for _ in range(2)] == [10.0, 3.0]
    assert nvml.energy_mj == []


def test_power_meter(make_nvml, clock):
    meter = NvmlPowerMeter(poll_interval_s=10.0, nvml=make_nvml(), clock=clock)
    meter.bind("cuda:0")
    reading = measure(meter, clock)
    assert reading.energy_j == pytest.approx(1000.0)
    assert reading.source == "nvml_power"
    assert reading.scope == "gpu board 0, instantaneous power"


def test_rapl_meter_and_its_scope_on_a_gpu_run(powercap, clock):
    powercap.domain("intel-rapl:0", "package-0", 0)
    meter = RaplMeter(powercap=powercap.root, clock=clock)
    meter.bind("cpu")
    meter.start()
    powercap.domain("intel-rapl:0", "package-0", 80_000_000)
    clock.now_s += 4.0
    reading = meter.stop()
    assert reading.energy_j == pytest.approx(80.0)
    assert (reading.source, reading.scope) == ("rapl", "cpu packages package-0")
    meter.bind("cuda:0")
    assert measure(meter, clock, 0.1).scope == "cpu packages package-0 (host only, not cuda:0)"


def test_idle_power_is_measured_once_per_device(make_nvml, clock):
    nvml = make_nvml(power_w=60.0)
    meter = NvmlCounterMeter(idle_s=10.0, nvml=nvml, clock=clock, sleep=clock.sleep)
    meter.bind("cuda:0")
    started = clock.now_s
    meter.measure_idle()
    assert clock.now_s == started + 10.0
    nvml.energy_mj = [0, 1_500_000]
    reading = measure(meter, clock)
    assert clock.now_s == started + 15.0
    assert reading.window_s == pytest.approx(5.0)
    assert reading.idle_power_w == pytest.approx(60.0)
    assert reading.net_energy_j == pytest.approx(1500.0 - 300.0)
    nvml.energy_mj = None
    meter.bind("cuda:0")
    measure(meter, clock)
    assert clock.now_s == started + 15.0 + 15.0


def test_idle_is_not_waited_for_without_a_sensor(clock):
    meter = NvmlCounterMeter(idle_s=10.0, clock=clock, sleep=clock.sleep)
    meter.bind("cpu")
    started = clock.now_s
    reading = measure(meter, clock, 1.0)
    assert clock.now_s == started + 1.0
    assert reading.idle_power_w is None


def test_a_failed_idle_measurement_leaves_the_window_intact(make_nvml, clock):
    nvml = make_nvml()
    meter = NvmlCounterMeter(idle_s=1.0, nvml=nvml, clock=clock, sleep=clock.sleep)
    meter.bind("cuda:0")
    nvml.energy_mj = [7, 7, 1_000, 2_000]  # stands still while idle
    reading = measure(meter, clock)
    assert reading.energy_j == pytest.approx(1.0)
    assert reading.net_energy_j is None
    assert reading.warnings == ("idle power is unknown: the sensor did not move",)


def test_short_window_keeps_raw_joules_until_combined(make_nvml, clock):
    meter = NvmlCounterMeter(nvml=make_nvml(), clock=clock)
    meter.bind("cuda:0")
    short = measure(meter, clock, 1.0)
    assert short.energy_j == pytest.approx(200.0)
    assert short.warnings == (SHORT_WINDOW,)
    assert combine([short], meter.min_window_s).energy_j is None
    total = combine([short, measure(meter, clock, 1.0)], meter.min_window_s)
    assert total.energy_j == pytest.approx(400.0)


def test_driver_lost_inside_a_window(make_nvml, clock):
    nvml = make_nvml()
    meter = NvmlCounterMeter(nvml=nvml, clock=clock)
    meter.bind("cuda:0")
    meter.start()
    nvml.failures["nvmlDeviceGetTotalEnergyConsumption"] = "GPU is lost"
    clock.now_s += 5.0
    lost = meter.stop()
    assert lost.energy_j is None
    assert lost.reason == "nvmlDeviceGetTotalEnergyConsumption: GPU is lost"
    assert lost.window_s == pytest.approx(5.0)
    assert lost.source == "nvml_counter"
    assert measure(meter, clock).energy_j is None  # still lost, at the window's start this time
    nvml.failures.clear()
    recovered = measure(meter, clock)
    assert recovered.energy_j == pytest.approx(1000.0)
    assert recovered.reason is None
    assert combine([lost, recovered]).energy_j is None


def test_counter_that_stands_still_is_missing_not_zero(make_nvml, clock):
    nvml = make_nvml(power_w=0.0)
    meter = NvmlCounterMeter(nvml=nvml, clock=clock)
    meter.bind("cuda:0")
    assert measure(meter, clock, 5.0).energy_j is None
    assert measure(meter, clock, 5.0).reason == "the sensor did not move in 5.0 s"
    assert measure(meter, clock, 0.05).energy_j == 0.0  # too short to have moved; a part of a sum


@pytest.mark.parametrize("meter_class", [NvmlCounterMeter, NvmlPowerMeter])
def test_nvml_meters_refuse_a_cpu_run(meter_class, make_nvml, clock):
    meter = meter_class(nvml=make_nvml(), clock=clock)
    meter.bind("cpu")
    reading = measure(meter, clock)
    assert reading.energy_j is None
    assert reading.reason == "the work runs on cpu, not on an NVIDIA board"
    assert (reading.source, reading.scope) == ("none", "none")


def test_any_exception_of_a_backend_becomes_a_reason(clock):
    class Broken:
        source, scope = "nvml_counter", "gpu board 0"

        def begin(self) -> None:
            raise MemoryError

        def end(self) -> float:
            raise ZeroDivisionError("never reached")

        def warnings(self) -> list[str]:
            return []

    class Meter(energy.SensorMeter):
        def open(self, device):
            return Broken()

    meter = Meter(idle_s=1.0, clock=clock, sleep=clock.sleep)
    meter.bind("cpu")
    reading = measure(meter, clock)
    assert reading.energy_j is None
    assert reading.reason == "MemoryError: no message"
    assert reading.warnings == ("idle power is unknown: MemoryError: no message",)


def test_auto_takes_the_counter_then_power_then_none(make_nvml, clock):
    meter = AutoMeter(nvml=make_nvml(), clock=clock)
    meter.bind("cuda:0")
    assert measure(meter, clock).source == "nvml_counter"
    nvml = make_nvml(nvmlDeviceGetTotalEnergyConsumption="Not Supported")
    meter = AutoMeter(poll_interval_s=10.0, nvml=nvml, clock=clock)
    meter.bind("cuda:0")
    assert measure(meter, clock).source == "nvml_power"
    nvml.failures |= {"nvmlDeviceGetFieldValues": "Not Supported", "nvmlDeviceGetPowerUsage": "Not Supported"}
    meter.bind("cuda:0")
    reading = measure(meter, clock)
    assert reading.energy_j is None
    assert reading.reason == (
        "no energy sensor for cuda:0 (nvml_counter: nvmlDeviceGetTotalEnergyConsumption: Not Supported; "
        "nvml_power: nvmlDeviceGetPowerUsage: Not Supported)"
    )


def test_auto_on_a_gpu_never_reads_the_host(make_nvml, powercap, clock):
    powercap.domain("intel-rapl:0", "package-0", 0)
    nvml = make_nvml(nvmlInit="NVML Shared Library Not Found")
    meter = AutoMeter(nvml=nvml, powercap=powercap.root, clock=clock)
    meter.bind("cuda:0")
    assert measure(meter, clock).source == "none"


def test_auto_on_the_cpu(powercap, clock):
    meter = AutoMeter(powercap=powercap.root, clock=clock, estimated_watts=15.0)
    meter.bind("cpu")
    reading = measure(meter, clock)
    assert reading.energy_j is None
    assert reading.reason.startswith("no energy sensor for cpu (rapl: ")
    assert reading.estimated_energy_j == pytest.approx(75.0)
    powercap.domain("intel-rapl:0", "package-0", 0)
    meter.bind("cpu")
    meter.start()
    powercap.domain("intel-rapl:0", "package-0", 3_000_000)
    clock.now_s += 3.0
    reading = meter.stop()
    assert reading.energy_j == pytest.approx(3.0)
    assert reading.estimated_energy_j == pytest.approx(45.0)


def test_start_without_bind_finds_a_device_by_itself(powercap, clock, monkeypatch):
    monkeypatch.setattr(energy, "pick_device", lambda name: energy.torch.device("cpu"))
    powercap.domain("intel-rapl:0", "package-0", 0)
    assert measure(AutoMeter(powercap=powercap.root, clock=clock), clock, 0.1).source == "rapl"


def test_null_meter_says_why(clock):
    reading = measure(NullMeter("no wish", 10.0, clock), clock, 2.0)
    assert (reading.energy_j, reading.window_s, reading.reason) == (None, 2.0, "no wish")
    assert reading.estimated_energy_j == 20.0
    assert combine([reading]).reason == "no wish"


def test_stop_without_start_and_restart(make_nvml, clock):
    for meter in (NvmlCounterMeter(nvml=make_nvml(), clock=clock), NullMeter(clock=clock)):
        meter.bind("cuda:0")
        with pytest.raises(RuntimeError, match="without having been started"):
            meter.stop()
        meter.start()
        clock.now_s += 50.0  # left open by a crash
        assert measure(meter, clock, 3.0).window_s == pytest.approx(3.0)
        with pytest.raises(RuntimeError, match="without having been started"):
            meter.stop()


@pytest.mark.parametrize("value", [-3, 0, float("nan"), float("inf"), True, "15"])
@pytest.mark.parametrize("meter_class", METERS)
def test_bad_watts(meter_class, value):
    with pytest.raises(ValueError, match=r"^meter\.estimated_watts=.*: must be a finite number > 0") as caught:
        meter_class(estimated_watts=value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("meter_class", "options", "message"),
    [
        (RaplMeter, {"idle_s": -1}, "meter.idle_s=-1: must be a finite number >= 0"),
        (AutoMeter, {"idle_s": "ten"}, "meter.idle_s='ten': must be a finite number >= 0"),
        (NvmlCounterMeter, {"min_window_s": float("inf")}, "meter.min_window_s=inf: must be a finite number >= 0"),
        (NvmlPowerMeter, {"poll_interval_s": 0}, "meter.poll_interval_s=0: must be a finite number from 0.01 to 10"),
        (AutoMeter, {"poll_interval_s": 11}, "meter.poll_interval_s=11: must be a finite number from 0.01 to 10"),
        (NullMeter, {"reason": " "}, "meter.reason=' ': must be a text that says why energy is not measured"),
    ],
)
def test_bad_numbers(meter_class, options, message):
    with pytest.raises(ValueError) as caught:
        meter_class(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_config_builds_its_meter(path):
    node = OmegaConf.load(path)
    meter = instantiate(node, _convert_="all")
    assert isinstance(meter, EnergyMeter)
    assert node._target_ == f"dispark.measure.energy.{type(meter).__name__}"
    injected = {"clock", "sleep", "nvml", "powercap"}
    assert set(node) - {"_target_"} == set(inspect.signature(type(meter)).parameters) - injected
    lines = path.read_text().splitlines()
    keys = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
    assert all(lines[i - 1].startswith("#") for i in keys)


def test_there_is_a_config_for_each_meter():
    assert {path.stem for path in CONF.glob("*.yaml")} == {"auto", "nvml_counter", "nvml_power", "rapl", "none"}

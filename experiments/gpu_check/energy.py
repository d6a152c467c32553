"""Joules a token by two sensors at once, and whether torch's device and the board that is read are the same.

The board's energy counter and its polled power cover the same windows, so that their ratio says how far to trust each.
Windows are at least ten seconds of whole passes, prefill included; tokens are the emitted ones of the same window. The
sensors see the whole board and know nothing of the host's power.

One window an arm: heat from the arm before is in it. Repeat the script for a claim.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from dispark.interfaces import EnergyMeter
from dispark.measure.energy import NvmlCounterMeter, NvmlPowerMeter, combine
from dispark.measure.memory import MemoryMeter
from dispark.measure.metrics import energy_per_token
from dispark.measure.nvml import call, device_state, open_board
from dispark.measure.sensors import SensorError
from dispark.targets.model import wrap
from dispark.types import EnergyReading
from gpu_check.common import Sizes, Subject, decode, make_requests, synchronize

BLOCK_BYTES = 2**28
ARMS = (("none", 1), ("ngram", 1), ("none", 16), ("ngram", 16))
COUNTER, POLLED = "nvml_counter", "nvml_power"


def run_energy(subject: Subject, device: torch.device, sizes: Sizes, nvml: Any = None) -> dict[str, Any]:
    """Joules a token for each of ARMS in bfloat16, with the state of the board before and after."""
    loaded = subject.load(device, "bfloat16")
    target = wrap(replace(loaded, stop_ids=()))
    requests = make_requests(loaded.tokenizer, max(rows for _, rows in ARMS), sizes.speed_tokens)
    meters = {
        COUNTER: NvmlCounterMeter(idle_s=sizes.idle_s, nvml=nvml),
        POLLED: NvmlPowerMeter(idle_s=sizes.idle_s / 2, nvml=nvml),
    }

    def work(drafter: str, rows: int) -> Callable[[], int]:
        batch = requests[:rows]
        return lambda: sum(len(r.output_ids) for r in decode(target, drafter, batch, rows).records)

    works = {f"{drafter}_b{rows}": work(drafter, rows) for drafter, rows in ARMS}
    for run in works.values():
        run()
    synchronize(device)
    before = device_state(device, nvml)
    for meter in meters.values():
        meter.bind(device)
        meter.measure_idle()
    arms = {name: window(run, meters, sizes.energy_s, device) for name, run in works.items()}
    states = {"before": before, "after": device_state(device, nvml)}
    is_read = all(arm["sensors"][COUNTER]["energy_j"] is not None for arm in arms.values())
    polled = all(arm["sensors"][POLLED]["energy_j"] is not None for arm in arms.values())
    return {"arms": arms, "device_state": states, "has_counter": is_read, "has_polling": polled, "is_ok": True}


def window(
    work: Callable[[], int], meters: Mapping[str, EnergyMeter], min_s: float, device: torch.device
) -> dict[str, Any]:
    """Repeats `work` for at least `min_s` seconds under all meters.

    Args:
        work: decodes something and returns how many tokens it emitted.

    Returns:
        By meter, under `sensors`: the reading, and J/token gross and net or the reason why not; `counter_over_polling`,
        the ratio of their mean powers, None unless both read.
    """
    synchronize(device)
    for meter in meters.values():
        meter.start()
    start_s = time.perf_counter()
    num_tokens = num_passes = 0
    while num_passes == 0 or time.perf_counter() - start_s < min_s:
        num_tokens += work()
        num_passes += 1
    synchronize(device)
    readings = {name: meter.stop() for name, meter in reversed(list(meters.items()))}
    sensors = {}
    for name, reading in readings.items():
        whole = combine([reading], getattr(meters[name], "min_window_s", 2.0))
        sensors[name] = {**asdict(whole), **energy_per_token(asdict(whole), num_tokens)}
    return {
        "num_tokens": num_tokens,
        "num_passes": num_passes,
        "sensors": sensors,
        "counter_over_polling": power_ratio(readings.get(COUNTER), readings.get(POLLED)),
    }


def power_ratio(a: EnergyReading | None, b: EnergyReading | None) -> float | None:
    """Mean power by one reading over that by another, None unless both have joules."""
    if a is None or b is None or not a.energy_j or not b.energy_j:
        return None
    return (a.energy_j / a.window_s) / (b.energy_j / b.window_s)


# -- the board ----------------------------------------------------------------------------------------------------


def run_board(device: torch.device, nvml: Any = None) -> dict[str, Any]:
    """Which board torch's device is, by UUID and by watching its memory; and whether peak memory is reset."""
    if device.type != "cuda":
        return {"status": "skipped", "reason": f"the work runs on {device}, which has no board"}
    mapping, memory = check_mapping(device, nvml), check_peak_reset(device)
    parts = (mapping, memory)
    return {
        "mapping": mapping,
        "peak_memory": memory,
        "device_state": device_state(device, nvml),
        "is_ok": all(part["is_ok"] is not False for part in parts),
    }


def allocate(device: torch.device, num_bytes: int) -> torch.Tensor:
    """A block that is really there when this returns."""
    block = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    synchronize(device)
    return block


def check_mapping(
    device: torch.device,
    nvml: Any = None,
    cuda: Any = torch.cuda,
    take: Callable[[torch.device, int], object] = allocate,
) -> dict[str, Any]:
    """The board by torch's UUID and by NVML, and whether that board shows a block that torch allocates.

    Args:
        nvml, cuda, take: replaced in tests.

    Returns:
        `is_ok` None, with a reason, where NVML can't be read.
    """
    try:
        board = open_board(device, nvml)
        properties = cuda.get_device_properties(device)
        uuid = getattr(properties, "uuid", None)
        library = importlib.import_module("pynvml") if nvml is None else nvml
        found: dict[str, Any] = {
            "scope": board.scope,
            "visible": cuda.device_count(),
            "has_uuid": uuid is not None,
            "torch_name": properties.name,
            "nvml_name": board.state()["name"],
        }
        if uuid is None:
            return {**found, "is_ok": None, "reason": "this torch reports no UUID"}
        handle = call(library, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
        cuda.empty_cache()  # cached memory would hide the block
        used = int(call(library, "nvmlDeviceGetMemoryInfo", handle).used)
        block = take(device, 4 * BLOCK_BYTES)
        grown = int(call(library, "nvmlDeviceGetMemoryInfo", handle).used) - used
        del block
        cuda.empty_cache()
    except SensorError as error:
        return {"is_ok": None, "reason": str(error)}
    is_ok = grown >= 3 * BLOCK_BYTES and found["torch_name"] == found["nvml_name"]
    return {**found, "grown_bytes": grown, "is_ok": is_ok, "reason": None}


def check_peak_reset(device: torch.device) -> dict[str, Any]:
    """A window with a large block, then one without it: the second peak must not remember the first."""
    meter = MemoryMeter(device)
    meter.start()
    allocate(device, BLOCK_BYTES)
    first = meter.stop()
    meter.start()
    second = meter.stop()
    peaks = (first.peak_device_bytes, second.peak_device_bytes)
    if peaks[0] is None or peaks[1] is None:
        return {"first": asdict(first), "second": asdict(second), "is_ok": None, "reason": first.device_reason}
    return {
        "first": asdict(first),
        "second": asdict(second),
        "is_ok": peaks[0] - peaks[1] >= BLOCK_BYTES,
        "reason": None,
    }

"""What single calls cost: a packed forward against the model's linear layers alone, and ragged packing.

Times are medians of calls that each start and end with the device idle, so they hold what a host waits for. The same
layers replayed as a CUDA graph, and their weights read once at copy speed, say what part of that is launching.

It does not know rounds, drafters or texts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dispark.decoding.target import TargetModel
from gpu_check.common import synchronize

CONTEXT = 128  # tokens that each row holds
SPLIT_LENGTHS = (8, *[1] * 15)
COPY_BYTES = 2**29


@torch.inference_mode()
def call_costs(target: TargetModel, repeats: int) -> dict[str, Any]:
    """Seconds of a packed forward, of the model's linear layers alone on as many tokens, and of ragged packing."""
    rows = sum(SPLIT_LENGTHS)
    prompts = [list(range(i, i + CONTEXT)) for i in range(rows)]
    target.open(rows, CONTEXT + max(SPLIT_LENGTHS))
    target.prefill(list(range(rows)), prompts)
    tokens_N = torch.arange(rows, device=target.device)

    def forward(lengths: Sequence[int]) -> Callable[[], object]:
        used = list(range(len(lengths)))
        return lambda: target.forward(used, tokens_N[: sum(lengths)], lengths)

    calls: dict[str, Callable[[], object]] = {
        "forward_1": forward([1]),
        "forward_16": forward([1] * 16),
        "forward_split": forward(SPLIT_LENGTHS),
        "forward_single": forward([1] * rows),
        "linears_1": linears(target, 1),
        "linears_16": linears(target, 16),
    }
    seconds = time_calls(calls, repeats, target.device)
    floor = weights_floor_s(target)
    return {
        "seconds": seconds,
        "forward_over_linears": {n: seconds[f"forward_{n}"] / seconds[f"linears_{n}"] for n in (1, 16)},
        # 16 rows, one of them with 8 tokens, against as many tokens in rows of their own.
        "packed_cost": seconds["forward_split"] / seconds["forward_single"],
        "linears_as_graph": {n: graph_s(linears(target, n), repeats, target.device) for n in (1, 16)},
        "weights_floor": floor,
    }


def linears(target: TargetModel, num_tokens: int) -> Callable[[], object]:
    """Calls every linear layer of the model once, the LM head included, on random inputs."""
    layers = [module for module in target.model.modules() if isinstance(module, nn.Linear)]
    widths = {layer.in_features for layer in layers}
    inputs = {w: torch.randn(1, num_tokens, w, device=target.device, dtype=target.dtype) for w in widths}

    def call() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    return call


def time_calls(calls: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each call, host and device together, interleaved forth and back."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, repeats):
        for name in calls if turn % 2 else reversed(calls):
            synchronize(device)
            start_s = time.perf_counter()
            calls[name]()
            synchronize(device)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(values) for name, values in seconds.items()}


def graph_s(call: Callable[[], object], repeats: int, device: torch.device) -> dict[str, Any]:
    """Seconds of a call replayed as a CUDA graph, so without the cost of launching it; None where that can't be had."""
    if device.type != "cuda":
        return {"seconds": None, "reason": "needs a CUDA device"}
    try:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return {"seconds": time_calls({"replay": graph.replay}, repeats, device)["replay"], "reason": None}
    except RuntimeError as error:
        return {"seconds": None, "reason": " ".join(str(error).split())[:200]}


def weights_floor_s(target: TargetModel) -> dict[str, float]:
    """The least time in which the linear weights can be read once, at the speed of a large copy measured here."""
    size = COPY_BYTES if target.device.type == "cuda" else COPY_BYTES // 16
    source = torch.randint(0, 100, (size,), dtype=torch.uint8, device=target.device)
    copy = torch.empty_like(source)
    copied_s = time_calls({"copy": lambda: copy.copy_(source)}, 5, target.device)["copy"]
    layers = [module for module in target.model.modules() if isinstance(module, nn.Linear)]
    num_bytes = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    per_s = 2 * size / copied_s  # read and written
    return {"weight_bytes": num_bytes, "copy_bytes_per_s": per_s, "seconds": num_bytes / per_s}

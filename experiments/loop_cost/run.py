"""What a round costs and where it goes: the loop against the limits of the machine it runs on.

Every figure is a ratio of medians measured in turns within one process, as absolute times of a shared machine move.
Prints a table and, as its last line, one JSON object; `--out FILE` keeps it.

    python experiments/loop_cost/run.py --target smollm2_135m --out results/loop_cost.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from torch import nn

import dispark.config
from baselines.autoregressive import AutoregressiveDrafter
from dispark.config import build
from dispark.decoding.loop import DecodingLoop
from dispark.decoding.target import TargetModel
from dispark.measure import provenance
from dispark.schedulers.fixed import FixedScheduler
from dispark.targets.model import wrap
from dispark.targets.spec import load
from dispark.tasks.conversation import ConversationSource
from dispark.types import Sampling
from dispark.verifiers.rejection import RejectionVerifier

CONTEXT = 256


def alternate(cases: dict[str, Callable[[], Any]], repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each case, the cases taking turns; two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(repeats + 2):
        for name, case in cases.items():
            synchronize(device)
            start = time.perf_counter()
            case()
            synchronize(device)
            if i >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def matmuls(target: TargetModel, num_tokens: int) -> Callable[[], None]:
    """The model's linear layers alone, on inputs of their size, as the target runs them."""
    linears = [module for module in target.model.modules() if isinstance(module, nn.Linear)]
    inputs = {
        width: torch.randn(num_tokens, width, dtype=target.dtype, device=target.device)
        for width in {linear.in_features for linear in linears}
    }

    def run() -> None:
        with torch.inference_mode():
            for linear in linears:
                linear(inputs[linear.in_features])

    return run


def verify_case(target: TargetModel, lengths: Sequence[int]) -> Callable[[], None]:
    """A packed verify of rows that hold CONTEXT tokens each, rolled back afterwards."""
    rows = list(range(len(lengths)))
    tokens = torch.randint(5, target.vocab_size - 5, (sum(lengths),), device=target.device)

    def run() -> None:
        target.forward(rows, tokens, lengths)

    return run


def fill(target: TargetModel, num_rows: int) -> None:
    target.open(num_rows, CONTEXT + 32)
    prompt = list(range(5, 5 + CONTEXT))
    target.prefill(list(range(num_rows)), [prompt] * num_rows)


def call_costs(target: TargetModel, repeats: int) -> dict[str, Any]:
    """Forward against matmuls, and the cost of packed calls against their token sum."""
    fill(target, 1)
    one = alternate(
        {
            "matmuls_1": matmuls(target, 1),
            "verify_1": verify_case(target, [1]),
            "matmuls_8": matmuls(target, 8),
            "verify_8": verify_case(target, [8]),
        },
        repeats,
        target.device,
    )
    fill(target, 23)
    ragged = alternate(
        {
            "verify_16_rows_one_of_8": verify_case(target, [1] * 7 + [8] + [1] * 8),
            "verify_16_rows_uneven": verify_case(target, [(i * 5) % 8 + 1 for i in range(16)]),
            "verify_16_rows_of_8": verify_case(target, [8] * 16),
            "verify_16_rows_of_1": verify_case(target, [1] * 16),
            "verify_23_rows_of_1": verify_case(target, [1] * 23),
        },
        repeats,
        target.device,
    )
    return {
        "median_s": one | ragged,
        "forward_over_matmuls_1": one["verify_1"] / one["matmuls_1"],
        "forward_over_matmuls_8": one["verify_8"] / one["matmuls_8"],
        "verify_8_over_verify_1": one["verify_8"] / one["verify_1"],
        "one_long_row_over_23_rows": ragged["verify_16_rows_one_of_8"] / ragged["verify_23_rows_of_1"],
    }


def stock_matmuls(target: TargetModel, repeats: int) -> dict[str, Any]:
    """The packed linear layers against stock ones, in turns."""

    def stock() -> None:
        with target.stock():
            case()

    case = matmuls(target, 1)
    times = alternate({"packed": case, "stock": stock}, repeats, target.device)
    return {"stock_over_packed_matmuls_1": times["stock"] / times["packed"]}


def batch_gain(
    target: TargetModel, tokenizer: Any, prompts: Sequence[Any], tokens: int, repeats: int
) -> dict[str, Any]:
    """Decode throughput of 16 rows over that of one, and the host's share of a round, autoregressively."""

    def run(batch_size: int) -> tuple[float, float]:
        loop = DecodingLoop(
            target,
            AutoregressiveDrafter(),
            FixedScheduler(),
            RejectionVerifier(),
            Sampling(),
            decode=tokenizer.decode,
            batch_size=batch_size,
            num_slots=1024,
        )
        trace = loop.run(ConversationSource(prompts[:batch_size], tokenizer, tokens, 0))
        rounds = [step for step in trace.steps if step["kind"] == "round" and step["num_rows"] == batch_size]
        wall = sum(step["wall_s"] for step in rounds)
        own = sum(step["draft_s"] + step["verify_s"] for step in rounds)
        return len(rounds) * batch_size / wall, 1 - own / wall

    run(1), run(16)
    results = {1: [], 16: []}  # type: dict[int, list[tuple[float, float]]]
    for _ in range(repeats):
        for size in (1, 16, 16, 1):
            results[size].append(run(size))
    speed = {size: statistics.median(value[0] for value in values) for size, values in results.items()}
    host = {size: statistics.median(value[1] for value in values) for size, values in results.items()}
    return {
        "decode_tokens_per_s": {str(size): value for size, value in speed.items()},
        "host_share": {str(size): value for size, value in host.items()},
        "throughput_16_over_1": speed[16] / speed[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2_135m", help="an option of the target group")
    parser.add_argument("--repeats", type=int, default=15, help="counted calls a case")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer in the batch comparison")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args()
    dispark.config.make_conf_importable()
    with initialize_config_module("dispark.conf", version_base="1.3"):
        cfg = compose("bench", overrides=[f"target={options.target}", "task=all"])
        loaded = load(build(cfg.target))
        prompts = [prompt for prompt in build(cfg.task).prompts() if len(prompt.turns) == 1]
    target = wrap(loaded)
    short = sorted(prompts, key=lambda prompt: len(prompt.turns[0]))[20:36]
    result: dict[str, Any] = {"target": loaded.name, "dtype": str(target.dtype).removeprefix("torch.")}
    result |= {"device": str(target.device), "linear_backend": target.linear_backend, "context": CONTEXT}
    result |= call_costs(target, options.repeats)
    result |= stock_matmuls(target, options.repeats)
    result |= batch_gain(target, loaded.tokenizer, short, options.tokens, max(1, options.repeats // 8))
    result["provenance"] = provenance.collect(target.device, target.dtype)
    for key, value in result.items():
        if isinstance(value, float):
            print(f"{key:32s} {value:8.2f}")
    for name, seconds in result["median_s"].items():
        print(f"{name:32s} {seconds * 1e3:8.2f} ms")
    for key in ("decode_tokens_per_s", "host_share"):
        print(f"{key:32s} {result[key]}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""How fast the loop is: against transformers.generate, over batch sizes, and against the model's matmuls alone.

Passes are interleaved A B C D D C B A after a warm-up, wall-clocked with the device idle at both ends. Ratios are taken
pass by pass and their median is given beside the lowest and the highest. The batches ignore stop tokens, so that every
row runs to its cap and the batch stays full; a real model's text behind its end repeats itself, and n-gram acceptance
there says nothing.

It does not check texts; that is correctness.py's part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from baselines.hf_generate import HfGenerate
from baselines.ngram import NgramDrafter
from dispark.decoding.rows import Trace
from dispark.decoding.target import TargetModel
from dispark.measure.throughput import phase_split
from dispark.targets.architectures import config_class, model_class
from dispark.targets.model import wrap
from dispark.types import Request
from gpu_check.calls import call_costs
from gpu_check.common import GREEDY, Budget, ListSource, Sizes, Subject, decode, make_requests, slots_for, synchronize

# The layers of Qwen3-4B.
LARGE_ARCHITECTURE = "qwen3"
LARGE_SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.03,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LARGE_NOTE = "RANDOM WEIGHTS in the shape of Qwen3-4B: times mean something, texts and acceptance do not"


def run_speed(subject: Subject, device: torch.device, sizes: Sizes, budget: Budget) -> dict[str, Any]:
    """Every measurement of this file on the default target, in bfloat16."""
    loaded = subject.load(device, "bfloat16")
    requests = make_requests(loaded.tokenizer, max(sizes.batch_rows), sizes.speed_tokens)
    target, endless = wrap(loaded), wrap(replace(loaded, stop_ids=()))
    return measure(target, endless, requests, sizes, budget)


def run_large(device: torch.device, sizes: Sizes, budget: Budget) -> dict[str, Any]:
    """The same on a larger model, with half of the tokens."""
    target = random_target(device, LARGE_ARCHITECTURE, LARGE_SHAPE, torch.bfloat16)
    lengths = [16 + 29 * i % 113 for i in range(max(sizes.batch_rows))]
    requests = random_requests(target.vocab_size, lengths, sizes.speed_tokens // 2)
    shorter = replace(sizes, batch_tokens=sizes.batch_tokens // 2, speed_requests=2)
    return {"note": LARGE_NOTE, **measure(target, target, requests, shorter, budget)}


def measure(
    target: TargetModel, endless: TargetModel, requests: Sequence[Request], sizes: Sizes, budget: Budget
) -> dict[str, Any]:
    """Against generate at batch 1, then batches, then single calls.

    Args:
        target: stops at its own stop tokens.
        endless: the same model without stop tokens.
        requests: at least as many as the largest batch has rows.
    """
    result: dict[str, Any] = {"against_generate": against_generate(target, requests[: sizes.speed_requests], sizes)}
    result["calls"] = call_costs(target, sizes.call_repeats)
    batches: dict[str, Any] = {}
    for rows in sizes.batch_rows:
        if reason := budget.refuse(15.0 * sizes.batch_tokens / Sizes.batch_tokens):
            batches[f"b{rows}"] = {"status": "skipped", "reason": reason}
            continue
        batch = [replace(request, max_new_tokens=sizes.batch_tokens) for request in requests[:rows]]
        batches[f"b{rows}"] = batch_speed(endless, batch, rows, sizes.repeats)
    one = batches.get("b1", {}).get("none", {}).get("decode_tokens_per_s")
    for part in batches.values():
        own = part.get("none", {}).get("decode_tokens_per_s")
        part["none_over_none_b1"] = own / one if own and one else None
    return result | {"batches": batches, "is_ok": True}


def against_generate(target: TargetModel, requests: Sequence[Request], sizes: Sizes) -> dict[str, Any]:
    """Batch 1, greedy: the loop's `none` and `ngram` against generate without and with its prompt lookup."""
    options = NgramDrafter().generate_options()
    slots = slots_for(requests)
    traces: dict[str, Trace] = {}

    def loop(drafter: str) -> Callable[[], int]:
        def decode_all() -> int:
            traces[drafter] = decode(target, drafter, requests, 1, num_slots=slots)
            return sum(len(record.output_ids) for record in traces[drafter].records)

        return decode_all

    def outside(keywords: dict[str, Any]) -> Callable[[], int]:
        generate = HfGenerate(target, GREEDY, lambda ids: "", keywords)
        return lambda: sum(len(record.output_ids) for record in generate.run(ListSource(requests)))

    arms = {"none": loop("none"), "ngram": loop("ngram"), "generate": outside({}), "prompt_lookup": outside(options)}
    speeds = race(arms, sizes.repeats, target.device)
    return {
        "tokens_per_s": {arm: statistics.median(values) for arm, values in speeds.items()},
        "passes": {arm: len(values) for arm, values in speeds.items()},
        "ratios": {
            "none_over_generate": ratio(speeds["none"], speeds["generate"]),
            "ngram_over_prompt_lookup": ratio(speeds["ngram"], speeds["prompt_lookup"]),
            "ngram_over_none": ratio(speeds["ngram"], speeds["none"]),
            "prompt_lookup_over_generate": ratio(speeds["prompt_lookup"], speeds["generate"]),
        },
        "loop": {drafter: summary_of(trace) for drafter, trace in traces.items()},
    }


def batch_speed(target: TargetModel, requests: Sequence[Request], rows: int, repeats: int) -> dict[str, Any]:
    """`none` and `ngram` on one full batch: decode tokens/s (prefill left out), MATL and where a round's time goes."""
    slots = slots_for(requests)
    traces: dict[str, list[Trace]] = {"none": [], "ngram": []}

    def loop(drafter: str) -> Callable[[], int]:
        def decode_all() -> int:
            traces[drafter].append(decode(target, drafter, requests, rows, num_slots=slots))
            return sum(len(record.output_ids) for record in traces[drafter][-1].records)

        return decode_all

    speeds = race({drafter: loop(drafter) for drafter in traces}, repeats, target.device)
    result: dict[str, Any] = {"ngram_over_none": ratio(speeds["ngram"], speeds["none"])}
    for drafter, found in traces.items():
        summaries = [summary_of(trace) for trace in found[1:]]  # the first was the warm-up
        middle = sorted(summaries, key=lambda part: part["decode_tokens_per_s"])[len(summaries) // 2]
        result[drafter] = {"tokens_per_s": statistics.median(speeds[drafter]), **middle}
    return result


def summary_of(trace: Trace) -> dict[str, Any]:
    """Decode speed, MATL and the phase split of one pass."""
    seconds = sum(step["wall_s"] for step in trace.steps if step["kind"] == "round")
    emitted = sum(row["num_emitted"] for row in trace.rounds)
    return {
        "decode_tokens_per_s": emitted / seconds if seconds else None,
        "matl": emitted / len(trace.rounds) if trace.rounds else None,
        **phase_split(pd.DataFrame(trace.steps)),
    }


def race(arms: dict[str, Callable[[], int]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Tokens/s of each arm in each of its passes, the arms forth and back `repeats` times, after one pass unmeasured.

    Args:
        arms: each decodes something and returns how many tokens it emitted.
    """
    for arm in arms.values():
        arm()
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name in [*arms, *reversed(arms)]:
            synchronize(device)
            start_s = time.perf_counter()
            tokens = arms[name]()
            synchronize(device)
            speeds[name].append(tokens / (time.perf_counter() - start_s))
    return speeds


def ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of the pass-by-pass ratios; n-th passes are of one leg, forth or back."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


# -- a larger model -----------------------------------------------------------------------------------------------


def random_target(device: torch.device, architecture: str, shape: dict[str, Any], dtype: torch.dtype) -> TargetModel:
    """A stock model whose random weights are drawn on the device itself: seconds, where a CPU takes minutes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            model = model_class(architecture)(config_class(architecture)(**shape))
    finally:
        torch.set_default_dtype(before)
    model = model.eval().requires_grad_(False)
    limit = int(model.config.max_position_embeddings)
    return TargetModel(model, name=f"random_{architecture}", stop_ids=(), max_context=limit)


def random_requests(vocab_size: int, lengths: Sequence[int], max_new_tokens: int) -> list[Request]:
    """Requests of random tokens, one for each length."""
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(vocab_size, (num,), generator=generator).tolist()) for num in lengths]
    return [Request(f"p{i}#0", f"p{i}", 0, "gpu_check", "random", p, max_new_tokens, i) for i, p in enumerate(prompts)]

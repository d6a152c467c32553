"""Thousands of requests that come, wait for room, leave and end, one after another on the same rows.

Checks that every served text is the request's own text alone (float32, greedy, a sample of them), that no row and no
block stays taken, and that memory doesn't grow with the number of requests. Ends with 1 where a check fails.

    python experiments/soak/run.py --out results/soak.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

import dispark.config
from dispark.config import build
from dispark.decoding.loop import DecodingLoop
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.measure import provenance
from dispark.schedulers.fixed import FixedScheduler
from dispark.serving.arrivals import Arrival
from dispark.serving.blocks import BlockBudget
from dispark.serving.source import ServingSource
from dispark.targets.model import wrap
from dispark.targets.spec import LoadedTarget, load
from dispark.tasks.conversation import first_messages
from dispark.types import Prompt, Request, RequestRecord, Sampling
from dispark.verifiers.rejection import RejectionVerifier

BLOCK_TOKENS = 16


def requests_of(prompts: Sequence[Prompt], loaded: LoadedTarget, num: int, most: int, seed: int) -> list[Request]:
    """Requests over the prompts in turns, each with a cap of its own."""
    draws = random.Random(seed)
    rendered = [(p, tuple(loaded.tokenizer.render(first_messages(p)))) for p in prompts]
    found = []
    for i in range(num):
        prompt, ids = rendered[i % len(rendered)]
        cap = draws.randint(1, most)
        found.append(Request(f"r{i}", prompt.prompt_id, 0, prompt.task, prompt.category, ids, cap, i))
    return found


class Watch:
    """A source that notes the process's memory as requests end."""

    def __init__(self, inner: ServingSource) -> None:
        self._inner = inner
        self.resident: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def finish(self, record: RequestRecord) -> None:
        self._inner.finish(record)
        self.resident.append(_resident_bytes())


def loop_of(target: TargetModel, drafter: Drafter, loaded: LoadedTarget, rows: int, longest: int) -> DecodingLoop:
    slots = longest + drafter.draft_length + 1
    return DecodingLoop(
        target,
        drafter,
        FixedScheduler(),
        RejectionVerifier(),
        Sampling(),
        decode=loaded.tokenizer.decode,
        batch_size=rows,
        num_slots=slots,
        max_context=longest,
    )


def run(target: TargetModel, drafter: Drafter, loaded: LoadedTarget, words: argparse.Namespace) -> dict[str, Any]:
    """The soak, then the sample alone."""
    with initialize_config_module("dispark.conf", version_base="1.3"):
        prompts = build(compose("bench", overrides=[f"task={words.task}"]).task).prompts()
    requests = requests_of(prompts, loaded, words.requests, words.tokens, seed=0)
    longest = max(len(r.prompt_ids) for r in requests) + words.tokens
    draws = random.Random(1)
    leaving = {r.request_id: draws.randint(1, r.max_new_tokens) for r in requests if draws.random() < 0.1}
    times = sorted(draws.uniform(0.0, words.requests / words.rate) for _ in requests)
    spare = drafter.draft_length + 1
    # Room for half of the rows at full length: admission has to wait.
    budget = BlockBudget(max(1, words.rows * (longest + spare) // (2 * BLOCK_TOKENS)), BLOCK_TOKENS)
    arrivals = [Arrival(at) for at in times]
    source = Watch(ServingSource(requests, arrivals, budget, None, spare, longest, leaving))
    start = time.perf_counter()
    loop = loop_of(target, drafter, loaded, words.rows, longest)
    trace = loop.run(source)
    seconds = time.perf_counter() - start
    records = {record.request.request_id: record for record in trace.records}
    sample = draws.sample(requests, min(words.sample, len(requests)))
    wrong = [r.request_id for r in sample if not is_own_text(records[r.request_id], alone(loop, r))]
    quarter = len(source.resident) // 4
    most_rows = max(step["num_rows"] for step in trace.steps)
    return {
        "requests": len(requests),
        "served": len(records),
        "cancelled": sum(record.finish_reason == "cancelled" for record in trace.records),
        "seconds": seconds,
        "tokens": sum(len(record.output_ids) for record in trace.records),
        "most_rows": most_rows,
        "waited": sum(v.admitted_s is not None and v.admitted_s - v.arrived_s > 0.01 for v in source.visits.values()),
        "rows_left": len(target.cache.rows),
        "blocks_left": len(budget.names),
        "sample": len(sample),
        "wrong": wrong,
        "resident_mb_after_a_quarter": source.resident[quarter] / 1e6,
        "resident_mb_at_the_end": source.resident[-1] / 1e6,
    }


def alone(loop: DecodingLoop, request: Request) -> list[int]:
    """The request's text with nobody else in the loop, to its cap."""
    source = ServingSource(
        [request], [Arrival(0.0)], BlockBudget(None, BLOCK_TOKENS), 1, loop.drafter.draft_length + 1, 10**9
    )
    return loop.run(source).records[0].output_ids


def is_own_text(record: RequestRecord, whole: list[int]) -> bool:
    """Whether a text is the whole one, or where its user left the beginning of it."""
    num = len(record.output_ids)
    is_cut = record.finish_reason == "cancelled"
    return record.output_ids == whole[:num] and (is_cut or num == len(whole))


def failures(found: dict[str, Any], most_growth_mb: float) -> list[str]:
    """What went wrong, in words."""
    wrong = []
    if found["served"] != found["requests"]:
        wrong.append(f"{found['requests'] - found['served']} requests were lost")
    if found["rows_left"] or found["blocks_left"]:
        wrong.append(f"{found['rows_left']} rows and {found['blocks_left']} requests' blocks stay taken")
    if found["wrong"]:
        wrong.append(f"{len(found['wrong'])} of {found['sample']} texts are not the request's own")
    growth = found["resident_mb_at_the_end"] - found["resident_mb_after_a_quarter"]
    if growth > most_growth_mb:
        wrong.append(f"memory grew by {growth:.0f} MB")
    return wrong


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    except (OSError, ValueError, IndexError):
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2_135m")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--task", default="all")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=24, help="largest cap of an answer")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--most-growth-mb", type=float, default=200.0, help="the records themselves are some of it")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    dispark.config.make_conf_importable()
    with initialize_config_module("dispark.conf", version_base="1.3"):
        cfg = compose("bench", overrides=[f"target={words.target}", f"drafter={words.drafter}", "target.dtype=float32"])
    loaded = load(build(cfg.target))
    found = run(wrap(loaded), build(cfg.drafter), replace(loaded), words)
    wrong = failures(found, words.most_growth_mb)
    result = found | {"failures": wrong, "provenance": provenance.collect("cpu", "float32")}
    line = json.dumps(result)
    if words.out is not None:
        words.out.parent.mkdir(parents=True, exist_ok=True)
        words.out.write_text(line + "\n", encoding="utf-8")
    for reason in wrong:
        print(f"soak: {reason}", file=sys.stderr)
    print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""T_draft of every drafter, split into its stages, and T_verify, at several draft lengths and batch sizes.

Prints a table and, as its last line, one JSON object; `--out FILE` keeps it.

    python experiments/draft_cost/run.py --target smollm2_135m --lengths 4,7,15 --batches 1,16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

import dispark.config
from dispark.config import build
from dispark.decoding.loop import DecodingLoop
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.measure import provenance
from dispark.runs.table import to_text
from dispark.schedulers.fixed import FixedScheduler
from dispark.targets.model import wrap
from dispark.targets.spec import load
from dispark.tasks.conversation import ConversationSource
from dispark.types import Sampling
from dispark.verifiers.rejection import RejectionVerifier

DRAFTERS = (
    "dispark,dispark+num_candidates=64,dispark+num_candidates=64+random.draft_vocab_size=8192,dispark_gated,dispark_rnn,"
    "dflash,dflash+random.draft_vocab_size=8192,medusa,blockwise,eagle3,eagle,mtp,"
    "self_speculation,draft_model"
)
SKIPPED_ROUNDS = 3  # the first ones allocate
# Where a drafter's YAML says how many tokens it drafts: a block's slots, heads, or plainly.
LENGTH_KEYS = ("random.block_size", "random.num_heads", "draft_length")


def drafter_config(name: str, length: int, words: list[str]) -> DictConfig:
    """The composed drafter of `NAME` or `NAME+key=value`, drafting `length` tokens."""
    option, *settings = name.split("+")
    overrides = [*words, f"drafter={option}", *(f"drafter.{setting}" for setting in settings)]
    plain = compose("bench", overrides=overrides).drafter
    key = next(key for key in LENGTH_KEYS if _has(plain, key))
    extra = 1 if plain.get("convention") == "zlab" else 0
    return compose("bench", overrides=[*overrides, f"drafter.{key}={length + extra}"]).drafter


def _has(node: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            return False
        node = node[part]
    return True


class Stopwatch:
    """Adds up the seconds of a method, waiting for the device before and after each call."""

    def __init__(self, owner: Any, method: str, device: torch.device) -> None:
        self.seconds: list[float] = []
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            _wait(device)
            start = time.perf_counter()
            result = inner(*arguments, **options)
            _wait(device)
            self.seconds.append(time.perf_counter() - start)
            return result

        setattr(owner, method, timed)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    target: TargetModel, drafter: Drafter, tokenizer: Any, prompts: list[Any], batch: int, tokens: int
) -> dict[str, Any]:
    """Medians over the rounds in which all rows were active, in milliseconds."""
    stages = {
        stage: Stopwatch(drafter, f"{stage}_stage", target.device)
        for stage in ("parallel", "sequential")
        if hasattr(drafter, f"{stage}_stage")
    }
    loop = DecodingLoop(
        target,
        drafter,
        FixedScheduler(),
        RejectionVerifier(),
        Sampling(),
        decode=tokenizer.decode,
        batch_size=batch,
        num_slots=512 + drafter.draft_length + 1,
    )
    trace = loop.run(ConversationSource(prompts[:batch], tokenizer, tokens, 0, max_context=512))
    rounds = [step for step in trace.steps if step["kind"] == "round"]
    kept = [i for i, step in enumerate(rounds) if step["num_rows"] == batch and i >= SKIPPED_ROUNDS]
    if not kept:
        raise ValueError(f"--tokens={tokens}: no round is left after the first {SKIPPED_ROUNDS}; take more")

    def median_ms(values: list[float]) -> float:
        return statistics.median(values[i] for i in kept) * 1e3

    row: dict[str, Any] = {"num_rounds": len(kept)}
    for key in ("draft", "verify", "wall"):
        row[f"{key}_ms"] = median_ms([step[f"{key}_s"] for step in rounds])
    for stage, watch in stages.items():
        row[f"{stage}_ms"] = median_ms(watch.seconds)
    if not stages:
        row |= {"parallel_ms": None, "sequential_ms": row["draft_ms"]}
    row["draft_share"] = row["draft_ms"] / row["wall_ms"]
    row["sequential_share"] = row["sequential_ms"] / row["wall_ms"]
    return row


def growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Draft time at the longest draft over that at the shortest, for each drafter and batch."""
    found = []
    for name, batch in dict.fromkeys((row["drafter"], row["batch"]) for row in rows):
        mine = {row["draft_length"]: row["draft_ms"] for row in rows if (row["drafter"], row["batch"]) == (name, batch)}
        low, high = min(mine), max(mine)
        found.append({"drafter": name, "batch": batch, "from": low, "to": high, "ratio": mine[high] / mine[low]})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2_135m", help="an option of the target group")
    parser.add_argument("--override", action="append", default=[], help="a setting such as target.dtype=float32")
    parser.add_argument(
        "--drafters", default=DRAFTERS, help="options of the drafter group, each with +key=value or not"
    )
    parser.add_argument("--lengths", default="4,7,15", help="drafted tokens a round")
    parser.add_argument("--batches", default="1,16", help="rows decoded at a time")
    parser.add_argument("--tokens", type=int, default=20, help="tokens per answer, so rounds")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args()
    dispark.config.make_conf_importable()
    words = [f"target={options.target}", "task=all", *options.override]
    rows: list[dict[str, Any]] = []
    with initialize_config_module("dispark.conf", version_base="1.3"):
        cfg = compose("bench", overrides=words)
        loaded = load(build(cfg.target))
        target = wrap(loaded)
        # Stop tokens would end rounds early; the texts are noise anyway.
        target.stop_ids = frozenset()
        prompts = [prompt for prompt in build(cfg.task).prompts() if len(prompt.turns) == 1]
        prompts.sort(key=lambda prompt: len(prompt.turns[0]))
        for name in options.drafters.split(","):
            for length in map(int, options.lengths.split(",")):
                node = drafter_config(name, length, words)
                for batch in map(int, options.batches.split(",")):
                    drafter = build(node)
                    row = {"drafter": name, "batch": batch, "draft_length": length}
                    row |= measure(target, drafter, loaded.tokenizer, prompts[20:], batch, options.tokens)
                    rows.append(row)
                    print(f"{name} x{batch} G={length}: {row['draft_ms']:.1f} ms", file=sys.stderr, flush=True)
    import pandas as pd

    shown = pd.DataFrame(rows, dtype=object).sort_values(["batch", "drafter", "draft_length"], kind="stable")
    shares = dict.fromkeys(("draft_share", "sequential_share"), ".1%")
    print(to_text(shown, {**dict.fromkeys((c for c in shown.columns if c.endswith("_ms")), ".2f"), **shares}))
    for item in (ratios := growth(rows)):
        print(f"{item['drafter']:28s} x{item['batch']:<3d} {item['from']} -> {item['to']}: {item['ratio']:.2f}")
    result: dict[str, Any] = {"target": loaded.name, "weights": "random drafters", "rows": rows, "growth": ratios}
    result["provenance"] = provenance.collect(target.device, target.dtype)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "provenance"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

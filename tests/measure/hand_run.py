"""A run small enough to work out by hand; the figures that it gives are derived in the tests that use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

# prompt, task, category, tokens, seconds of prefill and decoding by arm, seconds of generate
PROMPTS = [
    ("p1", "chat", "writing", 8, 0.5, {"ngram": 1.5, "none": 3.5}, 5.0),
    ("p2", "code", "python", 4, 0.5, {"ngram": 1.0, "none": 1.5}, 2.5),
    ("p3", "code", "sql", 3, 0.5, {"ngram": 0.5, "none": 1.0}, 2.5),
]
# prompt, round, num_drafted, num_verified, num_accepted_raw, num_accepted, num_emitted, end, is_truncated
NGRAM_ROUNDS: list[tuple[Any, ...]] = [
    ("p1", 0, 3, 3, 3, 3, 4, None, False),
    ("p1", 1, 3, 2, 1, 1, 2, None, False),
    ("p1", 2, 0, 0, 0, 0, 1, "stop", False),
    ("p2", 0, 3, 3, 0, 0, 1, None, False),
    ("p2", 1, 3, 3, 3, 2, 2, "stop", False),
    ("p3", 0, 2, 2, 2, 2, 2, "length", True),
]
ROUND_COLUMNS = [
    "num_drafted",
    "num_verified",
    "num_accepted_raw",
    "num_accepted",
    "num_emitted",
    "end",
    "is_truncated",
]
PHASE_SHARE = {
    "draft_s": 0.2,
    "schedule_s": 0.04,
    "verify_s": 0.6,
    "accept_s": 0.04,
    "commit_s": 0.06,
    "host_s": 0.06,
}


@dataclass
class Run:
    """The three frames of a run directory."""

    rounds: pd.DataFrame
    steps: pd.DataFrame
    requests: pd.DataFrame


def make_hand_run() -> Run:
    """Three prompts, G = 3, arms ngram, none and transformers.generate, one repeat."""
    labels = {prompt: (task, category) for prompt, task, category, *_ in PROMPTS}
    rounds: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []

    def add_round(arm: str, prompt: str, index: int, values: tuple[Any, ...], wall_s: float) -> None:
        task, category = labels[prompt]
        head = {"arm": arm, "repeat": 0, "request_id": f"{prompt}#0", "prompt_id": prompt, "turn": 0}
        head |= {"task": task, "category": category, "round": index, "step": len(steps), "num_rows": 1}
        rounds.append(head | dict(zip(ROUND_COLUMNS, values, strict=True)))
        phases = {name: share * wall_s for name, share in PHASE_SHARE.items()}
        step = {"arm": arm, "repeat": 0, "chunk": 0, "step": len(steps), "kind": "round", "num_rows": 1}
        steps.append(step | {"num_tokens": 1 + values[1], **phases, "wall_s": wall_s})

    for prompt, index, *values in NGRAM_ROUNDS:
        add_round("ngram", prompt, index, tuple(values), wall_s=0.5)
    for prompt, task, category, tokens, prefill_s, decode_s, generate_s in PROMPTS:
        for index in range(tokens - 1):
            wall_s = decode_s["none"] / (tokens - 1)
            add_round("none", prompt, index, (0, 0, 0, 0, 1, None, False), wall_s=wall_s)
        row: dict[str, Any] = {"repeat": 0, "request_id": f"{prompt}#0", "prompt_id": prompt, "turn": 0, "task": task}
        row |= {"category": category, "num_output_tokens": tokens, "text": "word " * tokens}
        for arm, seconds in decode_s.items():
            num_rounds = sum(entry["arm"] == arm and entry["prompt_id"] == prompt for entry in rounds)
            times = {"prefill_s": prefill_s, "decode_s": seconds, "ttft_s": prefill_s}
            requests.append(row | times | {"arm": arm, "num_rounds": num_rounds, "latency_s": prefill_s + seconds})
            step = {"arm": arm, "repeat": 0, "chunk": 0, "step": len(steps), "kind": "prefill", "num_rows": 1}
            empty = dict.fromkeys(PHASE_SHARE, 0.0) | {"verify_s": prefill_s}
            steps.append(step | {"num_tokens": 10, **empty, "wall_s": prefill_s})
        requests.append(row | {"arm": "transformers.generate", "num_rounds": 0, "latency_s": generate_s})
    return Run(pd.DataFrame(rounds), pd.DataFrame(steps), pd.DataFrame(requests))

"""Stored runs with known figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from dispark.runs.store import RunStore

PROMPTS = 12
FINGERPRINT = {"chat": "aa11", "code": "bb22"}


def write_run(
    root: Path,
    drafter: str,
    task: str = "chat",
    *,
    matl: int = 2,
    factor: float = 2.0,
    slow: float = 1.0,
    is_done: bool = True,
    **changes: Any,
) -> Path:
    """Stores a run whose drafter emits `matl` tokens a round and is `factor` times as fast as its baseline arm.

    Prompt i has 2 (i + 3) tokens after its first; a baseline token takes 0.1 s times `slow`.
    """
    arms = ["none"] if drafter == "none" else ["none", drafter]
    run: dict[str, Any] = {
        "status": "done",
        "target": "toy",
        "task": task,
        "drafter": drafter,
        "scheduler": "fixed",
        "verifier": "greedy",
        "sampling": {"temperature": 0.0, "top_k": None, "top_p": None},
        "fingerprint": FINGERPRINT[task],
        "config": {"batch_size": 1, "max_new_tokens": 64},
        "provenance": {
            "dtype": "float32",
            "device": "cpu",
            "cpu": {"model": "abacus"},
            "extra": {"weights_sha256": "w1"},
        },
        "energy": {arm: {"energy_j": None, "window_s": 9.0, "reason": "no sensor here"} for arm in arms},
        "memory": {arm: {"peak_device_bytes": None, "peak_host_bytes": 3 * 2**29} for arm in arms},
        "losslessness": {arm: {"verdict": "identical"} for arm in arms},
        "degeneracy": {arm: {"degenerate_share": 0.25} for arm in arms},
    }
    run |= changes
    rounds, requests = [], []
    for arm in arms:
        length = 1 if arm == "none" else matl
        speed = 1.0 if arm == "none" else factor
        for i in range(PROMPTS):
            tokens = 2 * (i + 3)
            head = {"arm": arm, "repeat": 0, "request_id": f"p{i}#0", "prompt_id": f"p{i}", "turn": 0, "task": task}
            head |= {"category": "any"}
            for index in range(tokens // length):
                counts = dict.fromkeys(("num_accepted", "num_accepted_raw", "num_verified"), length - 1)
                counts |= {"num_emitted": length, "num_drafted": length - 1, "num_rows": 1}
                rounds.append(head | counts | {"round": index, "step": 0, "end": None, "is_truncated": False})
            # Prompts differ in how much faster the drafter is, so that intervals have a width.
            wobble = 1.0 + 0.02 * (i % 3 - 1) * (arm != "none")
            times = {"prefill_s": 0.0, "decode_s": wobble * slow * 0.1 * (tokens + 1) / speed, "ttft_s": 0.01}
            counts = {"num_output_tokens": tokens + 1, "num_rounds": tokens // length, "latency_s": 1.0}
            requests.append(head | counts | times | {"output_ids": [1, 2], "text": "x", "finish_reason": "length"})
    store = RunStore(root, key=f"{drafter}-{task}"[:12], slug=f"toy/{task}/{drafter}")
    store.begin({"drafter": drafter})
    for row in requests:
        store.append_request(row)
    store.write_rounds(pd.DataFrame(rounds))
    store.write_steps(pd.DataFrame())
    store.write_run(run)
    if is_done:
        store.mark_done()
    return store.path

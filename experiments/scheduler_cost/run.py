"""What choosing takes: every scheduler's `choose` on the drafts of many rows, against a round.

Prints a line for each scheduler and, as its last line, one JSON object; `--out FILE` keeps it.

    python experiments/scheduler_cost/run.py --out results/scheduler_cost.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from dispark.audit.command import make_scheduler, options
from dispark.measure import provenance
from dispark.runs.table import to_text
from dispark.types import Draft, Load, Outcome


def drafts_of(num_rows: int, width: int, num: int, seed: int = 0) -> list[Draft]:
    """Rounds of drafts whose confidences fall along each row."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        confidence = generator.beta(4.0, 1.0, (num_rows, width)).astype(np.float32)
        tokens = torch.zeros((num_rows, width), dtype=torch.int64)
        found.append(Draft(tokens, [width] * num_rows, confidence_BG=torch.from_numpy(confidence)))
    return found


def measure(name: str, drafts: list[Draft]) -> dict[str, Any]:
    """Median and largest seconds of limit, choice and observation of one round."""
    scheduler = make_scheduler(name)()
    num_rows = len(drafts[0].lengths)
    names = [str(i) for i in range(num_rows)]
    times = []
    for step, draft in enumerate(drafts):
        load = Load(num_rows, 0, step, [256] * num_rows, names, 0.5)
        start = time.perf_counter()
        scheduler.draft_limit(load)
        lengths = scheduler.choose(draft, load)
        accepted = [min(2, n) for n in lengths]
        outcome = Outcome([[0] * (n + 1) for n in accepted], accepted, [None] * num_rows, [False] * num_rows)
        middle = time.perf_counter()
        scheduler.observe(outcome, lengths, 0.05)
        times.append(middle - start + time.perf_counter() - middle)
    counted = times[len(times) // 5 :]
    return {"scheduler": name, "ms": 1e3 * statistics.median(counted), "most_ms": 1e3 * max(counted), "rows": num_rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--positions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--round-ms", type=float, default=30.0, help="a round that the times are held against")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    drafts = drafts_of(words.rows, words.positions, words.rounds)
    rows = []
    for name in options("scheduler"):
        if name == "oracle":  # needs a recorded run
            continue
        row = measure(name, drafts)
        rows.append(row | {"share of a round": row["ms"] / words.round_ms})
    print(to_text(pd.DataFrame(rows), {"ms": ".3f", "most_ms": ".3f", "share of a round": ".2%"}))
    result = {"rows": rows, "positions": words.positions, "round_ms": words.round_ms}
    line = json.dumps(result | {"provenance": provenance.collect("cpu", "none")})
    if words.out is not None:
        words.out.parent.mkdir(parents=True, exist_ok=True)
        words.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())

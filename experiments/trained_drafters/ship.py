"""Writes checkpoints of training runs as int8 where `checkpoint=shipped` finds them, with what they do in their cards.

python experiments/trained_drafters/ship.py results/train/smollm2_135m --names dispark,dflash --runs results/runs/all
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pandas as pd

from dispark.config import SHIPPED_CHECKPOINTS
from dispark.drafters.storage import write_compact
from dispark.runs.compare import compare, load_runs
from dispark.runs.files import write_text

_COLUMNS = ("sampling", "task", "num_prompts", "matl", "matl_ci", "speedup", "speedup_ci")


def results_section(frame: pd.DataFrame, name: str) -> str:
    """What a card says of decoding: a Markdown table of a drafter's rows of a comparison.

    Args:
        frame: of `dispark compare`.
        name: of the drafter.

    Raises:
        ValueError: it has no row.
    """
    mine = frame[frame["drafter"] == name]
    if mine.empty:
        raise ValueError(f"runs: none of drafter {name} in there")
    lines = ["## On prompts that training never saw", f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    for row in mine.sort_values(["sampling", "task"]).to_dict("records"):
        cells = [_cell(row[key]) for key in _COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", "Speed-ups are against autoregressive decoding in the same run; intervals redraw prompts.", ""]
    )


def _cell(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{value[0]:.2f}, {value[1]:.2f}]"
    if value is None or (isinstance(value, float) and pd.isna(value)):
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the training run")
    parser.add_argument("--names", help="students to ship; all by default")
    parser.add_argument("--runs", type=Path, help="folder of bench runs with these checkpoints, for the cards")
    parser.add_argument("--to", type=Path, default=SHIPPED_CHECKPOINTS, help="where to")
    options = parser.parse_args()
    run = json.loads((options.run / "run.json").read_text(encoding="utf-8"))
    names = options.names.split(",") if options.names else list(run["config"]["students"])
    frame = None if options.runs is None else compare(load_runs([options.runs]))
    sizes = {}
    for name in names:
        folder = options.to / run["config"]["target"]["name"] / name
        sizes[name] = write_compact(options.run / name, folder)
        card = folder / "README.md"
        if frame is not None:
            write_text(card, card.read_text(encoding="utf-8") + results_section(frame, name))
        print(f"{name}: {sizes[name] / 1e6:.1f} MB", file=sys.stderr)
    print(json.dumps({"target": run["config"]["target"]["name"], "bytes": sizes, "total": sum(sizes.values())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the checkpoints of a training run as int8 where `checkpoint=shipped` finds them.

python experiments/trained_drafters/ship.py results/train/smollm2_135m --names dispark,dflash
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dispark.config import SHIPPED_CHECKPOINTS
from dispark.drafters.storage import write_compact


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the training run")
    parser.add_argument("--names", help="students to ship; all by default")
    parser.add_argument("--to", type=Path, default=SHIPPED_CHECKPOINTS, help="where to")
    options = parser.parse_args()
    run = json.loads((options.run / "run.json").read_text(encoding="utf-8"))
    names = options.names.split(",") if options.names else list(run["config"]["students"])
    sizes = {}
    for name in names:
        sizes[name] = write_compact(options.run / name, options.to / run["config"]["target"]["name"] / name)
        print(f"{name}: {sizes[name] / 1e6:.1f} MB", file=sys.stderr)
    print(json.dumps({"target": run["config"]["target"]["name"], "bytes": sizes, "total": sum(sizes.values())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

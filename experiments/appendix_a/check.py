"""The counterexample of Appendix A, with and without Algorithm 1's early stop, by enumeration.

python experiments/appendix_a/check.py
"""

from __future__ import annotations

import json
import sys

import pandas as pd

from dispark.audit import controls
from dispark.audit.output_law import output_law
from dispark.interfaces import Scheduler
from dispark.runs.table import to_text
from dispark.schedulers.hardware_aware import HardwareAwareScheduler
from dispark.verifiers.rejection import RejectionVerifier


def first_token(scheduler: Scheduler) -> tuple[float, float]:
    """The law of the first token, A and B."""
    law = output_law(controls.AppendixAWorld(), lambda: scheduler, RejectionVerifier(), 1)
    return law[((0,),)], law[((1,),)]


def main() -> int:
    with_stop = first_token(HardwareAwareScheduler(cost=controls.APPENDIX_A_COST))
    without = first_token(controls.WithoutStopScheduler(cost=controls.APPENDIX_A_COST))
    rows = [
        {"scheduler": "Algorithm 1", "A": with_stop[0], "B": with_stop[1], "paper": controls.APPENDIX_A_RIGHT},
        {"scheduler": "without its stop", "A": without[0], "B": without[1], "paper": controls.APPENDIX_A_WRONG},
    ]
    is_found = all(abs(row["A"] - row["paper"][0]) < 1e-12 for row in rows)  # type: ignore[index]
    print(to_text(pd.DataFrame(rows, dtype=object), {"A": ".12f", "B": ".12f"}))
    print(json.dumps({"rows": rows, "agrees": is_found}))
    return 0 if is_found else 1


if __name__ == "__main__":
    sys.exit(main())

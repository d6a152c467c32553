"""`dispark profile`: measures what a step of the target costs here, by rows and tokens.

All rows are filled once; every kind of step then runs in turns, so that a machine that slows down slows all of them. A
step is the packed verify of the loop, without drafting and without what the host does around it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from dispark.config import build
from dispark.decoding.target import TargetModel
from dispark.runs.files import check_writable
from dispark.runs.table import to_text
from dispark.schedulers.profile import Profile, check_ascending, identity_of
from dispark.targets.model import wrap
from dispark.targets.spec import load

_WARM_UP = 1


@torch.inference_mode()
def measure(
    target: TargetModel, rows: Sequence[int], tokens: Sequence[int], context: int, repeats: int, seed: int = 0
) -> Profile:
    """Times every kind of step.

    Args:
        target: free.
        rows, tokens: ascending numbers of rows, and of tokens in each.
        context: tokens that each row holds before.
        repeats: counted steps of each kind.
        seed: of the tokens.
    """
    most = rows[-1]
    generator = torch.Generator().manual_seed(seed)
    target.open(most, context + tokens[-1])
    texts = torch.randint(target.vocab_size, (most, context), generator=generator).tolist()
    target.prefill(list(range(most)), texts)
    kinds = [(num, width) for num in rows for width in tokens]
    inputs = {
        (num, width): torch.randint(target.vocab_size, (num * width,), generator=generator).to(target.device)
        for num, width in kinds
    }
    seconds: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    for turn in tqdm(range(_WARM_UP + repeats), desc="steps", unit="turn"):
        for kind in kinds:
            num, width = kind
            _wait(target.device)
            start = time.perf_counter()
            target.forward(list(range(num)), inputs[kind], [width] * num)
            _wait(target.device)
            if turn >= _WARM_UP:
                seconds[kind].append(time.perf_counter() - start)
    samples = tuple(tuple(tuple(seconds[num, width]) for width in tokens) for num in rows)
    return Profile(identity_of(target), context, tuple(rows), tuple(tokens), samples)


def run_profile(cfg: DictConfig) -> dict[str, Any]:
    """Measures, prints the table, writes the file and returns the headline figures.

    Raises:
        ValueError: settings that can't be measured, or a file that can't be written.
    """
    rows, tokens, path = tuple(cfg.rows), tuple(cfg.tokens), Path(cfg.out)
    for key, values in (("rows", rows), ("tokens", tokens)):
        check_ascending(key, values)
    for key in ("context", "repeats"):
        if cfg[key] < 1:
            raise ValueError(f"{key}={cfg[key]}: must be a whole number >= 1")
    check_writable(path.parent, "out")
    target = wrap(load(build(cfg.target)))
    if cfg.context + tokens[-1] > target.max_context:
        raise ValueError(f"context={cfg.context}: with {tokens[-1]} tokens a row more than {target.max_context}")
    profile = measure(target, rows, tokens, cfg.context, cfg.repeats)
    profile.save(path)
    table = [
        {
            "rows": num,
            "tokens a row": width,
            "tokens": num * width,
            "ms": 1e3 * statistics.median(cell),
            "least": 1e3 * min(cell),
            "most": 1e3 * max(cell),
        }
        for num, line in zip(rows, profile.samples_s, strict=True)
        for width, cell in zip(tokens, line, strict=True)
    ]
    print(to_text(pd.DataFrame(table), {"ms": ".1f", "least": ".1f", "most": ".1f"}))
    return {"out": str(path), **identity_of(target), "context": cfg.context, "steps": table}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

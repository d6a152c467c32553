"""How often a round waits for the device, and where.

torch's sync debug mode warns at each operation that makes the host wait (experimental: torch says that it misses some).
Explicit calls of torch.cuda.synchronize are not among them and are counted apart. Prefill waits too; its share drops
out of the difference between a long and a short pass over the same prompts.

It needs a CUDA device; only the bookkeeping runs elsewhere.
"""

from __future__ import annotations

import linecache
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dispark.targets.model import wrap
from gpu_check.common import DRAFTERS, Sizes, Subject, decode, make_requests

MESSAGE = "synchronizing CUDA operation"
ROOT = Path(__file__).resolve().parents[2]
ROWS = 4


class SyncCounter:
    """Counts waits inside a `with` block, by the Python line that caused each.

    Args:
        cuda: torch.cuda or a stand-in with `synchronize`.
        set_mode: torch's switch of the sync debug mode, or a stand-in.
    """

    def __init__(self, cuda: Any = torch.cuda, set_mode: Callable[[str], None] | None = None) -> None:
        self._cuda = cuda
        self._set_mode = set_mode or torch.cuda.set_sync_debug_mode
        self.implicit: Counter[str] = Counter()
        self.explicit: Counter[str] = Counter()

    def __enter__(self) -> SyncCounter:
        self._synchronize = self._cuda.synchronize
        self._caught = warnings.catch_warnings(record=True)
        self._messages = self._caught.__enter__()
        warnings.simplefilter("always")
        self._cuda.synchronize = self._count
        self._set_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set_mode("default")
        self._cuda.synchronize = self._synchronize
        self._caught.__exit__(kind, error, trace)
        for message in self._messages or ():
            if MESSAGE in str(message.message):
                self.implicit[place(message.filename, message.lineno)] += 1

    def _count(self, *arguments: Any) -> None:
        frame = sys._getframe(1)
        self.explicit[place(frame.f_code.co_filename, frame.f_lineno)] += 1
        self._synchronize(*arguments)


def place(filename: str, line: int) -> str:
    """A line of code as "file:line: text", the file relative to the repository or, outside it, by its last parts."""
    path = Path(filename)
    inside = path.is_relative_to(ROOT)
    name = path.relative_to(ROOT).as_posix() if inside else "/".join(path.parts[-3:])
    return f"{name}:{line}: {linecache.getline(filename, line).strip()[:100]}"


@dataclass(frozen=True)
class Count:
    """Waits and rounds of one pass."""

    num_rounds: int
    implicit: Counter[str] = field(default_factory=Counter)
    explicit: Counter[str] = field(default_factory=Counter)


def per_round(short: Count, long: Count) -> dict[str, Any]:
    """Waits a round, from two passes over the same prompts that differ in length.

    Raises:
        ValueError: the long pass had no more rounds than the short one.
    """
    rounds = long.num_rounds - short.num_rounds
    if rounds <= 0:
        raise ValueError(f"{long.num_rounds} rounds against {short.num_rounds}: the long pass must have more")

    def rates(kind: str) -> dict[str, float]:
        more: Counter[str] = getattr(long, kind)
        less: Counter[str] = getattr(short, kind)
        # Not Counter's own minus, which drops what is negative.
        found = {key: (more[key] - less[key]) / rounds for key in sorted({*more, *less})}
        return {key: rate for key, rate in found.items() if rate != 0}

    implicit, explicit = rates("implicit"), rates("explicit")
    return {
        "num_rounds": rounds,
        "syncs_per_round": sum(implicit.values()),
        "explicit_synchronize_per_round": sum(explicit.values()),
        "places": implicit,
        "explicit_places": explicit,
        "is_ok": sum(implicit.values()) == 1.0,
    }


def run_syncs(subject: Subject, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """One wait a round for each drafter, in float32 at four rows; texts run to their cap, so that rounds are steady."""
    loaded = subject.load(device)
    target = wrap(replace(loaded, stop_ids=()))
    requests = make_requests(loaded.tokenizer, ROWS, sizes.new_tokens)
    short = [replace(request, max_new_tokens=max(2, sizes.new_tokens // 4)) for request in requests]
    result: dict[str, Any] = {}
    for drafter in DRAFTERS:
        decode(target, drafter, requests, ROWS)  # first calls load kernels, and may wait for it
        counts = []
        for batch in (short, requests):
            with SyncCounter() as counter:
                trace = decode(target, drafter, batch, ROWS)
            num_rounds = sum(step["kind"] == "round" for step in trace.steps)
            counts.append(Count(num_rounds, counter.implicit, counter.explicit))
        result[drafter] = per_round(counts[0], counts[1])
    return {"drafters": result, "rows": ROWS, "is_ok": all(part["is_ok"] for part in result.values())}

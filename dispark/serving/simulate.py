"""The loop without the models: the same schedulers and the same admission over a clock that costs move.

A round is the loop's: limit -> draft -> choose -> verify -> cut -> observe, with promises and acceptances from
acceptance.py and seconds from costs.py. What comes out are the loop's own records, so reports don't tell the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dispark.decoding.draft_check import draft_limit
from dispark.decoding.rows import Trace
from dispark.interfaces import Scheduler
from dispark.serving.acceptance import Acceptance, Floats, RoundStream
from dispark.serving.arrivals import Arrival
from dispark.serving.blocks import BlockBudget
from dispark.serving.costs import Cost
from dispark.serving.source import ServingSource
from dispark.types import Draft, FinishReason, Load, Outcome, Request, RequestRecord


class SimulatedClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(eq=False)
class _Row:
    record: RequestRecord
    rounds: RoundStream
    num_rounds: int = 0

    @property
    def room(self) -> int:
        return self.record.request.max_new_tokens - len(self.record.output_ids)

    @property
    def context(self) -> int:
        return len(self.record.request.prompt_ids) + len(self.record.output_ids) - 1


@dataclass
class Engine:
    """A simulated engine with one arm.

    Args:
        acceptance: of its drafter, None for none.
        scheduler: bound to nothing but this.
        cost: of its steps.
        num_rows: rows decoded at a time at most.
        capacity: tokens that the cache holds, as schedulers are told.
    """

    acceptance: Acceptance | None
    scheduler: Scheduler
    cost: Cost
    num_rows: int
    capacity: int
    clock: SimulatedClock = field(default_factory=SimulatedClock)

    def run(
        self,
        requests: Sequence[Request],
        arrivals: Sequence[Arrival],
        max_in_flight: int | None,
        budget: BlockBudget,
        max_context: int,
    ) -> tuple[ServingSource, Trace]:
        """Serves everything; texts are zeros of the right length."""
        spare = 1 + (0 if self.acceptance is None else self.acceptance.draft_length)
        source = ServingSource(
            requests,
            arrivals,
            budget,
            max_in_flight,
            spare,
            max_context,
            clock=self.clock,
            sleep=self.clock.advance,
        )
        self._active: list[_Row] = []
        self._trace = Trace()
        while self._admit(source) or self._active:
            if self._active:
                self._round(source)
        return source, self._trace

    def _admit(self, source: ServingSource) -> bool:
        new: list[_Row] = []
        while len(self._active) + len(new) < self.num_rows and (request := source.next()) is not None:
            stream: Any = None if self.acceptance is None else self.acceptance.rounds(request.request_id, request.seed)
            new.append(_Row(RequestRecord(request), stream))
        if not new:
            return False
        tokens = sum(len(row.record.request.prompt_ids) for row in new)
        seconds = self.cost.prefill_s(tokens)
        self.clock.advance(seconds)
        for row in new:
            row.record.prefill_step = len(self._trace.steps)
            row.record.output_ids.append(0)
        self._log("prefill", len(new), tokens, seconds, {})
        self._active += new
        for row in new:
            self._end_if_over(row, source)
        return True

    def _round(self, source: ServingSource) -> None:
        rows, step = list(self._active), len(self._trace.steps)
        context = [row.context for row in rows]
        names = [row.record.request.request_id for row in rows]
        most = 0 if self.acceptance is None else self.acceptance.draft_length
        load = Load(len(rows), source.num_waiting, step, context, names, sum(context) / self.capacity, most)
        draft, accepted = self._draft(rows, load)
        width = draft.tokens_BG.shape[1]
        lengths = self.scheduler.choose(draft, load)
        draft_s = self.cost.draft_s(len(rows), width)
        num_tokens = len(rows) + sum(lengths)
        verify_s = self.cost.verify_s(len(rows), num_tokens, sum(context))
        self.clock.advance(draft_s + verify_s)
        raw = [min(n, length) for n, length in zip(accepted, lengths, strict=True)]
        emitted = [min(n + 1, row.room) for n, row in zip(raw, rows, strict=True)]
        finish: list[FinishReason | None] = []
        for i, (row, num) in enumerate(zip(rows, emitted, strict=True)):
            row.record.output_ids += [0] * num
            finish.append(None if row.room > 0 else "length")
            request = row.record.request
            self._trace.rounds.append(
                {
                    "request_id": request.request_id,
                    "prompt_id": request.prompt_id,
                    "round": row.num_rounds,
                    "step": step,
                    "num_rows": len(rows),
                    "num_drafted": width,
                    "num_verified": lengths[i],
                    "num_accepted_raw": raw[i],
                    "num_accepted": min(raw[i], num),
                    "num_emitted": num,
                }
            )
            row.num_rounds += 1
        self._log("round", len(rows), num_tokens, draft_s + verify_s, {"draft_s": draft_s, "verify_s": verify_s})
        kept = [min(n, num) for n, num in zip(raw, emitted, strict=True)]
        is_cut = [num < n + 1 for n, num in zip(raw, emitted, strict=True)]
        outcome = Outcome([[0] * num for num in emitted], kept, finish, is_cut)
        self.scheduler.observe(outcome, lengths, draft_s + verify_s)
        for row in rows:
            self._end_if_over(row, source)

    def _draft(self, rows: Sequence[_Row], load: Load) -> tuple[Draft, list[int]]:
        """(what is drafted, how many of each row's drafts the target would accept)."""
        most = draft_limit(self.scheduler, load, load.draft_length)
        if most == 0:
            return Draft(torch.zeros((len(rows), 0), dtype=torch.int64), [0] * len(rows)), [0] * len(rows)
        found = [row.rounds.next() for row in rows]
        confidence: Floats = np.stack([promised[:most] for promised, _ in found])
        tokens = torch.zeros(confidence.shape, dtype=torch.int64)
        draft = Draft(tokens, [most] * len(rows), confidence_BG=torch.from_numpy(confidence))
        return draft, [min(num, most) for _, num in found]

    def _end_if_over(self, row: _Row, source: ServingSource) -> None:
        if row.room > 0:
            return
        self._active.remove(row)
        self._trace.records.append(row.record)
        source.finish(row.record)

    def _log(self, kind: str, num_rows: int, num_tokens: int, seconds: float, phases: dict[str, float]) -> None:
        line = {"wall_s": seconds, **phases, "end_s": self.clock(), "step": len(self._trace.steps), "kind": kind}
        self._trace.steps.append(line | {"num_rows": num_rows, "num_tokens": num_tokens})

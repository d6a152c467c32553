"""The decoding loop: every method, baseline and batch size runs through this file.

A round: propose -> schedule -> verify -> accept -> cut -> commit, update -> record. Rows come and go between rounds.
Autoregressive decoding is the same loop with nothing drafted. The one device sync of a round is `to_host`.

The loop does not know what the drafter, scheduler and verifier are, nor where requests come from or results go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dispark.decoding.cut import Cut
from dispark.decoding.draft_check import check_draft, draft_limit
from dispark.decoding.random import RowGenerators
from dispark.decoding.rows import ActiveRow, Trace, outcome_of
from dispark.decoding.sampling import next_token
from dispark.decoding.sync import to_host
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter, RequestSource, Scheduler, Verifier
from dispark.measure.timing import PhaseClock
from dispark.types import Sampling


@dataclass(eq=False)
class DecodingLoop:
    """Decodes requests with one target, drafter, scheduler and verifier.

    Args:
        decode: token ids to text, for stop strings and the records.
        batch_size: rows decoded at once at most.
        num_slots: cache slots per row; a request's prompt, its output and a draft have to fit.
        max_context: tokens of prompt and output together, where that is less than the model and the slots allow.
        kv_budget: tokens that all rows may hold together, as schedulers are told; None is all slots.
        reads_drafts: check the values of every draft, not only its shapes; waits for the device once more a round.
    """

    target: TargetModel
    drafter: Drafter
    scheduler: Scheduler
    verifier: Verifier
    sampling: Sampling
    decode: Callable[[Sequence[int]], str]
    batch_size: int
    num_slots: int
    max_context: int | None = None
    kv_budget: int | None = None
    reads_drafts: bool = False

    def __post_init__(self) -> None:
        self.verifier.check(self.sampling, self.drafter.proposal)
        limits = [self.target.max_context, self.num_slots - self.drafter.draft_length - 1]
        self._max_context = min(limits if self.max_context is None else [*limits, self.max_context])
        self._capacity = self.kv_budget or self.batch_size * self.num_slots
        self._clock = PhaseClock(self.target.device)

    def bind(self) -> None:
        """Begins a pass, as `run` does; raises ValueError where drafter or scheduler refuse this target."""
        self.drafter.bind(self.target, self.batch_size, self.num_slots)
        self.scheduler.bind(self.target)

    @torch.inference_mode()
    def run(self, source: RequestSource) -> Trace:
        """Decodes until the source is empty. Raises ValueError for a request of no tokens, no room or a cap below 1."""
        self.bind()
        self.target.open(self.batch_size, self.num_slots, self.drafter.feature_layers)
        self._active: list[ActiveRow] = []
        self._trace = Trace()
        while self._admit(source) or self._active:
            if self._active:
                self._round(source)
        self._clock.resolve()
        return self._trace

    def _admit(self, source: RequestSource) -> bool:
        """Prefills new requests into the free rows; whether there were any."""
        free = sorted(set(range(self.batch_size)) - {a.row for a in self._active})
        new: list[ActiveRow] = []
        while len(new) < len(free) and (request := source.next()) is not None:
            new.append(ActiveRow.activate(free[len(new)], request, self._max_context, self.decode))
        if not new:
            return False
        clock = self._clock
        clock.start()
        rows, requests = [a.row for a in new], [a.record.request for a in new]
        logits_BV, features = self.target.prefill(rows, [request.prompt_ids for request in requests])
        generators = RowGenerators([request.seed for request in requests], [0] * len(new), self.target.device)
        first_B = next_token(logits_BV, self.sampling, generators.uniform("first", 1)[:, 0])
        clock.mark("verify")
        first_tokens: list[int] = first_B.tolist()  # the sync
        clock.mark("accept")
        now = time.perf_counter()
        self.drafter.begin(rows, requests, first_tokens, features)
        clock.mark("draft")
        self._active += new
        for a, token in zip(new, first_tokens, strict=True):
            a.record.ttft_s = now - a.admitted_s
            self._emit(a, a.cut([token], 0, self.target.stop_ids), source)
        self._trace.log_step("prefill", new, sum(features.lengths), clock.stop())
        return True

    def _round(self, source: RequestSource) -> None:
        """One round of every active row."""
        active, clock, device = list(self._active), self._clock, self.target.device
        clock.start()
        rows, records = [a.row for a in active], [a.record for a in active]
        generators = RowGenerators([r.request.seed for r in records], [1 + r.num_rounds for r in records], device)
        anchors_B = torch.tensor([r.output_ids[-1] for r in records]).to(device, non_blocking=True)
        most = self.drafter.draft_length
        load = self._trace.load(active, source.num_waiting, self.target.length, self._capacity, most)
        limit = draft_limit(self.scheduler, load, most)
        draft = self.drafter.propose(rows, anchors_B, self.sampling, generators, limit)
        clock.mark("draft")
        check_draft(draft, self.drafter, len(rows), self.target.vocab_size, self.sampling, limit, self.reads_drafts)
        lengths = self.scheduler.choose(draft, load)
        lengths = [max(0, min(n, self.target.room(row) - 1)) for n, row in zip(lengths, rows, strict=True)]
        clock.mark("schedule")
        tokens_BT = torch.cat([anchors_B.unsqueeze(1), draft.tokens_BG], dim=1)
        logits_NV, features = self.target.verify(rows, tokens_BT, [1 + n for n in lengths])
        clock.mark("verify")
        verdict = self.verifier.accept(draft, logits_NV, lengths, self.sampling, generators)
        results = to_host(verdict)
        clock.mark("accept")
        cuts = [a.cut(tokens, n, self.target.stop_ids) for a, (tokens, n) in zip(active, results, strict=True)]
        outcome = outcome_of(cuts)
        for row, kept in zip(rows, outcome.num_accepted, strict=True):
            self.target.commit(row, 1 + kept)
        self.drafter.update(rows, outcome, features)
        clock.mark("commit")
        self._trace.log_rounds(active, cuts, draft.lengths, lengths, [n for _, n in results])
        for a, c in zip(active, cuts, strict=True):
            a.record.num_rounds += 1
            self._emit(a, c, source)
        self._trace.log_step("round", active, len(active) + sum(lengths), seconds := clock.stop())
        self.scheduler.observe(outcome, lengths, seconds["wall_s"])

    def _emit(self, a: ActiveRow, c: Cut, source: RequestSource) -> None:
        """Appends what was emitted; a finished row is freed and its record handed on."""
        a.record.output_ids += c.tokens
        finish = "cancelled" if c.finish is None and source.is_cancelled(a.record) else c.finish
        if finish is None:
            return
        self.target.drop(a.row)
        self.drafter.drop([a.row])
        # The cache moves its last row into the hole; keeping the same order keeps packed views in one piece.
        self._active[self._active.index(a)] = self._active[-1]
        self._active.pop()
        record = a.close(finish, self.decode(a.record.output_ids))
        self._trace.records.append(record)
        source.finish(record)

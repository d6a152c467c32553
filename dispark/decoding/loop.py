"""The decoding loop: every method, baseline and batch size runs through this file.

A round: propose -> schedule -> verify -> accept -> cut -> commit, update -> record. Rows come and go between rounds.
Autoregressive decoding is the same loop with nothing drafted. The one device sync of a round is `to_host`.

The loop does not know what the drafter, scheduler and verifier are, nor where requests come from or results go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from dispark.decoding.cut import Cut
from dispark.decoding.random import RowGenerators
from dispark.decoding.rows import ActiveRow, Trace, outcome_of
from dispark.decoding.sampling import next_token
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter, RequestSource, Scheduler, Verifier
from dispark.measure.timing import PhaseClock
from dispark.types import Load, Sampling, Verdict


class DecodingLoop:
    """Decodes requests with one target, drafter, scheduler and verifier.

    Args:
        decode: token ids to text, for stop strings and the records.
        batch_size: rows decoded at once at most.
        num_slots: cache slots per row; a request's prompt, its output and a draft have to fit.
        max_context: tokens of prompt and output together, where that is less than the model and the slots allow.

    Raises:
        ValueError: the verifier can't serve the sampling or the drafter's proposals.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        scheduler: Scheduler,
        verifier: Verifier,
        sampling: Sampling,
        *,
        decode: Callable[[Sequence[int]], str],
        batch_size: int,
        num_slots: int,
        max_context: int | None = None,
    ) -> None:
        verifier.check(sampling, drafter.proposal)
        self.target, self.drafter, self.scheduler, self.verifier = target, drafter, scheduler, verifier
        self.sampling, self.decode, self.batch_size, self.num_slots = sampling, decode, batch_size, num_slots
        room = num_slots - drafter.draft_length - 1
        self._max_context = min(target.max_context, room if max_context is None else min(room, max_context))
        self._clock = PhaseClock(target.device)

    @torch.inference_mode()
    def run(self, source: RequestSource) -> Trace:
        """Decodes until the source is empty and every row has finished.

        Raises:
            ValueError: a request that can't be decoded: no tokens, no room for one more, or a cap below 1.
        """
        self.target.open(self.batch_size, self.num_slots, self.drafter.feature_layers)
        self.drafter.bind(self.target, self.batch_size, self.num_slots)
        self._active: list[ActiveRow] = []
        self._trace = Trace()
        while self._admit(source) or self._active:
            if self._active:
                self._round(source)
        self._clock.resolve()
        return self._trace

    def _admit(self, source: RequestSource) -> bool:
        """Prefills new requests into the free rows; whether there were any."""
        taken = {a.row for a in self._active}
        free = [row for row in range(self.batch_size) if row not in taken]
        new: list[ActiveRow] = []
        while len(new) < len(free) and (request := source.next()) is not None:
            new.append(ActiveRow.activate(free[len(new)], request, self._max_context, self.decode))
        if not new:
            return False
        self._clock.start()
        rows, requests = [a.row for a in new], [a.record.request for a in new]
        logits_BV, features = self.target.prefill(rows, [request.prompt_ids for request in requests])
        generators = RowGenerators([request.seed for request in requests], [0] * len(new), self.target.device)
        first_B = next_token(logits_BV, self.sampling, generators.uniform("first", 1)[:, 0])
        self._clock.mark("verify")
        first_tokens: list[int] = first_B.tolist()  # the sync
        self._clock.mark("accept")
        now = time.perf_counter()
        self.drafter.begin(rows, requests, first_tokens, features)
        self._clock.mark("draft")
        self._active += new
        for a, token in zip(new, first_tokens, strict=True):
            a.record.ttft_s = now - a.admitted_s
            self._emit(a, a.cut([token], 0, self.target.stop_ids), source)
        seconds = self._clock.stop()
        for a in new:
            a.record.prefill_s = seconds["wall_s"] / len(new)
        self._trace.log_step("prefill", len(new), sum(features.lengths), seconds)
        return True

    def _round(self, source: RequestSource) -> None:
        """One round of every active row."""
        active, clock, device = list(self._active), self._clock, self.target.device
        clock.start()
        rows = [a.row for a in active]
        numbers = [1 + a.record.num_rounds for a in active]
        generators = RowGenerators([a.record.request.seed for a in active], numbers, device)
        anchors_B = torch.tensor([a.record.output_ids[-1] for a in active]).to(device, non_blocking=True)
        load = self._load(source)

        draft = self.drafter.propose(rows, anchors_B, self.sampling, generators)
        clock.mark("draft")
        lengths = self.scheduler.choose(draft, load)
        lengths = [min(n, self._context_room(row)) for n, row in zip(lengths, rows, strict=True)]
        clock.mark("schedule")
        tokens_BT = torch.cat([anchors_B.unsqueeze(1), draft.tokens_BG], dim=1)
        logits_NV, features = self.target.verify(rows, tokens_BT, [1 + n for n in lengths])
        clock.mark("verify")
        verdict = self.verifier.accept(draft, logits_NV, lengths, self.sampling, generators)
        emitted, num_accepted = to_host(verdict)
        clock.mark("accept")
        cuts = [
            a.cut(tokens, n, self.target.stop_ids) for a, tokens, n in zip(active, emitted, num_accepted, strict=True)
        ]
        outcome = outcome_of(cuts)
        for row, kept in zip(rows, outcome.num_accepted, strict=True):
            self.target.commit(row, 1 + kept)
        self.drafter.update(rows, outcome, features)
        clock.mark("commit")
        for i, (a, c) in enumerate(zip(active, cuts, strict=True)):
            self._trace.log_round(
                a, c, num_rows=len(active), drafted=draft.lengths[i], verified=lengths[i], accepted=num_accepted[i]
            )
            a.record.num_rounds += 1
            self._emit(a, c, source)
        seconds = clock.stop()
        for a in active:
            a.record.decode_s += seconds["wall_s"] / len(active)
        self._trace.log_step("round", len(active), len(active) + sum(lengths), seconds)
        self.scheduler.observe(outcome, lengths, seconds["wall_s"])

    def _emit(self, a: ActiveRow, c: Cut, source: RequestSource) -> None:
        """Appends what was emitted; a finished row is freed and its record handed on."""
        a.record.output_ids += c.tokens
        if c.finish is None:
            return
        self.target.drop(a.row)
        self.drafter.drop([a.row])
        # The cache moves its last row into the hole; keeping the same order keeps packed views in one piece.
        self._active[self._active.index(a)] = self._active[-1]
        self._active.pop()
        record = a.close(c.finish, self.decode(a.record.output_ids))
        self._trace.records.append(record)
        source.finish(record)

    def _context_room(self, row: int) -> int:
        """Drafts that can be verified after the anchor without leaving the context."""
        return max(0, min(self.target.max_context, self.num_slots) - 1 - self.target.cache.length(row))

    def _load(self, source: RequestSource) -> Load:
        lengths = [self.target.cache.length(a.row) for a in self._active]
        return Load(len(self._active), source.num_waiting, len(self._trace.steps), lengths)


def to_host(verdict: Verdict) -> tuple[list[list[int]], list[int]]:
    """The round's one device sync: (accepted drafts and the next token per row, accepted drafts per row)."""
    both = torch.cat([verdict.num_accepted_B.unsqueeze(1), verdict.tokens_BT], dim=1).tolist()
    return [row[1 : row[0] + 2] for row in both], [row[0] for row in both]

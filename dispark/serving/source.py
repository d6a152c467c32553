"""Lets requests into the loop as they arrive, as far as the cache's budget goes, and ends those that are cancelled.

The loop asks for the next request whenever it has a free row; this answers with the first that has arrived and fits.
Nobody overtakes: while the first in the queue waits for blocks, all behind it wait. While nothing is being decoded it
sleeps until the next arrival. A request that can never fit, or has no room for an answer, fails by itself.

It knows neither drafters nor schedulers, and keeps what reports need: when a request came, was let in and ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dispark.serving.arrivals import Arrival
from dispark.serving.blocks import BlockBudget
from dispark.types import Request, RequestRecord


def longest_text(requests: Sequence[Request], arrivals: Sequence[Arrival]) -> int:
    """Tokens of prompt and answer together at most, an arrival's own cap before the request's."""
    caps = [arrival.max_new_tokens or r.max_new_tokens for r, arrival in zip(requests, arrivals, strict=True)]
    return max(len(r.prompt_ids) + cap for r, cap in zip(requests, caps, strict=True))


@dataclass
class Visit:
    """One request's way through the system; times are those of the clock, None for what did not happen.

    Args:
        error: why it was not served, or None.
    """

    request: Request
    arrived_s: float
    admitted_s: float | None = None
    finished_s: float | None = None
    record: RequestRecord | None = None
    error: str | None = None


@dataclass
class ServingSource:
    """A request source for the loop.

    Args:
        requests: in order of arrival, each id once.
        arrivals: when each comes.
        budget: of cache blocks.
        max_in_flight: requests in the system at a time, or None.
        spare_tokens: room that a request needs beyond its prompt and answer, for drafts.
        max_context: tokens of prompt and answer together at most.
        cancel_after: by request id, the number of output tokens after which its user leaves.
        clock, sleep: for tests.
    """

    requests: Sequence[Request]
    arrivals: Sequence[Arrival]
    budget: BlockBudget
    max_in_flight: int | None
    spare_tokens: int
    max_context: int
    cancel_after: Mapping[str, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        assert len(self.requests) == len(self.arrivals)
        self.start_s = self.clock()
        self._has_begun = False
        self.visits: dict[str, Visit] = {}
        self._coming = deque(zip(self.requests, self.arrivals, strict=True))
        self._queue: deque[Visit] = deque()
        self._in_flight: dict[str, Visit] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and wait."""
        self._arrive()
        return len(self._queue)

    def next(self) -> Request | None:
        """The first that has arrived and fits, or None; sleeps while there is nothing else to do."""
        while True:
            self._arrive()
            while self._queue:
                visit = self._queue[0]
                need = len(visit.request.prompt_ids) + visit.request.max_new_tokens + self.spare_tokens
                if (error := self._refusal(visit.request, need)) is not None:
                    self._queue.popleft()
                    visit.error, visit.finished_s = error, self.clock()
                    self._arrive()
                    continue
                if not self.budget.reserve(visit.request.request_id, need):
                    return None  # somebody in flight holds what it needs
                self._queue.popleft()
                visit.admitted_s = self.clock()
                self._in_flight[visit.request.request_id] = visit
                return visit.request
            if self._in_flight or not self._coming:
                return None
            self.sleep(max(0.0, self.start_s + self._coming[0][1].at_s - self.clock()))

    def finish(self, record: RequestRecord) -> None:
        """Gives the request's blocks back."""
        name = record.request.request_id
        visit = self._in_flight.pop(name)
        visit.record, visit.finished_s = record, self.clock()
        self.budget.release(name)

    def is_cancelled(self, record: RequestRecord) -> bool:
        """Whether its user has left."""
        limit = self.cancel_after.get(record.request.request_id)
        return limit is not None and len(record.output_ids) >= limit

    def _arrive(self) -> None:
        """Moves everybody who has come into the queue; the first look at it is when time begins."""
        now = self.clock()
        if not self._has_begun:
            self.start_s, self._has_begun = now, True
        while self._coming and self.start_s + self._coming[0][1].at_s <= now:
            in_system = len(self._in_flight) + len(self._queue)
            if self.max_in_flight is not None and in_system >= self.max_in_flight:
                return
            request, arrival = self._coming.popleft()
            if arrival.max_new_tokens is not None:
                request = replace(request, max_new_tokens=arrival.max_new_tokens)
            # A user who waited for an answer asks the moment it is there.
            arrived_s = now if self.max_in_flight is not None else self.start_s + arrival.at_s
            visit = Visit(request, arrived_s)
            assert request.request_id not in self.visits, request.request_id
            self.visits[request.request_id] = visit
            self._queue.append(visit)

    def _refusal(self, request: Request, need: int) -> str | None:
        """Why a request can't be served at all, or None."""
        num_prompt = len(request.prompt_ids)
        if num_prompt == 0:
            return "the prompt has no tokens"
        if num_prompt >= self.max_context:
            return f"the prompt's {num_prompt} tokens leave no room for an answer in a context of {self.max_context}"
        if not self.budget.can_ever_hold(need):
            return f"needs room for {need} tokens, more than all blocks of the budget"
        return None

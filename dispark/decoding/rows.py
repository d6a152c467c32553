"""A request while it is being decoded, and what a pass writes down about it.

Host-side bookkeeping only: no tensors, no models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dispark.decoding.cut import Cut, StopStrings, cut
from dispark.types import FinishReason, Load, Outcome, Request, RequestRecord


@dataclass(eq=False)
class ActiveRow:
    """One row of the batch.

    Args:
        cap: tokens the text may have at most; cap_reason says whether the request or the context set it.
    """

    row: int
    record: RequestRecord
    cap: int
    cap_reason: FinishReason
    stop_strings: StopStrings
    admitted_s: float

    @classmethod
    def activate(
        cls, row: int, request: Request, max_context: int, decode: Callable[[Sequence[int]], str]
    ) -> ActiveRow:
        """Checks a request against the context it has to fit.

        Raises:
            ValueError: no prompt tokens, no room for one more token, or a cap below 1.
        """
        num_prompt = len(request.prompt_ids)
        name = f"request {request.request_id}"
        if num_prompt == 0:
            raise ValueError(f"{name}: the prompt has no tokens; at least 1 is needed")
        if num_prompt >= max_context:
            raise ValueError(
                f"{name}: the prompt has {num_prompt} tokens; allowed: at most {max_context - 1}, so that one more fits"
            )
        if request.max_new_tokens < 1:
            raise ValueError(f"{name}: max_new_tokens={request.max_new_tokens}: must be at least 1")
        cap = min(request.max_new_tokens, max_context - num_prompt)
        reason: FinishReason = "length" if cap == request.max_new_tokens else "context"
        strings = StopStrings(request.stop_strings, decode)
        return cls(row, RequestRecord(request), cap, reason, strings, time.perf_counter())

    def cut(self, tokens: Sequence[int], num_accepted: int, stop_ids: frozenset[int]) -> Cut:
        """Where the row's new tokens end."""
        return cut(
            tokens,
            num_accepted,
            room=self.cap - len(self.record.output_ids),
            stop_ids=stop_ids,
            cap_reason=self.cap_reason,
            stop_string_end=self.stop_strings.find(self.record.output_ids, tokens),
        )

    def close(self, finish: FinishReason, text: str) -> RequestRecord:
        """Completes the record."""
        before = self.stop_strings.cut_text(text)
        self.record.text = text if before is None else before
        self.record.finish_reason = finish
        self.record.latency_s = time.perf_counter() - self.admitted_s
        return self.record


@dataclass
class Trace:
    """What a pass measured: a dict for each round of a row and each step of the loop, a record for each request."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)

    def load(
        self,
        active: Sequence[ActiveRow],
        num_waiting: int,
        length_of: Callable[[int], int],
        capacity: int,
        draft_length: int,
    ) -> Load:
        """What a scheduler may know before a round of these rows; `capacity` is the cache's room in tokens."""
        lengths = [length_of(a.row) for a in active]
        names = [a.record.request.request_id for a in active]
        return Load(len(active), num_waiting, len(self.steps), lengths, names, sum(lengths) / capacity, draft_length)

    def log_rounds(
        self,
        active: Sequence[ActiveRow],
        cuts: Sequence[Cut],
        num_drafted: Sequence[int],
        num_verified: Sequence[int],
        num_accepted: Sequence[int],
    ) -> None:
        """One round of every row; `num_accepted` is what the verifier accepted before any cut."""
        for a, c, drafted, verified, accepted in zip(
            active, cuts, num_drafted, num_verified, num_accepted, strict=True
        ):
            request = a.record.request
            self.rounds.append(
                {
                    "request_id": request.request_id,
                    "prompt_id": request.prompt_id,
                    "turn": request.turn,
                    "task": request.task,
                    "category": request.category,
                    "round": a.record.num_rounds,
                    "step": len(self.steps),
                    "num_rows": len(active),
                    "num_drafted": drafted,
                    "num_verified": verified,
                    "num_accepted_raw": accepted,
                    "num_accepted": c.num_accepted,
                    "num_emitted": len(c.tokens),
                    "end": c.finish,
                    "is_truncated": c.is_truncated,
                }
            )

    def log_step(
        self, kind: Literal["prefill", "round"], active: Sequence[ActiveRow], num_tokens: int, seconds: dict[str, Any]
    ) -> None:
        """One step of the loop, whose time its rows share alike. `seconds` is kept and may fill later."""
        for a in active:
            key = "prefill_s" if kind == "prefill" else "decode_s"
            setattr(a.record, key, getattr(a.record, key) + seconds["wall_s"] / len(active))
            if kind == "prefill":
                a.record.prefill_step = len(self.steps)
        seconds |= {"end_s": time.perf_counter()}
        seconds |= {"step": len(self.steps), "kind": kind, "num_rows": len(active), "num_tokens": num_tokens}
        self.steps.append(seconds)


def outcome_of(cuts: Sequence[Cut]) -> Outcome:
    """The cuts of a round, field by field."""
    return Outcome(
        emitted=[c.tokens for c in cuts],
        num_accepted=[c.num_accepted for c in cuts],
        finish=[c.finish for c in cuts],
        is_truncated=[c.is_truncated for c in cuts],
    )

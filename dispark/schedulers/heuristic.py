"""The rule of transformers' assisted generation, for reference: a draft longer by two after a whole success, else
shorter by one, never below one (`num_assistant_tokens_schedule="heuristic"`).

There it serves one text at a time; with several rows here, success means that every row's whole draft was accepted.
Only past rounds decide, so it doesn't anticipate.
"""

from __future__ import annotations

from collections.abc import Sequence

from dispark.decoding.target import TargetModel
from dispark.types import Draft, Load, Outcome


class HeuristicScheduler:
    """Args: start: tokens of the first draft of a pass."""

    is_lossless = True

    def __init__(self, start: int = 5) -> None:
        if not isinstance(start, int) or start < 1:
            raise ValueError(f"scheduler.start={start}: must be a whole number >= 1")
        self._start = self._length = start
        self._drafted: list[int] = []

    def bind(self, target: TargetModel) -> None:
        """Starts anew."""
        self._length = self._start

    def draft_limit(self, load: Load) -> int | None:
        """See `dispark.interfaces.Scheduler`."""
        return self._length

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """All that was drafted."""
        self._drafted = list(draft.lengths)
        if most := max(draft.lengths, default=0):  # a drafter that can't draft so many ends the growth
            self._length = min(self._length, most)
        return list(draft.lengths)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Longer or shorter; as it is where nothing was drafted."""
        if not any(self._drafted):
            return
        is_whole = all(n == num for n, num in zip(outcome.num_accepted, self._drafted, strict=True))
        self._length = self._length + 2 if is_whole else max(1, self._length - 1)

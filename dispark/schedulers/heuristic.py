"""The rule of transformers' assisted generation, for reference: a draft longer by two after a whole success, else
shorter by one, never below one (`num_assistant_tokens_schedule="heuristic"`).

There it serves one text at a time; with several rows here, success means that every row that goes on accepted as many
as were asked for. What a drafter can't propose is not asked for. Only past rounds decide, so it doesn't anticipate.
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
        self._most = 0
        self._has_drafts = False

    def bind(self, target: TargetModel) -> None:
        """Starts anew."""
        self._length = self._start

    def draft_limit(self, load: Load) -> int | None:
        """See `dispark.interfaces.Scheduler`."""
        self._most = load.draft_length
        self._length = min(self._length, max(1, self._most))
        return self._length

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """All that was drafted."""
        self._has_drafts = any(draft.lengths)
        return list(draft.lengths)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Longer or shorter; as it is where nothing was drafted, or no text goes on."""
        accepted = [num for num, end in zip(outcome.num_accepted, outcome.finish, strict=True) if end is None]
        if not self._has_drafts or not accepted:
            return
        is_whole = all(num == self._length for num in accepted)
        self._length = min(self._length + 2, self._most) if is_whole else max(1, self._length - 1)

"""What rounds gave and took lately, so that a scheduler knows what its table doesn't: what drafting and the host cost.

Kept by number of rows, in powers of two, and apart for rounds with drafts and without; older rounds weigh less and
less. Only rounds that are over are in it, so what follows from it anticipates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.95


@dataclass(frozen=True)
class Pace:
    """How soon rounds with and without drafts are compared.

    Args:
        first: rounds with drafts before one without is tried.
        alone: rounds without, before the two are compared.
        probe_every: one round in so many is of the other kind.
    """

    first: int = 8
    alone: int = 2
    probe_every: int = 32

    def __post_init__(self) -> None:
        for key, least in (("first", 1), ("alone", 1), ("probe_every", 2)):
            if getattr(self, key) < least:
                raise ValueError(f"scheduler.pace.{key}={getattr(self, key)}: must be a whole number >= {least}")


@dataclass
class _Sums:
    """Decayed sums over rounds of one kind."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    beyond_s: float = 0.0

    def add(self, tokens: int, seconds: float, beyond_s: float) -> None:
        for name, value in (("rounds", 1.0), ("tokens", tokens), ("seconds", seconds), ("beyond_s", beyond_s)):
            setattr(self, name, _DECAY * getattr(self, name) + value)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class RoundMemory:
    """See the module."""

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self._sums: dict[tuple[int, bool], _Sums] = {}
        self._num: dict[tuple[int, bool], int] = {}

    def observe(self, num_rows: int, num_tokens: int, seconds: float, estimate_s: float, has_drafts: bool) -> None:
        """A round is over.

        Args:
            num_rows: of the round.
            num_tokens: emitted.
            seconds: it took.
            estimate_s: what the verify alone should have taken.
            has_drafts: whether anything was drafted.
        """
        place = _bucket(num_rows), has_drafts
        self._sums.setdefault(place, _Sums()).add(num_tokens, seconds, max(0.0, seconds - estimate_s))
        self._num[place] = self._num.get(place, 0) + 1

    def beyond_s(self, num_rows: int) -> float:
        """Seconds of a round with drafts beyond its verify, 0 while there was none."""
        sums = self._sums.get((_bucket(num_rows), True))
        return 0.0 if sums is None else sums.beyond_s / sums.rounds

    def should_draft(self, num_rows: int) -> bool:
        """Whether rounds with drafts emit more a second than rounds without; now and then the other kind, to know."""
        bucket = _bucket(num_rows)
        num_with, num_without = self._num.get((bucket, True), 0), self._num.get((bucket, False), 0)
        if num_with < self._pace.first:
            return True
        if num_without < self._pace.alone:
            return False
        pays = self._sums[bucket, True].rate >= self._sums[bucket, False].rate
        is_probe = (num_with + num_without) % self._pace.probe_every == self._pace.probe_every - 1
        return pays != is_probe


def _bucket(num_rows: int) -> int:
    return num_rows.bit_length()

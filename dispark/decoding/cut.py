"""Where a text ends: stop tokens, stop strings and length caps, on host integers.

It does not know who proposed the tokens, only how many of them were accepted drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dispark.types import FinishReason

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SLACK = 8  # characters at a tail's start that may decode otherwise than inside the text


@dataclass(frozen=True)
class Cut:
    """What is left of one row's new tokens.

    is_truncated: the cap cut tokens off that had been verified.
    """

    tokens: list[int]
    num_accepted: int
    finish: FinishReason | None
    is_truncated: bool


def cut(
    tokens: Sequence[int],
    num_accepted: int,
    *,
    room: int,
    stop_ids: frozenset[int],
    cap_reason: FinishReason,
    stop_string_end: int | None = None,
) -> Cut:
    """Cuts new tokens after the first stop token, at the end of a stop string, and at the cap.

    Args:
        tokens: the accepted drafts and, last, the recovered or bonus token.
        num_accepted: how many of them are drafts.
        room: tokens the row may still emit, at least 1.
        stop_ids: token ids that end the text; the stop token itself is kept.
        cap_reason: what to report when the cap ends the text ("length" or "context").
        stop_string_end: how many of the tokens it takes to complete a stop string, or None.
    """
    assert room >= 1
    ends: list[tuple[int, FinishReason]] = []
    for i, token in enumerate(tokens):
        if token in stop_ids:
            ends.append((i + 1, "stop"))
            break
    if stop_string_end is not None:
        ends.append((stop_string_end, "stop_string"))
    ends.append((room, cap_reason))
    length, finish = min(ends, key=lambda end: end[0])  # the first of equals: a stop wins over the cap
    if length > len(tokens):
        return Cut(list(tokens), num_accepted, None, False)
    kept = list(tokens[:length])
    is_truncated = finish == cap_reason and length < len(tokens)
    return Cut(kept, min(num_accepted, length), finish, is_truncated)


class StopStrings:
    """Finds the first stop string in one row's growing text.

    Args:
        strings: non-empty strings that end the text; the text is reported without the string.
        decode: token ids to text.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        for string in strings:
            if not string:
                raise ValueError("stop_strings: an empty string would stop every text; leave it out")
            if REPLACEMENT in string:
                raise ValueError(
                    f"stop_strings={string!r}: U+FFFD stands for a character that is not complete yet; leave it out"
                )
        self._strings = tuple(strings)
        self._decode = decode
        self._reach = max(map(len, strings), default=0) + _SLACK

    def find(self, output_ids: Sequence[int], new_ids: Sequence[int]) -> int | None:
        """How many of `new_ids`, after `output_ids`, it takes to complete a stop string; None if none does."""
        if not self._strings:
            return None
        tail = self._tail(output_ids)
        if self.cut_text(self._decode([*tail, *new_ids])) is None:
            return None
        for num in range(1, len(new_ids)):
            if self.cut_text(self._decode([*tail, *new_ids[:num]])) is not None:
                return num
        return len(new_ids)

    def _tail(self, output_ids: Sequence[int]) -> Sequence[int]:
        """The last tokens that spell enough text for a stop string to have begun in: decoding all of a long text in
        every round would cost more with every token. Tokens may spell nothing, so the text's length decides."""
        num = self._reach
        while num < len(output_ids) and len(self._decode(output_ids[-num:])) < self._reach:
            num *= 2
        return output_ids[-num:]

    def cut_text(self, text: str) -> str | None:
        """The text before its first stop string, or None where there is none."""
        starts = [start for start in (text.find(string) for string in self._strings) if start >= 0]
        return text[: min(starts)] if starts else None

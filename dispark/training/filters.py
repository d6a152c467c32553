"""Which prompts are fit for training: long enough, whole, no loops, no repeats, and nothing of an evaluation suite.

Works on text and token ids; it knows no model. What it refuses it names, so that a run can say what was left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from dispark.measure import degeneracy

MIN_CHARS, MAX_CHARS = 12, 2000
MIN_LETTERS = 0.5  # of all characters but spaces, for texts that a language model wrote itself
SHINGLE = 8  # words in a row that a prompt may not share with an evaluation prompt
_WORD = re.compile(r"[^\W_]+")


def words_of(text: str) -> list[str]:
    """Lower-case words and numbers."""
    return _WORD.findall(text.lower())


class PromptFilter:
    """Judges prompts one after the other and remembers those it let through.

    Args:
        evaluation: prompts that must not be trained on.
    """

    def __init__(self, evaluation: Iterable[str]) -> None:
        self._seen: set[tuple[str, ...]] = set()
        self._whole: set[tuple[str, ...]] = set()
        self._shingles: set[tuple[str, ...]] = set()
        self.refused: Counter[str] = Counter()
        for text in evaluation:
            words = words_of(text)
            self._whole.add(tuple(words))
            self._shingles |= set(_shingles(words))

    def accepts(self, text: str, is_written_by_model: bool = False, token_ids: list[int] | None = None) -> bool:
        """Whether a prompt may be trained on; counted in `refused` under its reason where not.

        Args:
            text: the user's turn.
            is_written_by_model: hold it to the rules for text that nobody has read.
            token_ids: its ids, looked through for loops where they are given.
        """
        reason = self._reason(text, is_written_by_model, token_ids)
        if reason is not None:
            self.refused[reason] += 1
            return False
        self._seen.add(tuple(words_of(text)))
        return True

    def _reason(self, text: str, is_written_by_model: bool, token_ids: list[int] | None) -> str | None:
        if not MIN_CHARS <= len(text.strip()) <= MAX_CHARS:
            return "length"
        words = words_of(text)
        if tuple(words) in self._seen:
            return "repeat"
        if tuple(words) in self._whole or any(part in self._shingles for part in _shingles(words)):
            return "evaluation"
        if is_written_by_model:
            marks = [character for character in text if not character.isspace()]
            if sum(c.isascii() and c.isalpha() for c in marks) < MIN_LETTERS * len(marks):
                return "language"
            if len(words) >= SHINGLE and len(set(words)) < len(words) / 3:
                return "loop"
        if token_ids is not None and degeneracy.check(token_ids).is_degenerate:
            return "loop"
        return None


def _shingles(words: list[str]) -> Iterable[tuple[str, ...]]:
    return (tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))

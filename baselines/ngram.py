"""Prompt lookup: the draft is what followed an earlier occurrence of the last few tokens (Saxena 2023).

No model, no training: it costs microseconds on the host and pays where the output repeats its input. Two well-known
variants differ in details that move acceptance, so each detail is an argument here.

It reads token ids only, never features or logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.target import TargetModel
from dispark.types import Draft, Features, Outcome, Request, Sampling


class NgramDrafter:
    """Looks the longest suffix of at most max_n and at least min_n tokens up in the row's own text.

    Args:
        draft_length: tokens proposed at most.
        min_n: shortest suffix that is looked up.
        max_n: longest suffix; longer ones are tried first.
        match: "first" takes the earliest occurrence, "last" the latest.
        search: "prompt_and_output" or "prompt" only.
        is_cut_at_stop: ends the proposal before the first stop id.
    """

    feature_layers: tuple[int, ...] = ()
    proposal: Literal["sampled", "deterministic"] = "deterministic"

    def __init__(
        self,
        draft_length: int = 8,
        min_n: int = 1,
        max_n: int = 3,
        match: Literal["first", "last"] = "last",
        search: Literal["prompt_and_output", "prompt"] = "prompt_and_output",
        is_cut_at_stop: bool = False,
    ) -> None:
        if draft_length < 1:
            raise ValueError(f"drafter.draft_length={draft_length}: must be at least 1")
        if not 1 <= min_n <= max_n:
            raise ValueError(f"drafter.min_n={min_n}, drafter.max_n={max_n}: need 1 <= min_n <= max_n")
        if match not in ("first", "last"):
            raise ValueError(f"drafter.match={match}: must be first or last")
        if search not in ("prompt_and_output", "prompt"):
            raise ValueError(f"drafter.search={search}: must be prompt_and_output or prompt")
        self.draft_length = draft_length
        self.min_n, self.max_n = min_n, max_n
        self.match, self.search = match, search
        self.is_cut_at_stop = is_cut_at_stop
        self._texts: dict[int, _Text] = {}
        self._stop_ids: frozenset[int] = frozenset()

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Reads the target's stop ids."""
        self._stop_ids = target.stop_ids
        self._texts.clear()

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """Starts each row's text with its prompt and first token."""
        for row, request, token in zip(rows, requests, first_tokens, strict=True):
            self._texts[row] = _Text([*request.prompt_ids, token], len(request.prompt_ids))

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """One lookup per row; rows without a match propose nothing."""
        most = self.draft_length if limit is None else limit
        proposals = [self._lookup(self._texts[row])[:most] for row in rows]
        width = max((len(tokens) for tokens in proposals), default=0)
        tokens_BG = torch.zeros((len(rows), width), dtype=torch.int64)
        for i, tokens in enumerate(proposals):
            tokens_BG[i, : len(tokens)] = torch.from_numpy(tokens)
        lengths = [len(tokens) for tokens in proposals]
        return Draft(tokens_BG.to(anchors_B.device, non_blocking=True), lengths)

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """Appends what was emitted."""
        for row, tokens in zip(rows, outcome.emitted, strict=True):
            self._texts[row].extend(tokens)

    def drop(self, rows: Sequence[int]) -> None:
        """Forgets the rows' texts."""
        for row in rows:
            del self._texts[row]

    def generate_options(self) -> dict[str, int]:
        """The nearest that transformers' generate offers, for an outside reference beside this drafter."""
        return {"prompt_lookup_num_tokens": self.draft_length, "max_matching_ngram_size": self.max_n}

    def _lookup(self, text: _Text) -> np.ndarray:
        tokens = text.tokens
        # A match has to end before the last token, so that something follows it.
        searched = tokens[: text.num_prompt] if self.search == "prompt" else tokens
        for n in range(min(self.max_n, len(tokens) - 1), self.min_n - 1, -1):
            if len(searched) <= n:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(searched[:-1], n)
            hits = np.flatnonzero((windows == tokens[-n:]).all(axis=1))
            if hits.size:
                start = int(hits[0] if self.match == "first" else hits[-1]) + n
                found = searched[start : start + self.draft_length]
                return self._cut(found)
        return tokens[:0]

    def _cut(self, found: np.ndarray) -> np.ndarray:
        if not self.is_cut_at_stop:
            return found
        is_stop = np.isin(found, list(self._stop_ids))
        return found[: int(is_stop.argmax())] if is_stop.any() else found


class _Text:
    """A growing array of token ids."""

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self._buffer = np.zeros(max(64, 2 * len(tokens)), dtype=np.int64)
        self._num = 0
        self.extend(tokens)

    @property
    def tokens(self) -> np.ndarray:
        return self._buffer[: self._num]

    def extend(self, tokens: Sequence[int]) -> None:
        while self._num + len(tokens) > len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros_like(self._buffer)])
        self._buffer[self._num : self._num + len(tokens)] = tokens
        self._num += len(tokens)

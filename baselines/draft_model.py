"""A smaller causal LM drafts token by token (Leviathan et al. 2023; Chen et al. 2023).

The draft model runs through the same packed calls as the target, with a cache of its own that is rolled back with the
target's. Its distributions are shaped by the same sampling settings, and its tokens are drawn from the float32 q that
it reports. Without a model of its own it drafts with the target itself: everything is accepted, which tests a loop.

It knows nothing of the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import draw, probabilities
from dispark.decoding.target import TargetModel
from dispark.drafters.confidence import check_confidence, proxy
from dispark.targets.model import open_target
from dispark.targets.spec import TargetSpec
from dispark.types import Draft, Features, Outcome, Request, Sampling, no_draft


class DraftModelDrafter:
    """Drafts `draft_length` tokens autoregressively.

    Args:
        draft_length: tokens proposed per round.
        model: what to load (a target spec), or None for the target itself.
        confidence: peak, entropy, or None for none.

    Raises:
        ValueError: a setting is out of range.
    """

    feature_layers: tuple[int, ...] = ()
    proposal: Literal["sampled", "deterministic"] = "sampled"

    def __init__(self, draft_length: int = 4, model: TargetSpec | None = None, confidence: str | None = None) -> None:
        if draft_length < 1:
            raise ValueError(f"drafter.draft_length={draft_length}: must be at least 1")
        check_confidence(confidence, False, "a draft model")
        self.draft_length = draft_length
        self._confidence = confidence
        self._spec = model
        self._model: TargetModel | None = None
        self._pending: dict[int, list[int]] = {}
        self._base: dict[int, int] = {}  # draft tokens of a row are kept from here on as they are accepted
        self._vocab_size = 0

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Loads the draft model once and makes room for its rows.

        Raises:
            ValueError: its vocabulary or context doesn't fit the target's.
        """
        if self._model is None:
            self._model = self._load(target)
        # The other slots hold drafts beyond the longest text, which are never verified.
        num_needed = min(target.max_context, num_slots - self.draft_length - 1)
        if self._model.max_context < num_needed:
            raise ValueError(
                f"drafter.model={self._model.name}: its context of {self._model.max_context} tokens is shorter than "
                f"the {num_needed} that the requests need; allowed: a longer context, shorter prompts or outputs"
            )
        self._vocab_size = target.vocab_size
        self._model.open(num_rows, num_slots)
        self._pending.clear()
        self._base.clear()

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """Prefills the draft model with the prompts."""
        self._bound.prefill(rows, [request.prompt_ids for request in requests])
        for row, token in zip(rows, first_tokens, strict=True):
            self._pending[row] = [token]

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """Feeds what the target emitted since, then one token at a time."""
        model = self._bound
        self._width = num = self.draft_length if limit is None else limit
        if num == 0:
            return no_draft(anchors_B)
        lengths = [len(self._pending[row]) for row in rows]
        # A target may emit padding of its vocabulary that the draft model has no embedding for; any other id serves.
        ids = torch.tensor([min(token, model.vocab_size - 1) for row in rows for token in self._pending[row]])
        logits, _ = model.forward(rows, ids.to(model.device, non_blocking=True), lengths, keep_last=True)
        for row, length in zip(rows, lengths, strict=True):
            model.commit(row, length)
            self._base[row] = model.cache.length(row)
        uniform_BG = generators.uniform("draft", self.draft_length)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        confidence: list[Tensor] = []
        for k in range(num):
            if k > 0:
                logits, _ = model.forward(rows, tokens[-1], [1] * len(rows))
                for row in rows:
                    model.commit(row, 1)
            logits = self._fit(logits)
            if self._confidence is not None:
                confidence.append(proxy(self._confidence, logits))
            if sampling.is_greedy:
                tokens.append(logits.argmax(-1))
            else:
                probs.append(probabilities(logits, sampling))
                tokens.append(draw(probs[-1], uniform_BG[:, k]))
        return Draft(
            torch.stack(tokens, dim=1),
            [num] * len(rows),
            torch.stack(probs, dim=1) if probs else None,
            torch.stack(confidence, dim=1) if confidence else None,
        )

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """Rolls back to the accepted drafts; the last draft and the target's own token are fed next round."""
        for row, tokens, accepted in zip(rows, outcome.emitted, outcome.num_accepted, strict=True):
            if self._width == 0:  # nothing was fed, so all of it is still to be
                self._pending[row] += tokens
                continue
            kept = min(accepted, self._width - 1)
            self._bound.cache.set_length(row, self._base[row] + kept)
            self._pending[row] = tokens[kept:]

    def drop(self, rows: Sequence[int]) -> None:
        """Frees the rows."""
        for row in rows:
            self._bound.drop(row)
            del self._pending[row]
            self._base.pop(row, None)

    @property
    def _bound(self) -> TargetModel:
        assert self._model is not None, "bind() comes first"
        return self._model

    def _fit(self, logits_BV: Tensor) -> Tensor:
        """Cuts or pads the draft's logits to the target's vocabulary; a padded token has probability 0."""
        missing = self._vocab_size - logits_BV.shape[-1]
        if missing <= 0:
            return logits_BV[..., : self._vocab_size]
        return F.pad(logits_BV, (0, missing), value=float("-inf"))

    def _load(self, target: TargetModel) -> TargetModel:
        if self._spec is None:
            return target.sibling("the target itself")
        model = open_target(self._spec, device=target.device, dtype=target.dtype)
        check_vocabularies(model, target)
        return model


def check_vocabularies(draft: TargetModel, target: TargetModel) -> None:
    """The two models must mean the same by a token id; padding at the end of an embedding may differ.

    Raises:
        ValueError: different tokenizers, or different sizes where a tokenizer is missing.
    """
    if draft.vocab_fingerprint is not None and target.vocab_fingerprint is not None:
        if draft.vocab_fingerprint != target.vocab_fingerprint:
            raise ValueError(
                f"drafter.model={draft.name}: its tokenizer differs from that of target {target.name}; "
                f"allowed: a model with the same vocabulary (padding may differ)"
            )
    elif draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"drafter.model={draft.name}: {draft.vocab_size} tokens, but target {target.name} has "
            f"{target.vocab_size}; allowed: the same number where there is no tokenizer to compare"
        )

"""Self-speculation: the first layers of the target draft for all of them (SPEED, Hooper et al. 2023; early exit as in
LayerSkip, Elhoushi et al. 2024).

A drafted token is what the target's final norm and LM head make of the hidden state after its first layers. There are
no parameters and no cache besides the target's: the shallow pass reads the committed keys and values of its layers and
writes those of the drafted tokens behind them. Afterwards the rows are set back; verification runs all layers and
writes the same slots again, with the same numbers in the shallow layers.

SPEED predicts from early layers as here, but runs the guesses in a pipeline beside the layers that are still to come,
on models that share weights between layers; LayerSkip trains the target for early exits, without which few drafts are
accepted, and does not compute the shallow layers again in verification. None of these is done here. The module knows
nothing of the target's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import draw, probabilities
from dispark.decoding.target import TargetModel
from dispark.drafters.confidence import check_confidence, proxy
from dispark.types import Draft, Features, Outcome, Request, Sampling, no_draft


class SelfSpeculationDrafter:
    """Drafts `draft_length` tokens one after the other with the target's first layers.

    Args:
        num_layers: how many; None is half of them. With all of them every draft is accepted, a check of the loop.
        draft_length: tokens proposed a round.
        confidence: peak, entropy, or None for none.

    Raises:
        ValueError: a setting is out of range.
    """

    feature_layers: tuple[int, ...] = ()
    proposal: Literal["sampled", "deterministic"] = "sampled"

    def __init__(self, num_layers: int | None = None, draft_length: int = 4, confidence: str | None = None) -> None:
        for key, value in (("num_layers", num_layers), ("draft_length", draft_length)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"drafter.{key}={value}: must be a whole number >= 1")
        check_confidence(confidence, False, "self-speculation")
        self.draft_length = draft_length
        self._asked_layers = num_layers
        self._confidence = confidence
        self._target: TargetModel | None = None
        self.num_layers = 0
        self.description: dict[str, Any] = {}

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Notes the target and how many of its layers draft.

        Raises:
            ValueError: it has fewer layers.
        """
        asked = self._asked_layers
        self.num_layers = max(1, target.num_layers // 2) if asked is None else asked
        if self.num_layers > target.num_layers:
            raise ValueError(
                f"drafter.num_layers={asked}: target {target.name} has {target.num_layers} layers; allowed: 1 to "
                f"{target.num_layers}, or null for half of them"
            )
        self._target = target
        self.description = {
            "num_layers": self.num_layers,
            "num_target_layers": target.num_layers,
            "num_parameters": 0,
        }

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """Nothing to do: the prefill filled the cache."""

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """Feeds the anchor, which the target has not seen, then every draft but the last; the rows end as they were."""
        target = self._target
        assert target is not None, "bind() comes first"
        num = self.draft_length if limit is None else limit
        if num == 0:
            return no_draft(anchors_B)
        kept = [target.length(row) for row in rows]
        uniform_BG = None if sampling.is_greedy else generators.uniform("draft", self.draft_length)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        confidence: list[Tensor] = []
        newest_B = anchors_B
        for k in range(num):
            logits_BV, _ = target.forward(rows, newest_B, [1] * len(rows), num_layers=self.num_layers)
            for row in rows:
                target.commit(row, 1)
            if self._confidence is not None:
                confidence.append(proxy(self._confidence, logits_BV))
            if uniform_BG is None:
                newest_B = logits_BV.argmax(-1)
            else:
                probs.append(probabilities(logits_BV, sampling))
                newest_B = draw(probs[-1], uniform_BG[:, k])
            tokens.append(newest_B)
        for row, length in zip(rows, kept, strict=True):
            target.rewind(row, length)
        return Draft(
            torch.stack(tokens, dim=1),
            [num] * len(rows),
            torch.stack(probs, dim=1) if probs else None,
            torch.stack(confidence, dim=1) if confidence else None,
        )

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """Nothing to do: verification wrote what is kept."""

    def drop(self, rows: Sequence[int]) -> None:
        """Nothing to do: the target drops the rows."""

"""A drafter whose acceptance is known beforehand: ground truth for every metric, and a what-if tool.

It asks the target for its own greedy continuation and spoils the token at position k with probability 1 - rate k,
given that the ones before it stand. So the number of accepted drafts follows the rates exactly (in float32; in bfloat16
a near tie may cost one), and expected MATL = 1 + r1 + r1 r2 + ... Its draft time is the oracle's and means nothing:
state a draft cost instead and read the what-if throughput.

It serves temperature 0 only: at other temperatures the target's token is random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from baselines.draft_model import DraftModelDrafter
from dispark.decoding.random import RowGenerators
from dispark.decoding.target import TargetModel
from dispark.types import Draft, Features, Outcome, Request, Sampling


class SyntheticDrafter:
    """Accepts by given rates.

    Args:
        rates: conditional acceptance at positions 1..G, each in [0, 1].
        draft_cost_s: seconds a real drafter with these rates would take per round; only the what-if throughput uses it.
    """

    feature_layers: tuple[int, ...] = ()
    proposal: Literal["sampled", "deterministic"] = "deterministic"

    def __init__(self, rates: Sequence[float], draft_cost_s: float = 0.0) -> None:
        if not rates or not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ValueError(f"drafter.rates={list(rates)}: must be a non-empty list of numbers in [0, 1]")
        if not 0.0 <= draft_cost_s < float("inf"):
            raise ValueError(f"drafter.draft_cost_s={draft_cost_s}: must be a number of seconds >= 0")
        self.rates = tuple(float(rate) for rate in rates)
        self.draft_length = len(self.rates)
        self.draft_cost_s = float(draft_cost_s)
        self._oracle = DraftModelDrafter(self.draft_length)
        self._vocab_size = 0

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Opens the oracle's own rows on the target's weights."""
        self._vocab_size = target.vocab_size
        self._oracle.bind(target, num_rows, num_slots)

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """Prefills the oracle."""
        self._oracle.begin(rows, requests, first_tokens, features)

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """The target's continuation, spoiled by the rates.

        Raises:
            ValueError: the temperature is not 0.
        """
        if not sampling.is_greedy:
            raise ValueError(
                f"drafter=synthetic with sampling.temperature={sampling.temperature}: it serves temperature 0 only"
            )
        truth_BG = self._oracle.propose(rows, anchors_B, sampling, generators, limit).tokens_BG
        width = truth_BG.shape[1]
        rate_G = torch.tensor(self.rates[:width], dtype=torch.float64, device=truth_BG.device)
        is_spoiled_BG = generators.uniform("corrupt", self.draft_length)[:, :width] >= rate_G
        tokens_BG = torch.where(is_spoiled_BG, (truth_BG + 1) % self._vocab_size, truth_BG)
        return Draft(tokens_BG, [width] * len(rows))

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """Rolls the oracle back to the accepted tokens."""
        self._oracle.update(rows, outcome, features)

    def drop(self, rows: Sequence[int]) -> None:
        """Frees the oracle's rows."""
        self._oracle.drop(rows)

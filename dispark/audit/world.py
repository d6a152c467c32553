"""A world small enough to enumerate: what target and drafter think after every prefix, and how sure the drafter is.

What the target thinks is a function of the row and its tokens so far, what the drafter thinks one of the row, its text
and the tokens drafted behind it. The confidence in token k knows the tokens before it and not the token itself, as
every drafter here does. Worlds of random tables are made here, those of real drafters in drafter_world.py.

It knows neither schedulers nor verifiers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dispark.decoding.sampling import probabilities
from dispark.types import Sampling

Tokens = tuple[int, ...]
Vector = npt.NDArray[np.float64]


class World(Protocol):
    """What an audit enumerates."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def draft_length(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def sampling(self) -> Sampling:
        """Shapes the target's law."""

    @property
    def proposal(self) -> Literal["sampled", "deterministic"]:
        """How the drafter proposes."""

    def target_logits(self, row: int, prefix: Tokens) -> Tensor:
        """float64 [V]."""

    def draft_probs(self, row: int, text: Tokens, drafted: Tokens) -> Vector:
        """[V], what the drafter reports as its next token's law; a "deterministic" one is its most likely token."""

    def drawn_probs(self, row: int, text: Tokens, drafted: Tokens) -> Vector:
        """[V], the law that its next token is really drawn from."""

    def confidence(self, row: int, text: Tokens, drafted: Tokens) -> float | None:
        """That the next draft survives, in [0, 1]; None if the drafter doesn't say."""

    def num_drafted(self, row: int, text: Tokens) -> int:
        """Tokens that it drafts here, at most draft_length."""


def target_probs(world: World, row: int, prefix: Tokens) -> Vector:
    """[V], the law that the row's next token has to follow."""
    logits = world.target_logits(row, prefix).unsqueeze(0)
    law: Vector = probabilities(logits, world.sampling)[0].double().numpy()
    return law


def drafts_after(world: World, row: int, text: Tokens) -> list[tuple[Tokens, float]]:
    """Every draft that may follow, with its probability."""
    length = world.num_drafted(row, text)
    if world.proposal == "deterministic":
        tokens: Tokens = ()
        for _ in range(length):
            tokens += (int(world.draft_probs(row, text, tokens).argmax()),)
        return [(tokens, 1.0)]
    found: list[tuple[Tokens, float]] = [((), 1.0)]
    for _ in range(length):
        found = [
            ((*tokens, token), weight * float(share))
            for tokens, weight in found
            for token, share in enumerate(world.drawn_probs(row, text, tokens))
            if share > 0.0
        ]
    return found


@dataclass(frozen=True)
class RandomWorld:
    """Random tables, some of whose entries are zero; see World.

    Args:
        seed: of the tables.
        share_of_zeros: of tokens that the target, and of tokens that the drafter, rules out.
    """

    vocab_size: int = 3
    draft_length: int = 2
    num_rows: int = 1
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    proposal: Literal["sampled", "deterministic"] = "sampled"
    seed: int = 0
    share_of_zeros: float = 0.2

    def target_logits(self, row: int, prefix: Tokens) -> Tensor:
        return torch.from_numpy(self._logits(row, prefix, 0))

    def draft_probs(self, row: int, text: Tokens, drafted: Tokens) -> Vector:
        logits = torch.from_numpy(self._logits(row, text + drafted, 1)).unsqueeze(0)
        law: Vector = probabilities(logits, self.sampling)[0].double().numpy()
        return law

    def drawn_probs(self, row: int, text: Tokens, drafted: Tokens) -> Vector:
        return self.draft_probs(row, text, drafted)

    def confidence(self, row: int, text: Tokens, drafted: Tokens) -> float | None:
        # A few levels only, so that ties between rows and positions happen.
        levels, shares = [0.0, 0.3, 0.6, 0.9, 1.0], [0.1, 0.2, 0.3, 0.3, 0.1]
        return float(self._generator(row, text + drafted, 2).choice(levels, p=shares))

    def num_drafted(self, row: int, text: Tokens) -> int:
        return self.draft_length

    def _logits(self, row: int, prefix: Tokens, which: int) -> Vector:
        key = (row, prefix, which)
        if key not in self._kept:
            generator = self._generator(row, prefix, which)
            logits = generator.normal(0.0, 1.5, self.vocab_size)
            is_out = generator.random(self.vocab_size) < self.share_of_zeros
            is_out[generator.integers(self.vocab_size)] = False
            logits[is_out] = -np.inf
            self._kept[key] = logits
        return self._kept[key]

    @cached_property
    def _kept(self) -> dict[tuple[int, Tokens, int], Vector]:
        return {}

    def _generator(self, row: int, prefix: Tokens, which: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, row, which, len(prefix), *prefix])

"""A real drafter on a real target, both so small that everything they can do can be listed.

The target knows a few tokens. Its logits after every text come from its stock forward. The drafter is asked after every
text, with the uniforms that it draws by chosen: the law of its draws is read off its own code by bisection, apart from
the law that it reports, so that a drafter that reports another law than it draws from is found. In float64 the two
agree to rounding.

What batches, caches and rollbacks do to it is for tests/conformance: here it begins anew after every text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dispark.audit.world import Tokens, Vector
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.types import Draft, Request, Sampling

_STEPS = 52
_LAST = 1.0 - 2.0**-53
_CHUNK = 256  # rows asked at a time

Head = tuple[Tokens, Tokens]  # a text, and what was drafted behind it


@dataclass(frozen=True)
class _Said:
    """What a drafter says at a head."""

    reported: Vector
    drawn: Vector
    confidence: float | None


class _Chosen:
    """Stands in for the rows' generators: what is drawn by is what the audit says."""

    def __init__(self, uniform_BG: Tensor) -> None:
        self._uniform_BG = uniform_BG

    def uniform(self, purpose: str, num: int) -> Tensor:
        missing = num - self._uniform_BG.shape[1]
        return torch.nn.functional.pad(self._uniform_BG, (0, max(0, missing)), value=0.5)[:, :num]


class DrafterWorld:
    """See the module and audit.world.World; one row.

    Args:
        target: small, best in float64.
        drafter: whatever drafts for it.
        sampling: shapes p and q.
        prompt: what every text follows, two tokens or more.
        num_tokens: first tokens of a text that an audit looks at.
        draft_length: at most so many tokens are drafted.
    """

    num_rows = 1

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        sampling: Sampling,
        prompt: Sequence[int],
        num_tokens: int,
        draft_length: int = 2,
    ) -> None:
        self.vocab_size, self.sampling = target.vocab_size, sampling
        self.draft_length = min(draft_length, drafter.draft_length)
        self.proposal: Literal["sampled", "deterministic"] = drafter.proposal
        self._target, self._drafter, self._prompt = target, drafter, tuple(prompt)
        self._is_sampled = drafter.proposal == "sampled" and not sampling.is_greedy
        texts = [text for num in range(num_tokens) for text in product(range(self.vocab_size), repeat=num)]
        self._logits = self._target_logits(num_tokens - 1 + self.draft_length)
        self._said: dict[Head, _Said] = {}
        self._num: dict[Tokens, int] = {}
        self._list(texts)

    # -- World --------------------------------------------------------------------------------------------------

    def target_logits(self, row: int, prefix: Tokens) -> Tensor:
        return self._logits[prefix]

    def draft_probs(self, row: int, text: Tokens, drafted: Tokens) -> Vector:
        return self._said[text, drafted].reported

    def drawn_probs(self, row: int, text: Tokens, drafted: Tokens) -> Vector:
        return self._said[text, drafted].drawn

    def confidence(self, row: int, text: Tokens, drafted: Tokens) -> float | None:
        return self._said[text, drafted].confidence

    def num_drafted(self, row: int, text: Tokens) -> int:
        return self._num[text]

    # -- lists --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _target_logits(self, longest: int) -> dict[Tokens, Tensor]:
        found: dict[Tokens, Tensor] = {}
        with self._target.stock() as model:
            for num in range(longest + 1):
                prefixes = list(product(range(self.vocab_size), repeat=num))
                ids = torch.tensor([[*self._prompt, *prefix] for prefix in prefixes])
                found |= dict(zip(prefixes, model(ids).logits[:, -1].double(), strict=True))
        return found

    def _list(self, texts: Sequence[Tokens]) -> None:
        """Asks the drafter at every head, position by position."""
        heads: list[tuple[Head, tuple[float, ...]]] = [((text, ()), ()) for text in texts]
        for k in range(self.draft_length):
            drafts = self._ask(heads)
            following = []
            for (head, uniforms), (token, reported, confidence, length) in zip(heads, self._at(drafts, k), strict=True):
                text, drafted = head
                if k == 0:
                    self._num[text] = length
                if k >= length:
                    continue
                if self._is_sampled:
                    assert reported is not None
                    self._said[head] = _Said(reported, np.zeros(self.vocab_size), confidence)
                    following.append((head, uniforms))
                else:
                    point = np.zeros(self.vocab_size)
                    point[token] = 1.0
                    self._said[head] = _Said(point, point, confidence)
                    following.append(((text, (*drafted, token)), uniforms))
            heads = self._drawn(following, k) if self._is_sampled else following

    def _drawn(self, heads: list[tuple[Head, tuple[float, ...]]], k: int) -> list[tuple[Head, tuple[float, ...]]]:
        """Finds for each head the shares of the unit interval that draw each token, and gives the heads behind it, with
        a uniform that leads there."""
        lanes = [(i, last) for i in range(len(heads)) for last in range(self.vocab_size - 1)]
        low, high = np.zeros(len(lanes)), np.ones(len(lanes))

        def is_at_most(uniform: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            asked = [(heads[i][0], (*heads[i][1], float(u))) for (i, _), u in zip(lanes, uniform, strict=True)]
            tokens = [token for token, _, _, _ in self._at(self._ask(asked), k)]
            return np.array([token <= last for token, (_, last) in zip(tokens, lanes, strict=True)])

        never, always = ~is_at_most(low), is_at_most(np.full(len(lanes), _LAST))
        for _ in range(_STEPS):
            middle = (low + high) / 2
            holds = is_at_most(np.minimum(middle, _LAST))
            low, high = np.where(holds, middle, low), np.where(holds, high, middle)
        edge = np.where(never, 0.0, np.where(always, 1.0, high)).reshape(len(heads), self.vocab_size - 1)
        following = []
        for (head, uniforms), inner in zip(heads, edge, strict=True):
            edges = np.concatenate([[0.0], inner, [1.0]])
            shares = np.diff(edges)
            shares[np.abs(shares) < 2.0**-50] = 0.0
            assert (shares >= 0.0).all(), "a drafter's draw does not step through the vocabulary once"
            said = self._said[head]
            self._said[head] = _Said(said.reported, shares, said.confidence)
            text, drafted = head
            for token in np.flatnonzero(shares):
                middle_of = float(edges[token] + edges[token + 1]) / 2
                following.append(((text, (*drafted, int(token))), (*uniforms, middle_of)))
        return following

    # -- the drafter --------------------------------------------------------------------------------------------

    def _at(self, drafts: list[Draft], k: int) -> list[tuple[int, Vector | None, float | None, int]]:
        """(token, reported law, confidence, drafted tokens) of position k for every row asked."""
        found: list[tuple[int, Vector | None, float | None, int]] = []
        for draft in drafts:
            for i, length in enumerate(draft.lengths):
                if k >= length:
                    found.append((0, None, None, length))
                    continue
                law = None if draft.probs_BGV is None else draft.probs_BGV[i, k].double().numpy().copy()
                sure = None if draft.confidence_BG is None else float(draft.confidence_BG[i, k])
                found.append((int(draft.tokens_BG[i, k]), law, sure, length))
        return found

    @torch.inference_mode()
    def _ask(self, heads: Sequence[tuple[Head, tuple[float, ...]]]) -> list[Draft]:
        """Drafts after each head's text, drawn by its uniforms."""
        return [self._ask_chunk(heads[i : i + _CHUNK]) for i in range(0, len(heads), _CHUNK)]

    def _ask_chunk(self, heads: Sequence[tuple[Head, tuple[float, ...]]]) -> Draft:
        target, drafter, rows = self._target, self._drafter, list(range(len(heads)))
        texts = [(*self._prompt, *text) for (text, _), _ in heads]
        num_slots = max(map(len, texts)) + drafter.draft_length + 2
        drafter.bind(target, _CHUNK, num_slots)
        target.open(_CHUNK, num_slots, drafter.feature_layers)
        _, features = target.prefill(rows, [text[:-1] for text in texts])
        requests = [
            Request(str(i), str(i), 0, "audit", "audit", text[:-1], self.draft_length, i)
            for i, text in enumerate(texts)
        ]
        anchors = [text[-1] for text in texts]
        drafter.begin(rows, requests, anchors, features)
        width = max(1, *(len(uniforms) for _, uniforms in heads)) if heads else 1
        uniform_BG = torch.full((len(heads), width), 0.5, dtype=torch.float64)
        for i, (_, uniforms) in enumerate(heads):
            for k, value in enumerate(uniforms):
                uniform_BG[i, k] = value
        chosen: Any = _Chosen(uniform_BG)
        draft = drafter.propose(rows, torch.tensor(anchors), self.sampling, chosen, self.draft_length)
        drafter.drop(rows)
        for row in rows:
            target.drop(row)
        return draft

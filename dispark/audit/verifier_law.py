"""The exact law of what a verifier emits, read off the verifier's own code.

A verifier is a function of its uniforms. Each accept decision flips once as its uniform grows, and the token drawn at
the end steps through the vocabulary once as the other does. So the places where the code's answer changes are found
by bisection down to neighbouring floating-point numbers, and the widths between them are the probabilities: there is
no sampling noise, and no formula that the verifier is assumed to follow.

It knows nothing of schedulers, nor of what the law ought to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dispark.interfaces import Verifier
from dispark.types import Draft, Sampling

_LAST = 1.0 - 2.0**-53  # the largest uniform there is
_STEPS = 60
_MIN_SHARE = 2.0**-50  # of the unit interval; what is narrower is rounding


@dataclass(frozen=True)
class Case:
    """One row's round.

    Args:
        tokens: drafted.
        verify_length: how many of them are verified.
        logits: float64 [1 + verify_length, V] of the target, the anchor's first.
        probs: float64 [G, V] that the tokens were drawn from, or None for a point mass.
    """

    tokens: tuple[int, ...]
    verify_length: int
    logits: Tensor
    probs: Tensor | None


Law = Mapping[tuple[int, ...], float]


def laws(verifier: Verifier, cases: Sequence[Case], sampling: Sampling) -> list[dict[tuple[int, ...], float]]:
    """For each case the probability of every run of emitted tokens: accepted drafts and the token after them.

    Args:
        verifier: whose code is asked.
        cases: all of one draft length.
        sampling: shapes the target's law.
    """
    if not cases:
        return []
    width = len(cases[0].tokens)
    lanes = [(i, n) for i, case in enumerate(cases) for n in range(case.verify_length)]
    accept = dict(zip(lanes, _accept_shares(verifier, cases, lanes, sampling, width), strict=True))
    stops, reach = [], []
    for i, case in enumerate(cases):
        before = 1.0
        for n in range(case.verify_length + 1):
            share = accept[i, n] if n < case.verify_length else 0.0
            if before * (1.0 - share) > 0.0:
                stops.append((i, n))
                reach.append(before * (1.0 - share))
            before *= share
    found: list[dict[tuple[int, ...], float]] = [{} for _ in cases]
    for (i, n), weight, shares in zip(stops, reach, _next_shares(verifier, cases, stops, sampling), strict=True):
        for token, share in enumerate(shares):
            if share > 0.0:
                key = (*cases[i].tokens[:n], token)
                found[i][key] = found[i].get(key, 0.0) + weight * share
    return found


def _accept_shares(
    verifier: Verifier, cases: Sequence[Case], lanes: Sequence[tuple[int, int]], sampling: Sampling, width: int
) -> list[float]:
    """For each lane (case, position) the share of uniforms with which the position is accepted, given that those before
    it are; 0 where they can't be."""
    if not lanes:
        return []
    position = torch.tensor([n for _, n in lanes])
    chosen = [cases[i] for i, _ in lanes]

    def is_accepted(uniform_S: Tensor) -> Tensor:
        uniforms = torch.zeros(len(lanes), width, dtype=torch.float64)
        uniforms.scatter_(1, position.unsqueeze(1), uniform_S.unsqueeze(1))
        uniforms[torch.arange(width) > position.unsqueeze(1)] = _LAST
        num_accepted, _ = _ask(verifier, chosen, uniforms, torch.zeros(len(lanes), 1, dtype=torch.float64), sampling)
        return num_accepted > position

    return _flip(is_accepted, len(lanes)).tolist()


def _next_shares(
    verifier: Verifier, cases: Sequence[Case], stops: Sequence[tuple[int, int]], sampling: Sampling
) -> list[list[float]]:
    """For each stop (case, number accepted) the share of uniforms that draw each token after it."""
    if not stops:
        return []
    num_tokens = cases[0].logits.shape[-1]
    num_accepted = torch.tensor([n for _, n in stops])
    width = len(cases[0].tokens)
    accepts = torch.where(torch.arange(width) < num_accepted.unsqueeze(1), 0.0, _LAST).double()
    chosen = [cases[i] for i, _ in stops]
    edges = [torch.zeros(len(stops), dtype=torch.float64)]
    for token in range(num_tokens - 1):

        def is_at_most(uniform_S: Tensor, last: int = token) -> Tensor:
            got, tokens = _ask(verifier, chosen, accepts, uniform_S.unsqueeze(1), sampling)
            assert torch.equal(got, num_accepted), "a verifier's accept decisions moved with its last draw"
            return tokens <= last

        edges.append(_flip(is_at_most, len(stops)))
    edges.append(torch.ones(len(stops), dtype=torch.float64))
    shares = torch.stack(edges, dim=1).diff(dim=1)
    shares[shares.abs() < _MIN_SHARE] = 0.0
    assert bool((shares >= 0).all()), "a verifier's last draw does not step through the vocabulary once"
    found: list[list[float]] = shares.tolist()
    return found


def _flip(is_low: Callable[[Tensor], Tensor], num: int) -> Tensor:
    """float64 [num]: where a predicate that holds up to some uniform stops to hold; 0 if never, 1 if always."""
    low, high = torch.zeros(num, dtype=torch.float64), torch.ones(num, dtype=torch.float64)
    never = ~is_low(low)
    always = is_low(torch.full_like(low, _LAST))
    for _ in range(_STEPS):
        middle = (low + high) / 2
        holds = is_low(middle.clamp(max=_LAST))
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    found = torch.where(always, torch.ones_like(low), high)
    return torch.where(never, torch.zeros_like(low), found)


class _Given:
    """Stands in for the rows' generators: the uniforms are what the audit says."""

    def __init__(self, **uniforms: Tensor) -> None:
        self._uniforms = uniforms

    def uniform(self, purpose: str, num: int) -> Tensor:
        found = self._uniforms[purpose]
        assert found.shape[1] == num
        return found


def _ask(
    verifier: Verifier, cases: Sequence[Case], accept: Tensor, recover: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """The verifier's own answer for each case: how many it accepts, and the token after them."""
    tokens = torch.tensor([case.tokens for case in cases], dtype=torch.int64).view(len(cases), -1)
    probs = None
    if cases[0].probs is not None:
        probs = torch.stack([case.probs for case in cases if case.probs is not None])
    draft = Draft(tokens, [tokens.shape[1]] * len(cases), probs)
    logits = torch.cat([case.logits for case in cases])
    lengths = [case.verify_length for case in cases]
    verdict = verifier.accept(draft, logits, lengths, sampling, _Given(accept=accept, recover=recover))  # type: ignore[arg-type]
    after = verdict.tokens_BT.gather(1, verdict.num_accepted_B.unsqueeze(1)).squeeze(1)
    return verdict.num_accepted_B, after

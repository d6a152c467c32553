"""Laws read off a verifier's code against the textbook's formula."""

from __future__ import annotations

import pytest
import torch

from dispark.audit.verifier_law import Case, laws
from dispark.types import Sampling
from dispark.verifiers.greedy import GreedyVerifier
from dispark.verifiers.rejection import RejectionVerifier

P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.9, 0.0], [0.25, 0.25, 0.5]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.6, 0.2], [0.4, 0.3, 0.3]], dtype=torch.float64)
T1 = Sampling(1.0)


def law_of(tokens: tuple[int, ...], length: int, probs: torch.Tensor | None = Q) -> dict[tuple[int, ...], float]:
    return laws(RejectionVerifier(), [Case(tokens, length, P[: length + 1].log(), probs)], T1)[0]


def test_a_rejection_draws_from_what_is_left() -> None:
    # Token 1: accepted with 0.3 / 0.6; what is left of p is 0.3 on token 0 alone.
    assert law_of((1, 0), 1) == pytest.approx({(0,): 0.5, (1, 0): 0.5 * 0.1, (1, 1): 0.5 * 0.9}, abs=1e-14)


def test_both_positions() -> None:
    # Then token 0: accepted with 0.1 / 0.4; what is left is 0.6 on token 1; after both comes p.
    wanted = {(0,): 0.5, (1, 1): 0.5 * 0.75}
    wanted |= {(1, 0, token): 0.5 * 0.25 * share for token, share in enumerate((0.25, 0.25, 0.5))}
    assert law_of((1, 0), 2) == pytest.approx(wanted, abs=1e-14)


def test_a_token_that_the_target_rules_out_is_never_accepted() -> None:
    found = law_of((0, 2), 2)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-14)
    assert not any(text[:2] == (0, 2) for text in found)


def test_nothing_verified_is_the_targets_own_law() -> None:
    assert law_of((1, 0), 0) == pytest.approx({(0,): 0.5, (1,): 0.3, (2,): 0.2}, abs=1e-14)


def test_a_point_mass() -> None:
    assert law_of((1, 0), 1, None) == pytest.approx(
        {(0,): 0.7 * 5 / 7, (2,): 0.7 * 2 / 7, (1, 0): 0.3 * 0.1, (1, 1): 0.3 * 0.9}, abs=1e-14
    )


def test_greedy_has_one_outcome() -> None:
    case = Case((0, 1), 2, P.log(), None)
    assert laws(GreedyVerifier(), [case], Sampling(0.0)) == [{(0, 1, 2): 1.0}]


def test_many_cases_at_once_are_as_each_alone() -> None:
    cases = [Case(t, n, P[: n + 1].log(), Q) for t in ((0, 0), (1, 0), (2, 2), (1, 2)) for n in (0, 1, 2)]
    together = laws(RejectionVerifier(), cases, T1)
    assert together == [laws(RejectionVerifier(), [case], T1)[0] for case in cases]
    assert laws(RejectionVerifier(), [], T1) == []

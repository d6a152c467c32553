"""Exactness of rejection sampling by enumeration.

The uniforms' unit cube is cut into cells at every value where the right rule may change its mind, and at some more; a
verdict is taken in the middle of each cell and weighed by its volume. So the law of the emitted tokens comes out
without any sampling error, and has to equal the target's. The same measure has to refuse three wrong rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import pytest
import torch
from torch import Tensor

from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import probabilities
from dispark.interfaces import Verifier
from dispark.types import Draft, Sampling
from dispark.verifiers import rejection
from dispark.verifiers.rejection import RejectionVerifier

V, G = 3, 2
EXTRA_CUTS = (0.15, 0.35, 0.6, 0.85)
PLAIN = Sampling(1.0)
Proposal = Literal["sampled", "deterministic"]


class FixedUniforms(RowGenerators):
    """Streams whose uniforms are given by hand."""

    def __init__(self, accept_BG: Tensor, recover_B: Tensor) -> None:
        super().__init__([0] * len(recover_B), [1] * len(recover_B), recover_B.device)
        self._values = {"accept": accept_BG, "recover": recover_B.unsqueeze(1)}

    def uniform(self, purpose: str, num: int) -> Tensor:
        return self._values[purpose][:, :num]


@dataclass(frozen=True)
class World:
    """Logits of a target and a drafter over every path of G drafts, from the anchor on."""

    target: list[Tensor]  # level k: [V ** k, V]
    drafter: list[Tensor]

    @classmethod
    def make(cls, seed: int, spread: float = 1.5) -> World:
        generator = torch.Generator().manual_seed(seed)
        levels = [[torch.randn(V**k, V, generator=generator) * spread for k in range(G + 1)] for _ in range(2)]
        return cls(levels[0], levels[1][:G])

    def p(self, path: Sequence[int], sampling: Sampling) -> Tensor:
        return probabilities(self.target[len(path)][number(path)].unsqueeze(0), sampling)[0]

    def q(self, path: Sequence[int], sampling: Sampling) -> Tensor:
        return probabilities(self.drafter[len(path)][number(path)].unsqueeze(0), sampling)[0]


def number(path: Sequence[int]) -> int:
    """A path's place within its level."""
    place = 0
    for token in path:
        place = place * V + token
    return place


@dataclass
class Cells:
    """Rows of one verifier call, and the probability that each stands for."""

    drafts: list[tuple[int, ...]]
    accept: list[tuple[float, ...]]
    recover: list[float]
    weight: list[float]


def middles(cuts: set[float]) -> list[tuple[float, float]]:
    """(middle, length) of the intervals of [0, 1) between the cuts."""
    bounds = sorted({0.0, 1.0, *(cut for cut in cuts if 0.0 < cut < 1.0)})
    return [((low + high) / 2, high - low) for low, high in pairwise(bounds)]


def shares(weights: Tensor) -> set[float]:
    """Where inversion over these weights changes its token."""
    total = float(weights.double().sum())
    return set((weights.double().cumsum(0) / total).tolist()) if total > 0 else set()


def make_cells(world: World, sampling: Sampling, proposal: Proposal, length: int, point: tuple[int, ...]) -> Cells:
    cells = Cells([], [], [], [])
    for drafts in product(range(V), repeat=G) if proposal == "sampled" else [point]:
        chance = 1.0
        accept_cuts: list[set[float]] = []
        recover_cuts = {*EXTRA_CUTS, *shares(world.p(drafts[:length], sampling))}
        for k in range(G):
            p, q = world.p(drafts[:k], sampling), world.q(drafts[:k], sampling)
            if proposal == "sampled":
                chance *= float(q[drafts[k]])
            else:
                q = torch.nn.functional.one_hot(torch.tensor(drafts[k]), V).float()
            ratio = float(p[drafts[k]] / q[drafts[k]]) if float(q[drafts[k]]) > 0 else 1.0
            accept_cuts.append({ratio, *EXTRA_CUTS})
            recover_cuts |= shares((p - q).clamp(min=0.0))
        if chance == 0.0:
            continue
        for combination in product(*(middles(cuts) for cuts in [*accept_cuts, recover_cuts])):
            volume = chance
            for _, size in combination:
                volume *= size
            cells.drafts.append(drafts)
            cells.accept.append(tuple(middle for middle, _ in combination[:-1]))
            cells.recover.append(combination[-1][0])
            cells.weight.append(volume)
    assert abs(sum(cells.weight) - 1.0) < 1e-5
    return cells


def emitted_law(
    world: World,
    sampling: Sampling,
    proposal: Proposal,
    length: int,
    *,
    point: tuple[int, ...] = (0, 1),
    reported: World | None = None,
    shown: World | None = None,
) -> dict[tuple[int, ...], float]:
    """Probability of each emitted sequence.

    Args:
        reported: whose q the draft claims to come from, if not the world's own.
        shown: whose p the verifier is given, if not the world's own.
    """
    cells = make_cells(world, sampling, proposal, length, point)
    tokens = torch.tensor(cells.drafts)
    probs = None
    if proposal == "sampled":
        claimed = reported or world
        probs = torch.stack([torch.stack([claimed.q(d[:k], sampling) for k in range(G)]) for d in cells.drafts])
    target = (shown or world).target
    logits = torch.stack([target[k][number(d[:k])] for d in cells.drafts for k in range(length + 1)])
    verdict = RejectionVerifier().accept(
        Draft(tokens, [G] * len(tokens), probs),
        logits,
        [length] * len(tokens),
        sampling,
        FixedUniforms(torch.tensor(cells.accept, dtype=torch.float64), torch.tensor(cells.recover).double()),
    )
    law: dict[tuple[int, ...], float] = {}
    for row, num, weight in zip(verdict.tokens_BT.tolist(), verdict.num_accepted_B.tolist(), cells.weight, strict=True):
        emitted = tuple(row[: num + 1])
        law[emitted] = law.get(emitted, 0.0) + weight
    return law


def error_of(law: dict[tuple[int, ...], float], world: World, sampling: Sampling) -> float:
    """How far the next token's law is from the target's, after any emitted path, in probability mass."""
    worst = 0.0
    for depth in range(G + 1):
        for path in product(range(V), repeat=depth):
            reached = {seq: mass for seq, mass in law.items() if len(seq) > depth and seq[:depth] == path}
            total = sum(reached.values())
            found = torch.zeros(V, dtype=torch.float64)
            for seq, mass in reached.items():
                found[seq[depth]] += mass
            worst = max(worst, float((found - total * world.p(path, sampling).double()).abs().max()))
    return worst


SAMPLINGS = [PLAIN, Sampling(0.5), Sampling(2.0, top_k=2), Sampling(1.0, top_p=0.7)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("proposal", ["sampled", "deterministic"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_emitted_law_is_the_target_s(sampling: Sampling, length: int, proposal: Proposal, seed: int) -> None:
    world = World.make(seed)
    law = emitted_law(world, sampling, proposal, length)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert max(len(emitted) for emitted in law) <= length + 1
    assert error_of(law, world, sampling) < 1e-6


@pytest.mark.parametrize("proposal", ["sampled", "deterministic"])
def test_the_first_draft_is_accepted_as_often_as_theory_says(proposal: Proposal) -> None:
    world = World.make(3)
    accepted = sum(mass for seq, mass in emitted_law(world, PLAIN, proposal, 2).items() if len(seq) > 1)
    p, q = world.p((), PLAIN), world.q((), PLAIN)
    expected = float(torch.minimum(p, q).sum()) if proposal == "sampled" else float(p[0])
    assert accepted == pytest.approx(expected, abs=1e-6)


def test_a_draft_outside_the_target_s_support_is_never_accepted() -> None:
    world = World.make(4)
    sampling = Sampling(1.0, top_k=1)
    least = int(world.p((), PLAIN).argmin())
    law = emitted_law(world, sampling, "deterministic", 1, point=(least, 0))
    assert law == {(int(world.p((), PLAIN).argmax()),): pytest.approx(1.0)}


def test_a_drafter_that_equals_the_target_is_always_accepted() -> None:
    world = World.make(5)
    twin = World(world.target, world.target[:G])
    law = emitted_law(twin, PLAIN, "sampled", 2)
    assert sum(mass for seq, mass in law.items() if len(seq) == 3) == pytest.approx(1.0, abs=1e-5)
    assert error_of(law, twin, PLAIN) < 1e-6


def test_control_a_q_that_was_not_sampled_from_is_found_out() -> None:
    world = World.make(0)
    law = emitted_law(world, PLAIN, "sampled", 2, reported=World.make(9))
    assert error_of(law, world, PLAIN) > 0.02


def test_control_p_and_q_swapped_is_found_out() -> None:
    world = World.make(0)
    swapped = World([*world.drafter, world.target[G]], world.target[:G])
    # Drafts come from q as before; the rule is handed q for p and p for q.
    law = emitted_law(world, PLAIN, "sampled", 2, reported=swapped, shown=swapped)
    assert error_of(law, world, PLAIN) > 0.02


@pytest.mark.parametrize("proposal", ["sampled", "deterministic"])
def test_control_recovering_from_p_is_found_out(proposal: Proposal, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(p_BV: Tensor, draft: Draft, at_B: Tensor) -> Tensor:
        return p_BV

    monkeypatch.setattr(rejection, "_residual", whole)
    world = World.make(0)
    assert error_of(emitted_law(world, PLAIN, proposal, 2), world, PLAIN) > 0.02


def test_ragged_rows_in_one_call_equal_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 2, 1, 3, 0]
    num, width = len(lengths), 4
    tokens = torch.randint(0, V, (num, width), generator=generator)
    probs = torch.rand(num, width, V, generator=generator).softmax(-1)
    logits = torch.randn(sum(lengths) + num, V, generator=generator)
    accept, recover = torch.rand(num, width, dtype=torch.float64), torch.rand(num, dtype=torch.float64)
    for given in (probs, None):
        verdict = RejectionVerifier().accept(
            Draft(tokens, [width] * num, given),
            logits,
            lengths,
            PLAIN,
            FixedUniforms(accept, recover),
        )
        start = 0
        for i, length in enumerate(lengths):
            alone = RejectionVerifier().accept(
                Draft(tokens[i : i + 1], [width], None if given is None else given[i : i + 1]),
                logits[start : start + 1 + length],
                [length],
                PLAIN,
                FixedUniforms(accept[i : i + 1], recover[i : i + 1]),
            )
            kept = int(alone.num_accepted_B[0])
            assert kept <= length
            assert int(verdict.num_accepted_B[i]) == kept
            assert verdict.tokens_BT[i, : kept + 1].tolist() == alone.tokens_BT[0, : kept + 1].tolist()
            start += 1 + length


@pytest.mark.parametrize("proposal", ["sampled", "deterministic"])
def test_even_a_uniform_of_zero_accepts_nothing_impossible(proposal: Proposal) -> None:
    logits = torch.tensor([[0.0, -float("inf"), 0.0], [0.0, 0.0, 0.0]])
    probs = torch.tensor([[[0.2, 0.8, 0.0]]]) if proposal == "sampled" else None
    zeros = FixedUniforms(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    verdict = RejectionVerifier().accept(Draft(torch.tensor([[1]]), [1], probs), logits, [1], PLAIN, zeros)
    assert verdict.num_accepted_B.tolist() == [0]
    assert verdict.tokens_BT[0, 0] == 0


def test_no_drafts_at_all_is_a_plain_draw() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]).log()
    verdict = RejectionVerifier().accept(
        Draft(torch.zeros(2, 0, dtype=torch.int64), [0, 0]),
        logits,
        [0, 0],
        PLAIN,
        FixedUniforms(torch.zeros(2, 0, dtype=torch.float64), torch.tensor([0.1, 0.8], dtype=torch.float64)),
    )
    assert verdict.num_accepted_B.tolist() == [0, 0]
    assert verdict.tokens_BT.tolist() == [[0], [2]]


def test_the_arguments_are_left_alone() -> None:
    logits, probs = torch.randn(3, V), torch.rand(1, 2, V).softmax(-1)
    tokens = torch.tensor([[0, 1]])
    before = logits.clone(), probs.clone(), tokens.clone()
    uniforms = FixedUniforms(torch.full((1, 2), 0.99, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64))
    RejectionVerifier().accept(Draft(tokens, [2], probs), logits, [2], PLAIN, uniforms)
    assert all(torch.equal(a, b) for a, b in zip(before, (logits, probs, tokens), strict=True))


def test_proposal_types_are_checked() -> None:
    verifier: Verifier = RejectionVerifier()
    assert verifier.is_lossless
    for proposal in ("sampled", "deterministic"):
        verifier.check(PLAIN, proposal)
    with pytest.raises(ValueError, match=r"drafter.proposal=guessed: must be sampled or deterministic"):
        verifier.check(PLAIN, "guessed")

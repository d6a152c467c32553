"""Exact output laws: lossless compositions pass to rounding, faulty ones are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from dispark.audit.controls import (
    APPENDIX_A_COST,
    APPENDIX_A_RIGHT,
    APPENDIX_A_WRONG,
    AppendixAWorld,
    RetrospectiveScheduler,
    WithoutStopScheduler,
)
from dispark.audit.output_law import distance, output_law, target_law
from dispark.audit.world import RandomWorld
from dispark.interfaces import Scheduler
from dispark.schedulers.fixed import FixedScheduler
from dispark.schedulers.hardware_aware import HardwareAwareScheduler
from dispark.schedulers.hardware_aware_async import HardwareAwareAsyncScheduler
from dispark.schedulers.step_cost import StepCost
from dispark.schedulers.threshold import ThresholdScheduler
from dispark.types import Draft, Load, Outcome, Sampling, Verdict
from dispark.verifiers.greedy import GreedyVerifier
from dispark.verifiers.rejection import RejectionVerifier

JAGGED = StepCost((1, 2, 3, 4, 5, 6), (1.0, 1.3, 1.35, 2.0, 2.05, 2.6))
EXACT = 1e-12


class Remembering:
    """Verifies one more than the last round accepted: hangs on the past alone."""

    is_lossless = True

    def __init__(self) -> None:
        self._last = 1

    def bind(self, target: Any) -> None:
        self._last = 1

    def draft_limit(self, load: Load) -> int | None:
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        return [min(self._last, n) for n in draft.lengths]

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        self._last = 1 + max(outcome.num_accepted)


LOSSLESS: dict[str, Callable[[], Scheduler]] = {
    "fixed": FixedScheduler,
    "fixed_1": lambda: FixedScheduler(1),
    "threshold": lambda: ThresholdScheduler(0.5),
    "hardware_aware": lambda: HardwareAwareScheduler(cost=JAGGED),
    "hardware_aware_async": lambda: HardwareAwareAsyncScheduler(cost=JAGGED),
    "remembering": Remembering,
}
SAMPLINGS = [Sampling(1.0), Sampling(0.6, top_p=0.9), Sampling(2.0, top_k=2), Sampling(0.0)]


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("proposal", ["sampled", "deterministic"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}")
def test_lossless_schedulers_keep_the_targets_law(name: str, proposal: str, sampling: Sampling) -> None:
    world = RandomWorld(sampling=sampling, proposal=proposal, seed=3)  # type: ignore[arg-type]
    law = output_law(world, LOSSLESS[name], RejectionVerifier(), num_tokens=3)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    assert distance(law, target_law(world, 3)) < EXACT


@pytest.mark.parametrize("name", LOSSLESS)
def test_rows_stay_independent_under_a_shared_budget(name: str) -> None:
    world = RandomWorld(vocab_size=2, num_rows=2, seed=5, share_of_zeros=0.0)
    assert distance(output_law(world, LOSSLESS[name], RejectionVerifier(), 2), target_law(world, 2)) < EXACT


def test_the_greedy_verifier_at_temperature_0() -> None:
    world = RandomWorld(sampling=Sampling(0.0), seed=1)
    law = output_law(world, FixedScheduler, GreedyVerifier(), num_tokens=4)
    assert law == target_law(world, 4)
    assert len(law) == 1


def test_appendix_a() -> None:
    world = AppendixAWorld()
    stops = output_law(world, lambda: HardwareAwareScheduler(cost=APPENDIX_A_COST), RejectionVerifier(), 1)
    wrong = output_law(world, lambda: WithoutStopScheduler(cost=APPENDIX_A_COST), RejectionVerifier(), 1)
    for law, published in ((stops, APPENDIX_A_RIGHT), (wrong, APPENDIX_A_WRONG)):
        assert [law[((token,),)] for token in (0, 1)] == pytest.approx(list(published), abs=EXACT)
    # The whole curve is harmless once the budget comes from two steps before.
    delayed = output_law(world, lambda: HardwareAwareAsyncScheduler(cost=APPENDIX_A_COST), RejectionVerifier(), 4)
    assert distance(delayed, target_law(world, 4)) < EXACT


def test_a_scheduler_that_sorts_by_retrospective_survival_is_found() -> None:
    world = RandomWorld(vocab_size=2, num_rows=2, seed=2)
    assert distance(output_law(world, RetrospectiveScheduler, RejectionVerifier(), 2), target_law(world, 2)) > 1e-3


class Careless(RejectionVerifier):
    """Draws the token after a rejection from p, not from what is left of it."""

    def accept(self, draft, target_logits_NV, verify_lengths, sampling, generators) -> Verdict:  # type: ignore[no-untyped-def]
        fair = super().accept(draft, target_logits_NV, verify_lengths, sampling, generators)
        starts = torch.tensor([0, *[1 + n for n in verify_lengths]]).cumsum(0)[:-1]
        law_BV = target_logits_NV[starts + fair.num_accepted_B].softmax(-1)
        after_B = (generators.uniform("recover", 1) >= law_BV.cumsum(-1)).sum(-1).clamp(max=law_BV.shape[1] - 1)
        return Verdict(fair.tokens_BT.scatter(1, fair.num_accepted_B[:, None], after_B[:, None]), fair.num_accepted_B)


def test_a_faulty_verifier_is_found() -> None:
    world = RandomWorld(vocab_size=3, draft_length=1, seed=4, share_of_zeros=0.0)
    assert distance(output_law(world, FixedScheduler, RejectionVerifier(), 1), target_law(world, 1)) < EXACT
    assert distance(output_law(world, FixedScheduler, Careless(), 1), target_law(world, 1)) > 1e-2


def test_distance_counts_what_only_one_law_has() -> None:
    assert distance({((0,),): 1.0}, {((1,),): 1.0}) == 1.0
    assert distance({((0,),): 0.5, ((1,),): 0.5}, {((0,),): 0.25, ((1,),): 0.75}) == 0.25

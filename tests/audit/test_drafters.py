"""Real drafters in small worlds: exact where they are honest, found where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hydra import initialize_config_module

from baselines.self_speculation import SelfSpeculationDrafter
from dispark.audit.drafter_world import DrafterWorld
from dispark.audit.drafters import NUM_TOKENS, PROMPT, audit_drafters, small_target, world_of
from dispark.audit.output_law import distance, output_law, target_law
from dispark.schedulers.fixed import FixedScheduler
from dispark.schedulers.threshold import ThresholdScheduler
from dispark.types import Draft, Sampling
from dispark.verifiers.rejection import RejectionVerifier

SAMPLINGS = {"T=1": Sampling(1.0), "shaped": Sampling(0.7, top_k=2), "greedy": Sampling()}


@pytest.fixture(autouse=True)
def composing() -> Iterator[None]:
    with initialize_config_module("dispark.conf", version_base="1.3"):
        yield


@pytest.mark.parametrize("name", ["dispark_rnn", "eagle3", "medusa", "draft_model"])
def test_honest_drafters_are_exact(name: str) -> None:
    schedulers: dict[str, Any] = {"fixed": FixedScheduler, "threshold": lambda: ThresholdScheduler(0.5)}
    rows = audit_drafters([name], schedulers, {"rejection": RejectionVerifier()}, SAMPLINGS, 1e-12)
    assert [row["scheduler"] for row in rows] == ["fixed", "threshold"]
    assert all(row["is lossless"] and row["verifiers x samplings"] == 3 for row in rows)


def test_what_is_reported_is_what_is_drawn() -> None:
    world = world_of("dispark", small_target(), Sampling(0.8, top_p=0.9))
    assert world is not None
    for text in ((), (0,), (2,)):
        assert world.num_drafted(0, text) == 2
        for drafted in ((), *((int(t),) for t in np.flatnonzero(world.drawn_probs(0, text, ())))):
            np.testing.assert_allclose(
                world.draft_probs(0, text, drafted), world.drawn_probs(0, text, drafted), atol=1e-12
            )
            assert world.drawn_probs(0, text, drafted).sum() == pytest.approx(1.0, abs=1e-12)


class Liar(SelfSpeculationDrafter):
    """Draws from one law and reports another."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs_BGV is not None
        warmer = draft.probs_BGV.sqrt()
        return replace(draft, probs_BGV=warmer / warmer.sum(-1, keepdim=True))


def test_a_drafter_that_reports_another_law_is_found() -> None:
    world = DrafterWorld(small_target(), Liar(num_layers=1, draft_length=2), Sampling(1.0), PROMPT, NUM_TOKENS)
    law = output_law(world, FixedScheduler, RejectionVerifier(), NUM_TOKENS)
    assert sum(law.values()) == pytest.approx(1.0)
    assert distance(law, target_law(world, NUM_TOKENS)) > 1e-3


def test_a_drafter_that_serves_no_temperature_has_no_world_there() -> None:
    target = small_target()
    assert world_of("synthetic", target, Sampling(1.0)) is None
    assert world_of("synthetic", target, Sampling()) is not None

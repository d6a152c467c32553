"""The simulated loop against sums that can be done by hand, and thousands of requests at once."""

from __future__ import annotations

from typing import Any

import pytest

from dispark.schedulers.fixed import FixedScheduler
from dispark.schedulers.hardware_aware import HardwareAwareScheduler
from dispark.schedulers.step_cost import StepCost
from dispark.serving.acceptance import AssumedAcceptance
from dispark.serving.arrivals import Arrival, ClosedLoop, PoissonArrivals
from dispark.serving.blocks import BlockBudget
from dispark.serving.report import Passes, Sla, frames_of, summarise
from dispark.serving.simulate import Engine
from dispark.types import Request


class Linear:
    """A second for a step and a tenth for each token; drafting a tenth a token."""

    def prefill_s(self, num_tokens: int) -> float:
        return 0.5

    def draft_s(self, num_rows: int, length: int) -> float:
        return 0.1 * num_rows * length

    def verify_s(self, num_rows: int, num_tokens: int, context_tokens: int) -> float:
        return 1.0 + 0.1 * num_tokens

    def step_cost(self, num_rows: int) -> StepCost:
        return StepCost((1, 1001), (1.1, 101.1))


class Always:
    """So many drafts are accepted every time."""

    def __init__(self, draft_length: int, accepted: int) -> None:
        self.draft_length, self.accepted = draft_length, accepted

    def rounds(self, request_id: str, seed: int) -> Any:
        return self

    def next(self) -> Any:
        import numpy as np

        return np.full(self.draft_length, 0.5), self.accepted


def requests(num: int, cap: int = 7, num_prompt: int = 4) -> list[Request]:
    return [Request(f"r{i}", f"p{i % 5}", 0, "t", "c", (1,) * num_prompt, cap, i) for i in range(num)]


def simulate(
    engine: Engine, asked: list[Request], arrivals: list[Arrival], users: int | None, blocks: int | None = None
) -> dict[str, Any]:
    source, trace = engine.run(asked, arrivals, users, BlockBudget(blocks, 4), 1000)
    assert all(len(record.output_ids) == record.request.max_new_tokens for record in trace.records)
    return summarise(Passes(*frames_of(source, trace, 0), users, 4, 20, 4), Sla()) | {"trace": trace}


def test_one_request_by_hand() -> None:
    engine = Engine(Always(3, 2), FixedScheduler(), Linear(), 1, 100)
    found = simulate(engine, requests(1), ClosedLoop(1).plan(1, 0), 1)
    # A prefill gives the first token; then two rounds of 0.3 + 1.4 s with three tokens each.
    assert found["ttft_s_p50"] == pytest.approx(0.5)
    assert found["latency_s_p50"] == pytest.approx(0.5 + 2 * 1.7)
    assert found["matl"] == 3.0
    assert found["itl_s_p50"] == pytest.approx(1.7)
    assert found["throughput_tokens_per_s"] == pytest.approx(6 / 3.4)
    assert found["verify_budget"] == 3.0
    assert found["wasted_verify_share"] == pytest.approx(1 / 3)


def test_no_drafter_takes_a_round_a_token() -> None:
    found = simulate(Engine(None, FixedScheduler(), Linear(), 4, 400), requests(8), ClosedLoop(4).plan(8, 0), 4)
    assert found["matl"] == 1.0
    assert found["mean_draft_length"] == 0.0
    assert found["num_served"] == 8
    assert found["mean_rows"] == pytest.approx(4.0)


def test_a_budget_holds_requests_back() -> None:
    # 4 + 7 tokens and one spare are three blocks of four.
    def run(blocks: int | None) -> dict[str, Any]:
        return simulate(Engine(None, FixedScheduler(), Linear(), 8, 999), requests(8), [Arrival(0.0)] * 8, None, blocks)

    free, tight = run(None), run(6)
    assert free["mean_rows"] == pytest.approx(8.0)
    assert tight["mean_rows"] == pytest.approx(2.0)
    assert tight["queue_s_p95"] > free["queue_s_p95"] == 0.0
    assert tight["makespan_s"] > free["makespan_s"]


def test_open_arrivals_leave_gaps() -> None:
    plan = PoissonArrivals(0.01).plan(5, seed=3)
    found = simulate(Engine(None, FixedScheduler(), Linear(), 8, 999), requests(5), plan, None)
    assert found["makespan_s"] > plan[-1].at_s
    assert found["queue_s_p99"] == 0.0


def test_the_hardware_aware_scheduler_verifies_less_the_more_there_are() -> None:
    budgets = []
    for users in (1, 8, 64):
        scheduler = HardwareAwareScheduler(cost=Linear().step_cost)
        engine = Engine(AssumedAcceptance([0.8, 0.7, 0.6, 0.5]), scheduler, Linear(), users, 10**6)
        found = simulate(engine, requests(4 * users, cap=40), ClosedLoop(users).plan(4 * users, 0), users)
        budgets.append(found["verify_budget"])
    assert budgets[0] > budgets[1] > budgets[2]


def test_thousands_at_once() -> None:
    engine = Engine(AssumedAcceptance([0.8, 0.7]), FixedScheduler(), Linear(), 2000, 10**7)
    found = simulate(engine, requests(4000, cap=32), ClosedLoop(2000).plan(4000, 0), 2000)
    assert found["num_served"] == 4000

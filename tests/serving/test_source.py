"""Admission by the clock, the users and the budget, on a clock that moves by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispark.serving.arrivals import Arrival
from dispark.serving.blocks import BlockBudget
from dispark.serving.source import ServingSource
from dispark.types import Request, RequestRecord


class Clock:
    def __init__(self) -> None:
        self.now = 50.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def request(name: str, num_prompt: int = 4, cap: int = 8) -> Request:
    return Request(name, name, 0, "task", "category", tuple(range(num_prompt)), cap, 0)


def source_of(
    requests: Sequence[Request], times: Sequence[float] | None = None, blocks: int | None = None, **more: Any
) -> tuple[ServingSource, Clock]:
    clock = Clock()
    arrivals = [Arrival(at) for at in (times or [0.0] * len(requests))]
    settings: dict[str, Any] = {"max_in_flight": None, "spare_tokens": 4, "max_context": 100} | more
    budget = BlockBudget(blocks, 8)
    return ServingSource(requests, arrivals, budget, clock=clock, sleep=clock.sleep, **settings), clock


def end(source: ServingSource, name: str) -> None:
    source.finish(RequestRecord(source.visits[name].request, [1, 2]))


def taken(source: ServingSource) -> str | None:
    found = source.next()
    return None if found is None else found.request_id


def test_requests_come_when_it_is_time_and_sleep_bridges_the_gaps() -> None:
    source, clock = source_of([request("a"), request("b"), request("c")], [1.0, 1.5, 9.0])
    assert source.num_waiting == 0
    assert taken(source) == "a"
    assert clock.slept == [1.0]
    assert taken(source) is None  # b is not there yet, and a is being decoded
    clock.now += 1.0
    assert source.num_waiting == 1
    assert taken(source) == "b"
    end(source, "a")
    end(source, "b")
    assert taken(source) == "c"
    assert clock.slept == [1.0, 7.0]
    end(source, "c")
    assert taken(source) is None
    visit = source.visits["b"]
    assert (visit.arrived_s, visit.admitted_s) == (51.5, 52.0)


def test_time_begins_with_the_first_look() -> None:
    source, clock = source_of([request("a")], [1.0])
    clock.now += 30.0  # a drafter was made ready
    assert taken(source) == "a"
    assert clock.slept == [1.0]
    assert source.start_s == 80.0


def test_a_closed_loop_has_so_many_in_it() -> None:
    source, clock = source_of([request(name) for name in "abc"], max_in_flight=2)
    assert [taken(source), taken(source), taken(source)] == ["a", "b", None]
    clock.now = 60.0
    end(source, "b")
    assert taken(source) == "c"
    assert source.visits["c"].arrived_s == 60.0  # the user asks the moment the answer is there


def test_the_first_in_the_queue_waits_for_blocks_and_nobody_overtakes() -> None:
    # 4 + 8 + 4 tokens are two blocks of 8.
    source, _ = source_of([request("a"), request("b", cap=24), request("c")], blocks=4)
    assert taken(source) == "a"
    assert taken(source) is None  # b needs four blocks, two are free; c would fit
    assert source.num_waiting == 2
    end(source, "a")
    assert taken(source) == "b"
    end(source, "b")
    assert taken(source) == "c"


def test_what_can_never_be_served_fails_alone() -> None:
    requests = [request("huge", cap=90), request("long", num_prompt=100), request("empty", 0), request("fine")]
    source, _ = source_of(requests, blocks=4)
    assert taken(source) == "fine"
    errors = {name: visit.error for name, visit in source.visits.items()}
    assert errors["huge"] == "needs room for 98 tokens, more than all blocks of the budget"
    assert errors["long"] == "the prompt's 100 tokens leave no room for an answer in a context of 100"
    assert errors["empty"] == "the prompt has no tokens"
    assert errors["fine"] is None


def test_users_who_leave() -> None:
    source, _ = source_of([request("a"), request("b")], cancel_after={"a": 3})
    taken(source)
    record = RequestRecord(source.visits["a"].request, [1, 2])
    assert not source.is_cancelled(record)
    record.output_ids.append(3)
    assert source.is_cancelled(record)
    taken(source)
    assert not source.is_cancelled(RequestRecord(source.visits["b"].request, [1] * 8))


def test_an_arrival_may_bring_its_own_cap() -> None:
    clock = Clock()
    source = ServingSource(
        [request("a")], [Arrival(0.0, 3)], BlockBudget(None, 8), None, 1, 100, {}, clock, clock.sleep
    )
    found = source.next()
    assert found is not None
    assert found.max_new_tokens == 3

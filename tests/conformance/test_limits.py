"""Every drafter YAML keeps to a scheduler's limit, and loses no row's place where a round drafts less or nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from conformance.toolbox import (
    DRAFTERS,
    LOOPING,
    ListSource,
    make_drafter,
    make_loop,
    make_requests,
    open_tiny,
    outputs_of,
    varied_prompts,
)

from baselines.autoregressive import AutoregressiveDrafter
from dispark.decoding.rows import Trace
from dispark.types import Draft, Load, Outcome, Request

Place = tuple[str, int]  # a request, and how many tokens it has


class Moody:
    """A scheduler that lets a round draft as much as it feels like, and writes down what came."""

    is_lossless = True

    def __init__(self, is_moody: bool) -> None:
        self.random = random.Random(3) if is_moody else None
        self.limits: list[int | None] = []
        self.drafts: list[list[list[int]]] = []

    def bind(self, target: Any) -> None: ...

    def draft_limit(self, load: Load) -> int | None:
        self.limits.append(None if self.random is None else self.random.choice([None, 0, 0, 1, 2, 3]))
        return self.limits[-1]

    def choose(self, draft: Draft, load: Load) -> list[int]:
        self.drafts.append([row[:n] for row, n in zip(draft.tokens_BG.tolist(), draft.lengths, strict=True)])
        return list(draft.lengths)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None: ...


def drafts_by_place(trace: Trace, scheduler: Moody) -> dict[Place, list[int]]:
    found: dict[Place, list[int]] = {}
    num: dict[str, int] = {}
    flat = [draft for step in scheduler.drafts for draft in step]
    for line, draft in zip(trace.rounds, flat, strict=True):
        name = line["request_id"]
        found[name, num.get(name, 1)] = draft
        num[name] = num.get(name, 1) + line["num_emitted"]
    return found


def decode(name: str, requests: Sequence[Request], is_moody: bool) -> tuple[Trace, Moody]:
    target = open_tiny("tiny", LOOPING)
    drafter = AutoregressiveDrafter() if name == "none" else make_drafter(name, "tiny", LOOPING)
    scheduler = Moody(is_moody)
    loop = make_loop(target, drafter, scheduler=scheduler)
    loop.reads_drafts = True
    return loop.run(ListSource(requests)), scheduler


@pytest.mark.parametrize("name", DRAFTERS)
def test_limits_change_how_much_is_drafted_and_nothing_else(name: str) -> None:
    requests = make_requests(varied_prompts(7), 24)
    whole, free = decode(name, requests, is_moody=False)
    limited, moody = decode(name, requests, is_moody=True)
    assert outputs_of(limited) == outputs_of(whole)
    for limit, drafts in zip(moody.limits, moody.drafts, strict=True):
        assert limit is None or all(len(draft) <= limit for draft in drafts)
    if name == "none":
        return
    drafted = [len(draft) for step in moody.drafts for draft in step]
    assert 0 in drafted
    assert len(set(drafted)) >= 2
    if name == "draft_target":  # shows that the model's own cache is where it should be
        assert all(line["num_accepted_raw"] == line["num_verified"] for line in limited.rounds)
    if name == "synthetic":  # draws anew by the round's number, so its drafts depend on how many there were
        return
    before, after = drafts_by_place(whole, free), drafts_by_place(limited, moody)
    common = [place for place in after if place in before and after[place]]
    assert len(common) >= 5
    for place in common:
        num = min(len(before[place]), len(after[place]))
        assert after[place][:num] == before[place][:num], place

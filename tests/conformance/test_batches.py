"""A request's tokens depend on the request alone: not on the batch size, the order, or who had its row before."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from conformance.toolbox import (
    DRAFTERS,
    GREEDY_ONLY,
    LOOPING,
    decode_all,
    make_drafter,
    make_requests,
    open_tiny,
    outputs_of,
    varied_prompts,
)

from dispark.decoding.target import TargetModel
from dispark.types import Request, Sampling

SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(0.8, top_k=50, top_p=0.95)}
CASES = [(name, how) for name in DRAFTERS for how in SAMPLINGS if how == "greedy" or name not in GREEDY_ONLY]


@cache
def shared(name: str = "tiny") -> TargetModel:
    return open_tiny(name, LOOPING)


def mixed_requests(num: int, seed: int = 0) -> list[Request]:
    """Requests of different lengths, so that rows come free at different times; seeds beyond 32 bits."""
    rng = random.Random(seed)
    requests = make_requests(varied_prompts(num, seed), 1)
    return [replace(r, max_new_tokens=rng.choice([1, 3, 7, 14]), seed=rng.randrange(2**63)) for r in requests]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_batch_size_and_order_do_not_matter(name: str, how: str) -> None:
    requests = mixed_requests(8)
    drafter = make_drafter(name, "tiny", LOOPING)
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= outputs_of(decode_all(shared(), drafter, [request], SAMPLINGS[how], batch_size=1))
    shuffled = list(requests)
    random.Random(1).shuffle(shuffled)
    for batch_size, order in ((1, shuffled), (3, requests), (8, shuffled), (20, requests)):
        found = decode_all(shared(), drafter, order, SAMPLINGS[how], batch_size=batch_size)
        assert outputs_of(found) == alone, f"batch size {batch_size}"
        assert max(step["num_rows"] for step in found.steps) <= batch_size


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
@pytest.mark.parametrize("target", ["tiny_qwen3", "tiny_gemma3"])
def test_other_architectures(target: str, name: str) -> None:
    requests = mixed_requests(7, seed=4)
    drafter = make_drafter(name, target, LOOPING)
    for sampling in SAMPLINGS.values():
        alone: dict[str, list[int]] = {}
        for request in requests:
            alone |= outputs_of(decode_all(shared(target), drafter, [request], sampling, batch_size=1))
        assert outputs_of(decode_all(shared(target), drafter, requests, sampling, batch_size=3)) == alone


def test_rows_are_filled_as_soon_as_they_are_free() -> None:
    requests = [replace(r, max_new_tokens=2 + 4 * (i % 2)) for i, r in enumerate(make_requests(varied_prompts(8), 1))]
    trace = decode_all(shared(), make_drafter("none"), requests, batch_size=2)
    rounds = [step for step in trace.steps if step["kind"] == "round"]
    # 4 x 1 and 4 x 5 rounds of single rows: two rows that never wait do them in about half as many steps.
    assert sum(step["num_rows"] for step in rounds) == sum(record.num_rounds for record in trace.records)
    assert {step["num_rows"] for step in rounds[:-5]} == {2}


def test_the_seed_matters_and_only_the_seed() -> None:
    request = mixed_requests(1)[0]
    request = replace(request, max_new_tokens=12)
    drafter = make_drafter("draft_model", "tiny", LOOPING)
    texts = []
    for seed in (1, 1, 2, 1 + 2**32):
        trace = decode_all(shared(), drafter, [replace(request, seed=seed)], Sampling(1.0))
        texts.append(trace.records[0].output_ids)
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts}) == 3
    renamed = replace(request, seed=1, request_id="another#0")
    assert decode_all(shared(), drafter, [renamed], Sampling(1.0)).records[0].output_ids == texts[0]

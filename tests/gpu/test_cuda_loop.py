"""The loop on a CUDA device: the CPU's tokens, whatever the batch and the padding, with one wait a round.

Everything here skips itself where there is no CUDA device. The model is random and tiny; float32 with TF32 off, so that
texts have to be equal token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.autoregressive import AutoregressiveDrafter
from baselines.draft_model import DraftModelDrafter
from baselines.ngram import NgramDrafter
from dispark.decoding.loop import DecodingLoop
from dispark.decoding.rows import Trace
from dispark.decoding.target import TargetModel
from dispark.schedulers.fixed import FixedScheduler
from dispark.targets.model import wrap
from dispark.targets.random_weights import RandomWeights
from dispark.targets.spec import TargetSpec, load
from dispark.types import Request, RequestRecord, Sampling
from dispark.verifiers.rejection import RejectionVerifier

REPO = Path(__file__).resolve().parents[2]
DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    # narrow enough that the text repeats itself now and then, so that prompt lookup hits and misses
    "initializer_range": 0.12,
}
DRAFTERS = {"none": AutoregressiveDrafter, "ngram": NgramDrafter, "draft_target": lambda: DraftModelDrafter(4)}
LENGTHS = (1, 7, 19, 40, 3)


class Source:
    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting = list(requests)

    def next(self) -> Request | None:
        return self._waiting.pop(0) if self._waiting else None

    def finish(self, record: RequestRecord) -> None:
        """Nothing follows."""

    def is_cancelled(self, record: RequestRecord) -> bool:
        """Never."""
        return False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)


@pytest.fixture(autouse=True)
def _exact_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def open_target(device: str, **options: Any) -> TargetModel:
    spec = TargetSpec("tiny", "random", {"random": RandomWeights("llama", SHAPE)}, "float32", device)
    return wrap(load(spec), **options)


def make_requests(max_new_tokens: int = 24) -> list[Request]:
    """Ragged prompts, some of which repeat themselves."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (num,), generator=generator).tolist() for num in LENGTHS]
    prompts[2] = prompts[2] + prompts[2][:10]
    return [Request(f"p{i}#0", f"p{i}", 0, "t", "c", tuple(p), max_new_tokens, i) for i, p in enumerate(prompts)]


def run(target: TargetModel, drafter: str, batch_size: int, sampling: Sampling, max_new_tokens: int = 24) -> Trace:
    loop = DecodingLoop(
        target,
        DRAFTERS[drafter](),
        FixedScheduler(),
        RejectionVerifier(),
        sampling,
        decode=lambda ids: " ".join(map(str, ids)),
        batch_size=batch_size,
        num_slots=128,
    )
    return loop.run(Source(make_requests(max_new_tokens)))


def texts(trace: Trace) -> dict[str, list[int]]:
    return {record.request.request_id: record.output_ids for record in trace.records}


GREEDY, WARM = Sampling(), Sampling(0.8, 20)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_float32_equals_the_cpu(drafter, batch_size):
    expected = texts(run(open_target("cpu"), "none", 1, GREEDY))
    trace = run(open_target(DEVICE), drafter, batch_size, GREEDY)
    assert texts(trace) == expected
    assert len({tuple(text) for text in expected.values()}) == len(LENGTHS)
    if drafter != "none":
        assert any(row["num_accepted"] > 0 for row in trace.rounds)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_do_not_depend_on_the_batch(drafter, sampling):
    target = open_target(DEVICE)
    alone = texts(run(target, drafter, 1, sampling))
    assert texts(run(target, drafter, 3, sampling)) == alone
    assert texts(run(target, drafter, len(LENGTHS), sampling)) == alone


@pytest.mark.parametrize("buckets", [{"token_bucket": 8}, {"slot_bucket": 32}, {"token_bucket": 16, "slot_bucket": 64}])
def test_padded_shapes_change_nothing(buckets):
    expected = texts(run(open_target(DEVICE), "ngram", 4, GREEDY))
    assert texts(run(open_target(DEVICE, **buckets), "ngram", 4, GREEDY)) == expected


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_one_wait_a_round(drafter, monkeypatch):
    """Prefill waits too; it drops out of the difference between a long and a short pass."""
    monkeypatch.syspath_prepend(str(REPO / "experiments"))
    from gpu_check.syncs import Count, SyncCounter, per_round

    target = open_target(DEVICE)
    target.stop_ids = frozenset()  # texts run to their cap, so that both passes prefill alike
    run(target, drafter, 5, GREEDY)
    counts = []
    for max_new_tokens in (6, 24):
        with SyncCounter() as counter:
            trace = run(target, drafter, 5, GREEDY, max_new_tokens)
        num_rounds = sum(step["kind"] == "round" for step in trace.steps)
        counts.append(Count(num_rounds, counter.implicit, counter.explicit))
    found = per_round(*counts)
    assert found["syncs_per_round"] == 1.0, found["places"]


def test_the_sync_counter_sees_a_wait(monkeypatch):
    """The check above could not fail if torch's debug mode said nothing."""
    monkeypatch.syspath_prepend(str(REPO / "experiments"))
    from gpu_check.syncs import SyncCounter

    value, before = torch.ones(1, device=DEVICE), torch.cuda.synchronize
    with SyncCounter() as counter:
        value.item()
        torch.cuda.synchronize()
    assert sum(counter.implicit.values()) == 1
    assert sum(counter.explicit.values()) == 1
    assert Path(__file__).name in next(iter(counter.implicit))
    assert torch.cuda.synchronize is before
    assert torch.cuda.get_sync_debug_mode() == 0

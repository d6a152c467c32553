"""What tests of the loop and its parts share: tiny targets, requests, a source, and a run with its books checked.

Everything runs on the CPU, in float32 unless asked otherwise, on models with random weights; nothing is downloaded.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, ListConfig, OmegaConf

from dispark.config import build
from dispark.decoding.loop import DecodingLoop
from dispark.decoding.rows import Trace
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter, Scheduler, Verifier
from dispark.schedulers.fixed import FixedScheduler
from dispark.targets.model import wrap
from dispark.targets.random_weights import RandomWeights
from dispark.targets.spec import LoadedTarget, load
from dispark.types import Request, RequestRecord, Sampling
from dispark.verifiers.rejection import RejectionVerifier

REPO = Path(__file__).resolve().parents[2]
DRAFTERS = sorted(path.stem for path in (REPO / "conf" / "drafter").glob("*.yaml"))
GREEDY_ONLY = frozenset({"synthetic"})
"""Drafters that refuse a temperature above 0; a test holds them to it."""

GREEDY = Sampling()
# Narrower weights than the YAML's make the text fall into loops now and then, so that prompt lookup hits and misses.
LOOPING = "target.sources.random.config.initializer_range=0.12"


@dataclass(frozen=True)
class NoisyWeights(RandomWeights):
    """The weights of another random model with noise on top: a draft model that agrees with it some of the time."""

    noise: float = 0.0

    def build(self, name: str, dtype: torch.dtype) -> tuple[Any, str]:
        model, digest = super().build(name, dtype)
        generator = torch.Generator().manual_seed(self.seed + 1)
        for parameter in model.parameters():
            spread = self.noise * parameter.float().std(correction=0)
            parameter.data += (torch.randn(parameter.shape, generator=generator) * spread).to(dtype)
        return model, digest


@cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_module("dispark.conf", version_base="1.3"):
        return compose("bench", overrides=["target.device=cpu", *overrides])


def compose_bench(*overrides: str) -> DictConfig:
    """The config of `dispark bench` under these overrides, on the CPU; the caller may change it."""
    return copy.deepcopy(_composed(overrides))


def load_tiny(name: str = "tiny", *overrides: str) -> LoadedTarget:
    """A random target by the name of its YAML."""
    return load(build(compose_bench(f"target={name}", *overrides).target))


def open_tiny(
    name: str = "tiny", *overrides: str, stop_ids: Sequence[int] | None = None, **options: Any
) -> TargetModel:
    """The same behind packed calls; `stop_ids` replaces the model's own."""
    loaded = load_tiny(name, *overrides)
    return wrap(loaded if stop_ids is None else replace(loaded, stop_ids=tuple(stop_ids)), **options)


def make_drafter(name: str, target: str = "tiny", *overrides: str, noise: float = 0.05, **settings: Any) -> Drafter:
    """The drafter of a YAML; whatever model it would load becomes a noisy copy of the target.

    Args:
        name: of a YAML in conf/drafter.
        target: of a YAML in conf/target; its weights, under `overrides`, are what the noise is put on.
        overrides: for the target.
        noise: in standard deviations of each weight.
        **settings: of the drafter, over those of the YAML.
    """
    cfg = compose_bench(f"target={target}", f"drafter={name}", *overrides)
    weights = OmegaConf.to_container(cfg.target.sources.random, resolve=True)
    assert isinstance(weights, dict)
    weights |= {"_target_": f"{__name__}.NoisyWeights", "noise": noise}
    spec = {
        "_target_": "dispark.targets.spec.TargetSpec",
        "name": "noisy",
        "source": "random",
        "sources": {"random": weights},
        "device": "cpu",
        "dtype": cfg.target.dtype,
        "max_context": cfg.target.max_context,
    }
    OmegaConf.set_struct(cfg.drafter, False)
    node = _swap_specs(cfg.drafter, spec)
    for key, value in settings.items():
        node[key] = value
    drafter: Drafter = build(node)
    return drafter


def _swap_specs(node: Any, spec: dict[str, Any]) -> Any:
    """`node` with every target spec in it replaced."""
    if isinstance(node, DictConfig):
        for key in list(node):
            node[key] = _swap_specs(node[key], spec)
        return OmegaConf.create(spec) if node.get("_target_") == spec["_target_"] else node
    if isinstance(node, ListConfig):
        for index in range(len(node)):
            node[index] = _swap_specs(node[index], spec)
    return node


def make_request(prompt_ids: Sequence[int], num: int = 0, max_new_tokens: int = 16, **fields: Any) -> Request:
    """A request numbered `num`, which is its seed too unless given."""
    request = Request(
        request_id=f"p{num}#0",
        prompt_id=f"p{num}",
        turn=0,
        task="task",
        category="category",
        prompt_ids=tuple(prompt_ids),
        max_new_tokens=max_new_tokens,
        seed=num,
    )
    return replace(request, **fields)


def make_requests(prompts: Iterable[Sequence[int]], max_new_tokens: int = 16, **fields: Any) -> list[Request]:
    return [make_request(prompt, num, max_new_tokens, **fields) for num, prompt in enumerate(prompts)]


def varied_prompts(num: int, seed: int = 0, vocab_size: int = 256) -> list[list[int]]:
    """Prompts of 1 to 40 tokens: noise, repeats with a period, and texts that come twice."""
    rng = random.Random(seed)
    prompts = []
    for i in range(num):
        noise = [rng.randrange(vocab_size) for _ in range(rng.choice([1, 2, 5, 17, 40]))]
        kind = i % 3
        prompts.append(noise if kind == 0 else noise[:5] * rng.randint(2, 6) if kind == 1 else noise + noise[:-1])
    return [prompt or [rng.randrange(vocab_size)] for prompt in prompts]


class ListSource:
    """Hands out requests in order and keeps what comes back; `follow_up` may answer a record with one more."""

    def __init__(
        self, requests: Iterable[Request], follow_up: Callable[[RequestRecord], Request | None] | None = None
    ) -> None:
        self.waiting = list(requests)
        self.finished: list[RequestRecord] = []
        self._follow_up = follow_up

    def next(self) -> Request | None:
        return self.waiting.pop(0) if self.waiting else None

    def finish(self, record: RequestRecord) -> None:
        self.finished.append(record)
        if self._follow_up is not None and (more := self._follow_up(record)) is not None:
            self.waiting.append(more)

    def is_cancelled(self, record: RequestRecord) -> bool:
        """Never."""
        return False

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)


def letters(ids: Sequence[int]) -> str:
    """One letter a token, so that stop strings occur in any text."""
    return "".join(chr(ord("a") + token % 26) for token in ids)


def make_loop(
    target: TargetModel,
    drafter: Drafter,
    sampling: Sampling = GREEDY,
    *,
    batch_size: int = 4,
    num_slots: int = 160,
    scheduler: Scheduler | None = None,
    verifier: Verifier | None = None,
    max_context: int | None = None,
    decode: Callable[[Sequence[int]], str] = letters,
) -> DecodingLoop:
    return DecodingLoop(
        target,
        drafter,
        scheduler or FixedScheduler(),
        verifier or RejectionVerifier(),
        sampling,
        decode=decode,
        batch_size=batch_size,
        num_slots=num_slots,
        max_context=max_context,
    )


def decode_all(
    target: TargetModel, drafter: Drafter, requests: Sequence[Request], sampling: Sampling = GREEDY, **options: Any
) -> Trace:
    """One run of the loop over `requests`, its books checked; options as for `make_loop`."""
    trace = make_loop(target, drafter, sampling, **options).run(ListSource(requests))
    check_books(trace, requests, drafter.draft_length)
    return trace


def records_of(trace: Trace) -> dict[str, RequestRecord]:
    return {record.request.request_id: record for record in trace.records}


def outputs_of(trace: Trace) -> dict[str, list[int]]:
    return {record.request.request_id: record.output_ids for record in trace.records}


def check_books(trace: Trace, requests: Sequence[Request], draft_length: int) -> None:
    """The counters of a run agree with each other and with the texts."""
    records = records_of(trace)
    assert sorted(records) == sorted(request.request_id for request in requests)
    assert len(trace.records) == len(records)
    rounds_of: dict[str, list[dict[str, Any]]] = {name: [] for name in records}
    members_of: dict[int, list[dict[str, Any]]] = {}
    for r in trace.rounds:
        rounds_of[r["request_id"]].append(r)
        members_of.setdefault(r["step"], []).append(r)
    for request in requests:
        record, rounds = records[request.request_id], rounds_of[request.request_id]
        assert [r["round"] for r in rounds] == list(range(len(rounds)))
        assert record.num_rounds == len(rounds)
        assert 1 <= len(record.output_ids) <= request.max_new_tokens
        # The first token comes from the prefill and belongs to no round.
        assert 1 + sum(r["num_emitted"] for r in rounds) == len(record.output_ids)
        for r in rounds:
            assert 0 <= r["num_accepted"] <= r["num_accepted_raw"] <= r["num_verified"] <= r["num_drafted"]
            assert r["num_drafted"] <= draft_length
            assert 1 <= r["num_emitted"] <= r["num_accepted"] + 1
            if r["end"] is None:
                assert r["num_emitted"] == r["num_accepted"] + 1 == r["num_accepted_raw"] + 1
            assert not r["is_truncated"] or r["end"] in ("length", "context")
        assert all(r["end"] is None for r in rounds[:-1])
        if rounds:
            assert rounds[-1]["end"] == record.finish_reason
    steps = [step for step in trace.steps if step["kind"] == "round"]
    assert sorted(members_of) == [step["step"] for step in steps]
    for step in steps:
        members = members_of[step["step"]]
        assert len(members) == step["num_rows"] == members[0]["num_rows"]
        assert step["num_tokens"] == sum(1 + r["num_verified"] for r in members)

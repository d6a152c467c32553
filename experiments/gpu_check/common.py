"""What the sections share: the target and what is to be said about it, requests, one pass of the loop, the time budget.

Targets are read from their YAMLs without Hydra, because a bare GPU machine may not have it: a target's YAML is plain.
The default target is taken from the cache if it is there and sound; it is never downloaded. Otherwise a model of the
same architecture and size gets random weights, and every text and acceptance measured with it means nothing.

It does not know what the sections measure.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from baselines.autoregressive import AutoregressiveDrafter
from baselines.draft_model import DraftModelDrafter
from baselines.ngram import NgramDrafter
from dispark.decoding.loop import DecodingLoop
from dispark.decoding.rows import Trace
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.schedulers.fixed import FixedScheduler
from dispark.targets import cache
from dispark.targets.model import wrap
from dispark.targets.random_weights import RandomWeights
from dispark.targets.sources import Hub, WheelGguf, entry_name
from dispark.targets.spec import LoadedTarget, TargetSpec, load
from dispark.targets.tokenizer import Tokenizer
from dispark.tasks.suite import SHIPPED, PackagedSuite
from dispark.types import Request, RequestRecord, Sampling
from dispark.verifiers.rejection import RejectionVerifier

TARGET_YAMLS = Path(__file__).resolve().parents[2] / "conf" / "target"
GREEDY = Sampling()
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": AutoregressiveDrafter,
    "ngram": NgramDrafter,
    "draft_target": lambda: DraftModelDrafter(4),
}
# SmolLM2-135M's shape. The weights are spread wide enough that the text follows its context; a tied model with the
# stock spread repeats one token, and no comparison of texts could fail.
SMOLLM2_SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}


@dataclass(frozen=True)
class Subject:
    """A target that can be opened on any device in any dtype.

    Args:
        spec: what to load.
        weights: "pretrained" or "random".
        note: what a reader of any figure has to know, or None.
    """

    spec: TargetSpec
    weights: str
    note: str | None = None

    def load(self, device: torch.device, dtype: str = "float32") -> LoadedTarget:
        return load(replace(self.spec, device=str(device), dtype=dtype))

    def open(self, device: torch.device, dtype: str = "float32", **options: Any) -> TargetModel:
        """The target behind packed calls; options as for TargetModel."""
        return wrap(self.load(device, dtype), **options)


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the defaults are for a data-centre GPU, QUICK for a try on anything."""

    num_requests: int = 8
    new_tokens: int = 32
    speed_requests: int = 4
    speed_tokens: int = 64
    batch_rows: tuple[int, ...] = (1, 16, 64, 128)
    batch_tokens: int = 48
    repeats: int = 2
    call_repeats: int = 30
    energy_s: float = 10.0
    idle_s: float = 10.0


QUICK = Sizes(3, 8, 2, 8, (1, 4), 8, 1, 3, 0.3, 0.1)


class Budget:
    """Seconds that are left for the whole script.

    Args:
        total_s: seconds from now.
        clock: seconds, monotonic; replaced in tests.
    """

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end_s = clock, clock() + total_s

    @property
    def left_s(self) -> float:
        return self._end_s - self._clock()

    def refuse(self, need_s: float) -> str | None:
        """Why something that takes about `need_s` seconds should not be started, or None."""
        if self.left_s >= need_s:
            return None
        return f"needs about {need_s:.0f} s, and {max(0.0, self.left_s):.0f} s of the budget are left"


class ListSource:
    """Hands out requests in order."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._waiting = list(requests)[::-1]

    def next(self) -> Request | None:
        return self._waiting.pop() if self._waiting else None

    def finish(self, record: RequestRecord) -> None:
        """Nothing follows."""

    def is_cancelled(self, record: RequestRecord) -> bool:
        """Never."""
        return False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)


def build(node: Any) -> Any:
    """Builds a plain config node by its `_target_`, inner nodes first; keys from `defaults` keep the class's values."""
    if isinstance(node, list):
        return [build(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    values = {key: build(value) for key, value in node.items() if key not in ("_target_", "defaults")}
    if "_target_" not in node:
        return values
    module, _, name = str(node["_target_"]).rpartition(".")
    return getattr(importlib.import_module(module), name)(**values)


def read_spec(name: str) -> TargetSpec:
    """The spec of conf/target/<name>.yaml.

    Raises:
        ValueError: there is no such target, or its YAML is refused.
    """
    path = TARGET_YAMLS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in TARGET_YAMLS.glob("*.yaml")))
        raise ValueError(f"--target={name}: no such target; allowed: {known}")
    spec: TargetSpec = build(importlib.import_module("yaml").safe_load(path.read_text(encoding="utf-8")))
    return spec


def find_subject(name: str) -> Subject:
    """The target as it is on this machine, without any download.

    Raises:
        ValueError: the target is not cached and no stand-in of its size is known.
    """
    spec = read_spec(name)
    source = spec.sources[spec.source]
    if isinstance(source, RandomWeights):
        return Subject(spec, "random", f"{name} has random weights: its texts and acceptance mean nothing")
    if isinstance(source, WheelGguf | Hub):
        entry = entry_name(source)
        if not cache.entry_folder(entry).exists():
            reason = "is not in the cache"
        elif wrong := cache.problems(entry, is_full=False):
            reason = f"is damaged in the cache ({wrong[0]})"
        else:
            return Subject(spec, "pretrained")
        if name != "smollm2_135m":
            raise ValueError(f"--target={name}: {reason}, and only smollm2_135m has a stand-in; fetch it first")
        note = (
            f"{name} {reason}: RANDOM WEIGHTS of the same architecture and size stand in for it. Times and energy are "
            "those of such a model; its texts, acceptance and MATL mean nothing, and prompt lookup hardly ever hits"
        )
        stand_in = RandomWeights("llama", SMOLLM2_SHAPE)
        return Subject(TargetSpec(f"{name}_random", "random", {"random": stand_in}), "random", note)
    return Subject(spec, "pretrained")


def make_requests(tokenizer: Tokenizer, num: int, max_new_tokens: int, max_prompt: int = 256) -> list[Request]:
    """Requests over the shipped prompts of at most `max_prompt` tokens, the suites in turn; they repeat if they must.

    Raises:
        ValueError: no shipped prompt is short enough.
    """
    by_suite = [PackagedSuite(suite, [suite], "1").prompts() for suite in SHIPPED]
    texts = [prompt.turns[0] for group in zip_longest(*by_suite) for prompt in group if prompt is not None]
    rendered = (tokenizer.render([{"role": "user", "content": text}]) for text in texts)
    fitting = [ids for ids in rendered if len(ids) <= max_prompt]
    if not fitting:
        raise ValueError(f"max_prompt={max_prompt}: no shipped prompt is that short")
    return [
        Request(f"p{i}#0", f"p{i}", 0, "gpu_check", "gpu_check", tuple(fitting[i % len(fitting)]), max_new_tokens, i)
        for i in range(num)
    ]


def slots_for(requests: Sequence[Request]) -> int:
    """Cache slots that serve the requests with every drafter here, so that no arm makes the cache be built anew."""
    return max(len(request.prompt_ids) + request.max_new_tokens for request in requests) + 16


def decode(
    target: TargetModel,
    drafter: str,
    requests: Sequence[Request],
    batch_size: int,
    sampling: Sampling = GREEDY,
    num_slots: int | None = None,
) -> Trace:
    """One pass of the loop; `drafter` is a key of DRAFTERS."""
    loop = DecodingLoop(
        target,
        DRAFTERS[drafter](),
        FixedScheduler(),
        RejectionVerifier(),
        sampling,
        decode=lambda ids: " ".join(map(str, ids)),
        batch_size=batch_size,
        num_slots=num_slots or slots_for(requests),
    )
    return loop.run(ListSource(requests))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, the shorter one's length if it is a prefix; None if equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

"""Recorded runs of the reference implementations, and the same runs through this project's loop.

The folder of cases is named by DISPARK_FIXTURES, by default the small copy under tests/fixtures. Each case has target/,
draft/, io.safetensors and meta.json. Nothing here knows a case by name, shape or seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from conformance.toolbox import ListSource, make_request
from safetensors.torch import load_file
from torch import Tensor

from dispark.decoding.loop import DecodingLoop
from dispark.decoding.rows import Trace
from dispark.decoding.target import TargetModel
from dispark.drafters.checkpoint import open_checkpoint
from dispark.interfaces import Drafter, Scheduler
from dispark.schedulers.fixed import FixedScheduler
from dispark.targets.architectures import load_config, model_class
from dispark.types import Draft, Sampling
from dispark.verifiers.rejection import RejectionVerifier

FOLDER = Path(os.environ.get("DISPARK_FIXTURES") or Path(__file__).resolve().parents[1] / "fixtures")
RUNS = ("greedy", "conf", "stop", "stop2")
# Two equal evaluations of the reference models differ by about 1e-4 in features and 1e-5 in logits.
TOLERANCE: dict[str, float] = {"rtol": 1e-3, "atol": 1e-3}


@dataclass(frozen=True)
class Case:
    """One folder."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def draft(self) -> str:
        return str(self.folder / "draft")

    @cached_property
    def io(self) -> dict[str, Tensor]:
        return load_file(self.folder / "io.safetensors")

    @cached_property
    def meta(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
        return found

    @cached_property
    def layout(self) -> str:
        return open_checkpoint(self.draft).layout

    @cached_property
    def model(self) -> Any:
        folder = self.folder / "target"
        config = load_config(folder, self.name)
        stock = model_class(config.model_type).from_pretrained(folder, config=config, dtype=torch.float32)
        return stock.eval().requires_grad_(False)

    def target(self, stop_ids: Sequence[int] = ()) -> TargetModel:
        """The recorded target, in float32."""
        limit = self.model.config.max_position_embeddings
        return TargetModel(self.model, name=self.name, stop_ids=stop_ids, max_context=limit)

    @property
    def prompt_ids(self) -> list[int]:
        return [int(token) for token in self.io["prompt_ids"]]

    def has(self, run: str) -> bool:
        return f"{run}.output_ids" in self.io

    def scalar(self, name: str) -> float:
        return float(self.meta["scalars"][name]["value"])


def cases(*layouts: str) -> list[Case]:
    """Cases whose draft checkpoint has one of the layouts; none where the folder is absent."""
    if not FOLDER.is_dir():
        return []
    found = [Case(path.parent) for path in sorted(FOLDER.glob("*/meta.json"))]
    return [case for case in found if case.layout in layouts]


@dataclass
class Replay:
    """What our loop did: the text with its prompt, the trace, and every draft."""

    output_ids: list[int]
    trace: Trace
    drafts: list[Draft]

    @property
    def accepted(self) -> list[int]:
        """Drafts kept a round, an accepted stop token and nothing behind it included."""
        return [row["num_accepted"] for row in self.trace.rounds]


class Recorder:
    """Passes everything on to a drafter and keeps its drafts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.drafts: list[Draft] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, *arguments: Any) -> Draft:
        draft: Draft = self._inner.propose(*arguments)
        self.drafts.append(draft)
        return draft


def replay(
    case: Case,
    drafter: Drafter,
    stop_ids: Sequence[int] = (),
    scheduler: Scheduler | None = None,
    max_new_tokens: int | None = None,
) -> Replay:
    """Decodes the case's prompt greedily, one row."""
    target = case.target(stop_ids)
    recorder: Any = Recorder(drafter)
    new = case.meta["generation"].get("max_new_tokens") if max_new_tokens is None else max_new_tokens
    prompt = case.prompt_ids
    loop = DecodingLoop(
        target,
        recorder,
        scheduler or FixedScheduler(),
        RejectionVerifier(),
        Sampling(),
        decode=lambda ids: "",
        batch_size=1,
        num_slots=min(target.max_context, len(prompt) + new + 64),
    )
    trace = loop.run(ListSource([make_request(prompt, max_new_tokens=new)]))
    return Replay(prompt + trace.records[0].output_ids, trace, recorder.drafts)


def split(flat: Tensor, lengths: Tensor) -> list[Tensor]:
    """Rounds that were recorded one behind the other."""
    return list(flat.split([int(length) for length in lengths]))

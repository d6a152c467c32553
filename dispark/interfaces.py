"""The protocols that a method, a task, a meter or a tracker implements; nothing else lives here.

Objects are built from config alone by Hydra's `_target_`; what exists only at run time (the target, its device) arrives
afterwards through `bind`. Nothing here measures time: the loop does that around the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from dispark.types import (
    Draft,
    EnergyReading,
    Features,
    Load,
    Outcome,
    Prompt,
    Request,
    RequestRecord,
    Sampling,
    TelemetryReading,
    Verdict,
)

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from dispark.decoding.random import RowGenerators
    from dispark.decoding.target import TargetModel


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. Row state lives inside, keyed by row, from `begin` to `drop`."""

    draft_length: int
    feature_layers: tuple[int, ...]
    proposal: Literal["sampled", "deterministic"]

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        """Called once before a pass: at most num_rows rows, each of at most num_slots tokens."""

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        """New rows were prefilled and got their first token. `features` cover every prompt token, row after row."""

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        """Drafts for every row.

        Args:
            rows: the rows of the round, in the cache's order, or some of them.
            anchors_B: int64 [B] on the device, the last emitted token of each row, which no model has seen yet; the
                host knows it too, from `begin` and `update`.
            sampling: what q is shaped by.
            generators: the rows' own random draws.
            limit: at most so many tokens a row this time, 0 included, and no work for more; None is `draft_length`.
        """

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        """The round is over; rows that finished are dropped right after."""

    def drop(self, rows: Sequence[int]) -> None:
        """These rows are finished; their state may be forgotten."""


@runtime_checkable
class Scheduler(Protocol):
    """Chooses how many of the drafted tokens to verify."""

    is_lossless: bool

    def bind(self, target: TargetModel) -> None:
        """Called once before a pass; what was learned in an earlier one may be forgotten."""

    def draft_limit(self, load: Load) -> int | None:
        """How many tokens a row the drafter may propose in the round to come; None is as many as it can."""

    def choose(self, draft: Draft, load: Load) -> list[int]:
        """Returns verify_length per row, 0..draft.lengths[i]."""

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        """Sees each finished round and its wall time."""


@runtime_checkable
class Verifier(Protocol):
    """Accepts or rejects drafts given the target's logits; a pure function of its arguments."""

    is_lossless: bool

    def check(self, sampling: Sampling, proposal: str) -> None:
        """Raises ValueError when this verifier can't serve the sampling or the proposal type."""

    def accept(
        self,
        draft: Draft,
        target_logits_NV: Tensor,
        verify_lengths: Sequence[int],
        sampling: Sampling,
        generators: RowGenerators,
    ) -> Verdict:
        """target_logits_NV: row after row, 1 + verify_length rows of logits each, the first for the anchor."""


@runtime_checkable
class TaskSuite(Protocol):
    """A named, versioned list of prompts."""

    name: str
    version: str

    def prompts(self) -> list[Prompt]: ...


@runtime_checkable
class RequestSource(Protocol):
    """Feeds the loop. Admission asks `next`; a finished request may lead to another (a second turn)."""

    def next(self) -> Request | None:
        """The next request that is ready now, or None; may wait for one while nothing is being decoded."""

    def finish(self, record: RequestRecord) -> None: ...

    def is_cancelled(self, record: RequestRecord) -> bool:
        """Whether a request in decoding, as far as it has come, is to end here; asked after every round."""

    @property
    def num_waiting(self) -> int:
        """Requests that have arrived and wait for a row. A list that is worked off has none: nobody waits for it."""


@runtime_checkable
class EnergyMeter(Protocol):
    """Reads energy over windows of seconds. `start` and `stop` are called with the device idle (synchronised)."""

    @property
    def min_window_s(self) -> float:
        """Summed windows shorter than this report no joules."""

    def bind(self, device: torch.device | str) -> None:
        """Where the work of the coming windows runs."""

    def start(self) -> None: ...

    def stop(self) -> EnergyReading: ...


@runtime_checkable
class Telemetry(Protocol):
    """The state of the device, sampled off the decoding path."""

    def bind(self, device: torch.device | str) -> None:
        """Starts sampling; may be called again."""

    def latest(self) -> TelemetryReading:
        """The newest sample; never waits for one."""


@runtime_checkable
class Tracker(Protocol):
    """A sink for finished runs; never the source of truth, and its failure never loses a result."""

    def log_run(self, run: dict[str, Any], rows: pd.DataFrame) -> None: ...


@runtime_checkable
class TrainingTracker(Protocol):
    """A sink for the curves of a training, likewise."""

    def training(self, run: dict[str, Any]) -> AbstractContextManager[Callable[[Mapping[str, Any]], None]]:
        """For the time of a `with` block, a function that takes each line of metrics.jsonl."""

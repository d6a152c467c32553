"""What steps cost in a simulation: measured here, or computed for hardware that is not.

A cost knows three kinds of work: prefilling prompts, drafting, and verifying packed tokens. Seconds are those of the
device; what the host adds to a round is a number of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dispark.schedulers.profile import Profile
from dispark.schedulers.step_cost import StepCost


class Cost(Protocol):
    """Seconds of the parts of a round."""

    def prefill_s(self, num_tokens: int) -> float:
        """Prompts of so many tokens in all."""

    def draft_s(self, num_rows: int, length: int) -> float:
        """Drafting so many tokens in each row; 0 for none."""

    def verify_s(self, num_rows: int, num_tokens: int, context_tokens: int) -> float:
        """One packed step; `context_tokens` are those that all rows hold."""

    def step_cost(self, num_rows: int) -> StepCost:
        """The table of verify times that schedulers plan with."""


def _check_seconds(key: str, value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{key}={value}: must be a number of seconds >= 0")


class MeasuredCost:
    """Times of `dispark profile`.

    Args:
        path: the file.
        drafter: name of the drafter in it; None for arms that don't draft.
        host_s: what the host adds to every round.

    Raises:
        ValueError: no profile, or one without that drafter.
    """

    def __init__(self, path: str, drafter: str | None = None, host_s: float = 0.0) -> None:
        key = f"engine.path={path}"
        _check_seconds("engine.host_s", host_s)
        self._profile = Profile.load(Path(path).expanduser(), key)
        self._host_s = host_s
        self._draft = None
        if drafter is not None:
            if drafter not in self._profile.drafts:
                there = ", ".join(self._profile.drafts) or "none"
                raise ValueError(f"{key}: has no times of drafter {drafter}, only of: {there}; dispark profile adds it")
            self._draft = self._profile.drafts[drafter]
        if not self._profile.prefill:
            raise ValueError(f"{key}: has no prefill times; measure it anew with dispark profile")
        self._prefill = StepCost.of_samples(self._profile.prefill)
        self._verify: dict[int, StepCost] = {}
        self._drafts: dict[int, StepCost] = {}

    def prefill_s(self, num_tokens: int) -> float:
        """See Cost; below the shortest prompt measured it is in proportion."""
        first = self._prefill.num_tokens[0]
        seconds = float(self._prefill.seconds_at(max(num_tokens, first)))
        return seconds * min(1.0, num_tokens / first)

    def draft_s(self, num_rows: int, length: int) -> float:
        """See Cost."""
        if self._draft is None or length == 0:
            return 0.0
        if num_rows not in self._drafts:
            self._drafts[num_rows] = self._draft.cost(num_rows)
        return float(self._drafts[num_rows].seconds_at(num_rows * length))

    def verify_s(self, num_rows: int, num_tokens: int, context_tokens: int) -> float:
        """See Cost; the context is the profile's."""
        return float(self.step_cost(num_rows).seconds_at(num_tokens)) + self._host_s

    def step_cost(self, num_rows: int) -> StepCost:
        """See Cost."""
        if num_rows not in self._verify:
            self._verify[num_rows] = self._profile.cost(num_rows)
        return self._verify[num_rows]


@dataclass(frozen=True)
class Hardware:
    """What a device can do at most, and how much of it is reached.

    Args:
        bandwidth: bytes a second.
        flops: operations a second, in the dtype of the model.
        efficiency: share of both that kernels reach.
        overhead_s: of a step whatever it does: launches, scheduling, communication.
    """

    bandwidth: float
    flops: float
    efficiency: float = 0.8
    overhead_s: float = 1e-3

    def __post_init__(self) -> None:
        for key in ("bandwidth", "flops"):
            if not 0.0 < getattr(self, key) < math.inf:
                raise ValueError(f"engine.hardware.{key}={getattr(self, key)}: must be a number above 0")
        if not 0.0 < self.efficiency <= 1.0:
            raise ValueError(f"engine.hardware.efficiency={self.efficiency}: must be a share above 0, at most 1")
        _check_seconds("engine.hardware.overhead_s", self.overhead_s)


@dataclass(frozen=True)
class Network:
    """What a forward reads and computes.

    Args:
        dense_params: read and used by every token: attention, shared experts, head.
        expert_params: of one expert of all layers together; 0 for a dense network.
        num_experts, active_experts: of a layer, and how many a token uses.
        kv_bytes: of the cache, a token of context.
        bytes_per_param, expert_bytes_per_param: 2 in bfloat16, 1 in 8 bits; None is the same for experts.
    """

    dense_params: float
    kv_bytes: float = 0.0
    expert_params: float = 0.0
    num_experts: int = 0
    active_experts: int = 0
    bytes_per_param: float = 2.0
    expert_bytes_per_param: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.dense_params < math.inf:
            raise ValueError(f"network.dense_params={self.dense_params}: must be a number above 0")
        for key in ("kv_bytes", "expert_params", "bytes_per_param", "expert_bytes_per_param"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"network.{key}={value}: must be a number >= 0")
        if not 0 <= self.active_experts <= self.num_experts:
            raise ValueError(
                f"network.active_experts={self.active_experts}: must lie in 0 to num_experts={self.num_experts}"
            )

    def bytes_read(self, num_tokens: int) -> float:
        """Weights that a step of so many tokens reads: every expert that one of them uses, at random routing."""
        touched = 0.0
        if self.num_experts:
            touched = self.num_experts * (1 - (1 - self.active_experts / self.num_experts) ** num_tokens)
        each = self.bytes_per_param if self.expert_bytes_per_param is None else self.expert_bytes_per_param
        return self.bytes_per_param * self.dense_params + each * touched * self.expert_params

    @property
    def flops_per_token(self) -> float:
        """Two for each weight that a token uses."""
        return 2 * (self.dense_params + self.active_experts * self.expert_params)


@dataclass(frozen=True)
class Drafting:
    """What a simulated drafter's work is.

    Args:
        name: of the drafter in a profile.
        network: of its forward, head included, on a roofline; None for no drafter.
        passes: forwards one after the other for a whole draft: one for a parallel `block`, its length for a `chain`.
        overhead_s: of each of those.
        sequential_s: of a sequential head, for each token.
    """

    name: str | None = None
    network: Network | None = None
    passes: str = "block"
    overhead_s: float = 0.0
    sequential_s: float = 0.0

    def __post_init__(self) -> None:
        if self.passes not in ("block", "chain"):
            raise ValueError(f"drafting.passes={self.passes}: must be block or chain")
        _check_seconds("drafting.overhead_s", self.overhead_s)
        _check_seconds("drafting.sequential_s", self.sequential_s)


@dataclass(frozen=True)
class RooflineCost:
    """The longer of reading and computing, and an overhead (Williams et al. 2009): a stated model, not a measurement.

    Args:
        hardware: of the device, or of several that work as one.
        network: of the target.
        drafting: of the drafter.
    """

    hardware: Hardware
    network: Network
    drafting: Drafting = Drafting()

    def prefill_s(self, num_tokens: int) -> float:
        """See Cost."""
        return self._device_s(self.network, num_tokens, 0) + self.hardware.overhead_s

    def verify_s(self, num_rows: int, num_tokens: int, context_tokens: int) -> float:
        """See Cost."""
        return self._device_s(self.network, num_tokens, context_tokens) + self.hardware.overhead_s

    def draft_s(self, num_rows: int, length: int) -> float:
        """See Cost."""
        d = self.drafting
        if d.network is None or length == 0:
            return 0.0
        passes, tokens = (1, num_rows * length) if d.passes == "block" else (length, num_rows)
        return passes * (self._device_s(d.network, tokens, 0) + d.overhead_s) + length * d.sequential_s

    def step_cost(self, num_rows: int) -> StepCost:
        """See Cost; at a context of 0, which schedulers don't see either."""
        tokens = tuple(num_rows * k for k in (1, 2, 3, 4, 6, 8, 12, 17))
        return StepCost(tokens, tuple(self.verify_s(num_rows, num, 0) for num in tokens))

    def _device_s(self, network: Network, num_tokens: int, context_tokens: int) -> float:
        h = self.hardware
        reading = network.bytes_read(num_tokens) + network.kv_bytes * context_tokens
        computing = network.flops_per_token * num_tokens
        return max(reading / h.bandwidth, computing / h.flops) / h.efficiency


class CostModel(Protocol):
    """Makes the costs of an engine with a drafter."""

    def cost(self, drafting: Drafting) -> Cost: ...


@dataclass(frozen=True)
class MeasuredEngine:
    """This machine, as `dispark profile` measured it. Args: see MeasuredCost."""

    path: str
    host_s: float = 0.0

    def cost(self, drafting: Drafting) -> Cost:
        """See CostModel."""
        return MeasuredCost(self.path, drafting.name, self.host_s)


@dataclass(frozen=True)
class RooflineEngine:
    """Another machine, computed. Args: see RooflineCost."""

    hardware: Hardware
    network: Network

    def cost(self, drafting: Drafting) -> Cost:
        """See CostModel."""
        return RooflineCost(self.hardware, self.network, drafting)

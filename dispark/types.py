"""The frozen records that cross from one room of the house to another.

Shape legend, used as name suffixes everywhere: B rows in the batch, G draft positions (draft_length), T verify
positions (G + 1: the anchor and the drafts), N packed tokens (sum over rows of 1 + verify_length), V vocabulary,
D hidden size, F width of the tapped target features, S cache slots. `draft_tokens_BG` is a tensor of shape [B, G].

Rows are the small integers by which the loop, the target and the drafter name a request that is being decoded; a row is
free again once its request has finished. This module knows nothing about models, configs or files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "stop_string", "length", "context", "cancelled"]
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How the target's distribution is shaped before drafting and verification; applied to p and q alike.

    Args:
        temperature: 0 means greedy (the argmax has all the mass).
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p; None keeps all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"sampling.temperature={self.temperature}: must be a finite number >= 0 (0 is greedy)")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature={self.temperature}: must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, below "
                "which logits overflow"
            )
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"sampling.top_k={self.top_k}: must be a whole number >= 1, or null for no limit")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"sampling.top_p={self.top_p}: must lie in (0, 1], or be null for no limit")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Prompt:
    """One conversation of a task suite, before rendering.

    `turns` are the user's messages in order; each is answered before the next is asked.
    """

    prompt_id: str
    task: str
    category: str
    turns: tuple[str, ...]


AGAIN = "@"  # in the name of a request that asks again what another asked


@dataclass(frozen=True)
class Request:
    """One text to continue: a rendered prompt as token ids, and when to stop.

    `request_id` is unique in a run ("<prompt_id>#<turn>", with "@<k>" behind it where it asks again); `seed` fixes
    every random draw made for this request, whatever the batch around it.
    """

    request_id: str
    prompt_id: str
    turn: int
    task: str
    category: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for the active rows in one round.

    Args:
        tokens_BG: int64 proposed tokens; entries at and beyond a row's length are ignored (any valid token id).
        lengths: tokens really proposed per row, on the host, each 0..G. All zero is an autoregressive step.
        probs_BGV: float32 distributions the tokens were drawn from ("sampled" proposals), or None where each proposal
            is a point mass on its token ("deterministic", and any drafter at temperature 0).
        confidence_BG: float32 estimate that token k survives given that those before it did, or None.
        parents_BG: reserved for trees; None is a chain.
    """

    tokens_BG: Tensor
    lengths: list[int]
    probs_BGV: Tensor | None = None
    confidence_BG: Tensor | None = None
    parents_BG: Tensor | None = None


def no_draft(anchors_B: Tensor) -> Draft:
    """Nothing for any row: the round is an autoregressive step."""
    return Draft(anchors_B.new_zeros((len(anchors_B), 0)), [0] * len(anchors_B))


@dataclass(frozen=True)
class Verdict:
    """What a verifier decided, still on the device.

    tokens_BT: int64; the first num_accepted entries of a row are its accepted drafts, the next one is the recovered or
    bonus token, the rest is undefined. num_accepted_B: int64, draft tokens only.
    """

    tokens_BT: Tensor
    num_accepted_B: Tensor


@dataclass(frozen=True)
class Outcome:
    """A verdict after the round's one device sync, cut at stop tokens and caps: what was really emitted, on the host.

    For row i of the round, `emitted[i]` holds num_accepted[i] drafts and, unless the round was cut, one more token,
    which is the row's next anchor.
    """

    emitted: list[list[int]]
    num_accepted: list[int]
    finish: list[FinishReason | None]
    is_truncated: list[bool]


@dataclass(frozen=True)
class Features:
    """Hidden states of tapped target layers for the tokens of one packed call, row after row.

    hidden_NF concatenates the tapped layers' outputs in the drafter's `feature_layers` order; None if none was asked
    for. `lengths[i]` tokens belong to row i of the call. In a round the tokens of a row are its anchor and its verified
    drafts, so 1 + num_accepted of them stay valid.
    """

    hidden_NF: Tensor | None
    lengths: list[int]


@dataclass(frozen=True)
class Load:
    """What a scheduler may know about the system before a round.

    Args:
        num_rows: rows of the round.
        num_waiting: requests that have arrived and wait for a row.
        step: number of the loop's step in its pass.
        context_lengths: tokens that each row holds.
        request_ids: of the rows, in their order.
        kv_share: share of the cache's room that is taken, or None where it has no bound.
        draft_length: tokens that the drafter proposes for a row at most.
    """

    num_rows: int
    num_waiting: int
    step: int
    context_lengths: list[int]
    request_ids: list[str] = field(default_factory=list)
    kv_share: float | None = None
    draft_length: int = 0


@dataclass(frozen=True)
class TelemetryReading:
    """The state of the device a moment ago; None is what can't be read.

    Args:
        utilisation: share of time in which the device worked; on a CPU, share of the cores' time that the process used.
        memory_share: memory in use over all there is.
        pcie_bytes_per_s: traffic between host and device, both ways.
    """

    utilisation: float | None = None
    memory_share: float | None = None
    pcie_bytes_per_s: float | None = None


@dataclass(frozen=True)
class EnergyReading:
    """Energy over one window. A missing value is None with a reason, never 0.

    Args:
        energy_j: joules read from a sensor, or None.
        window_s: length of the window in seconds.
        source: "nvml_counter", "nvml_power", "rapl" or "none".
        scope: what the sensor covers, for example "gpu board 0" or "cpu package".
        idle_power_w: power measured before the work, or None; net energy is energy_j - idle_power_w * window_s.
        reason: why energy_j is None, else None.
        warnings: what makes the reading doubtful (a short window, a shared device).
        estimated_energy_j: configured watts times window_s; a separate number that never fills energy_j.
    """

    energy_j: float | None
    window_s: float
    source: str
    scope: str
    idle_power_w: float | None = None
    reason: str | None = None
    warnings: tuple[str, ...] = ()
    estimated_energy_j: float | None = None

    @property
    def net_energy_j(self) -> float | None:
        """Joules above idle, or None where either part is unknown."""
        if self.energy_j is None or self.idle_power_w is None:
            return None
        return self.energy_j - self.idle_power_w * self.window_s


@dataclass
class RequestRecord:
    """Everything the loop measured about one request. Seconds are host wall clock; `*_s` shares of a step that served
    several rows are the step's time divided by its rows, so they add up to the wall time of the pass.
    `prefill_step` is the number of the step that gave the first token."""

    request: Request
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "length"
    num_rounds: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float | None = None
    latency_s: float | None = None
    prefill_step: int | None = None


def check_device_name(device: str) -> None:
    """Raises ValueError for anything but auto, cpu, cuda and cuda:N."""
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"target.device={device}: must be auto, cpu, cuda or cuda:N")


def pick_device(device: str) -> torch.device:
    """Turns a config value into a device: "auto" is CUDA where there is one, else the CPU.

    Raises:
        ValueError: the named device is unknown or not available here.
    """
    check_device_name(device)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    num_devices = torch.cuda.device_count()
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"target.device={device}: there is no CUDA device here; allowed: auto, cpu")
    if chosen.type == "cuda" and chosen.index is not None and chosen.index >= num_devices:
        raise ValueError(f"target.device={device}: there are {num_devices} CUDA devices here, from 0")
    return chosen

"""AdamW on float32 masters of a network that computes in a shorter dtype, with clipping, a schedule, and exact state.

It knows nothing of what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OptimizerSettings:
    """How all students of a run are stepped.

    Args:
        warmup: share of the steps in which the learning rate rises linearly from 0.
        schedule: cosine (to 0) or constant, after that.
        clip: largest norm of all gradients together.
        weight_decay: decoupled.
        beta1, beta2, eps: of AdamW.
        ema: decay of an average of the weights, which is then what is checked and saved; None for none. Step t decays
            by no more than (1 + t) / (10 + t), so that the weights before training are soon forgotten.
    """

    warmup: float = 0.04
    schedule: str = "cosine"
    clip: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    ema: float | None = None

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"optimizer.schedule={self.schedule}: must be cosine or constant")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"optimizer.warmup={self.warmup}: must lie in 0 .. 1")
        for key, low in (("clip", 0), ("eps", 0)):
            if not getattr(self, key) > low:
                raise ValueError(f"optimizer.{key}={getattr(self, key)}: must be above {low}")
        if self.weight_decay < 0:
            raise ValueError(f"optimizer.weight_decay={self.weight_decay}: must be at least 0")
        for key in ("beta1", "beta2", "ema"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"optimizer.{key}={value}: must lie in 0 .. 1, 1 left out")

    def factor(self, step: int, num_steps: int) -> float:
        """Of the peak learning rate, at a step counted from 0."""
        num_warmup = int(self.warmup * num_steps)
        if step < num_warmup:
            return (step + 1) / num_warmup
        if self.schedule == "constant":
            return 1.0
        progress = (step - num_warmup) / max(1, num_steps - num_warmup)
        return 0.5 * (1 + math.cos(math.pi * progress))


class MasterAdamW:
    """Steps a network.

    Args:
        network: float32; its parameters are cast to `dtype` here, the masters keep what they were.
        dtype: that the network computes in.
        lr: peak learning rate.
        settings: of the run.
        own_lrs: peak learning rates of single parameters by name, where they aren't `lr`.
    """

    def __init__(
        self,
        network: nn.Module,
        dtype: torch.dtype,
        lr: float,
        settings: OptimizerSettings,
        own_lrs: Mapping[str, float] | None = None,
    ) -> None:
        self._parameters: list[Tensor] = [p for p in network.parameters() if p.is_floating_point()]
        self._names = [name for name, p in network.named_parameters() if p.is_floating_point()]
        self.masters = [p.detach().clone().float() for p in self._parameters]
        self._average = [m.clone() for m in self.masters] if settings.ema is not None else None
        for parameter in self._parameters:
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)
        for name, buffer in network.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.data = buffer.data.to(dtype)
        self._settings = settings
        groups: dict[float, list[Tensor]] = {}
        for name, master in zip(self._names, self.masters, strict=True):
            groups.setdefault((own_lrs or {}).get(name, lr), []).append(master)
        self._peaks = list(groups)
        self._adam = torch.optim.AdamW(
            [{"params": members} for members in groups.values()],
            lr=lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def gather(self) -> None:
        """Adds the network's gradients to the masters', in float32, and clears the network's."""
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def reduce(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Adds the masters' gradients of all processes."""
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            master.grad = reduce(master.grad)

    def step(self, factor: float) -> float:
        """One step at `factor` times the peak learning rate; returns the gradients' norm before clipping."""
        norm = float(nn.utils.clip_grad_norm_(self.masters, self._settings.clip, foreach=True))
        if math.isfinite(norm):
            for group, peak in zip(self._adam.param_groups, self._peaks, strict=True):
                group["lr"] = peak * factor
            self._adam.step()
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self.masters)
                if self._average is not None:
                    assert self._settings.ema is not None
                    done = int(self._adam.state[self.masters[0]]["step"])
                    decay = min(self._settings.ema, (1 + done) / (10 + done))
                    torch._foreach_lerp_(self._average, self.masters, 1 - decay)
        self._adam.zero_grad(set_to_none=True)
        return norm

    def use_average(self, is_on: bool) -> None:
        """Puts the average, or again the weights themselves, into the network; does nothing without an average."""
        if self._average is not None:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._average if is_on else self.masters)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, by name."""
        found: dict[str, Tensor] = {}
        for i, (name, master) in enumerate(zip(self._names, self.masters, strict=True)):
            found[f"master/{name}"] = master
            for key, value in self._adam.state.get(master, {}).items():
                found[f"{key}/{name}"] = value
            if self._average is not None:
                found[f"average/{name}"] = self._average[i]
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """What `state` gave.

        Raises:
            ValueError: it is of another network.
        """
        wanted = {f"master/{name}" for name in self._names}
        if {key for key in state if key.startswith("master/")} != wanted:
            raise ValueError("its tensors are not those of this network")
        with torch.no_grad():
            for i, (name, master) in enumerate(zip(self._names, self.masters, strict=True)):
                if state[f"master/{name}"].shape != master.shape:
                    raise ValueError(f"{name} has another shape")
                master.copy_(state[f"master/{name}"])
                if self._average is not None:
                    self._average[i].copy_(state[f"average/{name}"])
                keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in state]
                if keys:
                    kept: Any = self._adam.state[master]
                    kept |= {key: state[f"{key}/{name}"].to(master.device, copy=True) for key in keys}
            torch._foreach_copy_(self._parameters, self.masters)

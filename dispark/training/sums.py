"""What a student's batches add up to between two lines of the log. METRICS.md, section 10, defines the figures.

It knows neither steps nor files.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from dispark.training.students import StudentLoss
from dispark.training.world import World


class Sums:
    """Running sums of one student."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, Tensor | float] = defaultdict(float)
        self.slots: list[Tensor] | None = None
        self.num_anchors = 0
        self.num_batches = 0

    def add(self, loss: StudentLoss) -> None:
        for key, value in loss.parts.items():
            self.parts[key] = self.parts[key] + value.detach()
        new = [loss.accept_G, loss.right_G, loss.count_G]
        self.slots = new if self.slots is None else [a + b for a, b in zip(self.slots, new, strict=True)]
        self.num_anchors += loss.num_anchors
        self.num_batches += 1

    def figures(self, world: World) -> dict[str, Any]:
        """Means over batches and processes; `accept_at` and `accuracy_at` are by slot, given the text before."""
        assert self.slots is not None
        keys = sorted(self.parts)
        device = self.slots[0].device
        sums = torch.stack([torch.as_tensor(self.parts[key], device=device).float() for key in keys])
        sums = world.reduce(sums) / self.num_batches
        accept, right, count = world.reduce(torch.stack(self.slots))
        accept_at = (accept / count.clamp_min(1)).tolist()
        survival = torch.tensor(accept_at).cumprod(0)
        return {
            **dict(zip(keys, sums.tolist(), strict=True)),
            "accept_at": accept_at,
            "accuracy_at": (right / count.clamp_min(1)).tolist(),
            "expected_matl": 1 + float(survival.sum()),
        }

"""The processes that train together: one, or as many as torchrun started.

It knows nothing of what is trained. Sums are over all processes; every process has to ask for the same sums in the same
order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# The first process fills caches and checks checkpoints while the others wait: longer than the libraries' minutes.
_PATIENCE = timedelta(days=2)


def use_own_device() -> None:
    """Makes each of several processes' "cuda" a device of its own; call before anything is put there."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


@dataclass(frozen=True)
class World:
    """Args: rank: of this process; size: how many there are."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: torch.device) -> World:
        """What torchrun's environment says; gloo on CPUs, nccl on CUDA devices."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def reduce(self, values: Tensor) -> Tensor:
        """The sum over all processes; what is given stays as it is."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

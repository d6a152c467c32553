"""Which rows a training step sees: fixed by seed and step alone, so that a run resumes anywhere, on any world size.

An epoch is a permutation of the rows. Within windows of it rows of like length form a batch, to pad little, and the
batches of a window are shuffled again. A last batch that would be short is left out of the epoch.

It knows no tensors but the generator's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch

_WINDOW = 32  # batches


class StepPlan:
    """Batches of row numbers, one after another, for ever.

    Args:
        lengths: tokens of each row.
        batch_rows: rows of a batch.
        seed: of the run.

    Raises:
        ValueError: fewer rows than a batch has.
    """

    def __init__(self, lengths: Sequence[int], batch_rows: int, seed: int) -> None:
        if len(lengths) < batch_rows:
            raise ValueError(f"batch_rows={batch_rows}: the data has {len(lengths)} rows to train on; make more")
        self._lengths, self._batch_rows, self._seed = list(lengths), batch_rows, seed
        self.num_batches = len(lengths) // batch_rows
        self._epoch = lru_cache(maxsize=2)(self._make)

    def batch(self, number: int) -> tuple[int, list[int]]:
        """(epoch, row numbers) of a batch, counted from the start of training."""
        epoch, place = divmod(number, self.num_batches)
        return epoch, self._epoch(epoch)[place]

    def _make(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(stream_seed(self._seed, "epoch", epoch))
        order = torch.randperm(len(self._lengths), generator=generator).tolist()
        size = self._batch_rows
        batches: list[list[int]] = []
        for low in range(0, self.num_batches * size, _WINDOW * size):
            window = sorted(order[low : min(low + _WINDOW * size, self.num_batches * size)], key=self._length)
            made = [window[i : i + size] for i in range(0, len(window), size)]
            batches += [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]
        return batches

    def _length(self, row: int) -> int:
        return self._lengths[row]


def stream_seed(seed: int, *names: object) -> int:
    """A seed for one purpose, the same in every process and unrelated to those of other purposes."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def split_held_out(row_ids: Sequence[str], num: int) -> tuple[list[int], list[int]]:
    """(rows to train on, rows held out): the `num` whose hashed ids come first, whatever else the data holds."""
    ranked = sorted(range(len(row_ids)), key=lambda i: hashlib.sha256(row_ids[i].encode()).hexdigest())
    held_out = set(ranked[:num])
    return [i for i in range(len(row_ids)) if i not in held_out], sorted(held_out)

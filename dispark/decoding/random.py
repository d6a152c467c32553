"""One reproducible random stream per request, drawn for all rows at once.

A draw is a pure function of (request seed, purpose, round of the request, index), through the counter-based generator
Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). So the tokens of a request don't
depend on the rows decoded beside it, nothing has to be stored or rolled back, and the global generator is never
touched. The uniforms are made on the host (tens of numbers a round) and copied without a device sync.

It does not know what the draws are used for beyond their purpose's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PURPOSES = ("first", "draft", "accept", "recover", "corrupt")

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32.

    Args:
        counter: uint32 [..., 4].
        key: uint32 [..., 2], broadcastable against counter.

    Returns:
        uint32 [..., 4].
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key[..., 0].astype(np.uint32), key[..., 1].astype(np.uint32)
    with np.errstate(over="ignore"):
        for _ in range(10):
            p0, p1 = _M0 * c0, _M1 * c2
            c0, c1, c2, c3 = (
                (p1 >> _SHIFT) ^ c1 ^ k0,
                p1 & _LOW,
                (p0 >> _SHIFT) ^ c3 ^ k1,
                p0 & _LOW,
            )
            k0, k1 = k0 + _W0, k1 + _W1
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


class RowGenerators:
    """The streams of the rows of one round.

    Args:
        seeds: one non-negative 64-bit seed per row.
        rounds: the row's round number within its request; 0 is prefill, so the first round is 1.
        device: where `uniform` puts its result.
    """

    def __init__(
        self, seeds: Sequence[int] | np.ndarray, rounds: Sequence[int] | np.ndarray, device: torch.device
    ) -> None:
        assert len(seeds) == len(rounds)
        self._seeds = np.asarray(seeds, dtype=np.uint64)
        self._rounds = np.asarray(rounds, dtype=np.uint32)
        self._device = device

    def part(self, places: Sequence[int]) -> RowGenerators:
        """Those of some of the rows, by their places."""
        return RowGenerators(self._seeds[list(places)], self._rounds[list(places)], self._device)

    def uniform(self, purpose: str, num: int) -> Tensor:
        """float64 [B, num] uniforms in [0, 1) with 53 random bits. Asking again gives the same numbers."""
        blocks = (num + 1) // 2
        counter = np.zeros((len(self._seeds), blocks, 4), dtype=np.uint32)
        counter[..., 0] = np.arange(blocks, dtype=np.uint32)
        counter[..., 1] = PURPOSES.index(purpose)
        counter[..., 2] = self._rounds[:, None]
        key = np.stack([self._seeds & _LOW, self._seeds >> _SHIFT], axis=-1).astype(np.uint32)[:, None, :]
        bits = philox4x32(counter, key).astype(np.uint64).reshape(len(self._seeds), blocks * 2, 2)
        mantissa = (bits[..., 0] >> np.uint64(5)) * np.uint64(1 << 26) + (bits[..., 1] >> np.uint64(6))
        values = mantissa.astype(np.float64) * 2.0**-53
        return torch.from_numpy(np.ascontiguousarray(values[:, :num])).to(self._device, non_blocking=True)

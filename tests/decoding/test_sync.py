"""What a verdict is on the host."""

from __future__ import annotations

import torch

from dispark.decoding.sync import to_host
from dispark.types import Verdict


def test_to_host_splits_a_verdict() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3]])
    results = to_host(Verdict(tokens, torch.tensor([3, 0, 1])))
    assert results == [([1, 2, 3, 4], 3), ([5], 0), ([9, 1], 1)]

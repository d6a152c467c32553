"""The one place where a round waits for the device."""

from __future__ import annotations

import torch

from dispark.types import Verdict


def to_host(verdict: Verdict) -> list[tuple[list[int], int]]:
    """Per row its accepted drafts with the next token, and how many were accepted."""
    both = torch.cat([verdict.num_accepted_B.unsqueeze(1), verdict.tokens_BT], dim=1).tolist()
    return [(row[1 : row[0] + 2], row[0]) for row in both]

"""Index helper shared by the verifiers: from packed logits to [B, T]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def packed_index(verify_lengths: Sequence[int], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where verify position t of row i lies in the packed logits.

    Args:
        verify_lengths: draft tokens verified per row; a row holds 1 + verify_length packed logits.
        width: T of the result, at least 1 + max(verify_lengths).
        device: of the result.

    Returns:
        (index_BT int64, entries past a row's end repeat its last; verify_length_B int64).
    """
    length_B = torch.tensor(list(verify_lengths), dtype=torch.int64)
    start_B = torch.cumsum(length_B + 1, 0) - (length_B + 1)
    step_BT = torch.minimum(torch.arange(width).unsqueeze(0), length_B.unsqueeze(1))
    both = torch.cat([(start_B.unsqueeze(1) + step_BT).reshape(-1), length_B]).to(device, non_blocking=True)
    num = len(length_B) * width
    return both[:num].view(-1, width), both[num:]


def count_accepted(is_accepted_BG: Tensor, verify_length_B: Tensor) -> Tensor:
    """int64 [B]: the length of each row's all-accepted prefix within its verified drafts."""
    in_reach_BG = torch.arange(is_accepted_BG.shape[1], device=is_accepted_BG.device) < verify_length_B.unsqueeze(1)
    return (is_accepted_BG & in_reach_BG).to(torch.int64).cumprod(-1).sum(-1)


def with_next(draft_tokens_BG: Tensor, num_accepted_B: Tensor, next_B: Tensor) -> Tensor:
    """int64 [B, G + 1]: the drafts with the recovered or bonus token written right after the accepted ones."""
    padded = torch.nn.functional.pad(draft_tokens_BG, (0, 1))
    return padded.scatter(1, num_accepted_B.unsqueeze(1), next_B.unsqueeze(1))

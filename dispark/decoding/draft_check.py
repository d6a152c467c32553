"""Holds a drafter to what it promises: shapes and lengths in every round, values where there is time for it.

A draft that is too long or misshapen would not only fail somewhere deep inside; it could be decoded and make a figure
that means nothing. The shapes are host-side facts and cost nothing. The values lie on the device, so they are read in
warm-up only. That q is the law a token was drawn from can't be seen from one draft; tests/conformance counts for that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dispark.interfaces import Scheduler
from dispark.types import Draft, Load, Sampling

_SUM_TOLERANCE = 1e-3
_LAWS = (torch.float32, torch.float64)  # the latter from targets in float64


def draft_limit(scheduler: Scheduler, load: Load, draft_length: int) -> int:
    """How many tokens a row may be drafted this round.

    Raises:
        ValueError: the scheduler asks for what is no number of tokens.
    """
    asked = scheduler.draft_limit(load)
    if asked is None:
        return draft_length
    if not isinstance(asked, int) or asked < 0:
        name = f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"
        raise ValueError(f"scheduler {name}: draft_limit: {asked!r}; must be a whole number >= 0, or None")
    return min(asked, draft_length)


def check_draft(
    draft: Draft,
    drafter: Any,
    num_rows: int,
    vocab_size: int,
    sampling: Sampling,
    most: int,
    reads_values: bool = False,
) -> None:
    """Checks shapes and lengths, and with `reads_values` what is in the tensors; `most` tokens a row were asked for.

    Raises:
        ValueError: one line that names the drafter, the field and what is allowed.
    """
    if not isinstance(draft, Draft):
        raise _error(drafter, "propose", f"returned {type(draft).__name__}", "a Draft")
    tokens = draft.tokens_BG
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2 or len(tokens) != num_rows:
        raise _error(drafter, "tokens_BG", _shape(tokens), f"int64 [{num_rows}, G]")
    lengths, width = draft.lengths, tokens.shape[1]
    if not isinstance(lengths, list) or not all(type(n) is int for n in lengths) or len(lengths) != num_rows:
        raise _error(drafter, "lengths", repr(lengths)[:60], f"a list of {num_rows} whole numbers")
    if any(not 0 <= n <= min(width, most) for n in lengths):
        asked = "" if most == drafter.draft_length else f", limit={most}"
        bounds = f"0 to {min(width, most)} (draft_length={drafter.draft_length}{asked}, {width} tokens a row)"
        raise _error(drafter, "lengths", str(lengths), bounds)
    if draft.confidence_BG is not None and draft.confidence_BG.shape != tokens.shape:
        raise _error(drafter, "confidence_BG", _shape(draft.confidence_BG), f"float32 {list(tokens.shape)}")
    probs = draft.probs_BGV
    has_law = drafter.proposal == "sampled" and not sampling.is_greedy
    if probs is None:
        if has_law and width > 0 and any(lengths):
            raise _error(drafter, "probs_BGV", "None", 'the law of every token (proposal="sampled", temperature > 0)')
    elif drafter.proposal == "deterministic":
        raise _error(drafter, "probs_BGV", _shape(probs), 'None (proposal="deterministic")')
    elif not isinstance(probs, Tensor) or probs.dtype not in _LAWS or probs.shape != (*tokens.shape, vocab_size):
        raise _error(drafter, "probs_BGV", _shape(probs), f"float32 {[*tokens.shape, vocab_size]}")
    if reads_values:
        check_values(draft, drafter, vocab_size)


def check_values(draft: Draft, drafter: Any, vocab_size: int) -> None:
    """Reads the tensors, which waits for the device.

    Raises:
        ValueError: a token outside the vocabulary, a law that is not one, a token that its law excludes, or a
            confidence outside of 0 to 1.
    """
    device = draft.tokens_BG.device
    is_drafted_BG = torch.arange(draft.tokens_BG.shape[1], device=device) < torch.tensor(
        draft.lengths, device=device
    ).unsqueeze(1)
    tokens = draft.tokens_BG[is_drafted_BG]
    if len(tokens) == 0:
        return
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise _error(drafter, "tokens_BG", f"ids {int(tokens.min())}..{int(tokens.max())}", f"0 to {vocab_size - 1}")
    if draft.probs_BGV is not None:
        laws = draft.probs_BGV[is_drafted_BG]
        worst = float((laws.sum(-1) - 1).abs().max())
        if not bool(torch.isfinite(laws).all()) or bool((laws < 0).any()):
            raise _error(drafter, "probs_BGV", "an entry that is negative or not finite", "laws that sum to 1")
        if worst > _SUM_TOLERANCE:
            raise _error(drafter, "probs_BGV", f"sums off by {worst:.3g}", "finite laws that sum to 1")
        if bool((laws.gather(1, tokens.unsqueeze(1)) <= 0).any()):
            raise _error(drafter, "tokens_BG", "a token that its own law gives no probability", "tokens drawn from it")
    if draft.confidence_BG is not None:
        sure = draft.confidence_BG[is_drafted_BG]
        if not bool(((sure >= 0) & (sure <= 1)).all()):
            raise _error(drafter, "confidence_BG", "a value outside", "0 to 1")


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _error(drafter: Any, field: str, value: str, allowed: str) -> ValueError:
    kind = type(drafter)
    return ValueError(f"drafter {kind.__module__}.{kind.__qualname__}: {field}: {value}; must be {allowed}")

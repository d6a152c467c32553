"""Survival: the chance that a draft is reached and accepted, as every load-aware scheduler ranks it.

Confidence is conditional on the drafts before; survival is its running product. It falls along a row, so the best so
many drafts of all rows are a prefix of each row. It knows nothing of costs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dispark.types import Draft

Floats = npt.NDArray[np.float64]


def survival_of(draft: Draft, scheduler: str) -> Floats:
    """float64 [B, G] on the host (a device sync of its own); 0 beyond a row's drafts.

    Args:
        draft: of a round.
        scheduler: its name, for the error.

    Raises:
        ValueError: the drafter gives no confidence.
    """
    num_rows, width = draft.tokens_BG.shape
    is_drafted = np.arange(width) < np.asarray(draft.lengths).reshape(num_rows, 1)
    if not is_drafted.any():
        return np.zeros((num_rows, width))
    if draft.confidence_BG is None:
        raise ValueError(
            f"scheduler={scheduler}: the drafter gives no confidence; allowed: a drafter with confidence=head, peak or "
            "entropy, or scheduler=fixed"
        )
    confidence = draft.confidence_BG.double().cpu().numpy()
    survival: Floats = np.where(is_drafted, confidence, 0.0).astype(np.float64).cumprod(axis=1)
    return survival


def best_first(survival_BG: Floats) -> npt.NDArray[np.int64]:
    """Flat indices of all drafts with a chance, the likeliest first; ties keep the order of rows and positions."""
    flat = survival_BG.ravel()
    order = np.argsort(-flat, kind="stable")
    return order[: int(np.count_nonzero(flat > 0.0))]


def lengths_of(admitted: npt.NDArray[np.int64], shape: tuple[int, int]) -> list[int]:
    """Verify lengths [B] when these flat indices, a prefix of each row, are verified."""
    counts: list[int] = np.bincount(admitted // max(1, shape[1]), minlength=shape[0]).tolist()
    return counts

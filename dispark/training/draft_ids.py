"""Which ids a reduced draft vocabulary holds: those that the training answers use most.

It knows neither drafters nor models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from dispark.training.rows import TrainingRow


def frequent_ids(
    rows: Iterable[TrainingRow], size: int, vocab_size: int, always: Collection[int]
) -> tuple[Tensor, float]:
    """The most frequent ids of the answers, ties to the smaller id, `always` among them.

    Args:
        rows: training rows, none of them held out.
        size: V_draft.
        vocab_size: V, of the target.
        always: ids that must be there: those that end a text.

    Returns:
        (int64 [size] ascending, the share of the answers' tokens that they cover).

    Raises:
        ValueError: more ids than the target has, or fewer than `always`.
    """
    if not len(always) < size <= vocab_size:
        raise ValueError(f"draft_vocab_size={size}: must lie in {len(always) + 1} .. {vocab_size}")
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(row.output_ids)
    ranked = sorted(range(vocab_size), key=lambda token: (token not in always, -counts[token], token))
    chosen = sorted(ranked[:size])
    total = sum(counts.values())
    return torch.tensor(chosen), sum(counts[token] for token in chosen) / max(1, total)

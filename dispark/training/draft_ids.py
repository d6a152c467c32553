"""Which ids a reduced draft vocabulary holds: those that the training answers use most; how much of them any covers.

It knows neither drafters nor models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from dispark.drafters.vocabulary import DraftVocabulary
from dispark.training.rows import TrainingRow


def frequent_ids(rows: Iterable[TrainingRow], size: int, vocab_size: int, always: Collection[int]) -> Tensor:
    """The most frequent ids of the answers, ties to the smaller id, `always` among them.

    Args:
        rows: training rows, none of them held out.
        size: V_draft.
        vocab_size: V, of the target.
        always: ids that must be there: those that end a text.

    Returns:
        int64 [size] ascending.

    Raises:
        ValueError: more ids than the target has, or fewer than `always`.
    """
    if not len(always) < size <= vocab_size:
        raise ValueError(f"draft_vocab_size={size}: must lie in {len(always) + 1} .. {vocab_size}")
    counts = _counts(rows)
    ranked = sorted(range(vocab_size), key=lambda token: (token not in always, -counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def coverage(rows: Iterable[TrainingRow], vocabulary: DraftVocabulary | None) -> float:
    """The share of the answers' tokens that can be drafted."""
    if vocabulary is None:
        return 1.0
    counts = _counts(rows)
    return sum(counts[token] for token in vocabulary.ids.tolist()) / max(1, sum(counts.values()))


def _counts(rows: Iterable[TrainingRow]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for row in rows:
        counts.update(row.output_ids)
    return counts

"""Losses of block drafters against sums written out by hand, and their limits."""

from __future__ import annotations

import math

import pytest
import torch

from dispark.training.block_losses import BlockLossWeights, block_loss, mean_accepted


def test_every_part_by_hand() -> None:
    draft = torch.tensor([[[[2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]]])
    teacher = torch.tensor([[[[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]]]])
    labels, seen = torch.tensor([[[0, 2]]]), torch.tensor([[[True, True]]])
    confidence = torch.tensor([[[0.3, -1.2]]])
    q, p = draft.softmax(-1)[0, 0], teacher.softmax(-1)[0, 0]
    weights = [1.0, math.exp(-0.5)]
    l1 = [float((q[k] - p[k]).abs().sum()) for k in (0, 1)]
    ce = [-math.log(float(q[0, 0])), math.log(3)]
    bce = []
    for k in (0, 1):
        accept, c = 1 - l1[k] / 2, 1 / (1 + math.exp(-float(confidence[0, 0, k])))
        bce.append(-(accept * math.log(c) + (1 - accept) * math.log(1 - c)))

    def mean(values: list[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / (sum(weights) + 1e-6)

    found = block_loss(draft, teacher, labels, seen, confidence, BlockLossWeights(0.2, 0.5, 2.0, 2.0))
    assert float(found.ce) == pytest.approx(mean(ce), rel=1e-5)
    assert float(found.l1) == pytest.approx(mean(l1), rel=1e-5)
    assert float(found.confidence) == pytest.approx(mean(bce), rel=1e-5)
    assert float(found.total) == pytest.approx(0.2 * mean(ce) + 0.5 * mean(l1) + 2 * mean(bce), rel=1e-5)


def test_unsupervised_slots_and_no_slots() -> None:
    draft, teacher = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    labels = torch.zeros(2, 3, 4, dtype=torch.int64)
    seen = torch.rand(2, 3, 4) < 0.5
    base = block_loss(draft, teacher, labels, seen, None, BlockLossWeights())
    changed = torch.where(seen.unsqueeze(-1), draft, torch.full_like(draft, 7.0))
    assert float(block_loss(changed, teacher, labels, seen, None, BlockLossWeights()).total) == float(base.total)
    assert float(base.confidence) == 0
    nothing = block_loss(draft, teacher, labels, torch.zeros_like(seen), None, BlockLossWeights())
    assert float(nothing.total) == 0


def test_the_confidence_target_gets_no_gradient() -> None:
    draft = torch.randn(1, 1, 2, 5, requires_grad=True)
    labels, seen = torch.zeros(1, 1, 2, dtype=torch.int64), torch.ones(1, 1, 2, dtype=torch.bool)
    weights = BlockLossWeights(ce=0.0, l1=0.0, confidence=1.0)
    block_loss(draft, torch.randn(1, 1, 2, 5), labels, seen, torch.zeros(1, 1, 2), weights).total.backward()
    assert draft.grad is not None
    assert not bool(draft.grad.any())


def test_mean_accepted() -> None:
    accept = torch.tensor([[[0.5, 0.5], [1.0, 1.0], [0.9, 0.9]]])
    seen = torch.tensor([[[True, True], [True, False], [False, False]]])
    assert float(mean_accepted(accept, seen)) == pytest.approx(1 + (0.5 + 0.25 + 1.0) / 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"ce": -1.0}, "loss.ce=-1.0"), ({"l1": -0.1}, "loss.l1"), ({"decay": 0.0}, "loss.decay=0.0: must be above 0")],
)
def test_bad_weights(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BlockLossWeights(**settings)

"""Losses of block drafters against sums written out by hand, and their limits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dispark.training.block_losses import BlockLoss, BlockLossWeights, BlockTruth, block_loss, state_distance


def loss_of(
    draft: Tensor, teacher: Tensor, labels: Tensor, seen: Tensor, confidence: Tensor | None, weights: BlockLossWeights
) -> BlockLoss:
    flat = teacher.flatten(0, -2)
    best = teacher.argmax(-1)
    truth = BlockTruth(lambda part: flat[part].softmax(-1), torch.zeros(labels.shape), best, labels, seen)
    return block_loss(draft, truth, confidence, weights)


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

    found = loss_of(draft, teacher, labels, seen, confidence, BlockLossWeights(0.2, 0.5, 2.0, 2.0))
    assert float(found.ce) == pytest.approx(mean(ce), rel=1e-5)
    assert float(found.l1) == pytest.approx(mean(l1), rel=1e-5)
    assert float(found.confidence) == pytest.approx(mean(bce), rel=1e-5)
    assert float(found.total) == pytest.approx(0.2 * mean(ce) + 0.5 * mean(l1) + 2 * mean(bce), rel=1e-5)


def test_unsupervised_slots_and_no_slots() -> None:
    draft, teacher = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    labels = torch.zeros(2, 3, 4, dtype=torch.int64)
    seen = torch.rand(2, 3, 4) < 0.5
    base = loss_of(draft, teacher, labels, seen, None, BlockLossWeights())
    changed = torch.where(seen.unsqueeze(-1), draft, torch.full_like(draft, 7.0))
    assert float(loss_of(changed, teacher, labels, seen, None, BlockLossWeights()).total) == float(base.total)
    assert float(base.confidence) == 0
    nothing = loss_of(draft, teacher, labels, torch.zeros_like(seen), None, BlockLossWeights())
    assert float(nothing.total) == 0


def test_the_confidence_target_gets_no_gradient() -> None:
    draft = torch.randn(1, 1, 2, 5, requires_grad=True)
    labels, seen = torch.zeros(1, 1, 2, dtype=torch.int64), torch.ones(1, 1, 2, dtype=torch.bool)
    weights = BlockLossWeights(ce=0.0, l1=0.0, confidence=1.0)
    loss_of(draft, torch.randn(1, 1, 2, 5), labels, seen, torch.zeros(1, 1, 2), weights).total.backward()
    assert draft.grad is not None
    assert not bool(draft.grad.any())


def test_a_token_that_cannot_be_drafted() -> None:
    """It has no cross entropy, and the target's mass on such tokens adds to the distance."""
    draft, probs = torch.randn(1, 1, 2, 3), torch.tensor([[0.2, 0.3, 0.1], [0.0, 0.5, 0.5]])
    labels, seen = torch.tensor([[[-1, 2]]]), torch.ones(1, 1, 2, dtype=torch.bool)
    best = torch.zeros_like(labels)
    truth = BlockTruth(lambda part: probs[part], torch.tensor([[[0.4, 0.0]]]), best, labels, seen)
    found = block_loss(draft, truth, None, BlockLossWeights(decay=None))
    q = draft[0, 0].softmax(-1)
    l1 = (q - probs).abs().sum(-1) + torch.tensor([0.4, 0.0])
    assert float(found.l1) == pytest.approx(float(l1.mean()), rel=1e-5)
    assert float(found.ce) == pytest.approx(-math.log(float(q[1, 2])), rel=1e-5)
    torch.testing.assert_close(found.accept_BAG[0, 0], torch.minimum(q, probs).sum(-1))


def test_sums_of_other_processes_make_the_mean() -> None:
    draft, teacher = torch.randn(1, 1, 2, 5), torch.randn(1, 1, 2, 5)
    labels, seen = torch.zeros(1, 1, 2, dtype=torch.int64), torch.ones(1, 1, 2, dtype=torch.bool)
    best = teacher.argmax(-1)
    truth = BlockTruth(lambda part: teacher[0, 0][part].softmax(-1), torch.zeros(1, 1, 2), best, labels, seen)
    alone = block_loss(draft, truth, None, BlockLossWeights())
    shared = block_loss(draft, truth, None, BlockLossWeights(), lambda sums: 4 * sums)
    assert float(shared.total) == pytest.approx(float(alone.total) / 4, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ce": 0.0, "l1": 0.0, "confidence": 0.0}, "at least one must be above 0"),
        ({"ce": -1.0}, "loss.ce=-1.0"),
        ({"l1": -0.1}, "loss.l1"),
        ({"decay": 0.0}, "loss.decay=0.0: must be above 0"),
    ],
)
def test_bad_weights(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BlockLossWeights(**settings)


def test_distances_of_states_are_in_units_of_the_true_state() -> None:
    truth = torch.tensor([[[[3.0, -3.0], [0.1, 0.1]]]])  # root mean squares 3 and 0.1
    hidden = torch.tensor([[[[3.0, 0.0], [0.1, 0.4]]]])
    expected = [[0.0, 0.5], [0.0, 3.0 - 0.5]]  # quadratic up to one unit, linear beyond
    torch.testing.assert_close(state_distance(hidden, truth)[0, 0], torch.tensor(expected).mean(-1))


def test_the_state_part_pulls_states_and_nothing_else() -> None:
    hidden = torch.randn(1, 2, 3, 4, requires_grad=True)
    logits = torch.zeros(1, 2, 3, 5, requires_grad=True)
    seen = torch.tensor([[[True, True, False], [True, False, False]]])
    labels = torch.zeros(1, 2, 3, dtype=torch.int64)
    probs = torch.full((6, 5), 0.2)
    truth = BlockTruth(
        lambda part: probs[part], torch.zeros(labels.shape), labels, labels, seen, torch.ones(1, 2, 3, 4)
    )
    weights = BlockLossWeights(ce=0.0, l1=0.0, confidence=0.0, state=2.0, decay=None)
    found = block_loss(logits, truth, None, weights, hidden_BAGD=hidden)
    each = state_distance(hidden, torch.ones(1, 2, 3, 4))
    assert float(found.state) == pytest.approx(float(each[seen].mean().detach()), rel=1e-5)
    assert float(found.total.detach()) == pytest.approx(2 * float(found.state), rel=1e-6)
    found.total.backward()
    assert hidden.grad is not None
    assert bool(hidden.grad[seen].any())
    assert not bool(hidden.grad[~seen].any())
    assert not bool(logits.grad.any())  # type: ignore[union-attr]

"""Closed-form losses and gradients against autograd on the definitions."""

from __future__ import annotations

import pytest
import torch

from dispark.training.distances import SlotWeights, distances

SLOTS, IDS = 70, 11  # more slots than a chunk


def case(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(SLOTS, IDS, generator=generator)).to(dtype)
    whole = (2 * torch.randn(SLOTS, IDS + 3, generator=generator)).softmax(-1)
    labels = torch.randint(-1, IDS, (SLOTS,), generator=generator)
    weights = torch.rand(3, SLOTS, generator=generator)
    return logits, whole[:, :IDS], whole[:, IDS:].sum(-1), labels, weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    logits, probs, outside, labels, weights = case(dtype)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = distances(ours, lambda part: probs[part], outside, probs.argmax(-1), labels, SlotWeights(*weights))
    log_q = theirs.float().log_softmax(-1)
    has_label = labels >= 0
    ce = -log_q.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1) * has_label
    l1 = (log_q.exp() - probs).abs().sum(-1) + outside
    soft = -(probs * log_q).sum(-1)
    total = (weights[0] * ce + weights[1] * l1 + weights[2] * soft).sum()
    for value, wanted in ((found.total, total), (found.ce_S, ce), (found.l1_S, l1), (found.soft_S, soft)):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.accept_S, torch.minimum(log_q.exp(), probs).sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.is_right_S, logits.argmax(-1) == probs.argmax(-1))
    (5 * found.total).backward()
    (5 * total).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert not found.l1_S.requires_grad


def test_nothing_it_is_given_changes() -> None:
    logits, probs, outside, labels, weights = case(torch.float32)
    copies = [value.clone() for value in (logits, probs, outside, labels, weights)]
    distances(
        logits.requires_grad_(), lambda part: probs[part], outside, probs.argmax(-1), labels, SlotWeights(*weights)
    ).total.backward()
    for value, copy in zip((logits, probs, outside, labels, weights), copies, strict=True):
        assert torch.equal(value.detach(), copy)


def test_factors_on_the_targets_probabilities_leave_what_is_accepted() -> None:
    logits, probs, outside, labels, weights = case(torch.float32)
    factors = torch.linspace(0.5, 3, SLOTS)
    best = torch.where(torch.arange(SLOTS) % 3 == 0, -1, probs.argmax(-1))
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = distances(ours, lambda part: probs[part], outside, best, labels, SlotWeights(*weights), factors)
    scaled = probs * factors.unsqueeze(-1)
    wanted = distances(theirs, lambda part: scaled[part], outside, best, labels, SlotWeights(*weights))
    for name in ("total", "ce_S", "l1_S", "soft_S"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    torch.testing.assert_close(found.accept_S, torch.minimum(logits.softmax(-1), probs).sum(-1))
    assert torch.equal(found.is_right_S, logits.argmax(-1) == best)  # nothing is right where the best can't be drafted
    found.total.backward()
    wanted.total.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_without_a_gradient() -> None:
    logits, probs, outside, labels, weights = case(torch.float32)
    found = distances(logits, lambda part: probs[part], outside, probs.argmax(-1), labels, SlotWeights(*weights))
    assert not found.total.requires_grad
    assert float(found.total) > 0

"""Figures between two lines of the log."""

from __future__ import annotations

import pytest
import torch

from dispark.training.students import StudentLoss
from dispark.training.sums import Sums
from dispark.training.world import World


def loss(total: float, accept: list[float], count: list[float]) -> StudentLoss:
    value = torch.tensor(total, requires_grad=True)
    return StudentLoss(value, {"loss": value}, torch.tensor(accept), torch.tensor(accept), torch.tensor(count), 3)


def test_means_over_batches_and_slots() -> None:
    sums = Sums()
    sums.add(loss(2.0, [1.0, 1.0], [2.0, 1.0]))
    sums.add(loss(4.0, [2.0, 0.0], [4.0, 1.0]))
    found = sums.figures(World())
    assert found["loss"] == pytest.approx(3.0)
    assert found["accept_at"] == pytest.approx([0.5, 0.5])
    assert found["expected_matl"] == pytest.approx(1 + 0.5 + 0.25)
    assert sums.num_anchors == 6


def test_a_slot_that_was_never_supervised() -> None:
    sums = Sums()
    sums.add(loss(1.0, [1.0, 0.0], [1.0, 0.0]))
    assert sums.figures(World())["accept_at"] == [1.0, 0.0]

"""Masters, schedule, clipping, averages, and state that goes on exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from dispark.training.optimizer import MasterAdamW, OptimizerSettings


def network(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def one_step(net: nn.Module, optimizer: MasterAdamW, seed: int, factor: float = 1.0) -> float:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(next(net.parameters()).dtype)
    net(inputs).float().square().mean().backward()
    optimizer.gather()
    return optimizer.step(factor)


def test_in_float32_it_is_adamw() -> None:
    ours, theirs = network(), network()
    optimizer = MasterAdamW(ours, torch.float32, 0.01, OptimizerSettings(weight_decay=0.1))
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for seed in range(4):
        one_step(ours, optimizer, seed)
        theirs(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_small_steps_add_up_in_the_masters() -> None:
    net = network()
    optimizer = MasterAdamW(net, torch.bfloat16, 1e-5, OptimizerSettings())
    before = optimizer.masters[0].clone()
    for seed in range(3):
        one_step(net, optimizer, seed)
    assert net.weight.dtype == torch.bfloat16
    assert not torch.equal(before, optimizer.masters[0])
    assert torch.equal(net.weight.float(), optimizer.masters[0].bfloat16().float())


def test_gradients_of_several_batches_add_up() -> None:
    net = network()
    optimizer = MasterAdamW(net, torch.float32, 0.01, OptimizerSettings())
    for _ in range(2):
        net(torch.ones(1, 4)).sum().backward()
        optimizer.gather()
        assert net.weight.grad is None
    torch.testing.assert_close(optimizer.masters[0].grad, torch.full((3, 4), 2.0))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    net = network()
    optimizer = MasterAdamW(net, torch.float32, 0.01, OptimizerSettings())
    before = net.weight.clone()
    net(torch.full((1, 4), float("nan"))).sum().backward()
    optimizer.gather()
    assert not math.isfinite(optimizer.step(1.0))
    assert torch.equal(before, net.weight)


def test_an_average_soon_forgets_what_was_before_training() -> None:
    net = network()
    optimizer = MasterAdamW(net, torch.float32, 0.01, OptimizerSettings(ema=0.999))
    first = optimizer.masters[0].clone()
    wanted = first.clone()
    for step in range(1, 5):
        one_step(net, optimizer, step)
        wanted.lerp_(optimizer.masters[0], 1 - (1 + step) / (10 + step))
    optimizer.use_average(True)
    torch.testing.assert_close(net.weight, wanted)
    assert float((wanted - first).norm()) > 0.3 * float((optimizer.masters[0] - first).norm())


@pytest.mark.parametrize("ema", [None, 0.9])
def test_state_goes_on_exactly(ema: float | None) -> None:
    settings = OptimizerSettings(ema=ema)
    whole, first, second = network(), network(), network(1)
    a, b = (MasterAdamW(net, torch.bfloat16, 0.01, settings) for net in (whole, first))
    for seed in range(6):
        one_step(whole, a, seed)
    for seed in range(3):
        one_step(first, b, seed)
    c = MasterAdamW(second, torch.bfloat16, 0.01, settings)
    c.load({key: value.clone() for key, value in b.state().items()})
    for seed in range(3, 6):
        one_step(second, c, seed)
    for key, value in a.state().items():
        assert torch.equal(value, c.state()[key]), key
    assert torch.equal(whole.weight, second.weight)


def test_the_average_of_the_weights() -> None:
    net = network()
    optimizer = MasterAdamW(net, torch.float32, 0.1, OptimizerSettings(ema=0.1))
    start = net.weight.detach().clone()
    one_step(net, optimizer, 0)
    stepped = net.weight.detach().clone()
    optimizer.use_average(True)
    torch.testing.assert_close(net.weight.detach(), 0.1 * start + 0.9 * stepped)
    optimizer.use_average(False)
    assert torch.equal(net.weight, stepped)


def test_a_state_of_another_network() -> None:
    optimizer = MasterAdamW(network(), torch.float32, 0.1, OptimizerSettings())
    state = optimizer.state()
    with pytest.raises(ValueError, match="not those of this network"):
        optimizer.load({"master/other": state["master/weight"]})
    with pytest.raises(ValueError, match="weight has another shape"):
        optimizer.load({**state, "master/weight": torch.zeros(2, 2)})


def test_schedule() -> None:
    settings = OptimizerSettings(warmup=0.1)
    assert [settings.factor(step, 100) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert settings.factor(10, 100) == 1.0
    assert settings.factor(55, 100) == pytest.approx(0.5)
    assert settings.factor(100, 100) == pytest.approx(0.0)
    assert OptimizerSettings(warmup=0.0, schedule="constant").factor(99, 100) == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schedule": "linear"}, "optimizer.schedule=linear: must be cosine or constant"),
        ({"warmup": 1.5}, "optimizer.warmup=1.5"),
        ({"clip": 0.0}, "optimizer.clip=0.0: must be above 0"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay=-1.0"),
        ({"beta1": 1.0}, "optimizer.beta1=1.0"),
        ({"ema": 2.0}, "optimizer.ema=2.0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OptimizerSettings(**settings)


def test_single_parameters_may_have_a_rate_of_their_own() -> None:
    net, slow, fast = network(), network(), network()
    one_step(net, MasterAdamW(net, torch.float32, 0.01, OptimizerSettings(), {"bias": 0.001}), 1, 0.5)
    one_step(slow, MasterAdamW(slow, torch.float32, 0.001, OptimizerSettings()), 1, 0.5)
    one_step(fast, MasterAdamW(fast, torch.float32, 0.01, OptimizerSettings()), 1, 0.5)
    assert torch.equal(net.weight, fast.weight)
    assert torch.equal(net.bias, slow.bias)
    assert not torch.equal(slow.bias, fast.bias)

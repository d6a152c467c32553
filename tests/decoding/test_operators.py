"""Packed linear layers: close to the stock ones, on and off without a trace, and refused where they can't work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.toolbox import decode_all, make_requests, open_tiny, outputs_of, varied_prompts
from torch import nn

from baselines.autoregressive import AutoregressiveDrafter
from dispark.decoding.operators import LinearPacks, can_pack, choose_linear_backend

HAS_BF16 = can_pack(torch.zeros(1, dtype=torch.bfloat16))
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason="this CPU or build of torch has no oneDNN bfloat16")


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8, bias=False)).to(torch.bfloat16).eval()


@needs_bf16
@pytest.mark.parametrize("num", [1, 2, 8, 65])
@torch.inference_mode()
def test_packed_layers_compute_the_same(num: int) -> None:
    net = make_net()
    inputs = torch.randn(1, num, 64).to(torch.bfloat16)
    exact = net.float()(inputs.float())
    net = make_net()
    stock = net(inputs)
    packs = LinearPacks(net)
    assert torch.equal(net(inputs), stock)  # not before install
    packs.install()
    packed = net(inputs)
    assert packed.dtype == torch.bfloat16
    assert packed.shape == stock.shape
    # No further from the exact result than the stock layers are, up to two roundings.
    bound = 2 * (stock.float() - exact).abs().max() + 2**-7 * exact.abs().max()
    assert (packed.float() - exact).abs().max() <= bound
    assert "forward" in net[0].__dict__
    packs.remove()
    assert all("forward" not in module.__dict__ for module in net.modules())
    assert torch.equal(net(inputs), stock)
    packs.remove()  # once more does no harm
    packs.install()
    assert torch.equal(net(inputs), packed)


@needs_bf16
def test_only_plain_linear_layers_are_packed() -> None:
    class Special(nn.Linear):
        pass

    net = nn.Sequential(nn.Linear(8, 8), Special(8, 8), nn.Embedding(4, 8)).to(torch.bfloat16)
    names = set(net.state_dict())
    LinearPacks(net).install()
    assert ["forward" in module.__dict__ for module in net] == [True, False, False]
    assert set(net.state_dict()) == names


@needs_bf16
def test_a_target_in_bfloat16_packs_by_itself_and_stock_gives_the_model_back() -> None:
    target = open_tiny("tiny", "target.dtype=bfloat16")
    assert target.linear_backend == "onednn"
    linears = [module for module in target.model.modules() if type(module) is nn.Linear]
    assert all("forward" in module.__dict__ for module in linears)
    with target.stock():
        assert all("forward" not in module.__dict__ for module in linears)
    assert all("forward" in module.__dict__ for module in linears)


def test_a_float32_target_stays_stock() -> None:
    target = open_tiny("tiny")
    assert target.linear_backend == "stock"
    assert all("forward" not in module.__dict__ for module in target.model.modules())


@pytest.mark.parametrize("backend", ["stock", pytest.param("onednn", marks=needs_bf16)])
def test_decoding_in_bfloat16(backend: Any) -> None:
    target = open_tiny("tiny", "target.dtype=bfloat16", linear_backend=backend)
    trace = decode_all(target, AutoregressiveDrafter(), make_requests(varied_prompts(3), 6))
    assert all(0 <= token < target.vocab_size for ids in outputs_of(trace).values() for token in ids)


def test_choosing_a_backend() -> None:
    weight = torch.zeros(2, 2)
    assert choose_linear_backend("auto", weight) == "stock"
    assert choose_linear_backend("stock", weight.bfloat16()) == "stock"
    assert choose_linear_backend("auto", weight.bfloat16()) == ("onednn" if HAS_BF16 else "stock")
    with pytest.raises(
        ValueError, match=r"target.linear_backend=onednn: needs bfloat16 .*float32 on cpu; allowed here"
    ):
        choose_linear_backend("onednn", weight)
    with pytest.raises(ValueError, match=r"target.linear_backend=mkl: must be auto, stock or onednn"):
        choose_linear_backend("mkl", weight)  # type: ignore[arg-type]
    assert not can_pack(torch.zeros(1, dtype=torch.bfloat16, device="meta"))

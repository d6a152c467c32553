"""Faster operators for stock modules, chosen by device and dtype, installed on instances and removable.

On CPUs with bfloat16 instructions, `nn.Linear` reads its weight in the layout it happens to have on every call; oneDNN
reads a weight that was reordered once about twice as fast for a few tokens. `pack_linears` gives each linear layer of a
model such a forward. The modules, their parameters and their names stay what they are.

It does not know what the model is for.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

LinearBackend = Literal["auto", "stock", "onednn"]
_PACK_TOKENS = 8  # the batch for which oneDNN picks its layout; measured flat from 1 to 64


def can_pack(weight: Tensor) -> bool:
    """Whether this machine packs such a weight: bfloat16 on a CPU whose oneDNN supports it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def choose_linear_backend(requested: LinearBackend, weight: Tensor) -> Literal["stock", "onednn"]:
    """Resolves "auto".

    Raises:
        ValueError: "onednn" was asked for where it can't work, or the name is unknown.
    """
    if requested not in ("auto", "stock", "onednn"):
        raise ValueError(f"target.linear_backend={requested}: must be auto, stock or onednn")
    if requested == "stock":
        return "stock"
    if can_pack(weight):
        return "onednn"
    if requested == "onednn":
        raise ValueError(
            f"target.linear_backend=onednn: needs bfloat16 on a CPU with oneDNN bfloat16 support, "
            f"but the weights are {weight.dtype} on {weight.device}; allowed here: auto, stock"
        )
    return "stock"


class _PackedForward:
    """A linear layer's forward over a weight reordered for oneDNN."""

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACK_TOKENS)
        self._bias = linear.bias

    def __call__(self, inputs: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self._bias, "none", [], "")


class LinearPacks:
    """The packed forwards of a model's linear layers; they cost a second copy of the weights.

    Args:
        model: any module; its `nn.Linear` layers are packed now and used once `install` is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forwards = {module: _PackedForward(module) for module in model.modules() if type(module) is nn.Linear}

    def install(self) -> None:
        for linear, forward in self._forwards.items():
            setattr(linear, "forward", forward)  # noqa: B010 - an instance attribute shadows the method

    def remove(self) -> None:
        for linear in self._forwards:
            linear.__dict__.pop("forward", None)

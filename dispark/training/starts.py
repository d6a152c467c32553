"""Block-parallel drafters that start from the target's own layers instead of random weights.

Draft layers are copies of target layers, and the context starts as what the first of them reads in the target: the
tapped layer right before it, with its input norm. Its keys and values are then the target's own from the first step on,
so that heads which attend to the previous token, or to what followed an earlier occurrence of the anchor, need not be
found anew; the other tapped layers come in as training finds a use for them.

It knows neither losses nor optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispark.decoding.target import TargetModel
from dispark.drafters.network import BlockNetwork


def start_from_target(network: BlockNetwork, target: TargetModel, layers: Sequence[int]) -> None:
    """Overwrites draft layers, both norms and the context projection.

    Args:
        network: float32 and fresh.
        target: of the network's family.
        layers: a target layer for each draft layer.

    Raises:
        ValueError: not so many layers, one that the target lacks, or one of another shape than the drafter's.
    """
    setting = f"start_layers={list(layers)}"
    if len(layers) != len(network.layers):
        raise ValueError(f"{setting}: must name {len(network.layers)} layers of the target, one for each draft layer")
    for layer in layers:
        if not 0 <= layer < target.num_layers:
            raise ValueError(f"{setting}: target {target.name} has layers 0 .. {target.num_layers - 1}")
    stock: Any = target.model.get_decoder()
    sources = [stock.layers[layer] for layer in layers]
    for layer, own, source in zip(layers, network.layers, sources, strict=True):
        theirs = source.state_dict()
        shapes = {key: value.shape for key, value in own.state_dict().items()}
        if shapes != {key: value.shape for key, value in theirs.items()}:
            raise ValueError(f"{setting}: layer {layer} of target {target.name} has other shapes than the drafter's")
        own.load_state_dict({key: value.detach().float() for key, value in theirs.items()})
    taps = network.config.feature_layers
    nearest = min(range(len(taps)), key=lambda i: abs(taps[i] - (layers[0] - 1)))
    width = network.config.layers.hidden_size
    with torch.no_grad():
        network.norm.load_state_dict({key: value.detach().float() for key, value in stock.norm.state_dict().items()})
        network.hidden_norm.load_state_dict(
            {key: value.detach().float() for key, value in sources[0].input_layernorm.state_dict().items()}
        )
        network.fc.weight.zero_()
        network.fc.weight[:, nearest * width : (nearest + 1) * width].fill_diagonal_(1.0)

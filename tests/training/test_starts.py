"""Drafters that start from target layers: their context keys and values are the target's own."""

from __future__ import annotations

import pytest
import torch
from conformance.toolbox import open_tiny

from dispark.decoding.target import TargetModel
from dispark.drafters.network import BlockNetwork
from dispark.drafters.semi_autoregressive import BlockShape, SemiAutoregressiveDrafter
from dispark.training.starts import start_from_target

TEXT = [5, 9, 33, 71, 2, 9, 33, 120, 64]


def started(target: TargetModel, layers: list[int], taps: list[int], num_layers: int = 2) -> BlockNetwork:
    shape = BlockShape(num_layers=num_layers, rank=4, feature_layers=taps)
    network = SemiAutoregressiveDrafter(random=shape).start(target)
    start_from_target(network, target, layers)
    return network


@pytest.mark.parametrize("family", ["tiny", "tiny_qwen3", "tiny_gemma3"])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_context_is_what_the_target_layer_reads(family: str, layer: int) -> None:
    target = open_tiny(family)
    network = started(target, [layer, layer + 1], [0, 1, 2])
    target.open(1, len(TEXT), network.config.feature_layers)
    _, features = target.prefill([0], [TEXT])
    assert features.hidden_NF is not None
    attention = target.model.get_decoder().layers[layer].self_attn
    seen = []
    handle = attention.v_proj.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    target.open(1, len(TEXT))
    target.prefill([0], [TEXT])
    handle.remove()
    with torch.no_grad():
        values = network.stock.context_keys_values(network.context(features.hidden_NF), torch.arange(len(TEXT)))[0][1]
    own = values.transpose(0, 1).flatten(1)
    torch.testing.assert_close(own, seen[0].view_as(own), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(
        network.layers[0].parameters(), target.model.get_decoder().layers[layer].parameters(), strict=True
    ):
        assert torch.equal(mine, theirs.float())
        assert mine.data_ptr() != theirs.data_ptr()


def test_the_nearest_tapped_layer_stands_in_for_one_that_is_not_tapped() -> None:
    network = started(open_tiny(), [3], [0, 1], num_layers=1)
    width = network.config.layers.hidden_size
    assert torch.equal(network.fc.weight, torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([1], r"start_layers=\[1\]: must name 2 layers of the target, one for each draft layer"),
        ([1, 4], r"start_layers=\[1, 4\]: target tiny has layers 0 .. 3"),
        ([-1, 1], r"start_layers=\[-1, 1\]: target tiny has layers 0 .. 3"),
    ],
)
def test_layers_that_do_not_fit(layers: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        started(open_tiny(), layers, [0, 1])


def test_layers_of_another_shape() -> None:
    target = open_tiny()
    network = SemiAutoregressiveDrafter(random=BlockShape(num_layers=1, rank=4)).start(target)
    network.layers[0].mlp.up_proj.weight.data = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="layer 2 of target tiny has other shapes than the drafter's"):
        start_from_target(network, target, [2])

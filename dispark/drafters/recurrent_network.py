"""Networks of feature-recurrent drafters: one step makes a hidden state of a token embedding and the state before it.

All of them mix the two, run stock layers of the target's family over the result, and read draft logits off the output;
they differ in how they mix, in what recurs and in what the head reads. A method says so in a subclass. The first states
are features of the target, projected to the network's width. The same object serves decoding and training.

It knows nothing of checkpoints, rows, caches, rounds and sampling.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dispark.drafters.layers import StockLayers


class RecurrentNetwork(nn.Module):
    """The trainable parts of one method; embedding and head stay outside. States have any leading dimensions.

    Args:
        config: stock config of the layers, see layers.py.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        stock = StockLayers(config, has_final_norm=False)
        self.layers = stock.layers
        self._stock = [stock]  # in a list: its parts are registered above, under the checkpoint's names

    @property
    def stock(self) -> StockLayers:
        return self._stock[0]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._stock[0]._apply(fn)  # moves the rotary frequencies; the rest is shared and moved already
        return self

    def project(self, features: Tensor) -> Tensor:
        """[..., D] states of [..., F] target features."""
        return features

    def mix(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[..., D] inputs of the layers, of token embeddings [..., D] and states [..., D]."""
        raise NotImplementedError

    def recur(self, outputs: Tensor) -> Tensor:
        """[..., D] the states that the next step takes, of the layers' outputs."""
        return outputs

    def read(self, hidden: Tensor) -> Tensor:
        """[..., D] what the LM head reads, of such states."""
        return hidden

    def forward(self, embedded_BTD: Tensor, hidden_BTD: Tensor, position_BT: Tensor, **attention: Any) -> Tensor:
        """One step of every position: the next states, [B, T, D]; `attention` goes to the attention function."""
        return self.recur(self.stock(self.mix(embedded_BTD, hidden_BTD), position_BT, **attention))

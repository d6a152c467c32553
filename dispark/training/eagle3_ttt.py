"""Training-time test of feature-recurrent drafters: a training forward that drafts as decoding does (Eagle-3).

Step 0 sees the target's features of the text; every later step takes the states of the step before, as drafting will.
At step s position i is fed the token at i + 1 + s, at rotary position i + s, and sees what it would in decoding: the
text's pairs up to itself (step 0) and, of every later step, its own. Tokens are the text's own (teacher forcing).

It knows neither data nor optimizers, and works on the network that decodes. What is done with the states:
recurrent_student.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dispark.drafters.recurrent_network import RecurrentNetwork
from dispark.training.attention import TRAIN_ATTENTION, ChainCall
from dispark.training.blocks import Ends


@dataclass(frozen=True)
class TttBatch:
    """Sequences, right-padded.

    Args:
        tokens_BT: int64.
        is_real_BT: bool, false on padding.
        loss_mask_BT: bool, true where a token may be supervised.
        features_BTF: tapped target states, in the drafter's `feature_layers` order.
    """

    tokens_BT: Tensor
    is_real_BT: Tensor
    loss_mask_BT: Tensor
    features_BTF: Tensor


def shift_left(values: Tensor, num: int, fill: float = 0) -> Tensor:
    """[B, T, ...] moved `num` positions to the left, `fill` behind."""
    moved = torch.full_like(values, fill)
    if num < values.shape[1]:
        moved[:, : values.shape[1] - num] = values[:, num:]
    return moved


def ttt_states(
    network: RecurrentNetwork, ends: Ends, batch: TttBatch, num_steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens that were fed [B, T], states [B, T, D]) of one step after another; gradients flow through all of them,
    keys and values of earlier ones included. Positions whose text has ended, and padding, give no meaning.

    The network is left with the attention function it had.
    """
    num_positions = batch.tokens_BT.shape[1]
    position_BT = torch.arange(num_positions, device=batch.tokens_BT.device).expand_as(batch.tokens_BT)
    hidden_BTD = network.project(batch.features_BTF)
    call = ChainCall()
    before = network.stock.config._attn_implementation
    for s in range(num_steps):
        tokens_BT = shift_left(batch.tokens_BT, s + 1)
        network.stock.use_attention(TRAIN_ATTENTION)
        try:
            hidden_BTD = network(ends.embed(tokens_BT), hidden_BTD, position_BT + s, call=call)
        finally:
            network.stock.use_attention(before)
        yield tokens_BT, hidden_BTD


def supervised(batch: TttBatch, step: int) -> Tensor:
    """bool [B, T]: positions whose draft at `step` is supervised, which is the loss mask without each sequence's last
    real token, moved along."""
    is_last_BT = batch.is_real_BT & ~shift_left(batch.is_real_BT, 1)
    return shift_left(batch.loss_mask_BT & batch.is_real_BT & ~is_last_BT, step)

"""Training forward of block-parallel drafters: many anchors a sequence, each with a block of its own.

A block's slots see the context strictly before their anchor and their own block in both directions, which is what they
see in decoding. Previous tokens of the sequential head are the text's own (teacher forcing). DSpark, Cheng et al. 2026,
section 3; conventions as in DeepSpec's code.

It knows neither data nor optimizers: see block_losses.py for what is done with the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dispark.drafters.network import BlockNetwork
from dispark.training.attention import TRAIN_ATTENTION, BlockCall


@dataclass(frozen=True)
class BlockBatch:
    """Sequences with their anchors.

    Args:
        tokens_BT: int64, right-padded.
        features_BTF: tapped target states, in the drafter's `feature_layers` order.
        loss_mask_BT: bool, true where a token may be supervised.
        anchors_BA: int64 positions.
        is_real_BA: bool, false for anchors that only fill the shape.
    """

    tokens_BT: Tensor
    features_BTF: Tensor
    loss_mask_BT: Tensor
    anchors_BA: Tensor
    is_real_BA: Tensor


@dataclass(frozen=True)
class BlockOutput:
    """What a training forward gives, for G drafting slots a block.

    Args:
        hidden_BAGD: final hidden states.
        base_BAGV: base logits.
        logits_BAGV: corrected by the head, with the text's own previous tokens.
        confidence_BAG: float32 logits of the confidence head, or None.
        labels_BAG: int64 the token each slot should draft, as a target id.
        positions_BAG: int64 positions of the labels, cut to the sequence.
        is_supervised_BAG: bool: a real anchor, a label inside the sequence and the loss mask, and so all slots before.
    """

    hidden_BAGD: Tensor
    base_BAGV: Tensor
    logits_BAGV: Tensor
    confidence_BAG: Tensor | None
    labels_BAG: Tensor
    positions_BAG: Tensor
    is_supervised_BAG: Tensor


def labels_of(batch: BlockBatch, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """(labels, their positions, supervision), each [B, A, num_slots]; the first label follows the anchor."""
    length = batch.tokens_BT.shape[1]
    steps = torch.arange(1, num_slots + 1, device=batch.tokens_BT.device)
    wanted_BAG = batch.anchors_BA.unsqueeze(-1) + steps
    positions_BAG = wanted_BAG.clamp(max=length - 1)
    flat = positions_BAG.flatten(1)
    labels_BAG = batch.tokens_BT.gather(1, flat).view_as(positions_BAG)
    is_allowed = batch.loss_mask_BT.gather(1, flat).view_as(positions_BAG) & (wanted_BAG < length)
    is_allowed &= batch.is_real_BA.unsqueeze(-1)
    return labels_BAG, positions_BAG, is_allowed.int().cumprod(-1).bool()


class Ends(Protocol):
    """A target's embedding and head: those that decode (network.py) or those that train (ends.py)."""

    def embed(self, tokens: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def forward_blocks(network: BlockNetwork, ends: Ends, batch: BlockBatch) -> BlockOutput:
    """Runs every block of every sequence in one call; what blocks of unreal anchors give means nothing.

    The network is left with the attention function it had.
    """
    size = network.config.block_size
    count, num = batch.anchors_BA.shape
    length = batch.tokens_BT.shape[1]
    context_BTD = network.context(batch.features_BTF)
    position_T = torch.arange(length, device=batch.tokens_BT.device)
    kept = network.stock.context_keys_values(context_BTD.flatten(0, 1), position_T.repeat(count))
    past = {i: (_by_sequence(keys, count), _by_sequence(values, count)) for i, (keys, values) in enumerate(kept)}
    anchor_tokens = batch.tokens_BT.gather(1, batch.anchors_BA).flatten()
    inputs = ends.embed(network.block_tokens(anchor_tokens)).view(count, num * size, -1)
    steps = torch.arange(size, device=batch.tokens_BT.device)
    position_BM = (batch.anchors_BA.unsqueeze(-1) + steps).flatten(1)
    call = BlockCall(past, batch.anchors_BA, size)
    before = network.stock.config._attn_implementation
    network.stock.use_attention(TRAIN_ATTENTION)
    try:
        hidden = network.stock(inputs, position_BM, call=call)
    finally:
        network.stock.use_attention(before)
    hidden_BAGD = network.predicting(hidden.view(count, num, size, -1))
    labels, positions, supervised = labels_of(batch, hidden_BAGD.shape[2])
    previous = torch.cat([anchor_tokens.view(count, num, 1), labels[..., :-1]], dim=-1)
    base = ends.logits(hidden_BAGD)
    logits = base
    if network.markov_head is not None:
        flat = network.markov_head(base.flatten(0, 1), hidden_BAGD.flatten(0, 1), previous.flatten(0, 1))
        logits = flat.view_as(base)
    return BlockOutput(
        hidden_BAGD=hidden_BAGD,
        base_BAGV=base,
        logits_BAGV=logits,
        confidence_BAG=network.confidence_logits(hidden_BAGD, previous),
        labels_BAG=labels,
        positions_BAG=positions,
        is_supervised_BAG=supervised,
    )


def _by_sequence(states_HME: Tensor, count: int) -> Tensor:
    """[H, B * T, E] -> [B, H, T, E]."""
    heads, tokens, width = states_HME.shape
    return states_HME.view(heads, count, tokens // count, width).transpose(0, 1)

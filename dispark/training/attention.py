"""Attention for training forwards of stock layers.

Registered with transformers as `dispark_train`: stock layers call it with an object that says what attends to what,
which travels as the keyword `call`. `BlockCall` is for blocks of drafts that see the context before their anchor and
themselves, `ChainCall` for a token at a time on top of a text; both compute little more than what is seen. Gradients
flow through all keys and values.

It does not know what is being trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

TRAIN_ATTENTION = "dispark_train"
_GROUP = 16  # blocks that share one visible stretch of context

KeysValues = dict[int, tuple[Tensor, Tensor]]


class AttentionCall(Protocol):
    """Attends for one layer of a forward."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[B, H, Q, head_dim] of query [B, H, Q, head_dim], key and value [B, H_kv, Q, head_dim]."""


@dataclass
class ChainCall:
    """One step of a training-time test: position i sees the text's keys up to i, and its own keys of later steps.

    Args:
        text: by layer (keys, values) of step 0, each [B, H_kv, T, head_dim]; empty at step 0, which fills it.
        own: by layer those of steps 1, 2, ..., to which the call adds.
    """

    text: KeysValues = field(default_factory=dict)
    own: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See AttentionCall."""
        groups = query.shape[1] // key.shape[1]
        if layer not in self.text:
            self.text[layer] = (key, value)
            keys, values = (states.repeat_interleave(groups, dim=1) for states in (key, value))
            return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
        own = self.own.setdefault(layer, [])
        own.append((key, value))
        keys, values = self.text[layer]
        num = query.shape[2]
        q = query.unflatten(1, (-1, groups)) * scaling  # [B, H_kv, groups, T, E]
        scores = q @ keys.unsqueeze(2).transpose(-1, -2)
        is_hidden = torch.ones(num, num, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(is_hidden, float("-inf"))
        later = [(q * k.unsqueeze(2)).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat([scores, *later], dim=-1).softmax(-1, dtype=torch.float32).to(query.dtype)
        out = weights[..., :num] @ values.unsqueeze(2)
        for j, (_, v) in enumerate(own):
            out = out + weights[..., num + j : num + j + 1] * v.unsqueeze(2)
        return out.flatten(1, 2)


@dataclass(frozen=True)
class BlockCall:
    """Blocks of `size` queries, A a sequence: each sees the context before its anchor, and itself in both directions.

    Blocks go in groups, in the order given: a group's context ends at its last anchor, so ascending anchors save most.

    Args:
        past: the context's (keys, values) by layer, each [B, H_kv, T, head_dim].
        anchors_BA: int64 positions in the context.
        size: queries of a block.
    """

    past: KeysValues
    anchors_BA: Tensor
    size: int

    @cached_property
    def _groups(self) -> list[tuple[slice, int, Tensor]]:
        """(queries, context tokens, bool mask [B, Q, context + Q]) of each group."""
        num, device = self.anchors_BA.shape[1], self.anchors_BA.device
        found = []
        for low in range(0, num, _GROUP):
            anchors_BA = self.anchors_BA[:, low : low + _GROUP]
            length = int(anchors_BA.max())
            context_BAT = torch.arange(length, device=device) < anchors_BA.unsqueeze(-1)
            block = torch.arange(anchors_BA.shape[1], device=device).repeat_interleave(self.size)
            context_BQT = context_BAT.repeat_interleave(self.size, dim=1)
            own_BQQ = (block[:, None] == block[None, :]).expand(len(anchors_BA), -1, -1)
            queries = slice(low * self.size, low * self.size + len(block))
            found.append((queries, length, torch.cat([context_BQT, own_BQQ], dim=-1)))
        return found

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See AttentionCall."""
        keys, values = self.past[layer]
        groups = query.shape[1] // key.shape[1]
        outputs = []
        for queries, length, mask_BQK in self._groups:
            # Query heads that share a key head become queries of it, so that keys and values are not repeated.
            q = query[:, :, queries].unflatten(1, (-1, groups)).flatten(2, 3)
            out = F.scaled_dot_product_attention(
                q,
                torch.cat([keys[:, :, :length], key[:, :, queries]], dim=2),
                torch.cat([values[:, :, :length], value[:, :, queries]], dim=2),
                attn_mask=mask_BQK.repeat(1, groups, 1).unsqueeze(1),
                scale=scaling,
            )
            outputs.append(out.unflatten(2, (groups, -1)).flatten(1, 2))
        return torch.cat(outputs, dim=2)


def train_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    call: AttentionCall,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hands over to the call.

    Args:
        module: the calling attention layer; gives `layer_idx`.
        query: [B, H, Q, head_dim]; key and value: [B, H_kv, Q, head_dim].
        attention_mask: unused.
        call: says what attends to what.
        scaling: factor on the scores.
        dropout: must be 0, as in the published recipes.

    Returns:
        ([B, Q, H, head_dim], None).
    """
    assert dropout == 0.0
    return call.attend(module.layer_idx, query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(TRAIN_ATTENTION, train_attention)

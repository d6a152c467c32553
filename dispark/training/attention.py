"""Attention with a mask of any shape, for training forwards of stock layers.

Registered with transformers as `dispark_dense`: stock layers call it with a `DenseCall`, which travels as the keyword
`dense`. It attends to given keys and values (a context, or what earlier steps left) beside the call's own and keeps the
latter, so that a next step can attend to them. Gradients flow through all of them.

It does not know what is being trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

DENSE_ATTENTION = "dispark_dense"


@dataclass
class DenseCall:
    """One forward.

    Args:
        mask_BQK: bool, true where query q may see key k; keys are the past's, then the call's own.
        past: by layer (keys, values), each [B, H_kv, K, head_dim].
        own: filled by the call, likewise.
    """

    mask_BQK: Tensor
    past: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def dense_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dense: DenseCall,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Softmax attention under the call's mask; a query that sees nothing gives zeros.

    Args:
        module: the calling attention layer; gives `layer_idx`.
        query: [B, H, Q, head_dim]; key and value: [B, H_kv, Q, head_dim].
        attention_mask: unused.
        dense: the call.
        scaling: factor on the scores.
        dropout: of the attention weights.

    Returns:
        ([B, Q, H, head_dim], None).
    """
    dense.own[module.layer_idx] = (key, value)
    if module.layer_idx in dense.past:
        past_keys, past_values = dense.past[module.layer_idx]
        key, value = torch.cat([past_keys, key], dim=2), torch.cat([past_values, value], dim=2)
    is_blind_BQ = ~dense.mask_BQK.any(-1)
    mask_BQK = dense.mask_BQK | is_blind_BQ.unsqueeze(-1)  # softmax over nothing would be NaN
    groups = query.shape[1] // key.shape[1]
    out = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(groups, dim=1),
        value.repeat_interleave(groups, dim=1),
        attn_mask=mask_BQK.unsqueeze(1),
        dropout_p=dropout,
        scale=scaling,
    )
    out = out.masked_fill(is_blind_BQ[:, None, :, None], 0.0)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(DENSE_ATTENTION, dense_attention)

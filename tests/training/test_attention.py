"""Attention calls of training against one dense softmax under the mask that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from dispark.training.attention import BlockCall, ChainCall

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def states(heads: int, num: int, seed: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, heads, num, WIDTH, generator=torch.Generator().manual_seed(seed))


def dense(query: Tensor, key: Tensor, value: Tensor, mask_BQK: Tensor, scaling: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * scaling
    scores = scores.masked_fill(~mask_BQK.unsqueeze(1), float("-inf"))
    return scores.softmax(-1) @ value.repeat_interleave(groups, dim=1)


def test_blocks_see_the_context_before_their_anchor_and_themselves() -> None:
    length, size = 30, 3
    # More blocks than one group, an anchor at the very start, and rows whose anchors differ.
    anchors = torch.stack([torch.arange(0, 20), torch.arange(10, 30)])
    num = anchors.shape[1] * size
    context = states(KEY_HEADS, length, 1), states(KEY_HEADS, length, 2)
    query, key, value = states(HEADS, num, 3), states(KEY_HEADS, num, 4), states(KEY_HEADS, num, 5)
    mask = torch.zeros(2, num, length + num, dtype=torch.bool)
    for row in range(2):
        for q in range(num):
            block = q // size
            mask[row, q, : int(anchors[row, block])] = True
            mask[row, q, length + block * size : length + (block + 1) * size] = True
    wanted = dense(query, torch.cat([context[0], key], 2), torch.cat([context[1], value], 2), mask, 0.3)
    found = BlockCall({7: context}, anchors, size).attend(7, query, key, value, 0.3)
    torch.testing.assert_close(found, wanted)


def test_a_chain_sees_the_text_before_it_and_its_own_later_steps() -> None:
    length, call = 6, ChainCall()
    keys: list[Tensor] = []
    values: list[Tensor] = []
    causal = torch.ones(length, length).tril().bool()
    for step in range(3):
        query, key, value = (states(h, length, 10 * step + i) for i, h in enumerate((HEADS, KEY_HEADS, KEY_HEADS)))
        keys.append(key), values.append(value)
        mask = torch.cat([causal] + [torch.eye(length).bool()] * step, dim=1).expand(2, -1, -1)
        wanted = dense(query, torch.cat(keys, 2), torch.cat(values, 2), mask, 0.3)
        for layer in (0, 1):
            found = call.attend(layer, query, key, value, 0.3)
            torch.testing.assert_close(found, wanted)


def test_gradients_flow_to_what_was_seen_and_nowhere_else() -> None:
    key, value = states(KEY_HEADS, 4, 1, 1).requires_grad_(), states(KEY_HEADS, 4, 2, 1)
    own = states(KEY_HEADS, 2, 3, 1), states(KEY_HEADS, 2, 4, 1)
    out = BlockCall({0: (key, value)}, torch.tensor([[2]]), 2).attend(0, states(HEADS, 2, 5, 1), *own, 0.3)
    out.square().sum().backward()
    assert key.grad is not None
    assert bool(key.grad[:, :, :2].any(-1).all())
    assert not bool(key.grad[:, :, 2:].any())

"""Packed attention against one dot product at a time, over random layouts, windows, head groups and paddings."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface

from dispark.decoding.attention import PACKED_ATTENTION, Plan, make_plan, packed_attention
from dispark.decoding.ragged_cache import RaggedCache

CPU = torch.device("cpu")
SLOTS, WIDTH = 24, 4


@dataclass
class Layout:
    """Rows with kept tokens, in storage order, and the new tokens of a call, in any order."""

    cache: RaggedCache
    kept: dict[int, Tensor]
    rows: list[int]
    lengths: list[int]


def make_layout(starts: list[int], order: list[int], lengths: list[int], kv_heads: int, seed: int) -> Layout:
    """`starts[i]` random tokens are kept of row i; the call names the rows as in `order`."""
    generator = torch.Generator().manual_seed(seed)
    cache = RaggedCache(len(starts) + 1, SLOTS)
    for row in range(len(starts)):
        cache.admit(row)
    kept = {}
    for row, num in enumerate(starts):
        # Twice as many as are kept: what is rolled back must not be seen.
        written = torch.randn(2, kv_heads, min(2 * num + 1, SLOTS), WIDTH, generator=generator)
        plan = make_plan(cache, [row], [written.shape[2]], CPU, max_waste=0.0)
        cache.write(0, plan.write_index(kv_heads), written[0], written[1])
        cache.set_length(row, num)
        kept[row] = written[:, :, :num]
    return Layout(cache, kept, order, lengths)


def slow_attention(
    layout: Layout, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, is_causal: bool
) -> Tensor:
    """[N, H, E] in float64, token by token and head by head."""
    groups = query.shape[1] // key.shape[1]
    out = torch.zeros(query.shape[2], query.shape[1], WIDTH, dtype=torch.float64)
    first = 0
    for row, num in zip(layout.rows, layout.lengths, strict=True):
        keys = torch.cat([layout.kept[row][0], key[0, :, first : first + num]], dim=1).double()
        values = torch.cat([layout.kept[row][1], value[0, :, first : first + num]], dim=1).double()
        start = layout.kept[row].shape[2]
        for step in range(num):
            end = start + (step + 1 if is_causal else num)
            begin = 0 if window is None else max(0, end - window)
            for head in range(query.shape[1]):
                scores = keys[head // groups, begin:end] @ query[0, head, first + step].double() * scaling
                out[first + step, head] = scores.softmax(0) @ values[head // groups, begin:end]
        first += num
    return out


layouts = st.integers(1, 4).flatmap(
    lambda num: st.tuples(
        st.lists(st.integers(0, 12), min_size=num, max_size=num),
        st.permutations(range(num)).flatmap(lambda order: st.integers(1, num).map(lambda k: list(order)[:k])),
        st.lists(st.integers(1, 8), min_size=num, max_size=num),
    )
)


@given(
    layout=layouts,
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 3, 8, 100]),
    max_waste=st.sampled_from([0.0, 30.0, float("inf")]),
    token_bucket=st.sampled_from([None, 1, 8]),
    slot_bucket=st.sampled_from([None, 5, 16]),
    is_in_storage_order=st.booleans(),
    is_causal=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_every_token_sees_its_own_row_up_to_itself_or_the_block_s_end(
    layout: tuple[list[int], list[int], list[int]],
    heads: tuple[int, int],
    window: int | None,
    max_waste: float,
    token_bucket: int | None,
    slot_bucket: int | None,
    is_in_storage_order: bool,
    is_causal: bool,
) -> None:
    starts, order, lengths = layout
    order = sorted(order) if is_in_storage_order else order
    num_heads, kv_heads = heads
    made = make_layout(starts, order, lengths[: len(order)], kv_heads, seed=len(starts))
    plan = make_plan(
        made.cache,
        order,
        made.lengths,
        CPU,
        max_waste=max_waste,
        token_bucket=token_bucket,
        slot_bucket=slot_bucket,
        is_causal=is_causal,
    )
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(1, num_heads, plan.num_tokens, WIDTH, generator=generator)
    key = torch.randn(1, kv_heads, plan.num_tokens, WIDTH, generator=generator)
    value = torch.randn(1, kv_heads, plan.num_tokens, WIDTH, generator=generator)
    layer = SimpleNamespace(layer_idx=0)
    found, weights = packed_attention(layer, query, key, value, None, packed=plan, scaling=0.7, sliding_window=window)
    assert weights is None
    assert found.shape == (1, plan.num_tokens, num_heads, WIDTH)
    assert torch.isfinite(found).all()
    num_real = sum(made.lengths)
    expected = slow_attention(made, query[:, :, :num_real], key, value, 0.7, window, is_causal)
    torch.testing.assert_close(found[0, :num_real].double(), expected, atol=1e-5, rtol=1e-5)


@given(layout=layouts, max_waste=st.sampled_from([0.0, 30.0, float("inf")]))
@settings(max_examples=80, deadline=None)
def test_a_plan_covers_each_token_once(layout: tuple[list[int], list[int], list[int]], max_waste: float) -> None:
    starts, order, lengths = layout
    made = make_layout(starts, order, lengths[: len(order)], 1, seed=0)
    plan = make_plan(made.cache, order, made.lengths, CPU, max_waste=max_waste)
    assert plan.num_tokens == sum(made.lengths)
    expected = [starts[row] + step for row, num in zip(order, made.lengths, strict=True) for step in range(num)]
    assert plan.position_N.tolist() == expected
    assert plan.place_N.tolist() == [row for row, num in zip(order, made.lengths, strict=True) for _ in range(num)]
    assert [segment.first_token for segment in plan.segments] == np.cumsum(
        [0, *(segment.num_tokens for segment in plan.segments)]
    ).tolist()[:-1]
    assert sum(segment.num_tokens for segment in plan.segments) == plan.num_tokens
    assert sum(segment.num_rows for segment in plan.segments) == len(order)
    waste = sum(
        (segment.num_rows * segment.num_queries - segment.num_tokens) * segment.num_slots for segment in plan.segments
    )
    if max_waste == 0.0:
        assert waste == 0


def plan_of(starts: list[int], lengths: list[int], max_waste: float, **buckets: int) -> Plan:
    made = make_layout(starts, list(range(len(starts))), lengths, 1, seed=0)
    return make_plan(made.cache, made.rows, lengths, CPU, max_waste=max_waste, **buckets)


def test_rows_of_one_length_share_a_segment_and_a_long_one_gets_its_own() -> None:
    shapes = [(s.num_rows, s.num_queries) for s in plan_of([3, 9, 1], [2, 2, 2], 0.0).segments]
    assert shapes == [(3, 2)]
    shapes = [(s.num_rows, s.num_queries) for s in plan_of([3, 3, 3, 3], [1, 8, 1, 1], 20.0).segments]
    assert shapes == [(1, 1), (1, 8), (2, 1)]
    shapes = [(s.num_rows, s.num_queries) for s in plan_of([3, 3, 3, 3], [1, 8, 1, 1], float("inf")).segments]
    assert shapes == [(4, 8)]


def test_single_tokens_over_equal_rows_need_no_mask() -> None:
    equal, ragged = plan_of([5, 5], [1, 1], 0.0), plan_of([5, 6], [1, 1], 0.0)
    assert equal.mask(0, None, 1, torch.float32) is None
    assert equal.mask(0, 6, 1, torch.float32) is None  # the window covers all six slots
    assert equal.mask(0, 5, 1, torch.float32) is not None
    assert ragged.mask(0, None, 1, torch.float32) is not None
    assert ragged.mask(0, None, 1, torch.float32) is ragged.mask(0, None, 1, torch.float32)  # made once


def test_buckets_round_up_and_padding_goes_to_the_spare_row() -> None:
    plan = plan_of([3, 4], [2, 3], float("inf"), token_bucket=8, slot_bucket=16)
    assert plan.num_tokens == 8
    assert plan.place_N.tolist()[5:] == [3, 3, 3]
    assert plan.position_N.tolist()[5:] == [0, 0, 0]
    assert [segment.num_slots for segment in plan.segments] == [16]
    # Never more than the cache has.
    assert [s.num_slots for s in plan_of([20], [2], 0.0, slot_bucket=16).segments] == [SLOTS]


def test_too_many_tokens_for_the_slots() -> None:
    with pytest.raises(ValueError, match="row 0: 20 kept and 5 new tokens exceed 24 cache slots"):
        plan_of([20], [5], 0.0)


def test_it_is_registered_with_transformers() -> None:
    assert AttentionInterface()[PACKED_ATTENTION] is packed_attention

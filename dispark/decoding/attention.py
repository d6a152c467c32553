"""Attention for packed calls: one flat sequence of tokens, told apart by row only here.

A `Plan` is made on the host once per call and serves every layer. It says where each token's keys and values go, and
splits the call into segments: neighbouring rows that are padded to one query length and read their slots as one view of
the cache. Rows of like length share a segment; one long row among short ones gets its own, so that cost follows the sum
of the tokens. Query heads that share a key/value head are folded into the query length, which spares the copies (and on
CPUs most of the time) of repeating keys and values.

The function is registered with transformers under the name `dispark_packed`; stock models call it with the plan, which
travels as the keyword `packed`. It does not know drafts, requests or which model is calling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from dispark.decoding.ragged_cache import RaggedCache

PACKED_ATTENTION = "dispark_packed"


@dataclass(frozen=True)
class Segment:
    """Rows [place, place + num_rows) of the cache, T query tokens each after padding, S slots."""

    place: int
    num_rows: int
    num_queries: int
    num_slots: int
    first_token: int
    num_tokens: int
    last_AT: Tensor  # int64 last slot that each padded query may see
    gather: Tensor | None  # int64 [A * T] into the segment's tokens; None where nothing is padded
    scatter: Tensor | None  # int64 [num_tokens] back; None where nothing is padded
    needs_mask: bool


@dataclass
class Plan:
    """Everything the layers of one packed call share.

    position_N are the tokens' positions (for the model), `num_tokens` counts them with padding.
    """

    cache: RaggedCache
    position_N: Tensor
    place_N: Tensor
    segments: list[Segment]
    num_tokens: int
    _masks: dict[tuple[int, int | None, int, torch.dtype], Tensor | None] = field(default_factory=dict)
    _indices: dict[int, Tensor] = field(default_factory=dict)

    def write_index(self, heads: int) -> Tensor:
        """int64 [heads * N], see `RaggedCache.write`; made once per head count."""
        if heads not in self._indices:
            head_H1 = torch.arange(heads, device=self.place_N.device).unsqueeze(1)
            index_HN = (self.place_N * heads + head_H1) * self.cache.num_slots + self.position_N
            self._indices[heads] = index_HN.reshape(-1)
        return self._indices[heads]

    def mask(self, number: int, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [A, 1, groups * T, S] of a segment, or None where every slot is visible; made once per kind."""
        key = (number, window, groups, dtype)
        if key not in self._masks:
            self._masks[key] = _additive_mask(self.segments[number], window, groups, dtype)
        return self._masks[key]


def _additive_mask(segment: Segment, window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
    is_windowed = window is not None and segment.num_slots > window
    if not segment.needs_mask and not is_windowed:
        return None
    last_AT1 = segment.last_AT.unsqueeze(-1)
    slot_S = torch.arange(segment.num_slots, device=last_AT1.device)
    is_hidden_ATS = slot_S > last_AT1
    if window is not None and is_windowed:
        is_hidden_ATS |= slot_S <= last_AT1 - window
    mask_ATS = torch.zeros(is_hidden_ATS.shape, dtype=dtype, device=last_AT1.device)
    mask_ATS.masked_fill_(is_hidden_ATS, float("-inf"))
    a, t, s = mask_ATS.shape
    return mask_ATS.unsqueeze(1).expand(a, groups, t, s).reshape(a, 1, groups * t, s)


def make_plan(
    cache: RaggedCache,
    rows: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    *,
    max_waste: float,
    token_bucket: int | None = None,
    slot_bucket: int | None = None,
    is_causal: bool = True,
) -> Plan:
    """Plans a call that appends `lengths[i]` >= 1 tokens to each of `rows`.

    Args:
        cache: the rows' cache; not changed.
        rows: active rows; storage order makes the largest segments, any order is right.
        lengths: new tokens per row.
        device: where the index tensors go.
        max_waste: padded query tokens times slots that are accepted to save a segment.
        token_bucket: pads the token count to a multiple (padding writes to the spare row), or None.
        slot_bucket: rounds each segment's slots up to a multiple, or None.
        is_causal: a token sees its row up to itself; else up to the row's last new token (a block of drafts).

    Raises:
        ValueError: a row would outgrow its slots.
    """
    cache.check_room(rows, lengths)
    starts = np.array([cache.length(row) for row in rows], dtype=np.int64)
    places = np.array([cache.place(row) for row in rows], dtype=np.int64)
    counts = np.asarray(lengths, dtype=np.int64)
    assert counts.min() >= 1
    num_real = int(counts.sum())
    num_tokens = num_real if token_bucket is None else -(-num_real // token_bucket) * token_bucket

    offsets = np.concatenate([[0], np.cumsum(counts)])
    place_N = np.full(num_tokens, cache.spare_place, dtype=np.int64)
    position_N = np.zeros(num_tokens, dtype=np.int64)
    place_N[:num_real] = np.repeat(places, counts)
    position_N[:num_real] = np.arange(num_real) - np.repeat(offsets[:-1] - starts, counts)

    bounds = _split(places, counts, starts, max_waste)
    blocks = [
        _block(places, counts, starts, offsets, low, high, cache.num_slots, slot_bucket, is_causal)
        for low, high in pairwise(bounds)
    ]
    # One copy to the device carries every index of the call.
    arrays = [place_N, position_N] + [array for block in blocks for array in block.arrays]
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    taken = 2
    segments = []
    for block in blocks:
        segments.append(block.segment(parts[taken : taken + len(block.arrays)]))
        taken += len(block.arrays)
    return Plan(cache, parts[1], parts[0], segments, num_tokens)


def _split(places: np.ndarray, counts: np.ndarray, starts: np.ndarray, max_waste: float) -> list[int]:
    """Bounds of the segments: rows join while they lie side by side and padding them together wastes little."""
    bounds = [0]
    longest = int(counts[0])
    slots = int(starts[0] + counts[0])
    for i in range(1, len(counts)):
        count = int(counts[i])
        joined_slots = max(slots, int(starts[i]) + count)
        waste = (longest - count) if count <= longest else (i - bounds[-1]) * (count - longest)
        if places[i] == places[i - 1] + 1 and waste * joined_slots <= max_waste:
            longest, slots = max(longest, count), joined_slots
        else:
            bounds.append(i)
            longest, slots = count, int(starts[i]) + count
    return [*bounds, len(counts)]


@dataclass(frozen=True)
class _Block:
    """A segment while its indices are still numpy arrays."""

    place: int
    shape: tuple[int, int]
    num_slots: int
    first_token: int
    num_tokens: int
    is_padded: bool
    needs_mask: bool
    arrays: list[np.ndarray]

    def segment(self, parts: Sequence[Tensor]) -> Segment:
        rows, queries = self.shape
        return Segment(
            place=self.place,
            num_rows=rows,
            num_queries=queries,
            num_slots=self.num_slots,
            first_token=self.first_token,
            num_tokens=self.num_tokens,
            last_AT=parts[0].view(rows, queries),
            gather=parts[1] if self.is_padded else None,
            scatter=parts[2] if self.is_padded else None,
            needs_mask=self.needs_mask,
        )


def _block(
    places: np.ndarray,
    counts: np.ndarray,
    starts: np.ndarray,
    offsets: np.ndarray,
    low: int,
    high: int,
    max_slots: int,
    slot_bucket: int | None,
    is_causal: bool,
) -> _Block:
    count_A, start_A = counts[low:high], starts[low:high]
    queries = int(count_A.max())
    ends = start_A + count_A
    slots = int(ends.max())
    if slot_bucket is not None:
        slots = min(-(-slots // slot_bucket) * slot_bucket, max_slots)
    # A padded query repeats its row's last one, so that it sees something and its result is finite.
    step_AT = np.minimum(np.arange(queries)[None, :], count_A[:, None] - 1)
    last_AT = start_A[:, None] + step_AT if is_causal else np.repeat(ends[:, None] - 1, queries, axis=1)
    is_padded = bool((count_A != queries).any())
    arrays = [last_AT]
    if is_padded:
        local_A = offsets[low:high] - offsets[low]
        arrays.append(local_A[:, None] + step_AT)
        scatter_A = np.arange(high - low) * queries
        num = int(count_A.sum())
        arrays.append(np.arange(num) - np.repeat(local_A - scatter_A, count_A))
    return _Block(
        place=int(places[low]),
        shape=(high - low, queries),
        num_slots=slots,
        first_token=int(offsets[low]),
        num_tokens=int(count_A.sum()),
        is_padded=is_padded,
        needs_mask=(is_causal and queries > 1) or bool((ends != slots).any()),
        arrays=arrays,
    )


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Plan,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes the call's keys and values, then lets every token see its own row up to itself.

    Args:
        module: the calling attention layer; gives `layer_idx`.
        query: [1, H, N, head_dim]; key and value: [1, H_kv, N, head_dim].
        attention_mask: unused; the plan decides what is visible.
        packed: the call's plan.
        scaling: factor on the scores.
        dropout: must be 0.
        sliding_window: tokens a query sees, itself included, or None for all.

    Returns:
        ([1, N, H, head_dim], None).
    """
    assert dropout == 0.0
    kv_heads = key.shape[1]
    heads, num_tokens, width = query.shape[1:]
    groups = heads // kv_heads
    keys, values = packed.cache.write(module.layer_idx, packed.write_index(kv_heads), key[0], value[0])
    outputs = []
    for number, segment in enumerate(packed.segments):
        a, t, s = segment.num_rows, segment.num_queries, segment.num_slots
        q = query[0, :, segment.first_token : segment.first_token + segment.num_tokens]
        if segment.gather is not None:
            q = q.index_select(1, segment.gather)
        # [H, A*T, E] -> [A, H_kv, groups*T, E]: query heads of one key/value head become queries of it.
        q = q.view(kv_heads, groups, a, t, width).permute(2, 0, 1, 3, 4).reshape(a, kv_heads, groups * t, width)
        rows = slice(segment.place, segment.place + a)
        out = F.scaled_dot_product_attention(
            q,
            keys[rows, :, :s],
            values[rows, :, :s],
            attn_mask=packed.mask(number, sliding_window, groups, q.dtype),
            scale=scaling,
        )
        out = out.view(a, kv_heads, groups, t, -1).permute(0, 3, 1, 2, 4).reshape(a * t, heads, -1)
        outputs.append(out if segment.scatter is None else out.index_select(0, segment.scatter))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if joined.shape[0] < num_tokens:
        joined = F.pad(joined, (0, 0, 0, 0, 0, num_tokens - joined.shape[0]))
    return joined.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)

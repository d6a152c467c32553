"""A key/value cache whose rows have lengths of their own.

Every row owns a fixed stretch of slots; slot j holds the token at position j. Writing a token is a scatter, keeping or
rolling back tokens is setting an integer, and dropping a row moves the last row into the hole, so that the active rows
always lie side by side and attention can read them as one view. One spare row at the end takes the writes of padding
tokens. Layers are allocated when first written, with whatever head count and width they turn out to have.

It does not know positions, masks, models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RaggedCache:
    """Keys and values of up to `num_rows` rows of up to `num_slots` tokens each.

    Args:
        num_rows: rows that can be active at once.
        num_slots: tokens a row can hold.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        if num_rows < 1 or num_slots < 1:
            raise ValueError(f"a cache of {num_rows} rows x {num_slots} slots: both must be at least 1")
        self.num_rows = num_rows
        self.num_slots = num_slots
        self._place: dict[int, int] = {}  # row -> index of its stretch
        self._order: list[int] = []  # index of a stretch -> row
        self._length: dict[int, int] = {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def rows(self) -> list[int]:
        """Active rows in storage order."""
        return list(self._order)

    def length(self, row: int) -> int:
        return self._length[row]

    def place(self, row: int) -> int:
        """Index of the row's stretch; active rows fill 0..num_active-1."""
        return self._place[row]

    @property
    def spare_place(self) -> int:
        """The stretch that padding tokens write to."""
        return self.num_rows

    def admit(self, row: int) -> None:
        """Makes an empty row active.

        Raises:
            ValueError: the row is active already, or every row is taken.
        """
        if row in self._place:
            raise ValueError(f"row {row} is active already")
        if len(self._order) == self.num_rows:
            raise ValueError(f"row {row}: all {self.num_rows} rows are taken")
        self._place[row] = len(self._order)
        self._order.append(row)
        self._length[row] = 0

    def set_length(self, row: int, length: int) -> None:
        """Keeps the first `length` tokens: O(1), no data moves."""
        assert 0 <= length <= self.num_slots, (row, length)
        self._length[row] = length

    def drop(self, row: int) -> None:
        """Frees the row; the last active row moves into its place."""
        place = self._place.pop(row)
        self._length.pop(row)
        last = self._order.pop()
        if last != row:
            kept = self._length[last]
            for keys, values in self._layers.values():
                keys[place, :, :kept] = keys[self._place[last], :, :kept]
                values[place, :, :kept] = values[self._place[last], :, :kept]
            self._order[place] = last
            self._place[last] = place

    def clear(self) -> None:
        """Drops every row, keeping the memory."""
        self._place.clear()
        self._order.clear()
        self._length.clear()

    def write(self, layer: int, index: Tensor, keys_HND: Tensor, values_HND: Tensor) -> tuple[Tensor, Tensor]:
        """Scatters one packed call's keys and values and returns the layer's whole storage.

        Args:
            layer: index of the attention layer.
            index: int64 [H * N], (place * H + head) * num_slots + position for every head of every token.
            keys_HND: [H, N, head_dim]; values_HND likewise.

        Returns:
            (keys, values), each [num_rows + 1, H, num_slots, head_dim].
        """
        if layer not in self._layers:
            # Zeros, not empty: a masked slot has weight 0, and 0 times uninitialised NaN would be NaN.
            self._layers[layer] = (self._allocate(keys_HND), self._allocate(values_HND))
        keys, values = self._layers[layer]
        keys.view(-1, keys.shape[-1]).index_copy_(0, index, keys_HND.reshape(-1, keys_HND.shape[-1]))
        values.view(-1, values.shape[-1]).index_copy_(0, index, values_HND.reshape(-1, values_HND.shape[-1]))
        return keys, values

    def _allocate(self, like_HND: Tensor) -> Tensor:
        heads, _, width = like_HND.shape
        return torch.zeros(
            (self.num_rows + 1, heads, self.num_slots, width), dtype=like_HND.dtype, device=like_HND.device
        )

    def bytes_per_slot(self) -> int:
        """Bytes one token takes over all layers written so far."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for pair in self._layers.values() for t in pair)

    def check_room(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Raises ValueError where `lengths[i]` more tokens would outgrow the slots of `rows[i]`."""
        for row, num in zip(rows, lengths, strict=True):
            if self._length[row] + num > self.num_slots:
                raise ValueError(
                    f"row {row}: {self._length[row]} kept and {num} new tokens exceed {self.num_slots} cache slots"
                )

"""The index helpers that take packed logits apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dispark.verifiers.packed import count_accepted, packed_index, with_next

CPU = torch.device("cpu")


def test_by_hand() -> None:
    index_BT, verify_length_B = packed_index([2, 0, 1], 4, CPU)
    assert index_BT.tolist() == [[0, 1, 2, 2], [3, 3, 3, 3], [4, 5, 5, 5]]
    assert verify_length_B.tolist() == [2, 0, 1]
    accepted = torch.tensor([[True, True, True], [True, True, True], [False, True, True]])
    assert count_accepted(accepted, verify_length_B).tolist() == [2, 0, 0]
    drafts = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    joined = with_next(drafts, torch.tensor([2, 0, 3]), torch.tensor([70, 80, 90]))
    assert joined[0, :3].tolist() == [1, 2, 70]
    assert joined[1, :1].tolist() == [80]
    assert joined[2].tolist() == [7, 8, 9, 90]
    assert drafts.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_nothing_drafted() -> None:
    index_BT, verify_length_B = packed_index([0, 0], 1, CPU)
    assert index_BT.tolist() == [[0], [1]]
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert count_accepted(none.bool(), verify_length_B).tolist() == [0, 0]
    assert with_next(none, verify_length_B, torch.tensor([5, 6])).tolist() == [[5], [6]]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 3), st.randoms())
def test_against_a_walk_over_the_rows(lengths: list[int], slack: int, rng: object) -> None:
    width = 1 + max(lengths) + slack
    index_BT, _ = packed_index(lengths, width, CPU)
    start = 0
    for row, length in zip(index_BT.tolist(), lengths, strict=True):
        assert row == [start + min(step, length) for step in range(width)]
        start += 1 + length


@pytest.mark.parametrize(
    ("accepted", "length", "expected"),
    [("1110", 4, 3), ("1110", 2, 2), ("0111", 4, 0), ("1111", 4, 4), ("1101", 4, 2), ("1111", 0, 0)],
)
def test_only_the_prefix_within_reach_counts(accepted: str, length: int, expected: int) -> None:
    flags = torch.tensor([[flag == "1" for flag in accepted]])
    assert count_accepted(flags, torch.tensor([length])).tolist() == [expected]

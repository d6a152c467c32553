"""The books of a block budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispark.serving.blocks import BlockBudget


def test_blocks_are_taken_and_given_back() -> None:
    budget = BlockBudget(4, 16)
    assert budget.reserve("a", 33)  # three blocks
    assert budget.num_free == 1
    assert not budget.reserve("b", 17)
    assert budget.reserve("c", 16)
    assert budget.names == {"a", "c"}
    budget.release("a")
    assert budget.num_free == 3
    assert budget.reserve("b", 48)
    assert budget.num_free == 0


def test_what_can_never_fit() -> None:
    assert BlockBudget(2, 8).can_ever_hold(16)
    assert not BlockBudget(2, 8).can_ever_hold(17)
    assert BlockBudget(None, 8).can_ever_hold(10**9)
    assert BlockBudget(None, 8).num_free is None


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_never_more_than_there_are(needs: list[int]) -> None:
    budget = BlockBudget(6, 10)
    for i, need in enumerate(needs):
        if not budget.reserve(str(i), need) and budget.names:
            budget.release(min(budget.names))
        assert budget.num_free is not None
        assert 0 <= budget.num_free <= 6


@pytest.mark.parametrize(("blocks", "tokens", "key"), [(0, 16, "kv_blocks=0"), (4, 0, "block_tokens=0")])
def test_bad_settings(blocks: int, tokens: int, key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}: must be a whole number >= 1"):
        BlockBudget(blocks, tokens)

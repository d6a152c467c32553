"""A budget of cache blocks: who may come in, and how much of the room holds tokens.

A request reserves, when it is let in, the blocks that it can need at most, so what is being decoded never runs out and
nothing is ever thrown out; whoever doesn't fit waits. Blocks fill as texts grow. The cache itself keeps each row's
tokens in one piece (decoding/ragged_cache.py); the budget bounds how many tokens it is given.

It does not know requests beyond their names.
"""

from __future__ import annotations


class BlockBudget:
    """So many blocks of so many tokens.

    Args:
        num_blocks: of the budget; None is without bound.
        block_tokens: tokens of a block.
    """

    def __init__(self, num_blocks: int | None, block_tokens: int) -> None:
        if num_blocks is not None and num_blocks < 1:
            raise ValueError(f"kv_blocks={num_blocks}: must be a whole number >= 1, or null for no bound")
        if block_tokens < 1:
            raise ValueError(f"block_tokens={block_tokens}: must be a whole number >= 1")
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._reserved: dict[str, int] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_tokens)

    @property
    def num_free(self) -> int | None:
        """Blocks that nobody has reserved; None without bound."""
        return None if self.num_blocks is None else self.num_blocks - sum(self._reserved.values())

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether an empty budget would take a request of so many tokens."""
        return self.num_blocks is None or self.blocks_for(num_tokens) <= self.num_blocks

    def reserve(self, name: str, num_tokens: int) -> bool:
        """Takes the blocks for a request, if they are free; whether they were."""
        assert name not in self._reserved, name
        need, free = self.blocks_for(num_tokens), self.num_free
        if free is not None and need > free:
            return False
        self._reserved[name] = need
        return True

    def release(self, name: str) -> None:
        """Gives a request's blocks back."""
        del self._reserved[name]

    @property
    def names(self) -> set[str]:
        """Requests that hold blocks."""
        return set(self._reserved)

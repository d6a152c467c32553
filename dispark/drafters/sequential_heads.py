"""Sequential heads: what the tokens drafted so far add to the base logits of the next slot.

All look up the previous token in a table W1 [V, R] and add `W2 u` to the slot's base logits, where W2 is [V_draft, R]
and u is R numbers made of the embedding e = W1[previous], the slot's hidden state h and, for `rnn`, a state that starts
at zero with every block:

- `markov`: u = e (DSpark, Cheng et al. 2026, section 2).
- `gated`: u = sigmoid(G [h; e] + b) * e (DeepSpec's code).
- `rnn`: g, c, o = thirds of J [s; e; h] + b; u = tanh(o); s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c). u is made
  of the old state.

The names of the weights are DeepSpec's. A head does not know how tokens are chosen, nor what the base logits are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HEADS = ("none", "markov", "gated", "rnn")


class MarkovHead(nn.Module):
    """u = e.

    Args:
        vocab_size: rows of W1, the ids that a previous token may have.
        rank: R.
        draft_vocab_size: rows of W2, the ids that can be drafted; None is vocab_size.
    """

    def __init__(self, vocab_size: int, rank: int, draft_vocab_size: int | None = None) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size or vocab_size, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """W1[previous], [..., R]."""
        embedded: Tensor = self.markov_w1(previous)
        return embedded

    def step(self, embedded_MR: Tensor, hidden_MD: Tensor, state_MR: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot: (u [M, R], the state for the next slot). `state_MR` is None at a block's start."""
        return embedded_MR, None

    def bias(self, inner_MR: Tensor, candidates_MC: Tensor | None = None) -> Tensor:
        """W2 u over all draft ids, or over C candidate ids a row."""
        if candidates_MC is None:
            full: Tensor = self.markov_w2(inner_MR)
            return full
        rows_MCR = self.markov_w2.weight[candidates_MC]
        return torch.einsum("mcr,mr->mc", rows_MCR, inner_MR)

    def forward(self, base_MGV: Tensor, hidden_MGD: Tensor, previous_MG: Tensor) -> Tensor:
        """Corrected logits of whole blocks whose previous tokens are given (teacher forcing)."""
        embedded_MGR = self.embed(previous_MG)
        state: Tensor | None = None
        inners = []
        for k in range(previous_MG.shape[1]):
            inner, state = self.step(embedded_MGR[:, k], hidden_MGD[:, k], state)
            inners.append(inner)
        return base_MGV + self.bias(torch.stack(inners, dim=1))


class GatedMarkovHead(MarkovHead):
    """u = sigmoid(G [h; e] + b) * e; `hidden_size` is the width of h."""

    def __init__(self, vocab_size: int, rank: int, draft_vocab_size: int | None = None, *, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, draft_vocab_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, embedded_MR: Tensor, hidden_MD: Tensor, state_MR: Tensor | None) -> tuple[Tensor, Tensor | None]:
        gate_MR = self.gate_proj(torch.cat([hidden_MD, embedded_MR], dim=-1)).sigmoid()
        return gate_MR * embedded_MR, None


class RnnHead(MarkovHead):
    """A gated recurrence over the block; `hidden_size` is the width of h."""

    def __init__(self, vocab_size: int, rank: int, draft_vocab_size: int | None = None, *, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, draft_vocab_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, embedded_MR: Tensor, hidden_MD: Tensor, state_MR: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if state_MR is None:
            state_MR = torch.zeros_like(embedded_MR)
        joint = self.joint_proj(torch.cat([state_MR, embedded_MR, hidden_MD], dim=-1))
        gate_MR, candidate_MR, output_MR = joint.chunk(3, dim=-1)
        gate_MR = gate_MR.sigmoid()
        return output_MR.tanh(), gate_MR * state_MR + (1 - gate_MR) * candidate_MR.tanh()


def make_head(kind: str, vocab_size: int, rank: int, hidden_size: int, draft_vocab_size: int | None) -> Any:
    """A head by its name in HEADS; None for "none".

    Raises:
        ValueError: an unknown name, or a rank below 1.
    """
    if kind not in HEADS:
        raise ValueError(f"drafter.head={kind}: must be one of {', '.join(HEADS)}")
    if kind == "none":
        return None
    if rank < 1:
        raise ValueError(f"drafter.rank={rank}: must be at least 1 for head={kind}")
    if kind == "markov":
        return MarkovHead(vocab_size, rank, draft_vocab_size)
    heads: dict[str, Any] = {"gated": GatedMarkovHead, "rnn": RnnHead}
    return heads[kind](vocab_size, rank, draft_vocab_size, hidden_size=hidden_size)


def start_head(head: MarkovHead, seed: int) -> None:
    """Weights to train from: nothing is added to the base logits yet, and W1's rows have about unit length."""
    rank = head.markov_w1.embedding_dim
    nn.init.normal_(head.markov_w1.weight, std=rank**-0.5, generator=torch.Generator().manual_seed(seed))
    nn.init.zeros_(head.markov_w2.weight)

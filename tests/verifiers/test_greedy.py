"""Greedy verification: the prefix of argmaxes and the argmax after it, against a walk in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dispark.decoding.random import RowGenerators
from dispark.interfaces import Verifier
from dispark.types import Draft, Sampling
from dispark.verifiers.greedy import GreedyVerifier
from dispark.verifiers.rejection import RejectionVerifier

CPU = torch.device("cpu")


def generators(num_rows: int) -> RowGenerators:
    return RowGenerators(list(range(num_rows)), [1] * num_rows, CPU)


def slow_verdict(drafts: list[int], logits: list[list[float]], length: int) -> list[int]:
    """Accepted drafts and the next token; the first of equal logits is the best."""
    best = [row.index(max(row)) for row in logits]
    num = 0
    while num < length and drafts[num] == best[num]:
        num += 1
    return [*drafts[:num], best[num]]


rows = st.integers(0, 4).flatmap(
    lambda width: st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=width, max_size=width),
            st.integers(0, width).flatmap(
                lambda length: st.lists(
                    st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=3, max_size=3),
                    min_size=1 + length,
                    max_size=1 + length,
                )
            ),
        ),
        min_size=1,
        max_size=5,
    )
)


@given(batch=rows, has_probs=st.booleans())
@settings(max_examples=150, deadline=None)
def test_both_verifiers_at_temperature_zero(batch: list[tuple[list[int], list[list[float]]]], has_probs: bool) -> None:
    tokens = torch.tensor([drafts for drafts, _ in batch]).view(len(batch), -1).to(torch.int64)
    lengths = [len(logits) - 1 for _, logits in batch]
    probs = torch.nn.functional.one_hot(tokens, 3).float() if has_probs else None
    draft = Draft(tokens, [tokens.shape[1]] * len(batch), probs)
    packed = torch.tensor([row for _, logits in batch for row in logits])
    for verifier in (GreedyVerifier(), RejectionVerifier()):
        verdict = verifier.accept(draft, packed, lengths, Sampling(), generators(len(batch)))
        for i, (drafts, logits) in enumerate(batch):
            num = int(verdict.num_accepted_B[i])
            assert verdict.tokens_BT[i, : num + 1].tolist() == slow_verdict(drafts, logits, lengths[i])


def test_it_serves_temperature_zero_only() -> None:
    verifier: Verifier = GreedyVerifier()
    assert verifier.is_lossless
    verifier.check(Sampling(), "sampled")
    verifier.check(Sampling(), "deterministic")
    with pytest.raises(ValueError, match=r"verifier=greedy with sampling.temperature=0.7: .* use verifier=rejection"):
        verifier.check(Sampling(0.7), "sampled")

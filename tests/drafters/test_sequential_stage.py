"""Tokens of a block: the law they are drawn from, greedily and sampled, with every head and vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispark.drafters.sequential_heads import HEADS, make_head
from dispark.drafters.sequential_stage import draft_block
from dispark.drafters.vocabulary import DraftVocabulary
from dispark.types import Sampling

M, G, V, D, R = 3, 4, 11, 6, 5


def setting(kind: str, draft_vocab: int | None = None) -> tuple[Any, ...]:
    torch.manual_seed(0)
    head = make_head(kind, V, R, D, draft_vocab)
    for parameter in head.parameters() if head is not None else ():
        torch.nn.init.normal_(parameter, std=1.0)
        parameter.requires_grad_(False)
    size = draft_vocab or V
    return head, torch.randn(M, G, size) * 2, torch.randn(M, G, D), torch.tensor([1, 5, 9])


@pytest.mark.parametrize("kind", HEADS)
def test_greedy_takes_the_best_of_the_corrected_logits(kind: str) -> None:
    head, base, hidden, anchors = setting(kind)
    block = draft_block(base, hidden, anchors, Sampling(), None, head=head, keep_logits=True)
    assert block.probs_MGV is None
    assert torch.equal(block.previous_MG[:, 0], anchors)
    assert torch.equal(block.previous_MG[:, 1:], block.tokens_MG[:, :-1])
    corrected = base if head is None else head(base, hidden, block.previous_MG)
    torch.testing.assert_close(block.logits, corrected)
    assert torch.equal(block.tokens_MG, corrected.argmax(-1))
    if head is not None:
        assert not torch.equal(block.tokens_MG, base.argmax(-1))  # the head did change something


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("num_candidates", [None, 4])
@pytest.mark.parametrize("draft_vocab", [None, 7])
def test_the_reported_law_is_the_one_that_is_drawn_from(
    kind: str, num_candidates: int | None, draft_vocab: int | None
) -> None:
    """Counts over many uniforms, slot by slot and given the slot before, against the reported q."""
    head, base, hidden, anchors = setting(kind, draft_vocab)
    ids = torch.tensor([0, 2, 3, 5, 6, 8, 10])
    vocabulary = None if draft_vocab is None else DraftVocabulary(ids, V)
    num = 600
    base, hidden = base[:1, :2].repeat(num, 1, 1), hidden[:1, :2].repeat(num, 1, 1)
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(num, 2, generator=generator, dtype=torch.float64)
    block = draft_block(
        base,
        hidden,
        anchors[:1].repeat(num),
        Sampling(1.0),
        uniform,
        head=head,
        vocabulary=vocabulary,
        num_candidates=num_candidates,
    )
    law = block.probs_MGV
    assert law is not None
    assert law.shape == (num, 2, V)
    torch.testing.assert_close(law.sum(-1), torch.ones(num, 2))
    if vocabulary is not None:
        outside = [i for i in range(V) if i not in ids.tolist()]
        assert not bool(law[..., outside].any())
    if num_candidates is not None:
        assert int((law > 0).sum(-1).max()) == num_candidates
    # The first slot: each token for exactly its share of the unit interval.
    cdf = law[0, 0].double().cumsum(0)
    order = torch.arange(V)
    if num_candidates is None and vocabulary is None:
        assert torch.equal(block.tokens_MG[:, 0], torch.searchsorted(cdf, uniform[:, 0].contiguous(), right=True))
    for slot in (0, 1):
        for previous in block.previous_MG[:, slot].unique():
            rows = block.previous_MG[:, slot] == previous
            assert bool((law[rows, slot] == law[rows, slot][0]).all())  # q depends on the previous token only
            counts = torch.stack([(block.tokens_MG[rows, slot] == token).sum() for token in order]).double()
            wanted = law[rows, slot][0].double() * counts.sum()
            assert float(counts[wanted == 0].sum()) == 0
            if counts.sum() < 150:
                continue
            seen = wanted > 0
            chi = ((counts - wanted)[seen] ** 2 / wanted[seen]).sum()
            assert float(chi) < 40  # 10 degrees of freedom: p < 2e-5


def test_a_wrong_law_is_noticed() -> None:
    """The check above would fail if q were that of the base logits."""
    head, base, hidden, anchors = setting("markov")
    block = draft_block(base, hidden, anchors, Sampling(1.0), torch.full((M, G), 0.5).double(), head=head)
    assert block.probs_MGV is not None
    assert float((block.probs_MGV - base.softmax(-1)).abs().max()) > 0.1


@pytest.mark.parametrize("kind", HEADS)
def test_sampling_settings_shape_the_law(kind: str) -> None:
    head, base, hidden, anchors = setting(kind)
    uniform = torch.linspace(0.1, 0.9, M * G).double().view(M, G)
    block = draft_block(base, hidden, anchors, Sampling(0.7, top_k=3), uniform, head=head)
    assert block.probs_MGV is not None
    assert int((block.probs_MGV > 0).sum(-1).max()) == 3
    corrected = base if head is None else head(base, hidden, block.previous_MG)
    best = (corrected / 0.7).topk(3, -1)
    torch.testing.assert_close(block.probs_MGV.gather(-1, best.indices), best.values.softmax(-1))


def test_a_head_s_restricted_bias_is_the_full_one_s() -> None:
    for kind in ("markov", "gated", "rnn"):
        head, _, hidden, anchors = setting(kind)
        inner, _ = head.step(head.embed(anchors), hidden[:, 0], None)
        candidates = torch.tensor([[3, 1], [0, 10], [5, 5]])
        torch.testing.assert_close(head.bias(inner, candidates), head.bias(inner).gather(1, candidates))


def test_the_rnn_s_state_starts_anew_with_each_block() -> None:
    head, base, hidden, anchors = setting("rnn")
    once = draft_block(base, hidden, anchors, Sampling(), None, head=head, keep_logits=True)
    again = draft_block(base, hidden, anchors, Sampling(), None, head=head, keep_logits=True)
    assert torch.equal(once.logits, again.logits)  # type: ignore[arg-type]
    inner, state = head.step(head.embed(anchors), hidden[:, 0], None)
    later, _ = head.step(head.embed(anchors), hidden[:, 0], state)
    assert not torch.allclose(inner, later)


@pytest.mark.parametrize(("kind", "rank", "words"), [("lstm", 4, "drafter.head=lstm"), ("markov", 0, "drafter.rank=0")])
def test_bad_heads(kind: str, rank: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_head(kind, V, rank, D, None)

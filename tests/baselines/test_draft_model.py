"""The draft model's proposals against the stock model from scratch: rollback, vocabularies, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance.toolbox import (
    compose_bench,
    decode_all,
    make_drafter,
    make_request,
    make_requests,
    open_tiny,
    outputs_of,
    varied_prompts,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from baselines.autoregressive import AutoregressiveDrafter
from baselines.draft_model import DraftModelDrafter, check_vocabularies
from dispark.config import build
from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import draw, probabilities
from dispark.decoding.target import TargetModel
from dispark.targets.spec import TargetSpec
from dispark.types import Draft, Features, Outcome, Request, Sampling

G = 3
CPU = torch.device("cpu")
TARGET = open_tiny("tiny")


def tiny_spec(**config: Any) -> TargetSpec:
    """The spec of the tiny target, with changes to its model's config."""
    cfg = compose_bench("target=tiny")
    spec: TargetSpec = build(cfg.target)
    source: Any = spec.sources["random"]
    return replace(spec, name="small", sources={"random": replace(source, seed=5, config=source.config | config)})


@torch.inference_mode()
def next_logits(target: TargetModel, ids: Sequence[int]) -> Tensor:
    with target.stock() as model:
        return model(torch.tensor([list(ids)])).logits[0, -1]


def begin(drafter: DraftModelDrafter, texts: dict[int, list[int]], requests: Sequence[Request] | None = None) -> None:
    """Admits rows whose prompts are all of a text but its last token."""
    requests = requests or [make_request(text[:-1], row) for row, text in texts.items()]
    drafter.begin(list(texts), requests, [text[-1] for text in texts.values()], Features(None, [1] * len(texts)))


def propose(drafter: DraftModelDrafter, texts: dict[int, list[int]], sampling: Sampling) -> tuple[Draft, Tensor]:
    generators = RowGenerators(list(texts), [1] * len(texts), CPU)
    draft = drafter.propose(list(texts), torch.tensor([text[-1] for text in texts.values()]), sampling, generators)
    assert draft.lengths == [drafter.draft_length] * len(texts)
    assert draft.tokens_BG.shape == (len(texts), drafter.draft_length)
    return draft, generators.uniform("draft", drafter.draft_length)


def check_draft(draft: Draft, uniform_BG: Tensor, texts: dict[int, list[int]], sampling: Sampling) -> None:
    """Every token and every q is what the stock model gives for the text so far."""
    for i, text in enumerate(texts.values()):
        so_far = list(text)
        for k, token in enumerate(draft.tokens_BG[i].tolist()):
            logits = next_logits(TARGET, so_far).unsqueeze(0)
            if sampling.is_greedy:
                assert draft.probs_BGV is None
                assert token == int(logits.argmax())
            else:
                assert draft.probs_BGV is not None
                q = draft.probs_BGV[i, k]
                torch.testing.assert_close(q, probabilities(logits, sampling)[0], atol=1e-5, rtol=1e-3)
                assert token == int(draw(q.unsqueeze(0), uniform_BG[i, k : k + 1]))  # from the very q it reports
            so_far.append(token)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.8, top_k=12, top_p=0.9)], ids=str)
@given(data=st.data())
@settings(
    max_examples=6,
    derandomize=True,  # the same in every run, and no minutes of shrinking
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_rollback_leaves_what_was_emitted(sampling: Sampling, data: st.DataObject) -> None:
    drafter = DraftModelDrafter(G)
    drafter.bind(TARGET, 3, 64)
    tokens = st.integers(0, 255)
    texts: dict[int, list[int]] = {}
    for number in range(4):
        free = [row for row in (2, 0, 1) if row not in texts]
        fresh = {row: data.draw(st.lists(tokens, min_size=2, max_size=8)) for row in free[: 1 + number]}
        if fresh:
            begin(drafter, fresh)
            texts |= fresh
        draft, uniform_BG = propose(drafter, texts, sampling)
        check_draft(draft, uniform_BG, texts, sampling)
        num_accepted = [data.draw(st.integers(0, G), label="accepted") for _ in texts]
        emitted = [
            [*row[:num], data.draw(tokens)] for row, num in zip(draft.tokens_BG.tolist(), num_accepted, strict=True)
        ]
        size = len(texts)
        outcome = Outcome(emitted, num_accepted, [None] * size, [False] * size)
        drafter.update(list(texts), outcome, Features(None, [1] * size))
        for text, new in zip(texts.values(), emitted, strict=True):
            text += new
        if data.draw(st.booleans(), label="drop"):
            row = data.draw(st.sampled_from(sorted(texts)))
            drafter.drop([row])
            del texts[row]
        if not texts:
            return


def test_a_row_that_ends_at_its_first_token_is_dropped_without_a_round() -> None:
    drafter = DraftModelDrafter(G)
    drafter.bind(TARGET, 2, 32)
    texts = {0: [1, 2, 3], 1: [4, 5]}
    begin(drafter, texts)
    drafter.drop([0])
    del texts[0]
    draft, uniform_BG = propose(drafter, texts, Sampling())
    check_draft(draft, uniform_BG, texts, Sampling())


def test_binding_again_starts_afresh() -> None:
    drafter = DraftModelDrafter(G)
    for rows in (2, 3):
        drafter.bind(TARGET, rows, 32)
        texts = {0: [9, 8, 7], 1: [1, 2]}
        begin(drafter, texts)
        draft, uniform_BG = propose(drafter, texts, Sampling())
        check_draft(draft, uniform_BG, texts, Sampling())


def test_the_target_as_its_own_draft_model_is_always_accepted() -> None:
    trace = decode_all(TARGET, make_drafter("draft_target"), make_requests(varied_prompts(6), 21))
    uncut = [r for r in trace.rounds if r["end"] is None]
    assert len(uncut) == 6 * 3  # 1 + 4 * 5 tokens, the last round cut
    assert all(r["num_emitted"] == 5 for r in uncut)


# Vocabularies. The byte tokenizer has 262 tokens; a model's embedding may be longer.


@pytest.mark.parametrize("size", [270, 300])
def test_a_longer_padded_draft_vocabulary_is_cut(size: int) -> None:
    drafter = DraftModelDrafter(G, tiny_spec(vocab_size=size))
    requests = make_requests(varied_prompts(4), 12)
    for sampling in (Sampling(), Sampling(1.5)):
        trace = decode_all(TARGET, drafter, requests, sampling)
        assert all(token < 262 for ids in outputs_of(trace).values() for token in ids)
        drafter.bind(TARGET, 1, 32)
        begin(drafter, {0: [1, 2]})
        draft, _ = propose(drafter, {0: [1, 2]}, sampling)
        if draft.probs_BGV is not None:
            assert draft.probs_BGV.shape == (1, G, 262)
            torch.testing.assert_close(draft.probs_BGV.sum(-1), torch.ones(1, G))


def test_a_shorter_draft_vocabulary_is_padded_with_zeros() -> None:
    target = open_tiny("tiny", "+target.sources.random.config.vocab_size=300")
    drafter = DraftModelDrafter(G, tiny_spec())
    drafter.bind(target, 1, 32)
    begin(drafter, {0: [1, 2]})
    draft, _ = propose(drafter, {0: [1, 2]}, Sampling(1.0))
    assert draft.probs_BGV is not None
    assert draft.probs_BGV.shape == (1, G, 300)
    assert float(draft.probs_BGV[..., 262:].abs().max()) == 0.0
    assert int(draft.tokens_BG.max()) < 262


def test_the_target_may_emit_padding_that_the_draft_model_has_no_row_for() -> None:
    # A random target does so often; a trained one hardly ever, but a run must not end by it.
    target = open_tiny("tiny", "+target.sources.random.config.vocab_size=600")
    requests = make_requests(varied_prompts(6), 16)
    expected = outputs_of(decode_all(target, AutoregressiveDrafter(), requests))
    assert max(token for ids in expected.values() for token in ids) >= 262
    found = decode_all(target, DraftModelDrafter(G, tiny_spec()), requests)
    assert outputs_of(found) == expected


def facts(size: int, fingerprint: str | None, name: str = "m") -> Any:
    return SimpleNamespace(name=name, vocab_size=size, vocab_fingerprint=fingerprint)


@pytest.mark.parametrize(
    ("draft", "target", "message"),
    [
        ((10, "a"), (10, "a"), None),
        ((12, "a"), (10, "a"), None),
        ((8, "a"), (10, "a"), None),
        ((10, None), (10, "a"), None),
        ((10, "a"), (10, None), None),
        ((10, None), (10, None), None),
        ((10, "a"), (10, "b"), "drafter.model=d: its tokenizer differs from that of target t; allowed"),
        ((11, None), (10, "a"), "drafter.model=d: 11 tokens, but target t has 10; allowed"),
        ((11, "a"), (10, None), "drafter.model=d: 11 tokens, but target t has 10; allowed"),
    ],
)
def test_which_vocabularies_go_together(
    draft: tuple[int, str | None], target: tuple[int, str | None], message: str | None
) -> None:
    if message is None:
        check_vocabularies(facts(*draft), facts(*target))
        return
    with pytest.raises(ValueError, match=message):
        check_vocabularies(facts(*draft, name="d"), facts(*target, name="t"))


def test_another_vocabulary_is_refused_when_the_model_is_bound() -> None:
    spec = tiny_spec(vocab_size=300)
    source: Any = spec.sources["random"]
    stranger = replace(spec, sources={"random": replace(source, tokenizer=None)})
    with pytest.raises(ValueError, match=r"drafter.model=small: 300 tokens, but target tiny has 262"):
        DraftModelDrafter(G, stranger).bind(TARGET, 1, 32)


def test_a_context_that_is_too_short_is_refused() -> None:
    drafter = DraftModelDrafter(G, tiny_spec(max_position_embeddings=32))
    drafter.bind(TARGET, 1, 32 + G + 1)  # 32 tokens of text; the rest is for drafts that are thrown away
    with pytest.raises(ValueError, match=r"drafter.model=small: its context of 32 tokens is shorter than the 33 that"):
        drafter.bind(TARGET, 1, 33 + G + 1)


def test_the_target_s_whole_context_can_be_used() -> None:
    target = open_tiny("tiny", "target.max_context=40")
    requests = make_requests([[1] * 30, [2] * 39, [3] * 36], 50)
    options: dict[str, Any] = {"num_slots": 40 + G + 1, "batch_size": 3}
    expected = decode_all(target, AutoregressiveDrafter(), requests, **options)
    found = decode_all(target, DraftModelDrafter(G), requests, **options)
    assert outputs_of(found) == outputs_of(expected)
    assert [record.finish_reason for record in found.records] == ["context"] * 3


@pytest.mark.parametrize("draft_length", [0, -2])
def test_draft_lengths_below_one_are_refused(draft_length: int) -> None:
    with pytest.raises(ValueError, match=f"drafter.draft_length={draft_length}: must be at least 1"):
        DraftModelDrafter(draft_length)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5, top_k=3)], ids=str)
@pytest.mark.parametrize("kind", ["peak", "entropy"])
def test_confidence_is_of_the_distribution_before_sampling_settings(kind: str, sampling: Sampling) -> None:
    drafter = DraftModelDrafter(G, confidence=kind)
    drafter.bind(TARGET, 2, 32)
    texts = {0: [1, 2, 3], 1: [4, 5]}
    begin(drafter, texts)
    draft, _ = propose(drafter, texts, sampling)
    assert draft.confidence_BG is not None
    for i, text in enumerate(texts.values()):
        for k in range(G):
            law = next_logits(TARGET, [*text, *draft.tokens_BG[i, :k].tolist()]).double().softmax(-1)
            expected = law.max() if kind == "peak" else (law * law.log()).sum().exp()
            torch.testing.assert_close(draft.confidence_BG[i, k].double(), expected, atol=1e-5, rtol=1e-3)


def test_confidence_over_a_padded_vocabulary_is_a_number() -> None:
    target = open_tiny("tiny", "+target.sources.random.config.vocab_size=300")
    for kind in ("peak", "entropy"):
        drafter = DraftModelDrafter(G, tiny_spec(), confidence=kind)
        drafter.bind(target, 1, 32)
        begin(drafter, {0: [1, 2]})
        draft, _ = propose(drafter, {0: [1, 2]}, Sampling())
        assert draft.confidence_BG is not None
        assert bool(((draft.confidence_BG > 0) & (draft.confidence_BG <= 1)).all())


def test_confidences_that_a_draft_model_does_not_have() -> None:
    drafter = DraftModelDrafter(G)
    drafter.bind(TARGET, 1, 32)
    begin(drafter, {0: [1, 2]})
    assert propose(drafter, {0: [1, 2]}, Sampling())[0].confidence_BG is None
    with pytest.raises(ValueError, match=r"drafter.confidence=head: a draft model has no confidence head; allowed"):
        DraftModelDrafter(G, confidence="head")
    with pytest.raises(ValueError, match=r"drafter.confidence=sure: must be one of"):
        DraftModelDrafter(G, confidence="sure")

"""Sampling keeps the target's distribution, for every drafter YAML: chi-square over whole texts of three tokens.

The target knows six tokens, so the law of a text can be listed: from the stock model's own logits and a shaping written
here in float64. A drafter that reports another q than it samples from has to fail the same test.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from conformance.toolbox import DRAFTERS, GREEDY_ONLY, decode_all, make_drafter, make_request, open_tiny, outputs_of
from scipy import stats

from baselines.draft_model import DraftModelDrafter
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.types import Draft, Sampling

V, DEPTH, NUM = 6, 3, 3000
SMALL = (
    "target.sources.random.tokenizer=null",
    f"+target.sources.random.config.vocab_size={V}",
    "target.sources.random.config.num_hidden_layers=2",
    "target.sources.random.config.hidden_size=32",
    "target.sources.random.config.initializer_range=0.3",
)
SAMPLINGS = {"plain": Sampling(1.0), "shaped": Sampling(1.2, top_k=5, top_p=0.95)}


@cache
def target() -> TargetModel:
    return open_tiny("tiny", *SMALL)


def shape(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution of one position in float64, token by token."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = sorted(range(V), key=lambda v: (-scaled[v], v))[: sampling.top_k or V]
    weight = np.zeros(V)
    weight[order] = np.exp(scaled[order] - scaled.max())
    weight /= weight.sum()
    if sampling.top_p is not None:
        kept: list[int] = []
        while weight[kept].sum() < sampling.top_p:
            kept.append(order[len(kept)])
        weight[[v for v in range(V) if v not in kept]] = 0.0
    return weight / weight.sum()


@cache
def prompt() -> tuple[int, ...]:
    """A periodic prompt, of all, the one that the model is most likely to go on with: so lookups are often right."""
    periods = list(permutations(range(V)))
    with torch.inference_mode(), target().stock() as model:
        whole = torch.tensor(periods).repeat(1, 3)
        scores = model(whole).logits.log_softmax(-1).gather(-1, whole[:, 1:, None])[:, -2:, 0].sum(-1)
    return (periods[int(scores.argmax())] * 3)[:-2]


@cache
def law(how: str) -> dict[tuple[int, ...], float]:
    """Probability of every text."""
    start = prompt()
    with torch.inference_mode(), target().stock() as model:
        paths = {depth: list(product(range(V), repeat=depth)) for depth in range(DEPTH)}
        logits = {
            depth: model(torch.tensor([[*start, *path] for path in paths[depth]])).logits[:, -1].numpy()
            for depth in range(DEPTH)
        }
    after = {
        path: shape(row, SAMPLINGS[how])
        for depth in range(DEPTH)
        for path, row in zip(paths[depth], logits[depth], strict=True)
    }
    return {
        text: float(np.prod([after[text[:k]][text[k]] for k in range(DEPTH)]))
        for text in product(range(V), repeat=DEPTH)
    }


def sample_texts(drafter: Drafter, sampling: Sampling) -> tuple[Counter[tuple[int, ...]], Counter[str]]:
    """How often each text came, and what happened to the drafts on the way."""
    requests = [replace(make_request(prompt(), num, DEPTH), seed=7919 * num + 2**40) for num in range(NUM)]
    trace = decode_all(target(), drafter, requests, sampling, batch_size=500, num_slots=40)
    events = Counter(
        accepted=sum(r["num_accepted_raw"] for r in trace.rounds),
        rejected=sum(r["num_accepted_raw"] < r["num_verified"] for r in trace.rounds),
    )
    return Counter(tuple(ids) for ids in outputs_of(trace).values()), events


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square against the law; texts expected less than 5 times are pooled, impossible ones may not occur."""
    assert sum(expected.values()) == pytest.approx(1.0)
    assert not [text for text in counts if expected[text] == 0.0]
    common = [text for text in expected if expected[text] * NUM >= 5]
    seen = [counts[text] for text in common]
    due = [expected[text] * NUM for text in common]
    rest = NUM - sum(due)
    if rest >= 5:
        seen, due = [*seen, NUM - sum(seen)], [*due, rest]
    else:
        due = [value * sum(seen) / sum(due) for value in due]
    assert len(due) > 8
    return float(stats.chisquare(seen, due).pvalue)


PLAIN_CASES = [(name, "plain") for name in DRAFTERS if name not in GREEDY_ONLY]


@pytest.mark.parametrize(("name", "how"), [*PLAIN_CASES, ("ngram", "shaped"), ("draft_model", "shaped")])
def test_texts_follow_the_target_s_law(name: str, how: str) -> None:
    drafter = make_drafter(name, "tiny", *SMALL, noise=1.0)
    counts, events = sample_texts(drafter, SAMPLINGS[how])
    assert p_value(counts, law(how)) > 1e-3
    if name in ("ngram", "ngram_hf", "ngram_vllm", "draft_model"):
        assert events["accepted"] > NUM / 20
        assert events["rejected"] > NUM / 20


class Liar(DraftModelDrafter):
    """Samples from its model's q and reports the q of another temperature."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.probs_BGV is not None
        warmer = draft.probs_BGV.sqrt()
        return replace(draft, probs_BGV=warmer / warmer.sum(-1, keepdim=True))


def test_control_a_reported_q_that_was_not_sampled_from_fails() -> None:
    counts, _ = sample_texts(twist(Liar), SAMPLINGS["plain"])
    assert p_value(counts, law("plain")) < 1e-9


def twist(kind: type[DraftModelDrafter]) -> Drafter:
    """The noisy draft model under another class."""
    honest: Any = make_drafter("draft_model", "tiny", *SMALL, noise=1.0)
    return kind(honest.draft_length, honest._spec)

"""Prompt lookup against a slow one in plain Python and against transformers' own candidate generator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from conformance.toolbox import make_drafter, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from baselines.ngram import NgramDrafter
from dispark.decoding.random import RowGenerators
from dispark.interfaces import Drafter
from dispark.types import Features, Outcome, Sampling

STOP = 4
TARGET: Any = SimpleNamespace(stop_ids=frozenset({STOP, 77}))


def slow_lookup(
    tokens: list[int],
    num_prompt: int,
    *,
    draft_length: int,
    min_n: int,
    max_n: int,
    match: str,
    search: str,
    is_cut_at_stop: bool,
) -> list[int]:
    """Tries every n from long to short and every place in the text, as the words of the definition say."""
    searched = tokens[:num_prompt] if search == "prompt" else tokens
    for n in range(max_n, min_n - 1, -1):
        if n >= len(tokens):
            continue
        suffix = tokens[len(tokens) - n :]
        # Something has to follow the occurrence, within what is searched.
        places = [i for i in range(len(searched) - n) if searched[i : i + n] == suffix]
        if places:
            start = places[0 if match == "first" else -1] + n
            found = searched[start : start + draft_length]
            if is_cut_at_stop:
                found = found[: next((i for i, token in enumerate(found) if token in TARGET.stop_ids), len(found))]
            return found
    return []


def begin(drafter: Drafter, prompts: dict[int, list[int]], first_tokens: list[int]) -> None:
    drafter.bind(TARGET, 8, 999)
    requests = [make_request(prompt, row) for row, prompt in prompts.items()]
    drafter.begin(list(prompts), requests, first_tokens, Features(None, [len(p) for p in prompts.values()]))


def propose(drafter: Drafter, rows: list[int]) -> list[list[int]]:
    generators = RowGenerators([0] * len(rows), [1] * len(rows), torch.device("cpu"))
    draft = drafter.propose(rows, torch.zeros(len(rows), dtype=torch.int64), Sampling(), generators)
    assert draft.tokens_BG.dtype == torch.int64
    assert draft.probs_BGV is None
    assert draft.tokens_BG.shape == (len(rows), max(draft.lengths, default=0))
    return [row[:num] for row, num in zip(draft.tokens_BG.tolist(), draft.lengths, strict=True)]


def update(drafter: Drafter, emitted: dict[int, list[int]]) -> None:
    num = len(emitted)
    outcome = Outcome(list(emitted.values()), [0] * num, [None] * num, [False] * num)
    drafter.update(list(emitted), outcome, Features(None, [1] * num))


words = st.lists(st.integers(0, STOP), min_size=1, max_size=12)


@given(
    prompts=st.lists(words, min_size=1, max_size=3),
    rounds=st.lists(st.lists(st.integers(0, STOP), min_size=1, max_size=5), max_size=4),
    draft_length=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    match=st.sampled_from(["first", "last"]),
    search=st.sampled_from(["prompt", "prompt_and_output"]),
    is_cut_at_stop=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_equals_the_slow_lookup(
    prompts: list[list[int]],
    rounds: list[list[int]],
    draft_length: int,
    sizes: list[int],
    match: Literal["first", "last"],
    search: Literal["prompt_and_output", "prompt"],
    is_cut_at_stop: bool,
) -> None:
    options: dict[str, Any] = {
        "draft_length": draft_length,
        "min_n": sizes[0],
        "max_n": sizes[1],
        "match": match,
        "search": search,
        "is_cut_at_stop": is_cut_at_stop,
    }
    drafter = NgramDrafter(**options)
    texts = {row: [*prompt, row % (STOP + 1)] for row, prompt in enumerate(prompts)}
    begin(drafter, dict(enumerate(prompts)), [text[-1] for text in texts.values()])
    for emitted in [*rounds, []]:
        rows = sorted(texts, reverse=True)
        expected = [slow_lookup(texts[row], len(prompts[row]), **options) for row in rows]
        assert propose(drafter, rows) == expected
        if emitted:
            update(drafter, {row: emitted[row:] + emitted[:row] for row in rows})
            for row in rows:
                texts[row] += emitted[row:] + emitted[:row]


@given(st.lists(st.integers(0, STOP), min_size=2, max_size=30))
@settings(max_examples=300, deadline=None)
def test_the_hf_config_is_what_transformers_does(tokens: list[int]) -> None:
    drafter = make_drafter("ngram_hf")
    theirs = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(sorted(TARGET.stop_ids)),
        num_output_tokens=drafter.draft_length,
        max_matching_ngram_size=2,
        max_length=10_000,
    )
    ids = torch.tensor([tokens])
    candidates, _ = theirs.get_candidates(ids)
    begin(drafter, {0: tokens[:-1]}, tokens[-1:])
    assert propose(drafter, [0]) == [candidates[0, len(tokens) :].tolist()]


def test_the_named_variants_differ_as_documented() -> None:
    #         0  1  2  3  4  5  6  7  8  9 10 11
    text = [1, 2, 3, 9, 1, 2, 3, 8, 2, 3, STOP, 1, 2, 3]
    expected = {
        # the longest suffix of up to 3 tokens, the latest occurrence
        "ngram": [8, 2, 3, STOP, 1, 2, 3],
        # up to 2 tokens, the earliest occurrence, cut before a stop
        "ngram_hf": [9, 1, 2, 3, 8, 2, 3],
        # five tokens or nothing
        "ngram_vllm": [],
    }
    for name, tokens in expected.items():
        drafter = make_drafter(name)
        begin(drafter, {0: text[:-1]}, text[-1:])
        assert propose(drafter, [0]) == [tokens], name
    vllm = make_drafter("ngram_vllm")
    begin(vllm, {0: [0, *range(10), 7, *range(4)]}, [4])
    assert propose(vllm, [0]) == [[5, 6, 7, 8, 9]]


def test_rows_of_different_lengths_share_a_draft() -> None:
    drafter = NgramDrafter(draft_length=3, min_n=1, max_n=1)
    begin(drafter, {4: [1, 2, 3, 1, 5], 0: [9], 7: [2, 6]}, [1, 8, 2])
    assert propose(drafter, [7, 4, 0]) == [[6, 2], [5, 1], []]
    update(drafter, {4: [5, 1], 7: [6], 0: [9]})
    assert propose(drafter, [0, 4]) == [[8, 9], [5, 1]]


def test_a_dropped_row_is_forgotten_and_may_come_back() -> None:
    drafter = NgramDrafter()
    begin(drafter, {0: [1, 2, 1], 1: [3, 3]}, [2, 3])
    drafter.drop([0])
    assert propose(drafter, [1]) == [[3]]
    with pytest.raises(KeyError):
        propose(drafter, [0])
    drafter.begin([0], [make_request([5, 6, 5])], [6], Features(None, [3]))
    assert propose(drafter, [0]) == [[5, 6]]
    begin(drafter, {1: [8]}, [8])  # bind forgets everything
    with pytest.raises(KeyError):
        propose(drafter, [0])


def test_long_texts_outgrow_the_buffer() -> None:
    drafter = NgramDrafter(draft_length=4, min_n=2, max_n=2)
    begin(drafter, {0: [1, 2]}, [3])
    for i in range(100):
        update(drafter, {0: [10 + i, 20 + i, 30 + i]})
    update(drafter, {0: [1, 2]})
    assert propose(drafter, [0]) == [[3, 10, 20, 30]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_length": 0}, "drafter.draft_length=0: must be at least 1"),
        ({"min_n": 0}, "drafter.min_n=0, drafter.max_n=3"),
        ({"min_n": 4}, "drafter.min_n=4, drafter.max_n=3: need 1 <= min_n <= max_n"),
        ({"match": "middle"}, "drafter.match=middle: must be first or last"),
        ({"search": "web"}, "drafter.search=web: must be prompt_and_output or prompt"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramDrafter(**options)

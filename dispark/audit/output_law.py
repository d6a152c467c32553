"""The exact joint law of what rows emit under a scheduler and a verifier, and how far it is from the target's.

Rounds are enumerated: every draft of every row, the scheduler's choice for it, every outcome of verification. Rows go
on until each has its first tokens; a row that has them leaves the batch. Places that agree in all tokens and in the
scheduler's state are merged, so a scheduler is copied and compared by its pickled state, and has to be deterministic.

It takes drafters as tables (world.py); that a real drafter reports the law it draws from is for tests/conformance.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import product

import torch

from dispark.audit.verifier_law import Case, Law, laws
from dispark.audit.world import Tokens, World, drafts_after, target_probs
from dispark.decoding.draft_check import draft_limit
from dispark.interfaces import Scheduler, Verifier
from dispark.types import Draft, Load, Outcome

Joint = dict[tuple[Tokens, ...], float]
STEP_S = 0.01  # what a round is said to have taken


def output_law(world: World, make_scheduler: Callable[[], Scheduler], verifier: Verifier, num_tokens: int) -> Joint:
    """Probability of every combination of the rows' first tokens.

    Args:
        world: target and drafter.
        make_scheduler: a fresh scheduler, as at the start of a pass.
        verifier: whose code decides.
        num_tokens: first tokens of each row.
    """
    cases = VerifiedCases(world, verifier, num_tokens)
    start: tuple[Tokens, ...] = tuple(() for _ in range(world.num_rows))
    places = {(start, pickle.dumps(make_scheduler())): 1.0}
    done: Joint = {}
    step = 0
    while places:
        after: dict[tuple[tuple[Tokens, ...], bytes], float] = {}
        for (texts, state), weight in places.items():
            for next_texts, next_state, share in _round(world, cases, texts, state, step, num_tokens):
                if all(len(text) >= num_tokens for text in next_texts):
                    key = tuple(text[:num_tokens] for text in next_texts)
                    done[key] = done.get(key, 0.0) + weight * share
                else:
                    place = (next_texts, next_state)
                    after[place] = after.get(place, 0.0) + weight * share
        places, step = after, step + 1
    return done


def target_law(world: World, num_tokens: int) -> Joint:
    """What the law has to be: rows on their own, each token from the target."""
    rows: list[list[tuple[Tokens, float]]] = []
    for row in range(world.num_rows):
        texts: list[tuple[Tokens, float]] = [((), 1.0)]
        for _ in range(num_tokens):
            texts = [
                ((*text, token), weight * float(share))
                for text, weight in texts
                for token, share in enumerate(target_probs(world, row, text))
                if share > 0.0
            ]
        rows.append(texts)
    found: Joint = {}
    for each in product(*rows):
        weight = 1.0
        for _, share in each:
            weight *= share
        found[tuple(text for text, _ in each)] = weight
    return found


def distance(law: Joint, other: Joint) -> float:
    """The largest difference of two probabilities."""
    return max(abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys())


def draft_of(world: World, rows: list[int], texts: list[Tokens], drafts: list[Tokens]) -> Draft:
    """A round's draft as the loop's drafters report it, confidence included."""
    lengths = [len(draft) for draft in drafts]
    shape = len(rows), max(lengths)
    tokens, confidence = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    probs = torch.zeros((*shape, world.vocab_size), dtype=torch.float64) if has_law(world) else None
    is_sure = True
    for i, (row, text, draft) in enumerate(zip(rows, texts, drafts, strict=True)):
        for k, token in enumerate(draft):
            tokens[i, k] = token
            sure = world.confidence(row, text, draft[:k])
            is_sure = is_sure and sure is not None
            confidence[i, k] = 0.0 if sure is None else sure
            if probs is not None:
                probs[i, k] = torch.from_numpy(world.draft_probs(row, text, draft[:k]))
    return Draft(tokens, lengths, probs, confidence if is_sure else None)


def has_law(world: World) -> bool:
    """Whether a draft comes with the law it was drawn from, as the verifier needs it."""
    return world.proposal == "sampled" and not world.sampling.is_greedy


def load_of(world: World, rows: list[int], texts: list[Tokens], step: int) -> Load:
    """What a scheduler is told of the system."""
    return Load(len(rows), 0, step, [1 + len(text) for text in texts], draft_length=world.draft_length)


class VerifiedCases:
    """Laws of single rows' rounds; rows share no draw, so they are made once and all together."""

    def __init__(self, world: World, verifier: Verifier, num_tokens: int) -> None:
        keys, cases = [], []
        for row in range(world.num_rows):
            prefixes: list[Tokens] = [()]
            for text in prefixes:
                if len(text) + 1 < num_tokens:
                    prefixes += [(*text, token) for token in range(world.vocab_size)]
                for draft, _ in drafts_after(world, row, text):
                    for length in range(len(draft) + 1):
                        keys.append((row, text, draft, length))
                        cases.append(self._case(world, row, text, draft, length))
        self._laws = dict(zip(keys, laws(verifier, cases, world.sampling), strict=True))

    def law(self, row: int, text: Tokens, draft: Tokens, length: int) -> Law:
        """Of the tokens that the round emits."""
        return self._laws[row, text, draft, length]

    @staticmethod
    def _case(world: World, row: int, text: Tokens, draft: Tokens, length: int) -> Case:
        logits = torch.stack([world.target_logits(row, text + draft[:k]) for k in range(length + 1)])
        num_spare = world.draft_length - len(draft)  # cases are all of one width; what is never verified is anything
        probs = None
        if has_law(world):
            each = [torch.from_numpy(world.draft_probs(row, text, draft[:k])) for k in range(len(draft))]
            probs = torch.stack(each + [torch.ones(world.vocab_size, dtype=torch.float64)] * num_spare)
        return Case(draft + (0,) * num_spare, length, logits, probs)


def _round(
    world: World, cases: VerifiedCases, texts: tuple[Tokens, ...], state: bytes, step: int, num_tokens: int
) -> list[tuple[tuple[Tokens, ...], bytes, float]]:
    """Every way a round can go: texts after it, the scheduler's state, and the probability."""
    rows = [row for row, text in enumerate(texts) if len(text) < num_tokens]
    heads = [texts[row] for row in rows]
    load = load_of(world, rows, heads, step)
    scheduler: Scheduler = pickle.loads(state)
    most = draft_limit(scheduler, load, world.draft_length)
    state = pickle.dumps(scheduler)
    found = []
    for joint in product(*(drafts_after(world, row, text) for row, text in zip(rows, heads, strict=True))):
        drafts, weight = [tokens for tokens, _ in joint], 1.0
        for _, share in joint:
            weight *= share
        scheduler = pickle.loads(state)
        # Whole drafts are enumerated; of a shorter one the tokens behind its end decide nothing.
        lengths = scheduler.choose(draft_of(world, rows, heads, [draft[:most] for draft in drafts]), load)
        chosen = pickle.dumps(scheduler)
        each = [cases.law(r, t, d, n).items() for r, t, d, n in zip(rows, heads, drafts, lengths, strict=True)]
        for results in product(*each):
            emitted = [list(tokens) for tokens, _ in results]
            share = weight
            for _, chance in results:
                share *= chance
            after = list(texts)
            for row, tokens in zip(rows, emitted, strict=True):
                after[row] = texts[row] + tuple(tokens)
            scheduler = pickle.loads(chosen)
            num = len(rows)
            accepted = [len(tokens) - 1 for tokens in emitted]
            scheduler.observe(Outcome(emitted, accepted, [None] * num, [False] * num), lengths, STEP_S)
            found.append((tuple(after), pickle.dumps(scheduler), share))
    return found

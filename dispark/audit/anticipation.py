"""Does a scheduler anticipate? Whether token k is verified must not move with token k or what follows it.

For every draft of every row, position k and what follows are replaced by every alternative, together with the
confidences that depend on them; the other rows stay. A row that verified k must go on doing so, and one that didn't
must not start. This finds the fault itself where the output law shows only its consequence, and that only if p and q
differ there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from dispark.audit.output_law import STEP_S, draft_of, load_of
from dispark.audit.world import Tokens, World, drafts_after
from dispark.decoding.draft_check import draft_limit
from dispark.interfaces import Scheduler
from dispark.types import FinishReason, Outcome


@dataclass(frozen=True)
class Anticipation:
    """A decision that moved: in `row`, position k (from 1) is verified with one draft and not with the other."""

    row: int
    k: int
    draft: Tokens
    other: Tokens
    lengths: tuple[int, int]


def find_anticipation(
    world: World, make_scheduler: Callable[[], Scheduler], num_rounds: int = 6
) -> Anticipation | None:
    """The first decision that moves with what it must not know, or None.

    Args:
        world: target and drafter.
        make_scheduler: a fresh scheduler.
        num_rounds: rounds tried one after the other, each learned from before the next, so that schedulers with a
            memory have one; in turns everything and nothing of a draft is accepted.
    """
    rows = list(range(world.num_rows))
    scheduler = make_scheduler()
    texts: list[Tokens] = [() for _ in rows]
    for step in range(num_rounds):
        every = [[tokens for tokens, _ in drafts_after(world, row, texts[row])] for row in rows]
        lengths = {joint: _choose(world, scheduler, rows, texts, list(joint), step) for joint in product(*every)}
        for joint, chosen in lengths.items():
            for row in rows:
                for other in every[row]:
                    k = _first_difference(joint[row], other)
                    if k is None:
                        continue
                    changed = lengths[(*joint[:row], other, *joint[row + 1 :])]
                    before, after = min(chosen[row], k), min(changed[row], k)
                    if before != after:
                        position = min(before, after) + 1
                        return Anticipation(row, position, joint[row], other, (chosen[row], changed[row]))
        # One of the drafts is taken as the past of the next round.
        joint = next(iter(lengths))
        chosen = _ask(world, scheduler, rows, texts, list(joint), step)
        kept = [num if step % 2 == 0 else 0 for num in chosen]
        emitted = [[*tokens[:num], 0] for tokens, num in zip(joint, kept, strict=True)]
        ends: list[FinishReason | None] = [None] * len(rows)
        scheduler.observe(Outcome(emitted, kept, ends, [False] * len(rows)), chosen, STEP_S)
        texts = [(*text, *tokens) for text, tokens in zip(texts, emitted, strict=True)]
    return None


def _choose(
    world: World, scheduler: Scheduler, rows: list[int], texts: list[Tokens], drafts: list[Tokens], step: int
) -> list[int]:
    copy: Scheduler = pickle.loads(pickle.dumps(scheduler))
    return _ask(world, copy, rows, texts, drafts, step)


def _ask(
    world: World, scheduler: Scheduler, rows: list[int], texts: list[Tokens], drafts: list[Tokens], step: int
) -> list[int]:
    load = load_of(world, rows, texts, step)
    most = draft_limit(scheduler, load, world.draft_length)
    return scheduler.choose(draft_of(world, rows, texts, [draft[:most] for draft in drafts]), load)


def _first_difference(tokens: Tokens, other: Tokens) -> int | None:
    """The first position, from 1, at which two drafts differ."""
    for k, (token, instead) in enumerate(zip(tokens, other, strict=True), start=1):
        if token != instead:
            return k
    return None

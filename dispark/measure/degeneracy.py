"""Tells looping text from text, by token ids alone.

A repetition loop is the easiest text to draft: an n-gram drafter guesses all of it, and the fastest arm of a
benchmark may be the one that goes round in circles. So every speed carries this check beside it.

What it does not know: meaning. Honest output can repeat (a table, a refrain, a list of zeros), and fluent nonsense need
not. The thresholds are the project's own choice, stated below; every result carries the plain shares too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# A loop: a block of 1..MAX_PERIOD tokens, MIN_REPEATS whole copies in a row, MIN_LOOP_TOKENS tokens or more in all.
# Four copies leave alone what prose and code repeat on purpose; sixteen tokens, a ruled line or a run of blanks.
MAX_PERIOD = 128
MIN_REPEATS = 4
MIN_LOOP_TOKENS = 16
# Shorter outputs get no verdict: too few n-grams to tell.
MIN_OUTPUT_TOKENS = 64
# Degenerate: a quarter of the tokens or more inside loops ...
MAX_LOOP_SHARE = 0.25
# ... or under 40 % of the 4-grams in the last TAIL_TOKENS tokens different: near-loops, whose copies vary a counter.
# Only a tail of fixed length, because distinct-n falls with length in healthy text too. Of 3,085 texts by people (the
# questions of eight published benchmarks, Python sources) the verdict falls on 5 cut in words and on 33 cut in bytes.
MIN_TAIL_DISTINCT_4 = 0.4
TAIL_TOKENS = 256
MAX_N = 4


@dataclass(frozen=True)
class Degeneracy:
    """Repetition in one output.

    Args:
        num_tokens: tokens in the output.
        num_loop_tokens: tokens inside any loop.
        loop_share: num_loop_tokens / num_tokens; None for an empty output.
        trailing_period: length of the block that the output ends in repeating, or None. A stop token ends a loop.
        trailing_loop_share: share of tokens inside that last loop, 0.0 without one; None for an empty output.
        distinct: different n-grams over all n-grams for n = 1..4 (Li et al. 2016, section 5, who divide by tokens;
            1 - distinct[3] is seq-rep-4 of Welleck et al. 2020, section 6); None where the output is shorter than n.
        tail_distinct_4: distinct[3] over the last TAIL_TOKENS tokens.
        is_degenerate: the verdict; None where the output is too short to be judged.
        cause: "loop" or "near_loop" for a degenerate output, else None.
    """

    num_tokens: int
    num_loop_tokens: int
    loop_share: float | None
    trailing_period: int | None
    trailing_loop_share: float | None
    distinct: tuple[float | None, ...]
    tail_distinct_4: float | None
    is_degenerate: bool | None
    cause: Literal["loop", "near_loop"] | None


@dataclass(frozen=True)
class DegeneracySummary:
    """Repetition over many outputs. Shares are over judged outputs, None where there is none.

    Args:
        num_outputs: all outputs.
        num_judged: outputs long enough for a verdict.
        num_degenerate: of those.
        degenerate_share: num_degenerate / num_judged.
        loop_token_share: tokens inside loops over tokens, a ratio of sums over judged outputs.
        distinct: for n = 1..4 the mean over judged outputs.
    """

    num_outputs: int
    num_judged: int
    num_degenerate: int
    degenerate_share: float | None
    loop_token_share: float | None
    distinct: tuple[float | None, ...]


def check(output_ids: Sequence[int]) -> Degeneracy:
    """Judges one output.

    Args:
        output_ids: its token ids, prompt excluded; a list, tuple or 1-D integer array.

    Raises:
        ValueError: not a flat sequence of whole numbers.
    """
    tokens = _ranks(output_ids)
    num_tokens = len(tokens)
    in_loop, trailing_period, trailing_tokens = _loops(tokens)
    num_loop_tokens = int(in_loop.sum())
    distinct = tuple(_distinct(tokens, n) for n in range(1, MAX_N + 1))
    tail_distinct_4 = _distinct(tokens[-TAIL_TOKENS:], 4)
    is_judged = num_tokens >= MIN_OUTPUT_TOKENS
    cause: Literal["loop", "near_loop"] | None = None
    if is_judged and num_loop_tokens >= MAX_LOOP_SHARE * num_tokens:
        cause = "loop"
    elif is_judged and tail_distinct_4 is not None and tail_distinct_4 < MIN_TAIL_DISTINCT_4:
        cause = "near_loop"
    return Degeneracy(
        num_tokens=num_tokens,
        num_loop_tokens=num_loop_tokens,
        loop_share=num_loop_tokens / num_tokens if num_tokens else None,
        trailing_period=trailing_period,
        trailing_loop_share=trailing_tokens / num_tokens if num_tokens else None,
        distinct=distinct,
        tail_distinct_4=tail_distinct_4,
        is_degenerate=cause is not None if is_judged else None,
        cause=cause,
    )


def summarise(outputs: Iterable[Sequence[int]]) -> DegeneracySummary:
    """Judges each output and adds up.

    Raises:
        ValueError: an output is not a flat sequence of whole numbers.
    """
    checks = [check(output_ids) for output_ids in outputs]
    judged = [result for result in checks if result.is_degenerate is not None]
    num_degenerate = sum(result.is_degenerate is True for result in judged)
    num_tokens = sum(result.num_tokens for result in judged)
    # Judged outputs hold at least MIN_OUTPUT_TOKENS > MAX_N tokens, so each n has a value.
    columns = zip(*(result.distinct for result in judged), strict=True)
    means = tuple(float(np.mean([value for value in column if value is not None])) for column in columns)
    return DegeneracySummary(
        num_outputs=len(checks),
        num_judged=len(judged),
        num_degenerate=num_degenerate,
        degenerate_share=num_degenerate / len(judged) if judged else None,
        loop_token_share=sum(result.num_loop_tokens for result in judged) / num_tokens if judged else None,
        distinct=means if judged else (None,) * MAX_N,
    )


def _ranks(output_ids: Sequence[int]) -> NDArray[np.int64]:
    """The ids renumbered 0..k-1, so that nothing after depends on the vocabulary."""
    try:
        tokens = np.asarray(output_ids)
    except ValueError as error:  # ragged lists
        raise ValueError("output_ids: must be a flat sequence of whole numbers, got nested lists") from error
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(f"output_ids: must be a flat sequence of whole numbers, got {tokens.ndim}-D {tokens.dtype}")
    return np.unique(tokens, return_inverse=True)[1].astype(np.int64)


def _loops(tokens: NDArray[np.int64]) -> tuple[NDArray[np.bool_], int | None, int]:
    """Marks the tokens inside loops; also period and length of the trailing loop (the longest, then shortest period).

    A run of m places where tokens[i] == tokens[i - p] is a stretch of m + p tokens with period p.
    """
    num_tokens = len(tokens)
    edges = np.zeros(num_tokens + 1, dtype=np.int64)  # +1 where a loop starts, -1 behind its end
    trailing_period, trailing_tokens = None, 0
    for period in range(1, min(MAX_PERIOD, num_tokens // MIN_REPEATS) + 1):
        shortest = max((MIN_REPEATS - 1) * period, MIN_LOOP_TOKENS - period)
        is_same = tokens[period:] == tokens[:-period]
        if np.count_nonzero(is_same) < shortest:
            continue
        steps = np.flatnonzero(np.diff(is_same, prepend=False, append=False))
        starts, ends = steps[::2], steps[1::2]
        is_loop = ends - starts >= shortest
        starts, ends = starts[is_loop], ends[is_loop] + period
        np.add.at(edges, starts, 1)
        np.add.at(edges, ends, -1)
        if len(ends) and ends[-1] == num_tokens and num_tokens - starts[-1] > trailing_tokens:
            trailing_period, trailing_tokens = period, int(num_tokens - starts[-1])
    return np.cumsum(edges[:-1]) > 0, trailing_period, trailing_tokens


def _distinct(tokens: NDArray[np.int64], n: int) -> float | None:
    """Different n-grams over all n-grams, or None where there is no n-gram."""
    if len(tokens) < n:
        return None
    size = int(tokens.max()) + 1
    grams = tokens
    for offset in range(1, n):
        # Renumbered at each step: at most len(tokens) different values, so the product can't overflow.
        grams = np.unique(grams[: len(tokens) - offset], return_inverse=True)[1] * size + tokens[offset:]
    return len(np.unique(grams)) / len(grams)

"""Acceptance by draft position, from the recorded rounds, and its closed form.

Two rates share the word "acceptance" in the literature, so both are always named in full: `acceptance_at[k]` is prefix
survival, `conditional_acceptance_at[k]` is the rate given that positions 1..k-1 were accepted. Lists start at k = 1.

What a round that was cut says. A stop token among the accepted drafts ends the text, so the drafts behind it belong
to no text: such a round was observed up to the cut and no further. A length or context cap cuts a text that would have
gone on, so the verifier's whole verdict counts; dropping it would remove just the long acceptances. The module sees
counts only, no tokens and no times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

STOP_ENDS = ("stop", "stop_string")

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PositionCounts:
    """Per round and draft position k = 1..G, as booleans [R, G] of one row a round.

    Args:
        verified_RG: position k was verified and lies within what the round shows.
        accepted_RG: positions 1..k were all accepted.
        reached_RG: position k was verified and positions 1..k-1 were accepted.
    """

    verified_RG: Bools
    accepted_RG: Bools
    reached_RG: Bools


def is_cut(rounds: pd.DataFrame) -> Bools:
    """[R] whether the verifier granted more than was emitted, because of a stop token, a stop string or a cap."""
    granted = rounds["num_accepted_raw"].to_numpy(np.int64) + 1
    return rounds["num_emitted"].to_numpy(np.int64) < granted


def is_stop_cut(rounds: pd.DataFrame, stop_ends: Sequence[str] = STOP_ENDS) -> Bools:
    """[R] whether the round was cut because an accepted draft ended the text."""
    return is_cut(rounds) & rounds["end"].isin(list(stop_ends)).to_numpy(np.bool_)


def observed_lengths(rounds: pd.DataFrame) -> tuple[Ints, Ints]:
    """What each round shows: drafts verified and drafts accepted, [R] each, by the rule in the module's docstring."""
    stopped = is_stop_cut(rounds)
    kept = rounds["num_accepted"].to_numpy(np.int64)
    verified = np.where(stopped, kept, rounds["num_verified"].to_numpy(np.int64))
    accepted = np.where(stopped, kept, rounds["num_accepted_raw"].to_numpy(np.int64))
    return verified, accepted


def position_counts(rounds: pd.DataFrame, draft_length: int) -> PositionCounts:
    """Counts of every round for positions 1..draft_length."""
    verified, accepted = observed_lengths(rounds)
    positions = np.arange(1, draft_length + 1)
    verified_RG = verified[:, None] >= positions
    return PositionCounts(
        verified_RG=verified_RG,
        accepted_RG=accepted[:, None] >= positions,
        reached_RG=verified_RG & (accepted[:, None] >= positions - 1),
    )


def acceptance_at(rounds: pd.DataFrame, draft_length: int) -> list[float | None]:
    """Prefix survival: rounds that accepted positions 1..k over rounds that verified position k; None if none did."""
    counts = position_counts(rounds, draft_length)
    return _rates(counts.accepted_RG, counts.verified_RG)


def conditional_acceptance_at(rounds: pd.DataFrame, draft_length: int) -> list[float | None]:
    """Rounds that accepted position k over rounds that verified it after accepting 1..k-1; None if there are none."""
    counts = position_counts(rounds, draft_length)
    return _rates(counts.accepted_RG, counts.reached_RG)


def expected_acceptance_at(conditional_rates: Sequence[float]) -> list[float]:
    """Prefix survival that follows from conditional rates when every round verifies all positions: running products."""
    return [float(rate) for rate in np.cumprod(np.asarray(conditional_rates, dtype=np.float64))]


def expected_matl(conditional_rates: Sequence[float]) -> float:
    """Tokens per uncut round when position k is accepted with rate k given those before it: 1 + sum of products.

    Leviathan et al. 2023, equation 1, is the special case of equal rates; with rates that differ by position their
    formula applied to the mean rate is wrong.
    """
    return 1.0 + sum(expected_acceptance_at(conditional_rates))


def _rates(numerator_RG: Bools, denominator_RG: Bools) -> list[float | None]:
    pairs = zip(numerator_RG.sum(axis=0), denominator_RG.sum(axis=0), strict=True)
    return [float(hits) / float(tries) if tries else None for hits, tries in pairs]

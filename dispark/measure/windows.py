"""Adds the energy windows of one arm, and says when the sum may be reported.

Interleaved arms make several short windows each. What it does not know: which windows belong together, and how noisy
the sensor is within its update period; the bounds below are worst cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dispark.types import EnergyReading

DEFAULT_MIN_WINDOW_S = 2.0
# How stale a reading may be, by source. Each window's two edges are blurred by up to this much.
UPDATE_PERIOD_S = {"nvml_counter": 0.1, "nvml_power": 0.1, "rapl": 0.001}
# Of the summed windows, at most this share may lie within one update period of a window's edge.
MAX_EDGE_SHARE = 0.25
SHORT_WINDOW = "a window is shorter than min_window_s: its joules are only good for adding up"


def combine(readings: Sequence[EnergyReading], min_window_s: float = DEFAULT_MIN_WINDOW_S) -> EnergyReading:
    """Adds the windows of one arm and decides whether the sum may be reported. Apply it once, to a meter's windows.

    `energy_j` is None where any part is None, the parts come from different sensors, the summed windows are shorter
    than `min_window_s`, the sensor did not move, or the windows are so short that their edges (one update period of the
    sensor each) make up more than MAX_EDGE_SHARE of them: twenty windows of 0.1 s are not one of 2 s, because a stale
    counter moves joules into the window of the next arm. Idle power is the mean weighted by seconds; warnings are
    merged.
    """
    if not readings:
        return EnergyReading(None, 0.0, "none", "none", reason="no window was measured")
    window_s = math.fsum(reading.window_s for reading in readings)
    sources, scopes = _unique(r.source for r in readings), _unique(r.scope for r in readings)
    warnings = [text for text in _unique(w for r in readings for w in r.warnings) if text != SHORT_WINDOW]
    reason = _refusal(readings, window_s, sources, scopes, min_window_s)
    short = sum(reading.window_s < min_window_s for reading in readings)
    if reason is None and short:
        blur = len(readings) * UPDATE_PERIOD_S.get(sources[0], 0.0) / window_s
        count = f"{short} of {len(readings)} windows"
        warnings.append(f"{count} are shorter than {min_window_s:g} s: their edges may blur {blur:.1%} of the sum")
    idle = [reading.idle_power_w for reading in readings]
    estimates = [reading.estimated_energy_j for reading in readings]
    return EnergyReading(
        energy_j=None if reason else math.fsum(r.energy_j for r in readings if r.energy_j is not None),
        window_s=window_s,
        source=sources[0] if len(sources) == 1 else "mixed",
        scope=scopes[0] if len(scopes) == 1 else "; ".join(scopes),
        idle_power_w=_weighted(idle, [reading.window_s for reading in readings]),
        reason=reason,
        warnings=tuple(warnings),
        estimated_energy_j=None if None in estimates else math.fsum(e for e in estimates if e is not None),
    )


def _refusal(
    readings: Sequence[EnergyReading], window_s: float, sources: list[str], scopes: list[str], min_window_s: float
) -> str | None:
    """Why the sum is not reportable, or None."""
    missing = [reading for reading in readings if reading.energy_j is None]
    if missing:
        reasons = "; ".join(_unique(reading.reason or "no reason given" for reading in missing))
        return reasons if len(missing) == len(readings) else f"{len(missing)} of {len(readings)} windows: {reasons}"
    if len(sources) > 1 or len(scopes) > 1:
        return f"the windows were read from different sensors: {'; '.join(_unique(sources + scopes))}"
    if window_s < min_window_s:
        return f"the windows add up to {window_s:.2f} s; joules are reported from {min_window_s:g} s on"
    if math.fsum(reading.energy_j or 0.0 for reading in readings) <= 0:
        return f"the sensor did not move in {window_s:.1f} s"
    period_s = UPDATE_PERIOD_S.get(sources[0], 0.0)
    if len(readings) * period_s > MAX_EDGE_SHARE * window_s:
        shortest_s = period_s / MAX_EDGE_SHARE
        return (
            f"windows of {window_s / len(readings):.2f} s on average are too short for {sources[0]}: {shortest_s:g} s"
        )
    return None


def _weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    total = math.fsum(weights)
    if total <= 0:
        return known[0]
    return math.fsum(value * weight for value, weight in zip(known, weights, strict=True)) / total


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))

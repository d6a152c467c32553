"""Adding windows: what is reported, what is refused, and why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispark.measure.windows import SHORT_WINDOW, combine
from dispark.types import EnergyReading


def reading(energy_j=100.0, window_s=1.0, source="nvml_counter", scope="gpu board 0", **rest) -> EnergyReading:
    return EnergyReading(energy_j, window_s, source, scope, **rest)


def test_windows_add():
    total = combine([reading(100.0, 1.5, idle_power_w=50.0), reading(200.0, 2.5, idle_power_w=50.0)])
    assert total.energy_j == 300.0
    assert total.window_s == 4.0
    assert total.net_energy_j == pytest.approx(100.0)
    assert (total.source, total.scope, total.reason) == ("nvml_counter", "gpu board 0", None)
    assert total.estimated_energy_j is None


def test_short_total_is_none_with_the_reason():
    total = combine([reading(100.0, 0.9, warnings=(SHORT_WINDOW,))] * 2)
    assert total.energy_j is None
    assert total.reason == "the windows add up to 1.80 s; joules are reported from 2 s on"
    assert total.warnings == ()


def test_the_bound_itself_is_long_enough():
    assert combine([reading(100.0, 2.0)]).energy_j == 100.0
    assert combine([reading(100.0, 0.5)], min_window_s=0.5).energy_j == 100.0


def test_short_windows_in_a_long_total_are_reported_with_a_warning():
    parts = [reading(100.0, 1.0, warnings=(SHORT_WINDOW, "shared")), reading(300.0, 3.0, warnings=("shared",))]
    total = combine(parts)
    assert total.energy_j == 400.0
    assert total.warnings == (
        "shared",
        "1 of 2 windows are shorter than 2 s: their edges may blur 5.0% of the sum",
    )


def test_many_tiny_windows_do_not_make_a_long_one():
    tiny = [reading(20.0, 0.1)] * 50
    assert combine(tiny).energy_j is None
    assert combine(tiny).reason == "windows of 0.10 s on average are too short for nvml_counter: 0.4 s"
    # RAPL refreshes each millisecond, so there the same windows are fine.
    assert combine([reading(20.0, 0.1, "rapl", "cpu")] * 50).energy_j == pytest.approx(1000.0)


def test_one_missing_part_makes_the_sum_missing():
    lost = reading(None, 1.0, reason="GPU is lost")
    total = combine([reading(100.0, 5.0), lost, lost])
    assert total.energy_j is None
    assert total.reason == "2 of 3 windows: GPU is lost"
    assert combine([lost, lost]).reason == "GPU is lost"
    assert combine([reading(None, 5.0)]).reason == "no reason given"


def test_different_sensors_do_not_add():
    total = combine([reading(100.0, 5.0), reading(100.0, 5.0, "rapl", "cpu packages package-0")])
    assert total.energy_j is None
    assert "different sensors" in total.reason
    assert total.source == "mixed"
    assert total.scope == "gpu board 0; cpu packages package-0"
    assert combine([reading(window_s=5.0), reading(window_s=5.0, scope="gpu board 1")]).energy_j is None


def test_a_sensor_that_stood_still_is_missing_not_zero():
    total = combine([reading(0.0, 2.0), reading(0.0, 2.0)])
    assert total.energy_j is None
    assert total.reason == "the sensor did not move in 4.0 s"


def test_idle_power_is_weighted_and_missing_with_any_part():
    parts = [reading(100.0, 1.0, idle_power_w=10.0), reading(100.0, 3.0, idle_power_w=30.0)]
    assert combine(parts).idle_power_w == pytest.approx(25.0)
    assert combine([*parts, reading(100.0, 1.0)]).idle_power_w is None
    assert combine([*parts, reading(100.0, 1.0)]).net_energy_j is None
    assert combine([reading(1.0, 0.0, idle_power_w=10.0)]).idle_power_w == 10.0


def test_estimates_add_apart_from_joules():
    total = combine([reading(None, 1.0, reason="no sensor", estimated_energy_j=15.0)] * 2)
    assert total.energy_j is None
    assert total.estimated_energy_j == 30.0
    assert combine([reading(estimated_energy_j=15.0), reading()]).estimated_energy_j is None


def test_no_window():
    total = combine([])
    assert total.energy_j is None
    assert total.reason == "no window was measured"
    assert total.window_s == 0.0


@given(st.lists(st.tuples(st.floats(0.5, 100.0), st.floats(1.0, 1e4)), min_size=1, max_size=20), st.randoms())
def test_order_does_not_matter(parts, random):
    readings = [reading(joules, seconds) for seconds, joules in parts]
    shuffled = random.sample(readings, len(readings))
    one, other = combine(readings), combine(shuffled)
    assert (one.energy_j, one.window_s, one.reason) == (other.energy_j, other.window_s, other.reason)
    if one.energy_j is not None:
        assert one.energy_j == pytest.approx(sum(joules for _, joules in parts))

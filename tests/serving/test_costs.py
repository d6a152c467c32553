"""Costs of steps: those of a profile, and those of a roofline by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dispark.schedulers.profile import Profile, Table
from dispark.serving.costs import Drafting, Hardware, MeasuredCost, Network, RooflineCost

VERIFY = Table((1, 4), (1, 2), (((1.0,), (1.5,)), ((2.0,), (4.0,))))
DRAFT = Table((1, 4), (1, 3), (((0.1,), (0.3,)), ((0.2,), (0.6,))))


def profile(path: Path, **parts: Any) -> str:
    whole: dict[str, Any] = {"prefill": {16: (0.4,), 64: (1.6,)}, "drafts": {"dispark": DRAFT}} | parts
    Profile({}, 8, VERIFY, **whole).save(path)
    return str(path)


def test_measured_times(tmp_path: Path) -> None:
    cost = MeasuredCost(profile(tmp_path / "p.json"), "dispark", host_s=0.01)
    assert cost.verify_s(1, 2, 999) == pytest.approx(1.51)
    assert cost.verify_s(4, 6, 0) == pytest.approx(3.01)
    assert cost.step_cost(4).seconds == (2.0, 4.0)
    assert cost.draft_s(4, 3) == pytest.approx(0.6)
    assert cost.draft_s(1, 2) == pytest.approx(0.2)
    assert cost.draft_s(1, 0) == 0.0
    assert [cost.prefill_s(num) for num in (4, 16, 40, 128)] == pytest.approx([0.1, 0.4, 1.0, 3.2])
    assert MeasuredCost(profile(tmp_path / "p.json")).draft_s(4, 3) == 0.0


def test_profiles_that_lack_something(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no times of drafter eagle3, only of: dispark"):
        MeasuredCost(profile(tmp_path / "p.json"), "eagle3")
    with pytest.raises(ValueError, match="has no prefill times"):
        MeasuredCost(profile(tmp_path / "p.json", prefill={}))
    with pytest.raises(ValueError, match=r"engine\.path=.*: there is no such file"):
        MeasuredCost(str(tmp_path / "none.json"))


FAST = Hardware(bandwidth=100.0, flops=1000.0, efficiency=1.0, overhead_s=0.0)


def test_a_dense_network_is_bound_by_reading_then_by_computing() -> None:
    cost = RooflineCost(FAST, Network(dense_params=50.0, kv_bytes=1.0))
    assert cost.verify_s(1, 1, 0) == pytest.approx(1.0)  # 100 bytes at 100 a second; 100 operations take a tenth
    assert cost.verify_s(1, 1, 50) == pytest.approx(1.5)
    assert cost.verify_s(20, 20, 0) == pytest.approx(2.0)
    assert cost.step_cost(2).seconds_at(2) == pytest.approx(1.0)
    slower = RooflineCost(Hardware(100.0, 1000.0, 0.5, 0.25), Network(50.0))
    assert slower.verify_s(1, 1, 0) == pytest.approx(2.25)


def test_experts_are_read_as_tokens_need_them() -> None:
    network = Network(dense_params=10.0, expert_params=5.0, num_experts=8, active_experts=2, bytes_per_param=1.0)
    assert network.bytes_read(1) == pytest.approx(10 + 2 * 5)
    assert 10 + 3 * 5 < network.bytes_read(2) < 10 + 4 * 5
    assert network.bytes_read(1000) == pytest.approx(10 + 8 * 5)
    assert network.flops_per_token == 2 * (10 + 2 * 5)
    packed = Network(10.0, 0.0, 5.0, 8, 2, bytes_per_param=1.0, expert_bytes_per_param=0.5)
    assert packed.bytes_read(1) == pytest.approx(10 + 0.5 * 2 * 5)


def test_a_block_is_read_once_and_a_chain_for_every_token() -> None:
    network = Network(50.0)
    block = RooflineCost(FAST, network, Drafting(network=Network(5.0), sequential_s=0.01))
    chain = RooflineCost(FAST, network, Drafting(network=Network(5.0), passes="chain", overhead_s=0.02))
    assert block.draft_s(1, 4) == pytest.approx(0.1 + 0.04)
    assert chain.draft_s(1, 4) == pytest.approx(4 * 0.12)
    assert RooflineCost(FAST, network).draft_s(1, 4) == 0.0
    assert block.draft_s(1, 0) == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hardware(0.0, 1.0), r"engine\.hardware\.bandwidth=0\.0: must be a number above 0"),
        (lambda: Hardware(1.0, 1.0, overhead_s=-1), r"engine\.hardware\.overhead_s=-1"),
        (lambda: Network(0.0), r"network\.dense_params=0\.0"),
        (lambda: Network(1.0, active_experts=2), r"network\.active_experts=2: must lie in 0 to num_experts=0"),
        (lambda: Drafting(passes="tree"), r"drafting\.passes=tree: must be block or chain"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

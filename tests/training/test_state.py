"""States on disk: whole or absent, pruned, and refused when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dispark.training.state import StateStore

TENSORS = {"a": {"w": torch.arange(3.0), "step": torch.tensor(2.0)}, "b": {"w": torch.ones(2, 2).t()}}


def test_a_state_comes_back(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state")
    assert store.steps() == []
    store.save(7, {"totals": {"tokens": 3}}, TENSORS)
    meta, tensors = store.load(7, ["a", "b"])
    assert meta == {"step": 7, "totals": {"tokens": 3}}
    for name, state in TENSORS.items():
        assert all(torch.equal(tensors[name][key], value) for key, value in state.items())


def test_old_states_go_and_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    store = StateStore(tmp_path, keep=2)
    for step in (5, 100, 20):
        store.save(step, {}, TENSORS)
    assert store.steps() == [20, 100]
    (tmp_path / ".writing").mkdir()
    (tmp_path / ".writing" / "a.safetensors").write_bytes(b"half")
    assert store.steps() == [20, 100]
    store.save(100, {"again": True}, TENSORS)
    assert store.load(100, ["a"])[0]["again"]


def test_a_damaged_file(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    store.save(1, {}, TENSORS)
    (store.path(1) / "a.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"can't be read .*; remove it to go on from the one before"):
        store.load(1, ["a", "b"])

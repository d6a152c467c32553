"""int8 rows: how far from the weights they are, what stays, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conformance.toolbox import open_tiny
from safetensors.torch import load_file, save_file

from dispark.drafters.checkpoint import open_checkpoint
from dispark.drafters.semi_autoregressive import BlockShape, SemiAutoregressiveDrafter
from dispark.drafters.storage import SCALE, compress, expand, write_compact


def test_half_a_step_of_each_rows_scale() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 80) * torch.logspace(-3, 3, 64).unsqueeze(1)
    matrix[5] = 0
    found = compress({"w": matrix, "norm": torch.ones(9000), "small": torch.randn(3, 4), "ids": torch.arange(5000)})
    assert found["w"].dtype == torch.int8
    assert set(found) == {"w", "w" + SCALE, "norm", "small", "ids"}
    back = expand(found, "x")
    assert set(back) == {"w", "norm", "small", "ids"}
    step = matrix.abs().amax(1, keepdim=True) / 127
    assert bool(((back["w"] - matrix).abs() <= 0.5001 * step).all())
    assert not back["w"][5].any()
    assert torch.equal(back["small"], found["small"])


def test_a_scale_without_its_matrix() -> None:
    for tensors in ({"w" + SCALE: torch.ones(3)}, {"w": torch.ones(3, 2), "w" + SCALE: torch.ones(3)}):
        with pytest.raises(ValueError, match=r"drafter.checkpoint=x: w.int8_scale has no int8 matrix"):
            expand(tensors, "x")


def test_a_compact_checkpoint_drafts_nearly_the_same(tmp_path: Path) -> None:
    target = open_tiny("tiny")
    drafter = SemiAutoregressiveDrafter(random=BlockShape(rank=32))
    drafter.bind(target, 1, 32)
    drafter.save(tmp_path / "full", has_ends=False)
    (tmp_path / "full" / "README.md").write_text("card")
    size = write_compact(tmp_path / "full", tmp_path / "compact")
    assert size < 0.4 * (tmp_path / "full" / "model.safetensors").stat().st_size
    assert (tmp_path / "compact" / "README.md").read_text() == "card"
    full, compact = (open_checkpoint(str(tmp_path / name)).tensors for name in ("full", "compact"))
    assert set(full) == set(compact)
    for name, weight in full.items():
        torch.testing.assert_close(compact[name], weight.float(), rtol=0, atol=float(weight.abs().max()) / 200)
    again = SemiAutoregressiveDrafter(str(tmp_path / "compact"))
    again.bind(target, 1, 32)
    assert again.draft_length == drafter.draft_length


def test_no_checkpoint_tells_where_its_target_lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_tiny("tiny")
    for key in ("_name_or_path", "_model_name_or_path"):
        monkeypatch.setattr(target.model.config, key, "/home/somebody/model", raising=False)
    drafter = SemiAutoregressiveDrafter(random=BlockShape(rank=32))
    drafter.bind(target, 1, 32)
    drafter.save(tmp_path / "full", has_ends=False)
    config = tmp_path / "full" / "config.json"
    assert "somebody" not in config.read_text()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_name_or_path": "/home/somebody/model"}))
    write_compact(tmp_path / "full", tmp_path / "compact")
    assert "somebody" not in (tmp_path / "compact" / "config.json").read_text()


def test_a_compact_file_with_a_row_too_many(tmp_path: Path) -> None:
    drafter = SemiAutoregressiveDrafter(random=BlockShape(rank=32))
    drafter.bind(open_tiny("tiny"), 1, 32)
    drafter.save(tmp_path / "full", has_ends=False)
    write_compact(tmp_path / "full", tmp_path / "compact")
    tensors = load_file(tmp_path / "compact" / "model.safetensors")
    tensors["fc.weight" + SCALE] = torch.ones(3)
    save_file(tensors, tmp_path / "compact" / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc.weight.int8_scale has no int8 matrix of as many rows"):
        SemiAutoregressiveDrafter(str(tmp_path / "compact"))
    assert json.loads((tmp_path / "compact" / "config.json").read_text())["block_size"] == 7

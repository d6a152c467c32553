"""Medusa's heads: their arithmetic written out, and the files in which they come."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.toolbox import open_tiny
from safetensors.torch import save_file
from torch import Tensor

from baselines.medusa import MedusaDrafter, MedusaHeads, MedusaShape, count
from dispark.decoding.target import TargetModel

TARGET = open_tiny("tiny")
D, V = TARGET.hidden_size, TARGET.vocab_size


def draw_tensors(num_heads: int = 3, num_layers: int = 2, vocab_size: int = V) -> dict[str, Tensor]:
    """Heads under the authors' names."""
    generator = torch.Generator().manual_seed(num_heads + num_layers)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / D**0.5

    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = noise(D, D)
            tensors[f"{head}.{layer}.linear.bias"] = noise(D)
        tensors[f"{head}.{num_layers}.weight"] = noise(vocab_size, D)
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], file: str = "model.safetensors", **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps({"base_model_name_or_path": "somewhere"} | config))
    return str(folder)


def bound(checkpoint: str, target: TargetModel = TARGET, **settings: Any) -> MedusaDrafter:
    drafter = MedusaDrafter(checkpoint, **settings)
    drafter.bind(target, 2, 32)
    return drafter


def logits_of(drafter: MedusaDrafter) -> Tensor:
    states = torch.randn(4, D, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return drafter._head_logits(states)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_head_is_residual_blocks_and_a_projection(num_layers: int, tmp_path: Path) -> None:
    tensors = draw_tensors(3, num_layers)
    found = logits_of(bound(write(tmp_path, tensors)))
    states = torch.randn(4, D, generator=torch.Generator().manual_seed(5)).double()
    for head in range(3):
        hidden = states
        for layer in range(num_layers):
            weight, bias = (tensors[f"{head}.{layer}.linear.{part}"].double() for part in ("weight", "bias"))
            inner = hidden @ weight.T + bias
            hidden = hidden + inner / (1 + (-inner).exp())
        expected = hidden @ tensors[f"{head}.{num_layers}.weight"].double().T
        torch.testing.assert_close(found[:, head].double(), expected, atol=1e-4, rtol=1e-4)


def test_every_form_of_the_file_gives_the_same_heads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = draw_tensors()
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    base = {"model.embed_tokens.weight": torch.zeros(V, D), "lm_head.weight": torch.zeros(V, D)}
    expected = logits_of(bound(write(tmp_path / "plain", tensors)))
    assert not caplog.records
    for name, these, file in (
        ("official", tensors, "medusa_lm_head.pt"),
        ("prefixed", prefixed, "model.safetensors"),
        ("prefixed_pt", prefixed, "medusa_lm_head.pt"),
        ("merged", base | prefixed, "model.safetensors"),
    ):
        drafter = bound(write(tmp_path / name, these, file))
        assert torch.equal(logits_of(drafter), expected), name
        assert drafter.draft_length == 3
        is_told = any("merged with a base model" in record.getMessage() for record in caplog.records)
        assert is_told == (name == "merged")


def test_a_base_model_beside_bare_heads_is_not_expected(tmp_path: Path) -> None:
    where = write(tmp_path, draw_tensors() | {"model.norm.weight": torch.zeros(D)})
    with pytest.raises(ValueError, match=r"don't fit the medusa layout: 1 unused: model.norm.weight"):
        bound(where)


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    tensors = draw_tensors()
    where = write(tmp_path, tensors | {"medusa_head.0.0.linear.bias": torch.zeros(D)})
    with pytest.raises(ValueError, match=r"tensor 0.0.linear.bias is there with and without medusa_head\."):
        MedusaDrafter(where)


def test_the_tensors_are_believed_and_the_config_is_contradicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = draw_tensors(3, 2)
    with caplog.at_level(logging.WARNING):
        assert MedusaDrafter(write(tmp_path, tensors, medusa_num_heads=3, medusa_num_layers=2)).draft_length == 3
    assert not caplog.records
    drafter = bound(write(tmp_path, tensors, medusa_num_heads=5, medusa_num_layers=1))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "config.json says medusa_num_heads=5, but the tensors are of 3; these are taken",
        "config.json says medusa_num_layers=1, but the tensors are of 2; these are taken",
    ]
    assert (drafter.description["num_heads"], drafter.description["num_layers"]) == (3, 2)


def test_a_head_that_is_not_there_is_missing(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in draw_tensors(3, 1).items() if not name.startswith("1.")}
    with pytest.raises(ValueError, match=r"3 missing: 1.0.linear.bias, 1.0.linear.weight, 1.1.weight"):
        bound(write(tmp_path, tensors))


def test_files_that_would_run_code_are_not_read(tmp_path: Path) -> None:
    where = write(tmp_path, {}, "medusa_lm_head.pt")
    torch.save({"0.0.linear.weight": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"medusa_lm_head.pt holds more than tensors and is not read"):
        MedusaDrafter(where)


def test_saved_files_are_the_authors(tmp_path: Path) -> None:
    drafter = MedusaDrafter(random=MedusaShape(num_heads=2, num_layers=2))
    drafter.bind(TARGET, 1, 16)
    drafter.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config == {"base_model_name_or_path": "tiny", "medusa_num_heads": 2, "medusa_num_layers": 2}
    assert set(drafter.network.state_dict()) == set(draw_tensors(2, 2))


@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (4, 1), (2, 3)])
def test_counts_come_from_names(num_heads: int, num_layers: int) -> None:
    assert count(MedusaHeads(num_heads, num_layers, 4, 6).state_dict()) == (num_heads, num_layers)
    assert count(draw_tensors(num_heads, num_layers)) == (num_heads, num_layers)

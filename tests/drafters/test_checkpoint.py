"""Where draft checkpoints come from, how their layout is told, and what is said about those that can't be read."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dispark.drafters.checkpoint import LAYOUTS, detect_layout, fill, find_folder, open_checkpoint, save_checkpoint


class FakeHub:
    """Answers with a folder of links into blobs named by sha256, as the hub's cache has them."""

    def __init__(self, root: Path, files: dict[str, bytes]) -> None:
        self.root, self.files, self.patterns = root, files, list[Any]()
        self.is_sending_garbage = False

    def __call__(self, repo_id: str, **options: Any) -> str:
        assert (repo_id, options["revision"]) == ("owner/name", "c0ffee")
        self.patterns.append(options["allow_patterns"])
        folder = self.root / "snapshots" / "c0ffee"
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            if any(Path(name).match(pattern) for pattern in options["allow_patterns"]):
                blob = self.root / hashlib.sha256(data).hexdigest()
                blob.write_bytes(b"garbage" if self.is_sending_garbage else data)
                if not (folder / name).exists():
                    (folder / name).symlink_to(blob)
        return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "draft", {"markov_rank": 0}, {"fc.weight": torch.eye(2)})
    return tmp_path / "draft"


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub", {path.name: path.read_bytes() for path in folder.iterdir()})
    fake.files["training_state.rank0.pt"] = b"pickle"
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_a_pinned_repository_is_fetched_without_its_pickles(hub: FakeHub) -> None:
    found = open_checkpoint("owner/name@c0ffee")
    assert (found.name, found.layout) == ("owner/name@c0ffee", "deepspec_block")
    assert torch.equal(found.tensors["fc.weight"], torch.eye(2))
    assert len(hub.patterns) == 1
    assert "*.pt" not in hub.patterns[0]


def test_pickles_are_fetched_where_there_is_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"], hub.files["training_state.rank0.pt"]
    torch.save({"fc.weight": torch.eye(3)}, tmp_path / "weights.bin")
    hub.files["pytorch_model.bin"] = (tmp_path / "weights.bin").read_bytes()
    assert torch.equal(open_checkpoint("owner/name@c0ffee").tensors["fc.weight"], torch.eye(3))
    assert "*.bin" in hub.patterns[1]


def test_a_download_that_arrives_broken_is_refused(hub: FakeHub) -> None:
    hub.is_sending_garbage = True
    with pytest.raises(ValueError, match=r"repo_id=owner/name: .* arrived with a wrong sha256"):
        open_checkpoint("owner/name@c0ffee")


@pytest.mark.parametrize("where", ["", "nowhere", "owner/name", "owner/name@", "a/b/c@main", "/no/such/folder"])
def test_neither_folder_nor_pinned_repository(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if where == "":
        where = str(tmp_path / "file")
        Path(where).write_text("x")
    with pytest.raises(
        ValueError, match=r"must be a folder with config.json and weights, a pinned repository"
    ) as caught:
        find_folder(where)
    assert f"drafter.checkpoint={where}" in str(caught.value)


DETECTED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"markov_rank": 0}, ["fc.weight"], "deepspec_block"),
    ({"ttt_length": 7}, ["layers.0.hidden_norm.weight"], "deepspec_eagle3"),
    ({"dflash_config": {}}, ["fc.weight"], "zlab_dflash"),
    ({"architectures": ["DFlashDraftModel"]}, ["fc.weight"], "zlab_dflash"),
    ({}, ["midlayer.mlp.up_proj.weight", "d2t"], "eagle3"),
    ({"speculators_model_type": "eagle3"}, ["layers.0.mlp.up_proj.weight"], "speculators_eagle3"),
    ({}, ["0.0.linear.weight", "0.1.weight"], "medusa"),
    ({}, ["medusa_head.0.0.linear.weight"], "medusa"),
    ({"dispark_kind": "mtp"}, [], "dispark"),
]


@pytest.mark.parametrize(("config", "names", "layout"), DETECTED)
def test_layouts_are_told_apart(config: dict[str, Any], names: list[str], layout: str) -> None:
    assert detect_layout(config, names, "x") == layout
    assert layout in LAYOUTS


def test_an_unknown_layout_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"drafter.checkpoint=x: unknown layout \(architectures=\['Bert'\].*Medusa"):
        detect_layout({"architectures": ["Bert"]}, ["a", "b"], "x")


def test_shards_are_joined_and_compile_prefixes_go(folder: Path) -> None:
    save_file({"_orig_mod.norm.weight": torch.ones(2)}, folder / "model-2.safetensors")
    found = open_checkpoint(str(folder))
    assert set(found.tensors) == {"fc.weight", "norm.weight"}
    save_file({"fc.weight": torch.ones(2)}, folder / "model-3.safetensors")
    with pytest.raises(ValueError, match="is in more than one file"):
        open_checkpoint(str(folder))


def test_fill_lists_everything_at_once() -> None:
    module = nn.Linear(2, 3)
    tensors = {"weight": torch.zeros(3, 3), **{f"extra.{i}": torch.zeros(1) for i in range(10)}}
    with pytest.raises(ValueError) as caught:
        fill(module, tensors, "mine", "toy")
    message = str(caught.value)
    assert message.startswith("drafter.checkpoint=mine: tensors don't fit the toy layout: 1 missing: bias; 10 unused: ")
    assert "extra.0, extra.1" in message
    assert message.endswith("...; 1 of a wrong shape or type: weight [3, 3] instead of [3, 2]")
    before = module.weight.clone()
    assert torch.equal(module.weight, before)
    fill(module, {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, "mine", "toy")
    assert torch.equal(module.weight, torch.ones(3, 2))


def test_weights_that_are_not_finite_are_refused() -> None:
    tensors = {"weight": torch.tensor([[1.0, math.nan], [2.0, 3.0]]), "bias": torch.tensor([math.inf, 0.0])}
    with pytest.raises(ValueError, match=r"2 with NaN or infinite values: bias, weight$"):
        fill(nn.Linear(2, 2), tensors, "x", "some")


def test_need_checks_type_and_presence(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"markov_rank": 3, "flag": True, "list": [1]}))
    found = open_checkpoint(str(folder))
    assert found.need("markov_rank", int) == 3
    for key, kind, words in (("absent", int, "lacks absent"), ("flag", int, "flag=True"), ("list", str, r"list=\[1\]")):
        with pytest.raises(ValueError, match=words):
            found.need(key, kind)


def test_config_json_has_to_be_an_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        open_checkpoint(str(folder))

"""Targets from their YAMLs, loading, stop ids, and every way to get them wrong."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file

from dispark.targets.architectures import SUPPORTED
from dispark.targets.cache import entry_folder
from dispark.targets.random_weights import RandomWeights
from dispark.targets.sources import LocalFolder, WheelGguf, entry_name
from dispark.targets.spec import LoadedTarget, TargetSpec, fetch, load
from dispark.targets.tokenizer import ByteTokenizer, NoTokenizer

CONF = Path(__file__).resolve().parents[2] / "conf" / "target"
YAMLS = sorted(path.stem for path in CONF.glob("*.yaml"))
TINY = ("tiny", "tiny_gemma3", "tiny_gemma4", "tiny_qwen3")
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def node(name: str, **changes: Any) -> DictConfig:
    shared = OmegaConf.load(CONF.parent / "target_base" / "default.yaml")
    config = OmegaConf.merge(shared, OmegaConf.load(CONF / f"{name}.yaml"), changes)
    assert isinstance(config, DictConfig)
    del config["defaults"]
    return config


def spec(name: str, **changes: Any) -> TargetSpec:
    built = instantiate(node(name, **{"device": "cpu", **changes}), _convert_="all")
    assert isinstance(built, TargetSpec)
    return built


@pytest.fixture
def folder_spec(wheel_source: WheelGguf, cache_dir: Path) -> TargetSpec:
    """The tiny GGUF as a target with a stock tokenizer."""
    return TargetSpec("mine", "wheel", {"wheel": wheel_source}, device="cpu")


def test_the_promised_targets_are_there() -> None:
    promised = "smollm2_135m smollm2_random gemma3_270m qwen3_4b qwen3_8b qwen3_14b gemma4_12b llama31_8b vicuna_7b"
    assert {*promised.split(), *TINY} <= set(YAMLS)


@pytest.mark.parametrize("name", YAMLS)
def test_every_yaml_builds_and_names_real_arguments(name: str) -> None:
    built = spec(name)
    assert built.name == name
    assert built.source in built.sources
    keys = set(OmegaConf.to_container(node(name)))  # type: ignore[arg-type]
    assert keys - {"_target_"} <= set(inspect.signature(TargetSpec).parameters)
    for source in node(name).sources.values():
        assert set(source) - {"_target_"} <= set(inspect.signature(get_class(source["_target_"])).parameters)
    lines = (CONF / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("# ")


@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3_8b", "qwen3_14b", "gemma4_12b"])
def test_thinking_is_off(name: str) -> None:
    assert spec(name).template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("name", TINY)
def test_tiny_targets_load_without_a_download(name: str, cache_dir: Path) -> None:
    target = load(spec(name))
    assert isinstance(target, LoadedTarget)
    assert isinstance(target.tokenizer, ByteTokenizer)
    assert type(target.model).__name__ == SUPPORTED[target.model.config.model_type][1]
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert (target.max_context, target.vocab_size, target.stop_ids) == (1024, 262, (257,))
    assert (target.device, target.dtype, target.model.dtype) == (torch.device("cpu"), torch.float32, torch.float32)
    assert target.provenance["kind"] == "random"
    assert target.provenance["target"] == name
    assert json.dumps(target.provenance)
    ids = torch.tensor([target.tokenizer.render(MESSAGES)])
    text = target.model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    # Worth testing with: the text must not be one token over and over.
    assert len(set(text.tolist())) >= 10
    assert not cache_dir.exists()


def test_tiny_targets_are_the_same_in_every_load() -> None:
    assert load(spec("tiny")).weights_sha256 == load(spec("tiny")).weights_sha256 == fetch(spec("tiny")).sha256
    assert load(spec("tiny", sources={"random": {"seed": 1}})).weights_sha256 != load(spec("tiny")).weights_sha256


def test_tiny_gemma3_has_windows() -> None:
    config = load(spec("tiny_gemma3")).model.config
    assert config.layer_types[:2] == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 16


def test_a_draft_model_over_smollm2_ids() -> None:
    target = load(spec("smollm2_random", dtype="bfloat16"))
    assert isinstance(target.tokenizer, NoTokenizer)
    assert target.tokenizer.vocab_fingerprint is None
    assert (target.vocab_size, target.stop_ids, target.model.dtype) == (49152, (2,), torch.bfloat16)


def test_fetch_then_load_through_a_wheel(folder_spec: TargetSpec, llama: Any) -> None:
    report = fetch(folder_spec)
    assert report.status == "downloaded"
    assert fetch(folder_spec).status == "present"
    target = load(folder_spec)
    assert target.weights_sha256 == report.sha256
    assert target.provenance["kind"] == "wheel"
    assert target.provenance["source"] == "wheel"
    ids = target.tokenizer.render(MESSAGES)
    assert target.tokenizer.decode(ids).startswith("user\nWhat is the capital")
    with torch.no_grad():
        assert torch.allclose(target.model(torch.tensor([ids])).logits, llama(torch.tensor([ids])).logits, atol=1e-5)


def test_load_fetches_what_is_absent(folder_spec: TargetSpec) -> None:
    assert load(folder_spec).stop_ids == (2,)


def test_corrupt_cached_model_is_one_line_until_fetched_again(folder_spec: TargetSpec) -> None:
    source = folder_spec.sources["wheel"]
    assert isinstance(source, WheelGguf)
    fetch(folder_spec)
    weights = entry_folder(entry_name(source)) / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors is corrupt.*'dispark fetch target=mine' repairs it"):
        load(folder_spec)
    assert fetch(folder_spec).status == "repaired"
    assert load(folder_spec).stop_ids == (2,)


def test_loading_is_silent(folder_spec: TargetSpec, capfd: pytest.CaptureFixture[str]) -> None:
    load(folder_spec)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("eos", "changes", "expected"),
    [
        (2, {}, (2,)),
        ([5, 2, 5], {}, (5, 2)),
        (None, {}, (2,)),
        ([5], {"extra_stop_ids": [7, 5, 0]}, (5, 7, 0)),
        (2, {"extra_stop_tokens": ["<|endoftext|>"]}, (2, 0)),
    ],
)
def test_stop_ids(folder_spec: TargetSpec, tmp_path: Path, eos: Any, changes: dict[str, Any], expected: Any) -> None:
    folder = fetch(folder_spec).folder
    assert folder is not None
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    local = TargetSpec("mine", "folder", {"folder": LocalFolder(str(tmp_path))}, device="cpu", **changes)
    assert load(local).stop_ids == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra_stop_ids": [999]}, "target.extra_stop_ids=999: target tiny has 262 tokens"),
        ({"extra_stop_tokens": ["<nope>"]}, "target.extra_stop_tokens=<nope>: is no token of target tiny"),
        ({"max_context": 1025}, "target.max_context=1025: target tiny reads at most 1024 tokens"),
        ({"chat_template": "none"}, "target.chat_template: the byte tokenizer has its own"),
    ],
)
def test_specs_that_do_not_fit_the_model(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(spec("tiny", **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": "torrent"}, "target.source=torrent: target mine has random"),
        ({"sources": {}}, "target.source=random: target mine has none"),
        ({"sources": {"random": {"a": 1}}}, "target.sources.random: must be an object with a _target_"),
        ({"dtype": "int8"}, "target.dtype=int8: must be one of float32, bfloat16, float16"),
        ({"device": "tpu"}, "target.device=tpu: must be auto, cpu, cuda or cuda:N"),
        ({"device": "meta"}, "target.device=meta"),
        ({"device": 0}, "target.device=0"),
        ({"max_context": 1}, "target.max_context=1: must be a whole number >= 2"),
        ({"max_context": True}, "target.max_context=True"),
        ({"max_context": "many"}, "target.max_context=many"),
        ({"chat_template": 3}, "target.chat_template=3"),
        ({"system_prompt": 3}, "target.system_prompt=3"),
        ({"extra_stop_ids": [-1]}, r"target.extra_stop_ids\[0\]=-1"),
        ({"extra_stop_ids": [1, "x"]}, r"target.extra_stop_ids\[1\]=x"),
        ({"extra_stop_tokens": [1]}, r"target.extra_stop_tokens\[0\]=1"),
        ({"stop_strings": ["a", ""]}, r"target.stop_strings\[1\]=: must be a string that is not empty"),
    ],
)
def test_bad_settings_are_one_line(changes: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"name": "mine", "source": "random", "sources": {"random": RandomWeights("llama", {})}}
    with pytest.raises(ValueError, match=words) as caught:
        TargetSpec(**{**settings, **changes})
    assert "\n" not in str(caught.value)


def test_small_max_context_is_kept() -> None:
    assert load(spec("tiny", max_context=64)).max_context == 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_no_cuda_here() -> None:
    with pytest.raises(ValueError, match=r"target.device=cuda:1: there is no CUDA device"):
        load(spec("tiny", device="cuda:1"))


def test_weights_that_are_not_all_there(folder_spec: TargetSpec, tmp_path: Path) -> None:
    folder = fetch(folder_spec).folder
    assert folder is not None
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    local = TargetSpec("mine", "folder", {"folder": LocalFolder(str(tmp_path))}, device="cpu")
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights, the first is model.layers.1.mlp.down_proj.weight"):
        load(local)
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"target mine: .* can't be loaded"):
        load(local)
    (tmp_path / "tokenizer.json").write_text("{")
    save_file(load_file(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"the tokenizer in .* can't be loaded"):
        load(local)


@pytest.mark.smollm2
def test_the_default_target_makes_sense() -> None:
    default = spec("smollm2_135m", dtype="float32")
    source = default.sources["wheel"]
    assert isinstance(source, WheelGguf)
    if not entry_folder(entry_name(source)).exists():
        pytest.skip("the default target is not in the cache; 'dispark fetch' gets it")
    target = load(default)
    assert (target.stop_ids, target.max_context, target.vocab_size) == ((2,), 8192, 49152)
    assert target.tokenizer.vocab_size == 49152
    ids = target.tokenizer.render(MESSAGES)
    assert target.tokenizer.decode_raw(ids).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    assert target.tokenizer.decode_raw(target.tokenizer.encode("\n\n1. two  22")) == "\n\n1. two  22"
    output = target.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
    assert "Paris" in target.tokenizer.decode(output.tolist())

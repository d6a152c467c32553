"""Eagle-3: its layer against plain arithmetic, its three layouts, Gemma 4, and what becomes of names and features."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.toolbox import decode_all, make_request, make_requests, open_tiny, varied_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from baselines.eagle import authors_layers
from baselines.eagle3 import Eagle3Drafter, Eagle3Network, Eagle3Shape, authors_features
from dispark.decoding.target import EMBEDDING, TargetModel
from dispark.drafters.checkpoint import Checkpoint, open_checkpoint, save_checkpoint
from dispark.drafters.layers import layers_from
from dispark.types import Draft, Features, Sampling

DEEP = "target.sources.random.config.num_hidden_layers=8"
AUTHORS = [1, 3, 4]  # of 8 layers


@cache
def deep_target() -> TargetModel:
    return open_tiny("tiny", DEEP)


@cache
def gemma4_target(k_eq_v: bool) -> TargetModel:
    torch.manual_seed(2)
    config = Gemma4TextConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=k_eq_v,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        sliding_window=8,
        max_position_embeddings=256,
        final_logit_softcapping=5.0,
        initializer_range=0.3,
        pad_token_id=None,
    )
    model = Gemma4ForCausalLM(config).eval().requires_grad_(False)
    return TargetModel(model, name="gemma4", stop_ids=(), max_context=256)


def random_drafter(target: TargetModel, draft_length: int = 3, **shape: Any) -> Eagle3Drafter:
    drafter = Eagle3Drafter(random=Eagle3Shape(**shape), draft_length=draft_length)
    drafter.bind(target, 2, 160)
    return drafter


def drafts_of(drafter: Eagle3Drafter, target: TargetModel, vocab_size: int = 250) -> list[Draft]:
    found: list[Draft] = []
    inner = drafter.propose

    def keep(*arguments: Any) -> Draft:
        found.append(inner(*arguments))
        return found[-1]

    drafter.propose = keep  # type: ignore[method-assign]
    requests = make_requests(varied_prompts(3, vocab_size=vocab_size), 8)
    decode_all(target, drafter, requests, Sampling(1.0), batch_size=2)
    del drafter.propose
    return found


def assert_same(first: list[Draft], second: list[Draft]) -> None:
    assert len(first) == len(second) > 3
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.tokens_BG, b.tokens_BG)
        assert a.probs_BGV is not None
        assert b.probs_BGV is not None
        assert torch.equal(a.probs_BGV, b.probs_BGV)


# -- the layer ----------------------------------------------------------------------------------------------------


def plain_llama_eagle3(
    w: dict[str, Tensor], embedded_TD: Tensor, hidden_TD: Tensor, heads: int, kv: int, eps: float = 1e-6
) -> Tensor:
    """The formulas, with nothing shared with the code under test; rotary base 10000."""

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[name]

    def turn(x: Tensor) -> Tensor:
        num, width = x.shape[-2:]
        angle = torch.arange(num)[:, None] / 10000.0 ** (torch.arange(0, width, 2) / width)
        first, second = x[..., : width // 2], x[..., width // 2 :]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )

    both = torch.cat([rms(embedded_TD, "input_layernorm.weight"), rms(hidden_TD, "hidden_norm.weight")], dim=-1)
    q, k, v = (
        (both @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (num, -1)).transpose(0, 1)
        for name, num in (("q", heads), ("k", kv), ("v", kv))
    )
    k, v = turn(k).repeat_interleave(heads // kv, 0), v.repeat_interleave(heads // kv, 0)
    scores = turn(q) @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    scores += torch.full_like(scores[0], float("-inf")).triu(1)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
    middle = hidden_TD + attended
    normed = rms(middle, "post_attention_layernorm.weight")
    gated = torch.nn.functional.silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
    return middle + gated @ w["mlp.down_proj.weight"].T


def test_the_layer_is_the_published_one() -> None:
    target = open_tiny("tiny")
    drafter = random_drafter(target)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in drafter.network.named_parameters():
        if "norm" in name:  # all ones would hide a norm that is left out or taken for another
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    weights = {name.removeprefix("layers.0."): value for name, value in drafter.network.state_dict().items()}
    features = torch.randn(7, 3 * 64, generator=generator)
    prompt = torch.randint(0, 250, (7,), generator=generator).tolist()
    drafter.begin([0], [make_request(prompt)], [5], Features(features, [7]))
    hidden = drafter.extend([0])
    embedding = target.model.get_input_embeddings().weight
    states = features @ weights["fc.weight"].T
    wanted = plain_llama_eagle3(weights, embedding[[*prompt[1:], 5]], states, heads=4, kv=2)
    assert target.model.config.rms_norm_eps == 1e-6
    torch.testing.assert_close(hidden[0], wanted[-1], rtol=1e-4, atol=1e-4)
    # What recurs is the output as it is, what the head reads is normed.
    second = drafter.step([0], torch.tensor([9]), hidden)
    longer = plain_llama_eagle3(
        weights, embedding[[*prompt[1:], 5, 9]], torch.cat([states, wanted[-1:]]), heads=4, kv=2
    )
    torch.testing.assert_close(second[0], longer[-1], rtol=1e-4, atol=1e-4)
    normed = longer[-1] / (longer[-1].pow(2).mean() + 1e-6).sqrt() * weights["norm.weight"]
    logits = normed @ target.model.get_output_embeddings().weight.T
    torch.testing.assert_close(drafter.logits(second)[0], logits, rtol=1e-4, atol=1e-4)


def test_names_are_deepspecs() -> None:
    names = set(random_drafter(open_tiny("tiny_qwen3")).network.state_dict())
    layer = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    layer += [f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")]
    layer += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    assert names == {"fc.weight", "norm.weight"} | {f"layers.0.{part}.weight" for part in layer}


# -- layouts ------------------------------------------------------------------------------------------------------


def authors_file(source: Path, folder: Path, *, has_embedding: bool, has_bin: bool) -> Path:
    """The drafter in `source`, saved in DeepSpec's layout, as the EAGLE authors would have written it."""
    config = json.loads((source / "config.json").read_text())
    kept = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps vocab_size"
    config = {key: config[key] for key in kept.split()} | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "draft_vocab_size": config["draft_vocab_size"],
        "max_position_embeddings": 256,
    }
    tensors = {name.replace("layers.0.", "midlayer."): t for name, t in load_file(source / "model.safetensors").items()}
    if not has_embedding:
        del tensors["embed_tokens.weight"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if has_bin:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("has_embedding", "has_bin"), [(False, True), (True, False)])
def test_the_authors_layout(has_embedding: bool, has_bin: bool, tmp_path: Path) -> None:
    """Features are derived from the target, the embedding is the target's where the file has none."""
    target = deep_target()
    drafter = random_drafter(target, feature_layers=AUTHORS, draft_vocab_size=77)
    drafter.save(tmp_path / "deepspec")
    folder = authors_file(tmp_path / "deepspec", tmp_path / "authors", has_embedding=has_embedding, has_bin=has_bin)
    again = Eagle3Drafter(str(folder), draft_length=3)
    assert again.feature_layers == ()
    assert_same(drafts_of(drafter, target), drafts_of(again, target))
    assert again.feature_layers == tuple(AUTHORS) == authors_features(8)
    assert again.description["layout"] == "eagle3"
    assert again.description["draft_vocab_size"] == 77
    assert Eagle3Drafter(str(folder)).draft_length == 4  # nobody said


def speculators_file(source: Path, folder: Path, layer_ids: list[int] | None, **extra: Any) -> Path:
    """The same as the speculators library would have written it; the layer's config is nested."""
    own = json.loads((source / "config.json").read_text())
    config: dict[str, Any] = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": own.pop("draft_vocab_size"),
        "transformer_layer_config": {key: own[key] for key in own if key not in ("ttt_length", "target_layer_ids")},
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        **extra,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(load_file(source / "model.safetensors"), folder / "model.safetensors")
    return folder


def test_the_speculators_layout(tmp_path: Path) -> None:
    """Named layers are those that the features enter: layer 0 is entered by the embedding."""
    target = deep_target()
    drafter = random_drafter(target, feature_layers=[EMBEDDING, 2, 6], draft_vocab_size=77)
    drafter.save(tmp_path / "deepspec")
    folder = speculators_file(tmp_path / "deepspec", tmp_path / "speculators", [0, 3, 7])
    again = Eagle3Drafter(str(folder), draft_length=3)
    assert_same(drafts_of(drafter, target), drafts_of(again, target))
    assert again.feature_layers == (EMBEDDING, 2, 6)
    assert again.description["layout"] == "speculators_eagle3"
    unnamed = Eagle3Drafter(str(speculators_file(tmp_path / "deepspec", tmp_path / "unnamed", None)))
    unnamed.bind(target, 1, 40)
    assert unnamed.feature_layers == authors_features(8)


def test_norm_before_residual(tmp_path: Path) -> None:
    """The residual is the normed state: the same as feeding the normed state to a layer that takes it as it is."""
    target = deep_target()
    plain = random_drafter(target, feature_layers=AUTHORS, draft_vocab_size=77)
    plain.save(tmp_path / "deepspec")
    folder = speculators_file(tmp_path / "deepspec", tmp_path / "speculators", None, norm_before_residual=True)
    normed = Eagle3Drafter(str(folder), draft_length=3)
    normed.bind(target, 1, 40)
    features = torch.randn(5, 3 * 64, generator=torch.Generator().manual_seed(0))
    for drafter in (plain, normed):
        drafter.begin([0], [make_request([1, 2, 3, 4, 5])], [6], Features(features, [5]))
    network = plain.network
    # The weight of hidden_norm is ones, so norming twice is norming once (up to eps).
    project = network.project
    network.project = lambda given: network.layers[0].hidden_norm(project(given))  # type: ignore[assignment, operator, method-assign]
    torch.testing.assert_close(normed.extend([0]), plain.extend([0]), rtol=1e-4, atol=1e-4)
    normed.save(tmp_path / "again")
    again = Eagle3Drafter(str(tmp_path / "again"))
    assert again.config.norm_before_residual  # type: ignore[attr-defined]


def test_a_target_with_few_layers_needs_named_features(tmp_path: Path) -> None:
    target = open_tiny("tiny")
    random_drafter(target, feature_layers=[0, 1, 2], draft_vocab_size=77).save(tmp_path / "deepspec")
    folder = authors_file(tmp_path / "deepspec", tmp_path / "authors", has_embedding=False, has_bin=False)
    with pytest.raises(ValueError, match=r"reads layers \[1, 1, 0\] of target tiny; .* needs a target of 7 layers"):
        Eagle3Drafter(str(folder)).bind(target, 1, 40)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    drafter = Eagle3Drafter(str(folder))
    drafter.bind(target, 1, 40)
    assert drafter.feature_layers == (0, 1, 2)


def test_messages_about_the_authors_layout_name_layers(tmp_path: Path) -> None:
    target = deep_target()
    random_drafter(target, feature_layers=AUTHORS, draft_vocab_size=77).save(tmp_path / "deepspec")
    folder = authors_file(tmp_path / "deepspec", tmp_path / "authors", has_embedding=True, has_bin=False)
    tensors = load_file(folder / "model.safetensors")
    for name in ("midlayer.hidden_norm.weight", "lm_head.weight", "d2t"):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"3 missing: d2t, layers.0.hidden_norm.weight, lm_head.weight$"):
        Eagle3Drafter(str(folder)).bind(target, 1, 40)


def test_a_drafter_narrower_than_its_target_brings_both_ends(tmp_path: Path) -> None:
    """`fc` takes the target's width to the draft's; a draft vocabulary of the full size is none."""
    target = deep_target()
    narrow = {"hidden_size": 32, "target_hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**narrow, "intermediate_size": 48, "vocab_size": 262, "draft_vocab_size": 262, "rms_norm_eps": 1e-5}
    network = Eagle3Network(layers_from(config | {"num_hidden_layers": 1}, "llama"), 3 * 64)
    tensors = {name.replace("layers.0.", "midlayer."): value for name, value in network.state_dict().items()}
    tensors |= {"embed_tokens.weight": torch.randn(262, 32), "lm_head.weight": torch.randn(262, 32)}
    save_checkpoint(tmp_path / "whole", config, tensors)
    drafter = Eagle3Drafter(str(tmp_path / "whole"))
    drafter.bind(target, 1, 40)
    assert drafter.vocabulary is None
    assert drafter.description["is_aliased"] == {"embed_tokens": False, "lm_head": False}
    features = torch.randn(2, 3 * 64)
    drafter.begin([0], [make_request([1, 2])], [3], Features(features, [2]))
    hidden = drafter.extend([0])
    wanted = plain_llama_eagle3(
        {name.removeprefix("midlayer."): value for name, value in tensors.items()},
        tensors["embed_tokens.weight"][[2, 3]],
        features @ tensors["fc.weight"].T,
        heads=4,
        kv=2,
        eps=1e-5,
    )
    torch.testing.assert_close(hidden[0], wanted[-1], rtol=1e-4, atol=1e-4)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    save_checkpoint(tmp_path / "bare", config, tensors)
    with pytest.raises(ValueError, match=r"2 missing: embed_tokens.weight, lm_head.weight$"):
        Eagle3Drafter(str(tmp_path / "bare")).bind(target, 1, 40)


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 500000.0}, 500000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 10000.0),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "unheard_of"])
def test_the_rotary_base_is_the_drafts_own(keys: dict[str, Any], theta: float, kind: str) -> None:
    config = {"model_type": kind, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 8, **keys}
    layers = authors_layers(Checkpoint("x", "eagle3", config, {}, ""))
    assert layers.model_type == "llama"  # no query norm in the file
    assert layers.rope_parameters["rope_theta"] == theta
    assert layers.rope_parameters["rope_type"] == keys.get("rope_scaling", {}).get("rope_type", "default")
    with_norm = {"midlayer.self_attn.q_norm.weight": torch.ones(8)}
    wanted = "qwen3" if kind == "qwen3" else "llama"
    assert authors_layers(Checkpoint("x", "eagle3", config, with_norm, "")).model_type == wanted


# -- Gemma 4 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k_eq_v", [False, True])
def test_gemma4(k_eq_v: bool, tmp_path: Path) -> None:
    """Global head width, keys that serve as values, four norms, a layer scalar and capped logits: stock parts."""
    target = gemma4_target(k_eq_v)
    drafter = random_drafter(target)
    state = drafter.network.state_dict()
    assert ("layers.0.self_attn.v_proj.weight" in state) == (not k_eq_v)
    assert state["layers.0.self_attn.q_proj.weight"].shape == (4 * 16, 2 * 32)
    assert state["layers.0.self_attn.k_proj.weight"].shape == ((1 if k_eq_v else 2) * 16, 2 * 32)
    assert {"layers.0.layer_scalar", "layers.0.pre_feedforward_layernorm.weight"} <= set(state)
    drafter.save(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["architectures"] == ["Gemma4Eagle3Model"]
    assert open_checkpoint(str(tmp_path / "draft")).layout == "deepspec_eagle3"
    again = Eagle3Drafter(str(tmp_path / "draft"))
    assert again.draft_length == 3  # ttt_length
    assert_same(drafts_of(drafter, target, 60), drafts_of(again, target, 60))
    hidden = torch.randn(2, 32) * 100
    assert drafter.logits(hidden).abs().max() <= 5.0


def test_deepspecs_config_is_complete(tmp_path: Path) -> None:
    target = open_tiny("tiny_qwen3", DEEP)
    random_drafter(target, draft_length=7).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "draft_num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_target_layers": 8,
        "target_layer_ids": [1, 2, 3, 4, 5],
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "tie_word_embeddings": False,
        "vocab_size": 262,
        "dtype": "float32",
    }
    assert {key: config.get(key) for key in wanted} == wanted
    assert "draft_vocab_size" not in config
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], target.model.get_output_embeddings().weight)
    assert torch.equal(tensors["embed_tokens.weight"], target.model.get_input_embeddings().weight)
    assert not {"d2t", "t2d"} & set(tensors)

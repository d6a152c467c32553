"""EAGLE's first form: its arithmetic against stock modules put together by hand, and the authors' files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.toolbox import make_request, open_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from baselines.eagle import EagleDrafter, EagleShape
from dispark.decoding.target import FINAL, TargetModel
from dispark.drafters.checkpoint import open_checkpoint
from dispark.types import Features

PROMPT, NEXT = [7, 30, 2, 2, 100, 41], 9


def random_drafter(target: TargetModel, **shape: Any) -> EagleDrafter:
    drafter = EagleDrafter(random=EagleShape(**shape), draft_length=3)
    drafter.bind(target, 1, 40)
    return drafter


def by_hand(drafter: EagleDrafter, target: TargetModel, ids: list[int], states_TD: Tensor) -> Tensor:
    """[T, D]: fc, attention of its output as it is, an MLP behind a norm; the residual starts at fc's output."""
    state = drafter.network.state_dict()
    config = copy.deepcopy(drafter.config.layers)
    config._attn_implementation = "eager"
    parts: dict[str, Any] = {
        "self_attn": LlamaAttention(config, 0),
        "mlp": LlamaMLP(config),
        "post_attention_layernorm": LlamaRMSNorm(config.hidden_size, config.rms_norm_eps),
    }
    for part, module in parts.items():
        own = {name: value for name, value in state.items() if name.startswith(f"layers.0.{part}.")}
        module.load_state_dict({name.removeprefix(f"layers.0.{part}."): value for name, value in own.items()})
        module.eval().requires_grad_(False)
    embedded = target.model.get_input_embeddings()(torch.tensor(ids))
    mixed = torch.cat([embedded, states_TD], dim=-1) @ state["fc.weight"].T + state["fc.bias"]
    num = len(ids)
    mask = torch.full((1, 1, num, num), float("-inf")).triu(1)
    rotary = target.model.get_decoder().rotary_emb(mixed, torch.arange(num).unsqueeze(0))
    attended, _ = parts["self_attn"](mixed.unsqueeze(0), position_embeddings=rotary, attention_mask=mask)
    middle = mixed + attended[0]
    out: Tensor = middle + parts["mlp"](parts["post_attention_layernorm"](middle))
    return out


def test_the_layer_has_no_norm_before_or_behind() -> None:
    target = open_tiny("tiny")
    drafter = random_drafter(target)
    assert drafter.feature_layers == (FINAL,)
    norm = drafter.network.get_parameter("layers.0.post_attention_layernorm.weight")
    norm.copy_(torch.rand(norm.shape, generator=torch.Generator().manual_seed(0)) + 0.5)
    target.open(1, 40, (FINAL,))
    _, features = target.prefill([0], [PROMPT])
    assert features.hidden_NF is not None
    drafter.begin([0], [make_request(PROMPT)], [NEXT], Features(features.hidden_NF, [len(PROMPT)]))
    hidden = drafter.extend([0])
    ids, states = [*PROMPT[1:], NEXT], features.hidden_NF
    head = target.model.get_output_embeddings()
    for token in (3, 200, 3):
        wanted = by_hand(drafter, target, ids, states)[-1:]
        torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(drafter.logits(hidden), head(wanted), rtol=1e-4, atol=1e-4)
        hidden = drafter.step([0], torch.tensor([token]), hidden)
        ids, states = [*ids, token], torch.cat([states, wanted])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_embedding", [True, False])
def test_the_authors_files(has_bias: bool, has_embedding: bool, tmp_path: Path) -> None:
    """`fc` with or without a bias, whatever config.json says of it; a copy of the target's embedding or none."""
    target = open_tiny("tiny")
    drafter = random_drafter(target)
    folder = tmp_path / "draft"
    drafter.save(folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {key: config[key] for key in (*kept, "rms_norm_eps", "vocab_size", "model_type", "num_hidden_layers")}
    (folder / "config.json").write_text(json.dumps(config))
    if not has_bias:
        del tensors["fc.bias"]
        drafter.network.get_parameter("fc.bias").zero_()
    if has_embedding:
        tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.clone()
    save_file(tensors, folder / "model.safetensors")
    assert open_checkpoint(str(folder)).layout == "eagle"
    again = EagleDrafter(str(folder))
    again.bind(target, 1, 40)
    assert again.draft_length == 4
    assert again.description["is_aliased"] == {"embed_tokens": True, "lm_head": True}
    assert ("fc.bias" in again.network.state_dict()) == has_bias
    features = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    for one in (drafter, again):
        one.begin([0], [make_request(PROMPT)], [NEXT], Features(features, [6]))
    assert torch.equal(again.extend([0]), drafter.extend([0]))


def test_a_file_may_bring_another_embedding(tmp_path: Path) -> None:
    target = open_tiny("tiny")
    random_drafter(target).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight * 2
    save_file(tensors, tmp_path / "model.safetensors")
    again = EagleDrafter(str(tmp_path))
    again.bind(target, 1, 40)
    assert again.description["is_aliased"] == {"embed_tokens": False, "lm_head": True}
    again.save(tmp_path / "again")
    assert torch.equal(
        load_file(tmp_path / "again" / "model.safetensors")["embed_tokens.weight"], tensors["embed_tokens.weight"]
    )


def test_only_the_first_layer_lacks_its_input_norm() -> None:
    names = set(random_drafter(open_tiny("tiny_qwen3"), num_layers=2).network.state_dict())
    assert "layers.0.input_layernorm.weight" not in names
    assert "layers.1.input_layernorm.weight" in names
    assert "norm.weight" not in names

"""Multi-token prediction: against the module of transformers, the same module applied again, and its file."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from conformance.toolbox import make_request, open_tiny
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from baselines.mtp import MtpDrafter, MtpShape
from dispark.decoding.random import RowGenerators
from dispark.decoding.target import FINAL, TargetModel
from dispark.types import Features, Sampling

PROMPT, NEXT = [7, 30, 2, 2, 100, 41], 9


def random_drafter(target: TargetModel, draft_length: int = 3) -> MtpDrafter:
    """Norms get weights of their own: all ones would hide one that is left out or taken for another."""
    drafter = MtpDrafter(random=MtpShape(), draft_length=draft_length)
    drafter.bind(target, 1, 40)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in drafter.network.named_parameters():
        if "norm" in name:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return drafter


def oracle_of(drafter: MtpDrafter, target: TargetModel) -> MtpLayer:
    """The MTP module of transformers around the target's own kind of layer, with the drafter's weights."""
    backbone = target.model.get_decoder()
    config = copy.deepcopy(drafter.config.layers)
    config._attn_implementation = "eager"
    layer = MtpLayer(config, type(backbone.layers[0]), type(backbone.norm), 0, use_post_norm=True)
    renames = {"layers.0.": "mtp_block.", "norm.weight": "post_norm.weight"}
    state = {}
    for name, weight in drafter.network.state_dict().items():
        old = next((old for old in renames if name.startswith(old)), "")
        state[renames.get(old, "") + name[len(old) :]] = weight
    layer.load_state_dict(state)
    return layer.eval().requires_grad_(False)


def prefilled(target: TargetModel) -> Tensor:
    """The normalised states that the target's head reads, of the prompt."""
    target.open(1, 40, (FINAL,))
    _, features = target.prefill([0], [PROMPT])
    assert features.hidden_NF is not None
    return features.hidden_NF


def run(layer: MtpLayer, target: TargetModel, ids: list[int], states_TD: Tensor) -> Tensor:
    """The oracle on a whole text at once, [T, D]."""
    num = len(ids)
    positions = torch.arange(num).unsqueeze(0)
    rotary = target.model.get_decoder().rotary_emb
    mask = torch.full((1, 1, num, num), float("-inf")).triu(1)
    embedded = target.model.get_input_embeddings()(torch.tensor(ids)).unsqueeze(0)
    out = layer(
        inputs_embeds=embedded,
        previous_hidden_state=states_TD.unsqueeze(0),
        position_embeddings=rotary(embedded, positions),
        attention_mask=mask,
        position_ids=positions,
        cache=None,
    )
    hidden: Tensor = out[0]
    return hidden


@pytest.mark.parametrize("name", ["tiny", "tiny_qwen3"])
def test_against_transformers(name: str) -> None:
    """Its first application is the published module; the next ones take its normed output for the target's state."""
    target = open_tiny(name)
    drafter = random_drafter(target)
    oracle = oracle_of(drafter, target)
    states = prefilled(target)
    assert drafter.feature_layers == (FINAL,)
    drafter.begin([0], [make_request(PROMPT)], [NEXT], Features(states, [len(PROMPT)]))
    seen: list[Tensor] = []
    logits_of = drafter.logits

    def keep(hidden_BD: Tensor) -> Tensor:
        seen.append(logits_of(hidden_BD))
        return seen[-1]

    drafter.logits = keep  # type: ignore[method-assign]
    generators = RowGenerators([0], [1], torch.device("cpu"))
    draft = drafter.propose([0], torch.tensor([NEXT]), Sampling(), generators)
    head = target.model.get_output_embeddings()
    ids = [*PROMPT[1:], NEXT]
    for k in range(3):
        last = run(oracle, target, ids, states)[-1:]
        wanted = head(last)
        torch.testing.assert_close(seen[k], wanted, rtol=1e-4, atol=1e-4)
        assert int(wanted.argmax()) == int(draft.tokens_BG[0, k])
        ids, states = [*ids, int(draft.tokens_BG[0, k])], torch.cat([states, last])


def test_the_file_and_its_kind(tmp_path: Path) -> None:
    target = open_tiny("tiny")
    random_drafter(target, draft_length=2).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dispark_kind"] == "mtp"
    assert set(load_file(tmp_path / "model.safetensors")) >= {"eh_proj.weight", "enorm.weight", "hnorm.weight"}
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "model.safetensors"))
    assert MtpDrafter(str(tmp_path)).draft_length == 2
    assert MtpDrafter(str(tmp_path), draft_length=5).draft_length == 5
    for change, words in (
        ({"dispark_kind": "mpt"}, "holds dispark_kind=mpt; this drafter reads mtp"),
        ({"draft_length": None}, "draft_length=None, of another type"),
        ({"model_type": "gpt2"}, "architecture=gpt2: must be one of"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=words):
            MtpDrafter(str(tmp_path))

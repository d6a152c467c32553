"""The target's first layers as the drafter: their logits from scratch, the shared cache, and what is left behind.

Besides the tiny targets there is a Gemma 4 with shapes that differ from layer to layer, keys that serve as values,
embeddings for each layer and a window that the texts outgrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from conformance.toolbox import (
    LOOPING,
    decode_all,
    make_requests,
    open_tiny,
    outputs_of,
    varied_prompts,
)
from torch import Tensor

from baselines.autoregressive import AutoregressiveDrafter
from baselines.self_speculation import SelfSpeculationDrafter
from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import draw, probabilities
from dispark.decoding.target import EMBEDDING, FINAL, TargetModel
from dispark.types import Draft, Sampling

CPU = torch.device("cpu")
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
NAMES = ("tiny", "tiny_qwen3", "tiny_gemma3", "gemma4")
TEXTS = {2: list(range(40)), 0: [5], 3: [9, 8, 7] * 4}  # the anchor is each row's last token
G = 4


def make_gemma4() -> TargetModel:
    config = transformers.Gemma4TextConfig(
        vocab_size=262,
        vocab_size_per_layer_input=262,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=6,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        final_logit_softcapping=20.0,
        initializer_range=0.2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.Gemma4ForCausalLM(config).eval().requires_grad_(False)
    return TargetModel(model, name="gemma4", stop_ids=(), max_context=256)


@cache
def shared(name: str) -> TargetModel:
    return make_gemma4() if name == "gemma4" else open_tiny(name, LOOPING)


@torch.inference_mode()
def shallow_logits(target: TargetModel, ids: Sequence[int], num_layers: int) -> Tensor:
    """[V]: norm, head and cap after the first layers of the stock model, from scratch."""
    with target.stock() as model:
        states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
        # The last entry is normalised already.
        hidden = states[num_layers] if num_layers == target.num_layers else model.get_decoder().norm(states[num_layers])
        logits = model.lm_head(hidden[0, -1])
    cap = getattr(target.model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def started(target: TargetModel, feature_layers: Sequence[int] = (), **settings: Any) -> SelfSpeculationDrafter:
    """The drafter after the prefill of all of TEXTS but the anchors."""
    drafter = SelfSpeculationDrafter(**({"draft_length": G} | settings))
    drafter.bind(target, 4, 64)
    target.open(4, 64, feature_layers)
    with torch.inference_mode():
        target.prefill(list(TEXTS), [text[:-1] or [1] for text in TEXTS.values()])
    return drafter


def seen(row: int) -> list[int]:
    """What a row's target has seen, and the anchor."""
    text = TEXTS[row]
    return text if len(text) > 1 else [1, *text]


def propose(drafter: SelfSpeculationDrafter, sampling: Sampling) -> tuple[Draft, Tensor]:
    generators = RowGenerators(list(TEXTS), [1] * len(TEXTS), CPU)
    anchors = torch.tensor([text[-1] for text in TEXTS.values()])
    with torch.inference_mode():
        draft = drafter.propose(list(TEXTS), anchors, sampling, generators)
    return draft, generators.uniform("draft", drafter.draft_length)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=12, top_p=0.9)], ids=str)
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_first_layers(name: str, num_layers: int, sampling: Sampling) -> None:
    target = shared(name)
    draft, uniform_BG = propose(started(target, num_layers=num_layers), sampling)
    assert draft.lengths == [G] * len(TEXTS)
    for i, row in enumerate(TEXTS):
        text = seen(row)
        for k, token in enumerate(draft.tokens_BG[i].tolist()):
            logits = shallow_logits(target, text, num_layers).unsqueeze(0)
            if sampling.is_greedy:
                assert draft.probs_BGV is None
                assert float(logits.max() - logits[0, token]) < 1e-4
            else:
                assert draft.probs_BGV is not None
                q = draft.probs_BGV[i, k]
                torch.testing.assert_close(q, probabilities(logits, sampling)[0], atol=1e-4, rtol=1e-3)
                assert token == int(draw(q.unsqueeze(0), uniform_BG[i, k : k + 1]))
            text = [*text, token]


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMES)
def test_verification_writes_the_same_keys_and_values_again(name: str) -> None:
    target, num_layers = shared(name), 2
    drafter = started(target, num_layers=num_layers)
    cache = target.cache
    # Anchor and all drafts but the last go through the shallow layers, and only through those.
    places = [(cache.place(row), target.length(row) + t) for row in TEXTS for t in range(G)]
    for states in (states for pair in cache._layers.values() for states in pair):
        for place, slot in places:
            states[place, :, slot] = 0.0

    def written(layer: int) -> list[Tensor]:
        return [states[place, :, slot].clone() for states in cache._layers[layer] for place, slot in places]

    draft, _ = propose(drafter, Sampling())
    shallow = {layer: written(layer) for layer in range(target.num_layers)}
    anchors = torch.tensor([text[-1] for text in TEXTS.values()])
    with torch.inference_mode():
        target.verify(list(TEXTS), torch.cat([anchors.unsqueeze(1), draft.tokens_BG], dim=1), [1 + G] * len(TEXTS))
    for layer in range(target.num_layers):
        for ours, theirs in zip(shallow[layer], written(layer), strict=True):
            assert float(theirs.abs().max()) > 0
            if layer < num_layers:
                torch.testing.assert_close(ours, theirs, **TOLERANCE)
            else:
                assert float(ours.abs().max()) == 0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_of_the_target_changes(name: str) -> None:
    target, taps = shared(name), (1, EMBEDDING, FINAL)
    tokens = torch.tensor([[text[-1], 3, 4] for text in TEXTS.values()])

    def verified(is_drafting: bool) -> tuple[Tensor, Tensor]:
        drafter = started(target, taps)
        before = {row: target.length(row) for row in TEXTS}
        if is_drafting:
            propose(drafter, Sampling())
            assert {row: target.length(row) for row in TEXTS} == before
        with torch.inference_mode():
            logits, features = target.verify(list(TEXTS), tokens, [3, 1, 2])
        assert features.hidden_NF is not None
        assert len(target.model.get_decoder().layers) == target.num_layers == target.model.config.num_hidden_layers
        return logits, features.hidden_NF

    for with_drafts, without in zip(verified(True), verified(False), strict=True):
        assert torch.equal(with_drafts, without)


@pytest.mark.parametrize("num_layers", [None, 1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_autoregressive_one(name: str, num_layers: int | None) -> None:
    requests = make_requests(varied_prompts(6), 15)
    expected = outputs_of(decode_all(shared(name), AutoregressiveDrafter(), requests))
    trace = decode_all(shared(name), SelfSpeculationDrafter(num_layers, G), requests, batch_size=4)
    assert outputs_of(trace) == expected
    accepted, verified = (sum(r[key] for r in trace.rounds) for key in ("num_accepted_raw", "num_verified"))
    assert accepted < verified
    assert accepted > 0 or num_layers != 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_all_layers_draft_what_is_accepted(name: str, sampling: Sampling) -> None:
    requests = make_requests(varied_prompts(5), 16)
    trace = decode_all(shared(name), SelfSpeculationDrafter(4, G), requests, sampling)
    uncut = [r for r in trace.rounds if r["end"] is None]
    assert len(uncut) >= 5
    assert all(r["num_emitted"] == G + 1 for r in uncut)


def test_padded_calls_give_the_same_texts() -> None:
    requests = make_requests(varied_prompts(6), 15)
    expected = outputs_of(decode_all(shared("tiny"), SelfSpeculationDrafter(2, G), requests))
    padded = open_tiny("tiny", LOOPING, token_bucket=16, slot_bucket=32)
    assert outputs_of(decode_all(padded, SelfSpeculationDrafter(2, G), requests)) == expected


def test_the_target_s_whole_context_can_be_used() -> None:
    target = open_tiny("tiny", LOOPING, "target.max_context=40", stop_ids=())
    requests = make_requests([[1] * 30, [2] * 39, [3] * 36], 50)
    options: dict[str, Any] = {"num_slots": 40 + G + 1, "batch_size": 3}
    expected = decode_all(target, AutoregressiveDrafter(), requests, **options)
    found = decode_all(target, SelfSpeculationDrafter(2, G), requests, **options)
    assert outputs_of(found) == outputs_of(expected)
    assert [record.finish_reason for record in found.records] == ["context"] * 3


@pytest.mark.parametrize("kind", ["peak", "entropy"])
def test_confidence_is_of_the_distribution_before_sampling_settings(kind: str) -> None:
    target = shared("tiny")
    for sampling in (Sampling(), Sampling(0.5, top_k=3)):
        draft, _ = propose(started(target, num_layers=2, confidence=kind), sampling)
        assert draft.confidence_BG is not None
        for i, row in enumerate(TEXTS):
            for k in range(G):
                law = shallow_logits(target, [*seen(row), *draft.tokens_BG[i, :k].tolist()], 2).double().softmax(-1)
                expected = law.max() if kind == "peak" else (law * law.log()).sum().exp()
                torch.testing.assert_close(draft.confidence_BG[i, k].double(), expected, atol=1e-4, rtol=1e-3)
    assert propose(started(target), Sampling())[0].confidence_BG is None


@pytest.mark.parametrize(("layers", "half"), [(1, 1), (2, 1), (4, 2), (5, 2)])
def test_half_of_the_layers_draft_unless_stated(layers: int, half: int) -> None:
    target = open_tiny("tiny", f"target.sources.random.config.num_hidden_layers={layers}")
    drafter = SelfSpeculationDrafter()
    drafter.bind(target, 1, 16)
    assert drafter.description == {"num_layers": half, "num_target_layers": layers, "num_parameters": 0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 0}, "drafter.num_layers=0: must be a whole number >= 1"),
        ({"num_layers": 1.5}, "drafter.num_layers=1.5: must be a whole number >= 1"),
        ({"draft_length": 0}, "drafter.draft_length=0: must be a whole number >= 1"),
        ({"confidence": "head"}, "drafter.confidence=head: self-speculation has no confidence head; allowed: peak"),
        ({"num_layers": 5}, "drafter.num_layers=5: target tiny has 4 layers; allowed: 1 to 4, or null for half of"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}"):
        SelfSpeculationDrafter(**settings).bind(shared("tiny"), 1, 16)

"""The DiSpark drafter: settings, checkpoints that fit or don't, saving, rows, and what it tells about itself."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.toolbox import GREEDY, decode_all, make_requests, open_tiny, outputs_of, varied_prompts
from safetensors.torch import load_file, save_file

from baselines.dflash import DFlashDrafter
from dispark.decoding.target import TargetModel
from dispark.drafters.semi_autoregressive import BlockShape, SemiAutoregressiveDrafter, spread_layers
from dispark.schedulers.threshold import ThresholdScheduler
from dispark.types import Draft, Load, Sampling

TINY = ("tiny", "tiny_qwen3", "tiny_gemma3", "tiny_gemma4")


@cache
def target_of(name: str = "tiny") -> TargetModel:
    return open_tiny(name)


def random_drafter(target: TargetModel, **settings: Any) -> SemiAutoregressiveDrafter:
    shape = BlockShape(**{"num_layers": 2, "block_size": 4, "rank": 8, **settings.pop("shape", {})})
    drafter = SemiAutoregressiveDrafter(random=shape, **settings)
    drafter.bind(target, 2, 64)
    return drafter


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    random_drafter(target_of()).save(folder)
    return folder


def drafts_of(drafter: Any, sampling: Sampling = GREEDY) -> list[Draft]:
    """Every draft of a small run."""
    found: list[Draft] = []
    propose = drafter.propose

    def keep(*arguments: Any) -> Draft:
        found.append(propose(*arguments))
        return found[-1]

    drafter.propose = keep
    requests = make_requests(varied_prompts(3), 8)
    decode_all(target_of(), drafter, requests, sampling, batch_size=2, num_slots=160)
    del drafter.propose
    return found


def assert_same_drafts(first: list[Draft], second: list[Draft]) -> None:
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.tokens_BG, b.tokens_BG)
        assert (a.probs_BGV is None) == (b.probs_BGV is None)
        if a.probs_BGV is not None and b.probs_BGV is not None:
            assert torch.equal(a.probs_BGV, b.probs_BGV)
        if a.confidence_BG is not None and b.confidence_BG is not None:
            assert torch.equal(a.confidence_BG, b.confidence_BG)


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_length": 0}, "drafter.draft_length=0: must be 1 to 7"),
        ({"draft_length": 8}, "drafter.draft_length=8: must be 1 to 7"),
        ({"draft_length": 7, "anchor_predicts": False}, "must be 1 to 6"),
        ({"num_candidates": 0}, "drafter.num_candidates=0: must be at least 1"),
        ({"confidence": "sure"}, "drafter.confidence=sure: must be one of head, peak, entropy"),
        ({"random": BlockShape(has_confidence=False)}, "confidence=head: this drafter has no confidence head"),
        ({"checkpoint": "nowhere"}, "drafter.checkpoint=nowhere: must be a folder .* a pinned repository"),
        ({"checkpoint": "owner/name"}, "pinned repository"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        SemiAutoregressiveDrafter(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"num_layers": 0}, "drafter.random.num_layers=0"),
        ({"block_size": 1.5}, "drafter.random.block_size=1.5"),
        ({"rank": True}, "drafter.random.rank=True"),
        ({"head": "lstm"}, "drafter.random.head=lstm: must be one of none, markov, gated, rnn"),
    ],
)
def test_shapes_that_are_refused(shape: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BlockShape(**shape)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"draft_vocab_size": 1000}, "draft_vocab_size=1000: target tiny has 262"),
        ({"feature_layers": [0, 3]}, "reads layer 3 of the target; allowed on tiny: -1"),
        ({"feature_layers": [-2]}, "reads layer -2"),
        ({"mask_token_id": 262}, "mask_token_id=262, but target tiny has 262"),
    ],
)
def test_shapes_that_the_target_refuses(shape: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        random_drafter(target_of(), shape=shape)


def test_layers_are_spread_over_the_target() -> None:
    assert spread_layers(36) == [1, 9, 17, 25, 33]
    assert spread_layers(40) == [1, 10, 19, 28, 37]
    for num_layers in range(2, 60):
        found = spread_layers(num_layers)
        assert found == sorted(set(found))
        assert 0 <= found[0] <= found[-1] <= num_layers - 2


def test_random_weights_are_seeded_and_loudly_random(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.random.get_rng_state()
    with caplog.at_level(logging.WARNING):
        first = random_drafter(target_of())
    assert "RANDOM WEIGHTS" in caplog.text
    assert first.description["is_random"]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert random_drafter(target_of()).description["weights_sha256"] == first.description["weights_sha256"]
    other = random_drafter(target_of(), shape={"seed": 1})
    assert other.description["weights_sha256"] != first.description["weights_sha256"]


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("head", ["none", "markov", "gated", "rnn"])
def test_what_is_saved_drafts_the_same(name: str, head: str, tmp_path: Path) -> None:
    shape = {"head": head, "block_size": 5, "has_confidence": head != "none"}
    drafter = random_drafter(target_of(name), shape=shape, confidence="peak")
    drafter.save(tmp_path)
    again = SemiAutoregressiveDrafter(str(tmp_path), confidence="peak")
    again.bind(target_of(name), 2, 64)
    assert replace(again.config, layers=None) == replace(drafter.config, layers=None)
    assert again.description["is_aliased"] == {"embed_tokens": True, "lm_head": True}
    state, other = drafter.network.state_dict(), again.network.state_dict()
    assert all(torch.equal(state[key], other[key]) for key in state.keys() | other.keys())
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"embed_tokens.weight", "lm_head.weight", "fc.weight", "layers.1.mlp.up_proj.weight"} <= names


def test_saved_and_loaded_drafts_are_equal(saved: Path) -> None:
    for sampling in (GREEDY, Sampling(0.9, top_p=0.9)):
        ours = drafts_of(random_drafter(target_of()), sampling)
        assert_same_drafts(ours, drafts_of(SemiAutoregressiveDrafter(str(saved)), sampling))


@pytest.mark.parametrize("has_ends", [True, False])
def test_a_reduced_vocabulary_is_saved_without_ends(has_ends: bool, tmp_path: Path) -> None:
    drafter = random_drafter(target_of(), shape={"draft_vocab_size": 50})
    drafter.save(tmp_path, has_ends)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["t2d"].sum() == 50
    assert tensors["markov_head.markov_w2.weight"].shape == (50, 8)
    assert tensors["markov_head.markov_w1.weight"].shape == (262, 8)
    assert "lm_head.weight" not in tensors
    again = SemiAutoregressiveDrafter(str(tmp_path))
    sampling = Sampling(1.0)
    assert_same_drafts(drafts_of(drafter, sampling), drafts_of(again, sampling))
    for draft in drafts_of(again, sampling):
        assert int(draft.tokens_BG.max()) < 50
        assert draft.probs_BGV is not None
        assert not bool(draft.probs_BGV[..., 50:].any())


def test_ends_may_be_left_to_the_target(tmp_path: Path) -> None:
    drafter = random_drafter(target_of())
    drafter.save(tmp_path, has_ends=False)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "model.safetensors"))
    assert_same_drafts(drafts_of(drafter), drafts_of(SemiAutoregressiveDrafter(str(tmp_path))))


def test_zlab_s_layout_goes_both_ways(tmp_path: Path) -> None:
    drafter = DFlashDrafter(convention="zlab", random=BlockShape(block_size=5, head="none", has_confidence=False))
    assert drafter.draft_length == 4
    drafter.bind(target_of(), 2, 64)
    drafter.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 261, "target_layer_ids": [0, 1, 2]}
    assert_same_drafts(drafts_of(drafter), drafts_of(DFlashDrafter(str(tmp_path))))
    with pytest.raises(ValueError, match=r"has the zlab_dflash layout; this drafter reads deepspec_block"):
        SemiAutoregressiveDrafter(str(tmp_path))


def change_tensors(folder: Path, **changes: Any) -> None:
    """Sets tensors of a saved checkpoint; None removes one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file)


def change_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


BAD_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"fc.weight": None, "norm.weight": None}, "2 missing: fc.weight, norm.weight"),
    ({"markov_head.markov_w2.weight": None}, "1 missing: markov_head.markov_w2.weight"),
    ({"layers.2.mlp.up_proj.weight": torch.zeros(1)}, "1 unused: layers.2.mlp.up_proj.weight"),
    ({"hidden_norm.weight": torch.zeros(3)}, r"1 of a wrong shape or type: hidden_norm.weight \[3\] instead of \[64\]"),
    ({"lm_head.weight": None}, "1 missing: lm_head.weight"),
    ({"embed_tokens.weight": torch.zeros(262, 3)}, r"embed_tokens.weight has shape \[262, 3\]"),
    ({"embed_tokens.weight": torch.zeros(99, 64)}, r"embed_tokens.weight has shape \[99, 64\]"),
    ({"d2t": torch.tensor([0, 0, -1])}, "d2t: target ids must be distinct"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_TENSORS)
def test_every_tensor_is_accounted_for(saved: Path, changes: dict[str, Any], words: str) -> None:
    change_tensors(saved, **changes)
    with pytest.raises(ValueError, match=words) as caught:
        SemiAutoregressiveDrafter(str(saved)).bind(target_of(), 1, 32)
    assert "\n" not in str(caught.value)
    assert str(saved) in str(caught.value)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 32}, "made for a hidden size of 32, but target tiny has 64"),
    ({"vocab_size": 99}, "made for a vocabulary of 99, but target tiny has 262"),
    ({"num_target_layers": 36}, "made for a target of 36 layers, but tiny has 4"),
    ({"target_layer_ids": [0, 1, 3]}, "reads layer 3 of the target; allowed on tiny: -1"),
    ({"target_layer_ids": [0, 1, 40]}, "reads layer 40"),
    ({"mask_token_id": -1}, "mask_token_id=-1"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_CONFIGS)
def test_another_target_s_drafter_is_refused(saved: Path, changes: dict[str, Any], words: str) -> None:
    change_config(saved, **changes)
    with pytest.raises(ValueError, match=words):
        SemiAutoregressiveDrafter(str(saved)).bind(target_of(), 1, 32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token_id": None}, "config.json lacks mask_token_id"),
        ({"block_size": "7"}, "config.json has block_size='7', of another type"),
        ({"enable_confidence_head": 1}, "enable_confidence_head=1, of another type"),
        ({"markov_head_type": "lstm"}, "markov_head_type=lstm: must be one of vanilla, gated, rnn"),
        ({"markov_rank": 0}, "confidence_head_with_markov=true needs markov_rank > 0"),
        ({"markov_rank": None}, "unknown layout"),
        ({"model_type": "mamba"}, "architecture=mamba: must be one of"),
    ],
)
def test_configs_that_can_t_be_read(saved: Path, changes: dict[str, Any], words: str) -> None:
    change_config(saved, **changes)
    with pytest.raises(ValueError, match=words) as caught:
        SemiAutoregressiveDrafter(str(saved))
    assert "\n" not in str(caught.value)


def test_a_truncated_file_and_others_are_refused(saved: Path) -> None:
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        SemiAutoregressiveDrafter(str(saved))
    file.unlink()
    with pytest.raises(ValueError, match=r"needs \*.safetensors, or one .bin or .pt file; found none"):
        SemiAutoregressiveDrafter(str(saved))
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match="can't be read as JSON"):
        SemiAutoregressiveDrafter(str(saved))
    (saved / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config.json is missing"):
        SemiAutoregressiveDrafter(str(saved))


class Harmful:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code was run')",))


def test_pickles_are_read_as_tensors_only(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").rename(saved.parent / "kept.safetensors")
    torch.save(tensors, saved / "pytorch_model.bin")
    assert_same_drafts(drafts_of(random_drafter(target_of())), drafts_of(SemiAutoregressiveDrafter(str(saved))))
    torch.save({**tensors, "fc.weight": Harmful()}, saved / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds more than tensors and is not read"):
        SemiAutoregressiveDrafter(str(saved))


def test_own_ends_serve_where_they_differ(saved: Path) -> None:
    head = load_file(saved / "model.safetensors")["lm_head.weight"]
    change_tensors(saved, **{"lm_head.weight": head.flip(0)})
    drafter = SemiAutoregressiveDrafter(str(saved))
    drafter.bind(target_of(), 2, 64)
    assert drafter.description["is_aliased"] == {"embed_tokens": True, "lm_head": False}
    hidden = torch.randn(3, 64)
    logits = drafter._ends.logits(hidden)
    torch.testing.assert_close(logits, hidden @ head.flip(0).T)


# -- rounds -------------------------------------------------------------------------------------------------------


def test_a_shorter_draft_is_the_block_s_beginning(saved: Path) -> None:
    whole, short = (SemiAutoregressiveDrafter(str(saved), draft_length=n) for n in (None, 2))
    texts = []
    firsts = []
    for drafter in (whole, short):
        drafts = drafts_of(drafter)
        firsts.append(drafts[0].tokens_BG[:, :2])
        requests = make_requests(varied_prompts(4), 12)
        texts.append(outputs_of(decode_all(target_of(), drafter, requests, batch_size=3, num_slots=160)))
    assert torch.equal(*firsts)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("confidence", ["head", "peak", "entropy", None])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7)], ids=["greedy", "sampled"])
def test_confidence_is_a_choice(confidence: str | None, sampling: Sampling) -> None:
    for draft in drafts_of(random_drafter(target_of(), confidence=confidence), sampling):
        if confidence is None:
            assert draft.confidence_BG is None
            continue
        assert draft.confidence_BG is not None
        assert draft.confidence_BG.dtype == torch.float32
        assert draft.confidence_BG.shape == draft.tokens_BG.shape
        assert bool(((draft.confidence_BG > 0) & (draft.confidence_BG <= 1)).all())


def test_proxies_come_from_the_law_at_temperature_1() -> None:
    for kind in ("peak", "entropy"):
        for draft in drafts_of(random_drafter(target_of(), confidence=kind), Sampling(1.0)):
            assert draft.probs_BGV is not None
            law = draft.probs_BGV
            entropy = -torch.xlogy(law, law).sum(-1)
            wanted = law.amax(-1) if kind == "peak" else (-entropy).exp()
            torch.testing.assert_close(draft.confidence_BG, wanted, rtol=1e-4, atol=1e-6)


def test_the_threshold_scheduler_cuts_by_confidence() -> None:
    confidence = torch.tensor([[0.9, 0.4, 0.9], [0.5, 0.6, 0.7], [0.1, 1.0, 1.0]])
    draft = Draft(torch.zeros(3, 3, dtype=torch.int64), [3, 2, 3], None, confidence)
    load = Load(3, 0, 0, [5, 5, 5])
    assert ThresholdScheduler(0.5).choose(draft, load) == [1, 2, 0]
    assert ThresholdScheduler(0.0).choose(draft, load) == [3, 2, 3]


def test_a_dropped_row_costs_nothing_and_leaves_nothing(saved: Path) -> None:
    """Rows that end in a round leave their features behind; those of the others still have to arrive."""
    drafter = SemiAutoregressiveDrafter(str(saved))
    prompts = varied_prompts(6)
    requests = [request for i, prompt in enumerate(prompts) for request in make_requests([prompt], 3 + 4 * (i % 3))]
    requests = [
        r.__class__(**{**r.__dict__, "request_id": f"p{i}#0", "prompt_id": f"p{i}"}) for i, r in enumerate(requests)
    ]
    wide = outputs_of(decode_all(target_of(), drafter, requests, batch_size=4, num_slots=160))
    narrow = outputs_of(decode_all(target_of(), drafter, requests, batch_size=1, num_slots=160))
    assert wide == narrow
    assert not drafter._packed.cache.rows


def test_one_drafter_serves_several_targets(saved: Path) -> None:
    drafter = random_drafter(target_of("tiny"))
    first = drafter.network
    drafter.bind(target_of("tiny"), 1, 32)
    assert drafter.network is first
    drafter.bind(target_of("tiny_qwen3"), 1, 32)
    assert drafter.network is not first
    assert hasattr(drafter.network.layers[0].self_attn, "q_norm")
    shutil.rmtree(saved)  # whatever was read is in memory
    assert drafter.feature_layers == (0, 1, 2)

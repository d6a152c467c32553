"""Blockwise heads: their arithmetic written out, the target's own projection, and what a file has to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.toolbox import decode_all, make_request, open_tiny

from baselines.autoregressive import AutoregressiveDrafter
from baselines.blockwise import BlockwiseDrafter, BlockwiseShape
from dispark.decoding.target import TargetModel
from dispark.types import Sampling

TARGET = open_tiny("tiny")
CAP = "+target.sources.random.config.final_logit_softcapping=2.0"


def bound(target: TargetModel = TARGET, **shape: Any) -> BlockwiseDrafter:
    drafter = BlockwiseDrafter(random=BlockwiseShape(**({"num_heads": 3, "width": 20} | shape)))
    drafter.bind(target, 2, 64)
    return drafter


@pytest.mark.parametrize("size", [None, 30])
def test_a_head_is_a_residual_feed_forward_layer_before_the_target_s_head(size: int | None) -> None:
    drafter = bound(draft_vocab_size=size)
    states = torch.randn(4, TARGET.hidden_size, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        found = drafter._head_logits(states)
    tensors = {name: tensor.double() for name, tensor in drafter.network.state_dict().items()}
    projection = TARGET.model.lm_head.weight.double()[:size]
    for i in range(3):
        w1, b1, w2, b2 = (tensors[f"heads.{i}.{name}"] for name in ("w1.weight", "w1.bias", "w2.weight", "w2.bias"))
        assert w1.shape == (20, TARGET.hidden_size)
        hidden = states.double()
        hidden = hidden + (hidden @ w1.T + b1).clamp_min(0.0) @ w2.T + b2
        torch.testing.assert_close(found[:, i].double(), hidden @ projection.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "overrides"), [("tiny", ()), ("tiny_gemma3", (CAP,))])
def test_heads_that_add_nothing_give_the_target_s_own_logits(name: str, overrides: tuple[str, ...]) -> None:
    target = open_tiny(name, *overrides)
    drafter = bound(target)
    for head in drafter.network.heads:
        torch.nn.init.zeros_(head.w2.weight)
        torch.nn.init.zeros_(head.w2.bias)
    target.open(2, 64, drafter.feature_layers)
    logits, features = target.prefill([1, 0], [[1, 2, 3], list(range(40))])
    drafter.begin([1, 0], [], [], features)
    expected = logits.unsqueeze(1).expand(2, 3, target.vocab_size)
    torch.testing.assert_close(drafter.logits([1, 0]), expected, atol=1e-5, rtol=1e-5)
    if overrides:
        assert float(logits.abs().max()) < 2.0  # the cap is at work


def test_a_text_of_one_repeated_token_is_drafted_whole() -> None:
    # With heads that add nothing every draft repeats the anchor: right on a target that repeats itself, and only there.
    target = open_tiny("tiny", "target.sources.random.config.initializer_range=0.02")
    request = make_request([7] * 5, max_new_tokens=17)
    text = decode_all(target, AutoregressiveDrafter(), [request]).records[0].output_ids
    drafter = bound(target)
    for head in drafter.network.heads:
        torch.nn.init.zeros_(head.w2.weight)
        torch.nn.init.zeros_(head.w2.bias)
    trace = decode_all(target, drafter, [request])
    assert trace.records[0].output_ids == text
    accepted = [r["num_accepted_raw"] for r in trace.rounds]
    assert accepted == _expected_runs(text, 3)
    assert {0, 3} <= set(accepted)


def _expected_runs(text: list[int], num: int) -> list[int]:
    """Accepted counts where every draft is the anchor again and the text is long enough."""
    counts, at = [], 0
    while at < len(text) - 1:
        run = 0
        while run < num and at + 1 + run < len(text) and text[at + 1 + run] == text[at]:
            run += 1
        counts.append(run)
        at += run + 1
    return counts


def test_the_width_is_the_hidden_size_unless_stated() -> None:
    assert bound(width=None).description["width"] == TARGET.hidden_size
    assert bound(width=7).description["width"] == 7
    assert bound().description["is_aliased"] == {"embed_tokens": True, "lm_head": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dispark_kind": "other"}, "config.json has dispark_kind=other; must be blockwise"),
        ({"num_heads": 0}, "config.json has num_heads=0; must be at least 1"),
        ({"num_heads": "3"}, "config.json has num_heads='3', of another type"),
        ({"num_heads": None}, "config.json lacks num_heads"),
        ({"width": None}, "config.json lacks width"),
        ({"width": -1}, "config.json has width=-1; must be at least 1"),
        ({"width": 21}, r"wrong shape or type: heads.0.w1.bias \[20\] instead of \[21\]"),
        ({"num_heads": 4}, "4 missing: heads.3.w1.bias"),
        ({"num_heads": 2}, "4 unused: heads.2.w1.bias"),
        ({"hidden_size": 48}, "made for a hidden size of 48, but target tiny has 64"),
        ({"vocab_size": 48}, "made for a vocabulary of 48, but target tiny has 262 tokens"),
    ],
)
def test_what_a_file_says_is_checked(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    bound().save(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(ValueError, match=rf"^drafter.checkpoint=.*{message}"):
        BlockwiseDrafter(str(tmp_path)).bind(TARGET, 1, 16)


def test_sampled_drafts_run_to_their_end() -> None:
    trace = decode_all(TARGET, bound(), [make_request([1, 2, 3], max_new_tokens=12)], Sampling(1.0))
    assert len(trace.records[0].output_ids) <= 12
    assert all(r["num_verified"] <= 3 for r in trace.rounds)

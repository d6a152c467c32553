"""What is trained is what decodes: the packed training forward against the drafter's own rounds, family by family."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from conformance.toolbox import open_tiny

from dispark.decoding.target import TargetModel
from dispark.drafters.semi_autoregressive import BlockShape, SemiAutoregressiveDrafter
from dispark.drafters.sequential_stage import draft_block
from dispark.training.blocks import BlockBatch, forward_blocks, labels_of
from dispark.types import Features, Sampling

LENGTH, ANCHORS = 20, [3, 9, 12]


@cache
def target_of(name: str) -> TargetModel:
    return open_tiny(name)


def random_batch(width: int, anchors: list[list[int]]) -> BlockBatch:
    torch.manual_seed(3)
    rows = len(anchors)
    return BlockBatch(
        tokens_BT=torch.randint(0, 250, (rows, LENGTH)),
        features_BTF=torch.randn(rows, LENGTH, width),
        loss_mask_BT=torch.ones(rows, LENGTH, dtype=torch.bool),
        anchors_BA=torch.tensor(anchors),
        is_real_BA=torch.ones(rows, len(anchors[0]), dtype=torch.bool),
    )


@pytest.mark.parametrize("name", ["tiny", "tiny_qwen3", "tiny_gemma3", "tiny_gemma4"])
@pytest.mark.parametrize("head", ["none", "markov", "rnn"])
@pytest.mark.parametrize("anchor_predicts", [True, False])
def test_a_block_says_the_same_in_training_and_in_decoding(name: str, head: str, anchor_predicts: bool) -> None:
    target = target_of(name)
    shape = BlockShape(block_size=4, head=head, rank=8, has_confidence=head != "none")
    drafter = SemiAutoregressiveDrafter(
        random=shape, anchor_predicts=anchor_predicts, confidence="head" if head != "none" else None
    )
    drafter.bind(target, 2, 64)
    width = len(drafter.feature_layers) * target.hidden_size
    batch = random_batch(width, [ANCHORS, [1, 5, 15]])
    out = forward_blocks(drafter.network, drafter._ends, batch)
    for a in range(len(ANCHORS)):
        drafter.bind(target, 2, 64)  # rows of different lengths, side by side
        anchors = batch.anchors_BA[:, a]
        for row in (0, 1):
            drafter._packed.cache.admit(row)
        parts = [batch.features_BTF[row, : int(anchors[row])] for row in (0, 1)]
        lengths = [len(part) for part in parts]
        drafter._append([0, 1], Features(torch.cat(parts), lengths))
        tokens = batch.tokens_BT[torch.arange(2), anchors]
        hidden, base = drafter.parallel_stage([0, 1], tokens)
        torch.testing.assert_close(hidden, out.hidden_BAGD[:, a], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(base, out.base_BAGV[:, a], rtol=1e-4, atol=1e-4)
        # The sequential stage along the text's own tokens.
        block = draft_block(base, hidden, tokens, Sampling(), None, head=drafter.network.markov_head, keep_logits=True)
        assert block.logits is not None
        torch.testing.assert_close(block.logits[:, 0], out.logits_BAGV[:, a, 0], rtol=1e-4, atol=1e-4)


def test_the_attention_function_is_put_back() -> None:
    drafter = SemiAutoregressiveDrafter(random=BlockShape(block_size=4, rank=8))
    drafter.bind(target_of("tiny"), 1, 64)
    batch = random_batch(len(drafter.feature_layers) * 64, [[3]])
    before = drafter.network.stock.config._attn_implementation
    forward_blocks(drafter.network, drafter._ends, batch)
    assert drafter.network.stock.config._attn_implementation == before
    with pytest.raises(RuntimeError):
        forward_blocks(drafter.network, drafter._ends, random_batch(5, [[3]]))
    assert drafter.network.stock.config._attn_implementation == before


def test_supervision_ends_with_the_first_gap() -> None:
    batch: dict[str, Any] = {
        "tokens_BT": torch.arange(6).unsqueeze(0),
        "features_BTF": torch.zeros(1, 6, 1),
        "loss_mask_BT": torch.tensor([[1, 1, 1, 0, 1, 1]]).bool(),
        "anchors_BA": torch.tensor([[0, 3, 4, 5]]),
        "is_real_BA": torch.tensor([[True, True, True, False]]),
    }
    labels, positions, supervised = labels_of(BlockBatch(**batch), 3)
    assert labels[0].tolist() == [[1, 2, 3], [4, 5, 5], [5, 5, 5], [5, 5, 5]]
    assert torch.equal(labels, positions)  # token i is i
    assert supervised[0].int().tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]]

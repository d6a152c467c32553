"""Training-time test: what is trained is what decodes, step by step; masks, labels, supervision, loss, gradients."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from conformance.toolbox import make_request, open_tiny
from torch import Tensor

from baselines.eagle import EagleDrafter, EagleShape
from baselines.eagle3 import Eagle3Drafter, Eagle3Shape
from baselines.mtp import MtpDrafter, MtpShape
from dispark.decoding.target import TargetModel
from dispark.drafters.vocabulary import DraftVocabulary
from dispark.training.eagle3_ttt import TttBatch, forward_ttt, shift_left, soft_labels, supervised, ttt_mask
from dispark.training.losses import soft_cross_entropy, ttt_loss
from dispark.types import Features

LENGTH, STEPS = 9, 3
KINDS: dict[str, tuple[Any, Any]] = {
    "eagle3": (Eagle3Drafter, Eagle3Shape),
    "mtp": (MtpDrafter, MtpShape),
    "eagle": (EagleDrafter, EagleShape),
}


@cache
def target_of(name: str) -> TargetModel:
    return open_tiny(name)


def random_drafter(kind: str, name: str, **shape: Any) -> Any:
    drafter_class, shape_class = KINDS[kind]
    drafter = drafter_class(random=shape_class(**shape), draft_length=STEPS)
    drafter.bind(target_of(name), 2, 40)
    return drafter


def random_batch(width: int, lengths: list[int], seed: int = 3) -> TttBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    is_real = torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)
    return TttBatch(
        tokens_BT=torch.randint(1, 250, (rows, LENGTH), generator=generator) * is_real,
        is_real_BT=is_real,
        loss_mask_BT=is_real.clone(),
        features_BTF=torch.randn(rows, LENGTH, width, generator=generator) * is_real.unsqueeze(-1),
    )


def batch_for(drafter: Any, lengths: list[int]) -> TttBatch:
    return random_batch(len(drafter.feature_layers) * target_of("tiny").hidden_size, lengths)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tiny", "tiny_qwen3", "tiny_gemma3", "tiny_gemma4"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_step_says_the_same_in_training_and_in_decoding(kind: str, name: str, num_layers: int) -> None:
    """From every position, chains over the text's own tokens; rows of two lengths."""
    drafter = random_drafter(kind, name, num_layers=num_layers)
    lengths = [LENGTH, 6]
    batch = batch_for(drafter, lengths)
    steps = forward_ttt(drafter.network, drafter.parts.ends, batch, STEPS)
    assert len(steps) == STEPS
    num_compared = 0
    for row, length in enumerate(lengths):
        tokens = batch.tokens_BT[row].tolist()
        for i in range(length - 1):
            drafter.bind(target_of(name), 1, 40)
            features = Features(batch.features_BTF[row, : i + 1], [i + 1])
            drafter.begin([0], [make_request(tokens[: i + 1])], [tokens[i + 1]], features)
            hidden = drafter.extend([0])
            for s in range(STEPS):
                if i + 1 + s >= length:
                    break
                if s > 0:
                    hidden = drafter.step([0], torch.tensor([tokens[i + 1 + s]]), hidden)
                torch.testing.assert_close(steps[s].hidden_BTD[row, i], hidden[0], rtol=1e-4, atol=1e-4)
                wanted = drafter.logits(hidden)[0]
                # Logits without a norm before them reach 100.
                torch.testing.assert_close(steps[s].logits_BTV[row, i], wanted, rtol=1e-4, atol=1e-3)
                num_compared += 1
    assert num_compared == (8 + 7 + 6) + (5 + 4 + 3)


def test_decoding_goes_on_after_training() -> None:
    drafter = random_drafter("eagle3", "tiny")
    before = drafter.network.stock.config._attn_implementation
    batch = batch_for(drafter, [LENGTH])
    forward_ttt(drafter.network, drafter.parts.ends, batch, 2)
    assert drafter.network.stock.config._attn_implementation == before
    broken = TttBatch(batch.tokens_BT[:, :4], batch.is_real_BT, batch.loss_mask_BT, batch.features_BTF)
    with pytest.raises(RuntimeError):
        forward_ttt(drafter.network, drafter.parts.ends, broken, 2)
    assert drafter.network.stock.config._attn_implementation == before


def test_masks() -> None:
    """By the definition, element by element."""
    lengths = [4, 2]
    for step in range(3):
        mask = ttt_mask(torch.tensor(lengths), 4, step)
        assert mask.shape == (2, 4, 4 * (step + 1))
        for row, length in enumerate(lengths):
            for q in range(4):
                for column in range(4 * (step + 1)):
                    s, k = divmod(column, 4)
                    wanted = q < length - step and (k <= q if s == 0 else k == q)
                    assert bool(mask[row, q, column]) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_weight_and_training_works(kind: str) -> None:
    drafter = random_drafter(kind, "tiny")
    network, ends = drafter.network, drafter.parts.ends
    network.requires_grad_(True)
    batch = batch_for(drafter, [LENGTH, 6])
    target_logits = torch.randn(2, LENGTH, 262, generator=torch.Generator().manual_seed(1)) * 3
    labels = [soft_labels(target_logits, s) for s in range(STEPS)]
    masks = [supervised(batch, s) for s in range(STEPS)]
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    totals = []
    for _ in range(12):
        steps = forward_ttt(network, ends, batch, STEPS)
        loss = ttt_loss([step.logits_BTV for step in steps], labels, masks)
        optimizer.zero_grad()
        loss.total.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() and p.grad.any() for p in network.parameters())
        optimizer.step()
        totals.append(float(loss.total.detach()))
    assert totals[-1] < 0.8 * totals[0]
    assert all(weight.grad is None for weight in ends.weights().values())


def test_padding_does_not_count() -> None:
    drafter = random_drafter("eagle3", "tiny")
    batch = batch_for(drafter, [6])
    noisy = TttBatch(batch.tokens_BT.clone(), batch.is_real_BT, batch.loss_mask_BT, batch.features_BTF.clone())
    noisy.tokens_BT[:, 6:] = 99
    noisy.features_BTF[:, 6:] = 1e4
    target_logits = torch.randn(1, LENGTH, 262)
    totals = []
    for one in (batch, noisy):
        steps = forward_ttt(drafter.network, drafter.parts.ends, one, STEPS)
        labels, masks = zip(*[(soft_labels(target_logits, s), supervised(one, s)) for s in range(STEPS)], strict=True)
        totals.append(ttt_loss([step.logits_BTV for step in steps], labels, masks).total)
    torch.testing.assert_close(totals[0], totals[1])
    assert totals[0] > 0


# -- labels and supervision ---------------------------------------------------------------------------------------


def test_shift_left() -> None:
    values = torch.tensor([[1, 2, 3]])
    assert shift_left(values, 0).tolist() == [[1, 2, 3]]
    assert shift_left(values, 2, fill=9).tolist() == [[3, 9, 9]]
    assert shift_left(values, 5).tolist() == [[0, 0, 0]]


def test_supervision_moves_with_the_step_and_spares_the_last_token() -> None:
    batch = TttBatch(
        tokens_BT=torch.zeros(2, 5, dtype=torch.int64),
        is_real_BT=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool(),
        loss_mask_BT=torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]]).bool(),
        features_BTF=torch.zeros(2, 5, 1),
    )
    assert supervised(batch, 0).int().tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert supervised(batch, 1).int().tolist() == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert supervised(batch, 2).int().tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_labels_are_the_targets_laws_of_the_next_position() -> None:
    logits = torch.randn(1, 4, 6)
    laws = logits.softmax(-1)
    assert torch.equal(soft_labels(logits, 0)[0, 1], laws[0, 2])
    assert torch.equal(soft_labels(logits, 2)[0, 0], laws[0, 3])
    torch.testing.assert_close(soft_labels(logits, 1)[0, 2:], torch.full((2, 6), 1 / 6))


def test_a_reduced_vocabulary_renormalises_and_skips_what_it_cannot_draft() -> None:
    vocabulary = DraftVocabulary(torch.tensor([1, 3]), 4)
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [9.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 5.0], [0.0, 1.0, 0.0, 0.0]]])
    law = soft_labels(logits, 0, vocabulary)
    torch.testing.assert_close(law[0, 0], torch.tensor([1.0, 2.0]).softmax(-1))
    torch.testing.assert_close(law[0, 3], torch.tensor([0.5, 0.5]))
    ones = torch.ones(1, 4, dtype=torch.bool)
    batch = TttBatch(torch.zeros(1, 4, dtype=torch.int64), ones, ones, torch.zeros(1, 4, 1))
    # The target's best tokens are 0 (can't be drafted), 3 and 1 at positions 1, 2, 3.
    assert supervised(batch, 0, vocabulary, logits).int().tolist() == [[0, 1, 1, 0]]
    assert supervised(batch, 1, vocabulary, logits).int().tolist() == [[1, 1, 0, 0]]


# -- loss ---------------------------------------------------------------------------------------------------------


def test_loss_by_hand() -> None:
    """Two positions of four supervised; the mean is over all four."""
    logits = torch.log(torch.tensor([[[0.5, 0.5], [0.25, 0.75]], [[0.9, 0.1], [0.5, 0.5]]]))
    probs = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]]])
    is_supervised = torch.tensor([[True, True], [False, False]])
    first = (math.log(2) - 0.5 * (math.log(0.25) + math.log(0.75))) / 4
    assert float(soft_cross_entropy(logits, probs, is_supervised)) == pytest.approx(first)
    second = torch.tensor([[False, True], [False, False]])
    loss = ttt_loss([logits, logits], [probs, probs], [is_supervised, second], decay=0.5)
    later = -0.5 * (math.log(0.25) + math.log(0.75)) / 4
    assert [float(step) for step in loss.steps] == pytest.approx([first, later])
    assert float(loss.total) == pytest.approx(first + 0.5 * later)
    assert [float(a) for a in loss.acceptance] == pytest.approx([(0.5 + 0.75) / 2, 0.75])
    assert [float(a) for a in loss.accuracy] == pytest.approx([0.5, 0.0])


def test_unsupervised_positions_may_hold_anything() -> None:
    logits = torch.zeros(1, 2, 3, requires_grad=True)
    probs = torch.tensor([[[1.0, 0.0, 0.0], [float("nan")] * 3]])
    loss = soft_cross_entropy(logits, probs, torch.tensor([[True, False]]))
    assert float(loss.detach()) == pytest.approx(math.log(3) / 2)
    nothing: Tensor = ttt_loss([logits], [probs], [torch.zeros(1, 2, dtype=torch.bool)]).total
    assert float(nothing.detach()) == 0.0


@pytest.mark.parametrize("decay", [0.0, -1.0, float("nan")])
def test_a_decay_that_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        ttt_loss([], [], [], decay)

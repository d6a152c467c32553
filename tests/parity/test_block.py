"""Block-parallel drafters against recorded runs: DSpark with each head, DFlash in both conventions."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.dflash import DFlashDrafter
from dispark.decoding.random import RowGenerators
from dispark.drafters.semi_autoregressive import SemiAutoregressiveDrafter
from dispark.drafters.sequential_stage import draft_block
from dispark.schedulers.threshold import ThresholdScheduler
from dispark.training.block_losses import BlockLoss, BlockLossWeights, BlockTruth, block_loss
from dispark.training.blocks import BlockBatch, forward_blocks
from dispark.types import Features, Sampling
from parity.cases import RUNS, TOLERANCE, Case, Replay, cases, replay, split

CASES = cases("deepspec_block", "zlab_dflash")
TRAINED = [case for case in CASES if "train.input_ids" in case.io]
pytestmark = pytest.mark.skipif(not CASES, reason="no recorded runs of block-parallel drafters (DISPARK_FIXTURES)")
named = {"ids": lambda case: case.name}


def has_head(case: Case) -> bool:
    return "greedy.corrected_logits" in case.io and case.layout == "deepspec_block" and not is_dflash(case)


def is_dflash(case: Case) -> bool:
    return case.layout == "zlab_dflash" or not any(key.startswith("markov_head") for key in tensors_of(case))


def tensors_of(case: Case) -> set[str]:
    from safetensors import safe_open

    with safe_open(case.folder / "draft" / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def make(case: Case) -> Any:
    if is_dflash(case):
        return DFlashDrafter(case.draft)
    return SemiAutoregressiveDrafter(case.draft)


@cache
def bound(case: Case) -> Any:
    """A drafter with room for two rows of any recorded length."""
    drafter = make(case)
    drafter.bind(case.target(), 2, 200)
    return drafter


@cache
def replayed(case: Case, run: str) -> Replay:
    stop_ids = case.io[f"{run}.token_ids"].tolist() if f"{run}.token_ids" in case.io else ()
    scheduler = ThresholdScheduler(case.scalar("conf.threshold")) if run == "conf" else None
    return replay(case, make(case), stop_ids, scheduler)


RUN_CASES = [(case, run) for case in CASES for run in RUNS if case.has(run)]


@pytest.mark.parametrize(("case", "run"), RUN_CASES, ids=lambda value: getattr(value, "name", value))
def test_a_whole_run(case: Case, run: str) -> None:
    """Text, accepted counts and drafts, round by round, through the real loop."""
    io, ours = case.io, replayed(case, run)
    assert ours.output_ids == io[f"{run}.output_ids"].tolist()
    if f"{run}.accepted" in io:
        wanted = io[f"{run}.accepted"].tolist()
    else:
        wanted = [n - 1 for n in io[f"{run}.acceptance_lengths"].tolist()]
    found = ours.accepted
    # The reference goes on while the anchor lies before the cap, which may add one round of which nothing is kept.
    assert len(wanted) - len(found) in (0, 1)
    end = ours.trace.rounds[-1]["end"]
    sure = len(found) - (1 if end == "length" or case.layout == "zlab_dflash" else 0)  # our last round is cut
    assert found[:sure] == wanted[:sure]
    assert sure == 0 or max(wanted) > 0
    if f"{run}.draft_tokens" in io:
        drafts = torch.cat([draft.tokens_BG for draft in ours.drafts])
        assert torch.equal(drafts, io[f"{run}.draft_tokens"][: len(drafts)])
    if f"{run}.verify_len" in io:
        verified = [row["num_verified"] for row in ours.trace.rounds]
        assert verified == io[f"{run}.verify_len"].tolist()[: len(verified)]
    if f"{run}.confidence_logits" in io:
        ours_BG = torch.cat([draft.confidence_BG for draft in ours.drafts])
        torch.testing.assert_close(ours_BG, io[f"{run}.confidence_logits"][: len(ours_BG)].sigmoid(), **TOLERANCE)


@pytest.mark.parametrize("case", CASES, **named)
def test_every_round_from_recorded_features(case: Case) -> None:
    """Hidden states and logits of each block, fed with the recorded features and anchors, two rows side by side."""
    io, drafter = case.io, bound(case)
    drafter.bind(case.target(), 2, 200)
    features = split(io["greedy.features"], io["greedy.feature_len"])
    for row in (0, 1):
        drafter._packed.cache.admit(row)
    for r, (chunk, anchor) in enumerate(zip(features, io["greedy.anchor_token"], strict=True)):
        both = Features(torch.cat([chunk, chunk]), [len(chunk)] * 2)
        drafter._append([0, 1], both)
        assert drafter._packed.cache.length(0) == int(io["greedy.start"][r])
        hidden_BGD, base_BGV = drafter.parallel_stage([0, 1], anchor.repeat(2))
        block = draft_block(
            base_BGV, hidden_BGD, anchor.repeat(2), Sampling(), None, head=drafter.network.markov_head, keep_logits=True
        )
        assert drafter._packed.cache.length(0) == int(io["greedy.draft_cache_len_after"][r])
        wanted_hidden = drafter.network.predicting(io["greedy.block_hidden"][r])
        base = io["greedy.base_logits"] if "greedy.base_logits" in io else io["greedy.draft_logits"]
        for row in (0, 1):
            torch.testing.assert_close(hidden_BGD[row], wanted_hidden, **TOLERANCE)
            torch.testing.assert_close(base_BGV[row], base[r], **TOLERANCE)
            assert torch.equal(block.tokens_MG[row], io["greedy.draft_tokens"][r])
            if "greedy.corrected_logits" in io:
                assert block.logits is not None
                torch.testing.assert_close(block.logits[row], io["greedy.corrected_logits"][r], **TOLERANCE)


@pytest.mark.parametrize("case", CASES, **named)
def test_the_target_is_the_recorded_one(case: Case) -> None:
    """Logits and tapped features of the target in one call."""
    io, target = case.io, case.target()
    ids = io["target_check.input_ids"]
    target.open(1, len(ids), make(case).feature_layers)
    target.admit(0)
    logits, features = target.forward([0], ids, [len(ids)])
    torch.testing.assert_close(logits, io["target_check.logits"], **TOLERANCE)
    torch.testing.assert_close(features.hidden_NF, io["target_check.features"], **TOLERANCE)


@pytest.mark.parametrize("case", [case for case in CASES if "forced.prev_tokens" in case.io], **named)
def test_forced_previous_tokens(case: Case) -> None:
    """The head's block form and the confidence head, with given tokens."""
    io, network = case.io, bound(case).network
    hidden, base, previous = io["forced.block_hidden"], io["forced.base_logits"], io["forced.prev_tokens"]
    corrected = network.markov_head(base, hidden, previous)
    torch.testing.assert_close(corrected, io["forced.corrected_logits"], **TOLERANCE)
    torch.testing.assert_close(network.markov_head.embed(previous), io["forced.prev_embeddings"], **TOLERANCE)
    logits = network.confidence_logits(hidden, previous)
    torch.testing.assert_close(logits, io["forced.confidence_logits"], **TOLERANCE)
    # Taken one by one, restarting the state at each block, the head says the same.
    state: Tensor | None = None
    for k in range(previous.shape[1]):
        inner, state = network.markov_head.step(network.markov_head.embed(previous[:, k]), hidden[:, k], state)
        step = base[:, k] + network.markov_head.bias(inner)
        torch.testing.assert_close(step, io["forced.corrected_logits"][:, k], **TOLERANCE)


@pytest.mark.parametrize("case", [case for case in CASES if "forced.anchors" in case.io], **named)
def test_forced_anchors(case: Case) -> None:
    """Blocks at given anchors of a given sequence, context built at once."""
    io, drafter = case.io, make(case)
    for i, anchor in enumerate(io["forced.anchors"].tolist()):
        drafter.bind(case.target(), 1, 200)
        drafter._packed.cache.admit(0)
        context = io["forced.features"][:anchor]
        drafter._append([0], Features(context, [anchor]))
        hidden, logits = drafter.parallel_stage([0], io["forced.input_ids"][anchor : anchor + 1])
        torch.testing.assert_close(hidden[0], drafter.network.predicting(io["forced.block_hidden"][i]), **TOLERANCE)
        torch.testing.assert_close(logits[0], io["forced.draft_logits"][i], **TOLERANCE)


def batch_of(case: Case) -> BlockBatch:
    io = case.io
    return BlockBatch(
        tokens_BT=io["train.input_ids"],
        features_BTF=io["train.target_features"],
        loss_mask_BT=io["train.loss_mask"].bool(),
        anchors_BA=io["train.anchor_positions"],
        is_real_BA=io["train.block_keep_mask"].bool(),
    )


@pytest.mark.parametrize("case", TRAINED, **named)
def test_training_forward(case: Case) -> None:
    """Labels, supervision, hidden states, logits and confidence of a packed training batch."""
    io, drafter, batch = case.io, bound(case), batch_of(case)
    out = forward_blocks(drafter.network, drafter._ends, batch)
    real = batch.is_real_BA
    assert torch.equal(out.labels_BAG[real], io["train.target_ids"][real])
    assert torch.equal(out.is_supervised_BAG, io["train.eval_mask"].bool())
    torch.testing.assert_close(out.hidden_BAGD[real], io["train.block_hidden"][real], **TOLERANCE)
    torch.testing.assert_close(out.base_BAGV[real], io["train.base_logits"][real], **TOLERANCE)
    torch.testing.assert_close(out.logits_BAGV[real], io["train.draft_logits"][real], **TOLERANCE)
    if "train.confidence_logits" in io:
        assert out.confidence_BAG is not None
        torch.testing.assert_close(out.confidence_BAG[real], io["train.confidence_logits"][real], **TOLERANCE)
    # The teacher: the target's final states one position before each label, through the head that drafts.
    states = io["train.target_last_hidden"]
    index = (out.positions_BAG - 1).flatten(1)
    teacher = states.gather(1, index.unsqueeze(-1).expand(-1, -1, states.shape[-1])).view(*out.labels_BAG.shape, -1)
    logits = drafter._ends.logits(teacher)
    seen = out.is_supervised_BAG
    torch.testing.assert_close(logits[seen], io["train.aligned_target_logits"][seen], **TOLERANCE)


def recorded_loss(
    case: Case, logits: Tensor, seen: Tensor, confidence: Tensor | None, weights: BlockLossWeights
) -> BlockLoss:
    """The loss of logits against the recorded teacher."""
    teacher, labels = case.io["train.aligned_target_logits"], case.io["train.target_ids"]
    flat = teacher.flatten(0, -2)
    outside = torch.zeros(labels.shape)
    return block_loss(
        logits,
        BlockTruth(lambda part: flat[part].softmax(-1), outside, teacher.argmax(-1), labels, seen),
        confidence,
        weights,
    )


@pytest.mark.parametrize("case", TRAINED, **named)
@pytest.mark.parametrize("is_decaying", [True, False])
def test_losses(case: Case, is_decaying: bool) -> None:
    """Every part of the loss, its gradients, and the expected accepted length."""
    io, settings = case.io, case.meta["loss_settings"]
    logits = io["train.draft_logits"].clone().requires_grad_()
    confidence = io["train.confidence_logits"].clone().requires_grad_() if "train.confidence_logits" in io else None
    weights = BlockLossWeights(
        settings["ce_loss_alpha"],
        settings["l1_loss_alpha"],
        settings["confidence_head_alpha"],
        settings["loss_decay_gamma"] if is_decaying else None,
    )
    seen = io["train.eval_mask"].bool()
    found = recorded_loss(case, logits, seen, confidence, weights)
    suffix = "" if is_decaying else "_no_decay"
    for part in ("total", "ce", "l1", "confidence"):
        if f"loss.{part}{suffix}" in case.meta["scalars"]:
            assert getattr(found, part).item() == pytest.approx(case.scalar(f"loss.{part}{suffix}"), abs=1e-4), part
    if not is_decaying:
        return
    slots = weights.slots(logits.shape[2], logits.device)
    torch.testing.assert_close(slots, io["loss.position_weights"], **TOLERANCE)
    found.total.backward()
    torch.testing.assert_close(logits.grad, io["loss.grad_draft_logits"], rtol=1e-3, atol=1e-6)
    if confidence is not None:
        torch.testing.assert_close(confidence.grad, io["loss.grad_confidence_logits"], rtol=1e-3, atol=1e-6)
    survival = (found.accept_BAG * seen).cumprod(-1).sum(-1)[seen[..., 0]]
    tau = 1 + float(survival.mean())
    assert tau == pytest.approx(case.scalar("metric.tau_probabilistic"), abs=1e-3)
    for k in range(seen.shape[-1]):
        share = float(found.accept_BAG[..., k][seen[..., k]].mean())
        assert share == pytest.approx(case.scalar(f"metric.accept_rate@{k}"), abs=1e-4)


@pytest.mark.parametrize("case", TRAINED, **named)
def test_gradients_reach_every_trained_tensor(case: Case) -> None:
    drafter = make(case)
    drafter.bind(case.target(), 1, 100)
    drafter.network.requires_grad_()
    out = forward_blocks(drafter.network, drafter._ends, batch_of(case))
    loss = recorded_loss(case, out.logits_BAGV, out.is_supervised_BAG, out.confidence_BAG, BlockLossWeights())
    loss.total.backward()
    without = [name for name, p in drafter.network.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert not without


@pytest.mark.parametrize("case", [case for case in CASES if has_head(case)], **named)
@pytest.mark.parametrize("num_candidates", [1, 3, 1000])
def test_candidates_confine_the_correction(case: Case, num_candidates: int) -> None:
    """q is that of the full correction, cut to the best base logits and renormalised; enough of them change nothing."""
    io, network = case.io, bound(case).network
    base, hidden = io["greedy.base_logits"], io["greedy.block_hidden"]
    anchors, sampling = io["greedy.anchor_token"], Sampling(1.0)
    uniform = RowGenerators(list(range(len(base))), [1] * len(base), torch.device("cpu")).uniform(
        "draft", base.shape[1]
    )
    block = draft_block(
        base, hidden, anchors, sampling, uniform, head=network.markov_head, num_candidates=num_candidates
    )
    full = network.markov_head(base, hidden, block.previous_MG)
    kept = base.topk(min(num_candidates, base.shape[-1]), dim=-1).indices
    mask = torch.full_like(full, float("-inf")).scatter(-1, kept, 0.0)
    assert block.probs_MGV is not None
    torch.testing.assert_close(block.probs_MGV, (full + mask).softmax(-1), rtol=1e-4, atol=1e-5)
    assert bool((block.probs_MGV.gather(-1, block.tokens_MG.unsqueeze(-1)) > 0).all())
    if num_candidates >= base.shape[-1]:
        plain = draft_block(base, hidden, anchors, sampling, uniform, head=network.markov_head)
        assert torch.equal(block.tokens_MG, plain.tokens_MG)

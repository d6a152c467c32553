"""Losses and figures of feature-recurrent drafters in training, held against their definitions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conformance.toolbox import open_tiny

from baselines.mtp import MtpDrafter, MtpShape
from dispark.decoding.target import FINAL
from dispark.training.features import FeatureBatch, FeatureStream
from dispark.training.recurrent_student import ChainLossWeights, RecurrentStudent
from dispark.training.rows import TrainingRow
from dispark.training.students import StudentLoss

IDS = torch.arange(3, 90, 3)  # 0, the id of padding, is not among them
ROWS = [
    TrainingRow("r/0", "math", "p", [7, 8, 9], [12, 15, 40, 18, 21, 33], "length"),
    TrainingRow("r/1", "math", "p", [5, 6], [30, 31, 60, 2], "stop"),
]


def student(ids: torch.Tensor | None, **loss: Any) -> tuple[RecurrentStudent, FeatureBatch]:
    target = open_tiny("tiny")
    size = None if ids is None else len(ids)
    found = RecurrentStudent(
        MtpDrafter(random=MtpShape(draft_vocab_size=size)),
        ChainLossWeights(**{"soft": 0.0, "ce": 1.0, "mean_over": "supervised", **loss}),
        num_steps=2,
    )
    found.start(target, ids)
    return found, FeatureStream(target, found.feature_layers, 64).batch(ROWS)


def loss_of(found: RecurrentStudent, batch: FeatureBatch) -> StudentLoss:
    return found.loss(batch, [0, 0], lambda values: values)


def drafts(found: RecurrentStudent, batch: FeatureBatch, row: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(q of every position at a step, the target's p after the tokens before), over all ids of the target."""
    from dispark.training.eagle3_ttt import ttt_states

    states = list(ttt_states(found.network, found._ends, found._sequences(batch), 2))[step][1][row]
    q = found._ends.logits(found.network.read(states)).float().softmax(-1)
    if found.drafter.vocabulary is not None:
        q = found.drafter.vocabulary.widen(q)
    p = open_tiny("tiny").model.get_output_embeddings()(batch.states[FINAL][row]).float().softmax(-1)
    return q, p


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
def test_figures_are_over_all_supervised_drafts_and_the_targets_own_law(ids: torch.Tensor | None) -> None:
    found, batch = student(ids)
    loss = loss_of(found, batch)
    for step in range(2):
        accept = right = count = 0.0
        for row, text in enumerate(ROWS):
            q, p = drafts(found, batch, row, step)
            first, length = len(text.prompt_ids), len(text.tokens)
            for i in range(first - step, length - 1 - step):  # a position that the answer's tokens may be fed behind
                if i < 0:
                    continue
                accept += float(torch.minimum(q[i], p[i + 1 + step]).sum())
                right += float(q[i].argmax() == p[i + 1 + step].argmax())
                count += 1
        assert float(loss.count_G[step]) == count
        assert float(loss.accept_G[step]) == pytest.approx(accept, rel=1e-4)
        assert float(loss.right_G[step]) == right


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "reduced"])
def test_cross_entropy_is_over_the_texts_own_tokens_only(ids: torch.Tensor | None) -> None:
    found, batch = student(ids, decay=1.0)
    wanted = 0.0
    for step in range(2):
        terms = []
        for row, text in enumerate(ROWS):
            q, p = drafts(found, batch, row, step)
            for i in range(len(text.prompt_ids) - step, len(text.tokens) - 2 - step):
                label, best = text.tokens[i + 2 + step], int(p[i + 1 + step].argmax())
                if ids is None or (label in ids.tolist() and best in ids.tolist()):
                    terms.append(-float(q[i, label].log()))
        wanted += sum(terms) / max(1, len(terms))
    assert float(loss_of(found, batch).total) == pytest.approx(wanted, rel=1e-4)


def test_what_stands_behind_a_text_does_not_matter() -> None:
    found, batch = student(None)
    other = batch.tokens_BT.clone()
    other[1, len(ROWS[1].tokens) :] = 77
    changed = dataclasses.replace(batch, tokens_BT=other)
    assert float(loss_of(found, batch).total) == float(loss_of(found, changed).total)

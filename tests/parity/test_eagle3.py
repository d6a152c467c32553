"""Eagle-3 against recorded runs: DeepSpec's code and that of the EAGLE authors, in decoding and in training.

The two count alike but for the end of a text: the authors commit the anchor and the accepted drafts of a round and
leave the next token pending, and both may run a round beyond the cap, which our loop keeps exactly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from conformance.toolbox import make_request
from torch import Tensor

from baselines.eagle3 import Eagle3Drafter
from dispark.decoding.random import RowGenerators
from dispark.drafters.sequential_stage import draft_block
from dispark.training.eagle3_ttt import TttBatch, supervised, ttt_states
from dispark.training.ends import FrozenEnds
from dispark.training.features import FeatureBatch
from dispark.training.recurrent_student import ChainLossWeights, RecurrentStudent
from dispark.training.teacher import Teacher
from dispark.types import Draft, Features, Outcome, Sampling
from parity.cases import RUNS, TOLERANCE, Case, Replay, cases, replay, split

CASES = cases("deepspec_eagle3", "eagle3", "speculators_eagle3")
TRAINED = [case for case in CASES if "train.input_ids" in case.io]
FORCED = [case for case in CASES if "forced.tokens" in case.io]
pytestmark = pytest.mark.skipif(not CASES, reason="no recorded runs of Eagle-3 (DISPARK_FIXTURES)")


def named(case: Any) -> str:
    return str(getattr(case, "name", case))


def draft_length_of(case: Case) -> int:
    return int(case.io["greedy.step_hidden"].shape[1])


def accepted_of(case: Case, run: str) -> list[int]:
    return [int(num) for num in case.io[f"{run}.accepted"]]


@cache
def bound(case: Case) -> Eagle3Drafter:
    drafter = Eagle3Drafter(case.draft, draft_length=draft_length_of(case))
    drafter.bind(case.target(), 2, 200)
    return drafter


class Spied:
    """A drafter whose states and logits are kept, by call."""

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []
        inner = drafter.network.read, drafter.logits

        def read(hidden_BD: Tensor) -> Tensor:
            self.hidden.append(hidden_BD.clone())
            return inner[0](hidden_BD)

        def logits(hidden_BD: Tensor) -> Tensor:
            self.logits.append(inner[1](hidden_BD))
            return self.logits[-1]

        drafter.network.read, drafter.logits = read, logits  # type: ignore[method-assign]


@cache
def replayed(case: Case, run: str, is_capped: bool = True) -> Replay:
    """Our run; uncapped it goes on for as many rounds as the recorded one."""
    stop_ids = case.io[f"{run}.token_ids"].tolist() if f"{run}.token_ids" in case.io else ()
    drafter = Eagle3Drafter(case.draft, draft_length=draft_length_of(case))
    num = None if is_capped else 1 + sum(accepted + 1 for accepted in accepted_of(case, run))
    return replay(case, drafter, stop_ids, max_new_tokens=num)


RUN_CASES = [(case, run) for case in CASES for run in RUNS if case.has(run)]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_features_are_of_the_layers_that_the_recording_tapped(case: Case) -> None:
    target, drafter = case.target(), bound(case)
    ids = case.io["target_check.input_ids"]
    target.open(1, len(ids), drafter.feature_layers)
    target.admit(0)
    logits, features = target.forward([0], ids, [len(ids)])
    torch.testing.assert_close(logits, case.io["target_check.logits"], **TOLERANCE)
    torch.testing.assert_close(features.hidden_NF, case.io["target_check.features"], **TOLERANCE)


@pytest.mark.parametrize(("case", "run"), RUN_CASES, ids=named)
def test_the_text_of_a_run(case: Case, run: str) -> None:
    """Under the recorded cap and stop tokens: the same text, as far as ours may go."""
    ours = replayed(case, run)
    wanted = case.io[f"{run}.output_ids"].tolist()
    ends_by_cap = ours.trace.rounds[-1]["end"] == "length"
    assert ours.output_ids == (wanted[: len(ours.output_ids)] if ends_by_cap else wanted)
    if ends_by_cap:
        assert len(ours.output_ids) == len(case.prompt_ids) + case.meta["generation"]["max_new_tokens"]
        assert len(wanted) >= len(ours.output_ids)
    else:
        assert ours.accepted == accepted_of(case, run)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_round_of_the_greedy_run(case: Case) -> None:
    """Run on for the recorded number of rounds: accepted counts, next tokens and drafts, round by round."""
    io, ours = case.io, replayed(case, "greedy", is_capped=False)
    wanted = accepted_of(case, "greedy")
    assert ours.accepted == wanted
    assert max(wanted) > 0
    length = draft_length_of(case)
    drafts = torch.cat([draft.tokens_BG for draft in ours.drafts])
    assert torch.equal(drafts, io["greedy.draft_tokens"][:, -length:])  # the authors put the anchor in front
    text = ours.output_ids
    starts = [int(start) for start in io["greedy.start"]]
    assert [text[start] for start in starts] == io["greedy.anchor_token"].tolist()
    assert [text[s + n + 1] for s, n in zip(starts, wanted, strict=True)] == io["greedy.next_token"].tolist()


@pytest.mark.parametrize("case", [case for case in CASES if case.has("tree")], ids=named)
def test_a_tree_writes_the_same_text(case: Case) -> None:
    """Greedy decoding writes the target's text, however it is drafted."""
    ours, wanted = replayed(case, "greedy", is_capped=False).output_ids, case.io["tree.output_ids"].tolist()
    num = min(len(ours), len(wanted))
    assert num > len(case.prompt_ids) + 10
    assert ours[:num] == wanted[:num]


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("rows", [(0,), (1, 0)])
def test_states_and_logits_from_recorded_features(case: Case, rows: tuple[int, ...]) -> None:
    """Each round fed with the recorded features and tokens, alone and as two rows side by side."""
    io = case.io
    drafter = Eagle3Drafter(case.draft, draft_length=draft_length_of(case))
    drafter.bind(case.target(), len(rows), 200)
    spied = Spied(drafter)
    parts, ids = (split(io[f"greedy.{key}"], io["greedy.feature_len"]) for key in ("features", "extend_ids"))
    generators = RowGenerators([0] * len(rows), [1] * len(rows), torch.device("cpu"))
    for r, (part, tokens) in enumerate(zip(parts, ids, strict=True)):
        features = Features(torch.cat([part] * len(rows)), [len(part)] * len(rows))
        emitted = tokens.tolist()
        if r == 0:
            prompt = make_request(case.prompt_ids)
            assert emitted[:-1] == case.prompt_ids[1:]
            drafter.begin(rows, [prompt] * len(rows), [emitted[-1]] * len(rows), features)
        else:
            outcome = Outcome(
                [emitted] * len(rows), [len(emitted) - 1] * len(rows), [None] * len(rows), [False] * len(rows)
            )
            drafter.update(rows, outcome, features)
        anchors = io["greedy.anchor_token"][r].repeat(len(rows))
        draft: Draft = drafter.propose(rows, anchors, Sampling(), generators)
        states, logits = torch.stack(spied.hidden, dim=1), torch.stack(spied.logits, dim=1)
        spied.hidden.clear(), spied.logits.clear()
        for i, row in enumerate(rows):
            assert drafter._packed.cache.length(row) == int(io["greedy.start"][r])
            torch.testing.assert_close(states[i], io["greedy.step_hidden"][r], **TOLERANCE)
            torch.testing.assert_close(logits[i], io["greedy.draft_logits"][r], **TOLERANCE)
            assert torch.equal(draft.tokens_BG[i], io["greedy.draft_tokens"][r, -draft_length_of(case) :])


@pytest.mark.parametrize("case", FORCED, ids=named)
def test_a_forced_chain(case: Case) -> None:
    """Prefill and given tokens, one by one; ids of a reduced vocabulary map to the target's."""
    io, drafter = case.io, bound(case)
    drafter.bind(case.target(), 2, 200)
    features, paired = io["forced.features"], io["forced.paired_ids"].tolist()
    first, rest = paired[-1], [0, *paired[:-1]]  # the first token of a prompt is paired with nothing
    drafter.begin([1], [make_request(rest)], [first], Features(features, [len(paired)]))
    hidden = drafter.extend([1])
    for j in range(len(io["forced.hidden"])):
        if j > 0:
            hidden = drafter.step([1], io["forced.tokens"][j - 1 : j], hidden)
        torch.testing.assert_close(hidden[0], io["forced.hidden"][j], **TOLERANCE)
        logits = drafter.logits(hidden)
        torch.testing.assert_close(logits[0], io["forced.logits"][j], **TOLERANCE)
        if "forced.top1_target_id" in io:
            assert int(logits.argmax()) == int(io["forced.top1_draft_id"][j])
            block = draft_block(
                logits.unsqueeze(1),
                hidden.unsqueeze(1),
                torch.zeros(1),
                Sampling(),
                None,
                vocabulary=drafter.vocabulary,
            )
            assert block.tokens_MG.tolist() == [[int(io["forced.top1_target_id"][j])]]


@pytest.mark.parametrize("case", FORCED, ids=named)
def test_every_state_of_a_prefill(case: Case) -> None:
    """The training forward's first step is the prefill, all positions of it."""
    io, drafter = case.io, bound(case)
    features, paired = io["forced.features"], io["forced.paired_ids"]
    num = len(paired) + 1
    batch = TttBatch(
        tokens_BT=torch.cat([paired.new_zeros(1), paired]).unsqueeze(0),
        is_real_BT=torch.ones(1, num, dtype=torch.bool),
        loss_mask_BT=torch.ones(1, num, dtype=torch.bool),
        features_BTF=torch.cat([features, torch.zeros_like(features[:1])]).unsqueeze(0),
    )
    ((_, hidden_BTD),) = ttt_states(drafter.network, drafter.parts.ends, batch, 1)
    states = hidden_BTD[0, :-1]
    torch.testing.assert_close(states, io["forced.prefill_hidden"], **TOLERANCE)


def batch_of(case: Case) -> TttBatch:
    io = case.io
    return TttBatch(
        io["train.input_ids"],
        io["train.attention_mask"].bool(),
        io["train.loss_mask"].bool(),
        io["train.target_features"],
    )


@pytest.mark.parametrize("case", TRAINED, ids=named)
def test_the_training_forward(case: Case) -> None:
    """Tokens of every step, and states and logits wherever the recorded mask lets a position see anything."""
    io, drafter, batch = case.io, bound(case), batch_of(case)
    num_steps = len(io["train.step_input_ids"])
    steps = ttt_states(drafter.network, drafter.parts.ends, batch, num_steps)
    for s, (tokens_BT, hidden_BTD) in enumerate(steps):
        seeing_BT = _seeing(io, s)
        logits_BTV = drafter.parts.ends.logits(drafter.network.read(hidden_BTD))
        assert torch.equal(tokens_BT, io["train.step_input_ids"][s])
        assert bool(seeing_BT.any())
        torch.testing.assert_close(hidden_BTD[seeing_BT], io["train.step_hidden"][s][seeing_BT], **TOLERANCE)
        torch.testing.assert_close(logits_BTV[seeing_BT], io["train.step_draft_logits"][s][seeing_BT], **TOLERANCE)


def _seeing(io: dict[str, Tensor], step: int) -> Tensor:
    """bool [B, T]: positions that attend to something at a step."""
    return io[f"train.step{step}_attention_mask"].bool().any(-1)


@pytest.mark.parametrize("case", TRAINED, ids=named)
def test_the_loss(case: Case) -> None:
    """Supervision, each step's loss, their sum, and the logged acceptance and accuracy, as training computes them."""
    io, batch = case.io, batch_of(case)
    num_steps = len(io["train.step_input_ids"])
    weights = ChainLossWeights(decay=case.meta["loss_settings"]["step_loss_decay"])
    student = RecurrentStudent(Eagle3Drafter(case.draft), weights, num_steps)
    student.start(case.target(), None)
    final = io["train.target_last_hidden"]
    width = final.shape[-1]
    layers = student.feature_layers
    parts = batch.features_BTF.split(width, dim=-1)
    features = FeatureBatch(
        batch.tokens_BT,
        batch.is_real_BT,
        batch.loss_mask_BT,
        dict(zip(layers, parts, strict=True)),
        Teacher(final, torch.ones_like(batch.loss_mask_BT), FrozenEnds(case.target())),
        [],
    )
    loss = student.loss(features, [], lambda sums: sums)
    assert float(loss.total) == pytest.approx(case.scalar("loss.total"), rel=1e-4)
    accept, accuracy = loss.accept_G / loss.count_G, loss.right_G / loss.count_G
    for s in range(num_steps):
        if student.draft_vocab_size is None:
            assert torch.equal(supervised(batch, s), io["train.step_position_mask"][s].bool())
            assert float(accept[s]) == pytest.approx(case.scalar(f"metric.accept_rate@{s}"), rel=1e-4)
        assert int(loss.count_G[s]) == int(io["train.step_position_mask"][s].bool().sum())
        assert float(loss.parts[f"step{s}"]) == pytest.approx(case.scalar(f"loss.step{s}"), rel=1e-4)
        assert float(accuracy[s]) == pytest.approx(case.scalar(f"metric.accuracy@{s}"), rel=1e-4)

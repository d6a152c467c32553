"""Medusa's heads against recorded runs of the authors' code: logits, and the text of greedy decoding.

The recorded rounds verify a tree, ours a chain: the texts agree, the rounds need not. What the heads say at a position
does not depend on how it was reached, so it is compared at every position where a recorded round starts.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from conformance.toolbox import make_request
from safetensors.torch import load_file, save_file
from torch import Tensor

from baselines.medusa import MedusaDrafter
from dispark.decoding.target import FINAL
from parity.cases import TOLERANCE, Case, cases, replay

CASES = cases("medusa")
RUNS = [
    (case, name.removesuffix(".medusa_logits")) for case in CASES for name in case.io if name.endswith(".medusa_logits")
]
pytestmark = pytest.mark.skipif(not CASES, reason="no recorded runs of Medusa heads (DISPARK_FIXTURES)")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_run = pytest.mark.parametrize(("case", "run"), RUNS, ids=lambda value: getattr(value, "name", value))


@cache
def bound(checkpoint: str, case: Case, num_rows: int = 1) -> MedusaDrafter:
    drafter = MedusaDrafter(checkpoint)
    drafter.bind(case.target(), num_rows, 8)
    return drafter


@torch.inference_mode()
def head_logits(checkpoint: str, case: Case) -> Tensor:
    """[NH, M, V] of the recorded hidden states."""
    return bound(checkpoint, case)._head_logits(case.io["heads.hidden"]).transpose(0, 1)


@every_case
def test_the_target_is_the_recorded_one(case: Case) -> None:
    ids = case.io["target_check.input_ids"].tolist()
    target = case.target()
    target.open(1, len(ids), (FINAL,))
    target.admit(0)
    logits, features = target.forward([0], torch.tensor(ids), [len(ids)])
    torch.testing.assert_close(logits, case.io["target_check.logits"], **TOLERANCE)
    torch.testing.assert_close(features.hidden_NF, case.io["target_check.hidden"], **TOLERANCE)


@every_case
def test_heads_on_given_states(case: Case) -> None:
    torch.testing.assert_close(head_logits(case.draft, case), case.io["heads.logits"], **TOLERANCE)


@every_run
@torch.inference_mode()
def test_heads_where_the_recorded_rounds_start(case: Case, run: str) -> None:
    io, target, drafter = case.io, case.target(), MedusaDrafter(case.draft)
    starts, text = io[f"{run}.start"].tolist(), io[f"{run}.output_ids"].tolist()
    rows = list(range(len(starts)))
    drafter.bind(target, len(rows), len(text))
    target.open(len(rows), len(text), drafter.feature_layers)
    base, features = target.prefill(rows, [text[:start] for start in starts])
    drafter.begin(rows, [make_request(text[:start]) for start in starts], [text[start] for start in starts], features)
    torch.testing.assert_close(base, io[f"{run}.base_logits"], **TOLERANCE)
    torch.testing.assert_close(drafter.logits(rows), io[f"{run}.medusa_logits"], **TOLERANCE)


@every_case
def test_a_chain_writes_the_recorded_text(case: Case) -> None:
    io, recorded = case.io, case.io["greedy.output_ids"].tolist()
    num_prompt = len(case.prompt_ids)
    ours = replay(case, MedusaDrafter(case.draft), max_new_tokens=len(recorded) - num_prompt)
    assert ours.output_ids == recorded
    # Our rounds start at the anchor's position; where a recorded one does too, the drafts are its heads' best guesses.
    guesses = dict(zip(io["greedy.start"].tolist(), io["greedy.medusa_logits"].argmax(-1), strict=True))
    start, num_same, num_right = num_prompt, 0, 0
    for draft, row in zip(ours.drafts, ours.trace.rounds, strict=True):
        if start in guesses:
            assert torch.equal(draft.tokens_BG[0], guesses[start])
            num_same += 1
        # Accepted is what agrees with the recorded text; the last round may run beyond it.
        due = recorded[start + 1 : start + 1 + draft.tokens_BG.shape[1]]
        agree = [int(a) == b for a, b in zip(draft.tokens_BG[0], due, strict=False)]
        if len(due) == len(draft.tokens_BG[0]):
            assert row["num_accepted"] == [*agree, False].index(False)
            num_right += row["num_accepted"]
        start += row["num_emitted"]
    assert num_same > 0
    assert num_right > 0 or int(io["greedy.accepted"].sum()) == 0


@every_case
def test_every_form_of_the_file_gives_the_same_heads(case: Case, tmp_path: Path) -> None:
    draft = Path(case.draft)
    tensors = load_file(draft / "model.safetensors")
    folders = {name: tmp_path / name for name in ("official", "bare", "prefixed")}
    for folder in folders.values():
        folder.mkdir()
        shutil.copy(draft / "config.json", folder)
    for file in draft.glob("*.pt"):
        shutil.copy(file, folders["official"])
    if not list(folders["official"].iterdir())[1:]:
        del folders["official"]  # a copy of the case without it
    bare = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}
    save_file(bare, folders["bare"] / "model.safetensors")
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in bare.items()}
    save_file(prefixed, folders["prefixed"] / "model.safetensors")
    for folder in folders.values():
        assert torch.equal(head_logits(str(folder), case), head_logits(case.draft, case)), folder.name


@every_case
def test_a_saved_drafter_is_the_same_and_has_the_authors_names(case: Case, tmp_path: Path) -> None:
    drafter = bound(case.draft, case)
    drafter.save(tmp_path / "saved")
    assert torch.equal(head_logits(str(tmp_path / "saved"), case), head_logits(case.draft, case))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    recorded = load_file(Path(case.draft) / "model.safetensors")
    assert set(saved) == {name.removeprefix("medusa_head.") for name in recorded}
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["medusa_num_heads"] == drafter.draft_length

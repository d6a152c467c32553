"""Whether what was trained is what decodes: the saved drafter in the decoding loop against its training forward.

Held-out prompts are decoded greedily through the loop with the saved checkpoint. The texts then go through the
training forward, with anchors exactly where the rounds had them. Along a text the two must draft the same tokens: at
every slot up to the first that differs from the text, behind which decoding follows its own draft. Masks, positions or
features that are off by one show at once, in a network with random weights too.

In short dtypes the two differ by rounding, and near ties fall either way; a share of `tolerance` of the slots may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispark.decoding.loop import DecodingLoop
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter
from dispark.schedulers.fixed import FixedScheduler
from dispark.training.features import FeatureStream
from dispark.training.rows import TrainingRow
from dispark.training.students import Student
from dispark.types import Draft, Request, RequestRecord, Sampling
from dispark.verifiers.rejection import RejectionVerifier


@dataclass(frozen=True)
class ParityReport:
    """Slots that were compared and that differ, and the accepted drafts a round: simulated from the training forward,
    and in the loop."""

    num_slots: int
    num_different: int
    simulated_accepted: float
    loop_accepted: float
    loop_matl: float

    @property
    def different_share(self) -> float:
        return self.num_different / max(1, self.num_slots)


class _Prompts:
    """A request source over training rows."""

    def __init__(self, rows: Sequence[TrainingRow], max_new_tokens: int) -> None:
        self._waiting = [
            Request(
                request_id=row.row_id,
                prompt_id=row.row_id,
                turn=0,
                task="parity",
                category="parity",
                prompt_ids=tuple(row.prompt_ids),
                max_new_tokens=max_new_tokens,
                seed=0,
            )
            for row in rows
        ]
        self.outputs: dict[str, list[int]] = {}

    def is_cancelled(self, record: RequestRecord) -> bool:
        """Never."""
        return False

    @property
    def num_waiting(self) -> int:
        """None: the rows are a list that is worked off."""
        return 0

    def next(self) -> Request | None:
        return self._waiting.pop(0) if self._waiting else None

    def finish(self, record: RequestRecord) -> None:
        self.outputs[record.request.request_id] = list(record.output_ids)


class _Recorder:
    """Passes everything on to a drafter and keeps its drafts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.drafts: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, *arguments: Any) -> Draft:
        draft: Draft = self._inner.propose(*arguments)
        self.drafts.append(draft.tokens_BG)
        return draft


@dataclass(frozen=True)
class _Round:
    """A round of a text: where its anchor stands, what was drafted, and how much of it was kept."""

    anchor: int
    draft: list[int]
    num_accepted: int


def check_parity(
    student: Student,
    drafter: Drafter,
    target: TargetModel,
    stream: FeatureStream,
    rows: Sequence[TrainingRow],
    max_new_tokens: int,
) -> ParityReport:
    """Compares the student's training forward with its saved drafter.

    Args:
        student: as it was saved.
        drafter: that reads the saved checkpoint.
        target: of both.
        stream: gives the training forward its features; must not cut these texts.
        rows: whose prompts are decoded.
        max_new_tokens: of each answer.
    """
    rounds, outputs, matl = decode(drafter, target, rows, max_new_tokens)
    num_slots = num_different = simulated = accepted = num_rounds = 0
    texts = [
        TrainingRow(row.row_id, row.kind, row.prompt, row.prompt_ids, outputs[row.row_id], "length")
        for row in rows
        if rounds[row.row_id]
    ]
    batch = stream.batch(texts) if texts else None
    for i, text in enumerate(texts):
        assert batch is not None
        tokens, found = text.tokens, rounds[text.row_id]
        anchors_A = torch.tensor([r.anchor for r in found], device=target.device)
        predicted = student.predict(batch, i, anchors_A).tolist()
        for r, guess in zip(found, predicted, strict=True):
            due = tokens[r.anchor + 1 : r.anchor + 1 + len(r.draft)]
            right = _agreeing(r.draft, due)
            compared = min(right + 1, len(r.draft))
            num_slots += compared
            num_different += sum(a != b for a, b in zip(r.draft[:compared], guess, strict=False))
            simulated += min(_agreeing(guess[: len(r.draft)], due), len(due))
            accepted += right
            num_rounds += 1
    num_rounds = max(1, num_rounds)
    return ParityReport(num_slots, num_different, simulated / num_rounds, accepted / num_rounds, matl)


def _agreeing(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading places where two sequences agree."""
    num = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        num += 1
    return num


def decode(
    drafter: Drafter, target: TargetModel, rows: Sequence[TrainingRow], max_new_tokens: int
) -> tuple[dict[str, list[_Round]], dict[str, list[int]], float]:
    """(rounds by row, outputs by row, MATL) of a greedy pass."""
    recorder: Any = _Recorder(drafter)
    source = _Prompts(rows, max_new_tokens)
    longest = max(len(row.prompt_ids) for row in rows) + max_new_tokens
    decode_text: Callable[[Sequence[int]], str] = lambda ids: ""  # noqa: E731 - there are no stop strings
    loop = DecodingLoop(
        target,
        recorder,
        FixedScheduler(),
        RejectionVerifier(),
        Sampling(),
        decode=decode_text,
        batch_size=len(rows),
        num_slots=longest + drafter.draft_length + 1,
    )
    trace = loop.run(source)
    drafts = iter(recorder.drafts)
    by_step: dict[int, Any] = {}
    places = {row.row_id: len(row.prompt_ids) for row in rows}
    found: dict[str, list[_Round]] = {row.row_id: [] for row in rows}
    taken: dict[int, int] = {}
    for entry in trace.rounds:
        step, name = entry["step"], entry["request_id"]
        if step not in by_step:
            by_step[step] = next(drafts).tolist()
        place = taken.get(step, 0)
        taken[step] = place + 1
        found[name].append(_Round(places[name], by_step[step][place], entry["num_accepted"]))
        places[name] += entry["num_emitted"]
    emitted = sum(entry["num_emitted"] for entry in trace.rounds)
    return found, source.outputs, emitted / max(1, len(trace.rounds))

"""A request while it is decoded: what is refused, where its cap comes from, and what is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from conformance.toolbox import letters, make_request

from dispark.decoding.cut import Cut
from dispark.decoding.rows import ActiveRow, Trace, outcome_of
from dispark.types import Outcome, Request


def activate(request: Request, max_context: int = 20) -> ActiveRow:
    return ActiveRow.activate(3, request, max_context, letters)


@pytest.mark.parametrize(
    ("num_prompt", "max_new_tokens", "cap", "reason"),
    [
        (5, 10, 10, "length"),
        (10, 10, 10, "length"),
        (11, 10, 9, "context"),
        (19, 10, 1, "context"),
        (19, 1, 1, "length"),
    ],
)
def test_the_cap_is_the_request_s_or_the_context_s(num_prompt: int, max_new_tokens: int, cap: int, reason: str) -> None:
    row = activate(make_request([1] * num_prompt, max_new_tokens=max_new_tokens))
    assert (row.row, row.cap, row.cap_reason) == (3, cap, reason)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": ()}, "p7#0: the prompt has no tokens"),
        ({"prompt_ids": (1,) * 20}, "p7#0: the prompt has 20 tokens; allowed: at most 19"),
        ({"prompt_ids": (1,) * 25}, "p7#0: the prompt has 25 tokens"),
        ({"max_new_tokens": 0}, "p7#0: max_new_tokens=0"),
        ({"max_new_tokens": -3}, "p7#0: max_new_tokens=-3"),
        ({"stop_strings": ("a", "")}, "stop_strings"),
    ],
)
def test_requests_that_cannot_be_decoded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        activate(replace(make_request([1, 2], 7), **changes))


def test_cut_knows_what_was_emitted_before() -> None:
    row = activate(make_request([1, 2], max_new_tokens=5, stop_strings=("cd",)))
    assert row.cut([0, 1], 1, frozenset()).finish is None
    row.record.output_ids += [0, 1, 2]
    assert row.cut([3, 4], 1, frozenset()) == Cut([3], 1, "stop_string", False)
    assert row.cut([8, 9, 10], 2, frozenset()) == Cut([8, 9], 2, "length", True)
    assert row.cut([8, 9, 10], 2, frozenset({8})) == Cut([8], 1, "stop", False)


def test_close_cuts_the_text_before_the_stop_string() -> None:
    row = activate(make_request([1, 2], stop_strings=("cd",)))
    row.record.output_ids += [0, 1, 2, 3]
    record = row.close("stop_string", letters(row.record.output_ids))
    assert (record.text, record.finish_reason, record.output_ids) == ("ab", "stop_string", [0, 1, 2, 3])
    assert record.latency_s is not None
    assert record.latency_s >= 0.0
    assert activate(make_request([1])).close("length", "text").text == "text"


def test_the_trace_writes_one_line_a_round_and_a_step() -> None:
    trace = Trace()
    row = activate(make_request([1, 2], 5))
    trace.log_step("prefill", [row], 2, {"wall_s": 0.5})
    cut = Cut([7, 8], 2, "length", True)
    trace.log_rounds([row], [cut], [4], [3], [3])
    trace.log_step("round", [row], 4, {"wall_s": 0.25})
    trace.log_step("round", [row, activate(make_request([1]))], 4, {"wall_s": 0.5})
    assert (row.record.prefill_s, row.record.decode_s) == (0.5, 0.5)  # alone, then half of a shared step
    assert trace.rounds == [
        {
            "request_id": "p5#0",
            "prompt_id": "p5",
            "turn": 0,
            "task": "task",
            "category": "category",
            "round": 0,
            "step": 1,
            "num_rows": 1,
            "num_drafted": 4,
            "num_verified": 3,
            "num_accepted_raw": 3,
            "num_accepted": 2,
            "num_emitted": 2,
            "end": "length",
            "is_truncated": True,
        }
    ]
    assert [(s["step"], s["kind"], s["num_tokens"], s["wall_s"]) for s in trace.steps] == [
        (0, "prefill", 2, 0.5),
        (1, "round", 4, 0.25),
        (2, "round", 4, 0.5),
    ]


def test_outcome_is_the_cuts_field_by_field() -> None:
    cuts: Sequence[Cut] = [Cut([1, 2], 1, None, False), Cut([3], 1, "length", True)]
    assert outcome_of(cuts) == Outcome([[1, 2], [3]], [1, 1], [None, "length"], [False, True])
    assert outcome_of([]) == Outcome([], [], [], [])

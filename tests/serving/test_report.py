"""The steady part of a closed loop, and what a request reserves, on records made by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from dispark.serving.report import Passes, Sla, steady_sums, summarise

# Two users and four requests of three tokens; a step takes a second. There is room for one row at a time.
NAMES = ["a", "b", "c", "d"]


def passes(rows_at_once: int) -> Passes:
    """Requests one or two at a time: a prefill, then two rounds; all records of one pass."""
    steps, rounds, requests = [], [], []
    clock = 0.0
    finished: list[float] = []
    for low in range(0, len(NAMES), rows_at_once):
        names = NAMES[low : low + rows_at_once]
        prefill = len(steps)
        for kind in ("prefill", "round", "round"):
            clock += 1.0
            step = {"step": len(steps), "kind": kind, "num_rows": len(names), "wall_s": 1.0, "end_s": clock}
            if kind == "round":
                rounds += [
                    {"request_id": name, "prompt_id": name, "round": len(steps) - prefill - 1, "step": len(steps)}
                    | {"num_drafted": 0, "num_verified": 0, "num_accepted": 0, "num_emitted": 1}
                    for name in names
                ]
            steps.append(step)
        for i, name in enumerate(names, start=low):
            # Two users: the third request comes when the first is done, and so on.
            arrived_s = 0.0 if i < 2 else finished[i - 2]
            requests.append(
                {"request_id": name, "prompt_id": name, "num_prompt_tokens": 5, "max_new_tokens": 3, "error": None}
                | {"arrived_s": arrived_s, "finish_reason": "length", "num_output_tokens": 3, "prefill_step": prefill}
                | {"queue_s": 0.0, "ttft_s": clock - 2 - arrived_s, "latency_s": clock - arrived_s, "itl_s": [1.0, 1.0]}
                | {"tokens_per_s": 1.0}
            )
        finished += [clock] * len(names)
    frames = [pd.DataFrame(lines).assign(repeat=0) for lines in (requests, rounds, steps)]
    return Passes(*frames, max_in_flight=2, block_tokens=4, row_tokens=12, spare_tokens=4)


def test_users_who_wait_for_room_are_in_the_system() -> None:
    """With room for one row no round ever has two; the loop is steady until the third is done and nobody follows."""
    sums = steady_sums(passes(1))
    assert sums["seconds"].to_dict() == {"a": 2.0, "b": 3.0, "c": 3.0}  # from the first round on
    assert sums["tokens"].to_dict() == {"a": 2, "b": 3, "c": 3}
    assert summarise(passes(1), Sla())["throughput_tokens_per_s"] == pytest.approx(1.0)


def test_with_room_for_all_it_is_steady_while_all_are_decoded() -> None:
    sums = steady_sums(passes(2))
    assert sums["tokens"].to_dict() == {"a": 2, "b": 2, "c": 3, "d": 3}
    assert summarise(passes(2), Sla())["throughput_tokens_per_s"] == pytest.approx(10 / 5)


def test_what_is_reserved_holds_prompt_answer_and_drafts() -> None:
    found = summarise(passes(1), Sla())
    assert found["kv_reserved_tokens"] == 12.0  # 5 + 3 + 4
    assert found["kv_contiguous_tokens"] == 12.0
    assert found["kv_held_tokens"] == pytest.approx(5.5)

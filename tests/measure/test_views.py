"""Other tools' figures: DeepSpec's worked examples, and the run that is worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_run import Run, make_hand_run

from dispark.measure.views import all_views, deepspec_view, spec_bench_view, specforge_view, vllm_view, zlab_view


@pytest.fixture
def hand_run() -> Run:
    return make_hand_run()


# DeepSpec's counting rules at draft length 7: what the loop records, and the proposal, accepted and acceptance that
# tool would note for the round. num_verified, num_accepted_raw, num_accepted, num_emitted, end
DEEPSPEC_CASES = {
    "all accepted": ((7, 7, 7, 8, None), (7, 7, 8)),
    "d_4 rejected": ((7, 3, 3, 4, None), (7, 3, 4)),
    "stop id is d_3, drafts 1-5 accepted": ((7, 5, 3, 3, "stop"), (3, 3, 3)),
    "stop id is d_3 and the last one accepted": ((7, 3, 3, 3, "stop"), (3, 3, 3)),
    "stop id is d_3, d_2 rejected": ((7, 1, 1, 2, None), (7, 1, 2)),
    "correction is a stop id": ((7, 4, 4, 5, "stop"), (7, 4, 5)),
    "threshold cuts everything": ((0, 0, 0, 1, None), (0, 0, 1)),
    "last round overshoots the cap": ((7, 6, 2, 2, "length"), (7, 6, 7)),
    "a stop string is unknown to it": ((7, 6, 2, 2, "stop_string"), (7, 6, 7)),
}


def make_frames(rounds: list[tuple[Any, ...]], turn: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    columns = ["num_verified", "num_accepted_raw", "num_accepted", "num_emitted", "end"]
    frame = pd.DataFrame(rounds, columns=columns)
    head = {"arm": "x", "repeat": 0, "request_id": f"p#{turn}", "prompt_id": "p", "task": "t", "turn": turn}
    requests = pd.DataFrame(
        [head | {"num_output_tokens": 1 + int(frame["num_emitted"].sum()), "num_rounds": len(frame)}]
    )
    return frame.assign(**head), requests


@pytest.mark.parametrize(("recorded", "noted"), DEEPSPEC_CASES.values(), ids=list(DEEPSPEC_CASES))
def test_deepspec_counts_each_kind_of_round_as_its_rules_say(
    recorded: tuple[Any, ...], noted: tuple[int, int, int]
) -> None:
    proposal, accepted, acceptance = noted
    view = deepspec_view(*make_frames([recorded]), arm="x", draft_length=7)
    assert view["num_samples"] == 1
    assert view["#propose"] == proposal
    assert view["accept_len"] == acceptance
    assert view["verify_rate"] == pytest.approx(acceptance / (proposal + 1))
    for k in range(7):
        assert view[f"accept_rate@{k}"] == ((1.0 if accepted > k else 0.0) if proposal > k else None)


def test_deepspec_pools_over_rounds() -> None:
    cases = list(DEEPSPEC_CASES.values())
    view = deepspec_view(*make_frames([recorded for recorded, _ in cases]), arm="x", draft_length=7)
    proposals, accepted, acceptances = np.array([noted for _, noted in cases]).T
    assert view["accept_len"] == pytest.approx(acceptances.sum() / 9)
    assert view["verify_rate"] == pytest.approx(acceptances.sum() / (proposals.sum() + 9))
    assert view["accept_rate@2"] == pytest.approx((accepted > 2).sum() / (proposals > 2).sum())


def test_deepspec_takes_first_turns_and_counts_samples_without_rounds() -> None:
    first_rounds, first = make_frames([(7, 7, 7, 8, None)])
    second_rounds, second = make_frames([(7, 0, 0, 1, None)] * 5, turn=1)
    empty = first.assign(prompt_id="q", request_id="q#0", num_rounds=0)
    rounds, requests = pd.concat([first_rounds, second_rounds]), pd.concat([first, second, empty])
    view = deepspec_view(rounds, requests, arm="x", draft_length=7)
    assert view["accept_len"] == 8.0
    assert view["num_samples"] == 2


def test_hand_run_as_deepspec_prints_it(hand_run: Run) -> None:
    view = deepspec_view(hand_run.rounds, hand_run.requests, arm="ngram", draft_length=3)
    assert view == {
        "num_samples": 3,
        "#propose": pytest.approx(12 / 6),
        "accept_len": pytest.approx(13 / 6),
        "verify_rate": pytest.approx(13 / 18),
        "accept_rate@0": pytest.approx(4 / 5),
        "accept_rate@1": pytest.approx(3 / 5),
        "accept_rate@2": pytest.approx(1 / 2),
    }


def test_hand_run_as_spec_bench_prints_it(hand_run: Run) -> None:
    view = spec_bench_view(hand_run.rounds, hand_run.requests, arm="ngram")
    assert view["mean_accepted_tokens"] == pytest.approx(12 / 6)
    assert view["tokens_per_s"] == pytest.approx((8 / 2.0 + 4 / 1.5 + 3 / 1.0) / 3)
    assert view["baseline_tokens_per_s"] == pytest.approx((8 / 4.0 + 4 / 2.0 + 3 / 1.5) / 3)
    assert view["speedup"] == pytest.approx((29 / 9) / 2.0)
    assert view["is_baseline_recounted"] is False


def test_spec_bench_recounts_the_baseline_from_text(hand_run: Run) -> None:
    view = spec_bench_view(
        hand_run.rounds, hand_run.requests, arm="ngram", count_text_tokens=lambda text: len(text.split()) + 3
    )
    # Words + 3 - 1 in 4.0, 2.0 and 1.5 s: the baseline looks faster than it is.
    assert view["baseline_tokens_per_s"] == pytest.approx((10 / 4.0 + 6 / 2.0 + 5 / 1.5) / 3)
    assert view["is_baseline_recounted"] is True


def test_spec_bench_adds_the_turns_of_a_question_and_keeps_repeats_apart(hand_run: Run) -> None:
    mine = hand_run.requests.query("arm == 'ngram' and prompt_id == 'p1'")
    turns = pd.concat([mine, mine.assign(turn=1, num_output_tokens=2, decode_s=0.5)])
    view = spec_bench_view(hand_run.rounds, turns, arm="ngram")
    assert view["tokens_per_s"] == pytest.approx((8 + 2) / (2.0 + 1.0))
    assert view["speedup"] is None
    repeats = pd.concat([mine, mine.assign(repeat=1, decode_s=3.5)])
    view = spec_bench_view(hand_run.rounds, repeats, arm="ngram")
    assert view["tokens_per_s"] == pytest.approx((8 / 2.0 + 8 / 4.0) / 2)


def test_hand_run_as_vllm_prints_it(hand_run: Run) -> None:
    view = vllm_view(hand_run.rounds, arm="ngram", draft_length=3)
    # Five rounds verified drafts; 3 + 1 + 0 + 3 + 2 were accepted before stop tokens and caps were looked at.
    assert view["num_drafts"] == 5
    assert view["mean_acceptance_length"] == pytest.approx(1 + 9 / 5)
    assert view["draft_acceptance_rate"] == pytest.approx(9 / 13)
    assert view["per_position_acceptance_rate"] == pytest.approx([4 / 5, 3 / 5, 2 / 5])


def test_hand_run_as_specforge_prints_it(hand_run: Run) -> None:
    view = specforge_view(hand_run.requests, arm="ngram")
    assert view["average_acceptance_length"] == pytest.approx((8 / 3 + 4 / 2 + 3 / 1) / 3)
    assert view["accept_length"] == pytest.approx(15 / 6)


def test_hand_run_as_zlab_prints_it(hand_run: Run) -> None:
    view = zlab_view(hand_run.rounds, hand_run.requests, arm="ngram", draft_length=3)
    mine, other = (1.5 / 8 + 1.0 / 4 + 0.5 / 3) / 3, (3.5 / 8 + 1.5 / 4 + 1.0 / 3) / 3
    assert view["average_acceptance_length"] == pytest.approx((7 / 3 + 3 / 2 + 2 / 1) / 3)
    assert view["throughput"] == pytest.approx(1 / mine)
    assert view["baseline_throughput"] == pytest.approx(1 / other)
    assert view["decoding_speedup"] == pytest.approx(other / mine)
    assert view["acceptance_length_histogram"] == pytest.approx([0, 2 / 6, 3 / 6, 0, 1 / 6])


def test_views_of_an_arm_without_rounds_are_none(hand_run: Run) -> None:
    views = all_views(hand_run.rounds, hand_run.requests, arm="transformers.generate", draft_length=2)
    assert set(views) == {"deepspec", "spec_bench", "vllm", "specforge", "zlab"}
    assert views["deepspec"]["num_samples"] == 3
    assert views["deepspec"]["accept_len"] is None
    assert views["deepspec"]["accept_rate@1"] is None
    assert views["vllm"]["mean_acceptance_length"] is None
    assert views["vllm"]["per_position_acceptance_rate"] == [None, None]
    assert views["specforge"]["accept_length"] is None
    assert views["zlab"]["average_acceptance_length"] is None
    assert views["zlab"]["throughput"] is None
    assert views["spec_bench"]["mean_accepted_tokens"] is None
    assert views["spec_bench"]["tokens_per_s"] == pytest.approx((8 / 5.0 + 4 / 2.5 + 3 / 2.5) / 3)


def test_views_of_the_autoregressive_arm(hand_run: Run) -> None:
    views = all_views(hand_run.rounds, hand_run.requests, arm="none", draft_length=0)
    assert views["spec_bench"]["mean_accepted_tokens"] == 1.0
    assert views["spec_bench"]["speedup"] == pytest.approx(1.0)
    assert views["deepspec"]["accept_len"] == 1.0
    assert views["vllm"]["num_drafts"] == 0
    assert views["zlab"]["decoding_speedup"] == pytest.approx(1.0)

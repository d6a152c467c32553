"""The verdicts: units in the last place, teacher-forced texts, and the exact law of a verifier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_module

import dispark.config
from dispark.config import build
from dispark.decoding.random import RowGenerators
from dispark.decoding.target import TargetModel
from dispark.measure.losslessness import exact_law_error, greedy_verdicts, sampling_verdict, teacher_force, ulp
from dispark.targets.model import open_target
from dispark.types import Draft, Request, RequestRecord, Sampling, Verdict
from dispark.verifiers.rejection import RejectionVerifier

PROMPT = tuple(range(40, 60))


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    dispark.config.make_conf_importable()
    with initialize_config_module("dispark.conf", version_base="1.3"):
        yield open_target(build(compose("bench", overrides=["target=tiny"]).target))


def greedy_text(target: TargetModel, num: int) -> list[int]:
    target.open(1, len(PROMPT) + num)
    logits, _ = target.prefill([0], [PROMPT])
    output = [int(logits[0].argmax())]
    while len(output) < num:
        logits, _ = target.forward([0], torch.tensor(output[-1:]), [1])
        target.commit(0, 1)
        output.append(int(logits[0].argmax()))
    return output


def record(output: Sequence[int], request_id: str = "a#0") -> RequestRecord:
    request = Request(request_id, request_id[:-2], 0, "t", "c", PROMPT, len(output), 0)
    return RequestRecord(request, list(output))


def test_ulp_is_the_spacing_of_the_dtype() -> None:
    values = torch.tensor([16.0, 31.9, 32.0, 1.0, -20.0])
    assert ulp(values, torch.bfloat16).tolist() == [0.125, 0.125, 0.25, 2**-7, 0.125]
    assert ulp(values, torch.float32)[0] == 2.0**-19
    for dtype in (torch.bfloat16, torch.float16):
        step = ulp(torch.tensor([20.0]), dtype)
        above = (torch.tensor([20.0], dtype=dtype) + step.to(dtype)).item()
        assert above == 20.0 + step.item()
        assert (torch.tensor([20.0], dtype=dtype) + step.to(dtype) * 0.25).item() == 20.0


def test_the_targets_own_text_has_no_gap(target: TargetModel) -> None:
    text = greedy_text(target, 12)
    (gaps,) = teacher_force(target, [(PROMPT, text)])
    assert (gaps.num_tokens, gaps.num_near_tie, gaps.num_real, gaps.max_gap_ulps) == (12, 0, 0, 0.0)


def test_a_foreign_token_is_real_wherever_it_stands(target: TargetModel) -> None:
    text = greedy_text(target, 6)
    for place in range(6):
        spoiled = [*text]
        spoiled[place] = (spoiled[place] + 1) % target.vocab_size
        (gaps,) = teacher_force(target, [(PROMPT, spoiled)])
        assert gaps.num_real >= 1
        assert gaps.max_gap_ulps > 64


def test_one_token_texts_and_many_texts(target: TargetModel) -> None:
    text = greedy_text(target, 3)
    results = teacher_force(target, [(PROMPT, text[:1])] * 9 + [(PROMPT, text)])
    assert [gaps.num_tokens for gaps in results] == [1] * 9 + [3]
    assert all(gaps.num_real == 0 for gaps in results)


def test_verdicts_by_arm(target: TargetModel) -> None:
    text = greedy_text(target, 8)
    bad = [*text[:-1], (text[-1] + 1) % target.vocab_size]
    verdicts = greedy_verdicts(
        target, {"none": [record(text), record(text)], "same": [record(text)], "bad": [record(bad)]}, "none"
    )
    assert verdicts["none"]["verdict"] == verdicts["same"]["verdict"] == "lossless"
    assert verdicts["bad"]["verdict"] == "real"
    assert (verdicts["bad"]["num_identical"], verdicts["bad"]["num_texts"]) == (0, 1)


def test_fp32_on_a_cpu_does_not_excuse_a_shorter_text(target: TargetModel) -> None:
    text = greedy_text(target, 8)
    verdicts = greedy_verdicts(target, {"none": [record(text)], "short": [record(text[:5])]}, "none")
    assert verdicts["short"]["num_real"] == 0
    assert verdicts["short"]["verdict"] == "real"


@pytest.mark.parametrize("proposal", ["sampled", "deterministic"])
def test_rejection_keeps_the_law(proposal: str) -> None:
    assert exact_law_error(RejectionVerifier(), proposal) < 1e-9
    assert sampling_verdict(RejectionVerifier(), proposal, True)["verdict"] == "lossless"
    assert sampling_verdict(RejectionVerifier(), proposal, False)["verdict"] == "not lossless"


class _AcceptsAll(RejectionVerifier):
    """A negative control: every draft is accepted."""

    def accept(
        self,
        draft: Draft,
        target_logits_NV: torch.Tensor,
        verify_lengths: Sequence[int],
        sampling: Sampling,
        generators: RowGenerators,
    ) -> Verdict:
        free = replace(draft, probs_BGV=torch.zeros(*draft.tokens_BG.shape, target_logits_NV.shape[-1]))
        return super().accept(free, target_logits_NV, verify_lengths, sampling, generators)


@pytest.mark.parametrize("proposal", ["sampled", "deterministic"])
def test_a_verifier_that_claims_too_much_is_caught(proposal: str) -> None:
    verdict = sampling_verdict(_AcceptsAll(), proposal, True)
    assert verdict["verdict"] == "not lossless"
    assert verdict["exact_law_error"] > 0.1

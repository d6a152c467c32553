"""The loop against the stock model token by token, and its dealings with drafters, schedulers and sources."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from conformance.toolbox import (
    LOOPING,
    ListSource,
    decode_all,
    make_loop,
    make_request,
    make_requests,
    open_tiny,
    outputs_of,
    records_of,
    varied_prompts,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from baselines.autoregressive import AutoregressiveDrafter
from baselines.draft_model import DraftModelDrafter
from baselines.ngram import NgramDrafter
from dispark.decoding.random import RowGenerators
from dispark.decoding.sampling import next_token
from dispark.decoding.target import FINAL, TargetModel
from dispark.measure.timing import PHASES
from dispark.types import Draft, Features, Load, Outcome, Request, RequestRecord, Sampling
from dispark.verifiers.greedy import GreedyVerifier

NAMES = ("tiny", "tiny_qwen3", "tiny_gemma3", "tiny_gemma4")
TARGET = open_tiny("tiny", LOOPING)
plain = cache(open_tiny)


@torch.inference_mode()
def stock_continuation(target: TargetModel, request: Request, sampling: Sampling) -> list[int]:
    """The request's tokens by the untouched model without a cache, with the draws that the streams promise."""
    ids = list(request.prompt_ids)
    with target.stock() as model:
        for step in range(request.max_new_tokens):
            logits = model(torch.tensor([ids])).logits[:, -1]
            streams = RowGenerators([request.seed], [step], target.device)
            purpose = "first" if step == 0 else "recover"
            ids.append(int(next_token(logits, sampling, streams.uniform(purpose, 1)[:, 0])))
            if ids[-1] in target.stop_ids:
                break
    return ids[len(request.prompt_ids) :]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=40, top_p=0.95)], ids=["greedy", "sampled"])
def test_autoregressive_decoding_is_the_stock_model_s(name: str, sampling: Sampling) -> None:
    target = plain(name)
    requests = make_requests(varied_prompts(5), 20)
    found = outputs_of(decode_all(target, AutoregressiveDrafter(), requests, sampling, batch_size=3))
    for request in requests:
        assert found[request.request_id] == stock_continuation(target, request, sampling)


class Spy:
    """Passes everything on to a drafter and checks that the loop keeps to the protocol."""

    def __init__(self, inner: Any, feature_layers: tuple[int, ...] = ()) -> None:
        self.inner = inner
        self.draft_length, self.proposal = inner.draft_length, inner.proposal
        self.feature_layers = feature_layers
        self.texts: dict[int, list[int]] = {}
        self.hidden: dict[int, list[Tensor]] = {}
        self.requests: dict[int, Request] = {}
        self.finished: list[tuple[Request, list[int], list[Tensor]]] = []
        self.ended: set[int] = set()

    def bind(self, target: TargetModel, num_rows: int, num_slots: int) -> None:
        self.target, self.num_rows = target, num_rows
        self.inner.bind(target, num_rows, num_slots)

    def begin(
        self, rows: Sequence[int], requests: Sequence[Request], first_tokens: Sequence[int], features: Features
    ) -> None:
        assert not set(rows) & set(self.texts)
        assert all(0 <= row < self.num_rows for row in rows)
        assert features.lengths == [len(request.prompt_ids) for request in requests]
        for row, request, token in zip(rows, requests, first_tokens, strict=True):
            self.texts[row], self.requests[row], self.hidden[row] = [token], request, []
        self._keep(rows, features, features.lengths)
        self.inner.begin(rows, requests, first_tokens, features)

    def propose(
        self,
        rows: Sequence[int],
        anchors_B: Tensor,
        sampling: Sampling,
        generators: RowGenerators,
        limit: int | None = None,
    ) -> Draft:
        assert sorted(rows) == sorted(self.texts)
        # In the cache's own order: rows that lie side by side share a segment.
        assert list(rows) == self.target.cache.rows
        assert not self.ended
        assert anchors_B.tolist() == [self.texts[row][-1] for row in rows]
        draft: Draft = self.inner.propose(rows, anchors_B, sampling, generators, limit)
        self.rows, self.draft = list(rows), draft
        return draft

    def update(self, rows: Sequence[int], outcome: Outcome, features: Features) -> None:
        assert list(rows) == self.rows
        drafts = self.draft.tokens_BG.tolist()
        for i, row in enumerate(rows):
            num = outcome.num_accepted[i]
            assert outcome.emitted[i][:num] == drafts[i][:num]
            assert 1 + num <= features.lengths[i] <= 1 + self.draft.lengths[i]
            self.texts[row] += outcome.emitted[i]
            if outcome.finish[i] is not None:
                self.ended.add(row)
        self._keep(rows, features, [1 + num for num in outcome.num_accepted])
        self.inner.update(rows, outcome, features)

    def drop(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.finished.append((self.requests.pop(row), self.texts.pop(row), self.hidden.pop(row)))
        self.ended -= set(rows)
        self.inner.drop(rows)

    def _keep(self, rows: Sequence[int], features: Features, valid: Sequence[int]) -> None:
        if features.hidden_NF is None:
            assert self.feature_layers == ()
            return
        parts = features.hidden_NF.split(features.lengths)
        for row, part, num in zip(rows, parts, valid, strict=True):
            self.hidden[row].append(part[:num])


@pytest.mark.parametrize("make", [AutoregressiveDrafter, NgramDrafter, DraftModelDrafter])
def test_drafters_see_every_token_and_its_features(make: Callable[[], Any]) -> None:
    layers = (1, FINAL)
    spy = Spy(make(), layers)
    requests = make_requests(varied_prompts(7), 14)
    trace = decode_all(TARGET, spy, requests, batch_size=3)
    assert spy.texts == {}
    assert len(spy.finished) == len(requests)
    for request, text, hidden in spy.finished:
        assert text == outputs_of(trace)[request.request_id]
        # The last token is never fed to the target, and neither is what a cap cut off.
        seen = torch.cat(hidden)
        ids = [*request.prompt_ids, *text][: seen.shape[0]]
        assert len(request.prompt_ids) + len(text) - len(ids) in (0, 1)
        with torch.inference_mode(), TARGET.stock() as model:
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(seen, torch.cat([states[2][0], states[-1][0]], dim=-1), atol=1e-4, rtol=1e-4)


class Whim:
    """A scheduler that verifies a random share of each draft and writes down what it saw."""

    is_lossless = True

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.loads: list[Load] = []
        self.observed: list[tuple[int, list[int], float]] = []

    def bind(self, target: Any) -> None:
        self.bound = target

    def draft_limit(self, load: Load) -> int | None:
        return None

    def choose(self, draft: Draft, load: Load) -> list[int]:
        self.loads.append(load)
        self.chosen = [self.rng.randint(0, length) for length in draft.lengths]
        return list(self.chosen)

    def observe(self, outcome: Outcome, verify_lengths: Sequence[int], seconds: float) -> None:
        assert list(verify_lengths) == self.chosen
        self.observed.append((len(outcome.emitted), list(verify_lengths), seconds))


@pytest.mark.parametrize("make", [NgramDrafter, DraftModelDrafter])
def test_any_verify_lengths_give_the_same_text(make: Callable[[], Any]) -> None:
    requests = make_requests(varied_prompts(8), 25)
    expected = outputs_of(decode_all(TARGET, AutoregressiveDrafter(), requests))
    whim = Whim()
    trace = decode_all(TARGET, make(), requests, scheduler=whim)
    assert outputs_of(trace) == expected
    assert any(r["num_verified"] < r["num_drafted"] for r in trace.rounds)
    assert any(0 < r["num_accepted"] < r["num_verified"] for r in trace.rounds)
    rounds = [step for step in trace.steps if step["kind"] == "round"]
    assert [(rows, seconds) for rows, _, seconds in whim.observed] == [(s["num_rows"], s["wall_s"]) for s in rounds]


def test_the_load_tells_what_goes_on() -> None:
    whim = Whim()
    requests = make_requests([[1, 2, 3], [4], [5, 6], [7]], 3)
    decode_all(TARGET, AutoregressiveDrafter(), requests, scheduler=whim, batch_size=2)
    assert [load.num_rows for load in whim.loads] == [2, 2, 2, 2]
    assert [load.num_waiting for load in whim.loads] == [2, 2, 0, 0]
    # The prompt is in the cache, the anchor is not yet.
    assert [load.context_lengths for load in whim.loads] == [[3, 1], [4, 2], [2, 1], [3, 2]]
    assert [load.step for load in whim.loads] == [1, 2, 4, 5]


def test_times_add_up() -> None:
    trace = decode_all(TARGET, NgramDrafter(), make_requests(varied_prompts(6), 12), batch_size=4)
    for step in trace.steps:
        parts = sum(step[f"{phase}_s"] for phase in PHASES) + step["host_s"]
        assert parts == pytest.approx(step["wall_s"], rel=0.02, abs=1e-5)
    wall = {kind: sum(s["wall_s"] for s in trace.steps if s["kind"] == kind) for kind in ("prefill", "round")}
    assert sum(record.prefill_s for record in trace.records) == pytest.approx(wall["prefill"])
    assert sum(record.decode_s for record in trace.records) == pytest.approx(wall["round"])
    for record in trace.records:
        assert record.ttft_s is not None
        assert record.latency_s is not None
        assert 0.0 < record.ttft_s <= record.latency_s


def test_a_finished_request_may_lead_to_another() -> None:
    def second_turn(record: RequestRecord) -> Request | None:
        if record.request.turn == 1:
            return None
        prompt = (*record.request.prompt_ids, *record.output_ids, 9)
        return replace(record.request, request_id=f"{record.request.prompt_id}#1", turn=1, prompt_ids=prompt)

    source = ListSource(make_requests(varied_prompts(5), 6), second_turn)
    trace = make_loop(TARGET, NgramDrafter(), batch_size=2).run(source)
    assert [record.request.request_id for record in source.finished] == [r.request.request_id for r in trace.records]
    assert len(trace.records) == 10
    for record in trace.records:
        alone = decode_all(TARGET, AutoregressiveDrafter(), [record.request])
        assert outputs_of(alone) == {record.request.request_id: record.output_ids}


def test_nothing_to_do() -> None:
    trace = make_loop(TARGET, AutoregressiveDrafter()).run(ListSource([]))
    assert (trace.rounds, trace.steps, trace.records) == ([], [], [])


def test_requests_that_end_with_their_first_token_need_no_round() -> None:
    trace = decode_all(TARGET, NgramDrafter(), make_requests(varied_prompts(5), 1), batch_size=2)
    assert trace.rounds == []
    assert [step["kind"] for step in trace.steps] == ["prefill"] * 3
    assert all((r.num_rounds, r.finish_reason, r.decode_s) == (0, "length", 0.0) for r in trace.records)


def test_the_context_may_be_less_than_model_and_slots_allow() -> None:
    request = make_request([1] * 10, max_new_tokens=50)
    for options, num in (({"max_context": 16}, 6), ({"num_slots": 30}, 30 - 8 - 1 - 10), ({"num_slots": 19}, 0)):
        loop = make_loop(TARGET, NgramDrafter(draft_length=8), **options)  # type: ignore[arg-type]
        if num == 0:
            with pytest.raises(ValueError, match="p0#0: the prompt has 10 tokens; allowed: at most 9"):
                loop.run(ListSource([request]))
            continue
        record = loop.run(ListSource([request])).records[0]
        assert (len(record.output_ids), record.finish_reason) == (num, "context")


def test_a_bad_request_ends_the_run_and_the_loop_stays_usable() -> None:
    loop = make_loop(TARGET, NgramDrafter())
    good, bad = make_request([1, 2, 3]), make_request([], 1)
    with pytest.raises(ValueError, match="p1#0: the prompt has no tokens"):
        loop.run(ListSource([good, bad]))
    record = loop.run(ListSource([good])).records[0]
    assert record.output_ids == stock_continuation(TARGET, good, Sampling())


def test_a_verifier_that_cannot_serve_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"verifier=greedy with sampling.temperature=1.0"):
        make_loop(TARGET, NgramDrafter(), Sampling(1.0), verifier=GreedyVerifier())
    requests = make_requests(varied_prompts(3), 8)
    found = decode_all(TARGET, NgramDrafter(), requests, verifier=GreedyVerifier())
    assert outputs_of(found) == outputs_of(decode_all(TARGET, NgramDrafter(), requests))


def test_texts_end_before_their_stop_string() -> None:
    plain = decode_all(TARGET, AutoregressiveDrafter(), make_requests(varied_prompts(3), 12))
    record = plain.records[0]
    string = record.text[4:6]
    request = replace(record.request, stop_strings=(string,))
    cut = decode_all(TARGET, NgramDrafter(), [request]).records[0]
    assert (cut.text, cut.finish_reason) == (record.text[: record.text.index(string)], "stop_string")
    assert cut.output_ids == record.output_ids[: record.text.index(string) + 2]


class CountSyncs(TorchFunctionMode):
    """Counts the calls that make a host wait for a device, and those that read one number do so below Python."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.below = _CountReads(self.names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "cpu"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class _CountReads(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "aten.equal", "unique")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [AutoregressiveDrafter, NgramDrafter, DraftModelDrafter])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=9, top_p=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_the_device_once(make: Callable[[], Any], sampling: Sampling, name: str) -> None:
    loop = make_loop(plain(name), make(), sampling)
    requests = make_requests(varied_prompts(4), 8)
    loop.run(ListSource(requests))
    counter = CountSyncs()
    with counter, counter.below:
        trace = loop.run(ListSource(requests))
    assert counter.names == ["tolist"] * len(trace.steps)


def test_records_carry_the_text() -> None:
    trace = decode_all(
        TARGET, AutoregressiveDrafter(), make_requests([[1]], 3), decode=lambda ids: "-".join(map(str, ids))
    )
    record = records_of(trace)["p0#0"]
    assert record.text == "-".join(map(str, record.output_ids))

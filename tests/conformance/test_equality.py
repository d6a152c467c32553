"""Every drafter YAML writes, in float32 at temperature 0, the very tokens that autoregressive decoding writes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from conformance.toolbox import (
    DRAFTERS,
    GREEDY_ONLY,
    LOOPING,
    REPO,
    ListSource,
    compose_bench,
    decode_all,
    make_drafter,
    make_loop,
    make_requests,
    open_tiny,
    outputs_of,
    varied_prompts,
)
from omegaconf import OmegaConf

from baselines.autoregressive import AutoregressiveDrafter
from dispark.config import build
from dispark.decoding.target import TargetModel
from dispark.interfaces import Drafter, Scheduler, Verifier
from dispark.schedulers.profiling import measure
from dispark.types import Request, Sampling

SCHEDULERS = sorted(path.stem for path in (REPO / "conf" / "scheduler").glob("*.yaml"))
VERIFIERS = sorted(path.stem for path in (REPO / "conf" / "verifier").glob("*.yaml"))
# Weights under which each architecture repeats itself now and then, but not at once.
# Drafters whose acceptance under these models is known not to be 0.
OURS = ("ngram", "ngram_hf", "ngram_vllm", "draft_model", "draft_target", "synthetic")
SPREADS = {
    **dict.fromkeys(("tiny", "tiny_qwen3", "tiny_gemma3"), LOOPING),
    "tiny_gemma4": "target.sources.random.config.initializer_range=0.08",
}


@cache
def shared(name: str) -> TargetModel:
    return open_tiny(name, SPREADS[name])


@cache
def requests_for(name: str) -> tuple[Request, ...]:
    num, max_new_tokens = (11, 36) if name == "tiny" else (6, 26)
    return tuple(make_requests(varied_prompts(num), max_new_tokens))


@cache
def expected_for(name: str) -> dict[str, list[int]]:
    return outputs_of(decode_all(shared(name), AutoregressiveDrafter(), requests_for(name), batch_size=5))


def test_there_is_something_to_test() -> None:
    assert {"none", "ngram", "draft_model", "synthetic"} <= set(DRAFTERS)
    assert set(DRAFTERS) >= GREEDY_ONLY
    lengths = {len(ids) for ids in expected_for("tiny").values()}
    assert max(lengths) == 36
    # Texts that only repeat one token would make equality cheap.
    assert sum(len(set(ids)) for ids in expected_for("tiny").values()) > 10 * len(requests_for("tiny"))


NEED_CONFIDENCE = ("threshold", "tiered", "hardware_aware", "hardware_aware_async")


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("target", SPREADS)
def test_greedy_text_is_the_autoregressive_one(target: str, name: str) -> None:
    drafter = make_drafter(name, target, SPREADS[target])
    trace = decode_all(shared(target), drafter, requests_for(target), batch_size=5)
    assert outputs_of(trace) == expected_for(target)
    if drafter.draft_length > 0:
        verified = sum(r["num_verified"] for r in trace.rounds)
        accepted = sum(r["num_accepted_raw"] for r in trace.rounds)
        assert verified > 0
        assert accepted > 0 or name not in OURS
        if name == "draft_target":
            assert accepted == verified
        elif name in ("ngram", "ngram_hf", "draft_model", "synthetic"):
            assert accepted < verified  # rejections, too, have been seen


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", ["ngram", "draft_model", "dispark"])
def test_every_lossless_scheduler_and_verifier(scheduler: str, verifier: str, name: str, tmp_path: Path) -> None:
    if scheduler in NEED_CONFIDENCE and name != "dispark":
        pytest.skip(f"{scheduler} needs a confidence, which {name} does not give")
    cfg = compose_bench("target=tiny", f"scheduler={scheduler}", f"verifier={verifier}")
    if OmegaConf.missing_keys(cfg.scheduler):
        pytest.skip(f"{scheduler} needs a file of its own")
    if "profile" in cfg.scheduler:
        cfg.scheduler.profile = str(tmp_path / "profile.json")
        measure(shared("tiny"), (1, 2, 4), (1, 2, 4), context=8, repeats=1).save(tmp_path / "profile.json")
    schedules: Scheduler = build(cfg.scheduler)
    verifies: Verifier = build(cfg.verifier)
    if not (schedules.is_lossless and verifies.is_lossless):
        pytest.skip(f"{scheduler} with {verifier} does not claim to be lossless")
    drafter = make_drafter(name, "tiny", LOOPING)
    trace = decode_all(shared("tiny"), drafter, requests_for("tiny"), scheduler=schedules, verifier=verifies)
    assert outputs_of(trace) == expected_for("tiny")


@pytest.mark.parametrize(("name", "cap"), [*((name, 2) for name in DRAFTERS), ("ngram", 0), ("draft_model", 0)])
def test_verifying_less_than_was_drafted(name: str, cap: int) -> None:
    scheduler = build(compose_bench("target=tiny", f"scheduler.max_verify_length={cap}").scheduler)
    requests = requests_for("tiny")[:4]
    drafter = make_drafter(name, "tiny", LOOPING)
    trace = decode_all(shared("tiny"), drafter, requests, scheduler=scheduler, batch_size=3)
    assert max((r["num_verified"] for r in trace.rounds), default=0) <= cap
    assert outputs_of(trace) == {r.request_id: expected_for("tiny")[r.request_id] for r in requests}


def strip_times(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{key: value for key, value in row.items() if not key.endswith("_s")} for row in rows]


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_same_objects_run_twice_give_the_same_and_so_do_new_ones(name: str) -> None:
    sampling = Sampling() if name in GREEDY_ONLY else Sampling(0.8, top_p=0.95)
    requests, others = make_requests(varied_prompts(6), 12), make_requests(varied_prompts(5, seed=9), 7)

    def fresh() -> Drafter:
        return make_drafter(name, "tiny", LOOPING)

    loop = make_loop(shared("tiny"), fresh(), sampling, batch_size=3)
    first = loop.run(ListSource(requests))
    between = loop.run(ListSource(others))
    again = loop.run(ListSource(requests))
    anew = make_loop(open_tiny("tiny", LOOPING), fresh(), sampling, batch_size=3).run(ListSource(requests))
    for trace in (again, anew):
        assert outputs_of(trace) == outputs_of(first)
        assert strip_times(trace.rounds) == strip_times(first.rounds)
        assert strip_times(trace.steps) == strip_times(first.steps)
    assert outputs_of(between) == outputs_of(decode_all(shared("tiny"), fresh(), others, sampling, batch_size=3))


@pytest.mark.parametrize("name", DRAFTERS)
def test_bfloat16_runs_and_its_books_agree(name: str) -> None:
    target = bfloat16_target()
    requests = make_requests(varied_prompts(4), 12)
    for sampling in (Sampling(), Sampling(1.0)):
        if name in GREEDY_ONLY and not sampling.is_greedy:
            continue
        drafter = make_drafter(name, "tiny", LOOPING, "target.dtype=bfloat16")
        trace = decode_all(target, drafter, requests, sampling)
        for record in trace.records:
            assert all(0 <= token < target.vocab_size for token in record.output_ids)
            assert (record.finish_reason == "stop") == (record.output_ids[-1] in target.stop_ids)
            assert record.finish_reason == "stop" or len(record.output_ids) == 12


@cache
def bfloat16_target() -> TargetModel:
    return open_tiny("tiny", LOOPING, "target.dtype=bfloat16")

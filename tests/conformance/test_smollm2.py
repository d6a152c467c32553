"""The real default target in float32: every drafter, with random weights where it has any, against plain decoding.

Skips itself where `dispark fetch` has not put the model into the cache.
"""

from __future__ import annotations

from functools import cache

import pytest
from conformance.toolbox import (
    DRAFTERS,
    ListSource,
    compose_bench,
    decode_all,
    make_drafter,
    make_request,
    outputs_of,
)

from baselines.hf_generate import HfGenerate
from dispark.config import SHIPPED_CHECKPOINTS, build
from dispark.decoding.target import TargetModel
from dispark.targets.cache import entry_folder
from dispark.targets.model import wrap
from dispark.targets.sources import entry_name
from dispark.targets.spec import LoadedTarget, load
from dispark.types import Request

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]

QUESTIONS = (
    "Repeat this sentence twice: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
    "Name three rivers in Europe.",
)
NUM_TOKENS = 24


@cache
def loaded() -> LoadedTarget:
    spec = build(compose_bench("target=smollm2_135m", "target.dtype=float32").target)
    if not entry_folder(entry_name(spec.sources[spec.source])).exists():
        pytest.skip("smollm2_135m is not in the cache; 'dispark fetch' gets it")
    return load(spec)


@cache
def target() -> TargetModel:
    return wrap(loaded())


@cache
def requests() -> tuple[Request, ...]:
    tokenizer = loaded().tokenizer
    prompts = [tokenizer.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    return tuple(make_request(prompt, num, NUM_TOKENS) for num, prompt in enumerate(prompts))


@cache
def expected() -> dict[str, list[int]]:
    trace = decode_all(target(), make_drafter("none"), requests(), decode=loaded().tokenizer.decode)
    assert all(record.text.strip() for record in trace.records)
    return outputs_of(trace)


def test_plain_decoding_is_what_generate_writes() -> None:
    found = HfGenerate(target(), build(compose_bench("sampling=greedy").sampling), loaded().tokenizer.decode).run(
        ListSource(requests())
    )
    assert {record.request.request_id: record.output_ids for record in found} == expected()


@pytest.mark.parametrize(
    ("name", "batch_size"), [("ngram", 1), ("dispark", 1), *((n, 3) for n in DRAFTERS if n != "none")]
)
def test_drafting_does_not_change_the_text(name: str, batch_size: int) -> None:
    drafter = build(compose_bench("target=smollm2_135m", f"drafter={name}").drafter)
    trace = decode_all(target(), drafter, requests(), batch_size=batch_size, num_slots=128)
    assert outputs_of(trace) == expected()
    if name in ("ngram", "draft_target"):
        assert sum(r["num_accepted"] for r in trace.rounds) > 0
    if name == "draft_target":
        assert all(r["num_emitted"] == 5 for r in trace.rounds if r["end"] is None)


SHIPPED = sorted(path.parent.name for path in (SHIPPED_CHECKPOINTS / "smollm2_135m").glob("*/config.json"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_drafter_drafts_and_does_not_change_the_text(name: str) -> None:
    words = ["target=smollm2_135m", f"drafter={name}", "checkpoint=shipped"]
    drafter = build(compose_bench(*words).drafter)
    trace = decode_all(target(), drafter, requests(), batch_size=3, num_slots=128)
    assert outputs_of(trace) == expected()
    # A third of a token a round is far below what any of them reaches, and far above what random weights do.
    assert sum(r["num_accepted"] for r in trace.rounds) > 0.33 * len(trace.rounds)


def test_shipped_checkpoints_are_small_and_have_their_cards() -> None:
    files = list(SHIPPED_CHECKPOINTS.rglob("*.safetensors"))
    assert sum(path.stat().st_size for path in files) <= 40e6
    for path in files:
        assert (path.parent / "config.json").is_file()
        assert path.parent.name in (path.parent / "README.md").read_text(encoding="utf-8")

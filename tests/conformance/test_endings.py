"""Where texts end, for every drafter YAML: at stop ids, stop strings, caps and the end of the context.

What is expected comes from the autoregressive text without any end, cut in plain Python.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from conformance.toolbox import (
    DRAFTERS,
    GREEDY_ONLY,
    LOOPING,
    ListSource,
    decode_all,
    letters,
    load_tiny,
    make_drafter,
    make_loop,
    make_request,
    make_requests,
    open_tiny,
    outputs_of,
    records_of,
    varied_prompts,
)

from baselines.autoregressive import AutoregressiveDrafter
from dispark.decoding.rows import Trace
from dispark.decoding.target import TargetModel
from dispark.types import Request, Sampling

LENGTH, CONTEXT = 30, 48


@cache
def endless(*overrides: str) -> TargetModel:
    return open_tiny("tiny", LOOPING, *overrides, stop_ids=())


@cache
def requests() -> tuple[Request, ...]:
    return tuple(make_requests(varied_prompts(8), LENGTH))


@cache
def long_texts() -> dict[str, list[int]]:
    texts = outputs_of(decode_all(endless(), AutoregressiveDrafter(), requests()))
    assert all(len(text) == LENGTH for text in texts.values())
    return texts


def run(name: str, target: TargetModel, these: tuple[Request, ...] | list[Request], **options: Any) -> Trace:
    return decode_all(target, make_drafter(name, "tiny", LOOPING), these, **options)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_stop_id_ends_the_text_and_is_kept(name: str) -> None:
    texts = list(long_texts().values())
    # Tokens of the first, tenth and last place, so that texts end at once, in the middle of a draft, and not at all.
    stop_ids = {texts[0][0], texts[1][9], texts[2][LENGTH - 1], texts[3][5]}
    trace = run(name, stopping(tuple(sorted(stop_ids))), requests())
    lengths = set()
    for request in requests():
        text, record = long_texts()[request.request_id], records_of(trace)[request.request_id]
        end = next((i + 1 for i, token in enumerate(text) if token in stop_ids), None)
        assert record.output_ids == text[:end]
        assert record.finish_reason == ("length" if end is None else "stop")
        lengths.add(len(record.output_ids))
    assert {1} < lengths  # some texts ended with their very first token, others later


@cache
def stopping(stop_ids: tuple[int, ...]) -> TargetModel:
    return open_tiny("tiny", LOOPING, stop_ids=stop_ids)


@pytest.mark.parametrize("name", DRAFTERS)
def test_stop_strings_over_tokens_and_rounds(name: str) -> None:
    strings = tuple(
        letters(text)[place : place + size]
        for text, place, size in zip(long_texts().values(), (0, 4, 7, 11, 20), (1, 2, 3, 2, 4), strict=False)
    )
    these = [replace(request, stop_strings=strings[i % 2 :]) for i, request in enumerate(requests())]
    trace = run(name, endless(), these)
    found_reasons = set()
    for request in these:
        text, record = long_texts()[request.request_id], records_of(trace)[request.request_id]
        end = next((n for n in range(1, LENGTH + 1) if any(s in letters(text[:n]) for s in request.stop_strings)), None)
        assert record.output_ids == text[:end]
        assert record.finish_reason == ("length" if end is None else "stop_string")
        whole = letters(text[:end])
        assert record.text == whole[: min((whole.find(s) for s in request.stop_strings if s in whole), default=None)]
        found_reasons.add(record.finish_reason)
    assert "stop_string" in found_reasons


@pytest.mark.parametrize("name", DRAFTERS)
def test_stop_strings_through_the_target_s_own_tokenizer(name: str) -> None:
    decode = load_tiny("tiny").tokenizer.decode
    # Bytes of plain ASCII in a row make strings that the byte tokenizer spells over two tokens.
    pairs = {
        request_id: next((text[i : i + 2] for i in range(3, LENGTH - 1) if max(text[i : i + 2]) < 128), None)
        for request_id, text in long_texts().items()
    }
    these = [
        replace(request, stop_strings=(decode(pair), "never to be seen"))
        for request in requests()
        if (pair := pairs[request.request_id]) is not None
    ]
    assert len(these) >= 3
    trace = run(name, endless(), these, decode=decode)
    for request in these:
        text, record = long_texts()[request.request_id], records_of(trace)[request.request_id]
        string = request.stop_strings[0]
        end = next(n for n in range(1, LENGTH + 1) if string in decode(text[:n]))
        assert (record.output_ids, record.finish_reason) == (text[:end], "stop_string")
        assert record.text == decode(text[:end]).partition(string)[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_length_caps_are_exact(name: str) -> None:
    draft_length = make_drafter(name, "tiny", LOOPING).draft_length
    caps = sorted({1, 2} | {max(1, draft_length + extra) for extra in (-1, 0, 1, 2)})
    for cap in caps:
        trace = run(name, endless(), [replace(request, max_new_tokens=cap) for request in requests()[:4]])
        for request_id, record in records_of(trace).items():
            assert record.output_ids == long_texts()[request_id][:cap]
            assert record.finish_reason == "length"
    for r in trace.rounds:
        is_cut = r["num_emitted"] < r["num_accepted_raw"] + 1
        assert r["is_truncated"] == is_cut


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_context_ends_a_text(name: str) -> None:
    target = endless(f"target.max_context={CONTEXT}")
    drafter = make_drafter(name, "tiny", LOOPING, f"target.max_context={CONTEXT}")
    prompts = [varied_prompts(1, seed=i)[0][:1] * (CONTEXT - left) for i, left in enumerate((1, 2, 3, 7, 30))]
    these = make_requests(prompts, 20)
    roomy = outputs_of(decode_all(endless(), AutoregressiveDrafter(), these))
    cases: tuple[dict[str, Any], ...] = (
        {"num_slots": CONTEXT + drafter.draft_length + 1},
        {"num_slots": CONTEXT + drafter.draft_length + 1, "batch_size": 1},
        {"num_slots": 3 * CONTEXT, "max_context": CONTEXT},
    )
    for options in cases:
        trace = decode_all(target, drafter, these, **options)
        for request in these:
            record, room = records_of(trace)[request.request_id], CONTEXT - len(request.prompt_ids)
            assert record.output_ids == roomy[request.request_id][:room]
            assert record.finish_reason == ("context" if room < 20 else "length")
            num_seen = len(request.prompt_ids)  # tokens before the anchor
            for r in (r for r in trace.rounds if r["request_id"] == request.request_id):
                assert num_seen + 1 + r["num_verified"] <= CONTEXT
                num_seen += r["num_emitted"]


@pytest.mark.parametrize("name", DRAFTERS)
def test_short_prompts_and_bad_ones(name: str) -> None:
    drafter = make_drafter(name, "tiny", LOOPING)
    one = make_request([65], 3, LENGTH)
    expected = outputs_of(decode_all(endless(), AutoregressiveDrafter(), [one]))
    assert outputs_of(decode_all(endless(), drafter, [one])) == expected
    loop = make_loop(endless(), drafter, num_slots=64)
    most = 64 - drafter.draft_length - 2
    for prompt, message in (
        ([], r"request p0#0: the prompt has no tokens; at least 1 is needed"),
        ([1] * 64, rf"request p0#0: the prompt has 64 tokens; allowed: at most {most}, so that one more fits"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.run(ListSource([make_request([1]), make_request(prompt)]))
        # And nothing of the broken run is left.
        assert outputs_of(loop.run(ListSource([one])))["p3#0"] == expected["p3#0"]
    with pytest.raises(ValueError, match="max_new_tokens=0: must be at least 1"):
        loop.run(ListSource([make_request([1], max_new_tokens=0)]))
    assert len(loop.run(ListSource([make_request([1] * most)])).records[0].output_ids) == 1


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in GREEDY_ONLY])
def test_endings_while_sampling(name: str) -> None:
    sampling = Sampling(1.0)
    drafter = make_drafter(name, "tiny", LOOPING)
    texts = outputs_of(decode_all(endless(), drafter, requests(), sampling))
    stop_ids = {text[7] for text in texts.values()}
    trace = decode_all(stopping(tuple(sorted(stop_ids))), drafter, requests(), sampling)
    for request_id, record in records_of(trace).items():
        end = next((i + 1 for i, token in enumerate(texts[request_id]) if token in stop_ids), None)
        assert end is not None
        if "hf" not in name:  # that one drafts otherwise where it sees a stop id, and then samples otherwise
            assert record.output_ids == texts[request_id][:end]
        assert (record.output_ids[-1] in stop_ids) == (record.finish_reason == "stop")
        assert not stop_ids & set(record.output_ids[:-1])


@pytest.mark.parametrize("name", sorted(GREEDY_ONLY))
def test_drafters_for_temperature_zero_say_so(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} with sampling.temperature=0.5: it serves temperature 0 only"):
        decode_all(endless(), make_drafter(name), [make_request([1, 2])], Sampling(0.5))

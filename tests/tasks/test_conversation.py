"""Requests from prompts: order, follow-up turns, seeds, lengths and the fingerprint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dispark.interfaces import RequestSource
from dispark.targets.tokenizer import ByteTokenizer
from dispark.tasks.conversation import (
    TURN_OVERHEAD,
    ConversationSource,
    check_lengths,
    context_need,
    first_messages,
    render_fingerprint,
    request_seed,
)
from dispark.types import Prompt, Request, RequestRecord


class Letters:
    """One token a character, with the role's initial before each message and ">" at the end."""

    def __init__(self) -> None:
        self.calls = 0

    def text(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"{message['role'][0]}:{message['content']}|" for message in messages) + ">"

    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        self.calls += 1
        return [ord(char) for char in self.text(messages)]

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]


class Nothing(Letters):
    def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return []


PROMPTS = [
    Prompt("t/0", "t", "c", ("one",)),
    Prompt("t/1", "t", "c", ("two", "three", "four")),
    Prompt("u/0", "u", "u", ("five",)),
]


def source(prompts: Sequence[Prompt] = PROMPTS, **settings: Any) -> ConversationSource:
    return ConversationSource(prompts, Letters(), max_new_tokens=8, seed=3, **settings)


def text(request: Request | None) -> str:
    assert request is not None
    return "".join(map(chr, request.prompt_ids))


def done(request: Request | None, answer: str) -> RequestRecord:
    assert request is not None
    return RequestRecord(request, text=answer)


def test_first_turns_come_in_order_and_then_nothing() -> None:
    feed = source(stop_strings=["\n"])
    assert isinstance(feed, RequestSource)
    assert feed.num_waiting == 0  # a list of prompts is no queue of users
    requests = [feed.next(), feed.next(), feed.next()]
    assert feed.next() is None
    assert feed.num_waiting == 0
    assert [request.request_id for request in requests if request] == ["t/0#0", "t/1#0", "u/0#0"]
    first = requests[0]
    assert first == Request(
        request_id="t/0#0",
        prompt_id="t/0",
        turn=0,
        task="t",
        category="c",
        prompt_ids=tuple(map(ord, "u:one|>")),
        max_new_tokens=8,
        seed=request_seed(3, "t/0#0"),
        stop_strings=("\n",),
    )


def test_first_messages_are_the_users() -> None:
    assert first_messages(PROMPTS[1]) == [{"role": "user", "content": "two"}]


def test_context_need_covers_the_whole_conversation() -> None:
    assert context_need(PROMPTS[0], Letters(), 10) == len("u:one|>") + 10
    need = context_need(PROMPTS[1], Letters(), 10)
    # answers of full length, a token a character, and the labels round every message
    whole = "u:two|a:0123456789|u:three|a:0123456789|u:four|>0123456789"
    assert len(whole) <= need <= len(whole) + 2 * TURN_OVERHEAD


def test_order_changes_serving_only() -> None:
    feed = source(order=["u/0", "t/1", "t/0"])
    served = [feed.next() for _ in range(3)]
    assert [request.prompt_id for request in served if request] == ["u/0", "t/1", "t/0"]
    assert render_fingerprint(feed.rendered) == render_fingerprint(source().rendered)
    plain = source()
    assert {plain.next(), plain.next(), plain.next()} == set(served)


def test_follow_up_holds_the_models_answer_and_goes_before_new_conversations() -> None:
    feed = source()
    feed.next()
    second = feed.next()
    feed.finish(done(second, "ANSWER"))
    follow_up = feed.next()
    assert follow_up is not None
    assert (follow_up.request_id, follow_up.turn) == ("t/1#1", 1)
    assert text(follow_up) == "u:two|a:ANSWER|u:three|>"
    feed.finish(done(follow_up, ""))
    third = feed.next()
    assert text(third) == "u:two|a:ANSWER|u:three|a:|u:four|>"
    feed.finish(done(third, "x"))
    assert text(feed.next()) == "u:five|>"
    assert feed.next() is None


def test_follow_ups_come_in_the_order_in_which_answers_arrive() -> None:
    prompts = [Prompt(f"t/{index}", "t", "t", ("a", "b")) for index in range(3)]
    feed = source(prompts)
    first = [feed.next() for _ in range(3)]
    assert feed.next() is None
    for index in (2, 0, 1):
        feed.finish(done(first[index], "x"))
    follow_ups = [feed.next() for _ in range(3)]
    assert [request.request_id for request in follow_ups if request] == ["t/2#1", "t/0#1", "t/1#1"]


def test_a_follow_up_that_does_not_fit_ends_the_conversation() -> None:
    limit = len("u:two|a:AB|u:three|>")
    feed = source(max_context=limit)
    feed.next()
    feed.finish(done(feed.next(), "AB"))
    assert set(feed.skipped_turns) == {"t/1#1", "t/1#2"}
    assert feed.skipped_turns["t/1#1"] == f"{limit} tokens leave no room for an answer in a context of {limit}"
    assert text(feed.next()) == "u:five|>"
    assert feed.next() is None
    roomy = source(max_context=limit + 1)
    roomy.next()
    roomy.finish(done(roomy.next(), "AB"))
    assert not roomy.skipped_turns
    assert text(roomy.next()).endswith("u:three|>")


def test_a_follow_up_that_renders_to_nothing_ends_the_conversation() -> None:
    class Forgets(Letters):
        def render(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
            return super().render(messages) if len(messages) == 1 else []

    feed = ConversationSource(PROMPTS[1:2], Forgets(), max_new_tokens=8, seed=0)
    feed.finish(done(feed.next(), "x"))
    assert feed.next() is None
    assert feed.skipped_turns == {"t/1#1": "turn renders to no tokens", "t/1#2": "turn renders to no tokens"}


def test_finishing_a_request_twice_is_caught() -> None:
    feed = source()
    request = feed.next()
    feed.finish(done(request, "x"))
    with pytest.raises(AssertionError, match="t/0#0 is not running"):
        feed.finish(done(request, "x"))


def test_seeds_are_stable_distinct_and_fit_63_bits() -> None:
    assert request_seed(0, "chat/0#0") == 8876228714791805424
    seeds = {request_seed(seed, f"t/{index}#0") for seed in (0, 1, 10) for index in range(200)}
    assert len(seeds) == 600
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


def test_seed_and_ids_do_not_depend_on_the_serving_order() -> None:
    def seeds(order: list[str]) -> dict[str, int]:
        feed = source(order=order)
        served = [feed.next() for _ in range(3)]
        return {request.request_id: request.seed for request in served if request}

    assert seeds(["t/0", "t/1", "u/0"]) == seeds(["u/0", "t/0", "t/1"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": []}, "task has no prompts"),
        ({"prompts": [PROMPTS[0], PROMPTS[0]]}, "prompt id t/0 occurs twice"),
        ({"order": ["t/0"]}, "order of 1 prompt ids: must name each of the 3 prompts once"),
        ({"order": ["t/0", "t/0", "u/0"]}, "must name each"),
        ({"order": ["t/0", "t/1", "nope"]}, "must name each"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be a whole number >= 1"),
        ({"max_new_tokens": 1.5}, r"max_new_tokens=1\.5"),
        ({"tokenizer": Nothing()}, "prompt t/0: renders to no tokens"),
    ],
)
def test_source_refuses(settings: dict[str, Any], message: str) -> None:
    base: dict[str, Any] = {"prompts": PROMPTS, "tokenizer": Letters(), "max_new_tokens": 8, "seed": 0}
    with pytest.raises(ValueError, match=message):
        ConversationSource(**(base | settings))


def test_first_turns_are_rendered_once() -> None:
    letters = Letters()
    feed = ConversationSource(PROMPTS, letters, max_new_tokens=8, seed=0)
    while feed.next():
        pass
    render_fingerprint(feed.rendered)
    assert letters.calls == len(PROMPTS)


def test_check_lengths_at_the_boundary() -> None:
    length = len("u:three|>")
    prompts = [Prompt("t/0", "t", "t", ("three",)), Prompt("t/1", "t", "t", ("a",))]
    assert check_lengths(prompts, Letters(), length + 1) == (prompts, [])
    with pytest.raises(ValueError, match=rf"prompt t/0: {length} tokens leave .* of {length}.*skip") as caught:
        check_lengths(prompts, Letters(), length)
    assert "\n" not in str(caught.value)
    assert check_lengths(prompts, Letters(), length, on_overlong="skip") == ([prompts[1]], ["t/0"])


def test_check_lengths_takes_requests_too() -> None:
    feed = source()
    requests = [request for request in (feed.next(), feed.next(), feed.next()) if request]
    assert check_lengths(requests, Letters(), 8, "skip") == (requests[:2], ["u/0#0"])
    empty = Request("t/9#0", "t/9", 0, "t", "t", (), 4, 0)
    with pytest.raises(ValueError, match="t/9#0: no tokens"):
        check_lengths([empty], Letters(), 8)


def test_check_lengths_refuses() -> None:
    with pytest.raises(ValueError, match="on_overlong=cut: must be one of error, skip"):
        check_lengths(PROMPTS, Letters(), 100, on_overlong="cut")
    with pytest.raises(ValueError, match="task has no prompts"):
        check_lengths([], Letters(), 100)
    with pytest.raises(ValueError, match="all 3 prompts are too long: allowed are at most 2 tokens"):
        check_lengths(PROMPTS, Letters(), 3, on_overlong="skip")
    with pytest.raises(ValueError, match="prompt t/0: renders to no tokens"):
        check_lengths(PROMPTS, Nothing(), 3)


def test_fingerprint_is_stable_and_sees_every_part() -> None:
    base: list[tuple[list[int], tuple[str, ...]]] = [([1, 2], ("x",)), ([3], ())]
    assert render_fingerprint(base) == "bd09cd5c1a0d3bfb668ce096a2b0a433d558dfb96acedc5190dc539a6a7971ca"
    others: list[list[tuple[list[int], tuple[str, ...]]]] = [
        [([1, 3], ("x",)), ([3], ())],
        [([1, 2], ("y",)), ([3], ())],
        [([1, 2], ()), ([3], ())],
        [([3], ()), ([1, 2], ("x",))],
        [([1, 2], ("x",))],
        [([1], ("x",)), ([2, 3], ())],
        [([1, 2], ("x", "")), ([3], ())],
        [],
    ]
    prints = {render_fingerprint(other) for other in others}
    assert len(prints) == len(others)
    assert render_fingerprint(base) not in prints


def test_fingerprint_of_a_source_covers_later_turns_and_the_system_prompt() -> None:
    changed = [PROMPTS[0], Prompt("t/1", "t", "c", ("two", "three", "FOUR")), PROMPTS[2]]
    other = ConversationSource(PROMPTS, ByteTokenizer("S"), 8, 3), ConversationSource(PROMPTS, ByteTokenizer(), 8, 3)
    prints = {render_fingerprint(feed.rendered) for feed in (source(), source(changed), *other)}
    assert len(prints) == 4

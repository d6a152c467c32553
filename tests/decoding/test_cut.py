"""Where a round's tokens end: a table of cases, among them the counting rules' worked examples, and properties."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispark.decoding.cut import Cut, StopStrings, cut
from dispark.types import FinishReason

STOP = 99
STOPS = frozenset({STOP, 98})
DRAFTS = [1, 2, 3, 4, 5, 6, 7]


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


def spelled(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


# Seven drafts a round: (tokens, accepted, room, emitted, accepted after the cut, finish, truncated).
CASES: dict[str, tuple[list[int], int, int, int, int, FinishReason | None, bool]] = {
    "all accepted, no stop": ([*DRAFTS, 8], 7, 100, 8, 7, None, False),
    "the fourth is rejected": ([1, 2, 3, 40], 3, 100, 4, 3, None, False),
    "the third is a stop and five are accepted": ([1, 2, STOP, 4, 5, 60], 5, 100, 3, 3, "stop", False),
    "the third would be a stop but the second is rejected": ([1, 20], 1, 100, 2, 1, None, False),
    "the recovered token is a stop": ([1, 2, STOP], 2, 100, 3, 2, "stop", False),
    "the bonus token is a stop": ([*DRAFTS, 98], 7, 100, 8, 7, "stop", False),
    "nothing was verified": ([5], 0, 100, 1, 0, None, False),
    "nothing was verified and it is a stop": ([STOP], 0, 100, 1, 0, "stop", False),
    "the first of two stops counts": ([1, 98, STOP, 4], 3, 100, 2, 2, "stop", False),
    "the cap is met exactly": ([1, 2, 3], 2, 3, 3, 2, "length", False),
    "the cap cuts the next token only": ([1, 2, 3], 2, 2, 2, 2, "length", True),
    "the cap cuts drafts": ([1, 2, 3, 4], 3, 1, 1, 1, "length", True),
    "one token and room for one": ([1], 0, 1, 1, 0, "length", False),
    "a stop on the cap is a stop": ([1, STOP, 3], 2, 2, 2, 2, "stop", False),
    "a stop beyond the cap is not seen": ([1, 2, STOP], 2, 2, 2, 2, "length", True),
    "a stop before the cap": ([STOP, 2, 3], 2, 2, 1, 1, "stop", False),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    tokens, accepted, room, num, kept, finish, is_truncated = CASES[name]
    found = cut(tokens, accepted, room=room, stop_ids=STOPS, cap_reason="length")
    assert found == Cut(tokens[:num], kept, finish, is_truncated)


@pytest.mark.parametrize(
    ("tokens", "end", "room", "num", "finish", "is_truncated"),
    [
        ([1, 2, 3, 4], 2, 9, 2, "stop_string", False),
        ([1, 2, 3, 4], 4, 9, 4, "stop_string", False),
        ([1, STOP, 3, 4], 3, 9, 2, "stop", False),  # the stop token comes first
        ([1, 2, STOP, 4], 2, 9, 2, "stop_string", False),  # the string comes first
        ([1, STOP, 3], 2, 9, 2, "stop", False),  # together: the token has it
        ([1, 2, 3], 2, 2, 2, "stop_string", False),  # on the cap: the string has it
        ([1, 2, 3], 3, 2, 2, "context", True),  # beyond the cap
    ],
)
def test_stop_strings_stop_tokens_and_caps(
    tokens: list[int], end: int, room: int, num: int, finish: FinishReason, is_truncated: bool
) -> None:
    found = cut(tokens, len(tokens) - 1, room=room, stop_ids=STOPS, cap_reason="context", stop_string_end=end)
    assert found == Cut(tokens[:num], min(len(tokens) - 1, num), finish, is_truncated)


@given(
    tokens=st.lists(st.integers(0, 6), min_size=1, max_size=9),
    room=st.integers(1, 10),
    end=st.one_of(st.none(), st.integers(1, 9)),
)
def test_what_is_left_is_a_prefix_that_ends_at_the_first_reason(tokens: list[int], room: int, end: int | None) -> None:
    end = None if end is None or end > len(tokens) else end
    found = cut(tokens, len(tokens) - 1, room=room, stop_ids=frozenset({0}), cap_reason="length", stop_string_end=end)
    num = len(found.tokens)
    assert 1 <= num <= min(room, len(tokens), end or len(tokens))
    assert found.tokens == tokens[:num]
    assert 0 not in tokens[: num - 1]
    assert found.num_accepted == min(num, len(tokens) - 1)
    reasons = {"stop": tokens[num - 1] == 0, "stop_string": end == num, "length": room == num}
    assert found.finish == next((reason for reason, holds in reasons.items() if holds), None)
    if found.finish is None:
        assert num == len(tokens)
    assert found.is_truncated == (found.finish == "length" and num < len(tokens))


def test_no_strings_find_nothing_and_never_decode() -> None:
    def refuse(ids: Sequence[int]) -> str:
        raise AssertionError("decoded for nothing")

    assert StopStrings((), refuse).find([1], [2]) is None
    assert StopStrings((), refuse).cut_text("abc") is None


def test_a_string_within_the_new_tokens() -> None:
    strings = StopStrings(("cd",), letters)
    assert strings.find(spelled("ab"), spelled("xcdz")) == 3
    assert strings.find(spelled("ab"), spelled("xc")) is None
    assert strings.find([], spelled("cd")) == 2


def test_a_string_that_began_in_an_earlier_round() -> None:
    strings = StopStrings(("bcd",), letters)
    assert strings.find(spelled("ab"), spelled("cde")) == 2
    assert strings.find(spelled("abc"), spelled("d")) == 1


def test_the_string_that_is_complete_first_ends_the_text() -> None:
    strings = StopStrings(("bcdef", "cd"), letters)
    assert strings.find(spelled("a"), spelled("bcdefg")) == 3
    # The text goes up to the earliest beginning of any whole string in it.
    assert strings.cut_text("abcd") == "ab"
    assert strings.cut_text("abcdef") == "a"
    assert strings.cut_text("xyz") is None
    assert strings.cut_text("cd") == ""


def test_one_token_may_hold_a_whole_string_and_more() -> None:
    pieces = {0: "a", 1: "xENDy", 2: "b"}
    strings = StopStrings(("END",), lambda ids: "".join(pieces[token] for token in ids))
    assert strings.find([0], [0, 1, 2]) == 2
    assert strings.cut_text("aaxENDyb") == "aax"


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop_strings"):
        StopStrings(("a", ""), letters)


def test_a_string_with_the_replacement_character_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stop_strings='x\ufffd': U\+FFFD"):
        StopStrings(("x\N{REPLACEMENT CHARACTER}",), letters)


@given(st.text("abE", max_size=60), st.integers(0, 8))
def test_a_long_text_is_searched_like_a_short_one(text: str, num_new: int) -> None:
    """Only the tail is decoded, and tokens that spell nothing (9) lie anywhere."""
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return "".join("abE"[token] for token in ids if token < 3)

    ids = [token for letter in text for token in ([9] * 7 if letter == "E" else []) + ["abE".index(letter)]]
    cut_at = max(0, len(ids) - num_new)
    strings = StopStrings(("EaE", "bbE"), decode)
    before, new = ids[:cut_at], ids[cut_at:]
    if strings.cut_text(decode(before)) is not None:
        return  # it would have ended before
    wanted = next((n for n in range(1, len(new) + 1) if strings.cut_text(decode(ids[: cut_at + n])) is not None), None)
    assert strings.find(before, new) == wanted


def test_a_round_decodes_a_bounded_tail() -> None:
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return "x" * len(ids)

    assert StopStrings(("end",), decode).find([0] * 5000, [0] * 4) is None
    assert max(seen) < 50

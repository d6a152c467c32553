"""What is let into the training data, and the reasons for the rest."""

from __future__ import annotations

import pytest

from dispark.training.filters import PromptFilter

GOOD = "How do I bake bread without an oven at home?"
EVALUATION = ["Describe in detail how the old lighthouse keeper spent his last winter."]


def judge() -> PromptFilter:
    return PromptFilter(EVALUATION)


def test_a_good_prompt_passes_once() -> None:
    found = judge()
    assert found.accepts(GOOD)
    assert not found.accepts(GOOD.upper().replace("?", " !"))  # the same words
    assert found.refused == {"repeat": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Hi.", "length"),
        ("   a    b     ", "length"),
        ("word " * 500, "length"),
        (EVALUATION[0].lower(), "evaluation"),
        ("Please tell me how the old lighthouse keeper spent his last winter, as a poem.", "evaluation"),
    ],
)
def test_refused_whoever_wrote_it(text: str, reason: str) -> None:
    found = judge()
    assert not found.accepts(text)
    assert found.refused == {reason: 1}


def test_seven_words_in_common_are_allowed() -> None:
    assert judge().accepts("The old lighthouse keeper spent his last euro.")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Что такое фотосинтез и как он работает?", "language"),
        ("again and again and again and again and again", "loop"),
    ],
)
def test_rules_for_what_a_model_wrote(text: str, reason: str) -> None:
    found = judge()
    assert found.accepts(text)
    found = judge()
    assert not found.accepts(text, is_written_by_model=True)
    assert found.refused == {reason: 1}


def test_looping_tokens_are_refused() -> None:
    found = judge()
    assert not found.accepts(GOOD, True, [1, 2, 3] * 40)
    assert found.refused == {"loop": 1}
    assert found.accepts(GOOD, True, list(range(100)))

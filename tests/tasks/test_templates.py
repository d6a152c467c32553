"""How dataset rows become prompts."""

from __future__ import annotations

import pytest

from dispark.tasks.templates import CodeProblemTemplate, ColumnTemplate, InstructionTemplate, TurnsTemplate


def test_column_template_wraps_text_with_braces_untouched() -> None:
    template = ColumnTemplate("question", prefix="Q: ", suffix="\nUse \\boxed{}.")
    assert template({"question": "What is {x}?", "answer": "1"}) == ["Q: What is {x}?\nUse \\boxed{}."]


def test_turns_template_copies_the_list() -> None:
    row = {"prompt": ["a", "b"]}
    turns = TurnsTemplate("prompt")(row)
    assert turns == ["a", "b"]
    assert turns is not row["prompt"]


def test_instruction_template_adds_the_input_only_where_there_is_one() -> None:
    assert InstructionTemplate()({"instruction": "Sort.", "input": "3 1"}) == ["Sort.\n\nInput:\n3 1"]
    assert InstructionTemplate()({"instruction": "Sort.", "input": ""}) == ["Sort."]


def test_code_template_shows_starter_code_or_a_blank() -> None:
    plain = CodeProblemTemplate()({"question_content": "P", "starter_code": ""})[0]
    assert plain.index("### Question:\nP\n\n### Format:") == 239
    assert "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```" in plain
    starter = CodeProblemTemplate()({"question_content": "P", "starter_code": "class S:\n    "})[0]
    assert "Use the following code structure:\n```python\nclass S:\n    \n```" in starter


@pytest.mark.parametrize(
    "template", [ColumnTemplate("text"), TurnsTemplate("text"), InstructionTemplate(), CodeProblemTemplate()]
)
def test_a_missing_column_is_named_with_those_there(template: ColumnTemplate) -> None:
    with pytest.raises(ValueError, match=r"task\.template column \w+ is missing: the dataset has a, b"):
        template({"b": 1, "a": 2})

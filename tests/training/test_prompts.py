"""Prompts from signatures and templates: distinct, seeded, and clear of every evaluation suite."""

from __future__ import annotations

import ast
import re

import pytest

from dispark.tasks.suite import SHIPPED, PackagedSuite
from dispark.training.filters import PromptFilter
from dispark.training.prompts import (
    KINDS,
    library_functions,
    library_paragraphs,
    library_sources,
    template_prompts,
)
from dispark.training.seeds import JsonlSource, MixedSource, SelfSource, TemplateSource, steer


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_distinct_seeded_and_filled_in(kind: str) -> None:
    found = template_prompts(kind, 200, 0)
    assert len(set(found)) == 200
    assert template_prompts(kind, 200, 0) == found
    assert template_prompts(kind, 50, 0) == found[:50]  # a larger data set holds the smaller one
    assert template_prompts(kind, 200, 1) != found
    assert all(text.strip() and len(text) < 2000 for text in found)
    if kind not in ("code", "summarization"):
        assert not [text for text in found if re.search(r"[{}]", text)]


def test_few_template_prompts_share_words_with_an_evaluation_prompt() -> None:
    """Those that do are left out by the filter; the templates themselves must not be made of a suite's words."""
    suites = PackagedSuite("all", list(SHIPPED), "1").prompts()
    judge = PromptFilter(turn for prompt in suites for turn in prompt.turns)
    for kind in KINDS:
        for text in template_prompts(kind, 300, 0):
            judge.accepts(text)
    assert judge.refused["evaluation"] < 0.05 * 300 * len(KINDS)
    assert judge.refused["repeat"] < 0.05 * 300 * len(KINDS)


def test_thousands_of_functions_are_known() -> None:
    functions = library_functions()
    assert len(functions) > 500
    for name, head, doc in functions:
        assert re.fullmatch(r"[A-Za-z]\w*", name)
        assert head.startswith(f"def {name}(")
        assert head.endswith("):")
        assert 30 <= len(doc) <= 600


def test_the_librarys_code_and_prose() -> None:
    sources = library_sources()
    assert len(sources) > 1000
    for name, source in sources[::50]:
        ast.parse(source)
        assert f"def {name}(" in source
        assert len(source) <= 800
    paragraphs = library_paragraphs()
    assert len(paragraphs) > 100
    assert all(120 <= len(text) <= 900 and text.endswith(".") and "\n" not in text for text in paragraphs)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"prompts.poetry: must be one of chat, code"):
        template_prompts("poetry", 1, 0)
    with pytest.raises(ValueError, match=r"prompts.code=10000000: only \d+ distinct prompts"):
        template_prompts("code", 10_000_000, 0)
    for counts, words in (
        ({"poetry": 1}, "counts.poetry"),
        ({"code": -1}, "counts.code=-1"),
        ({"qa": True}, "qa=True"),
    ):
        for source in (TemplateSource, SelfSource):
            with pytest.raises(ValueError, match=words):
                source(counts)
    with pytest.raises(ValueError, match="at least one source"):
        MixedSource({})


def test_sources_have_stable_ids(tmp_path) -> None:  # type: ignore[no-untyped-def]
    few, many = (SelfSource({"code": num}).seeds(0) for num in (3, 5))
    assert many[:3] == few
    assert few[0].text is None
    assert few[0].steer == steer("code", 0)
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n{"turns": ["three"]}\n')
    assert [seed.text for seed in JsonlSource(str(file), "chat").seeds(0)] == ["one", "three"]
    mixed = MixedSource({"a": TemplateSource({"qa": 20}), "b": SelfSource({"qa": 20})})
    seeds = mixed.seeds(1)
    assert len({seed.row_id for seed in seeds}) == 40
    assert seeds == mixed.seeds(1)
    assert {seed.row_id.split("/")[0] for seed in seeds[:15]} == {"template", "self"}  # shuffled together

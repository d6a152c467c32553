"""Training prompts without a download: from the Python standard library's own code and documentation, and templates.

Each kind yields as many distinct prompts as are asked for, in an order that depends on the seed only; what is taken
from the library also depends on the Python version, which is therefore part of a data set's settings. They steer what
a drafter learns towards code, math, translation, summarisation, questions and chat; what the target answers makes the
data.

The module knows no tokenizer and no model.
"""

from __future__ import annotations

import ast
import random
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from dispark.training import words

_MAX_DOC = 600  # characters of a docstring that a prompt quotes
_MIN_DOC = 30
_MIN_LINES, _MAX_LINES, _MAX_SOURCE = 4, 25, 800  # lines and characters of a function that a prompt quotes
_MIN_PARAGRAPH, _MAX_PARAGRAPH = 120, 900
_LIBRARY_SHARE = 0.6  # of prompts about texts, the rest being about made-up ones


def _code(rng: random.Random) -> Iterator[str]:
    functions = list(library_functions())
    forms = (
        'Complete this Python function:\n```python\n{head}\n    """{doc}"""\n```',
        "Write a Python function with the signature `{head}`. {first}",
        "Write a Python function called `{name}`. It should do this: {first}",
        "Explain what the Python function `{head}` could do, and show an example of its use.",
        "Write three unit tests for a Python function `{head}`. {first}",
        "Implement `{name}` in Python without using any library. {first}",
    )
    pairs: list[tuple[tuple[str, ...], str]] = [(function, form) for function in functions for form in forms]
    pairs += [(source, form) for source in library_sources() for form in words.ABOUT_CODE]
    rng.shuffle(pairs)
    for parts, form in pairs:
        if len(parts) == 2:
            yield form.format(name=parts[0], source=parts[1])
            continue
        name, head, doc = parts
        first = doc.split("\n\n")[0].replace("\n", " ")
        yield form.format(name=name, head=head, doc=doc, first=first)


@cache
def _library() -> tuple[tuple[str, ast.Module], ...]:
    """(text, syntax tree) of the standard library's modules; read as text, never imported."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for module in sorted(sys.stdlib_module_names):
        for path in (folder / f"{module}.py", folder / module / "__init__.py"):
            if path.is_file():
                try:
                    text = path.read_text(encoding="utf-8")
                    found.append((text, ast.parse(text)))
                except (SyntaxError, UnicodeDecodeError, OSError):
                    continue
    return tuple(found)


@cache
def library_functions() -> tuple[tuple[str, str, str], ...]:
    """(name, `def` line, docstring) of the standard library's documented functions."""
    found: dict[str, tuple[str, str, str]] = {}
    for _, tree in _library():
        for item in _documented(tree):
            found.setdefault(item[1], item)
    return tuple(found[head] for head in sorted(found))


@cache
def library_sources() -> tuple[tuple[str, str], ...]:
    """(name, source) of the standard library's shorter functions and methods, docstrings and all."""
    found: dict[str, str] = {}
    for text, tree in _library():
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None or node.name.startswith("__"):
                continue
            own = lines[node.lineno - 1 : node.end_lineno]
            source = textwrap.dedent("\n".join(own))
            if _MIN_LINES <= len(own) <= _MAX_LINES and len(source) <= _MAX_SOURCE:
                found.setdefault(source, node.name)
    return tuple(sorted((name, source) for source, name in found.items()))


@cache
def library_paragraphs() -> tuple[str, ...]:
    """Paragraphs of prose in the documentation that comes with the standard library: module docstrings, and the
    language's reference where the installation has it."""
    texts = [ast.get_docstring(tree) or "" for _, tree in _library()]
    topics = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    if topics.is_file():
        tree = ast.parse(topics.read_text(encoding="utf-8"))
        texts += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    found: dict[str, None] = {}
    for text in texts:
        for part in re.split(r"\n\s*\n", text):
            paragraph = " ".join(part.split())
            marks = [c for c in paragraph if not c.isspace()]
            is_prose = sum(c.isalpha() for c in marks) > 0.85 * len(marks) and paragraph[:1].isupper()
            if is_prose and paragraph.endswith(".") and _MIN_PARAGRAPH <= len(paragraph) <= _MAX_PARAGRAPH:
                found[paragraph] = None
    return tuple(sorted(found))


def _documented(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node)
        if doc is None or not _MIN_DOC <= len(doc) <= _MAX_DOC:
            continue
        names = [name for name in ast.unparse(node.args).split(", ") if name not in ("self", "cls")]
        yield node.name, f"def {node.name}({', '.join(names)}):", doc


def _math(rng: random.Random) -> Iterator[str]:
    while True:
        form = rng.choice(words.MATH)
        first, second = rng.sample(words.NAMES, 2)
        item, other = rng.sample(words.ITEMS, 2)
        a, b, c = rng.randint(2, 60), rng.randint(2, 30), rng.randint(2, 12)
        small, big = sorted((rng.randint(2, 90), rng.randint(91, 400)))
        yield form.format(first=first, second=second, item=item, other=other, a=a, b=b, c=c, small=small, big=big)


def _translation(rng: random.Random) -> Iterator[str]:
    forms = (
        "Translate the following English sentence into {language}: {text}",
        'How do you say "{text}" in {language}?',
        "Translate into {language} and explain the grammar briefly: {text}",
    )
    paragraphs = library_paragraphs()
    for text in _sentences(rng):
        if rng.random() < _LIBRARY_SHARE:
            text = re.split(r"(?<=\.) ", rng.choice(paragraphs))[0]
        yield rng.choice(forms).format(language=rng.choice(words.LANGUAGES), text=text)


def _summarization(rng: random.Random) -> Iterator[str]:
    forms = ("Summarize the following text in one sentence:\n\n{text}", "Give the main points of this text:\n\n{text}")
    source = _sentences(rng)
    paragraphs = library_paragraphs()
    while True:
        if rng.random() < _LIBRARY_SHARE:
            yield rng.choice(words.ABOUT_TEXT).format(text=rng.choice(paragraphs))
        else:
            yield rng.choice(forms).format(text=" ".join(next(source) for _ in range(rng.randint(4, 8))))


def _sentences(rng: random.Random) -> Iterator[str]:
    while True:
        form = rng.choice(words.SENTENCES)
        first, second = rng.sample(words.NAMES, 2)
        yield form.format(
            first=first,
            second=second,
            topic=rng.choice(words.TOPICS),
            place=rng.choice(words.PLACES),
            item=rng.choice(words.ITEMS),
            number=rng.randint(2, 90),
            day=rng.choice(words.DAYS),
        )


def _qa(rng: random.Random) -> Iterator[str]:
    while True:
        form, topic = rng.choice(words.QUESTIONS), rng.choice(words.TOPICS)
        if rng.random() < 0.3:
            yield rng.choice(words.ABOUT_CODE_TOPICS).format(topic=rng.choice(words.CODE_TOPICS))
            continue
        yield form.format(topic=topic, place=rng.choice(words.PLACES), other=rng.choice(words.TOPICS))


def _chat(rng: random.Random) -> Iterator[str]:
    while True:
        topics = words.TOPICS if rng.random() < 0.5 else words.LIFE_TOPICS
        yield rng.choice(words.REQUESTS).format(
            topic=rng.choice(topics),
            place=rng.choice(words.PLACES),
            person=rng.choice(words.PEOPLE),
            item=rng.choice(words.ITEMS),
            number=rng.randint(3, 10),
        )


KINDS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "chat": _chat,
    "code": _code,
    "math": _math,
    "translation": _translation,
    "summarization": _summarization,
    "qa": _qa,
}
_PATIENCE = 1000  # repeats in a row after which a kind is taken to be exhausted


def template_prompts(kind: str, num: int, seed: int) -> list[str]:
    """`num` distinct prompts of a kind.

    Raises:
        ValueError: an unknown kind, or fewer distinct prompts than asked for.
    """
    if kind not in KINDS:
        raise ValueError(f"prompts.{kind}: must be one of {', '.join(KINDS)}")
    rng = random.Random(f"{seed}:{kind}")
    found: dict[str, None] = {}
    repeats = 0
    source = KINDS[kind](rng)
    while len(found) < num and repeats < _PATIENCE:
        prompt = next(source, None)
        if prompt is None:
            break
        repeats = repeats + 1 if prompt in found else 0
        found[prompt] = None
    if len(found) < num:
        raise ValueError(f"prompts.{kind}={num}: only {len(found)} distinct prompts of this kind can be made")
    return list(found)

"""What conversations start from: user turns that are known, or kinds of turns that the target is to write itself.

A source gives seeds in a fixed order with ids that don't change when more are asked for, so that a larger data set
holds the smaller one. It knows neither the tokenizer nor the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from dispark.tasks.hub import load_hub_rows
from dispark.tasks.suite import JsonlSuite
from dispark.training.prompts import template_prompts
from dispark.training.rows import read_rows
from dispark.training.words import CODE_TOPICS, LANGUAGES, LIFE_TOPICS, MATH_TOPICS, TOPICS

log = logging.getLogger(__name__)

# System prompts under which a chat model that is given an empty user turn writes one of the kind, with what they can be
# about: without a topic a small model asks for the same few things over and over.
STEERS = {
    "chat": (
        "You are a helpful assistant in everyday life. The user asks for help with {topic}.",
        LIFE_TOPICS,
    ),
    "code": ("You are a programming assistant. The user asks for Python code about {topic}.", CODE_TOPICS),
    "math": ("You are a math tutor. The user asks a question about {topic}.", MATH_TOPICS),
    "translation": ("You are a translator. The user gives you a sentence to translate into {topic}.", LANGUAGES),
    "summarization": ("You summarize texts. The user pastes a paragraph about {topic} to be summarized.", TOPICS),
    "qa": ("You answer questions of knowledge. The user asks a question about {topic}.", TOPICS),
}


@dataclass(frozen=True)
class Seed:
    """Args: text: the user's turn, or None where the target writes it under `steer`."""

    row_id: str
    kind: str
    text: str | None = None
    steer: str | None = None


class SeedSource(Protocol):
    """Anything with seeds."""

    def seeds(self, seed: int) -> list[Seed]:
        """All of them, in an order that depends on `seed` only."""


def _check_counts(counts: Mapping[str, int], allowed: Mapping[str, Any], key: str) -> None:
    for kind, num in counts.items():
        if kind not in allowed:
            raise ValueError(f"prompts.{key}.{kind}: must be one of {', '.join(allowed)}")
        if isinstance(num, bool) or not isinstance(num, int) or num < 0:
            raise ValueError(f"prompts.{key}.{kind}={num}: must be a whole number >= 0")


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"prompts.limit={limit}: must be a whole number >= 1, or null for all")


class TemplateSource:
    """Turns from the standard library's signatures and from templates, see prompts.py.

    Args:
        counts: how many of each kind.
    """

    def __init__(self, counts: dict[str, int]) -> None:
        _check_counts(counts, STEERS, "counts")
        self.counts = dict(counts)

    def seeds(self, seed: int) -> list[Seed]:
        found = []
        for kind, num in self.counts.items():
            texts = template_prompts(kind, num, seed) if num else []
            found += [Seed(f"template/{kind}/{i}", kind, text) for i, text in enumerate(texts)]
        return found


class SelfSource:
    """Turns that the target writes, by continuing the header of the user's turn under a system prompt of the kind.

    Args:
        counts: how many of each kind are tried; filters leave fewer.
    """

    def __init__(self, counts: dict[str, int]) -> None:
        _check_counts(counts, STEERS, "counts")
        self.counts = dict(counts)

    def seeds(self, seed: int) -> list[Seed]:
        return [
            Seed(f"self/{kind}/{i}", kind, None, steer(kind, i))
            for kind, num in self.counts.items()
            for i in range(num)
        ]


def steer(kind: str, number: int) -> str:
    """The system prompt of a kind's turn number so and so; topics take turns."""
    form, topics = STEERS[kind]
    return form.format(topic=topics[number % len(topics)])


class JsonlSource:
    """First turns of a JSONL file or folder, in any format that tasks read.

    Args:
        path: the file or folder.
        kind: what its rows are about.
        limit: the first so many; None takes all.
    """

    def __init__(self, path: str, kind: str = "other", limit: int | None = None) -> None:
        with reported_as("prompts"):
            self._suite = JsonlSuite(path, limit=limit)
        self.kind = kind

    def seeds(self, seed: int) -> list[Seed]:
        with reported_as("prompts"):
            return [Seed(f"jsonl/{p.prompt_id}", self.kind, p.turns[0]) for p in self._suite.prompts()]


class RowsSource:
    """Prompts of a data set that `dispark data` made, to be answered again: with other sampling, or at greater length.

    Args:
        path: its folder.
        limit: the first so many rows; None takes all.
    """

    def __init__(self, path: str, limit: int | None = None) -> None:
        _check_limit(limit)
        self.path, self.limit = path, limit

    def seeds(self, seed: int) -> list[Seed]:
        rows = list(islice(read_rows(self.path, "prompts.path"), self.limit))
        return [Seed(row.row_id, row.kind, row.prompt) for row in rows]


@contextmanager
def reported_as(group: str, key: str | None = None) -> Iterator[None]:
    """Complaints of a task's reader name the keys of `group` instead of the task's, or one key for its path."""
    try:
        yield
    except ValueError as error:
        line = str(error)
        if key is not None:
            line = line.replace("task.path", key)
        raise ValueError(line.replace("task.", f"{group}.")) from error


class HubSource:
    """First user turns of a dataset of conversations on the Hub.

    Args:
        repo_id: "owner/dataset".
        revision: commit of the dataset; a branch name works but is logged as not pinned.
        split, config_name: what `datasets.load_dataset` takes.
        column: of the conversations: lists of {role, content} or of {from, value}.
        kind: what its rows are about.
        limit: so many rows, drawn with the run's seed; None takes all.
    """

    def __init__(
        self,
        repo_id: str,
        revision: str,
        split: str = "train",
        config_name: str | None = None,
        column: str = "conversations",
        kind: str = "other",
        limit: int | None = None,
    ) -> None:
        _check_limit(limit)
        self.repo_id, self.revision, self.split, self.config_name = repo_id, revision, split, config_name
        self.column, self.kind, self.limit = column, kind, limit

    def seeds(self, seed: int) -> list[Seed]:
        import random

        where = f"prompts: {self.repo_id}@{self.revision}"
        if not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            log.warning("%s is not pinned: the rows may change; use a commit hash", where)
        found = []
        for number, row in enumerate(load_hub_rows(self.repo_id, self.revision, self.config_name, self.split, None)):
            if self.column not in row:
                raise ValueError(f"prompts.column={self.column}: {self.repo_id} has {', '.join(map(str, row))}")
            text = first_user_turn(row[self.column])
            if text is not None:
                found.append(Seed(f"hub/{number}", self.kind, text))
        if not found:
            raise ValueError(f"{where}: has no conversation that starts with a user's turn in column {self.column}")
        random.Random(seed).shuffle(found)
        return found[: self.limit]


def first_user_turn(conversation: Any) -> str | None:
    """The text of a conversation's first turn, system messages left out, if it is a user's; else None."""
    for message in conversation if isinstance(conversation, list) else []:
        if not isinstance(message, Mapping):
            return None
        role, text = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if role == "system":
            continue
        return text.strip() or None if role in ("user", "human") and isinstance(text, str) else None
    return None


class MixedSource:
    """Several sources, their seeds shuffled together so that every part of the data has all of them.

    Args:
        sources: by name.
    """

    def __init__(self, sources: dict[str, Any]) -> None:
        if not sources:
            raise ValueError("prompts.sources: must have at least one source")
        self.sources = dict(sources)

    def seeds(self, seed: int) -> list[Seed]:
        import random

        found = [item for source in self.sources.values() for item in source.seeds(seed)]
        random.Random(seed).shuffle(found)
        return found

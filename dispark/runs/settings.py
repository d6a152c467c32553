"""What tells runs apart that go by the same names: the settings in which they differ, in words.

Two runs of one drafter on one task may differ in its draft length, the seed, or the prompts' file. Without these words
their rows would look alike. It knows nothing about figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dispark.runs.loaded import LoadedRun
from dispark.runs.store import NOT_IDENTITY

_LABELS = ("target", "drafter", "scheduler", "verifier", "sampling")


def differing_settings(runs: Sequence[LoadedRun]) -> list[str]:
    """For each run, "key=value, ..." of the settings in which it differs from runs of the same names; "" for none.

    Settings of the task are compared between runs of the same task only, all others across tasks, so that the rows of
    one setting read alike on every task.
    """
    flat = [dict(_flatten(run)) for run in runs]
    names = [tuple(run.label(key) for key in _LABELS) for run in runs]
    tasks = [run.label("task") for run in runs]
    found = []
    for i, own in enumerate(flat):
        words = []
        for key in sorted({key for j, other in enumerate(flat) if names[j] == names[i] for key in other}):
            peers = [j for j in range(len(runs)) if names[j] == names[i]]
            if key.startswith(("task.", "contents.task.")):
                peers = [j for j in peers if tasks[j] == tasks[i]]
            values = {repr(flat[j].get(key)) for j in peers}
            if len(values) > 1:
                words.append((key, own.get(key)))
        found.append(_in_words(words))
    return found


def _flatten(run: LoadedRun) -> Iterator[tuple[str, Any]]:
    config = {k: v for k, v in (run.run.get("config") or {}).items() if k not in NOT_IDENTITY}
    yield from _walk(config, "")
    for key, digest in (run.run.get("contents") or {}).items():
        yield f"contents.{key}", digest[:8]


def _walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _walk(value, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), node


def _in_words(items: Sequence[tuple[str, Any]]) -> str:
    """Last parts of the keys where these are enough to tell them apart."""
    last = [key.rsplit(".", 1)[-1] for key, _ in items]
    texts = []
    for (key, value), short in zip(items, last, strict=True):
        is_clear = last.count(short) == 1 and not key.startswith("contents.")
        texts.append(f"{short if is_clear else key}={value}")
    return ", ".join(texts)

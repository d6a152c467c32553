"""The top level's keys and types."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import HydraException

from dispark import config, schema  # noqa: F401  (makes dispark.conf importable)


def composed(*overrides: str) -> None:
    with initialize_config_module("dispark.conf", version_base="1.3"):
        compose("bench", overrides=list(overrides))


@pytest.mark.parametrize("override", ["sed=4", "seed=abc", "max_new_tokens=1.5", "overwrite=maybe", "stop_strings=x"])
def test_schema_refuses_typos_and_types(override: str) -> None:
    with pytest.raises(HydraException):
        composed(override)


def test_groups_and_settings() -> None:
    assert schema.groups("fetch") == ["target", "paths"]
    assert schema.settings("fetch") == {}
    assert set(schema.groups("bench")) & set(schema.settings("bench")) == set()
    assert schema.settings("compare")["baseline"] == str | None


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("drafter=[a, b]", "drafter=[a, b]: takes one option; several need -m: dispark bench -m drafter=a,b"),
        ("+target@drafter.model=[a]", "+target@drafter.model=[a]: takes one option; several need -m: "),
        ("drafter=a", None),
        ("drafter.rates=[1,2]", None),
        ("stop_strings=[a,b]", None),
    ],
)
def test_a_group_takes_one_option(word: str, line: str | None) -> None:
    found = schema.several_options(word, "bench")
    assert found is None if line is None else (found or "").startswith(line)

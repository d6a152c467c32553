"""The top level of each command's config: which keys there are and of which type.

Hydra merges the YAML of a command into its schema, so that a misspelt key or a word where a number belongs is refused
before anything runs. Groups are `Any` here: what they hold is up to the class that their `_target_` names. Importing
this module registers the schemas.

Ranges and whatever else types can't express are in checks.py.
"""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class BenchConfig:
    """Top level of `dispark bench`; what each key means stands above it in conf/bench.yaml."""

    target: Any = MISSING
    drafter: Any = MISSING
    verifier: Any = MISSING
    scheduler: Any = MISSING
    sampling: Any = MISSING
    task: Any = MISSING
    meter: Any = MISSING
    tracker: Any = MISSING
    paths: Any = MISSING
    seed: int = 0
    max_new_tokens: int = 128
    batch_size: int = 1
    repeats: int = 1
    chunk: int | None = None
    warmup: int = 1
    stop_strings: list[str] = field(default_factory=list)
    on_overlong: str = "error"
    generate_baseline: bool = False
    check_losslessness: bool = True
    checkpoint: str | None = None
    calibration: str | None = None
    name: str | None = None
    overwrite: bool = False


@dataclass
class FetchConfig:
    """Top level of `dispark fetch`."""

    target: Any = MISSING
    paths: Any = MISSING


@dataclass
class CompareConfig:
    """Top level of `dispark compare`; what each key means stands above it in conf/compare.yaml."""

    paths: Any = MISSING
    runs: list[str] = MISSING
    baseline: str | None = None
    force: bool = False
    csv: str | None = None
    markdown: str | None = None


@dataclass
class FiguresConfig:
    """Top level of `dispark figures`; what each key means stands above it in conf/figures.yaml."""

    paths: Any = MISSING
    figure: str = "acceptance"
    runs: list[str] = MISSING
    out: str = MISSING
    formats: list[str] = field(default_factory=lambda: ["png"])


@dataclass
class ProfileConfig:
    """Top level of `dispark profile`; what each key means stands above it in conf/profile.yaml."""

    target: Any = MISSING
    drafter: Any = MISSING
    paths: Any = MISSING
    checkpoint: str | None = None
    rows: list[int] = MISSING
    tokens: list[int] = MISSING
    context: int = 256
    repeats: int = 7
    out: str = MISSING


@dataclass
class CalibrateConfig:
    """Top level of `dispark calibrate`; what each key means stands above it in conf/calibrate.yaml."""

    target: Any = MISSING
    drafter: Any = MISSING
    verifier: Any = MISSING
    sampling: Any = MISSING
    task: Any = MISSING
    paths: Any = MISSING
    checkpoint: str | None = None
    confidences: list[str] | None = None
    grid_low: float = 0.2
    grid_high: float = 5.0
    grid_size: int = 81
    num_bins: int = 15
    rounds: str | None = None
    report: str | None = None
    batch_size: int = 8
    max_new_tokens: int = 128
    stop_strings: list[str] = field(default_factory=list)
    seed: int = 0
    out: str | None = None


@dataclass
class ServeConfig:
    """Top level of `dispark serve`; what each key means stands above it in conf/serve.yaml."""

    target: Any = MISSING
    verifier: Any = MISSING
    sampling: Any = MISSING
    task: Any = MISSING
    arrivals: Any = MISSING
    meter: Any = MISSING
    paths: Any = MISSING
    arms: dict[str, Any] = MISSING
    checkpoint: str | None = None
    out: str = MISSING
    seed: int = 0
    num_requests: int | None = None
    max_new_tokens: int = 64
    min_new_tokens: int | None = None
    max_rows: int = 16
    kv_blocks: int | None = None
    block_tokens: int = 16
    cancel_share: float = 0.0
    cycles: int = 1
    warmup: int = 2
    baseline: str | None = None
    sla: dict[str, Any] = field(default_factory=dict)
    name: str | None = None
    overwrite: bool = False


@dataclass
class SimulateConfig:
    """Top level of `dispark simulate`; what each key means stands above it in conf/simulate.yaml."""

    engine: Any = MISSING
    arrivals: Any = MISSING
    paths: Any = MISSING
    arms: dict[str, Any] = MISSING
    out: str = MISSING
    seed: int = 0
    num_requests: int | None = None
    prompt_tokens: list[int] = MISSING
    answer_tokens: list[int] = MISSING
    max_rows: int = 4096
    kv_blocks: int | None = None
    block_tokens: int = 64
    baseline: str | None = None
    sla: dict[str, Any] = field(default_factory=dict)
    overwrite: bool = False


@dataclass
class AuditConfig:
    """Top level of `dispark audit`; what each key means stands above it in conf/audit.yaml."""

    paths: Any = MISSING
    schedulers: list[str] | None = None
    verifiers: list[str] | None = None
    drafters: list[str] | None = None
    num_tokens: int = 3
    num_worlds: int = 3
    seed: int = 0
    tolerance: float = 1e-12


@dataclass
class DataConfig:
    """Top level of `dispark data`; what each key means stands above it in conf/data.yaml."""

    target: Any = MISSING
    drafter: Any = MISSING
    verifier: Any = MISSING
    scheduler: Any = MISSING
    sampling: Any = MISSING
    prompts: Any = MISSING
    endpoint: Any = MISSING
    paths: Any = MISSING
    out: str = MISSING
    seed: int = 0
    batch_size: int = 64
    part: int = 512
    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    max_turn_tokens: int = 96
    minutes: float | None = None
    exclude: list[str] = field(default_factory=list)


@dataclass
class TrainConfig:
    """Top level of `dispark train`; what each key means stands above it in conf/train.yaml."""

    target: Any = MISSING
    optimizer: Any = MISSING
    tracker: Any = MISSING
    paths: Any = MISSING
    students: dict[str, Any] = MISSING
    data: str = MISSING
    more_data: list[str] = field(default_factory=list)
    out: str = MISSING
    seed: int = 0
    steps: int = 1000
    batch_rows: int = 2
    accumulate: int = 1
    max_tokens: int = 1024
    held_out: int = 48
    feature_cache: str | None = None
    log_every: int = 20
    checkpoint_every: int = 250
    minutes: float | None = None
    divergence: float | None = 1.5
    parity_rows: int = 8
    parity_tokens: int = 32
    parity_tolerance: float = 0.1
    overwrite: bool = False


SCHEMAS: dict[str, type] = {
    "bench": BenchConfig,
    "fetch": FetchConfig,
    "compare": CompareConfig,
    "figures": FiguresConfig,
    "profile": ProfileConfig,
    "calibrate": CalibrateConfig,
    "serve": ServeConfig,
    "simulate": SimulateConfig,
    "audit": AuditConfig,
    "data": DataConfig,
    "train": TrainConfig,
}
for _command, _schema in SCHEMAS.items():
    ConfigStore.instance().store(name=f"{_command}_schema", node=_schema)


def groups(command: str) -> list[str]:
    """The keys of a command's config that are groups, whose value is one of the group's options."""
    return [key for key, hint in typing.get_type_hints(SCHEMAS[command]).items() if hint is Any]


def several_options(word: str, command: str) -> str | None:
    """The refusal of a setting that gives a group a list: Hydra would merge the options into one."""
    found = re.fullmatch(r"\+*((\w+)(?:@[\w.]+)?)=\[(.*)\]", word)
    if found is None or found.group(2) not in groups(command):
        return None
    options = found.group(3).replace(" ", "")
    return f"{word}: takes one option; several need -m: dispark {command} -m {found.group(1)}={options}"


def settings(command: str) -> dict[str, Any]:
    """The other keys of a command's config, with their types."""
    return {key: hint for key, hint in typing.get_type_hints(SCHEMAS[command]).items() if hint is not Any}

"""What is checked of a composed config before anything expensive starts: groups, types and ranges of the top level.

Knows the commands' schemas and the chosen options. What the settings of a group mean is up to the class that it names;
here they are only held against its annotations, all groups at once and before a run has a folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dispark import schema
from dispark.config import check_runs_folder, choices, job_words, resolve
from dispark.hints import accepts, shown
from dispark.nodes import check_node, refusal
from dispark.runs.files import check_writable

ON_OVERLONG = ("error", "skip")
# More than any machine decodes at once, and than any target reads: beyond these a slip of the hand looks like a hang.
MAX_BATCH_SIZE = 4096
MAX_NEW_TOKENS = 1_000_000


def check_whole(plain: Mapping[str, Any], keys: Sequence[str], or_null: Sequence[str] = ()) -> None:
    """Raises ValueError for a top-level value below 1; those of `or_null` may be None."""
    for key in keys:
        if plain[key] < 1:
            raise ValueError(f"{key}={plain[key]}: must be a whole number >= 1")
    for key in or_null:
        if plain[key] is not None and plain[key] < 1:
            raise ValueError(f"{key}={plain[key]}: must be a whole number >= 1, or null")


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that no generator takes."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed}: must lie in 0 .. 2**63 - 1")


def check_file(path: Path, key: str) -> None:
    """Raises ValueError where a file can't be written: a folder is there, or its own folder can't be had."""
    if path.is_dir():
        raise ValueError(f"{key}={path}: is a folder; must name a file")
    check_writable(path.parent, key)


def validate(cfg: DictConfig) -> dict[str, Any]:
    """Checks the top level of `dispark bench`; imports nothing that the config names.

    Returns:
        The resolved config.

    Raises:
        ValueError: one line with the key, the value and what is allowed.
    """
    plain = check_top_level(cfg, "bench")
    check_whole(plain, ("max_new_tokens", "batch_size", "repeats"), or_null=("chunk",))
    for key, most in (("max_new_tokens", MAX_NEW_TOKENS), ("batch_size", MAX_BATCH_SIZE)):
        if plain[key] > most:
            raise ValueError(f"{key}={plain[key]}: must be at most {most}")
    if plain["warmup"] < 0:
        raise ValueError(f"warmup={plain['warmup']}: must be a whole number >= 0")
    check_seed(plain["seed"])
    if plain["on_overlong"] not in ON_OVERLONG:
        raise ValueError(f"on_overlong={plain['on_overlong']}: must be one of {', '.join(ON_OVERLONG)}")
    if "" in plain["stop_strings"]:
        raise ValueError("stop_strings=['']: an empty string stops every text at once; give at least one character")
    if plain["name"] is not None and not plain["name"].strip():
        raise ValueError("name='': must be null or a label of at least one character")
    return plain


def check_top_level(cfg: DictConfig, command: str) -> dict[str, Any]:
    """Checks the groups and the types of a command's top level; see `validate`."""
    for word in job_words():
        if line := schema.several_options(word, command):
            raise ValueError(line)
    for group in schema.groups(command):
        _check_mapping(cfg, group)
    for choice in choices():
        _check_part(cfg, choice)
    if not OmegaConf.is_missing(cfg, "paths"):
        check_runs_folder(OmegaConf.select(cfg, "paths.runs"))
    plain = resolve(cfg)
    for key, hint in schema.settings(command).items():
        if not accepts(plain[key], hint):
            raise ValueError(refusal(key, plain[key], hint))
    return plain


def check_groups(plain: dict[str, Any]) -> None:
    """Holds every group against the constructors that it names; imports them.

    Args:
        plain: the resolved config.

    Raises:
        ValueError: see `dispark.nodes.check_node`.
    """
    for group, node in plain.items():
        if isinstance(node, dict) and group != "paths":
            if "_target_" not in node:
                raise ValueError(f"{group}: has no _target_; {_origin(group)} must name a class")
            check_node(node, group)


def _check_mapping(cfg: DictConfig, group: str) -> None:
    """The file of an option holds a mapping."""
    if OmegaConf.is_missing(cfg, group) or OmegaConf.is_interpolation(cfg, group):
        return
    node = cfg[group]
    if not isinstance(node, DictConfig):
        value = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
        raise ValueError(f"{group}={shown(value)}: {_origin(group)} must hold a mapping with a _target_")


def _check_part(cfg: DictConfig, choice: str) -> None:
    """A part of a group that was chosen from another group, as a draft model's target, takes no plain value."""
    key = choice.partition("@")[2]
    value = OmegaConf.select(cfg, key) if key else None
    if value is not None and not isinstance(value, DictConfig):
        raise ValueError(f"{key}={shown(value)}: is chosen as an option of a group: {choice}={shown(value)}")


def _origin(group: str) -> str:
    """The file of the chosen option, or words that say as much."""
    option = choices().get(group)
    if option is None:
        return f"an option of group {group}"
    for source in HydraConfig.get().runtime.config_sources:
        if source.schema == "file":
            file: Any = Path(source.path) / group / f"{option}.yaml"
        elif source.schema == "pkg":
            file = resources.files(source.path) / group / f"{option}.yaml"
        else:
            continue
        if file.is_file():
            return f"{file} ({group}={option})"
    return f"{group}={option}"

"""One line for every error: what the user wrote, why it is refused and what is allowed.

Knows the shapes in which Hydra and OmegaConf complain, and asks Hydra for the allowed keys where their messages leave
them out. Whether a line is printed, where, and with which exit code is the business of `dispark.cli`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dispark import schema
from dispark.config import omegaconf_message
from dispark.hints import describe, suggest

_SEARCH_PATH = "hydra.searchpath=[file://"
_ONE_OPTION = "a group takes the name of one of its options"


def is_users(error: BaseException) -> bool:
    """Whether the user can mend this by giving other settings; everything else is a bug or a broken machine."""
    if isinstance(error, OSError) and not isinstance(error, MissingConfigException):
        return error.filename is not None and not isinstance(error, ConnectionError)
    return isinstance(error, (ValueError, HydraException, OmegaConfBaseException, yaml.YAMLError))


def explain(error: BaseException, config_name: str, overrides: Sequence[str]) -> str:
    """The error as one line.

    Args:
        error: anything that came out of a command.
        config_name: the command's primary config.
        overrides: the command line's key=value words.
    """
    return " ".join(_explain(error, config_name, overrides).split())


def _explain(error: BaseException, config_name: str, overrides: Sequence[str]) -> str:
    if isinstance(error, HydraException):
        for word in overrides:
            if line := schema.several_options(word, config_name):
                return line
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return _unparsable(error)
    if isinstance(error, OmegaConfBaseException):
        return omegaconf_message(error)
    if isinstance(error, HydraException):
        return _hydra_message(error, config_name, overrides)
    if str(error).startswith("Config group override must be"):
        wrong = [word for word in overrides if _is_no_option(word, config_name)]
        return f"{' '.join(wrong) or 'null'}: {_ONE_OPTION}"
    if isinstance(error, OSError) and error.filename is not None:
        return _file_message(error, overrides)
    if isinstance(error, yaml.YAMLError):
        return _yaml_message(error)
    if isinstance(error, UnicodeDecodeError) and (file := _undecodable(overrides)):
        return f"{file}: is not UTF-8 text (byte {error.start})"
    if isinstance(error, UnicodeEncodeError):
        part = error.object[max(0, error.start - 20) : error.end + 20]
        return f"{part!r}: holds letters that this locale can't write; set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
    if isinstance(error, ValueError) and str(error).strip():
        return str(error)
    return f"{type(error).__name__}: {error}"


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if not group or error.options is None:
        return _first_line(error)
    return f"{group}={option}: no such option; {suggest(option, error.options)}"


def _unparsable(error: OverrideParseException) -> str:
    if "=" not in error.override:
        return f"{error.override}: is not a setting; write key=value"
    return f"{error.override}: cannot be read ({_first_line(error)}); put odd characters in quotes: 'key=\"value\"'"


def _yaml_message(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return f"{mark.name}, line {mark.line + 1}: is not valid YAML ({error.problem})"
    return f"{getattr(error, 'name', 'a config')}: is not valid YAML ({getattr(error, 'reason', error)})"


def _undecodable(overrides: Sequence[str]) -> Path | None:
    """The first YAML of the user's folders that isn't UTF-8; the error itself does not tell."""
    folders = [word.removeprefix(_SEARCH_PATH).rstrip("]") for word in overrides if word.startswith(_SEARCH_PATH)]
    for file in (file for folder in folders for file in sorted(Path(folder).rglob("*.yaml"))):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return file
        except OSError:
            continue
    return None


def _file_message(error: OSError, overrides: Sequence[str]) -> str:
    settings = (
        word for word in overrides if len(value := word.partition("=")[2]) > 1 and str(error.filename).startswith(value)
    )
    return f"{next(settings, error.filename)}: {error.strerror or error}"


def _hydra_message(error: HydraException, config_name: str, overrides: Sequence[str]) -> str:
    cause = error.__cause__
    text = str(error)
    if found := re.match(r"Error merging override (.*)", text):
        return f"{found.group(1)}: {_merge_message(found.group(1), cause or error, config_name)}"
    if found := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'(?: requires.*)?$", text, re.M):
        return _needs_sweep(found.group(1), config_name)
    if found := re.match(r"Could not override '([^']+)'", text):
        return _unknown_key(found.group(1), config_name, overrides)
    return str(cause) if isinstance(cause, ValueError) else _first_line(error)


def _merge_message(word: str, error: BaseException, config_name: str) -> str:
    hint = schema.settings(config_name).get(word.partition("=")[0].lstrip("+"))
    if hint is not None:
        return f"must be {describe(hint)}"
    if str(error).startswith("Cannot merge DictConfig with ListConfig"):  # it says so for both directions
        return f"must be a {'list' if '={' in word else 'mapping'}"
    return _first_line(error)


def _needs_sweep(word: str, config_name: str) -> str:
    key, _, value = word.partition("=")
    quoted = f"'{word}'" if "(" in word else word  # a shell would take the parentheses for itself
    line = f"{word}: several values need -m: dispark {config_name} -m {quoted}"
    if key.partition("@")[0] in schema.groups(config_name) or "(" in value:
        return line
    return f"{line}; a list is written '{key}=[{value}]', a text '{key}=\"{value}\"'"


def _unknown_key(key: str, config_name: str, overrides: Sequence[str]) -> str:
    key = key.split("@")[0]
    written = next((word for word in overrides if word.startswith(f"{key}=")), key)
    if key in schema.groups(config_name):
        return f"{written}: {_ONE_OPTION}"
    parent = key.rpartition(".")[0]
    allowed = _allowed_keys(parent, config_name, [word for word in overrides if word != written])
    names = [f"{parent}.{name}" if parent else name for name in allowed]
    return f"{written}: no such setting{f'; {suggest(key, names)}' if names else ''}"


def _is_no_option(word: str, config_name: str) -> bool:
    key, _, value = word.partition("=")
    if key.partition("@")[0] not in schema.groups(config_name):
        return False
    try:
        return not isinstance(yaml.safe_load(value), (str, list))
    except yaml.YAMLError:
        return False


def _allowed_keys(parent: str, config_name: str, overrides: Sequence[str]) -> list[str]:
    """The keys beside the refused one, from a config composed with the chosen options only; empty if that fails too."""
    search_path = [word for word in overrides if word.startswith(_SEARCH_PATH)]
    group_choices = [word for word in overrides if re.fullmatch(r"[A-Za-z_]+=[\w./-]+", word)]
    GlobalHydra.instance().clear()
    for words in ([*search_path, *group_choices], search_path):
        try:
            with initialize_config_module("dispark.conf", version_base="1.3"):
                cfg = compose(config_name, overrides=words)
        except (HydraException, OmegaConfBaseException):
            continue
        node = OmegaConf.select(cfg, parent) if parent else cfg
        return [str(key) for key in node if key != "_target_"] if isinstance(node, DictConfig) else []
    return []


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""A config node against the constructor that its `_target_` names, before anything is built.

Importing the constructor, its settings' names, those it can't do without, and their types: each mistake is one line
that starts with the key. What a constructor refuses by itself comes through `readable`, which puts the key before it.
Nodes here are plain dicts with every interpolation resolved.

It builds nothing and doesn't know the groups.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, resources
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import hydra
from hydra.errors import InstantiationException

from dispark.hints import accepts, describe, is_node_hint, members, parameter_hints, shown, suggest

_MACHINERY = ("<frozen ", __file__, str(Path(hydra.__file__).parent), str(Path(importlib.__file__).parent))
_ENDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def join(*parts: str) -> str:
    """The parts of a key that are not empty, joined by dots."""
    return ".".join(part for part in parts if part)


def check_node(node: Mapping[str, Any], key: str = "") -> None:
    """Checks a node that has a `_target_`, then those inside it.

    Args:
        node: the plain node.
        key: where it stands in the config; empty if nobody knows.

    Raises:
        ValueError: the first mistake found, in one line.
    """
    target = node["_target_"]
    constructor = target if callable(target) else locate(target, join(key, "_target_"))
    settings = {str(name): value for name, value in node.items() if not re.fullmatch(r"_\w+_", str(name))}
    hints = _hints(constructor)
    if hints is not None:
        is_whole = "_args_" not in node and not node.get("_partial_")
        _check_names(settings, inspect.signature(constructor).parameters, str(target), key, is_whole)
    hints = hints or {}
    for name, value in settings.items():
        if name in hints and not accepts(value, hints[name]):
            raise ValueError(refusal(join(key, name), value, hints[name]))
    if node.get("_recursive_", True):
        for name, value in settings.items():
            for inner_key, inner in _inner_nodes(value, join(key, name)):
                check_node(inner, inner_key)


def refusal(key: str, value: Any, hint: Any) -> str:
    """The line for a setting of the wrong type."""
    line = f"{key}={shown(value)}: must be {describe(hint)}"
    alternatives = members(hint)
    if str in alternatives and isinstance(value, (bool, int, float)):
        return f"{line}; as text: '{key}=\"{shown(value)}\"'"
    if isinstance(value, str) and any(map(is_node_hint, alternatives)) and (groups := _groups_with(value)):
        return f"{line}; an option of a group is chosen with {' or '.join(f'+{g}@{key}={value}' for g in groups)}"
    return line


def locate(path: Any, key: str) -> Callable[..., Any]:
    """Imports what a `_target_` names.

    Raises:
        ValueError: it can't be imported, is not there or can't be called; an error inside the module is named with its
            type, message, file and line.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{key}={shown(path)}: must be a dotted name, as package.module.Class")
    first, *rest = path.split(".")
    name, found = first, _import(first, path, key)
    for part in rest:
        folders = getattr(found, "__path__", None)
        if hasattr(found, part):
            found = getattr(found, part)
        elif folders is not None and importlib.util.find_spec(f"{name}.{part}") is not None:
            found = _import(f"{name}.{part}", path, key)
        else:
            known = [*(module.name for module in iter_modules(folders or ())), *dir(found)]
            near = difflib.get_close_matches(part, known, n=1)
            raise ValueError(f"{key}={path}: {name} has no {part}{f'; did you mean {near[0]}?' if near else ''}")
        name = f"{name}.{part}"
    if not callable(found):
        raise ValueError(f"{key}={path}: is a {type(found).__name__}; must name a class or a function")
    return found


def readable(error: InstantiationException, node: Mapping[str, Any], group: str, own_key: str) -> Exception:
    """What to raise in place of Hydra's error: the user's mistake as a ValueError, anything else as it was.

    Args:
        error: Hydra's.
        node: the plain node that was being built.
        group: where the node stands, for messages.
        own_key: what Hydra calls the node, the start of the keys it reports.
    """
    reported = (re.findall(r"full_key: (\S+)", str(error)) or [own_key])[-1].removeprefix(own_key).lstrip(".")
    # OmegaConf leaves the brackets out: `a.b0` for `a.b[0]`.
    nodes = {re.sub(r"[\[\]]", "", key): (key, inner) for key, inner in _all_nodes(node)}
    inner_key, inner = nodes.get(re.sub(r"[\[\]]", "", reported), ("", node))
    label = join(group, inner_key)
    target = str(inner.get("_target_"))
    root = error.__cause__
    if root is None:
        return ValueError(f"{label or target}: {' '.join(str(error).split())}")
    if isinstance(root, TypeError):
        text = f"{target} cannot use these settings ({_typed(root)}{_place(root)})"
        return ValueError(f"{label}: {text}" if label else text)
    if isinstance(root, ValueError):
        return ValueError(_with_key(one_line(root), label, inner))
    return root if isinstance(root, Exception) else error


def one_line(error: BaseException) -> str:
    """An error's message in one line; its type where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _check_names(
    settings: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], target: str, key: str, is_whole: bool
) -> None:
    named = {n: p for n, p in parameters.items() if p.kind not in (*_ENDS, inspect.Parameter.POSITIONAL_ONLY)}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in settings:
        if name not in named and not takes_any:
            raise ValueError(f"{join(key, name)}: {target} has no such setting; {suggest(name, named)}")
    for name, parameter in named.items():
        if is_whole and parameter.default is parameter.empty and name not in settings:
            raise ValueError(f"{join(key, name)}: must be given, {target} needs it")


def _hints(constructor: Callable[..., Any]) -> dict[str, Any] | None:
    try:
        return parameter_hints(constructor)
    except (TypeError, ValueError):  # some builtins have no signature
        return None


def _inner_nodes(value: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield key, value
            return
        for name, item in value.items():
            yield from _inner_nodes(item, join(key, str(name)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _inner_nodes(item, f"{key}[{index}]")


def _all_nodes(node: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A node and every node inside it, with their keys."""
    yield key, node
    for name, value in node.items():
        for inner_key, inner in _inner_nodes(value, join(key, str(name))):
            yield from _all_nodes(inner, inner_key)


def _groups_with(option: str) -> list[str]:
    """The shipped groups that have an option of this name."""
    folders = (folder for folder in resources.files("dispark.conf").iterdir() if folder.is_dir())
    return sorted(folder.name for folder in folders if (folder / f"{option}.yaml").is_file())


def _import(name: str, path: str, key: str) -> Any:
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:  # a module without a main guard may end the process
        raise ValueError(f"{key}={path}: module {name} cannot be imported ({_typed(error)}{_place(error)})") from error


def _typed(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else one_line(error)}"


def _place(error: BaseException) -> str:
    """File and line of an error, outside this module, Hydra and the import system; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"; {error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_MACHINERY)]
    return f"; {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _with_key(message: str, label: str, node: Mapping[str, Any]) -> str:
    """Puts the node's key before a constructor's message, which may have one of its own.

    A constructor spells its settings as `size=3`, or with the group it is made for, as `target.size=3`, though the
    node may stand elsewhere (a target under `drafter.model`).
    """
    if not label or re.match(rf"{re.escape(label)}[=:.\[]", message):
        return message
    found = re.match(r"(\w+)(?:\.(\w+))?(?=[=:.\[])", message)
    if found and found.group(1) in node:
        return join(label, message)
    if found and found.group(2) in node:
        return join(label, message[found.start(2) :])
    has_key = re.match(rf"{re.escape(label.split('.')[0])}\b", message)
    return message if has_key else f"{label}: {message}"

"""What a constructor's annotations say about the settings it takes, and how a refusal reads.

Settings come from YAML or the command line, so they are null, booleans, numbers, strings, lists and mappings; objects
that are built already are nobody's mistake here and pass, as does every annotation that isn't in `accepts`. A boolean
is never a number, a whole number serves as a float, and a string is never a list: Python would take it for its letters.

It knows neither configs nor keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

_PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, dict)
_UNIONS = (typing.Union, types.UnionType)
_LISTS = (list, tuple, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_NOUNS: dict[Any, tuple[str, str]] = {
    type(None): ("null", "nulls"),
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a path", "paths"),
    PurePath: ("a path", "paths"),
}


def accepts(value: Any, hint: Any) -> bool:
    """Whether a setting fits an annotation; what can't be told fits."""
    if not isinstance(value, _PLAIN) or (isinstance(value, Mapping) and "_target_" in value):
        return True
    hint, origin, arguments = _parts(hint)
    if origin in _UNIONS:
        return any(accepts(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(argument) and value == argument for argument in arguments)
    if hint in (None, type(None)):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    if hint in (str, Path, PurePath):
        return isinstance(value, str)
    if origin is abc.Callable:
        return False
    if origin in _LISTS:
        return isinstance(value, (list, tuple)) and _fits_items(value, origin, arguments)
    if origin in _MAPPINGS:
        if not isinstance(value, dict):
            return False
        of_key, of_value = arguments or (Any, Any)
        return all(accepts(key, of_key) and accepts(item, of_value) for key, item in value.items())
    return not is_node_hint(hint)


def is_node_hint(hint: Any) -> bool:
    """Whether an annotation stands for settings of its own: a dataclass, which only a `_target_` can make."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; of anything else, itself."""
    hint, origin, arguments = _parts(hint)
    return arguments if origin in _UNIONS else (hint,)


def describe(hint: Any) -> str:
    """An annotation for a reader: "a whole number, or null", "a list of strings"."""
    parts = members(hint)
    words = dict.fromkeys(_noun(part, 0) for part in parts if part not in (None, type(None)))
    if "a path" in words:
        words.pop("a string", None)
    text = " or ".join(words)
    if None not in parts and type(None) not in parts:
        return text
    return f"{text}, or null" if text else "null"


def shown(value: Any, limit: int = 60) -> str:
    """A value as a YAML would spell it, cut to about `limit` characters."""
    text = _spelled(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def suggest(name: str, allowed: Iterable[str]) -> str:
    """The tail of an error message: the nearest allowed word, if one is near, and all of them."""
    words = sorted(set(allowed))
    near = difflib.get_close_matches(name, words, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}allowed: {', '.join(words) or 'nothing'}"


def parameter_hints(constructor: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a constructor's named parameters, evaluated; one that can't be evaluated becomes Any.

    Raises:
        ValueError, TypeError: the constructor has no signature, as some builtins.
    """
    hints = {}
    scopes = _scopes(constructor)
    for name, parameter in inspect.signature(constructor).parameters.items():
        hint = Any if parameter.annotation is parameter.empty else _evaluated(parameter.annotation, scopes)
        hints[name] = hint | None if parameter.default is None and hint is not Any else hint
    return hints


def _scopes(constructor: Any) -> list[dict[str, Any]]:
    """Where names in annotations may be known; a field that a dataclass inherits is spelled in its parent's module."""
    owners = constructor.__mro__ if isinstance(constructor, type) else (inspect.unwrap(constructor),)
    modules = (sys.modules.get(getattr(owner, "__module__", None) or "") for owner in owners)
    return [vars(module) for module in modules if module is not None]


def _evaluated(annotation: Any, scopes: Sequence[dict[str, Any]]) -> Any:
    # One at a time: a name that only type checkers import must not hide the other parameters' annotations.
    holder: Any = types.SimpleNamespace(__annotations__={"it": annotation})
    for scope in scopes:
        try:
            return typing.get_type_hints(holder, globalns=scope)["it"]
        except Exception:  # evaluating an annotation may raise anything
            continue
    return Any


def _parts(hint: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """An annotation without its wrappers, what it is made of, and its arguments."""
    while True:
        if hasattr(hint, "__supertype__"):  # NewType
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        elif typing.get_origin(hint) is typing.Annotated:
            hint = typing.get_args(hint)[0]
        else:
            return hint, typing.get_origin(hint) or hint, typing.get_args(hint)


def _fits_items(value: Sequence[Any], origin: Any, arguments: tuple[Any, ...]) -> bool:
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return len(value) == len(arguments) and all(map(accepts, value, arguments))
    return not arguments or all(accepts(item, arguments[0]) for item in value)


def _noun(hint: Any, number: int) -> str:
    """An annotation as a noun, in the singular (0) or the plural (1)."""
    hint, origin, arguments = _parts(hint)
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(_noun(argument, number) for argument in arguments))
    if origin is typing.Literal:
        return f"{'any' if number else 'one'} of {', '.join(map(shown, arguments))}"
    if hint in _NOUNS:
        return _NOUNS[hint][number]
    if origin is abc.Callable:
        return ("an object that can be called", "objects that can be called")[number]
    if origin in _LISTS:
        base = ("a list", "lists")[number]
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            return f"{base} of {len(arguments)}: {', '.join(_noun(argument, 0) for argument in arguments)}"
        return _with_items(base, arguments[0] if arguments else Any)
    if origin in _MAPPINGS:
        return _with_items(("a mapping", "mappings")[number], arguments[1] if arguments else Any)
    if is_node_hint(hint):
        return f"{('a node', 'nodes')[number]} with _target_: {hint.__module__}.{hint.__qualname__}"
    return ("an object", "objects")[number]


def _with_items(base: str, hint: Any) -> str:
    noun = _noun(hint, 1)
    return base if noun == "objects" else f"{base} of {noun}"


def _spelled(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_spelled, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_spelled(key)}: {_spelled(item)}' for key, item in value.items())}}}"
    return str(value) if value != "" else "''"

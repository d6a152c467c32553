"""Whether an object that a config named has all that a protocol of dispark.interfaces asks for.

Python looks for a method only when it is called, which may be minutes into a run. Signatures and what the methods do
are not looked at; tests/conformance does that for drafters.
"""

from __future__ import annotations

import inspect
import numbers
import typing
from typing import Any

from dispark.hints import accepts, describe, shown


def check_protocol(obj: Any, protocol: type, group: str) -> None:
    """Checks an object that was built from a config.

    Args:
        obj: the object.
        protocol: a protocol of dispark.interfaces.
        group: the config group that the object came from, for the message.

    Raises:
        ValueError: methods or attributes are missing, or an attribute is not what the protocol says, in one line.
    """
    kind = type(obj)
    where = f"{group}._target_={kind.__module__}.{kind.__qualname__}"
    hints = _attributes(protocol)
    methods = [
        name
        for owner in protocol.__mro__
        for name, member in vars(owner).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ]
    missing = [name for name in hints if not _has(obj, name)]
    missing += [f"{name}()" for name in methods if not callable(getattr(obj, name, None))]
    if missing:
        wanted = f"{protocol.__module__}.{protocol.__qualname__}"
        raise ValueError(f"{where}: lacks {', '.join(missing)}; a {group} needs what {wanted} lists")
    for name, hint in hints.items():
        try:
            value = getattr(obj, name)
        except Exception:  # a property that is known after `bind` only
            continue
        if wrong := _wrong(name, value, hint):
            raise ValueError(f"{where}: its {name}={shown(value)}: must be {wrong}")


def _attributes(protocol: type) -> dict[str, Any]:
    """Annotated attributes and properties, with their types."""
    found: dict[str, Any] = {}
    for owner in reversed(protocol.__mro__):
        if owner in (object, typing.Protocol, typing.Generic):
            continue
        found |= {name: Any for name in vars(owner).get("__annotations__", {}) if not name.startswith("_")}
        for name, member in vars(owner).items():
            if isinstance(member, property):
                found[name] = typing.get_type_hints(member.fget).get("return", Any)
    return found | {name: hint for name, hint in typing.get_type_hints(protocol).items() if name in found}


def _has(obj: Any, name: str) -> bool:
    try:
        getattr(obj, name)
    except AttributeError:
        return inspect.getattr_static(obj, name, None) is not None  # a property may fail before `bind`
    except Exception:
        return True
    return True


def _wrong(name: str, value: Any, hint: Any) -> str | None:
    """What an attribute must be instead, or None if it is well."""
    if name == "draft_length":
        return None if _is_whole(value) and value >= 0 else "a whole number >= 0"
    if name == "feature_layers":
        is_well = isinstance(value, tuple) and all(map(_is_whole, value))
        return None if is_well else "a tuple of whole numbers"
    return None if accepts(value, hint) else describe(hint)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)

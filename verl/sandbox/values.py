"""Values as JSON, between a program and its tests, and when two of them are equal. Runs in a sandbox: standard library
alone."""

from __future__ import annotations

import builtins
import importlib
import types

TYPE_CHECKING = False  # loading typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Classes whose objects travel by value; those that derive from a builtin class travel as that.
BY_VALUE = "range slice Fraction Decimal datetime date time timedelta timezone"
MODULES = ("builtins", "fractions", "decimal", "datetime", "collections")
#: Of collections, what they are made of.
COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "Counter": lambda counter: (dict(counter),),
    "OrderedDict": lambda ordered: (list(ordered.items()),),
    "deque": lambda items: (list(items), items.maxlen),
}
BASES = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value as JSON; what JSON does not have is a mapping of its kind to its content, `other` says how objects go."""
    kind: Any = type(value)
    if kind in (type(None), bool, float, str):
        return value
    if kind is int:  # longer ones are not for JSON, which a program's limit on digits holds for
        return value if -(1 << 63) < value < 1 << 63 else {"int": hex(value)}
    if kind in (list, tuple, set, frozenset):
        items = [encode(item, other) for item in value]
        return items if kind is list else {kind.__name__: items}
    if kind is dict:
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    if kind in (bytes, complex):
        return {kind.__name__: value.hex() if kind is bytes else [value.real, value.imag]}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        content = encode(value.tolist(), other)
        return {"array": [str(value.dtype), content]} if kind.__name__ == "ndarray" else content
    if kind in (type, types.BuiltinFunctionType) and vars(builtins).get(getattr(value, "__name__", "")) is value:
        return {"builtin": getattr(value, "__name__", "")}
    if kind.__module__ in MODULES and kind.__name__ in BY_VALUE.split():
        return {"made": [kind.__module__, kind.__name__, encode(value.__reduce_ex__(2)[1], other)]}
    if kind.__module__ == "collections" and kind.__name__ in COLLECTIONS:
        return {"made": [kind.__module__, kind.__name__, encode(COLLECTIONS[kind.__name__](value), other)]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"named": [kind.__name__, list(kind._fields), [encode(item, other) for item in value]]}
    base: Any = next((base for base in BASES if isinstance(value, base)), None)
    return other(value) if base is None else encode(base(value), other)


def decode(content: Any, other: Callable[[str, Any], Any]) -> Any:
    """The inverse of `encode`; `other(kind, inner)` gives the objects."""
    if isinstance(content, list):
        return [decode(item, other) for item in content]
    if not isinstance(content, dict):
        return content
    ((kind, inner),) = content.items()
    if kind in ("tuple", "set", "frozenset"):
        return getattr(builtins, kind)([decode(item, other) for item in inner])
    if kind == "dict":
        return {decode(key, other): decode(item, other) for key, item in inner}
    if kind == "int":
        return int(inner, 16)
    if kind in ("bytes", "complex"):
        return bytes.fromhex(inner) if kind == "bytes" else complex(*inner)
    if kind == "named":
        return importlib.import_module("collections").namedtuple(*inner[:2])(*decode(inner[2], other))
    if kind == "array":
        return importlib.import_module("numpy").array(decode(inner[1], other), dtype=inner[0])
    if kind == "made" and inner[0] in MODULES and inner[1] in (*BY_VALUE.split(), *COLLECTIONS):
        return getattr(importlib.import_module(inner[0]), inner[1])(*decode(inner[2], other))
    return other(kind, inner)


def alike(value: Any, wanted: Any) -> bool:
    """Whether two JSON values are equal, but for digits of a float that are beyond its precision."""
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(alike, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(alike(value[key], wanted[key]) for key in wanted)
    if type(wanted) is float and type(value) in (int, float) and value != wanted:
        return bool(abs(value - wanted) <= max(1e-9, 1e-6 * abs(wanted)) < float("inf"))
    return bool(value == wanted)

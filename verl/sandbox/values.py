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

#: Classes whose objects travel by value, as the arguments that make them; what derives from one of BASES, as that.
MODULES = {
    "builtins": "int tuple set frozenset dict bytes complex range slice",
    "collections": "Counter OrderedDict deque",
    "datetime": "datetime date time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
}
CLASSES = {name: module for module, names in MODULES.items() for name in names.split()}
#: Where these arguments are not those that `pickle` takes.
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "int": lambda number: (hex(number), 16),  # of a long one, which a program's limit on digits does not hold for
    "bytes": lambda text: (text.decode("latin-1"), "latin-1"),
    "complex": lambda number: (number.real, number.imag),
    "dict": lambda mapping: ([[*item] for item in mapping.items()],),
    "Counter": lambda counter: (dict(counter),),
    "OrderedDict": lambda ordered: (list(ordered.items()),),
    "deque": lambda items: (list(items), items.maxlen),
} | dict.fromkeys(("tuple", "set", "frozenset"), lambda items: (list(items),))
BASES = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value as JSON; what JSON does not have is a mapping of its kind to its content, `other` says how objects go."""
    kind: Any = type(value)
    name = kind.__name__
    if kind in (type(None), bool, float, str) or (kind is int and -(1 << 63) < value < 1 << 63):
        return value
    if kind is list:
        return [encode(item, other) for item in value]
    if CLASSES.get(name) == kind.__module__:
        args = ARGUMENTS[name](value) if name in ARGUMENTS else value.__reduce_ex__(2)[1]
        return {name: [encode(item, other) for item in args]}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        content = encode(value.tolist(), other)
        return {"array": [str(value.dtype), content]} if name == "ndarray" else content
    if kind in (type, types.BuiltinFunctionType) and vars(builtins).get(getattr(value, "__name__", "")) is value:
        return {"builtin": getattr(value, "__name__", "")}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"named": [name, list(kind._fields), [encode(item, other) for item in value]]}
    base: Any = next((base for base in BASES if isinstance(value, base)), None)
    return other(value) if base is None else encode(base(value), other)


def decode(content: Any, other: Callable[[str, Any], Any]) -> Any:
    """The inverse of `encode`; `other(kind, inner)` gives the objects."""
    if isinstance(content, list):
        return [decode(item, other) for item in content]
    if not isinstance(content, dict):
        return content
    ((kind, inner),) = content.items()
    if kind in CLASSES:
        return getattr(importlib.import_module(CLASSES[kind]), kind)(*decode(inner, other))
    if kind == "named":
        return importlib.import_module("collections").namedtuple(*inner[:2])(*decode(inner[2], other))
    if kind == "array":
        return importlib.import_module("numpy").array(decode(inner[1], other), dtype=inner[0])
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

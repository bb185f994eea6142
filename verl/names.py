"""Names that users give: of their classes and functions, so that settings can say them, and of what these return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from verl.errors import ConfigError

T = TypeVar("T")


def give_name(known: dict[str, Any], what: str, name: str, thing: Any) -> None:
    """Note a class or function under a name. One of the same name and module replaces its earlier definition (a
    notebook cell run twice).

    Args:
        known: what there is of its kind, by name: the thing, or module and name of one that is not imported yet.
        what: the kind, for the message.

    Raises:
        ConfigError: the name belongs to another.
    """
    there = known.get(name, thing)
    owner, wanted = (
        each if isinstance(each, str) else f"{each.__module__}.{each.__qualname__}" for each in (there, thing)
    )
    if owner != wanted:
        raise ConfigError(f"{what} name '{name}' is taken by {owner}: choose another")
    known[name] = thing


def disjoint(who: str, *parts: Mapping[str, T]) -> dict[str, T]:
    """All of these as one mapping.

    Args:
        who: whose parts they are, for the message.

    Raises:
        ConfigError: two of them have one name.
    """
    whole: dict[str, T] = {}
    for part in parts:
        if twice := sorted(whole.keys() & part.keys()):
            raise ConfigError(f"{who} is called '{twice[0]}', and another one is, too: give one of them another name")
        whole.update(part)
    return whole

"""Names that users give: of their classes and functions, so that settings can say them, and of what these return."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from verl.errors import ConfigError, nearest

T = TypeVar("T")


def give_name(known: dict[str, Any], what: str, name: str, thing: Any) -> None:
    """Note a class or function under a name. One of the same name and module replaces its earlier definition (a
    notebook cell run twice).

    Args:
        known: registered names of this kind: the thing, or module and name of one that is not imported yet.
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


def check_known(
    what: str, names: Iterable[Any], known: Collection[Any], error: type[Exception] = ConfigError, hint: str = ""
) -> None:
    """Look up names that a user wrote: of layers, tasks, metrics.

    Args:
        what: begins the message, before the name.
        known: the names there are.
        hint: ends it.

    Raises:
        error: one of the names is not known; with the nearest one that is.
    """
    for name in names:
        if name not in known:
            raise error(f"{what} {repr(name)[:80]}: {nearest(name, map(str, known))}{hint}")


def check_logged(what: str, name: str, record: Collection[str]) -> None:
    """Look up the name of a metric in the record of a step.

    Raises:
        ConfigError: it is misspelt, by a name that is there. Metrics of evaluations and of tasks come later.
    """
    section = name.rpartition("/")[0]
    has_section = any(key.startswith(f"{section}/") for key in record)
    if (has_section or section.partition("/")[0] not in ("eval", "task")) and get_close_matches(name, record, 1, 0.8):
        check_known(what, [name], record)


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

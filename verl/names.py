"""Names that users give their classes and functions, so that settings can say them."""

from __future__ import annotations

from typing import Any

from verl.errors import ConfigError


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

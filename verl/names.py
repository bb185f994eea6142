"""Names that users give their classes and functions, so that settings can say them."""

from __future__ import annotations

from typing import Any

from verl.errors import ConfigError


def give_name(known: dict[str, Any], what: str, name: str, thing: Any) -> None:
    """Note a class or function under a name. One of the same name and module replaces its earlier definition (a
    notebook cell run twice).

    Args:
        known: what there is of its kind, by name.
        what: the kind, for the message.

    Raises:
        ConfigError: the name belongs to another.
    """
    there = known.get(name)
    if there is not None and (there.__module__, there.__qualname__) != (thing.__module__, thing.__qualname__):
        raise ConfigError(f"{what} name '{name}' is taken by {there.__module__}.{there.__qualname__}: choose another")
    known[name] = thing

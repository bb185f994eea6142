"""Which call takes a keyword that was given to another one, for messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

#: Names of other libraries, and of settings files.
_OTHERS = {"total_steps": "steps", "max_steps": "steps", "learning_rate": "lr", "eval_every": "every"}
#: How public calls are shown, such as "fit({}=...)", and the names of their keywords. The root of the package, which
#: alone may import all of them, sets it.
public_calls: Callable[[], Iterable[tuple[str, set[str]]]] = tuple


def takes(keyword: str, owner: str = "") -> str:
    """The phrase that ends a message about a keyword that a call other than `owner` takes; empty: none does."""
    name = _OTHERS.get(keyword, keyword)
    calls = (call for call, names in public_calls() if name in names and not call.startswith(f"{owner}("))
    return next((f"it goes to {call.format(name)}" for call in calls), "")

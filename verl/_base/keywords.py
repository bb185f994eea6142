"""Which call takes a keyword that was given to another one, for messages."""

from __future__ import annotations

from importlib import import_module

#: Names of other libraries, and of settings files.
_OTHERS = {"total_steps": "steps", "max_steps": "steps", "learning_rate": "lr", "eval_every": "every"}


def takes(keyword: str, owner: str = "") -> str:
    """The phrase that ends a message about a keyword that a call other than `owner` takes; empty: none does."""
    name = _OTHERS.get(keyword, keyword)
    # Imported by name: it knows all constructors, and they import this.
    public_calls = import_module("verl.trainer.calls").public_calls
    calls = (call for call, names in public_calls() if name in names and not call.startswith(f"{owner}("))
    return next((f"it goes to {call.format(name)}" for call in calls), "")

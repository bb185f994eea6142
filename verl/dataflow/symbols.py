"""The names in an expression of a step; see `verl.trainer.expression`."""

from __future__ import annotations

from typing import NamedTuple


class Symbol(NamedTuple):
    """An argument of a call in an expression; it stands for columns of the batch that nobody has computed yet.

    Attributes:
        method: the one that moves it.
    """

    name: str
    method: str


prompts = Symbol("prompts", "broadcast")
responses = Symbol("responses", "scatter")
experience = Symbol("experience", "gather")
advantages = Symbol("advantages", "all_reduce")
updates = Symbol("updates", "scatter")
#: In the order in which they come about.
ORDER = (prompts, responses, experience, advantages, updates)

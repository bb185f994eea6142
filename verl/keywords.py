"""Which call takes a keyword that was given to another one, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

#: Names of other libraries, and of settings files.
_OTHERS = {"total_steps": "steps", "max_steps": "steps", "learning_rate": "lr", "eval_every": "every"}


def takes(keyword: str, owner: str = "") -> str:
    """The phrase that ends a message about a keyword that a call other than `owner` takes; empty: none does."""
    name = _OTHERS.get(keyword, keyword)
    calls = (call for call, names in _calls() if name in names and not call.startswith(f"{owner}("))
    return next((f"it goes to {call.format(name)}" for call in calls), "")


def _calls() -> Iterator[tuple[str, set[str]]]:
    from verl.algorithms import algorithm_names, make_algorithm
    from verl.rewards.functions import FunctionReward, OnFailure
    from verl.roles.settings import handle_keywords
    from verl.trainer.asynchronous import AsyncTrainer
    from verl.trainer.evaluation import HeldOut
    from verl.trainer.interleaved import InterleavedTrainer
    from verl.trainer.trainer import Trainer

    yield "fit({}=...)", _parameters(Trainer.fit)
    yield "Actor(MODEL, {}=...)", handle_keywords()
    for trainer in (Trainer, AsyncTrainer, InterleavedTrainer):
        yield f"{trainer.__name__}(ACTOR, {{}}=...)", _parameters(trainer)
    yield "Reward(FUNCTION, {}=...)", _parameters(FunctionReward) | {*OnFailure.__annotations__}
    yield "HeldOut(ROWS, {}=...)", _parameters(HeldOut)
    kinds = {type(make_algorithm(name)) for name in algorithm_names()}
    yield "Trainer(ACTOR, {}=...)", set().union(*map(_parameters, kinds))


def _parameters(call: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(call).parameters} - {"self", "rows", "source", "options", "args"}

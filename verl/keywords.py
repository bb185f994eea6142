"""Which call takes a keyword that was given to another one, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

#: Names of other libraries, and of settings files.
_OTHERS = {"total_steps": "steps", "max_steps": "steps", "learning_rate": "lr", "eval_every": "every"}


def takes(keyword: str) -> str:
    """The phrase that ends a message about a keyword that another call takes; empty: none does."""
    name = _OTHERS.get(keyword, keyword)
    return next((f"it goes to {call.format(name)}" for call, names in _calls() if name in names), "")


def _calls() -> Iterator[tuple[str, set[str]]]:
    from verl.rewards.functions import FunctionReward, OnFailure
    from verl.roles.settings import handle_keywords
    from verl.trainer.asynchronous import AsyncTrainer
    from verl.trainer.evaluation import HeldOut
    from verl.trainer.interleaved import InterleavedTrainer
    from verl.trainer.trainer import Trainer

    yield "fit(PROMPTS, {}=...)", _parameters(Trainer.fit)
    yield "Actor(MODEL, {}=...)", handle_keywords()
    for trainer in (Trainer, AsyncTrainer, InterleavedTrainer):
        yield f"{trainer.__name__}(ACTOR, {{}}=...)", _parameters(trainer)
    yield "Reward(FUNCTION, {}=...)", _parameters(FunctionReward) | {*OnFailure.__annotations__}
    yield "HeldOut(ROWS, {}=...)", _parameters(HeldOut)


def _parameters(call: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(call).parameters} - {"self", "prompts", "rows", "source", "options", "args"}

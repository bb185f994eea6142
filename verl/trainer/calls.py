"""The keywords of public calls, for messages about a keyword that was given to the wrong one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from verl.algorithms import algorithm_names, make_algorithm
from verl.rewards.functions import FunctionReward
from verl.roles.settings import ACTOR_KEYWORDS
from verl.trainer.asynchronous import AsyncTrainer
from verl.trainer.evaluation import HeldOut
from verl.trainer.interleaved import InterleavedTrainer
from verl.trainer.options import KEYWORDS
from verl.trainer.trainer import Trainer


def public_calls() -> Iterator[tuple[str, set[str]]]:
    """How each is shown, "fit({}=...)", and the names of its keywords."""
    yield "fit({}=...)", _parameters(Trainer.fit)
    yield "Actor(MODEL, {}=...)", {"optim", "strategy", *ACTOR_KEYWORDS}
    for trainer in (Trainer, AsyncTrainer, InterleavedTrainer):
        yield f"{trainer.__name__}(ACTOR, {{}}=...)", _parameters(trainer) | KEYWORDS
    yield "Reward(FUNCTION, {}=...)", _parameters(FunctionReward)
    yield "HeldOut(ROWS, {}=...)", _parameters(HeldOut)
    kinds = {type(make_algorithm(name)) for name in algorithm_names()}
    yield "Trainer(ACTOR, {}=...)", set().union(*map(_parameters, kinds))


def _parameters(call: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(call).parameters} - {"self", "rows", "source", "options", "keywords"}

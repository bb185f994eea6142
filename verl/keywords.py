"""Which call takes a keyword that was given to another one, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

#: Names of other libraries, and of settings files.
_OTHERS = {
    "total_steps": "steps",
    "max_steps": "steps",
    "num_steps": "steps",
    "total_training_steps": "steps",
    "learning_rate": "lr",
    "num_generations": "n",
    "eval_every": "every",
    "eval_steps": "every",
    "save_steps": "save_every",
}


def takes(keyword: str) -> str:
    """The phrase that ends a message about a keyword that another call takes; empty: none does."""
    name = _OTHERS.get(keyword, keyword)
    return next((f"it goes to {call.format(name)}" for call, names in _calls() if name in names), "")


def _calls() -> Iterator[tuple[str, set[str]]]:
    import verl
    from verl.rewards.functions import FunctionReward, OnFailure
    from verl.roles.settings import handle_keywords
    from verl.trainer.evaluation import HeldOut

    yield "fit(PROMPTS, {}=...)", _parameters(verl.Trainer.fit)
    yield "Actor(MODEL, {}=...)", handle_keywords()
    for trainer in (verl.Trainer, verl.AsyncTrainer, verl.InterleavedTrainer):
        yield f"{trainer.__name__}(ACTOR, {{}}=...)", _parameters(trainer)
    yield "Reward(FUNCTION, {}=...)", _parameters(FunctionReward) | {*OnFailure.__annotations__}
    yield "HeldOut(ROWS, {}=...)", _parameters(HeldOut)


def _parameters(call: object) -> set[str]:
    return {*inspect.signature(call).parameters} - {"self", "prompts", "rows", "source", "options", "args"}  # type: ignore[arg-type]

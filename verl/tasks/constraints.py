"""From a task's `constraint_model` and `constraint_config` to what its responses are sampled under."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from verl.errors import ConfigError
from verl.rollout.constrained import ConstrainedEpisode
from verl.rollout.grammar import Grammar
from verl.rollout.guards import make_guard
from verl.user_functions import load_function

_GRAMMARS: dict[str, Callable[[Any], Grammar]] = {
    "regex": Grammar.regex,
    "json_schema": Grammar.json_schema,
    "ebnf": Grammar.ebnf,
}
#: Options of `constraint_config` that are the episode's.
_OF_THE_EPISODE = ("max_resamples", "deadline")


def make_constraint(model: str, **config: Any) -> ConstrainedEpisode:
    """The episode of a constraint.

    Args:
        model: "regex", "json_schema" or "ebnf", a grammar whose text or schema is the option `grammar`; a registered
            guard, such as "fact_checker" (`GuardModel`); or FILE.py:NAME of `accept(text, row)`, plain or async, or of
            a class whose objects are a `Guard` or such a function.
        **config: `max_resamples` and `deadline` of `ConstrainedEpisode`; the others are the grammar's or guard's.

    Raises:
        ConfigError: there is no such guard, or it does not take these options.
    """
    limits = {name: config.pop(name) for name in _OF_THE_EPISODE if name in config}
    if model in _GRAMMARS:
        if config.keys() != {"grammar"}:
            raise ConfigError(f"constraint '{model}' takes grammar, max_resamples and deadline, not {sorted(config)}")
        return ConstrainedEpisode(grammar=_GRAMMARS[model](config["grammar"]), **limits)
    check = _from_file(model, config) if ":" in model else make_guard(model, **config)
    return ConstrainedEpisode(**({"guard": check} if hasattr(check, "every") else {"accept": check}), **limits)


def _from_file(spec: str, options: dict[str, Any]) -> Any:
    constraint = load_function(spec)
    if not inspect.isclass(constraint):
        if options:
            raise ConfigError(f"{spec} is a function, which takes no options: not {sorted(options)}")
        return constraint
    try:
        return constraint(**options)
    except TypeError as error:
        raise ConfigError(f"{spec}: {error}") from error

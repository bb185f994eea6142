"""Makes a `RewardSource` from what users pass as a reward."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, nearest, shown
from verl.keywords import takes
from verl.rewards.functions import OnFailure
from verl.rewards.registry import REWARDS, registered
from verl.rewards.source import RewardSource, source_of
from verl.user_functions import split_spec

_TASK = ("reasoning_gym", "TaskReward")
#: Module and class of rewards that take no more than their options.
_BY_NAME = {"task": _TASK, "reasoning_gym": _TASK, "math": ("maths", "MathReward")}


def make_reward(source: Any, **options: Any) -> RewardSource:
    """A `RewardSource` from one of many things.

    Args:
        source: a `RewardSource`, or the `Reward` that holds one; a function (`FunctionReward`); "FILE.py:FUNCTION"; a
            name that is registered (`register_reward`); "task" (or "reasoning_gym"), the verifier of a procedural task;
            "code" (or "code_evaluator"), tests in a sandbox (`CodeReward`) or, with evaluator="codebleu", likeness to a
            reference (`CodeBleuReward`); "math", by math-verify (`MathReward`); a reward model or its directory or name
            (`RewardModel`), which is also "rm_hf" with the option `model_name`; the address, or a list of addresses, of
            a scoring service (`RemoteReward`) or, with the option `template`, of an LLM judge (`JudgeReward`). Or
            several of these, of which it makes the weighted sum (`CompositeReward`): a list, or a mapping of names to
            sources, to `(source, weight)`, or to `{"source": ..., "weight": ..., **options}`.
        **options: of the source, or of each of several. `smoothing` (`Smoothed`) is for all kinds.

    Raises:
        ConfigError: it is none of these, or has no such option.
    """
    if isinstance(source, Mapping) and "source" in source:
        return make_reward(**{**options, **source})
    smoothing = options.pop("smoothing", None)
    reward = _make(source, options)
    if smoothing is not None:
        from verl.rewards.smoothing import Smoothed

        reward = Smoothed(reward, smoothing)
    return reward


def _make(source: Any, options: dict[str, Any]) -> RewardSource:
    source = source_of(source)
    if isinstance(source, RewardSource):
        if options:
            raise ConfigError(f"reward '{source.name}' is made already: it takes no options, not {sorted(options)}")
        return source
    if _is_address(source):
        kind = "JudgeReward" if "template" in options else "RemoteReward"
        return _build("remote", kind, options, source)
    if isinstance(source, Mapping | list | tuple):
        from verl.rewards.composite import CompositeReward

        return CompositeReward(source, make_reward, **options)
    is_path = isinstance(source, str | os.PathLike)
    if is_path and split_spec(str(source))[0].suffix == ".py" and not os.path.isdir(source):
        return _build("functions", "FunctionReward", options, str(source))
    if isinstance(source, str) and (reward := registered(source)) is not None:
        return _make(_called(reward, source, options), options)
    if isinstance(source, str) and source in _BY_NAME:
        return _build(*_BY_NAME[source], options)
    if isinstance(source, str) and source == "data_source":
        from verl.rewards.by_source import score_by_source

        return _build("functions", "FunctionReward", options, score_by_source)
    if isinstance(source, str) and source == "rm_hf":
        if "model_name" not in options:
            raise ConfigError(
                "reward 'rm_hf' needs model_name, a directory or a name (in a run of one task: reward.model)"
            )
        return _build("model", "RewardModel", options, options.pop("model_name"))
    if isinstance(source, str) and source in REWARDS:
        return _code(options)
    if isinstance(source, str) and (name := misspelt(source)):
        raise ConfigError(f"no reward is called '{source}': did you mean '{name}'?")
    if is_path or hasattr(source, "forward"):
        return _build("model", "RewardModel", options, source)
    if callable(source):
        return _build("functions", "FunctionReward", options, source)
    raise ConfigError(
        f"a reward cannot be made from a {type(source).__name__}: pass a function, FILE.py:FUNCTION, a reward model, "
        "or a mapping of names to these"
    )


def _called(reward: Any, name: str, options: dict[str, Any]) -> Any:
    """A registered function as it is, or an object of a registered class, made with its own options, which are taken
    out of `options`. What is called `name` is called so in messages, too."""
    if inspect.isclass(reward):
        chosen = {option: options.pop(option) for option in inspect.signature(reward).parameters if option in options}
        try:
            reward = reward(**chosen)
        except TypeError as error:
            raise ConfigError(f"reward '{name}': {error}") from error
    if not isinstance(reward, RewardSource):
        options.setdefault("name", name)
    return reward


def _code(options: dict[str, Any]) -> RewardSource:
    evaluator = options.pop("evaluator", "tests")
    if evaluator not in ("tests", "codebleu"):
        raise ConfigError(f"reward 'code_evaluator': evaluator is tests or codebleu, not {shown(evaluator)}")
    return _build(*{"tests": ("code", "CodeReward"), "codebleu": ("codebleu", "CodeBleuReward")}[evaluator], options)


def _build(module: str, name: str, options: dict[str, Any], *source: Any) -> RewardSource:
    kind = getattr(importlib.import_module(f"verl.rewards.{module}"), name)
    known = {*inspect.signature(kind).parameters, *OnFailure.__annotations__} - {"source", "options"}
    workers = options.get("workers")
    if workers and not callable(workers):
        raise ConfigError(f"{name}: workers are given to the Reward, not to one of its parts")
    workers = None if "workers" in known else options.pop("workers", None)
    for option in options:
        if option not in known:
            raise ConfigError(f"{name} has no option '{option}': {takes(option) or nearest(option, known)}")
    if workers:
        from verl.rewards.portable import in_workers

        return in_workers(kind, source, options, workers)
    return kind(*source, **options)  # type: ignore[no-any-return]


def misspelt(source: str) -> str | None:
    """The built-in reward with a similar name, if any. Names of models on a hub have an owner, "owner/name"."""
    close = [] if Path(source).exists() else difflib.get_close_matches(source, REWARDS, n=1, cutoff=0.8)
    return close[0] if close else None


def _is_address(source: Any) -> bool:
    addresses = [source] if isinstance(source, str) else source if isinstance(source, list | tuple) else []
    return bool(addresses) and all(isinstance(a, str) and a.startswith(("http://", "https://")) for a in addresses)

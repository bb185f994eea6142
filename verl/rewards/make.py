"""Makes a `RewardSource` from what users pass as a reward."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from verl._base.keywords import takes
from verl._host.user_functions import split_spec
from verl.errors import ConfigError, nearest, shown
from verl.rewards.composite import CompositeReward, Smoothed
from verl.rewards.functions import PASSED_ON, FunctionReward
from verl.rewards.registry import REWARDS
from verl.rewards.source import RewardSource, source_of


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
        ConfigError: no reward can be made of it, or it has no such option.
    """
    if isinstance(source, Mapping) and "source" in source:
        return make_reward(**{**options, **source})
    smoothing = options.pop("smoothing", None)
    reward = _make(source, options)
    return reward if smoothing is None else Smoothed(reward, smoothing)


def _make(source: Any, options: dict[str, Any]) -> RewardSource:
    source = source_of(source)
    if isinstance(source, RewardSource):
        if options:
            raise ConfigError(f"reward '{source.name}' is made already: it takes no options, not {sorted(options)}")
        return source
    addresses = [source] if isinstance(source, str) else source if isinstance(source, list | tuple) else []
    if addresses and all(isinstance(one, str) and one.startswith(("http://", "https://")) for one in addresses):
        return _build(f"verl.rewards.remote:{'Judge' if 'template' in options else 'Remote'}Reward", options, source)
    if isinstance(source, Mapping | list | tuple):
        return CompositeReward(source, make_reward, **options)
    is_path = isinstance(source, str | os.PathLike)
    if is_path and split_spec(str(source))[0].suffix == ".py" and not os.path.isdir(source):
        return _build(FunctionReward, options, str(source))
    if isinstance(source, str) and source in REWARDS:
        return _named(source, options)
    is_name = isinstance(source, str) and not os.path.exists(source)
    # Names of models on a hub are not close to these: they have an owner, "owner/name".
    if is_name and (close := difflib.get_close_matches(source, REWARDS, n=1, cutoff=0.8)):
        raise ConfigError(f"no reward is called '{source}': did you mean '{close[0]}'?")
    if is_path or hasattr(source, "forward"):
        return _build(REWARDS["rm_hf"], options, source)
    if callable(source):
        return _build(FunctionReward, options, source)
    raise ConfigError(
        f"a reward cannot be made from a {type(source).__name__}: pass a function, FILE.py:FUNCTION, a reward model, "
        "or a mapping of names to these"
    )


def _named(name: str, options: dict[str, Any]) -> RewardSource:
    """A built-in reward; or a registered one: a function, or an object of a class, made with its own options, which are
    taken out of `options`. Messages use its `name`, too."""
    reward: Any = REWARDS[name]
    if name == "rm_hf":
        if "model_name" not in options:
            raise ConfigError(
                "reward 'rm_hf' needs model_name, a directory or a name (in a run of one task: reward.model)"
            )
        return _build(reward, options, options.pop("model_name"))
    if name in ("code", "code_evaluator") and (evaluator := options.pop("evaluator", "tests")) != "tests":
        if evaluator != "codebleu":
            raise ConfigError(f"reward 'code_evaluator': evaluator is tests or codebleu, not {shown(evaluator)}")
        reward = "verl.rewards.codebleu:CodeBleuReward"
    if name == "data_source":
        return _build(FunctionReward, options, resolve_name(reward))
    if isinstance(reward, str):
        return _build(reward, options)
    if inspect.isclass(reward):
        chosen = {option: options.pop(option) for option in inspect.signature(reward).parameters if option in options}
        try:
            reward = reward(**chosen)
        except TypeError as error:
            raise ConfigError(f"reward '{name}': {error}") from error
    if not isinstance(reward, RewardSource):
        options.setdefault("name", name)
    return _make(reward, options)


def _build(reward: type[FunctionReward] | str, options: dict[str, Any], *source: Any) -> FunctionReward:
    """A reward of some kind.

    Raises:
        ConfigError: it has no such option.
    """
    # The module of a built-in one is imported when it is chosen: some import torch or transformers.
    kind: type[FunctionReward] = resolve_name(reward) if isinstance(reward, str) else reward
    known = {*inspect.signature(kind).parameters, *PASSED_ON} - {"source", "options"}
    if options.get("workers") and not callable(options["workers"]):
        raise ConfigError(f"{kind.__name__}: workers are given to the Reward, not to one of its parts")
    for option in options:
        if option not in known:
            raise ConfigError(f"{kind.__name__} has no option '{option}': {takes(option) or nearest(option, known)}")
    return kind(*source, **options)

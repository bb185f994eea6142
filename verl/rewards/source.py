"""Where rewards come from: samples in, one optional number a sample out, each wait with a deadline.

A reward that cannot be had is null, with a reason: the sample abstains. It never becomes 0, never stalls the others.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from verl.batch import Batch
from verl.errors import ConfigError, RewardError


@dataclass
class RewardResult:
    """One entry a sample: the reward or None; named components; why a reward is missing, or is a default."""

    reward: list[float | None]
    components: dict[str, list[float | None]] = field(default_factory=dict)
    reasons: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reasons = self.reasons or [None] * len(self.reward)
        for length in (len(self.reasons), *map(len, self.components.values())):
            if length != len(self.reward):
                raise RewardError("rewards, reasons and components of one result must have one length")

    def as_batch(self) -> Batch:
        """Columns `reward`, `abstain_reason` and `reward/<component>`."""
        components = {f"reward/{name}": pa.array(values, pa.float64()) for name, values in self.components.items()}
        return Batch.from_columns({"reward": self.reward, "abstain_reason": self.reasons, **components})


@runtime_checkable
class RewardSource(Protocol):
    """Anything that scores samples. `whole_batch` says that a sample's score may depend on the others beside it."""

    name: str
    whole_batch: bool

    async def score(self, batch: Batch) -> RewardResult: ...


def make_reward(source: Any, **options: Any) -> RewardSource:
    """A `RewardSource` out of what users have.

    Args:
        source: one of: a `RewardSource`; a function (`FunctionReward`); "FILE.py:FUNCTION"; "task", the verifier of
            a procedural task's own problems; a reward model or its directory or name (`RewardModel`); or a list, or
            a mapping of names to any of these, alone, with a weight `(source, weight)`, or with options
            `{"source": ..., "weight": ..., ...}`: their weighted sum (`CompositeReward`).
        **options: of the source; for several, of each. `smoothing` (`Smoothed`) is for all kinds.

    Raises:
        ConfigError: it is none of these, or has no such option.
    """
    smoothing = options.pop("smoothing", None)
    reward = _make(source, options)
    if smoothing is not None:
        from verl.rewards.smoothing import Smoothed

        reward = Smoothed(reward, smoothing)
    return reward


def run_reward(source: RewardSource, batch: Batch, timeout: float | None = None) -> RewardResult:
    """`source.score(batch)` from synchronous code, a running event loop or not.

    Raises:
        RewardError: no result within `timeout` seconds (None: the source's own deadlines hold).
    """
    done: list[RewardResult | BaseException] = []

    def run() -> None:
        try:
            done.append(asyncio.run(source.score(batch)))
        except BaseException as error:  # handed to the caller, whatever it is
            done.append(error)

    thread = threading.Thread(target=run, name=f"score {source.name}", daemon=True)
    thread.start()
    thread.join(timeout)
    if not done:
        raise RewardError(
            f"reward '{source.name}' gave no result within {timeout:g} s: is one of its waits without end?"
        )
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def _make(source: Any, options: dict[str, Any]) -> RewardSource:
    from verl.rewards.composite import CompositeReward

    if isinstance(source, RewardSource):
        if options:
            raise ConfigError(f"reward '{source.name}' is made already: it takes no options {sorted(options)}")
        return source
    if isinstance(source, Mapping) and "source" in source:
        given = {**options, **{key: value for key, value in source.items() if key != "source"}}
        return _make(source["source"], given)
    if isinstance(source, Mapping | list | tuple):
        return CompositeReward(source, **options)
    if isinstance(source, str | os.PathLike) and _is_function_spec(str(source)):
        return _build("functions", "FunctionReward", str(source), options)
    if isinstance(source, str) and source == "task":
        return _build("reasoning_gym", "TaskReward", None, options)
    if isinstance(source, str | os.PathLike) or hasattr(source, "forward"):
        return _build("model", "RewardModel", source, options)
    if callable(source):
        return _build("functions", "FunctionReward", source, options)
    raise ConfigError(
        f"a reward cannot be made of a {type(source).__name__}: give a function, FILE.py:FUNCTION, a reward model, "
        "or a mapping of names to these"
    )


def _build(module: str, name: str, source: Any, options: dict[str, Any]) -> RewardSource:
    import importlib
    import inspect

    from verl.errors import nearest

    kind = getattr(importlib.import_module(f"verl.rewards.{module}"), name)
    known = [option for option in inspect.signature(kind).parameters if option != "source"]
    for option in options:
        if option not in known:
            raise ConfigError(f"{name} has no option '{option}': {nearest(option, known)}")
    return kind(**options) if source is None else kind(source, **options)  # type: ignore[no-any-return]


def _is_function_spec(text: str) -> bool:
    from verl.rewards.loading import split_spec

    return split_spec(text)[0].suffix == ".py" and not Path(text).is_dir()

"""Rewards of every kind in worker processes: what cannot be sent there (a model, a client of servers) is made there
from its class and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.rewards.functions import FunctionReward

if TYPE_CHECKING:
    from verl.rewards.calls import Caller

_OURS = ("default_reward", "max_failure_rate", "name")


class PortableFunction:
    """The function of a kind of reward, which is made where the function is called first.

    Args:
        kind: a subclass of `FunctionReward` with a method `scores`.
        source: its first argument, or nothing.
        options: its others.
    """

    def __init__(self, kind: type[FunctionReward], source: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kind, self.source, self.options = kind, source, options
        self.__name__ = kind.__name__
        self.judges = kind.judges
        parameters = list(inspect.signature(kind.scores).parameters.values())  # type: ignore[attr-defined]
        self.__signature__ = inspect.Signature(parameters[1:])
        self._function: Callable[..., Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        from verl.models.portable import PortableModel

        source = tuple(PortableModel(one) if hasattr(one, "forward") else one for one in self.source)
        return PortableFunction, (self.kind, source, self.options)

    def load(self) -> None:
        """Make the reward.

        Raises:
            ModelError, ConfigError: it cannot be made.
        """
        reward = self.kind(*(getattr(one, "model", one) for one in self.source), **self.options)
        self._function = reward.function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            self.load()
        assert self._function is not None
        return self._function(*args, **kwargs)


def in_workers(
    kind: type[FunctionReward], source: tuple[Any, ...], options: dict[str, Any], workers: Callable[..., Caller]
) -> FunctionReward:
    """A reward of some kind whose calls are made by workers.

    Args:
        kind, source, options: as `PortableFunction` takes them.
        workers: see `FunctionReward`.
    """
    defaults = inspect.signature(kind).parameters.items()
    values = {name: one.default for name, one in defaults if one.default is not one.empty} | options
    inner = {name: value for name, value in options.items() if name not in _OURS}
    if kind.has_own_retries:
        values["retries"] = 0
    else:
        inner.pop("retries", None)
    return FunctionReward(
        PortableFunction(kind, source, inner),
        timeout=kind.call_seconds(values),
        retries=values.get("retries", 0),
        batch_size=values.get("batch_size"),
        workers=workers,
        **{name: values[name] for name in _OURS if name in values},
    )

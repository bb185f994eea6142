"""`Task`: what an actor is trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.errors import ConfigError
from verl.roles.reward import Reward
from verl.rollout.base import SamplingParams


class Task:
    """An algorithm with its rewards and its way of sampling.

    Args:
        name: what errors and metrics call it.
        algorithm: a name, class or instance; None: the default of `make_algorithm`.
        sources: role ("reward", "cost") -> a `Reward`, or anything `Reward` takes.
        n: samples a prompt; None: what suits the algorithm (`BaseAlgorithm.samples_per_prompt`).
        share: of the prompts, relative to other tasks.
        loss_weight: of its loss, relative to other tasks.
        sampling: how responses are drawn; None: as the actor does.

    Raises:
        ConfigError: an unknown algorithm; a reward or cost that is missing, or that the algorithm does not have; an `n`
            that does not suit the algorithm.
    """

    def __init__(
        self,
        name: str = "main",
        algorithm: str | BaseAlgorithm | type[BaseAlgorithm] | None = None,
        sources: Mapping[str, Any] | None = None,
        *,
        n: int | None = None,
        share: float = 1.0,
        loss_weight: float = 1.0,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.share, self.loss_weight, self.sampling = name, share, loss_weight, sampling
        self.algorithm = make_algorithm(algorithm)
        given, roles = dict(sources or {}), self.algorithm.roles
        if extra := sorted(given.keys() - roles):
            raise ConfigError(f"algorithm '{self.algorithm.name}' has no {extra[0]}: leave {extra[0]}=... out")
        if self.algorithm.online and (lacking := {"reward", "cost"} & roles - given.keys()):
            role = max(lacking)
            raise ConfigError(f"algorithm '{self.algorithm.name}' needs a {role}: give the trainer {role}=...")
        #: Role -> where its numbers come from.
        self.sources = {r: source if isinstance(source, Reward) else Reward(source) for r, source in given.items()}
        check_counts(1, n=n)
        self.n = self.algorithm.samples_per_prompt if n is None else n
        self.algorithm.check_samples(self.n)


def only(tasks: Sequence[Task]) -> Task:
    """The one task of a list.

    Raises:
        ConfigError: there are none or several, or it is weighed against others.
    """
    if len(tasks) != 1:
        names = ", ".join(task.name for task in tasks) or "none"
        raise ConfigError(f"a trainer trains one task so far, and these are {len(tasks)}: {names}")
    (task,) = tasks
    if (task.share, task.loss_weight) != (1.0, 1.0):
        raise ConfigError(
            f"task '{task.name}' is the only one, with nothing to weigh it against: leave share and loss_weight out"
        )
    return task


def check_counts(least: int, **counts: Any) -> None:
    """Raises ConfigError for a count that is given and is no whole number of at least `least`."""
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, Integral) or count < least):
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {count!r}")

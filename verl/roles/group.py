"""`WorkerGroup`: the workers of several handles under one name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Concatenate

from verl._base.checked import hinted
from verl.algorithms import make_algorithm
from verl.cluster.group import P, R
from verl.errors import ConfigError
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.roles.updater import Updater
from verl.workers.actor import ActorWorker


@hinted
class WorkerGroup:
    """The workers of an actor and of its critic and reward: `WorkerGroup(actor)`, `WorkerGroup(actor, reward)`.

    Args:
        *handles: an `Actor`; with it a `Critic` and a `Reward`; or an `Updater`, which has actor and critics.

    Raises:
        ConfigError: something else is given, or two of a kind, or no actor.
    """

    def __init__(self, *handles: Any) -> None:
        kinds = {"actor": Actor, "critic": Critic, "reward": Reward, "updater": Updater}
        self._handles: dict[str, Any] = {}
        for handle in handles:
            kind = next((name for name, known in kinds.items() if isinstance(handle, known)), None)
            if kind is None or kind in self._handles:
                what = f"a second {kind}" if kind else f"a {type(handle).__name__}"
                raise ConfigError(
                    f"WorkerGroup got {what}: give an Actor, and with it a Critic and a Reward; or an Updater"
                )
            self._handles[kind] = handle
        if not {"actor", "updater"} & self._handles.keys():
            raise ConfigError("WorkerGroup has no actor: give an Actor or an Updater")
        self.actor: Actor = self._handles["actor"] if "actor" in self._handles else self._handles["updater"].actor
        #: What scores the samples of its actor, if there is one.
        self.reward: Reward | None = self._handles.get("reward")

    @cached_property
    def updater(self) -> Updater:
        """The updater, or else one for the actor's `algorithm`, by default GRPO."""
        if "updater" in self._handles:
            return self._handles["updater"]  # type: ignore[no-any-return]
        return Updater(make_algorithm(self.actor.algorithm), actor=self.actor, critic=self._handles.get("critic"))

    @property
    def size(self) -> int:
        """Ranks of the actor."""
        return self.actor.group.size

    def call(self, method: Callable[Concatenate[ActorWorker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call on the actor's ranks, see `verl.cluster.group.RankGroup`: `call(ActorWorker.exact_rollout)`."""
        return self.actor.group.call(method, *args, **kwargs)

"""Several tasks that do not wait for each other: a step trains on the tasks whose rewards have come.

Rollouts and updates of all tasks run one at a time on the actor of this process; while the rewards of one task are
waited for, the others are sampled and trained. A task's samples may then be some updates old: at most `max_staleness`,
which importance weights correct for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from pydantic import Field

from verl._base.checked import checked
from verl._base.record import Staleness
from verl.data.prefetch import Loader
from verl.data.task_loader import TaskLoader
from verl.dataflow.loop import begin
from verl.errors import ConfigError, TrainingError
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.trainer.task import Samples
from verl.trainer.tasks import check_corrected
from verl.trainer.trainer import Trainer

if TYPE_CHECKING:
    from verl.keywords import TrainerArguments


@dataclass(frozen=True)
class _Flight:
    """Samples of a task that are on their way.

    began: updates before their rollout.
    position: where the task's prompts began in the data.
    """

    future: Future[Samples]
    began: int
    position: dict[str, Any]


class InterleavedTrainer(Trainer):
    """`Trainer` with several tasks, for `fit(task_loader, steps)`.

    Args:
        max_staleness: updates between the begin of a sample's rollout and its own; one fewer than there are tasks lets
            all of them be on their way.
        **options: see `Trainer`.

    Raises:
        ConfigError: there is one task, or one whose algorithm does not correct for samples of an older policy.
    """

    @checked
    def __init__(
        self,
        actor: Actor | Any,
        critic: Critic | Any = None,
        *,
        max_staleness: Annotated[Staleness, Field(ge=1)] = 2,
        **options: Unpack[TrainerArguments],
    ) -> None:
        super().__init__(actor, critic, **options)
        for task in self.tasks.values():
            if not task.updater.name:  # a task alone has none
                raise ConfigError("interleaved training is of several tasks: for one, use AsyncTrainer")
            check_corrected(task.algorithm)
        self.max_staleness = max_staleness
        self._flights: dict[str, _Flight] = {}

    needs_previous_step = True

    def step(self, prompts: Any) -> dict[str, Any]:
        raise ConfigError("interleaved training draws prompts task by task: call fit(task_loader, n)")

    def fit(self, prompts: Any, steps: int | None = None, **of_rows: Any) -> dict[str, Any]:
        if not isinstance(prompts, TaskLoader):
            raise ConfigError(f"interleaved training draws from a TaskLoader, not from a {type(prompts).__name__}")
        try:
            return super().fit(prompts, steps, **of_rows)
        finally:
            self._land()

    def advance(self, prompts: Iterator[Any]) -> dict[str, Any]:
        """Begin what may be begun, wait for the samples of a task, train on all that have come.

        Raises:
            TrainingError: a sample is older than it may be.
        """
        assert isinstance(prompts, TaskLoader)
        began = self._begin()
        for name in prompts.sources:
            if name not in self._flights and prompts.shares[name]:
                position = prompts.state_dict()["tasks"][name]
                future = begin(self._collect_task(name, prompts.draw(name)))
                self._flights[name] = _Flight(future, self.actor.policy_version, position)
        version = self.actor.policy_version
        # What would be too old after this update is waited for; else one task is enough.
        wait([flight.future for flight in self._flights.values() if version - flight.began >= self.max_staleness])
        wait([flight.future for flight in self._flights.values()], return_when=FIRST_COMPLETED)
        waited = time.perf_counter() - began
        landed = [name for name, flight in self._flights.items() if flight.future.done()]
        drawn = {name: self._flights[name].future.result() for name in landed}
        staleness = {name: version - min(samples.rows["policy_version"]) for name, samples in drawn.items()}
        if (age := max(staleness.values())) > self.max_staleness:
            raise TrainingError(f"a sample is {age} updates old, and at most {self.max_staleness} was asked for")
        for name in landed:
            del self._flights[name]
        metrics = {f"task/{name}/rollout/staleness/max": float(of_task) for name, of_task in staleness.items()}
        metrics |= {"rollout/staleness/max": float(age), "time/wait": waited}
        return self._finish_step(self._learn_from(drawn, metrics), began)

    def rollback(self, step: int, *, skip_data: bool = False) -> None:
        self._land()
        super().rollback(step, skip_data=skip_data)

    def _position_of(self, loader: Loader) -> dict[str, Any]:
        """The loader's position, with the prompts that are being sampled still to come."""
        position, flights = loader.state_dict(), {name: flight.position for name, flight in self._flights.items()}
        return {**position, "tasks": position["tasks"] | flights}

    def _land(self) -> None:
        """Let what is on its way end, and forget it: a later `fit` draws its prompts again."""
        wait([flight.future for flight in self._flights.values()])
        if self._loader is not None and self._flights:
            self._loader.load_state_dict(self._position_of(self._loader))
        self._flights.clear()

"""How much of each of several tasks is sampled and learned."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl._base.names import check_known
from verl.batch import Batch
from verl.data.task_loader import by_task, rescaled
from verl.dataflow.scores import one_row_per_episode, written_tokens
from verl.errors import ConfigError
from verl.report.metrics import add_metrics
from verl.trainer.task import Task

if TYPE_CHECKING:
    from verl.data.task_loader import TaskLoader


class Mixture:
    """The shares of tasks, which sum to 1. In a step of all tasks, none with a `loss_weight`, they are the weights
    of the losses, too.

    Attributes:
        shares: of the prompts; taken from the `TaskLoader`, if training reads one.
        scheduler: changes them, if there is one.
        began: when the samples of a task were begun for the first time, or last trained.
    """

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        total = sum(task.share for task in tasks.values())
        self.shares = self._base = {name: task.share / total for name, task in tasks.items()}
        self.scheduler: Any = None
        self._loader: TaskLoader | None = None
        self.began: dict[str, float] = {}

    def follow(self, scheduler: Any) -> None:
        """Let a scheduler change the shares after each step.

        Raises:
            ConfigError: it names an unknown task, or there is only one.
        """
        if len(self.tasks) < 2:
            raise ConfigError("a scheduler weighs several tasks against each other, and this trainer has one")
        check_known("the scheduler weighs task", scheduler.weights, self.tasks)
        self.scheduler = scheduler
        self._share_out()

    def adopt(self, loader: Any) -> None:
        """Take the shares of a `TaskLoader` that is to be trained on, and change them from now on.

        Raises:
            ConfigError: it has prompts of other tasks.
        """
        if hasattr(loader, "set_shares") and loader is not self._loader:
            check_known("the loader has prompts of task", loader.sources, self.tasks)
            self._base = {name: loader.shares.get(name, 0.0) for name in self.tasks}
            self._loader = loader
            self._share_out()

    def split(self, prompts: Any) -> dict[str, Any]:
        """Prompts by task. A single task, which has no prefix in metrics, gets all."""
        alone = {name: prompts for name, task in self.tasks.items() if not task.updater.name}
        return alone or by_task(prompts, [*self.tasks])

    def update(self, step: int, samples: Mapping[str, Batch], record: dict[str, Any]) -> None:
        """Add throughput and shares of tasks with a name to the record of a step, and let the scheduler read it."""
        now = time.perf_counter()
        for name, updater in ((name, task.updater) for name, task in self.tasks.items() if task.updater.name):
            of_task = {"share": self.shares[name]}
            if name in samples:
                began, self.began[name] = self.began[name], now
                rejected = record.get(updater.named("rollout/rejection_rate"), 0.0)
                of_task |= {"samples": len(samples[name]), "rejection_rate": rejected}
                # Over the time since it took part in a step before; tokens are those that the policy wrote.
                ended = one_row_per_episode(samples[name])
                counts = {"samples": len(ended), "updates": int(record["updated"])}
                counts["rewards"] = len(ended) - ended["reward"].count(None) if "reward" in ended else 0
                counts["tokens"] = written_tokens(samples[name])
                of_task |= {f"{what}_per_s": count / max(now - began, 1e-9) for what, count in counts.items()}
            add_metrics(record, updater.metrics(of_task), ())
        if self.scheduler is not None:
            metrics: dict[str, dict[str, float]] = {}  # of each task that has any
            for name, task in self.tasks.items():
                begin = task.updater.named("")
                logged = {key.removeprefix(begin): value for key, value in record.items() if key.startswith(begin)}
                if numbers := {key: float(value) for key, value in logged.items() if isinstance(value, int | float)}:
                    metrics[name] = numbers
            self.scheduler.update(step, metrics)
            self._share_out()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scheduler is None else self.scheduler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scheduler is not None and state:
            self.scheduler.load_state_dict(state)
            self._share_out()

    def _share_out(self) -> None:
        """Set the shares. Those of a scheduler's tasks together stay as they were, and none is below its floor."""
        self.shares = self._base
        if self.scheduler is not None:
            weights = self.scheduler.weights
            self.shares = rescaled(self._base, weights)
            floor, count = getattr(self.scheduler, "min_weight", 0.0), len(weights)
            left = sum(self.shares[name] for name in weights)
            if left < floor * count * (1 - 1e-9):
                raise ConfigError(
                    f"the scheduler's {count} tasks have {left:.3g} of the shares together, less than "
                    f"min_weight={floor:g} for each: lower it, or name the other tasks, too"
                )
            free = 1 - floor * count
            if free > 1e-9:
                above = (left - floor * count) / free
                self.shares |= {name: floor + above * max(weight - floor, 0.0) for name, weight in weights.items()}
        if self._loader is not None:
            self._loader.set_shares({name: self.shares[name] for name in self._loader.sources})

"""The second half of a training step: prepare the samples of every task, then update every model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl.batch import Batch
from verl.dataflow.executor import Result
from verl.dataflow.graph import Graph, Node
from verl.dataflow.nodes import SLOT, UpdateNode, deadline_of
from verl.dataflow.scores import own_samples
from verl.report.samples import permuted
from verl.roles.actor import Actor
from verl.roles.updater import role_metrics
from verl.trainer.active_task import ActiveTask

Columns = tuple[None, dict[str, float]]


class Learning:
    """Updates the actor and the critics from scored samples.

    Of one task, the graph prepares the samples and updates the models. Of several, each prepares its own samples and
    updates its own critics, and every optimizer step of the actor is on the weighted sum of all their losses.

    Attributes:
        weights: of the losses of several tasks; their mean is 1.
        latest: the samples of the latest update by task, and the same as `prepare` left them.
        graph: what runs. That of several tasks passes row ids along its edges; the samples lie beside it, since each
            task has columns of its own.
    """

    def __init__(
        self, actor: Actor, tasks: Mapping[str, ActiveTask], run: Callable[[Graph, Batch], Result], *, permute: bool
    ) -> None:
        self.actor, self.tasks, self._run, self._permute = actor, tasks, run, permute
        self.weights = dict.fromkeys(tasks, 1.0)
        self.latest: tuple[Mapping[str, Batch], Mapping[str, Batch]] | None = None
        self._given: dict[str, Batch] = {}
        self._prepared: dict[str, Batch] = {}
        if len(tasks) == 1:
            (task,) = tasks.values()
            self.graph = Graph(UpdateNode(task.updater).updates("update"))
        else:
            self.graph = Graph(self._nodes())

    def __call__(self, samples: Mapping[str, Batch], step: int) -> dict[str, Any]:
        """Update every model from the samples of these tasks; the metrics."""
        if self._permute:
            samples = {name: permuted(batch, seed=step) for name, batch in samples.items()}
        if len(self.tasks) == 1:
            (rows,) = samples.values()
        else:
            self._given, self._prepared = dict(samples), {}
            rows = Batch.concat(batch.select(["id"]) for batch in samples.values())
        result = self._run(self.graph, rows)
        self.latest = samples, dict.fromkeys(samples, result.batch) if len(self.tasks) == 1 else self._prepared
        metrics: dict[str, Any] = dict(result.metrics)
        updates = [timing.busy for name, timing in result.timings.items() if name.startswith("update")]
        empty = [name for name in metrics if "update/empty/" in name]
        if len(updates) == len(empty):  # of each model, or there is none
            return {**metrics, "update/empty": 1.0}
        trained = sum(sum(own_samples(batch).lengths("response_tokens")) for batch in samples.values())
        seconds = sum(updates)
        timed = {"train/tokens": trained, "train/tokens_per_s": trained / max(seconds, 1e-9), "time/update": seconds}
        return metrics | timed

    def _nodes(self) -> list[Node]:
        nodes = []
        make = partial(Node, kind="batch", inputs=("id",), slot=SLOT)
        for name, task in self.tasks.items():
            prepare = partial(self._prepare, name)
            nodes.append(make(name=f"prepare_{name}", run=prepare, role="controller", deadline=deadline_of(self.actor)))
            for role, critic in task.updater.critics.items():
                update = partial(self._update_critic, name, role)
                after, limit = (f"prepare_{name}",), deadline_of(critic)
                nodes.append(make(name=f"update_{role}_{name}", run=update, after=after, role=role, deadline=limit))
        prepared = tuple(f"prepare_{name}" for name in self.tasks)
        limit = deadline_of(self.actor)
        return [*nodes, make(name="update_actor", run=self._update_actor, after=prepared, role="actor", deadline=limit)]

    @property
    def _together(self) -> int:
        return sum(map(len, self._given.values()))

    def _prepare(self, name: str, _: Batch) -> Columns:
        if name not in self._given:
            return None, {}
        self._prepared[name], metrics = self.tasks[name].updater.prepare(self._given[name], self._together)
        return None, of_task(name, metrics)

    def _update_actor(self, _: Batch) -> Columns:
        parts = [
            self.actor.update_part(
                prepared,
                self.tasks[name].algorithm,
                samples=self._together,
                weight=self.weights[name],
                name=f"task/{name}",
            )
            for name, prepared in self._prepared.items()
            if len(prepared)
        ]
        if not parts:  # a reward that keeps failing ends the run by itself
            return None, {"update/empty/actor": 1.0}
        return None, role_metrics("actor", self.actor.train_parts(parts))

    def _update_critic(self, name: str, role: str, _: Batch) -> Columns:
        task, prepared = self.tasks[name], self._prepared.get(name)
        if prepared is None or not len(prepared):
            return None, of_task(name, {f"update/empty/{role}": 1.0})
        found = task.updater.critics[role].train(prepared, task.algorithm, role)
        return None, of_task(name, role_metrics(role, found))


def of_task(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of one of several tasks, by the names they have in a record."""
    return {f"task/{name}/{key}": value for key, value in metrics.items()}


def skipped_roles(metrics: Mapping[str, Any]) -> set[str]:
    """Models of which no optimizer step was finite, such as "actor" or "task/math/critic"."""
    found = set()
    for name, skipped in metrics.items():
        before, part, role = name.partition("update/skipped/")
        if part and skipped and skipped >= metrics.get(f"{before}update/steps/{role}", skipped):
            found.add(before + role)
    return found

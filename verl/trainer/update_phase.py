"""The second half of a training step, for one task and for several: prepare the samples, then update every model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from verl.batch import Batch
from verl.dataflow.graph import Graph, Node
from verl.dataflow.nodes import SLOT, UpdateNode, deadline_of
from verl.dataflow.scores import own_samples
from verl.names import disjoint
from verl.report.samples import permuted
from verl.roles.actor import Actor
from verl.roles.updater import role_metrics
from verl.trainer.active_task import ActiveTask
from verl.trainer.runner import GraphRunner
from verl.trainer.step import learn

Columns = tuple[None, dict[str, float]]


class UpdatePhase:
    """Updates the actor and the critics from scored samples.

    With one task, the graph prepares the samples and updates the models. With several, each task prepares its samples
    and updates its critics, and every optimizer step of the actor is on the weighted sum of all tasks' losses.

    Attributes:
        weights: of the losses of several tasks; their mean is 1.
        latest: the samples of the latest update by task, and the same as `prepare` left them.
        graph: what runs. With several tasks only row ids pass along its edges: a graph works on one table, and each
            task has columns of its own. Their samples lie in `_samples` and `_prepared`.
    """

    def __init__(
        self, actor: Actor, tasks: Mapping[str, ActiveTask], runner: GraphRunner, *, permute_rewards: bool
    ) -> None:
        self.actor, self.tasks, self._runner, self._permute = actor, tasks, runner, permute_rewards
        self.weights = dict.fromkeys(tasks, 1.0)
        self.latest: tuple[Mapping[str, Batch], Mapping[str, Batch]] | None = None
        self._samples: dict[str, Batch] = {}
        self._prepared: dict[str, Batch] = {}
        self._is_joint = len(tasks) > 1
        if self._is_joint:
            self.graph = Graph(self._nodes())
        else:
            (task,) = tasks.values()
            self.graph = Graph(UpdateNode(task.updater).updates("update"))

    def __call__(self, samples: Mapping[str, Batch], step: int) -> dict[str, Any]:
        """Update every model from the samples of these tasks; the metrics."""
        if not any(map(len, samples.values())):  # the algorithm rejected them all
            return {"update/empty": 1.0}
        if self._permute:
            samples = {name: permuted(batch, seed=step) for name, batch in samples.items()}
        self._samples, self._prepared = dict(samples), {}
        rows = [batch.select(["id"]) if self._is_joint else batch for batch in samples.values()]
        result = self._runner.run(self.graph, Batch.concat(rows), learn)
        self.latest = samples, self._prepared if self._is_joint else dict.fromkeys(samples, result.batch)
        metrics: dict[str, Any] = dict(result.metrics)
        updates = [timing.busy for name, timing in result.timings.items() if name.startswith("update")]
        empty = [name for name in metrics if "update/empty/" in name]
        if len(updates) == len(empty):  # no model had anything to learn from
            return {**metrics, "update/empty": 1.0}
        trained = sum(sum(own_samples(batch).lengths("response_tokens")) for batch in samples.values())
        trained -= round(metrics.get("update/tokens_left_out/actor", 0.0))
        seconds = sum(updates)
        timed = {"train/tokens": trained, "train/tokens_per_s": trained / max(seconds, 1e-9), "time/update": seconds}
        return disjoint("a metric of the algorithm, or of a node,", metrics, timed)

    def _nodes(self) -> list[Node]:
        """The nodes of several tasks: `prepare_<task>`, `update_<critic>_<task>`, and `update_actor` after all."""
        prepare = partial(Node, kind="batch", inputs=("id",), slot=SLOT, phase="prepare", role="controller")
        update = partial(Node, kind="batch", inputs=("id",), slot=SLOT, phase="update")
        limit, nodes, prepared = deadline_of(self.actor), [], tuple(f"prepare_{name}" for name in self.tasks)
        for name, task in self.tasks.items():
            nodes.append(prepare(name=f"prepare_{name}", run=partial(self._prepare, name), deadline=limit))
            nodes += [
                update(
                    name=f"update_{role}_{name}",
                    run=partial(self._update_critic, name, role),
                    after=(f"prepare_{name}",),
                    role=role,
                    deadline=deadline_of(critic),
                )
                for role, critic in task.updater.critics.items()
            ]
        actor = update(name="update_actor", run=self._update_actor, after=prepared, role="actor", deadline=limit)
        return [*nodes, actor]

    @property
    def _total_samples(self) -> int:
        """Samples of all tasks, from which `mini_batch_size` makes the number of optimizer steps."""
        return sum(batch.samples for batch in self._samples.values())

    def _prepare(self, name: str, _: Batch) -> Columns:
        if name not in self._samples:
            return None, {}
        self._prepared[name], metrics = self.tasks[name].updater.prepare(self._samples[name], self._total_samples)
        return None, of_task(name, metrics)

    def _update_actor(self, _: Batch) -> Columns:
        parts = [
            self.actor.update_part(
                prepared,
                self.tasks[name].algorithm,
                samples=self._total_samples,
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
        metrics = task.updater.critics[role].train(prepared, task.algorithm, role)
        return None, of_task(name, role_metrics(role, metrics))


def of_task(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of one of several tasks, by the names they have in a record."""
    return {f"task/{name}/{key}": value for key, value in metrics.items()}


def skipped_roles(metrics: Mapping[str, Any]) -> set[str]:
    """Models of which no optimizer step was finite, such as "actor" or "task/math/critic"."""
    roles = set()
    for name, skipped in metrics.items():
        before, part, role = name.partition("update/skipped/")
        if part and skipped and skipped >= metrics.get(f"{before}update/steps/{role}", skipped):
            roles.add(before + role)
    return roles

"""A training step: samples are drawn and scored, then every model learns from them.

    prompts --> rollout --group by group--> rewards, users' nodes --+             old log-probs,     critics,
                   |                                                +-> barrier -> advantages    -> actor, weight sync
                   +--all samples--> reference, values -------------+    draw | learn

Everything that trains runs these two functions: `Trainer` and `verl train` for each of their tasks, `RLDataPipeline`
and expressions on the stages that their user names, asynchronous training on groups that its workers have sampled.
Between the two are the buffer, and the choice of samples by algorithms that reject some (`verl.trainer.trainer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl._base.names import disjoint
from verl.batch import Batch
from verl.dataflow.executor import GraphRun, Result, all_of
from verl.dataflow.graph import Graph
from verl.dataflow.nodes import deadline_of
from verl.roles.actor import Actor
from verl.roles.updater import Updater, role_metrics
from verl.trainer.runner import Run
from verl.workers.update import TaskLoss

Metrics = dict[str, Any]
_METRIC = "a metric of the algorithm, or of a node,"


async def draw(graph: Graph, prompts: Batch, run: Run, *, in_step: bool = True) -> Result:
    """Samples with their rewards, reference log-probs and values.

    Args:
        graph: the rollout, rewards, users' nodes, and forwards of models, as `Task.bind` makes them. Without a rollout,
            `prompts` are samples already.
        in_step: False: an evaluation, which is not counted in a step's record.

    Raises:
        ClusterError: a deadline passed; names the node waited for, stacks of all threads are in the log.
        VerlError: a node's own, with the node's name; other exceptions of a node become `TrainingError`.
        DataError: a node returned other columns or rows than it declares.
    """
    async with run.calls(graph, in_step=in_step) as calls:
        groups = GraphRun(graph, prompts, calls, run.models)
        sampling = [] if graph.source is None else [groups.sample(graph.source)]
        scoring = [groups.run(node) for node in graph.of_kind("rows", "batch")]  # while later groups are sampled
        # After the rollout, which holds the models: one by one, on all samples, while rewards are waited for.
        forwards = [groups.run(node) for node in graph.of_kind("forward")]
        await all_of([*sampling, *forwards, *scoring])
        return groups.result()


async def learn(actor: Actor, drawn: Sequence[tuple[Updater, Batch]], run: Run) -> tuple[list[Batch], Metrics, float]:
    """Advantages, then one update of every model: the critics of each task, and the actor, which all tasks share, on
    the weighted sum of their losses.

    Returns:
        The samples of each task, with the columns that its algorithm's `prepare` adds; metrics, where `update/empty` is
        1 if no model had anything to learn from; and the seconds of the updates alone.
    """
    together = sum(samples.samples for _, samples in drawn)
    all_prepared, losses, updates, metrics = list[Batch](), list[TaskLoss](), list[Metrics](), Metrics()
    limit = deadline_of(actor)
    async with run.calls() as calls, run.models.held_by(object()):
        for updater, samples in drawn:
            algorithm = updater.algorithm
            # The old log-probs (a forward of the actor) where the loss needs them, then `BaseAlgorithm.prepare`:
            # advantages, returns, weights.
            prepared, of_algorithm = await calls.in_thread(
                updater.named("prepare"), updater.prepare, samples, together, role="controller", limit=limit
            )
            all_prepared.append(prepared)
            metrics = disjoint(_METRIC, metrics, updater.metrics(of_algorithm))
            if not len(prepared):  # all rows were dropped: nothing to learn from
                continue
            for role, critic in updater.critics.items():
                name, late = updater.named(f"update_{role}"), deadline_of(critic)
                of_critic = await calls.in_thread(name, critic.train, prepared, algorithm, role, role=role, limit=late)
                updates.append(of_critic)
                metrics = disjoint(_METRIC, metrics, updater.metrics(role_metrics(role, of_critic)))
            of_task: dict[str, Any] = {"samples": together, "weight": updater.weight, "name": updater.name}
            losses.append(actor.update_part(prepared, algorithm, **of_task))
        if losses:  # the loss is computed in `MiniBatch.loss`; after the optimizer steps the rollout engine is synced
            updates.append(await calls.in_thread("update_actor", actor.train_parts, losses, role="actor", limit=limit))
            metrics = disjoint(_METRIC, metrics, role_metrics("actor", updates[-1]))
    if all("update/empty" in of_model for of_model in updates):
        metrics["update/empty"] = 1.0
    timings = calls.timings.values()
    return all_prepared, metrics, sum(timing.busy for timing in timings if timing.role != "controller")

"""The nodes of a training step, out of the handles a user holds. Every way of writing a step down uses these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from verl.batch import Batch
from verl.controller.controller import Controller
from verl.dataflow.graph import ANY, Node
from verl.roles.actor import Actor, expand
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.roles.updater import Updater, role_metrics
from verl.rollout.base import SamplingParams

#: The models of one process take turns.
SLOT = "model"
_SAMPLE = ("response_tokens", "response_mask", "rollout_log_probs", "finish", "policy_version", "response")
_SEQUENCE = ("group", "id", "prompt_tokens", "response_tokens")


def rollout_node(
    name: str, actor: Actor, *, n: int = 1, params: SamplingParams | None = None, greedy_baseline: bool = False
) -> Node:
    """The source of a step: `n` samples for each prompt, in groups, as they finish."""

    def samples(prompts: Batch) -> list[list[str]]:
        rows = expand(prompts, n, greedy_baseline)
        return [[rows["id"][row] for row in group] for group in rows.group_indices()]

    return Node(
        name=name,
        run=lambda prompts: actor.rollout(expand(prompts, n, greedy_baseline), params or actor.sampling),
        kind="source",
        inputs=(ANY,),
        outputs=("id", "group", *_SAMPLE, ANY),
        slot=SLOT,
        samples=samples,
        role="actor",
    )


def reward_node(name: str, reward: Reward, column: str = "reward") -> Node:
    """Scores finished groups while others are still being sampled, into `column`."""
    groups = None if reward.whole_batch else 1
    extra = ("abstain_reason",) if column == "reward" else ()

    async def score(samples: Batch) -> tuple[Batch, dict[str, float]]:
        scores, metrics = await reward.score_and_count(samples)
        if column != "reward":
            scores = Batch.from_columns({_named(c, column): scores.arrow(c) for c in scores.columns})
        return scores, {f"{name}/{key}": value for key, value in metrics.items()}

    return Node(name=name, run=score, inputs=(ANY,), outputs=(column, *extra, ANY), groups=groups)


def _named(scored: str, column: str) -> str:
    return column + scored.removeprefix("reward") if scored.startswith("reward") else f"{column}/{scored}"


def experience_nodes(updater: Updater) -> list[Node]:
    """What the algorithm reads of other models: reference log-probs and values, as its roles say."""
    nodes = []
    if "reference" in updater.algorithm.roles:
        nodes.append(_model_node("reference", "reference", updater.actor.compute_ref_log_probs, "ref_log_probs"))
    for role, critic in updater.critics.items():
        column = "values" if role == "critic" else "cost_values"
        nodes.append(_model_node(f"{role}_values", role, _renamed(critic.compute_values, column), column))
    return nodes


def update_nodes(name: str, updater: Updater) -> list[Node]:
    """Prepare the whole batch, then update every model of the algorithm."""
    nodes = [Node(name="prepare", run=updater.prepare, kind="batch", inputs=(ANY,), outputs=(ANY,), role="controller")]
    trained: dict[str, Actor | Critic] = {"actor": updater.actor, **updater.critics}
    return nodes + [_update_node(f"{name}_{role}", role, handle, updater) for role, handle in trained.items()]


def patient(nodes: list[Node], controllers: Iterable[Controller], deadline: float) -> list[Node]:
    """Of models on several ranks: each verb of a node has the deadline, and its error says which rank is late. The
    node's own, which cannot tell, comes after the two verbs that an update has."""
    if all(controller.is_local for controller in controllers):
        return nodes
    return [replace(node, deadline=2 * deadline) if node.role else node for node in nodes]


def _model_node(name: str, role: str, verb: Callable[[Batch], Batch], output: str) -> Node:
    return Node(name=name, run=verb, inputs=_SEQUENCE, outputs=(output,), slot=SLOT, groups=None, role=role)


def _renamed(verb: Callable[[Batch], Batch], column: str) -> Callable[[Batch], Batch]:
    return lambda batch: Batch.from_columns({column: verb(batch).arrow("values")})


def _update_node(name: str, role: str, handle: Actor | Critic, updater: Updater) -> Node:
    def run(prepared: Batch) -> tuple[None, dict[str, float]]:
        if isinstance(handle, Critic):
            return None, role_metrics(role, handle.train(prepared, updater.algorithm, role))
        return None, role_metrics(role, handle.train(prepared, updater.algorithm))

    # Nothing to learn from is no failure of the run; a reward that keeps failing ends it by itself.
    return Node(
        name=name, run=run, kind="batch", inputs=(ANY,), slot=SLOT, after=("prepare",), role=role, skip_empty=True
    )

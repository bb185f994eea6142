"""The nodes of a training step, out of the handles a user holds. Every way of writing a step down uses these."""

from __future__ import annotations

from collections.abc import Iterator

from verl.algorithms import BaseAlgorithm
from verl.batch import Batch
from verl.dataflow.graph import ANY, Node
from verl.roles.actor import Actor, expand
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.roles.updater import Updater, role_metrics
from verl.rollout.base import SamplingParams

#: The models of one process are mutually exclusive.
SLOT = "model"
_SAMPLE = ("response_tokens", "response_mask", "rollout_log_probs", "finish", "policy_version", "response")
_SEQUENCE = ("group", "id", "prompt_tokens", "response_tokens")


def rollout_node(
    name: str,
    actor: Actor,
    *,
    n: int = 1,
    params: SamplingParams | None = None,
    algorithm: BaseAlgorithm | None = None,
    greedy_baseline: bool = False,
) -> Node:
    """The source of a step: `n` samples for each prompt, in groups, as they finish; prompts begin as the algorithm
    says (`prompt_prefixes`)."""

    def rollout(prompts: Batch) -> Iterator[Batch]:
        prompts = prompts if algorithm is None else actor.prefixed(prompts, algorithm)
        return actor.rollout(expand(prompts, n, greedy_baseline), params or actor.sampling)

    def samples(prompts: Batch) -> list[list[str]]:
        rows = expand(prompts, n, greedy_baseline)
        return [[rows["id"][row] for row in group] for group in rows.group_indices()]

    return Node(
        name=name,
        run=rollout,
        kind="source",
        inputs=(ANY,),
        outputs=("id", "group", *_SAMPLE, ANY),
        slot=SLOT,
        samples=samples,
        role="actor",
        deadline=deadline_of(actor),
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
    """What the algorithm reads of other models: reference log-probs and values."""
    return [
        Node(
            name=read.role if read.role == "reference" else f"{read.role}_values",
            run=read.compute,
            inputs=_SEQUENCE,
            outputs=(read.column,),
            slot=SLOT,
            groups=None,
            role=read.role,
            deadline=deadline_of(updater.critics.get(read.role, updater.actor)),
        )
        for read in updater.reads
    ]


def update_nodes(name: str, updater: Updater) -> list[Node]:
    """Prepare the whole batch, then update every model of the algorithm."""
    prepare = Node(
        name="prepare",
        run=updater.prepare,
        kind="batch",
        inputs=(ANY,),
        outputs=(ANY,),
        role="controller",
        deadline=deadline_of(updater.actor),
    )
    trained: dict[str, Actor | Critic] = {"actor": updater.actor, **updater.critics}
    return [prepare, *(_update_node(f"{name}_{role}", role, handle, updater) for role, handle in trained.items())]


def deadline_of(handle: Actor | Critic) -> float | None:
    """On several ranks each verb has a deadline, whose error names the rank that is late; a node makes up to two verb
    calls, and its own deadline, which cannot name a rank, comes after theirs."""
    return None if handle.controller.is_local else 2 * handle.controller.timeout


def _update_node(name: str, role: str, handle: Actor | Critic, updater: Updater) -> Node:
    def run(prepared: Batch) -> tuple[None, dict[str, float]]:
        if isinstance(handle, Critic):
            return None, role_metrics(role, handle.train(prepared, updater.algorithm, role))
        return None, role_metrics(role, handle.train(prepared, updater.algorithm))

    # Nothing to learn from is no failure of the run; a reward that keeps failing ends it by itself.
    return Node(
        name=name,
        run=run,
        kind="batch",
        inputs=(ANY,),
        slot=SLOT,
        after=("prepare",),
        role=role,
        deadline=deadline_of(handle),
        skip_empty=True,
    )

"""The nodes of a training step, out of the handles a user holds, and the stages that users write, some by a registered
name. Every way of writing a step down uses these.

An algorithm is handed the whole batch, so `prepare` and updates read `ANY` in addition to the columns that they name;
all other columns are named at both ends.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from verl._base.checked import checked
from verl._base.names import give_name
from verl._base.record import Count, Name
from verl.algorithms import BaseAlgorithm
from verl.batch import COMPUTED, EPISODE, SCHEMA, Batch
from verl.dataflow.graph import ANY, OPTIONAL, SLOT, Node
from verl.dataflow.scores import one_row_per_episode
from verl.errors import ConfigError, nearest
from verl.rewards.scores import rounded
from verl.rewards.signatures import cell
from verl.rewards.source import RewardResult, columns_read, log_failures
from verl.roles.actor import Actor
from verl.roles.columns import expand
from verl.roles.critic import Critic
from verl.roles.reads import VALUES, ModelOutput
from verl.roles.reward import Reward
from verl.roles.updater import Updater
from verl.rollout.base import SamplingParams

_SAMPLE = ("response_tokens", "response_mask", "rollout_log_probs", "finish", "policy_version", "policy_id", "response")
#: Columns of a sample that only some rollouts have: those of episodes, of prompts with a prefix, of a task with a
#: temperature of its own.
_OF_SOME = (*(f"{column}?" for column in EPISODE), "prefix_tokens?", "temperature?")
#: Columns that `prepare` may add; a node declares those that its algorithm's losses read.
_PREPARED = COMPUTED - {"ref_log_probs", "values", "cost_values"}
_SEQUENCE = ("group", "id", "prompt_tokens", "response_tokens")


StageT = TypeVar("StageT", bound=Callable[..., Any])
_REGISTERED: dict[str, Any] = {}


class RolloutNode:
    """The source of a step: samples for each prompt, in groups, as they finish.

    Args:
        n: samples a prompt.
        params: how they are drawn; None: as the actor does.
        algorithm: what is learned from them, which may put a text before prompts (`prompt_prefixes`).
        greedy_baseline: each prompt gets a greedy sample, too.
        task: whose prompts these are, which may have an episode of its own (`Actor.set_episode`).
    """

    @checked
    def __init__(
        self,
        actor: Actor,
        *,
        n: Count = 1,
        params: SamplingParams | None = None,
        algorithm: BaseAlgorithm | None = None,
        greedy_baseline: bool = False,
        task: str | None = None,
    ) -> None:
        self.actor, self.n, self.params, self.task = actor, n, params, task
        self.algorithm, self.greedy_baseline = algorithm, greedy_baseline

    def as_node(self, name: str) -> Node:
        options, kind = self.actor.rollout_options, BaseAlgorithm if self.algorithm is None else type(self.algorithm)
        has_prefixes = kind.prompt_prefixes is not BaseAlgorithm.prompt_prefixes
        # An episode, or the algorithm's texts before prompts, may read any column of the data.
        reads_rows = has_prefixes or options.episode is not None or self.task in options.episodes
        return Node(
            name=name,
            run=self._rollout,
            kind="source",
            inputs=("group", "prompt_tokens", *([ANY] if reads_rows else [])),
            outputs=("id", "group", "tokenizer", *_SAMPLE, *_OF_SOME, *(["baseline"] if self.greedy_baseline else [])),
            slot=SLOT,
            samples=self._samples,
            role="actor",
            deadline=deadline_of(self.actor),
        )

    def _rollout(self, prompts: Batch) -> Iterator[Batch]:
        prompts = prompts if self.algorithm is None else self.actor.prefixed(prompts, self.algorithm)
        rows = expand(prompts, self.n, self.greedy_baseline)
        return self.actor.rollout(rows, self.params or self.actor.sampling, self.task)

    def _samples(self, prompts: Batch) -> list[list[str]]:
        rows = expand(prompts, self.n, self.greedy_baseline)
        return [[rows["id"][row] for row in group] for group in rows.group_indices()]


class RewardNode:
    """Scores finished groups while others are still being sampled, into the column `column`.

    A reward of your own is a subclass with a method `score`, in any of the forms of functions that `Reward` knows; so
    it has the deadlines of a reward, and a sample that fails abstains:

        @verl.register_node("safety_reward")
        class SafetyRewardNode(verl.RewardNode):
            column = "cost"

            def score(self, responses):
                return [float("bomb" in text) for text in responses]

    Parameters of `score` that are columns of other nodes make edges: it is called when they are there.

    The last of several trajectories of an episode is scored, and all have its number. The column "reward" has what
    the episode itself says (`episode_reward`), where it says something and the reward does not read that by name.

    Args:
        reward: a `Reward` or anything `Reward` takes; None: `score`.
        column: where the numbers go: "reward", "cost", or a column of your own, whose mean is logged.
        **options: of `Reward`, such as `timeout`.

    Raises:
        ConfigError: there is neither a reward nor `score`, or the function has an unknown form.
    """

    name: ClassVar[str] = "reward"
    column: str = "reward"

    @checked
    def __init__(self, reward: Any = None, *, column: str | None = None, **options: Any) -> None:
        source = getattr(self, "score", None) if reward is None else reward
        if source is None:
            raise ConfigError(f"{type(self).__name__} has nothing to score with: write score(self, responses)")
        if reward is None:
            options.setdefault("name", self.name)
        self.reward = source if isinstance(source, Reward) else Reward(source, **options)
        self.column = column or self.column

    def as_node(self, name: str) -> Node:
        column = self.column
        inputs = [c for c in columns_read(self.reward.source) if c.removesuffix(OPTIONAL) != column]
        reason = ["abstain_reason"] if column == "reward" else []

        return Node(
            name=name,
            run=partial(self._run, name),
            inputs=("finish?", "episode_error?", "episode?", "episode_reward?", *inputs),
            outputs=(column, *reason, f"{column}/{ANY}"),
            groups=None if self.reward.source.whole_batch else 1,
            at_end=partial(log_failures, self.reward.source),
        )

    async def _run(self, name: str, samples: Batch) -> tuple[Batch, dict[str, float]]:
        column = self.column
        scores, metrics = await (self._of_episodes if "episode" in samples else self.reward.score_and_count)(samples)
        numbers = [number for number in scores["reward"] if number is not None]
        if column != "reward":  # "reward" and "reward/x" become `column` and `column`/x
            names = {c: c.removeprefix("reward") if c.startswith("reward") else f"/{c}" for c in scores.columns}
            scores = Batch.from_columns({column + ending: scores.arrow(c) for c, ending in names.items()})
        if column not in SCHEMA and numbers:
            metrics = {**metrics, "mean": sum(numbers) / len(numbers)}
        return scores, {f"{name}/{key}": value for key, value in metrics.items()}

    async def _of_episodes(self, samples: Batch) -> tuple[Batch, dict[str, float]]:
        """The scores of each row. The reward is called for those episodes alone that say none themselves."""
        read = {c.removesuffix(OPTIONAL) for c in columns_read(self.reward.source)}
        episodes = one_row_per_episode(samples)
        if "trajectories" in read:
            rows = [cell(row, "trajectories")[0] for row in samples.rows()]
            groups = samples.group_indices("episode")
            episodes = episodes.add({"trajectories": [json.dumps([rows[i] for i in group]) for group in groups]})
        said: list[float | None] = [None] * len(episodes)
        if self.column == "reward" and "episode_reward" not in read:  # a reward that reads it decides by itself
            said = episodes["episode_reward"]
        unscored = [index for index, reward in enumerate(said) if reward is None]
        scores, metrics = RewardResult([]).as_batch(), dict[str, float]()
        if unscored:
            scores, metrics = await self.reward.score_and_count(episodes.take(unscored))
        scores = scores.among(unscored, len(episodes))
        pairs = zip(said, scores["reward"], strict=True)
        rewards = [score if reward is None else rounded(reward) for reward, score in pairs]
        scores = scores.drop(["reward"]).add({"reward": rewards})
        # From one row per episode to one per trajectory.
        episode_of = {row: index for index, rows in enumerate(samples.group_indices("episode")) for row in rows}
        return scores.take([episode_of[row] for row in range(len(samples))]), metrics


class UpdateNode:
    """What learns: the columns that the algorithm reads of other models, the statistics of the whole batch, and an
    update of every model."""

    @checked
    def __init__(self, updater: Updater) -> None:
        self.updater = updater

    def as_node(self, name: str) -> list[Node]:
        # Algorithms of labelled data first choose and add rows (`Updater.compute_log_probs_and_values`).
        return [*(self.model_outputs() if self.updater.algorithm.online else []), *self.updates(name)]

    def model_outputs(self) -> list[Node]:
        """Reference log-probs and values."""
        updater = self.updater
        return [output_node(read, updater.critics.get(read.role, updater.actor)) for read in updater.outputs]

    def updates(self, name: str) -> list[Node]:
        """What `verl.trainer.step.learn` does: prepare the whole batch, then update every model of the algorithm."""
        updater, algorithm = self.updater, self.updater.algorithm
        columns = {role: algorithm.objective(role).loss_needs.columns for role in ("actor", *updater.critics)}
        read = [*(algorithm.roles & {"reward", "cost"}), *(read.column for read in updater.outputs)]
        prepare = Node(
            name="prepare",
            run=updater.update,
            kind="update",
            inputs=("prompt_tokens", "response_tokens", *(read if algorithm.online else []), ANY),
            outputs=(*(f"{column}?" for column in {"log_probs"}.union(*columns.values()) & _PREPARED), ANY),
        )
        updates = [
            Node(
                name=f"{name}_{role}",
                run=updater.update,
                kind="update",
                inputs=(*_SEQUENCE[2:], *(f"{column}?" for column in read_by_loss), ANY),
                slot=SLOT,
                after=("prepare",),
            )
            for role, read_by_loss in columns.items()
        ]
        return [prepare, *updates]


def output_node(read: ModelOutput, handle: Actor | Critic) -> Node:
    """A node that computes a model's outputs for all samples."""
    is_values = read.role in VALUES
    return Node(
        name=f"{read.role}_values" if is_values else read.role,
        run=read.compute,
        inputs=(*_SEQUENCE, *([] if is_values else ["temperature?"])),
        outputs=(read.column,),
        kind="forward",
        slot=SLOT,
        role=read.role,
        deadline=deadline_of(handle),
    )


def deadline_of(handle: Actor | Critic) -> float | None:
    """On several ranks each call has a deadline, whose error names the rank that is late; a node makes up to two such
    calls, and its own deadline, which cannot name a rank, comes after theirs."""
    return None if handle.controller.is_local else 2 * handle.controller.transport.timeout


@checked
def register_node(name: Name) -> Callable[[StageT], StageT]:
    """Decorator of a class of nodes (a subclass of `RewardNode`, or any with `as_node(name)`) that is made without
    arguments, or of a function that is a stage: graphs take it by this name. One of the same name and module replaces
    its earlier definition (a notebook cell run twice).

    Raises:
        ConfigError: it is neither, or the name belongs to another.
    """

    def register(stage: StageT) -> StageT:
        if inspect.isclass(stage) and not hasattr(stage, "as_node"):
            raise ConfigError(f"{stage.__name__} is no node: write a subclass of RewardNode, or as_node(self, name)")
        give_name(_REGISTERED, "node", name, stage)
        if inspect.isclass(stage):
            stage.name = name  # type: ignore[attr-defined]
        return stage

    return register


def make_stage(stage: Any) -> Any:
    """A stage, by its registered name, its class, or as it is.

    Raises:
        ConfigError: nothing is registered by that name, or the object cannot be a stage.
    """
    if isinstance(stage, str):
        if stage not in _REGISTERED:
            hint = nearest(stage, _REGISTERED)
            raise ConfigError(f"no node is called '{stage}': {hint} (register yours: @verl.register_node('{stage}'))")
        stage = _REGISTERED[stage]
    if inspect.isclass(stage) and hasattr(stage, "as_node"):
        stage = stage()
    if not (isinstance(stage, Actor | Reward | Node) or hasattr(stage, "as_node") or callable(stage)):
        raise ConfigError(f"a {type(stage).__name__} is no stage: give an Actor, Reward, Updater, node or function")
    return stage


def stage_nodes(name: str, stage: Any) -> list[Node]:
    """The nodes of a stage that is no actor: what is sampled of a prompt depends on the other stages."""
    if isinstance(stage, Reward):
        return [RewardNode(stage).as_node(name)]
    if isinstance(stage, Updater):
        return UpdateNode(stage).as_node(name)
    if isinstance(stage, Node):
        slot = "" if stage.slot == stage.name else stage.slot
        return [replace(stage, name=name, slot=slot)]
    if hasattr(stage, "as_node"):
        nodes = stage.as_node(name)
        return [nodes] if isinstance(nodes, Node) else list(nodes)
    if is_reward_function(stage):
        return [RewardNode(stage).as_node(name)]
    return [Node(name=name, run=stage, inputs=(ANY,), outputs=(ANY,))]


def check_none_updates(nodes: Iterable[Node]) -> None:
    """Raises ConfigError for a node of kind "update": a step updates by an `Updater`, and would not run it."""
    if updates := [node.name for node in nodes if node.kind == "update"]:
        raise ConfigError(f"node '{updates[0]}' is of kind 'update': give an Updater as a stage, or kind='batch'")


def is_reward_function(stage: Any) -> bool:
    """Whether a stage is a plain function and not one of a `batch`."""
    if isinstance(stage, Actor | Reward | Updater | Node) or hasattr(stage, "as_node"):
        return False
    return list(inspect.signature(stage).parameters) != ["batch"]


def make_stages(nodes: Mapping[str, Any] | Iterable[str]) -> dict[str, Any]:
    """Stages by name: of a mapping, or of names of registered nodes."""
    if isinstance(nodes, str):
        raise ConfigError(f"nodes are a list of names, or a mapping of names to stages, not the string '{nodes}'")
    named = nodes if isinstance(nodes, Mapping) else {name: name for name in nodes}
    return {name: make_stage(stage) for name, stage in named.items()}

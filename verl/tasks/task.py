"""`Task`: what an actor is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from verl._base.checked import checked
from verl._base.keywords import takes
from verl._base.record import AtOnce, NotNegative
from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.config.tasks import TaskName
from verl.dataflow.graph import Node
from verl.errors import ConfigError
from verl.rollout.base import SamplingParams
from verl.rollout.environments import as_environments, as_episode
from verl.rollout.episode import Episode

#: What a task is called where there is only one.
MAIN = "main"


class Task:
    """An algorithm with its rewards and its way of sampling.

    Args:
        name: what errors, metrics and files call it.
        algorithm: a name, class or instance; None: the default of `make_algorithm`.
        sources: role ("reward", "cost") -> a `Reward`, or anything `Reward` takes.
        reward, cost: the same by their own names; `reward_fn` is another name of `reward`.
        n: samples a prompt; None: what suits the algorithm (`BaseAlgorithm.samples_per_prompt`).
        share: of the prompts, relative to other tasks.
        loss_weight: of its loss, where 1 is an equal weight for each task; None: its share, so that all samples count
            alike.
        critic: the value model of this task; None: made from the actor's where the algorithm has one.
        sampling: how responses are drawn; None: as the actor does.
        episode: what happens between a prompt and its response, such as a `ConstrainedEpisode`, or a class of
            environments, whose `get_reward` is a reward beside the others; None: as the actor does. One with a true
            attribute `gives_reward`, as a `Gateway` has, needs no reward beside it. It is for this
            task's prompts alone: the rollouts of others are as they are without it.
        environment: as `episode`, of environments: a class of TRL's form, a mapping of names to these, or an
            `EnvironmentEpisode`.
        nodes: further nodes of the step's graph: names of registered ones (`verl.register_node`), or a mapping of names
            to stages (see `RLDataPipeline`). One that writes `reward` or `cost` is the source of it.

    Raises:
        ConfigError: a name that is no file name; a share or weight below 0; an unknown algorithm; a reward or cost that
            is missing, or that the algorithm does not have; an `n` that does not suit the algorithm.
    """

    @checked
    def __init__(
        self,
        name: TaskName = MAIN,
        algorithm: str | BaseAlgorithm | type[BaseAlgorithm] | None = None,
        sources: Mapping[str, Any] | None = None,
        *,
        reward: Any = None,
        reward_fn: Any = None,
        cost: Any = None,
        n: AtOnce | None = None,
        share: NotNegative = 1.0,
        loss_weight: NotNegative | None = None,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        critic: Any = None,
        episode: Any = None,
        environment: Any = None,
        nodes: Mapping[str, Any] | Iterable[str] = (),
    ) -> None:
        # These import transformers, without which settings are checked.
        from verl.dataflow.nodes import RewardNode
        from verl.roles.reward import Reward

        self.name, self.share, self.loss_weight, self.sampling = name, share, loss_weight, sampling
        self.critic = critic
        self.episode: Episode | None = None if episode is None else as_episode(episode)
        if environment is not None:
            self.episode = as_environments(environment)
        self.algorithm = make_algorithm(algorithm)
        if reward is not None and reward_fn is not None:
            raise ConfigError("give one reward: reward=... or reward_fn=...")
        reward = reward_fn if reward is None else reward
        by_role = dict(sources or {})
        by_role |= {role: one for role, one in (("reward", reward), ("cost", cost)) if one is not None}
        stages: dict[str, Any] = {}
        further: list[Node] = []
        if not isinstance(nodes, tuple | list | dict) or nodes:
            from verl.dataflow.stages import check_none_updates, make_stages, stage_nodes

            stages = make_stages(nodes)
            further = [node for name, stage in stages.items() for node in stage_nodes(name, stage)]
            check_none_updates(further)
        written = {column for node in further for column in node.writes}
        gives_reward = getattr(self.episode, "gives_reward", False) and "reward" in self.algorithm.roles
        # Where a node writes it, agents need no source; rewards of environments have one, and clash with the node.
        if gives_reward and (hasattr(self.episode, "rewards") or "reward" not in written):
            from verl.rewards.environments import with_episodes

            by_role["reward"] = with_episodes(by_role.get("reward"), self.episode)
        check_sources(self.algorithm, {*by_role, *(written & {"reward", "cost"})})
        #: Role, or name of a further node -> where its numbers come from.
        self.sources = {r: source if isinstance(source, Reward) else Reward(source) for r, source in by_role.items()}
        #: What is done with samples before any model reads them.
        self.nodes: list[Node] = [
            RewardNode(r, column=role).as_node(role) for role, r in self.sources.items()
        ] + further
        for name, stage in stages.items():
            if isinstance(stage, RewardNode):
                self.sources[stage.column if stage.column in ("reward", "cost") else name] = stage.reward
        self.n = self.algorithm.samples_per_prompt if n is None else n
        self.algorithm.check_samples(self.n)


def algorithm_beside(keywords: Iterable[str], algorithm: Any, options: Mapping[str, Any]) -> BaseAlgorithm:
    """The algorithm with the options that are left of a trainer's keywords.

    Args:
        keywords: the trainer's own.

    Raises:
        ConfigError: the algorithm has no such option; it names the call that takes it, or the nearest of `keywords`.
    """
    try:
        return make_algorithm(algorithm, **options)
    except ConfigError as error:
        for option in (option for option in options if f"has no option '{option}'" in str(error)):
            close = [f"did you mean '{name}'?" for name in get_close_matches(option, [*keywords], 1, 0.75)]
            if phrase := takes(option, "Trainer") or "".join(close):
                raise ConfigError(f"there is no keyword '{option}': {phrase}") from None
        raise


def check_sources(algorithm: BaseAlgorithm, roles: Iterable[str]) -> None:
    """Raises ConfigError for a reward or cost that is missing, or that the algorithm does not have."""
    roles = set(roles)
    if extra := sorted(roles - algorithm.roles - algorithm.measures):
        raise ConfigError(f"algorithm '{algorithm.name}' has no {extra[0]}: leave {extra[0]}=... out")
    if algorithm.online and (lacking := {"reward", "cost"} & algorithm.roles - roles):
        role = max(lacking)
        raise ConfigError(f"algorithm '{algorithm.name}' needs a {role}: give the trainer {role}=...")


def check_heads(algorithms: Mapping[str, BaseAlgorithm]) -> None:
    """Raises ConfigError if two tasks of one actor want another head on it."""
    first, *others = algorithms
    for name in others:
        if (head := algorithms[name].head) != algorithms[first].head:
            raise ConfigError(
                f"task '{name}' trains a model with the head '{head}', task '{first}' one with "
                f"'{algorithms[first].head}': they cannot share an actor"
            )


def check_tasks(tasks: Sequence[Task]) -> None:
    """Raises ConfigError if there is no task, two have one name or different heads, or an only one is weighed against
    others."""
    if not tasks:
        raise ConfigError("a trainer trains at least one task, and these are none")
    names = [task.name for task in tasks]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two tasks have the name '{twice}': give each its own")
    check_heads({task.name: task.algorithm for task in tasks})
    if len(tasks) == 1 and (tasks[0].share, tasks[0].loss_weight) != (1.0, None):
        raise ConfigError(
            f"task '{names[0]}' is the only one, with nothing to weigh it against: leave share and loss_weight out"
        )
    if not sum(task.share for task in tasks):
        raise ConfigError(f"the shares of the tasks {', '.join(names)} are all 0: nothing would be trained")

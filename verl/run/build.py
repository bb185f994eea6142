"""From a run's settings to its parts: what can be found wrong without a model, where `verl train` and its dry run both
begin; then tasks, actor, critic and trainer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from verl._base.names import check_known
from verl._host.user_functions import load_function
from verl.algorithms import BaseAlgorithm, make_algorithm
from verl.cluster.controller import Controller
from verl.cluster.placement import ROLES
from verl.config import Config, CostConfig, RewardPart, differences
from verl.config.schema import KL, LimitSettings, SavingSettings, UpdateSettings
from verl.data.prompts import PromptDataset
from verl.data.task_loader import by_task
from verl.errors import ConfigError
from verl.models.loading import load_model
from verl.report.metrics import Metric
from verl.report.sinks import EXTRAS, check_loggers
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.roles.reward import Reward
from verl.run.data import ReadData, is_offline, read_data, step_rows
from verl.trainer.guard import SafetyGuard
from verl.trainer.task import MAIN, Task, check_reads
from verl.trainer.tasks import check_asynchronous, check_corrected, check_heads, check_permuted, task_of
from verl.trainer.trainer import Trainer
from verl.training.options import TrainOptions
from verl.workers.update import MiniBatchPlan

#: Settings that the trainer takes under their names.
_AS_SET = [*SavingSettings.model_fields, *LimitSettings.model_fields, *UpdateSettings.model_fields]
_ROLLOUT = "actor_rollout_ref.rollout"
_SAMPLING = ("episode", "environment", "max_new_tokens", "min_new_tokens", "top_k", "top_p", "min_p", "stop", "url")
_EVALUATION = (
    "trainer.eval_n", "trainer.eval_temperature", "trainer.eval_top_p", "trainer.eval_top_k", "trainer.log_completions"
)  # fmt: skip
_MODELS = (
    "actor_rollout_ref.model.path", "actor_rollout_ref.ref.path", "critic.model.path", "reward.model", "cost.model"
)  # fmt: skip


class Checked(NamedTuple):
    """The tasks, metrics and data of the settings, made without a model; data are not tokenised yet.

    tasks: a run without `tasks` has one, "main".
    rows: those that one step learns from; about, where groups or tasks differ in size.
    """

    tasks: list[Task]
    metrics: dict[str, Metric]
    data: ReadData
    rows: int


def check_settings(config: Config) -> Checked:
    """Everything that a run needs besides its models, before anything is made. Imports the user's functions, and
    reads the data.

    Raises:
        ConfigError: settings contradict each other, or name what is not there.
        DataError: the data are unusable (see `load_prompts` and `OfflineDatasetLoader`), or their first rows lack a
            column that a reward or a metric reads.
        RewardError: a file of the user's cannot be imported.
    """
    tasks = tasks_of(config)
    algorithms = {task.name: task.algorithm for task in tasks}
    # Cheap checks first: data are read only once the settings agree.
    check_heads(algorithms)
    _check_together(config, algorithms)
    _check_trainer(config, algorithms)
    _check_paths(config)
    if config.data.pools is not None:
        check_known("data.pools has numbers of task", config.data.pools.tasks, algorithms)
    if config.trainer.task_scheduler is not None:
        from verl.trainer.task_weights import DynamicTaskWeightScheduler

        DynamicTaskWeightScheduler(**dict(config.trainer.task_scheduler))
    metrics = {spec: Metric(spec, load_function(spec)) for spec in config.trainer.eval_metrics if spec != KL}
    data = read_data(config, algorithms)
    _check_reads(data, tasks, list(metrics.values()))
    return Checked(tasks, metrics, data, step_rows(config, data, tasks))


def tasks_of(config: Config) -> list[Task]:
    """The tasks with their rewards, whose models are not loaded yet; of a run without `tasks`, the one that its
    sections make. Imports the user's functions.

    Raises:
        ConfigError, RewardError: an algorithm or a reward cannot be made.
    """
    if config.tasks:
        return [task_of(task, load=False) for task in config.tasks]
    algorithm, n = make_algorithm(config.algorithm.name, **config.algorithm.options), config.actor_rollout_ref.rollout.n
    episode = rewarding_episode(config)
    for role in ("reward", "cost"):
        is_given = getattr(config, role).origins()
        if is_given and role not in algorithm.roles | algorithm.measures:
            raise ConfigError(f"algorithm '{algorithm.name}' has no {role}: leave the section '{role}' out")
        if role in algorithm.roles and not is_given and (role == "cost" or episode is None):
            raise ConfigError(f"no {role} is given: set {role}.path=FILE.py:FUNCTION, {role}.name=task or {role}.model")
    return [Task(MAIN, algorithm, sources_of(config), n=n, episode=episode)]


def sources_of(config: Config) -> dict[str, Reward]:
    """The rewards of the sections by role, whose models are not loaded yet."""
    calls = config.reward
    names = ("timeout", "retries", "max_failure_rate", "workers", "max_workers", "process")
    options: dict[str, Any] = {name: getattr(calls, name) for name in names}  # of costs, too
    options["default_reward"] = None if calls.on_failure == "abstain" else calls.on_failure
    sections = {role: section for role in ("reward", "cost") if (section := getattr(config, role)).origins()}
    return {role: Reward(_source(section), load=False, **options) for role, section in sections.items()}


def roles_of(config: Config, algorithms: Iterable[BaseAlgorithm]) -> set[str]:
    """The roles of a run: its algorithms' roles, and the reference if evaluations measure the KL to it."""
    roles = {role for algorithm in algorithms for role in algorithm.roles}
    return roles | ({"reference"} if KL in config.trainer.eval_metrics else set())


def _check_together(config: Config, algorithms: Mapping[str, BaseAlgorithm]) -> None:
    """Sections that no algorithm of the run reads."""
    algorithm = next(iter(algorithms.values()))
    of = f"algorithm '{algorithm.name}' has" if not config.tasks else "the algorithms of the tasks have"
    roles = roles_of(config, algorithms.values())
    changed = [key for key, *_ in differences(config)]
    for name, is_read, reason in _readers(config, algorithms, roles, of):
        if not is_read and (key := next((key for key in changed if f"{key}.".startswith(f"{name}.")), None)):
            raise ConfigError(f"{key} would not be read: {reason}; leave it out")
    data, offline = config.data, [is_offline(config, each) for each in algorithms.values()]
    of_prompts = "prompts; recorded responses are read by their own columns"
    for key, is_read, purpose in (
        ("prompt_column", not all(offline), of_prompts),
        ("prompt_template", not all(offline), of_prompts),
        ("columns", any(offline), "recorded responses: set data.prompt_column"),
        ("max_response_length", any(offline), "recorded responses: set actor_rollout_ref.rollout.max_new_tokens"),
    ):
        if not is_read and getattr(data, key) not in (None, {}):
            raise ConfigError(f"data.{key} is for {purpose}")
    if config.trainer.eval_metrics and not any(each.online for each in algorithms.values()):
        raise ConfigError(f"trainer.eval_metrics are for sampled responses; '{algorithm.name}' samples none")


def _readers(
    config: Config, algorithms: Mapping[str, BaseAlgorithm], roles: set[str], of: str
) -> Iterator[tuple[str, bool, str]]:
    """Settings or sections, whether the run reads them, and if not, why."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    played = rollout.episode or rollout.environment
    rejects = any(type(each).keep is not BaseAlgorithm.keep for each in algorithms.values())
    calls = bool(config.tasks or config.reward.origins() or config.cost.origins()) or played is not None
    samples = any(each.online for each in algorithms.values())
    can = any(hasattr(each, "kl_in") for each in algorithms.values())
    reads = ", unless you set algorithm.kl_in to reward or loss" if can else ""
    yield "actor_rollout_ref.ref", "reference" in roles, f"{of} no reference as it is set{reads}"
    yield "critic", "critic" in roles, f"{of} no critic as it is set"
    for strategy in ("fsdp", "deepspeed"):
        is_used = config.actor_rollout_ref.actor.strategy == strategy
        yield f"actor_rollout_ref.actor.{strategy}_config", is_used, f"it is for strategy '{strategy}'"
    yield "reward", calls, "no reward is given"
    yield "trainer.project", bool({*trainer.loggers} & {*EXTRAS}), f"it is for trainer.loggers {', '.join(EXTRAS)}"
    drawn = [each for each in algorithms.values() if not is_offline(config, each)]
    yield "data.pools", any("reward" in each.roles for each in drawn), "they go by the rewards of sampled responses"
    yield "trainer.max_resamples", rejects, f"{of} no samples that are rejected"
    yield "trainer.max_resamples", trainer.max_staleness is None, "asynchronous training samples nothing again"
    yield (f"{_ROLLOUT}.n", not config.tasks or rollout.n == 1, "each of the tasks has its own n")  # 1: see translation
    for name in (*(f"{_ROLLOUT}.{name}" for name in _SAMPLING), *_EVALUATION):
        yield name, samples, "nothing is sampled: the responses are recorded"


def _check_trainer(config: Config, algorithms: Mapping[str, BaseAlgorithm]) -> None:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if trainer.threads is not None and trainer.threads > (cores := os.cpu_count() or 1):
        raise ConfigError(f"trainer.threads: must be at most {cores}, the CPU cores here, not {trainer.threads}")
    check_loggers(trainer.loggers)
    for algorithm in algorithms.values():
        if trainer.control == "permute_rewards":
            check_permuted(algorithm)
        if trainer.max_staleness is not None and config.tasks:
            check_corrected(algorithm)
        elif trainer.max_staleness is not None:
            engine = None if rollout.url else rollout.name
            played = rollout.episode or rollout.environment
            check_asynchronous(algorithm, engine, played, rollout.tensor_parallel)
    if config.tasks and (rollout.num_rollout_workers, rollout.max_rollout_workers) != (1, None):
        raise ConfigError(
            "several tasks sample on the actor's own ranks: leave rollout.num_rollout_workers and "
            "max_rollout_workers out"
        )


def _check_paths(config: Config) -> None:
    """Files and directories that the settings name are there; whether a hub knows a name is not asked."""
    for key in _MODELS:
        name = attrgetter(key)(config)
        if name is not None and name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
            raise ConfigError(f"{key}: there is no directory '{name}' (working directory {Path.cwd()})")
    rollout = config.actor_rollout_ref.rollout
    for spec in (rollout.name, rollout.episode, rollout.environment):
        if spec is not None and ".py:" in spec:
            load_function(spec)


def _check_reads(data: ReadData, tasks: list[Task], metrics: list[Metric]) -> None:
    """The data have what the rewards and metrics of their tasks read; what is recorded has been scored already."""
    rewards = {task.name: [reward.source for reward in task.sources.values()] for task in tasks}
    for name, rows in data.train.items():
        if isinstance(rows, PromptDataset):  # numbers are files of the one task
            check_reads({f"data.train ({rows.name})": rows.batch}, rewards[name if name in rewards else MAIN])
    if isinstance(data.held_out, PromptDataset):
        held_out = {MAIN: data.held_out.batch} if [*rewards] == [MAIN] else by_task(data.held_out.batch, [*rewards])
        for name, batch in held_out.items():
            check_reads({f"data.eval ({data.held_out.name})": batch}, rewards[name], metrics)


def _source(part: RewardPart) -> dict[str, Any]:
    """What `make_reward` takes for a reward: its one origin as `source` with its own options, or several by name."""
    if isinstance(part, CostConfig) and part.components:
        return {name: {**_source(each), "weight": each.weight} for name, each in part.components.items()}
    (origin,) = part.origins()
    if origin == "name":
        return {"source": part.name, **({} if part.answer == "whole" else {"answer": part.answer})}
    if origin == "model":
        return {"source": part.model, "dtype": part.dtype}
    judge = {"template": part.template, "scale": part.scale}
    return {"source": getattr(part, origin), **{name: value for name, value in judge.items() if value is not None}}


def rewarding_episode(config: Config) -> Any:
    """The episode of the settings, if it says its rewards itself, as environments and agents do; else None."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.environment is not None:
        from verl.rollout.environments import as_environments

        return as_environments(rollout.environment)
    episode = None if rollout.episode is None else load_function(rollout.episode)
    return episode if getattr(episode, "gives_reward", False) else None


def placed_roles(config: Config, algorithms: Sequence[BaseAlgorithm]) -> list[str]:
    """The roles of a run of these algorithms that a placement names."""
    generates = ["rollout"] if any(algorithm.online for algorithm in algorithms) else []
    models = roles_of(config, algorithms) - {"actor", "reward", "cost"}
    return ["actor", *generates, *(role for role in ROLES if role in models)]


def build_actor(config: Config, head: Literal["lm", "score"], rows: int, controller: Controller | None = None) -> Actor:
    """The model that is trained, loaded under the head that its algorithms ask for; its reference policy too where
    one is given. `rows`: samples of a step."""
    policy = config.actor_rollout_ref
    actor = Actor(
        policy.model,
        train=_training(config, policy.actor, rows),
        rollout=policy.rollout,
        head=head,
        placement=controller,
        seed=config.trainer.seed,
    )
    if policy.ref.path is not None or policy.ref.dtype is not None:
        name, dtype = policy.ref.path or policy.model.path, policy.ref.dtype or policy.model.dtype
        assert name is not None
        trust, positions = policy.model.trust_remote_code, policy.model.max_position_embeddings
        actor.make_reference(load_model(name, dtype=dtype, trust_remote_code=trust, positions=positions))
    return actor


def build_critic(config: Config, rows: int, controller: Controller | None = None) -> Critic:
    """The value model of the settings; the actor's own model where they name none."""
    model = config.critic.model
    if model.path is None:
        model = model.replace(path=config.actor_rollout_ref.model.path)
    elif model.tokenizer is None:
        model = model.replace(tokenizer=model.path)
    train = _training(config, config.critic.options(config.actor_rollout_ref.actor), rows)
    return Critic(model, train=train, placement=controller, seed=config.trainer.seed)


def build_trainer(config: Config, tasks: list[Task], actor: Actor, rows: int, **options: Any) -> Trainer:
    """The trainer over all of it; `options` are further ones of `Trainer`."""
    settings, scheduler = config.trainer, config.trainer.task_scheduler
    has_critic = any("critic" in task.algorithm.roles for task in tasks)
    rollout = config.actor_rollout_ref.rollout
    kind: type[Trainer] = Trainer
    if settings.max_staleness is not None:
        options["max_staleness"] = settings.max_staleness
        if len(tasks) > 1:
            from verl.trainer.interleaved import InterleavedTrainer

            kind = InterleavedTrainer
        else:
            from verl.trainer.asynchronous import AsyncTrainer

            kind = AsyncTrainer
            options |= {"batch_size": config.data.batch_size, "rollout_workers": rollout.num_rollout_workers}
            options |= {name: getattr(rollout, name) for name in ("max_rollout_workers", "transport")}
    trainer = kind(
        actor,
        build_critic(config, rows, actor.controller) if has_critic else None,
        tasks=tasks,
        max_failed_episodes=config.reward.max_failure_rate,
        permute_rewards=settings.control == "permute_rewards",
        log_dir=False,
        **{name: getattr(settings, name) for name in _AS_SET},
        **options,
    )
    for guard in settings.guards:
        trainer.add_guard(SafetyGuard(**dict(guard)))
    if scheduler is not None:
        from verl.trainer.task_weights import DynamicTaskWeightScheduler

        trainer.set_task_scheduler(DynamicTaskWeightScheduler(**dict(scheduler)))
    return trainer


def _training(config: Config, update: TrainOptions, rows: int) -> TrainOptions:
    """The section, with what only the run knows: how many updates a schedule has, and the control without learning."""
    optim = update.optim
    if config.trainer.control == "zero_lr":
        optim = optim.replace(lr=0.0)
    updates = MiniBatchPlan(update.mini_batch_size, update.epochs).updates(rows)
    steps = optim.total_steps or max(1, config.trainer.total_steps * updates)
    if optim.schedule != "constant":
        optim = optim.replace(total_steps=steps)
    if optim.warmup_ratio:
        optim = optim.replace(warmup_ratio=0.0, warmup_steps=int(optim.warmup_ratio * steps))
    return update.replace(optim=optim)

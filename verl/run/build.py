"""From a run's settings to its parts: actor, critic, tasks, trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from verl.algorithms import BaseAlgorithm
from verl.cluster.controller import Controller
from verl.cluster.placement import ROLES
from verl.config import Config
from verl.config.schema import LimitSettings, SavingSettings, UpdateSettings
from verl.models.loading import load_model
from verl.roles.actor import Actor
from verl.roles.critic import Critic
from verl.run.check import roles_of
from verl.trainer.guard import SafetyGuard
from verl.trainer.task import Task
from verl.trainer.trainer import Trainer
from verl.training.options import TrainOptions
from verl.workers.update import MiniBatchPlan

#: Settings that the trainer takes under their names.
_AS_SET = [*SavingSettings.model_fields, *LimitSettings.model_fields, *UpdateSettings.model_fields]


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

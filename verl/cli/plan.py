"""`verl plan` and `verl train --dry-run`: a run is described, not started."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

from verl.cluster.placement import DeviceMesh
from verl.config import Config, CostConfig, RewardPart, run_id
from verl.config.schema import is_by_task
from verl.errors import ConfigError
from verl.planner.hardware import Cluster, Efficiency
from verl.planner.search import PlacementPlan, search, strong, weak
from verl.rollout.choice import planned_engine


def plan(config: Config) -> dict[str, str]:
    """The run that `config` describes, as labelled lines; reads no weights and imports no torch.

    Raises:
        ConfigError: the placement is not valid.
    """
    policy, trainer, algorithm = config.actor_rollout_ref, config.trainer, config.algorithm
    lines = {"run directory": str(Path(trainer.output_dir, run_id(config))), "model": _model(policy.model.path or "")}
    total = sum(task.share for task in config.tasks) or 1.0
    for task in config.tasks:
        rest = task.model_dump(mode="json", exclude_defaults=True, exclude={"name", "type", "share"})
        options = [f"{name}={value}" for name, value in rest.items()]
        lines[f"task {task.name}"] = " ".join([task.type, f"{task.share / total:.0%} of the prompts", *options])
    if not config.tasks:
        options = [f"{name}={value}" for name, value in algorithm.options.items()]
        lines["algorithm"] = " ".join([algorithm.name or "the default", *options])
        lines["reward"] = _rewards(config)
        if config.cost.origins():
            lines["cost"] = _reward(config.cost)
    lines["data"] = f"{_source(config.data.train)}; held out: {_source(config.data.eval)}"
    lines["a step"] = _step(config)
    if policy.rollout.name != "auto" or policy.rollout.url:
        lines["engine"] = "vLLM servers" if policy.rollout.url else policy.rollout.name
    else:
        name, why = planned_engine(policy.rollout, policy.model)
        lines["engine"] = f"embedded (auto: on a GPU {'too' if name == 'embedded' else name}, because {why})"
    epochs, every = trainer.total_epochs, trainer.eval_every  # how many steps epochs are, their rows alone can say
    steps = str(trainer.total_steps) if epochs is None else f"as many as {_count(epochs, 'epoch')} have"
    evaluated = "evaluated before and after" + ("" if every is None else f" and every {_count(every, 'step')}")
    if config.data.eval is None:
        evaluated = "never evaluated"
    saved = "at the end" if trainer.save_every is None else f"every {_count(trainer.save_every, 'step')}"
    lines["steps"] = f"{steps}, {evaluated}, saved {saved}"
    if trainer.placement is not None:
        lines["placement"] = str(DeviceMesh(trainer.placement)).replace("\n", "\n" + " " * 16)
    if trainer.control is not None:
        lines["control"] = f"{trainer.control}: this run should learn nothing"
    return lines


def cluster_of(text: str, network: float | None, efficiency: str | None) -> Cluster:
    """The cluster that the options of `verl plan` describe.

    Raises:
        ConfigError: an option cannot be read.
    """
    shares = None
    if efficiency is not None:
        try:
            shares = Efficiency(*map(float, efficiency.split(",", 2)))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"--efficiency: '{efficiency}' is not three shares such as 0.5,0.6,0.5: {error}"
            ) from None
    return Cluster.parse(text, network, shares)


def plan_placement(
    config: Config, cluster: Cluster, *, within: float | None = None, scaling: bool = False
) -> Iterator[str]:
    """What `verl plan --cluster` prints: the best placement ready to paste, the runners-up, memory, a timeline.

    Args:
        within: bound of a step's generation, in seconds.
        scaling: also how the batch must grow with the cluster.

    Raises:
        ConfigError: nothing fits, or something of the run is not modelled, such as several tasks.
    """
    from verl.algorithms import make_algorithm
    from verl.planner import picture as show
    from verl.run.build import roles_of
    from verl.run.planned import pasted, problem_of

    if config.tasks:
        raise ConfigError("verl plan: several tasks are not modelled: plan for the one that takes most, by itself")
    if within is not None and not within > 0:
        raise ConfigError(f"--within: seconds of a rollout are above 0, not {within:g}")
    roles = roles_of(config, [make_algorithm(config.algorithm.name, **config.algorithm.options)])
    problem = problem_of(config, roles, cluster, float("inf") if within is None else within)
    plans = search(problem)
    best, engine, shares = plans[0], plans[0].generation, cluster.efficiency
    yield (
        f"{cluster}; {shares.compute:.2g} of its products, {shares.memory:.2g} of its memory bandwidth, "
        f"{shares.network:.2g} of its links are reached\n"
    )
    yield f"# {best.seconds:.1f} s a step, {best.throughput:,.0f} tokens/s: to paste into the settings\n{pasted(best)}"
    yield (
        f"Rollout {engine.seconds:.1f} s: weights {engine.transition:.2f}, prompts {engine.prefill:.1f}, decoding "
        f"{engine.decode:.1f}, in {_count(engine.waves, 'wave')} of {_count(engine.together, 'sample')} an engine\n"
    )
    yield f"Timeline\n{show.timeline(best)}\n"
    yield f"Memory of a rank, GB\n{show.memory_table(best)}\n"
    yield f"Runners-up\n{show.runners_up(plans[:6])}"
    if scaling:
        yield f"\n{_scaling(best)}"


def _scaling(best: PlacementPlan) -> str:
    """How throughput grows with the cluster, and the batch that keeps 90 % of linear scaling on all of it."""
    cluster = best.problem.cluster
    ranks = [cluster.per_machine << i for i in range(cluster.machines.bit_length()) if 1 << i <= cluster.machines]
    plans = strong(best.problem, sorted({*ranks, cluster.size}))
    base = plans[0].per_device
    lines = [f"Scaling with {best.problem.work.samples} samples a step"]
    for plan in plans:
        size, share = plan.problem.cluster.size, plan.per_device / base
        lines.append(f"{size:6} devices {plan.throughput:12,.0f} tokens/s {share:6.0%} of linear")
    grown = weak(best.problem, plans[0], cluster.size)
    if grown is None:
        return "\n".join([*lines, f"no batch up to 64 times as large makes {cluster.size} devices 90 % linear"])
    share, samples = grown.per_device / base, grown.problem.work.samples
    return "\n".join([*lines, f"{cluster.size} devices are {share:.0%} linear with {samples} samples a step: {grown}"])


def _model(path: str) -> str:
    if not Path(path).is_dir():
        return f"{path} (no directory here: looked up as a hub name)"
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    return f"{path} ({size / 1e6:,.0f} MB of weights)" if size else f"{path} (a directory without weights)"


def _source(source: str | dict[str, Any] | None) -> str:
    if source is None:
        return "none"
    if isinstance(source, str):
        return source + ("" if Path(source).is_file() else " (no such file)")
    if is_by_task(source):
        return ", ".join(f"{name}: {_source(part)}" for name, part in source.items())
    details = (item for item in source.items() if item[0] not in ("task", "path"))
    return " ".join([str(source.get("task") or source.get("path")), *(f"{name}={value}" for name, value in details)])


def _step(config: Config) -> str:
    """A run without a reward has nothing to sample for: it learns from recorded responses."""
    rollout, update, prompts = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor, config.data.batch_size
    if config.tasks:
        return f"{prompts} prompts (or recorded groups) by the tasks' shares, then an update on the sum of their losses"
    if _rewards(config) == "none":
        return f"{prompts} recorded groups (a pair is one), each learned from {_count(update.epochs, 'time')}"
    samples = prompts * rollout.n
    updates = update.epochs * ceil(samples / (update.mini_batch_size or samples))
    return (
        f"{prompts} prompts x {rollout.n} samples = {samples} responses of at most {rollout.max_new_tokens} tokens, "
        f"then {_count(updates, 'optimizer step')}"
    )


def _rewards(config: Config) -> str:
    """The section `reward`, or what rewards the episodes without one."""
    rollout = config.actor_rollout_ref.rollout
    if config.reward.origins() or not (rollout.environment or rollout.episode):
        return _reward(config.reward)
    return "the environment" if rollout.environment else "the episode"


def _reward(part: RewardPart) -> str:
    if isinstance(part, CostConfig) and part.components:
        return " + ".join(f"{each.weight:g} x {name} ({_reward(each)})" for name, each in part.components.items())
    return next((str(getattr(part, field)) for field in part.origins()), "none")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"

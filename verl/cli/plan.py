"""What a run would do, without doing it: `verl train --dry-run`."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

from verl.config import Config, RewardConfig, RewardPart, run_id
from verl.controller.placement import DeviceMesh


def plan(config: Config) -> dict[str, str]:
    """The run that `config` describes, as labelled lines; reads no weights and imports no torch.

    Raises:
        ConfigError: the map of placement is none.
    """
    policy, trainer = config.actor_rollout_ref, config.trainer
    lines = {
        "run directory": str(Path(trainer.output_dir, run_id(config))),
        "model": _model(policy.model.path or ""),
        "algorithm": " ".join(
            [config.algorithm.name or "the default", *map(_option, config.algorithm.options.items())]
        ),
        "data": f"{_source(config.data.train)}; held out: {_source(config.data.eval)}",
        "reward": _reward(config.reward),
        **({"cost": _reward(config.cost)} if config.cost.is_given else {}),
        "a step": _step(config),
        "steps": f"{trainer.total_steps}, {_evaluated(config)}, saved {_every(trainer.save_every)}",
    }
    if trainer.placement is not None:
        lines["placement"] = str(DeviceMesh(trainer.placement)).replace("\n", "\n" + " " * 16)
    if trainer.control is not None:
        lines["control"] = f"{trainer.control}: this run should learn nothing"
    return lines


def _model(path: str) -> str:
    directory = Path(path)
    if not directory.is_dir():
        return f"{path} (no directory here: looked up as a hub name)"
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return f"{path} ({size / 1e6:,.0f} MB of weights)" if size else f"{path} (a directory without weights)"


def _source(source: str | dict[str, Any] | None) -> str:
    if source is None:
        return "none"
    if isinstance(source, str):
        return source + ("" if Path(source).is_file() else " (no such file)")
    details = (item for item in source.items() if item[0] not in ("task", "path"))
    return " ".join([str(source.get("task") or source.get("path")), *map(_option, details)])


def _step(config: Config) -> str:
    """A run without a reward has nothing to sample for: it learns from recorded responses."""
    rollout, update, prompts = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor, config.data.batch_size
    if not config.reward.is_given:
        return f"{prompts} recorded groups (a pair is one), each learned from {_count(update.epochs, 'time')}"
    samples = prompts * rollout.n
    updates = update.epochs * ceil(samples / (update.mini_batch_size or samples))
    return (
        f"{prompts} prompts x {rollout.n} samples = {samples} responses of at most {rollout.max_new_tokens} tokens, "
        f"then {_count(updates, 'optimizer step')}"
    )


def _reward(given: RewardConfig) -> str:
    if given.components:
        return " + ".join(f"{p.weight:g} x {name} ({_origin(p)})" for name, p in given.components.items())
    return _origin(given)


def _origin(part: RewardPart) -> str:
    return next((str(getattr(part, field)) for field in part.given()), "none")


def _option(item: tuple[str, Any]) -> str:
    return f"{item[0]}={item[1]}"


def _evaluated(config: Config) -> str:
    if config.data.eval is None:
        return "never evaluated"
    every = config.trainer.eval_every
    return "evaluated before and after" + ("" if every is None else f" and {_every(every)}")


def _every(steps: int | None) -> str:
    return "at the end" if steps is None else f"every {_count(steps, 'step')}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"

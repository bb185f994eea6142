"""What a run would do, told without doing it: `verl train --dry-run`."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any

from verl.config import Config, RewardPart, run_id


def plan(config: Config) -> dict[str, str]:
    """The run that `config` describes, as labelled lines; reads no weights and imports no torch."""
    policy, trainer = config.actor_rollout_ref, config.trainer
    rollout, samples = policy.rollout, config.data.batch_size * policy.rollout.n
    updates = policy.actor.epochs * ceil(samples / (policy.actor.mini_batch_size or samples))
    lines = {
        "run directory": str(Path(trainer.output_dir, run_id(config))),
        "model": _model(policy.model.path or ""),
        "algorithm": " ".join([config.algorithm.name, *map(_option, config.algorithm.options.items())]),
        "data": f"{_source(config.data.train)}; held out: {_source(config.data.eval)}",
        "reward": _reward(config),
        "a step": f"{config.data.batch_size} prompts x {rollout.n} samples = {samples} responses "
        f"of at most {rollout.max_new_tokens} tokens, then {_count(updates, 'optimizer step')}",
        "steps": f"{trainer.total_steps}, evaluated {_every(trainer.eval_every)}, saved {_every(trainer.save_every)}",
    }
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
    return " ".join([str(source.get("task") or source.get("path")), *map(_option, _details(source))])


def _details(source: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in source.items() if key not in ("task", "path")]


def _reward(config: Config) -> str:
    if config.reward.components:
        return " + ".join(f"{p.weight:g} x {name} ({_origin(p)})" for name, p in config.reward.components.items())
    return _origin(config.reward)


def _origin(part: RewardPart) -> str:
    return next((str(getattr(part, field)) for field in part.given()), "none")


def _option(item: tuple[str, Any]) -> str:
    return f"{item[0]}={item[1]}"


def _every(steps: int | None) -> str:
    return "at the end" if steps is None else f"every {_count(steps, 'step')}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"

"""The keywords of `Trainer`, for type checkers; `verl.trainer.options` spreads them over its records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.algorithm_options import AlgorithmKeywords

if TYPE_CHECKING:
    from verl.algorithms import BaseAlgorithm
    from verl.data.buffers import Buffer
    from verl.report.sinks import Logger
    from verl.rollout.base import SamplingParams
    from verl.tasks.task import Task
    from verl.trainer.evaluation import HeldOut
    from verl.trainer.options import BufferOptions, CheckpointOptions, LimitOptions, LoggingOptions


class TrainerKeywords(AlgorithmKeywords, total=False):
    """Further keywords of a trainer: fields of its records by their own names, and options of the algorithm."""

    reward_fn: Any
    cost: Any
    environment: Any
    config_path: str | Path | None
    dataloader: Iterable[Any] | None
    permute_rewards: bool
    skip_zero_advantage_rows: bool
    checkpoint_dir: str | Path | None
    save_every: int | None
    keep_checkpoints: int | None
    async_save: bool
    buffer_size: int | None
    buffer_dir: str | Path
    update_freq: int | None
    log_dir: str | Path | bool | None
    logger: Logger | None
    on_log_hook: Callable[[int, dict[str, Any]], None] | None
    timeline: str | Path | None
    deadline: float
    max_resamples: int
    max_skipped_updates: int
    max_failed_episodes: float
    device_map: Any
    num_rollout_workers: int | None
    num_update_workers: int | None
    strategy: Any
    use_amp: bool | None


class TrainerArguments(TrainerKeywords, total=False):
    """All arguments of `Trainer` but its models and its reward, for those that pass them on."""

    algorithm: str | BaseAlgorithm | None
    tasks: Sequence[Task] | None
    n: int | None
    sampling: SamplingParams | Mapping[str, Any] | None
    nodes: Mapping[str, Any] | Iterable[str]
    held_out: HeldOut | None
    placement: Any
    buffer: str | Buffer | BufferOptions
    checkpoints: CheckpointOptions | Mapping[str, Any] | None
    logging: LoggingOptions | Mapping[str, Any] | None
    limits: LimitOptions | Mapping[str, Any] | None

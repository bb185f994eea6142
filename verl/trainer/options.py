"""The settings of a trainer besides its models, tasks and data, in records; and the flat keywords that stand for their
fields (`save_every=10` for `checkpoints=CheckpointOptions(save_every=10)`), which are spread over them here."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, InstanceOf

from verl._base.record import Count, Portion, Processes, Record, SettingsError, cost, limit, output
from verl.config.schema import LimitSettings, SavingSettings, UpdateSettings
from verl.errors import ConfigError
from verl.report.sinks import Logger


class _Options(Record):
    model_config = ConfigDict(arbitrary_types_allowed=True)


class CheckpointOptions(_Options, SavingSettings):
    """Automatic checkpoints: `checkpoint_dir` and `save_every` together turn them on, one also at the end of `fit`. A
    failed save is a warning, at the end of `fit` an error. Ctrl-C and SIGTERM then end `fit` with one."""

    checkpoint_dir: str | Path | None = output(None, "where they are")
    save_every: Count | None = output(None, "steps from one to the next")
    keep_checkpoints: Count | None = output(None, "how many step-<number> stay there, the newest (None: all)")


class BufferOptions(_Options):
    """Where samples wait for an update."""

    buffer: Any = cost("memory", "memory, disk, distributed (shared on a Ray cluster), or an instance")
    buffer_size: Count | None = limit(None, "samples that wait at most (None: any number)")
    buffer_dir: str | Path = output("buffer", "where a disk buffer lies; the name of a distributed one")
    update_freq: Count | None = output(None, "an update each time so many new samples have come (None: every step)")


class LoggingOptions(_Options):
    """Where metrics go."""

    log_dir: str | Path | bool | None = output(
        None,
        "of TensorBoard events and metrics.jsonl (None: runs/<algorithm>-<time>; False: nowhere). What "
        "another run logged there is moved into earlier-1 (or -2, ...), unless this one goes on from a checkpoint",
    )
    logger: Logger | None = output(None, "in the place of log_dir")
    on_log_hook: Callable[[int, dict[str, Any]], None] | None = output(None, "fn(step, record) gets every log record")
    timeline: str | Path | None = output(None, "a trace of what worked when is written there")


class LimitOptions(_Options, LimitSettings):
    """When a step, or the run, gives up."""

    max_failed_episodes: Portion = limit(
        0.5, "share of the latest 256 samples, once there are 64, whose episode may fail"
    )


class PlacementOptions(_Options):
    """Where the models run, and how their ranks share the training; see `DeviceMesh`."""

    placement: Any = cost(None, "of all roles (None: where the handles say)")
    device_map: Any = cost(None, "the same")
    num_rollout_workers: Processes | None = cost(None, "instead: ranks that only generate")
    num_update_workers: Processes | None = cost(None, "instead: ranks that train")
    strategy: Any = cost(None, "ddp, fsdp, deepspeed or megatron, for all models; or a placement")
    use_amp: bool | None = cost(None, "of actor and critic, see Actor (None: as they say)")


#: Keywords that are no field of a record, and what they must be.
OTHERS: dict[str, Any] = {
    "reward_fn": Any,
    "cost": Any,
    "environment": Any,
    "config_path": str | Path | None,
    "dataloader": InstanceOf[Iterable[Any]] | None,
    "permute_rewards": bool,
    **{name: field.annotation for name, field in UpdateSettings.model_fields.items()},
}


class TrainerOptions(NamedTuple):
    """All records of a trainer, by the name of the argument that gives each."""

    placement: PlacementOptions
    buffer: BufferOptions
    checkpoints: CheckpointOptions
    logging: LoggingOptions
    limits: LimitOptions

    @classmethod
    def spread(cls, keywords: dict[str, Any], **arguments: Any) -> TrainerOptions:
        """The records that the arguments give, with those keywords that are fields of them, which are taken out of
        `keywords`.

        Raises:
            SettingsError: a value is wrong.
            ConfigError: a field is given in both.
        """
        records: dict[str, Any] = {}
        for name, kind in RECORDS.items():
            settings = arguments[name]
            # placement="cuda:0" stands for placement=PlacementOptions(placement="cuda:0"), buffer likewise.
            if name in ("placement", "buffer") and settings is not None and not isinstance(settings, kind):
                settings = {name: settings}
            flat = {key: keywords.pop(key) for key in kind.model_fields if key in keywords}
            record = kind.of(settings, name)
            if twice := sorted(flat.keys() & record.model_fields_set):
                raise ConfigError(f"'{twice[0]}' is given as a keyword and in {name}=: give it once")
            try:
                records[name] = record.replace(**flat) if flat else record
            except SettingsError as error:
                raise SettingsError("Trainer", error.problems) from None
        return cls(**records)


RECORDS: dict[str, type[_Options]] = typing.get_type_hints(TrainerOptions)


#: The keywords of a trainer, without its models and the options of its algorithm.
KEYWORDS = {"algorithm", "tasks", "n", "sampling", "nodes", "held_out"}.union(
    RECORDS, OTHERS, *(record.model_fields for record in RECORDS.values())
)

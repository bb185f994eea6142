"""What "auto" stands for in a run, dtypes and the engine: settled when it begins, kept in its directory.

So a run that is resumed on another machine, or where vLLM has been installed or is missing, goes on as it began.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from verl._base.durable import read_json, write_atomic
from verl.config import Config
from verl.errors import ConfigError
from verl.models.loading import resolved_dtype
from verl.roles.actor import Actor

FILE = "resolved.json"
_SECTIONS = ("actor_rollout_ref", "critic")


@dataclass(frozen=True)
class Resolved:
    """`resolved.json`.

    Attributes:
        dtypes: of the model of a section; None: its files say it.
        engine: that generates; None: not settled yet.
    """

    dtypes: dict[str, Literal["float64", "float32", "bfloat16", "float16", "int4"] | None]
    engine: str | None = None

    def put_into(self, config: Config) -> Config:
        """`config` with each "auto" replaced by these."""
        for section in _SECTIONS:
            part, dtype = getattr(config, section), self.dtypes.get(section)
            if part.model.dtype == "auto" and dtype is not None:
                config = config.replace(**{section: part.replace(model=part.model.replace(dtype=dtype))})
        policy = config.actor_rollout_ref
        if policy.rollout.name != "auto" or self.engine is None:
            return config
        return config.replace(actor_rollout_ref=policy.replace(rollout=policy.rollout.replace(name=self.engine)))


def resolve(config: Config, directory: Path, actor: Actor | None = None) -> Config:
    """`config` with each "auto" replaced by the value in the run's `directory`; a new run writes this machine's dtypes
    there.

    Args:
        actor: the engine that it takes for "auto" is kept from now on, too.

    Raises:
        ConfigError: what the directory keeps is damaged.
    """
    file, before = directory / FILE, None
    try:
        if file.exists():
            before = read_json(file, Resolved)
            config = before.put_into(config)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is damaged ({error}): give the dtypes (model.dtype) and rollout.name, or start anew"
        ) from error
    if (kept := before) is None:
        dtypes: dict[str, Any] = {}
        for section in _SECTIONS:
            model = getattr(config, section).model
            source, trust = model.path or config.actor_rollout_ref.model.path, model.trust_remote_code
            dtypes[section] = source and resolved_dtype(source, model.dtype, trust_remote_code=trust)
        kept = Resolved(dtypes)
    rollout = config.actor_rollout_ref.rollout
    if actor is not None and rollout.name == "auto" and not rollout.url:
        kept = replace(kept, engine=str(actor.resolve_engine()))
    if kept != before:
        write_atomic(file, json.dumps(asdict(kept), indent=1) + "\n")
    return kept.put_into(config)

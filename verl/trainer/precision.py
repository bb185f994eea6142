"""The dtypes that `dtype: auto` stands for in a run: resolved when it begins, kept in its directory.

So a run that is resumed on another machine goes on in the dtype in which it began.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from verl.config import Config
from verl.durable import read_json, write_atomic
from verl.errors import ConfigError
from verl.models.loading import resolved_dtype

FILE = "precision.json"
_Kept = dict[str, Literal["float64", "float32", "bfloat16", "float16", "int4"] | None]
_SECTIONS = ("actor_rollout_ref", "critic")


def with_dtypes(config: Config, directory: Path) -> Config:
    """`config` with a dtype in the place of each "auto": as kept in the run's `directory`, else as this machine has it.

    Raises:
        ConfigError: what the directory keeps is damaged.
    """
    file = directory / FILE
    if file.exists():
        kept = _read(file)
    else:
        kept = {section: _resolved(config, section) for section in _SECTIONS}
        write_atomic(file, json.dumps(kept, indent=1) + "\n")
    changed: dict[str, Any] = {}
    for section in _SECTIONS:
        part = getattr(config, section)
        if part.model.dtype == "auto" and kept.get(section):
            model = part.model.model_copy(update={"dtype": kept[section]})
            changed[section] = part.model_copy(update={"model": model})
    return config.model_copy(update=changed)


def _resolved(config: Config, section: str) -> str | None:
    model = getattr(config, section).model
    source = model.path or config.actor_rollout_ref.model.path
    if source is None:
        return None
    return resolved_dtype(source, model.dtype, trust_remote_code=model.trust_remote_code)


def _read(file: Path) -> dict[str, str | None]:
    try:
        return dict(read_json(file, _Kept))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is damaged ({error}): give the dtypes (model.dtype), or start anew") from error

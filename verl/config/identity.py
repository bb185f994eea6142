"""Which settings make a run another one: the name of its directory."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from verl._base.record import Record, extra
from verl._base.secrets import masked_settings
from verl.config.schema import Config


def config_hash(config: Config) -> str:
    """Eight hex digits over all settings that change a run's numbers.

    Left out are the settings marked so in the schema: where the run directory is and how it is called, what
    is logged and kept, how often it is saved, and its length, unless a learning rate depends on that. Credentials are
    left out, too.
    """
    content = _identity(config)
    # A longer run goes on from a shorter one, unless its learning rates already differ in the first step.
    optims = (config.actor_rollout_ref.actor.optim, config.critic.optim)
    if any(optim.schedule != "constant" and optim.total_steps is None for optim in optims):
        content["trainer"]["total_steps"] = config.trainer.total_steps
    text = json.dumps(masked_settings(content), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _identity(section: BaseModel) -> dict[str, Any]:
    content = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        # An "added" field at its default is left out: runs of before it was added keep their directory.
        if extra(field, "free") or (extra(field, "added") and value == field.default):
            del content[name]
        elif isinstance(value, Record):
            content[name] = _identity(value)
    return content


def run_id(config: Config) -> str:
    """The name of the run's directory: a readable part and `config_hash`."""
    name = config.trainer.run_name
    if name is None:
        source = config.data.train
        data = source.get("task") or source.get("path") if isinstance(source, dict) else source
        model = config.actor_rollout_ref.model.path or ""
        words = [config.algorithm.name or "", Path(model).name, Path(str(data or "")).stem]
        slugs = (re.sub(r"[^a-z0-9._]+", "-", word.lower()).strip("-.") for word in words)
        name = "-".join(filter(None, slugs))
    return f"{name}-{config_hash(config)}"

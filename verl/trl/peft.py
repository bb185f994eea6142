"""`peft.LoraConfig` as the adapters of an `Actor`."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from verl.errors import ConfigError

logger = logging.getLogger(__name__)

#: What is read, what peft fills in by itself, and what changes no weight of the adapters.
_READ = frozenset((
    "r", "lora_alpha", "target_modules", "lora_dropout", "task_type", "peft_type", "inference_mode", "auto_mapping",
    "base_model_name_or_path", "revision", "peft_version", "runtime_config",
))  # fmt: skip


def lora_options(config: Any, model: Any) -> dict[str, Any]:
    """Fields of `LoraOptions`.

    Args:
        model: the model, or its name or directory: where the configuration names no layers, peft's for its kind.

    Raises:
        ConfigError: it is no `LoraConfig`, or has more than rank, scale and layers.
    """
    if str(getattr(getattr(config, "peft_type", None), "value", "")) != "LORA":
        raise ConfigError(f"peft_config is a peft.LoraConfig, not {type(config).__name__}")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name not in _READ and value != default:
            raise ConfigError(
                f"peft_config has {field.name}={value!r}: rank, scale and layers are read. Give the trainer the model "
                "with its adapters, peft.get_peft_model(model, config), and no peft_config"
            )
    if config.lora_dropout:
        logger.warning("peft_config: lora_dropout=%s is not applied: nothing is dropped here", config.lora_dropout)
    targets = config.target_modules or _usual_targets(model)
    names = [targets] if isinstance(targets, str) else sorted(targets)
    return {"r": config.r, "alpha": config.lora_alpha, "targets": names}


def _usual_targets(model: Any) -> list[str]:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
    from transformers import AutoConfig

    kind = (AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config).model_type
    if kind not in USUAL:
        raise ConfigError(f"peft_config: peft knows no layers of a {kind} by itself: give target_modules")
    return list(USUAL[kind])

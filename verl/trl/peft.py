"""`peft.LoraConfig` as the adapters of an `Actor`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from verl.errors import ConfigError
from verl.models.lora import check_adapter_names, has_adapters

#: What is read, what peft fills in by itself, and what changes no weight of the adapters.
_READ = frozenset((
    "r", "lora_alpha", "target_modules", "lora_dropout", "task_type", "peft_type", "inference_mode", "auto_mapping",
    "base_model_name_or_path", "revision", "peft_version", "runtime_config",
))  # fmt: skip


def with_adapters(model: Any, config: Any, seed: int) -> Any:
    """`peft.PeftModel` over a model, as peft makes it; the random half of the adapters is drawn from `seed`.

    Raises:
        ConfigError: peft cannot make them, or the model has some already.
    """
    from peft import get_peft_model

    if getattr(config, "is_prompt_learning", False):
        raise ConfigError(f"peft_config is a {type(config).__name__}: prompt-learning is not computed here: use LoRA")
    if has_adapters(model):
        raise ConfigError("peft_config: the model has adapters already, which are trained: leave peft_config out")
    check_adapter_names(model, config, "peft_config")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config, autocast_adapter_dtype=False)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"peft_config: {error}") from error


def lora_options(config: Any, model: Any) -> dict[str, Any]:
    """Fields of `LoraOptions`, of adapters that ranks make for themselves, or over 4 bits.

    Args:
        model: the model, or its name or directory: where the configuration names no layers, peft's for its kind.

    Raises:
        ConfigError: it is no `LoraConfig`, or has more than rank, scale and layers.
    """
    if str(getattr(getattr(config, "peft_type", None), "value", "")) != "LORA":
        raise ConfigError(
            f"peft_config is a peft.LoraConfig, not {type(config).__name__}: prompt-learning and other "
            "methods are not done here"
        )
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name not in _READ and value != default:
            raise ConfigError(
                f"peft_config has {field.name}={value!r}: rank, scale and layers are read. Give the trainer the model "
                "with its adapters, peft.get_peft_model(model, config), and no peft_config"
            )
    if not (targets := config.target_modules):
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
        from transformers import AutoConfig

        kind = (AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config).model_type
        if kind not in USUAL:
            raise ConfigError(f"peft_config: peft knows no layers of a {kind} by itself: give target_modules")
        targets = USUAL[kind]
    names = [targets] if isinstance(targets, str) else sorted(targets)
    return {"r": config.r, "alpha": config.lora_alpha, "targets": names}


def get_peft_config(model_args: Any) -> Any:
    """`peft.LoraConfig` of a `ModelConfig`; None without `use_peft`."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    parameters = model_args.lora_target_parameters
    return LoraConfig(
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        task_type=model_args.lora_task_type,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        modules_to_save=model_args.lora_modules_to_save,
        **({} if parameters is None else {"target_parameters": parameters}),
    )


def get_quantization_config(model_args: Any) -> None:
    """None.

    Raises:
        ConfigError: the model is to be loaded in 4 or 8 bits.
    """
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model_args, name):
            raise ConfigError(f"{name}: train adapters over 4 bits with verl.Actor(model, dtype='int4', lora={{...}})")


def get_kbit_device_map() -> None:
    """None: devices are chosen by the placement."""

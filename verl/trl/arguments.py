"""TRL's `*Config` records: their names and defaults, and what each means here."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from verl.controller.ranks import torchrun_ranks
from verl.errors import ConfigError, nearest
from verl.trl.names import NO_EFFECT, OTHERWISE, removed

_COMMON: dict[str, Any] = {
    "output_dir": None,
    "learning_rate": 1e-6,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "logging_steps": 10,
    "report_to": "none",
    "run_name": None,
    "project": "huggingface",
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "eval_strategy": "no",
    "eval_steps": None,
    "bf16": None,
    "gradient_checkpointing": False,
    "seed": 42,
    "model_init_kwargs": None,
    "trust_remote_code": False,
    "use_cpu": False,
}
#: TRL's schedule -> ours.
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
#: Kinds of arguments whose default does not show it.
_KINDS: dict[str, Any] = {
    "bf16": bool | None,
    "save_total_limit": int | None,
    "eval_steps": int | None,
    "num_generations_eval": int | None,
    "max_prompt_length": int | None,
    "generation_batch_size": int | None,
    "steps_per_generation": int | None,
    "min_p": float | None,
    "epsilon_high": float | None,
    "delta": float | None,
    "center_rewards_coefficient": float | None,
    "reward_weights": list[float] | None,
    "warmup_steps": float,
}
#: How a command line gives an argument that may be True: with a value or without.
_FLAG = {"nargs": "?", "const": True}
_SINKS = ("tensorboard", "wandb", "trackio", "mlflow")


def _kind_of(name: str, default: Any) -> Any:
    """The type of an argument, as a command line reads it."""
    return _KINDS.get(name, (str | None) if default is None else type(default))


class Config:
    """Arguments of a trainer by TRL's names; each is an attribute, which may be set later.

    Raises:
        ConfigError: there is no such argument; the message names the nearest one, or what takes its place.
    """

    defaults: ClassVar[dict[str, Any]] = _COMMON
    #: As of a dataclass, which `dataclasses.fields`, `HfArgumentParser` and `TrlParser` take it for.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]] = {}
    #: Arguments of this record that TRL has and that are done otherwise here: name -> (default, what to do).
    otherwise: ClassVar[dict[str, tuple[Any, str]]] = {}

    def __init_subclass__(cls) -> None:
        # Their own code sets every field at the start; an argument without effect is None until somebody does.
        quiet = sorted(NO_EFFECT - cls.defaults.keys())
        fields = [(name, _kind_of(name, value), value) for name, value in cls.defaults.items()]
        fields += [(name, str | None, None) for name in quiet]
        flags = {*quiet, "bf16"}
        made: Any = dataclasses.make_dataclass(
            cls.__name__,
            [
                (name, kind, dataclasses.field(default=value, metadata=_FLAG if name in flags else {}))
                for name, kind, value in fields
            ],
        )
        cls.__dataclass_fields__ = made.__dataclass_fields__
        cls.__annotations__ = dict(made.__annotations__)
        for name in quiet:
            setattr(cls, name, None)

    def __init__(self, output_dir: str | None = None, **given: Any) -> None:
        self.__dict__.update(self.defaults)
        self.output_dir = output_dir
        for name, value in given.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        value = getattr(value, "value", value)  # of an enumeration of transformers
        if name in self.defaults:
            self.__dict__[name] = value
            return
        other = {**OTHERWISE, **self.otherwise}
        kind = type(self).__name__
        if name in other:
            default, hint = other[name]
            if value is not None and value != default and (value or default):
                raise ConfigError(f"{kind}: {name}={value!r} is not done here: {hint}")
        elif name not in NO_EFFECT:
            if instead := removed(name):
                raise ConfigError(f"{kind} has no argument '{name}': {instead}")
            raise ConfigError(f"{kind} has no argument '{name}': {nearest(name, [*self.defaults, *NO_EFFECT])}")
        self.__dict__[name] = value

    def __repr__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != self.defaults.get(name)}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    if TYPE_CHECKING:  # each argument is one

        def __getattr__(self, name: str) -> Any: ...

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def of(cls, args: Any) -> Self:
        """The record of what a caller gives: one of these, None, a mapping, or a `transformers.TrainingArguments` (or
        a record of TRL's own), of which all values are taken.

        Raises:
            ConfigError: it is none of these, or has a setting that there is not here.
        """
        if args is None or isinstance(args, Mapping):
            return cls(**(args or {}))
        if isinstance(args, cls):
            return args
        if isinstance(args, Config):
            raise ConfigError(f"args is a {type(args).__name__}: this trainer takes a {cls.__name__}")
        if not dataclasses.is_dataclass(args):
            raise ConfigError(f"args is a {cls.__name__} or a transformers.TrainingArguments, not {args!r:.60}")
        found = cls()
        known = found.defaults.keys() - {"gradient_checkpointing"}  # it changes no number, and costs time
        for field in dataclasses.fields(args):
            value = getattr(args, field.name, None)
            if field.name in known or (field.init and value and value != field.default and not _is_made(field)):
                setattr(found, field.name, value)
        return found

    def samples(self) -> int:
        """Samples (of preferences: pairs) that one optimizer step learns from, on all ranks."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps * torchrun_ranks())

    def optim_config(self, total: int) -> dict[str, Any]:
        """Fields of `OptimConfig` for so many optimizer steps.

        Raises:
            ConfigError: another optimizer than AdamW, or a schedule that there is not.
        """
        if not str(self.optim).startswith("adamw_torch"):
            raise ConfigError(f"optim='{self.optim}': here it is AdamW; pass your own as optimizers=(optimizer, None)")
        if self.lr_scheduler_type not in _SCHEDULES:
            raise ConfigError(f"lr_scheduler_type='{self.lr_scheduler_type}': {nearest('', _SCHEDULES)}")
        warmup = self.warmup_steps or self.warmup_ratio
        return {
            "lr": self.learning_rate,
            "betas": (self.adam_beta1, self.adam_beta2),
            "adam_eps": self.adam_epsilon,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm or None,
            "schedule": _SCHEDULES[self.lr_scheduler_type],
            "warmup_steps": math.ceil(warmup * total) if warmup < 1 else int(warmup),
            "total_steps": total,
        }

    def sinks(self) -> tuple[str, ...]:
        """Loggers of ours that `report_to` names.

        Raises:
            ConfigError: there is no such logger.
        """
        given = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ())
        names = list(_SINKS[:1]) if given == ["all"] else [name for name in given if name != "none"]
        for name in names:
            if name not in _SINKS:
                raise ConfigError(f"report_to='{name}': {nearest(name, [*_SINKS, 'all', 'none'])}")
        return ("console", *names)

    def model_settings(self) -> dict[str, Any]:
        """Keywords of `Actor` about the model.

        Raises:
            ConfigError: `model_init_kwargs` has one that there is not here.
        """
        kwargs = self.model_init_kwargs or {}
        given = json.loads(kwargs) if isinstance(kwargs, str) else dict(kwargs)  # a command line has JSON
        for name in ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage"):
            given.pop(name, None)  # how the model is laid out and run is decided here
        dtype = given.pop("dtype", given.pop("torch_dtype", "auto"))
        trust = bool(given.pop("trust_remote_code", self.trust_remote_code))
        if given:
            raise ConfigError(
                f"model_init_kwargs has '{next(iter(given))}', which is not passed on: load the model yourself, and "
                "give the trainer that"
            )
        return {"dtype": str(dtype).removeprefix("torch."), "trust_remote_code": trust}


class GRPOConfig(Config):
    defaults = _COMMON | {
        "num_generations": 8,
        "num_generations_eval": None,
        "max_completion_length": 512,
        "max_prompt_length": None,
        "shuffle_dataset": True,
        "generation_batch_size": None,
        "steps_per_generation": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "use_vllm": False,
        "beta": 0.0,
        "num_iterations": 1,
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "importance_sampling_level": "token",
        "reward_weights": None,
        "scale_rewards": "group",
        "loss_type": "dapo",
        "entropy_coef": 0.0,
        "vllm_importance_sampling_correction": True,
    }
    otherwise: ClassVar = {
        "vllm_mode": ("colocate", "give the engine itself: GRPOTrainer(rollout=RolloutOptions(url=...))"),
        "multi_objective_aggregation": ("sum_then_normalize", "rewards are summed, then normalised"),
        "mask_truncated_completions": (False, "write a reward that returns None where a completion has no end"),
        "sync_ref_model": (False, "the reference is the model as it was at first"),
        "top_entropy_quantile": (1.0, "all tokens are trained"),
        "use_adaptive_entropy": (False, "entropy_coef is fixed"),
        "off_policy_mask_threshold": (None, "see rollout_rs in docs/algorithms.md"),
        "repetition_penalty": (1.0, "sampling has temperature, top_p, top_k and min_p"),
        "generation_kwargs": (None, "sampling has temperature, top_p, top_k and min_p"),
        "vllm_structured_outputs_regex": (None, "see constrained_decoding in docs/algorithms.md"),
        "log_completions_hub_repo": (None, "nothing is uploaded"),
        "chat_template_kwargs": (None, "set the tokenizer's chat_template"),
    }

    def prompts(self) -> int:
        """Prompts of one rollout.

        Raises:
            ConfigError: a rollout is not a whole number of groups, or of optimizer steps.
        """
        samples = self.rollout_samples()
        if samples % self.num_generations:
            raise ConfigError(
                f"a rollout has {samples} completions (per_device_train_batch_size x gradient_accumulation_steps x "
                f"ranks), which num_generations={self.num_generations} does not divide"
            )
        return samples // int(self.num_generations)

    def rollout_samples(self) -> int:
        """Completions of one rollout."""
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise ConfigError("generation_batch_size and steps_per_generation are two words for one: give one")
        each = self.per_device_train_batch_size * torchrun_ranks()
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        total = int(self.generation_batch_size or each * steps)
        if total % self.samples():
            raise ConfigError(f"a rollout of {total} completions is no whole number of steps of {self.samples()}")
        return total

    def updates(self) -> int:
        """Optimizer steps of one rollout."""
        return self.rollout_samples() // self.samples() * int(self.num_iterations)


class DPOConfig(Config):
    defaults = _COMMON | {
        "beta": 0.1,
        "loss_type": "sigmoid",
        "label_smoothing": 0.0,
        "discopop_tau": 0.05,
        "max_length": 1024,
    }
    otherwise: ClassVar = {
        "loss_weights": (None, "one loss is trained: name one loss_type"),
        "truncation_mode": ("keep_start", "the end of a response is cut"),
        "ld_alpha": (None, "leave it out"),
        "f_divergence_type": ("reverse_kl", "leave it out"),
        "use_weighting": (False, "leave it out"),
        "sync_ref_model": (False, "the reference is the model as it was at first"),
    }


class KTOConfig(Config):
    defaults = _COMMON | {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "max_length": 1024}
    otherwise: ClassVar = {
        "loss_type": ("kto", "the loss is KTO's"),
        "sync_ref_model": (False, "the reference is the model as it was at first"),
    }


class SFTConfig(Config):
    defaults = _COMMON | {"learning_rate": 2e-5, "max_length": 1024}
    otherwise: ClassVar = {
        "truncation_mode": ("keep_start", "the end of a response is cut"),
        "completion_only_loss": (True, "the loss is of completions alone; make it prompt '' to train on all"),
        "dataset_text_field": ("text", "name the column 'completion', beside a column 'prompt'"),
        "loss_type": ("nll", "the loss is the likelihood"),
        "chat_template_path": (None, "set the tokenizer's chat_template"),
        "eos_token": (None, "set the tokenizer's eos_token"),
        "dataset_kwargs": (None, "leave it out"),
        "neftune_noise_alpha": (None, "leave it out"),
    }


class RewardConfig(Config):
    defaults = _COMMON | {"learning_rate": 1e-4, "max_length": 1024, "center_rewards_coefficient": None}
    otherwise: ClassVar = {
        "chat_template_path": (None, "set the tokenizer's chat_template"),
        "eos_token": (None, "set the tokenizer's eos_token"),
    }


def _is_made(field: dataclasses.Field[Any]) -> bool:
    """Whether a record of transformers works out this field by itself, so that no default tells what the user said."""
    return field.default is None or field.default_factory is not dataclasses.MISSING

"""TRL's `*Config` records: their names, their defaults, and how each is read here."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self

import yaml  # type: ignore[import-untyped]
from pydantic import Field
from transformers import TrainingArguments

from verl._base.checked import validated
from verl._base.record import Count, Natural, NotNegative, Positive, Seed, Share
from verl._host.ranks import torchrun_ranks
from verl.errors import ConfigError, nearest, shown
from verl.trl.names import DEFAULTS, NO_EFFECT, OTHERWISE, REMOVED

#: How a command line gives an argument that may be True: with a value or without.
_FLAG = {"nargs": "?", "const": True}
_SINKS = ("tensorboard", "wandb", "trackio", "mlflow")
_Steps = Annotated[int, Field(lt=2**31)]
_Mapping = Mapping[str, Any] | str | None  # a command line has JSON


#: TRL's defaults, which are transformers' where it has no other.
_THEIRS = {
    field.name: None if field.default is dataclasses.MISSING else getattr(field.default, "value", field.default)
    for field in dataclasses.fields(TrainingArguments)
} | DEFAULTS


def _unmapped(name: str, hint: str) -> tuple[str, Any, Any]:
    """An argument of TRL's that is not mapped here, as a field of a dataclass.

    Args:
        hint: what to do instead of setting it; "": any value is taken.
    """
    default = _THEIRS.get(name)
    if isinstance(default, bool):
        return name, bool, dataclasses.field(default=default, metadata={"help": hint})
    # What a command line's text becomes: a value that says nothing, such as 0.0, is taken.
    kind = yaml.safe_load if hint else str | None
    return name, kind, dataclasses.field(default=default, metadata={"help": hint, **_FLAG})


def _record(cls: Any) -> Any:
    """Decorator: a dataclass that checks its arguments by their hints."""
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    hints, unbounded = typing.get_type_hints(cls, include_extras=True), (str, str | None, list[float] | None)
    #: Types and bounds of the arguments that have an effect here, without texts and lists.
    cls._hints = {name: hints[name] for name in cls.defaults() if hints[name] not in unbounded}
    return cls


_OTHERS = {**dict.fromkeys(sorted(NO_EFFECT), ""), **OTHERWISE}
_Others: Any = dataclasses.make_dataclass("_Others", map(_unmapped, _OTHERS, _OTHERS.values()), init=False, eq=False)


@_record
class Config(_Others):  # type: ignore[misc]
    """Arguments of a trainer by TRL's names; each is an attribute, which may be set later.

    Raises:
        ConfigError: there is no such argument; the message names the nearest one, or what takes its place.
    """

    output_dir: str | None = None
    learning_rate: NotNegative = 1e-6
    per_device_train_batch_size: Count = 8
    gradient_accumulation_steps: Count = 1
    num_train_epochs: Positive = 3.0
    max_steps: _Steps = -1
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: _Mapping = None
    warmup_steps: NotNegative | None = 0
    warmup_ratio: Share | None = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: NotNegative | None = 1.0
    optim: str = "adamw_torch_fused"
    logging_steps: Positive = 10
    report_to: str = "none"
    run_name: str | None = None
    project: str = "huggingface"
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    save_steps: Positive = 500
    save_total_limit: int | None = None
    eval_strategy: Literal["no", "steps", "epoch"] = "no"
    eval_steps: Positive | None = None
    bf16: bool | None = dataclasses.field(default=None, metadata=_FLAG)
    gradient_checkpointing: bool = False
    seed: Seed = 42
    data_seed: Seed | None = None
    model_init_kwargs: _Mapping = None
    trust_remote_code: bool = False
    use_cpu: bool = False

    def __init_subclass__(cls) -> None:
        _record(cls)

    def __init__(self, output_dir: str | None = None, **settings: Any) -> None:
        self.output_dir = output_dir
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        value = getattr(value, "value", value)  # of an enumeration of transformers
        kind, field = type(self).__name__, self.__dataclass_fields__.get(name)
        if field is None:
            known = [*self.defaults(), *NO_EFFECT]
            raise ConfigError(f"{kind} has no argument '{name}': {REMOVED.get(name) or nearest(name, known)}")
        hint = field.metadata.get("help")
        if hint and value is not None and value != field.default and (value or field.default):
            raise ConfigError(f"{kind}: {name}={shown(value)} is not done here: {hint}")
        if value is None and self._hints.get(name) in (bool, int, float):
            value = field.default  # nobody said anything
        if name in self._hints:
            validated(kind, self._hints, {name: value})
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no argument '{name}'")

    def __repr__(self) -> str:
        fields = self.__dataclass_fields__
        changed = {name: value for name, value in vars(self).items() if value != fields[name].default}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    to_dict = dataclasses.asdict

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The defaults of the arguments that have an effect here."""
        return {field.name: field.default for field in dataclasses.fields(cls) if "help" not in field.metadata}

    @classmethod
    def of(cls, args: Any) -> Self:
        """A record from one of these, None, a mapping, or a `transformers.TrainingArguments` (or TRL's own record).

        Raises:
            ConfigError: another type, or a setting that is not known here.
        """
        if args is None or isinstance(args, Mapping):
            return cls(**(args or {}))
        if isinstance(args, cls):
            return args
        if isinstance(args, Config):
            raise ConfigError(f"args is a {type(args).__name__}: this trainer takes a {cls.__name__}")
        if not dataclasses.is_dataclass(args):
            raise ConfigError(f"args is a {cls.__name__} or a transformers.TrainingArguments, not {shown(args)}")
        record = cls()
        known = cls.defaults().keys() - {"gradient_checkpointing"}  # it changes no number, and costs time
        for field in dataclasses.fields(args):
            value = getattr(args, field.name, None)
            # Of what such a record works out by itself no default tells what the user said.
            is_made = field.default is None or field.default_factory is not dataclasses.MISSING
            if field.name in known or (field.init and value and value != field.default and not is_made):
                setattr(record, field.name, value)
        return record

    def read_here(self) -> None:
        """A stream is read by this process alone.

        Raises:
            ConfigError: `accelerator_config` says that batches are sent to the others.
        """
        config: Any = self.accelerator_config  # type: ignore[has-type]
        said = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
        if said.get("dispatch_batches"):
            raise ConfigError("Iterable datasets require `dispatch_batches=False`: leave it out of accelerator_config")
        self.accelerator_config, self.dataloader_num_workers = SimpleNamespace(dispatch_batches=False), 0

    def samples(self) -> int:
        """Samples (of preferences: pairs) that one optimizer step learns from, on all ranks."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps * torchrun_ranks())

    def sinks(self) -> tuple[str, ...]:
        """Loggers of ours that `report_to` names.

        Raises:
            ConfigError: there is no such logger.
        """
        named: Any = self.report_to  # a script may give a list
        loggers = [named] if isinstance(named, str) else list(named or ())
        names = list(_SINKS[:1]) if loggers == ["all"] else [name for name in loggers if name != "none"]
        for name in names:
            if name not in _SINKS:
                raise ConfigError(f"report_to='{name}': {nearest(name, [*_SINKS, 'all', 'none'])}")
        return ("console", *names)

    def mapping(self, name: str) -> dict[str, Any]:
        """An argument that is a mapping, which a command line gives as JSON.

        Raises:
            ConfigError: it is not a mapping.
        """
        value = getattr(self, name) or {}
        try:
            return dict(json.loads(value) if isinstance(value, str) else value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}={shown(value)} is no mapping, and no JSON of one") from error

    def model_settings(self) -> dict[str, Any]:
        """Keywords of `Actor` about the model.

        Raises:
            ConfigError: `model_init_kwargs` has one that is not known here.
        """
        settings = {name: value for name, value in self.mapping("model_init_kwargs").items() if value is not None}
        for name in ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage"):
            settings.pop(name, None)  # how the model is laid out and run is decided here
        if settings.get("revision") == "main":
            del settings["revision"]
        dtype = settings.pop("dtype", settings.pop("torch_dtype", None)) or "float32"
        trust = bool(settings.pop("trust_remote_code", self.trust_remote_code))
        if settings:
            raise ConfigError(
                f"model_init_kwargs has '{next(iter(settings))}', which is not passed on: load the model yourself, and "
                "give the trainer that"
            )
        return {"dtype": str(dtype).removeprefix("torch."), "trust_remote_code": trust}


class OnlineConfig(Config):
    """Arguments of all trainers on sampled completions."""

    num_generations: Count = 8
    num_generations_eval: Count | None = None
    max_completion_length: Count = 512
    max_prompt_length: int | None = None
    shuffle_dataset: bool = True
    generation_batch_size: Count | None = None
    steps_per_generation: Count | None = None
    temperature: NotNegative = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    use_vllm: bool = False
    beta: float = 0.0
    num_iterations: Count = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    reward_weights: list[float] | None = None
    chat_template_kwargs: _Mapping = None

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
            raise ConfigError(
                f"a rollout of {total} completions is no whole number of steps of {self.samples()}: set "
                "steps_per_generation to a multiple of gradient_accumulation_steps"
            )
        return total


class GRPOConfig(OnlineConfig):
    max_tool_calling_iterations: Natural | None = None
    use_bias_correction_kl: bool = True
    delta: float | None = None
    importance_sampling_level: Literal["token", "sequence"] = "token"
    scale_rewards: Literal["group", "batch", "none", True, False] = "group"
    loss_type: str = "dapo"
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    entropy_coef: float = 0.0
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: Literal["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"] = (
        "sequence_mask"
    )
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_clip_max: float | None = 3.0


class RLOOConfig(OnlineConfig):
    num_generations: Count = 2
    beta: float = 0.05
    normalize_advantages: bool = False


class _OfflineConfig(Config):
    """Arguments of all trainers on recorded responses."""

    max_length: int | None = 1024
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"


class DPOConfig(_OfflineConfig):
    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05


class KTOConfig(_OfflineConfig):
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    loss_type: str = "kto"
    train_sampling_strategy: Literal["random", "sequential"] = "sequential"


class SFTConfig(_OfflineConfig):
    learning_rate: NotNegative = 2e-5
    loss_type: str = "nll"
    completion_only_loss: bool | None = dataclasses.field(default=None, metadata=_FLAG)
    assistant_only_loss: bool = False
    shuffle_dataset: bool = False
    dataset_text_field: str = "text"
    chat_template_path: str | None = None


class RewardConfig(_OfflineConfig):
    learning_rate: NotNegative = 1e-4
    center_rewards_coefficient: float | None = None
    chat_template_path: str | None = None

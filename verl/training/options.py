"""Settings of training: the section of a model that is trained, its optimizer's, and what an engine takes. Imported
without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from verl._base.combinations import check, named
from verl._base.names import check_known
from verl._base.record import AsTuple, Count, FunctionPath, Natural, Record, Share, Strings, cost, result, wrong
from verl.errors import ConfigError
from verl.models.options import FULL_NAME
from verl.weights.layout import PARALLEL, Layout, ModelShape

_Beta = Annotated[float, Field(ge=0, lt=1)]
Head = Literal["lm", "value", "score"]
Strategy = Literal["single", "ddp", "fsdp", "deepspeed", "megatron"]


class OptimConfig(Record):
    """AdamW (Loshchilov and Hutter, 2019) with a learning-rate schedule. A step here is an optimizer step."""

    lr: float = result(1e-6, "highest learning rate", ge=0)
    betas: Annotated[tuple[_Beta, _Beta], AsTuple] = result((0.9, 0.999), "decay rates of the two moments")
    adam_eps: float = result(1e-6, "added to the root of the second moment", gt=0)
    weight_decay: float = result(0.0, "decoupled; acts on what weight_decay_on says", ge=0)
    weight_decay_on: Literal["all", "matrices"] = result(
        "all", "trained weights that decay: all, or those of two dimensions and more (not biases, norms)", added=True
    )
    moments: Literal["bfloat16", "float32"] | None = result(
        None, "dtype of the moments of bf16 weights (null: bfloat16, rounded at random)"
    )
    max_grad_norm: float | None = result(1.0, "global norm to clip to; null: none", gt=0)
    warmup_steps: Natural = result(0, "steps of linear warm-up; the first is not zero")
    warmup_ratio: Share = result(0.0, "share of the run's steps that is warm-up, instead of warmup_steps", added=True)
    schedule: Literal["constant", "linear", "cosine"] | Callable[[int], float] = result(
        "constant",
        "course of the learning rate after the warm-up; in Python also a function of the optimizer step, "
        "from 0, to the factor of lr, its warm-up included",
    )
    total_steps: Count | None = result(None, "where linear and cosine reach zero")

    def _check(self) -> None:
        if self.weight_decay_on != "all" and not self.weight_decay:
            raise wrong("weight_decay_on", "is of weight_decay, which is 0: set that, or leave it out")
        if self.schedule not in ("constant", "linear", "cosine") and (self.warmup_steps or self.total_steps):
            raise wrong("schedule", "is a function of all steps: leave warmup_steps and total_steps out")
        if self.warmup_ratio and (self.warmup_steps or self.schedule not in ("constant", "linear", "cosine")):
            raise wrong("warmup_ratio", "is in the place of warmup_steps, and of no schedule of your own: leave it out")
        if self.total_steps is None:
            return
        if self.schedule == "constant":
            raise wrong("total_steps", "is where linear and cosine reach zero: set schedule, or leave it out")
        if self.warmup_steps >= self.total_steps:
            raise wrong(
                "warmup_steps", f"{self.warmup_steps} leaves nothing of total_steps={self.total_steps}: lower it"
            )


_Dtype = Annotated[Literal["bfloat16", "float32"], FULL_NAME]


class WrapPolicy(Record):
    transformer_layer_cls_to_wrap: Strings | None = cost(
        None, "classes of the modules that are cut and gathered as a unit (null: each layer)"
    )


class MixedPrecision(Record):
    param_dtype: _Dtype | None = result(None, "dtype of gathered parameters, also bf16, fp32 (null: the model's)")
    reduce_dtype: _Dtype | None = result(
        None, "dtype that gradients are reduced in (null: float32 of bf16 weights, else theirs)"
    )
    buffer_dtype: _Dtype | None = result(None, "dtype of buffers (null: as the model has them)")


class FSDPConfig(Record):
    """Fully sharded data parallelism, of the strategy 'fsdp'. `wrap_policy_fn` may also be set as an attribute."""

    fsdp_size: Literal[-1] | Count = cost(
        -1, "ranks that one copy of a model is sharded over; further ranks hold replicas (-1: all)", free=True
    )
    param_offload: bool = cost(
        False, "keep and update this rank's shards in host memory (ranks on CPU have them there anyway)", free=True
    )
    optimizer_offload: bool = cost(
        False, "between updates keep the optimizer's state in host memory, and free the gradient sums", free=True
    )
    reshard_after_forward: bool = cost(
        True, "free gathered parameters after the forward pass, and gather them again for backward", free=True
    )
    forward_prefetch: bool = cost(False, "gather the next unit while the present one computes", free=True)
    wrap_policy: WrapPolicy = cost(WrapPolicy(), "what is sharded and gathered as a unit", free=True)
    wrap_policy_fn: FunctionPath | Callable[..., Any] | None = cost(
        None,
        "FILE.py:FUNCTION of a module that says whether it is a unit, or a policy of FSDP1 "
        "(transformer_auto_wrap_policy)",
        free=True,
    )
    mixed_precision: MixedPrecision = Field(MixedPrecision(), description="precision under FSDP")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "wrap_policy_fn":
            super().__setattr__(name, value)
        self.__dict__[name] = type(self)(wrap_policy_fn=value).wrap_policy_fn

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, settings: Any) -> Any:
        """Accept `transformer_layer_cls_to_wrap` here too, where Accelerate and DeepSpeed have it."""
        name = "transformer_layer_cls_to_wrap"
        if not isinstance(settings, Mapping) or name not in settings:
            return settings
        policy = {**dict(settings.get("wrap_policy") or {}), name: settings[name]}
        return {key: value for key, value in settings.items() if key != name} | {"wrap_policy": policy}

    def _check(self) -> None:
        if self.wrap_policy_fn is not None and self.wrap_policy.transformer_layer_cls_to_wrap is not None:
            raise wrong("wrap_policy_fn", "says what is a unit, and so does wrap_policy: give one of them")


class DeepSpeedOptions(Record):
    zero_stage: Literal[1, 2, 3] = cost(
        2,
        "what DeepSpeed cuts over ranks: masters and moments (1), gradients too (2), weights too (3); it "
        "sums in float32",
    )


class TrainSettings(Record):
    """How one model is trained: the section `critic` of a file."""

    optim: OptimConfig = Field(OptimConfig(), description="optimizer, learning rate and its schedule")
    mini_batch_size: Count | None = result(None, "samples per optimizer step (null: all of the rollout batch)")
    epochs: Count = result(1, "passes over each rollout batch")
    micro_batch_size: Count | None = cost(
        None,
        "most samples in one forward and backward pass (null: as max_tokens_per_micro_batch allows; also: "
        "train_micro_batch_size_per_gpu)",
    )
    max_tokens_per_micro_batch: Count | None = cost(
        16384, "most tokens in one forward and backward pass; a longer sample goes alone"
    )
    use_amp: bool = result(False, "fp32 weights are multiplied in bfloat16 (autocast), and stay as they are")
    use_torch_compile: bool = cost(
        False, "compile each layer by torch.compile, instead of fused kernels (strategies single and ddp)"
    )
    strategy: Strategy = cost(
        "ddp",
        "how ranks share training: ddp (each has the whole model), fsdp (each a part), "
        "deepspeed (ZeRO), megatron (Megatron-LM's layers), single (one rank)",
        free=True,
    )
    tensor_parallel_size: Count = cost(1, "ranks that share the matrices of each layer", free=True)
    pipeline_parallel_size: Count = cost(1, "ranks that share the layers, in stages", free=True)
    ulysses_sequence_parallel_size: Count = cost(1, "ranks that share the tokens of a sequence", free=True)
    expert_parallel_size: Count = cost(1, "ranks that share the experts of a mixture", free=True)


class TrainOptions(TrainSettings):
    """The section `actor_rollout_ref.actor` of a file, and `train=` of a handle."""

    fsdp_config: FSDPConfig = Field(default_factory=FSDPConfig, description="fully sharded data parallelism")
    deepspeed_config: DeepSpeedOptions = cost(DeepSpeedOptions(), "ZeRO by DeepSpeed", free=True)

    @property
    def trains(self) -> bool:
        """Whether the model is trained; else it is only read."""
        return any(getattr(self, name, None) is not None for name in ("optim", "optimizer"))

    @property
    def back_end(self) -> str:
        """The strategy that computes: a model that is only read needs no ZeRO."""
        return "fsdp" if self.strategy == "deepspeed" and not self.trains else self.strategy

    def asked(self) -> dict[str, str]:
        """The settings by their names in `verl._base.combinations`."""
        fsdp, optim = self.fsdp_config, self.optim if self.trains else None
        decays = optim is not None and optim.total_steps is None and optim.schedule in ("linear", "cosine")
        return named({
            self.strategy: f"strategy '{self.strategy}'",
            "fsdp_config": fsdp != FSDPConfig(),
            "deepspeed_config": self.deepspeed_config != DeepSpeedOptions(),
            "gathered weights": fsdp.param_offload or fsdp.mixed_precision != MixedPrecision(),
            "use_torch_compile": self.use_torch_compile,
            "use_amp": self.use_amp,
            "training": self.trains,
            "moments in bfloat16": optim is not None and optim.moments == "bfloat16",
            "decay of matrices": optim is not None and optim.weight_decay > 0 and optim.weight_decay_on == "matrices",
            "no end": str(optim.schedule) if optim is not None and decays else "",
        })  # fmt: skip


class EngineOptions(TrainOptions):
    """Options of a training engine: `TrainOptions`, the model's own settings, and a caller's optimizer."""

    optim: OptimConfig | None = result(  # type: ignore[assignment]
        default=None, description="null: the model is only read, unless `optimizer` is given"
    )
    optimizer: Any = result(
        None,
        "in the place of AdamW a torch optimizer of the caller's over the model's parameters, or a "
        "function that makes one of a list of parameters; where ranks cut weights these are pieces of them, so that it "
        "must treat a weight element by element",
    )
    scheduler: Any = result(
        None, "torch's schedule of that optimizer, or a function that makes it of the optimizer; it steps after it"
    )
    gradient_checkpointing: bool = cost(False, "compute activations again in the backward pass")
    share_prompts: bool = cost(True, "rows share the forward pass of what they begin with; the numbers stay the same")
    fused_kernels: bool | str = cost(True, "see `PackedModel`")
    remove_padding: bool = cost(True, "false: compute on padded rows, see `Forward`")

    def _check(self) -> None:
        if self.scheduler is not None and self.optimizer is None:
            raise wrong("scheduler", "is of a caller's optimizer: give optimizer too, or optim.schedule in its place")

    def asked(self) -> dict[str, str]:
        here: dict[str, str | bool] = {
            "optimizer": "own optimizer" * (self.optimizer is not None),
            "live optimizer": type(self.optimizer).__name__ * hasattr(self.optimizer, "param_groups"),
            "gradient checkpointing": self.gradient_checkpointing,
            "padding": not self.remove_padding,
            "padded rows": "use_remove_padding is false" * (not self.remove_padding),
        }
        return super().asked() | named(here)

    def frozen(self) -> EngineOptions:
        """The options of the same model where it is only read."""
        return self.replace(optim=None, optimizer=None, scheduler=None, gradient_checkpointing=False)

    def generating(self, layout: Layout) -> EngineOptions:
        """The options of its copy in the layout of generation: a model of transformers, whatever back end trains."""
        return self.frozen().replace(
            strategy="ddp",
            fsdp_config=FSDPConfig(),
            deepspeed_config=DeepSpeedOptions(),
            use_torch_compile=self.use_torch_compile and layout.is_plain,
        )


#: Setting -> the dimension of a layout that it is the size of.
_SIZES = {
    "pipeline_parallel_size": "pp",
    "ulysses_sequence_parallel_size": "sp",
    "expert_parallel_size": "ep",
    "tensor_parallel_size": "tp",
}


def layout_of(options: TrainOptions, size: int, parallel: str = "data") -> Layout:
    """How `size` ranks share a model by these settings. Ranks that they leave over are replicas, or cut it ('fsdp').

    Args:
        parallel: what the placement says for the role, a key of `PARALLEL`: its ranks are along that dimension, if the
            settings do not give it a size.

    Raises:
        ConfigError: the sizes do not multiply to the ranks, or the strategy has no such setting.
    """
    check_known("placement: no layout is called", [parallel], PARALLEL)
    sizes = {dim: getattr(options, setting) for setting, dim in _SIZES.items()}
    dim = PARALLEL[parallel]
    if dim and sizes[dim] == 1:
        sizes[dim] = max(1, size // math.prod(sizes.values()))
    data, rest = divmod(size, math.prod(sizes.values()))
    if rest:
        asked = " x ".join(f"{setting}={sizes[dim]}" for setting, dim in _SIZES.items() if sizes[dim] > 1)
        raise ConfigError(f"layout: {asked} does not divide the {size} rank{'s' * (size > 1)} that the model has")
    cut = {dim: setting for setting, dim in _SIZES.items() if sizes[dim] > 1}
    ranks = {"several ranks": str(size) * (size > 1), "one data-parallel rank": data == 1}
    check(options.asked() | cut | named(ranks))
    fsdp = options.fsdp_config
    if options.strategy != "fsdp":
        if options.strategy == "deepspeed" and options.deepspeed_config.zero_stage == 3:
            return Layout(shard=data)
        return Layout(replicate=data, **sizes)
    shard = data if fsdp.fsdp_size == -1 else fsdp.fsdp_size
    if data % shard:
        raise ConfigError(f"layout: fsdp_config.fsdp_size={shard} does not divide the {data} data-parallel ranks")
    return Layout(replicate=data // shard, shard=shard, **sizes)


def check_training(options: TrainOptions, layout: Layout, shape: ModelShape, **more: str) -> None:
    """Refuse training that cannot be: on the driver before anything is started, and in engines of ranks.

    Args:
        more: what else is asked for, as `verl._base.combinations` names it.

    Raises:
        ConfigError: the settings, the layout and the model do not go together.
    """
    layout.check(shape, options.back_end)
    frozen = {"frozen weights": False in shape.trained, "nothing to train": True not in shape.trained}
    asked = options.asked() | layout.asked(options.back_end) | shape.asked()
    check(asked | (named(frozen) if options.trains else {}) | more)

"""The keywords of `Actor` and `Critic`, for type checkers; `verl.roles.settings` spreads them over their records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from verl.algorithms import BaseAlgorithm
    from verl.models.options import FusedKernelOptions, LoraOptions
    from verl.rollout.base import SamplingParams
    from verl.rollout.episode import Episode
    from verl.rollout.options import RolloutOptions
    from verl.training.options import DeepSpeedOptions, FSDPConfig, OptimConfig, TrainOptions
    from verl.workers.actor import EngineFactory


class CriticKeywords(TypedDict, total=False):
    """The settings that a critic takes as keywords: fields of `ModelOptions`, `TrainOptions` and `OptimConfig`."""

    dtype: str
    lora: LoraOptions | Mapping[str, Any] | None
    max_position_embeddings: int | None
    trust_remote_code: bool
    enable_gradient_checkpointing: bool
    gradient_checkpointing: bool
    use_remove_padding: bool
    use_fused_kernels: bool
    fused_kernel_options: FusedKernelOptions | Mapping[str, Any]

    mini_batch_size: int | None
    epochs: int
    micro_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    max_tokens_per_micro_batch: int | None
    use_amp: bool
    use_torch_compile: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    ulysses_sequence_parallel_size: int
    expert_parallel_size: int
    fsdp_config: FSDPConfig | Mapping[str, Any]
    deepspeed_config: DeepSpeedOptions | Mapping[str, Any]

    lr: float
    betas: Sequence[float]
    adam_eps: float
    weight_decay: float
    weight_decay_on: Literal["all", "matrices"]
    moments: Literal["bfloat16", "float32"] | None
    max_grad_norm: float | None
    warmup_steps: int
    warmup_ratio: float
    schedule: Literal["constant", "linear", "cosine"] | Callable[[int], float]
    total_steps: int | None


class ActorKeywords(CriticKeywords, total=False):
    """The settings that an actor takes as keywords: those of a critic, and fields of `RolloutOptions`."""

    environment: str | None
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop: str | Sequence[str]
    max_num_seqs: int
    rollout_per_device_batch_size: int
    kv_cache_gb: float | None
    batch_invariant: bool
    tensor_model_parallel_size: int
    overlap_comm: bool
    gpus_per_rollout_worker: int | None


class ActorArguments(ActorKeywords, total=False):
    """The arguments of `Actor` beside its model and tokenizer, for a class that passes them on."""

    strategy: Any
    train: TrainOptions | Mapping[str, Any] | None
    placement: Any
    algorithm: str | BaseAlgorithm | None
    optim: OptimConfig | Mapping[str, Any] | Any
    rollout: str | EngineFactory | RolloutOptions
    episode: Episode | str | None
    sampling: SamplingParams | Mapping[str, Any] | None
    fused_kernels: bool | str | None
    head: Literal["lm", "score"]
    seed: int

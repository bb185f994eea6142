"""Keywords of public constructors, for type checkers: made by `python scripts/stubs.py`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict
from verl.algorithms.base import BaseAlgorithm
from verl.data.buffers import Buffer
from verl.models.options import FusedKernelOptions, LoraOptions
from verl.report.sinks import Logger
from verl.rollout.base import RolloutEngine, SamplingParams
from verl.rollout.options import RolloutOptions
from verl.trainer.evaluation import HeldOut
from verl.trainer.options import BufferOptions, CheckpointOptions, LimitOptions, LoggingOptions
from verl.trainer.task import Task
from verl.training.options import DeepSpeedOptions, FSDPConfig, OptimConfig, TrainOptions

class AlgorithmKeywords(TypedDict, total=False):
    baseline: Literal['group', 'critics']
    beta: float
    center_rewards_coefficient: float
    clip_ratio: float
    clip_ratio_c: float | None
    clip_ratio_high: float | None
    clip_ratio_low: float | None
    cliprange_value: float | None
    cost_limit: float
    desirable_weight: float
    discopop_tau: float
    entropy_coeff: float
    f_norm: float
    filter_groups: bool
    filter_metric: str
    gamma: float
    k_neg: float
    k_pos: float
    kl_by_ratio: bool
    kl_coef: float
    kl_estimator: Literal['k1', 'k2', 'k3', 'abs', 'kl', 'mse', 'low_var_kl', 'k1+', 'k2+', 'k3+', 'abs+', 'kl+', 'mse+', 'low_var_kl+'] | None
    kl_horizon: int
    kl_in: Literal['none', 'reward', 'loss']
    kl_rows: int | None
    kl_target: float | None
    label_smoothing: float
    lam: float
    lambda_delay: int
    lambda_init: float
    lambda_kp: float
    lambda_lr: float
    lambda_max: float
    lambda_min: float
    lambda_neg: float
    lambda_pos: float
    lambda_window: int
    learn: bool
    loss_agg_mode: Literal['token-mean', 'token-sum', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm']
    loss_scale_factor: float | None
    loss_type: Literal['nll', 'dft'] | Literal['sigmoid', 'sigmoid_norm', 'hinge', 'exo_pair', 'nca_pair', 'bco_pair', 'sppo_hard', 'apo_zero', 'apo_down', 'discopop', 'aot'] | Literal['kto', 'apo_zero_unpaired']
    max_log_ratio: float | None
    norm_adv_by_std: bool | Literal['batch']
    overlong_buffer: int
    overlong_length: int | None
    overlong_penalty: float
    prefixes: Sequence[str]
    ratio_of: Literal['token', 'sequence']
    rollout_is: Literal['token', 'sequence'] | Literal['ratio'] | None
    rollout_is_lower: float | None
    rollout_is_normalize: bool
    rollout_is_threshold: float
    rollout_rs: Literal['token_k1', 'token_k2', 'token_k3', 'seq_sum_k1', 'seq_sum_k2', 'seq_sum_k3', 'seq_mean_k1', 'seq_mean_k2', 'seq_mean_k3', 'seq_max_k2', 'seq_max_k3'] | None
    rollout_rs_lower: float | None
    rollout_rs_threshold: float
    std_epsilon: float | None
    temperature_neg: float
    temperature_pos: float
    undesirable_weight: float

class CriticKeywords(TypedDict, total=False):
    dtype: str
    lora: LoraOptions | Mapping[str, Any] | None
    max_position_embeddings: int | None
    trust_remote_code: bool
    enable_gradient_checkpointing: bool
    use_remove_padding: bool
    use_fused_kernels: bool
    fused_kernel_options: FusedKernelOptions | Mapping[str, Any]
    mini_batch_size: int | None
    epochs: int
    micro_batch_size: int | None
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
    weight_decay_on: Literal['all', 'matrices']
    moments: Literal['bfloat16', 'float32'] | None
    max_grad_norm: float | None
    warmup_steps: int
    warmup_ratio: float
    schedule: Literal['constant', 'linear', 'cosine'] | Callable[[int], float]
    total_steps: int | None
    gradient_checkpointing: bool
    train_micro_batch_size_per_gpu: int | None

class ActorKeywords(CriticKeywords, total=False):
    environment: str | None
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop: Sequence[str]
    max_num_seqs: int
    kv_cache_gb: float | None
    batch_invariant: bool
    tensor_model_parallel_size: int
    overlap_comm: bool
    gpus_per_rollout_worker: int | None
    rollout_per_device_batch_size: int

class ActorArguments(ActorKeywords, total=False):
    strategy: Any
    train: TrainOptions | Mapping[str, Any] | None
    placement: Any
    algorithm: str | BaseAlgorithm | None
    optim: Any
    rollout: str | Callable[[Any, Any, Sequence[int], Any], RolloutEngine] | RolloutOptions
    episode: Any
    sampling: SamplingParams | Mapping[str, Any] | None
    fused_kernels: bool | str | None
    head: Literal['lm', 'score']
    seed: int

class BuiltArguments(ActorArguments, total=False):
    optim_config: OptimConfig | Mapping[str, Any] | None
    override_model_config: Mapping[str, Any] | None

class TrainerKeywords(AlgorithmKeywords, total=False):
    device_map: Any
    num_rollout_workers: int | None
    num_update_workers: int | None
    strategy: Any
    use_amp: bool | None
    buffer_size: int | None
    buffer_dir: str | Path
    update_freq: int | None
    async_save: bool
    checkpoint_dir: str | Path | None
    save_every: int | None
    keep_checkpoints: int | None
    log_dir: str | Path | bool | None
    logger: Logger | None
    on_log_hook: Callable[[int, dict[str, Any]], None] | None
    timeline: str | Path | None
    deadline: float
    max_resamples: int
    max_skipped_updates: int
    max_failed_episodes: float
    reward_fn: Any
    cost: Any
    environment: Any
    config_path: str | Path | None
    dataloader: Iterable[Any] | None
    permute_rewards: bool
    skip_zero_advantage_rows: bool

class TrainerArguments(TrainerKeywords, total=False):
    algorithm: str | BaseAlgorithm | None
    tasks: Sequence[Task] | None
    n: int | None
    sampling: SamplingParams | Mapping[str, Any] | None
    nodes: Mapping[str, Any] | Iterable[str]
    held_out: HeldOut | None
    placement: Any
    buffer: str | Buffer | BufferOptions
    checkpoints: CheckpointOptions | Mapping[str, Any] | None
    logging: LoggingOptions | Mapping[str, Any] | None
    limits: LimitOptions | Mapping[str, Any] | None

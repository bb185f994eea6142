"""Arguments of TRL and transformers that are not mapped: some change no number here, some are done differently."""

from __future__ import annotations

#: They say how the other library works, not what is learned.
NO_EFFECT = frozenset((
    "accelerator_config", "activation_checkpointing", "activation_checkpointing_kwargs", "activation_offloading",
    "batch_eval_metrics", "cache_implementation", "dataloader_in_order", "dataloader_multiprocessing_context",
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
    "dataloader_prefetch_factor", "dataset_num_proc", "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout", "debug", "disable_tqdm", "do_eval",
    "do_predict", "do_train", "ds3_gather_for_generation", "enable_jit_checkpoint", "eval_accumulation_steps",
    "eval_do_concat_batches", "eval_on_start", "eval_use_gather_object", "full_determinism",
    "gradient_checkpointing_kwargs", "hub_private_repo", "hub_strategy", "hub_token", "include_for_metrics",
    "include_num_input_tokens_seen", "label_names", "length_column_name", "liger_kernel_config", "local_rank",
    "log_completions", "log_level", "log_level_replica", "log_multimodal", "log_on_each_node", "log_unique_prompts",
    "logging_first_step", "logging_nan_inf_filter", "num_completions_to_print", "overwrite_output_dir",
    "pad_to_multiple_of", "padding_free", "parallelism_config", "per_device_eval_batch_size",
    "precompute_ref_batch_size", "precompute_ref_log_probs", "prediction_loss_only", "remove_unused_columns",
    "restore_callback_states_from_checkpoint", "resume_from_checkpoint", "save_on_each_node", "skip_memory_metrics",
    "torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "trackio_bucket_id",
    "trackio_space_id", "trackio_static_space_id", "transformers_continuous_batching_config", "use_cache",
    "use_liger_kernel", "use_transformers_continuous_batching", "use_transformers_paged", "vllm_enable_sleep_mode",
    "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_model_impl",
))  # fmt: skip

#: TRL's own defaults, where they are neither None nor those of `transformers.TrainingArguments`.
DEFAULTS: dict[str, object] = {
    "activation_offloading": False, "cast_lm_head_to_fp32": False, "disable_dropout": True,
    "ds3_gather_for_generation": True, "entropy_coef_delta": 0.005, "entropy_coef_max": 1.0, "entropy_coef_min": 0.0,
    "entropy_target": 0.2, "f_alpha_divergence_coef": 0.5, "f_divergence_type": "reverse_kl", "log_completions": False,
    "log_multimodal": True, "log_unique_prompts": False, "mask_truncated_completions": False,
    "multi_objective_aggregation": "sum_then_normalize", "packing": False, "packing_strategy": "bfd",
    "pad_to_multiple_of": "auto", "padding_free": False, "precompute_ref_log_probs": False,
    "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "repetition_penalty": 1.0, "sync_ref_model": False,
    "top_entropy_quantile": 1.0, "train_sampling_strategy": "random", "use_adaptive_entropy": False,
    "use_transformers_continuous_batching": False, "use_transformers_paged": False, "use_weighting": False,
    "vllm_enable_sleep_mode": False, "vllm_gpu_memory_utilization": 0.3, "vllm_group_port": 51216,
    "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_server_host": "0.0.0.0", "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0, "vllm_tensor_parallel_size": 1,
}  # fmt: skip

#: Name -> what to do in the place of another value than the default.
OTHERWISE = {name: hint for hint, names in {
    "leave it out": "dataset_kwargs f_divergence_type ld_alpha neftune_noise_alpha use_weighting",
    "use bf16=True": "fp16",
    "a loss is a mean over the tokens of all ranks: leave it out": "average_tokens_across_devices",
    "a run goes on in the data where it was: leave it out": "ignore_data_skip",
    "all tokens are trained: leave it out": "top_entropy_quantile",
    "batches are counted in rows, and packed without padding: leave it out": "eval_packing packing packing_strategy",
    "call save_model(), and upload that directory": "push_to_hub",
    "checkpoints hold all that a run goes on from: leave it out": "save_only_model",
    "checkpoints of all steps are in output_dir: leave it out":
        "greater_is_better load_best_model_at_end metric_for_best_model",
    "clip what your reward function returns": "reward_clip_range",
    "DPOConfig has label_smoothing": "label_smoothing_factor",
    "dropout is off: leave it out": "disable_dropout",
    "entropy_coef is fixed: leave it out":
        "entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target use_adaptive_entropy",
    "evaluation begins before the first step: leave it out": "eval_delay",
    "evaluation has the model's dtype: leave it out": "bf16_full_eval fp16_full_eval",
    "give the engine itself: GRPOTrainer(rollout=RolloutOptions(...))": "vllm_tensor_parallel_size",
    "give the engine itself: GRPOTrainer(rollout=RolloutOptions(url=...))":
        "vllm_mode vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port vllm_server_timeout",
    "give the trainer strategy='deepspeed', under torchrun": "deepspeed",
    "give the trainer strategy='fsdp', under torchrun": "fsdp fsdp_config",
    "it is vllm_importance_sampling_clip_max": "vllm_importance_sampling_cap",
    "log-probs are computed in fp32 or better: leave it out": "cast_lm_head_to_fp32",
    "logs are in output_dir: leave it out": "logging_dir",
    "nothing is uploaded: leave it out": "hub_always_push hub_model_id hub_revision log_completions_hub_repo",
    "one loss is trained: name one loss_type": "loss_weights",
    "pass your own optimizer as optimizers=(optimizer, None)": "optim_args optim_target_modules",
    "prompts are drawn at random; shuffle_dataset=False keeps their order": "train_sampling_strategy",
    "rewards are summed, then normalised: leave it out": "multi_objective_aggregation",
    "rows that are left over begin the next batch: leave it out": "dataloader_drop_last",
    "sampling has temperature, top_p, top_k and min_p: leave it out": "generation_kwargs repetition_penalty",
    "see constrained_decoding in docs/algorithms.md": "vllm_structured_outputs_regex",
    "see rollout_rs in docs/algorithms.md": "off_policy_mask_threshold",
    "set logging_steps": "logging_strategy",
    "set per_device_train_batch_size": "auto_find_batch_size",
    "set the tokenizer's eos_token": "eos_token",
    "set the tokenizer's pad_token": "pad_token",
    "set torch.backends.cuda.matmul.allow_tf32": "tf32",
    "the divergence is the reverse KL: leave it out": "f_alpha_divergence_coef",
    "the reference is the model as it was at first: leave it out":
        "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model",
    "there is no loss of the router: leave it out": "router_aux_loss_coef",
    "write a reward that returns None where a completion has no end": "mask_truncated_completions",
}.items() for name in names.split()}  # fmt: skip

#: What TRL had once, or others have -> what takes its place.
REMOVED = {
    "batch_size": "per_device_train_batch_size x gradient_accumulation_steps is the batch",
    "epochs": "it is num_train_epochs",
    "evaluation_strategy": "it is eval_strategy",
    "kl_coef": "it is beta",
    "lr": "it is learning_rate",
    "max_new_tokens": "it is max_completion_length",
    "max_seq_length": "it is max_length",
    "n": "it is num_generations",
    "no_cuda": "it is the trainer's placement='cpu'",
    "tokenizer": "it is the trainer's processing_class",
}

"""Arguments of TRL and transformers that are not mapped: what changes no number here, and what is done otherwise."""

from __future__ import annotations

#: They say how the other library works, not what is learned.
NO_EFFECT = frozenset((
    "accelerator_config", "activation_checkpointing", "activation_checkpointing_kwargs", "activation_offloading",
    "assistant_only_loss", "auto_find_batch_size", "average_tokens_across_devices", "batch_eval_metrics",
    "bf16_full_eval", "cache_implementation", "cast_lm_head_to_fp32", "data_seed", "dataloader_drop_last",
    "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_num_workers",
    "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataset_num_proc",
    "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph",
    "ddp_timeout", "debug", "disable_dropout", "disable_tqdm", "do_eval", "do_predict", "do_train",
    "ds3_gather_for_generation", "enable_jit_checkpoint", "entropy_coef_delta", "entropy_coef_max",
    "entropy_coef_min", "entropy_target", "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches",
    "eval_on_start", "eval_packing", "eval_use_gather_object", "f_alpha_divergence_coef", "fp16_full_eval",
    "full_determinism", "gradient_checkpointing_kwargs", "greater_is_better", "hub_always_push", "hub_model_id",
    "hub_private_repo", "hub_revision", "hub_strategy", "hub_token", "ignore_data_skip", "include_for_metrics",
    "include_num_input_tokens_seen", "label_names", "length_column_name", "liger_kernel_config", "local_rank",
    "log_completions", "log_level", "log_level_replica", "log_multimodal", "log_on_each_node", "log_unique_prompts",
    "logging_dir", "logging_first_step", "logging_nan_inf_filter", "logging_strategy",
    "max_tool_calling_iterations", "metric_for_best_model", "num_completions_to_print", "optim_args",
    "optim_target_modules", "overwrite_output_dir", "packing", "packing_strategy", "pad_to_multiple_of",
    "pad_token", "padding_free", "parallelism_config", "per_device_eval_batch_size", "precompute_ref_batch_size",
    "precompute_ref_log_probs", "prediction_loss_only", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "remove_unused_columns", "restore_callback_states_from_checkpoint", "sapo_temperature_neg",
    "sapo_temperature_pos", "save_on_each_node", "save_only_model", "shuffle_dataset", "skip_memory_metrics",
    "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps",
    "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id", "train_sampling_strategy",
    "transformers_continuous_batching_config", "use_bias_correction_kl", "use_cache", "use_liger_kernel",
    "use_transformers_continuous_batching", "use_transformers_paged", "vespo_k_neg", "vespo_k_pos",
    "vespo_lambda_neg", "vespo_lambda_pos", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization",
    "vllm_group_port", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    "vllm_max_model_length", "vllm_model_impl", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
    "vllm_tensor_parallel_size",
))  # fmt: skip

#: Name -> (what it is where it says nothing, what to do in the place of another value).
OTHERWISE: dict[str, tuple[object, str]] = {
    "fp16": (False, "use bf16=True"),
    "push_to_hub": (False, "call save_model(), and upload that directory"),
    "load_best_model_at_end": (False, "checkpoints of all steps are in output_dir"),
    "resume_from_checkpoint": (None, "call train(resume_from_checkpoint=True)"),
    "lr_scheduler_kwargs": (None, "linear and cosine end at 0"),
    "router_aux_loss_coef": (None, "there is no loss of the router"),
    "deepspeed": (None, "give the trainer strategy='deepspeed', under torchrun"),
    "fsdp": (None, "give the trainer strategy='fsdp', under torchrun"),
    "fsdp_config": (None, "give the trainer strategy='fsdp', under torchrun"),
    "label_smoothing_factor": (0.0, "DPOConfig has label_smoothing"),
    "neftune_noise_alpha": (None, "leave it out"),
    "vllm_server_base_url": (None, "give the engine itself: GRPOTrainer(rollout=RolloutOptions(url=...))"),
}

_REMOVED = {
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


def removed(name: str) -> str | None:
    """What takes the place of an argument that TRL had once, or that others have."""
    return _REMOVED.get(name)

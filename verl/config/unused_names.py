"""Keys of volcengine/verl that say nothing here, and those that are refused: patterns, `*` for any text.

A key is of no effect only if it is about logging, speed, memory, or the placement of a part that is not here. What
decides on data, sampling, rewards, advantages, the loss, the optimizer or its schedule is translated (`other_names`),
has its one value that says nothing, or is refused (`tests/config/test_launch_scripts.py` holds this).
"""

from __future__ import annotations

import re
from fnmatch import translate
from functools import cache
from typing import Any

_ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
#: Why -> the keys.
UNUSED = {
    "logging": """
        *._target_ trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir
        trainer.log_freq trainer.tensorboard_dir trainer.rl_logging_board_dir *.profiler.* global_profiler.*
        *.rollout.trace.* *.rollout.prometheus.* *.rollout.disable_log_stats *.overlong_buffer_cfg.log
        reward_model.overlong_buffer.log *.checkpoint.save_contents *.checkpoint.load_contents
        *.checkpoint.async_save actor_rollout_ref.actor.calculate_entropy
        actor_rollout_ref.rollout.calculate_log_probs trainer.max_critic_ckpt_to_keep
        ray_kwargs.timeline_json_file trainer.del_local_ckpt_after_load trainer.esi_redundant_time
        actor_rollout_ref.rollout.skip_dump_dir
    """,
    "speed": """
        data.val_batch_size data.dataloader_num_workers data.filter_overlong_prompts_workers
        <role>.use_dynamic_bsz *.log_prob_micro_batch_size *.log_prob_micro_batch_size_per_gpu
        *.log_prob_use_dynamic_bsz *.log_prob_max_token_len_per_gpu *.forward_micro_batch_size
        *.forward_micro_batch_size_per_gpu *.forward_max_token_len_per_gpu
        actor_rollout_ref.ref.use_torch_compile actor_rollout_ref.ref.ulysses_sequence_parallel_size
        reward_model.ulysses_sequence_parallel_size *.rollout.max_num_batched_tokens *.rollout.enforce_eager
        *.rollout.cudagraph_capture_sizes *.rollout.enable_chunked_prefill *.rollout.enable_prefix_caching
        *.rollout.scheduling_policy *.rollout.mode *.rollout.load_format
        actor_rollout_ref.rollout.skip_tokenizer_init actor_rollout_ref.rollout.agent.num_workers
        *.rollout.multi_stage_wake_up *.update_weights_bucket_megabytes *.rollout.checkpoint_engine.*
        async_training.checkpoint_engine.* async_training.use_trainer_do_validate
        *.engine_kwargs.vllm.disable_mm_preprocessor_cache *.engine_kwargs.vllm.compilation_config.*
        *.engine_kwargs.sglang.attention_backend *.engine_kwargs.trtllm.batch_wait_* *.engine_kwargs.vllm
        *.engine_kwargs.sglang *.engine_kwargs.trtllm *.engine_kwargs actor_rollout_ref.model.use_liger
        *.fsdp_config.use_torch_compile *.fsdp_config.forward_only actor_rollout_ref.actor.use_prefix_grouper
        trainer.balance_batch trainer.use_legacy_worker_impl actor_rollout_ref.nccl_timeout
        trainer.ray_wait_register_center_timeout reward_model.num_workers reward_model.use_reward_loop
        reward_model.micro_batch_size* reward_model.model.use_remove_padding reward_model.launch_reward_fn_async
        reward_model.sandbox_fusion.max_concurrent <role>.megatron.override_transformer_config.*_fusion
        <role>.megatron.override_transformer_config.moe_enable_deepep
        <role>.megatron.override_transformer_config.moe_grouped_gemm
        <role>.megatron.override_transformer_config.moe_shared_expert_overlap
        <role>.megatron.override_transformer_config.moe_token_dispatcher_type
        <role>.megatron.override_transformer_config.persist_layer_norm
        <role>.megatron.override_transformer_config.use_flash_attn <role>.megatron.use_mbridge
        <role>.megatron.vanilla_mbridge *.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d
        data.return_raw_chat data.return_raw_input_ids data.return_full_prompt
    """,
    "memory": """
        *.use_shm *.rollout.gpu_memory_utilization *.rollout.free_cache_engine *.rollout.layered_summon
        *.rollout.enable_sleep_mode actor_rollout_ref.ref.fsdp_config.* critic.model.fsdp_config.*
        reward_model.model.fsdp_config.* *.fsdp_config.offload_policy *.fsdp_config.use_orig_params
        *.fsdp_config.wrap_policy.min_num_params *.entropy_checkpointing *.entropy_from_logits_with_chunking
        *.sum_pi_squared_checkpointing *.enable_activation_offload *.enable_activation_offloading *.tiled_mlp.*
        <role>.megatron.param_offload <role>.megatron.grad_offload <role>.megatron.optimizer_offload
        <role>.megatron.override_transformer_config.recompute_*
        <role>.megatron.override_transformer_config.deallocate_pipeline_outputs
        *.override_optimizer_config.optimizer_cpu_offload *.override_optimizer_config.optimizer_offload_fraction
        reward_model.param_offload reward_model.sandbox_fusion.memory_limit_mb
    """,
    "placement": """
        trainer.nnodes trainer.device rollout.nnodes rollout.n_gpus_per_node
        actor_rollout_ref.ref.strategy reward_model.strategy reward_model.n_gpus_per_node reward_model.nnodes
        reward_model.enable_resource_pool reward_model.rollout.* reward_model.megatron.*
        actor_rollout_ref.ref.megatron.* <role>.megatron.virtual_pipeline_model_parallel_size
        <role>.megatron.expert_tensor_parallel_size <role>.megatron.override_transformer_config.account_for_*
        <role>.megatron.override_transformer_config.num_layers_in_*_pipeline_stage
        actor_rollout_ref.rollout.data_parallel_size actor_rollout_ref.rollout.expert_parallel_size
        actor_rollout_ref.rollout.pipeline_model_parallel_size ray_kwargs.ray_init.* *.rollout_n
        transfer_queue.* trainer.num_global_batch trainer.num_data_controllers trainer.num_data_storage_units
    """,
}
_EPISODE = "tools, turns and agents are an episode here: write rollout.episode (docs/episodes.md)"
_LOSS = "no loss here reads it: write an algorithm of your own (algorithm.name=FILE.py:CLASS, docs/algorithms.md)"
#: The keys -> the values that say nothing, and of others what to write, or why they are not taken.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "*.multi_turn.enable": ((False,), _EPISODE),
    "*.multi_turn.* data.tool_config_path": ((False, 1, 256, "middle", "strict", "hermes"), _EPISODE),
    "*.agent.*": (("single_turn_agent",), _EPISODE),
    "data.image_key data.video_key data.return_multi_modal_inputs data.image_patch_size *.freeze_vision_tower "
    "*.rollout.limit_images": (
        ("images", "videos", 14, False, True), "models are of text alone here: there is nothing to write instead"),
    "data.custom_cls.* data.datagen.* data.sampler.*": (
        (), "write a file of rows: data.train=rows.jsonl (docs/data.md)"),
    "data.seed data.data_loader_seed": ((), "write trainer.seed, of the whole run"),
    "*.data_loader_seed *.fsdp_config.seed *.megatron.seed": ((42,), "write trainer.seed, of the whole run"),
    "data.train_max_samples data.val_max_samples": ((-1,), "write a file of the rows that you mean"),
    "data.validation_shuffle *.full_determinism": ((False,), "leave it out: a run's order is fixed by its seed"),
    "data.tokenizer": ((), "write actor_rollout_ref.model.tokenizer"),
    "data.accuracy_lower_bound data.accuracy_upper_bound data.filter_accuracy data.oversample_factor": (
        (), "write algorithm.name=dapo, whose filter_groups leaves out prompts that all solve, or data.pools"),
    "*.model.override_config* *.override_config *.model.hf_config_path *.model.external_lib "
    "*.model.custom_chat_template": (
        ({}, 0.0, 0), "write it into the model's config.json, its directory: a model is loaded as its files say"),
    "*.megatron.use_dist_checkpointing *.megatron.dist_checkpointing_path": (
        (False,), "leave it out: weights are read from model.path, in the form that transformers saves"),
    "*.model.lora_adapter_path": ((), "merge the adapters into the model first: peft's merge_and_unload()"),
    "*.model.lora.rank *.model.lora.target_modules *.model.lora.merge *.model.lora.lora_A_init_method": (
        (0, False), "write model.lora_rank, lora_alpha and target_modules"),
    "*.mtp.* *.router_replay.* *.rollout.mtp *.enable_rollout_routing_replay": (
        (False, "disabled", 0.1, 1, 2, 4, "EAGLE", "mtp"), "there is no such part here: leave it out"),
    "critic.model.lora_* critic.model.target_modules": (
        (0, 16, "all-linear"), "a critic trains its weights: leave it out"),
    "*.policy_loss.* actor_rollout_ref.actor.clip_cov_* actor_rollout_ref.actor.loss_mode": (
        (0.0002, 1.0, 5.0, 0.1), _LOSS),
    "*.calculate_sum_pi_squared": ((False,), "there is no optimal token baseline here: write algorithm.name=opo"),
    "*.optim.override_optimizer_config.use_precision_aware_optimizer": (
        (False, True), "moments have optim.moments, their dtype: bfloat16 or float32"),
    "*.optim.override_optimizer_config* *.optim.lr_warmup_init *.optim.lr_wsd_*": (
        ({}, 0, 0.0), "the optimizer is AdamW with optim.lr, betas, weight_decay, warmup_steps, schedule"),
    "*.megatron.override_transformer_config.moe_router_dtype *.rollout.dtype *.fsdp_config.dtype *.megatron.dtype "
    "actor_rollout_ref.actor.dtype actor_rollout_ref.ref.dtype": (
        ("bfloat16", "bf16", "fp32", "float32"), "write actor_rollout_ref.model.dtype"),
    "*.megatron.override_transformer_config.*": ((), "write it into the model's config.json, or leave it out"),
    "actor_rollout_ref.rollout.over_sample_rate": ((0,), "responses are awaited here, however long: leave it out"),
    "*.rollout.quantization* *.rollout.ignore_eos *.rollout.skip_rollout": (
        (False,), "samples come from the weights as they are, up to the end of sequence: leave it out"),
    "*.rollout.logprobs_mode": (
        ("processed_logprobs",), "log-probs are of the distribution sampled from: leave it out"),
    "*.engine_kwargs.*": ((), "it is passed to no engine here: leave it out, or write an engine (docs/engines.md)"),
    "algorithm.use_pf_ppo algorithm.pf_ppo.*": (
        (False, "pow", 2.0), "there is no PF-PPO here: write algorithm.name=ppo"),
    "algorithm.rollout_correction.rollout_token_veto_threshold": (
        (), "write rollout_rs=token_k1 with a lower bound, which leaves such tokens out"),
    "algorithm.rollout_correction.use_policy_gradient": ((False,), "write algorithm.name=gpg, whose loss has no ratio"),
    "async_training.*": ((), "write trainer.max_staleness, steps that a sample may be behind (docs/asynchronous.md)"),
    "reward_model.model.trust_remote_code reward_model.model.use_fused_kernels "
    "reward_model.max_length": ((False, True), "a reward model has its own tokenizer: leave it out"),
    "reward_model.sandbox_fusion.url": ((), "write reward.name=code, whose tests run in a sandbox here"),
    "reward_model.reward_kwargs.* reward_model.reward_loop_* reward_manager.*": (
        ("register", "naive", "dapo", "custom_reward_manager"),
        "write a reward of your own: reward.path=FILE.py:FUNCTION"),
    "reward_model.model.* reward_model.mini_batch_size": (
        (), "no reward model is trained beside the policy (PRIME): train one before, algorithm.name=reward_model"),
    "trainer.default_hdfs_dir": ((), "write trainer.output_dir, a directory"),
    "trainer.ref_update_freq": ((), "the reference policy stays as it is: leave it out"),
    "trainer.num_* trainer.n_*": ((False,), "there is no transfer queue here: leave it out"),
    "model.* optim optim.* engine engine.* checkpoint.* ulysses_sequence_parallel_size use_remove_padding "
    "data.multiturn.* data.micro_batch_size_per_gpu data.max_length data.response_key data.prompt_dict_keys "
    "data.response_dict_keys data.messages_key data.pad_mode data.use_dynamic_bsz data.max_token_len_per_gpu": (
        (), "write algorithm.name=sft with actor_rollout_ref.model.path, actor.optim, data.train and data.batch_size "
        "(examples/algorithms/sft.yaml)"),
    "env.*": ((), _EPISODE),
    "critic.enable": ((True, False), "the algorithm says whether there is a critic: leave it out"),
    "*.use_fused_kernels critic.model.tokenizer_path": ((True, False), "leave it out"),
}  # fmt: skip


@cache
def _pattern(names: str) -> re.Pattern[str]:
    each = {name.replace("<role>", role) for name in names.split() for role in _ROLES}
    return re.compile("|".join(map(translate, sorted(each))))


#: Whether a key is of no effect here.
is_unused = _pattern(" ".join(UNUSED.values())).match


def refusal(name: str, value: Any) -> str | None:
    """Why a value is not taken, and what to write; "": it says nothing; None: the key is not one of these."""
    for names, (silent, instead) in REFUSED.items():
        if _pattern(names).match(name):
            return "" if value is None or value == [] or value in silent else instead
    return None

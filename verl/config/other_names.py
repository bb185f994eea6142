"""Foreign names of our settings: all of volcengine/verl's, and some of DeepSpeed's and the articles'.

Each is taken where its meaning carries over, name and value alike; one that only says how the other library works
(`unused_names`) is noted once; one whose meaning differs is refused with what to write instead. Beside
`data.train_files` and `data.train_batch_size`, what is not given has their default, where ours would train otherwise.
"""

from __future__ import annotations

import re
from math import ceil

from verl.config import name_rules as by
from verl.config.name_rules import ACTOR, ASYNC, CORRECTION, MODEL, ROLLOUT

_SAVED = "megatron.use_dist_checkpointing"
_FILES = "leave it out: weights are read from model.path, in the form that transformers saves"


def _update(section: str, optim: str) -> dict[str, by.Rule]:
    """The names of a section of training, for the actor or the critic."""
    return {
        f"{section}.ppo_mini_batch_size": (by.samples, f"{section}.mini_batch_size"),
        f"{section}.ppo_micro_batch_size_per_gpu": f"{section}.micro_batch_size",
        f"{section}.train_micro_batch_size_per_gpu": f"{section}.micro_batch_size",
        f"{section}.ppo_micro_batch_size": (by.of_all_gpus, f"{section}.micro_batch_size"),
        f"{section}.ppo_max_token_len_per_gpu": f"{section}.max_tokens_per_micro_batch",
        f"{section}.ppo_epochs": f"{section}.epochs",
        f"{section}.grad_clip": f"{optim}.max_grad_norm",
        f"{section}.shuffle": (by.only, "mini-batches keep the order of the batch: leave it out", False),
        f"{section}.strategy": (by.strategy, section),
        f"{section}.megatron.dist_checkpointing_path": (by.when, f"{section}.{_SAVED}", (by.only, _FILES, "")),
        f"{section}.megatron.tensor_model_parallel_size": f"{section}.tensor_parallel_size",
        f"{section}.megatron.pipeline_model_parallel_size": f"{section}.pipeline_parallel_size",
        f"{section}.megatron.context_parallel_size": f"{section}.ulysses_sequence_parallel_size",
        f"{section}.megatron.expert_model_parallel_size": f"{section}.expert_parallel_size",
        f"{optim}.lr_warmup_steps": (by.steps, f"{optim}.warmup_steps"),
        f"{optim}.lr_warmup_steps_ratio": (by.warmup_share, optim),
        f"{optim}.warmup_style": f"{optim}.schedule",
        f"{optim}.lr_scheduler_type": f"{optim}.schedule",
        f"{optim}.lr_decay_style": f"{optim}.schedule",
        # The steps of Megatron's decay, unless the rate is constant.
        f"{optim}.lr_decay_steps": (
            by.when,
            lambda get: (get(f"{optim}.lr_decay_style") or "constant") != "constant",
            (by.steps, f"{optim}.total_steps"),
        ),
        f"{optim}.total_training_steps": (by.steps, f"{optim}.total_steps"),
        f"{optim}.optimizer": (by.only, "the optimizer is AdamW: leave it out", "AdamW", "adam"),
        f"{optim}.optimizer_impl": (by.only, "the optimizer is AdamW: leave it out", "torch.optim"),
        f"{optim}.min_lr_ratio": (by.only, "schedules end at 0: leave it out", 0, 0.0),
        f"{optim}.min_lr": (by.only, "schedules end at 0: leave it out", 0, 0.0),
        f"{optim}.num_cycles": (by.only, "a cosine is half a period: leave it out", 0.5),
        f"{optim}.clip_grad": (by.when, f"{section}.grad_clip", f"{optim}.max_grad_norm", None),
    }


_EVERY = (by.when, by.evaluates, (by.but, "trainer.eval_every", None, -1, 0))
_MANAGERS = ("naive", "batch", "prime", "dapo")
#: Settings of the actor that are the algorithm's here.
_OF_ALGORITHMS = (
    "clip_ratio", *by.SIDES, "clip_ratio_c", "entropy_coeff", "loss_agg_mode", "loss_scale_factor",
)  # fmt: skip
NAMES: dict[str, by.Rule] = {
    "data.rollout_batch_size": "data.batch_size",
    "data.train_files": (by.source, "data.train"),
    "data.val_files": (by.source, "data.eval"),
    "data.train_batch_size": lambda value, get: {
        "data.batch_size": by.prompts_of(get),
        **({} if get(f"{ROLLOUT}.n") is not None else {f"{ROLLOUT}.n": 1}),
    },
    "data.gen_batch_size": (by.when, "data.train_batch_size", (by.when, by.FILTERS, "data.batch_size", *by.OFF), None),
    "data.max_response_length": f"{ROLLOUT}.max_new_tokens",
    "data.filter_overlong_prompts": (by.on, {"data.truncation": "drop"}),
    "data.truncation": (by.when, "data.filter_overlong_prompts", "data.truncation", *by.OFF),
    "data.prompt_key": "data.prompt_column",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "data.reward_fn_key": (by.only, "a reward reads any column by its name", "data_source"),
    "data.trust_remote_code": (
        by.on,
        (by.when, f"{MODEL}.trust_remote_code", {f"{MODEL}.trust_remote_code": True}, *by.OFF),
    ),
    f"{MODEL}.tokenizer_path": f"{MODEL}.tokenizer",
    f"{MODEL}.torch_dtype": f"{MODEL}.dtype",
    f"{MODEL}.fused_kernel_options.impl_backend": lambda value, get: (
        {} if get(f"{MODEL}.use_fused_kernels") is False else {f"{MODEL}.fused_kernel_options.impl_backend": value}
    ),
    **{
        f"{section}.{override}.max_position_embeddings": f"{section}.max_position_embeddings"
        for section in (MODEL, "critic.model")
        for override in ("override_config", "override_config.model_config")
    },
    f"{MODEL}.lora_rank": by.rank,
    f"{MODEL}.lora_alpha": (by.when, f"{MODEL}.lora_rank", f"{MODEL}.lora.alpha"),
    f"{MODEL}.target_modules": (by.when, f"{MODEL}.lora_rank", f"{MODEL}.lora.targets"),
    f"{MODEL}.exclude_modules": (by.when, f"{MODEL}.lora_rank", (by.only, by.ADAPTED, "")),
    **_update(ACTOR, f"{ACTOR}.optim"),
    **{f"{ACTOR}.{name}": (by.of_loss, name) for name in _OF_ALGORITHMS},
    by.LOSS_MODE: by.loss_mode,
    f"{ACTOR}.tau_pos": (by.when, by.LOSS_MODE, "algorithm.temperature_pos", "sapo"),
    f"{ACTOR}.tau_neg": (by.when, by.LOSS_MODE, "algorithm.temperature_neg", "sapo"),
    f"{ACTOR}.use_kl_loss": (by.on, {"algorithm.kl_in": "loss"}),
    f"{ACTOR}.kl_loss_coef": (by.when, f"{ACTOR}.use_kl_loss", "algorithm.kl_coef"),
    f"{ACTOR}.kl_loss_type": (by.when, f"{ACTOR}.use_kl_loss", "algorithm.kl_estimator"),
    f"{ACTOR}.fsdp_config.grad_offload": (by.on, {f"{ACTOR}.fsdp_config.optimizer_offload": True}),
    f"{ACTOR}.fsdp_config.model_dtype": f"{MODEL}.dtype",
    "actor_rollout_ref.hybrid_engine": (by.when, by.is_streamed, (by.on, {"trainer.max_staleness": 1}, False), False),
    f"{ASYNC}.require_batches": {},
    f"{ASYNC}.trigger_parameter_sync_step": {},
    # A share of samples there, whole steps here.
    f"{ASYNC}.staleness_threshold": lambda value, get: {
        "trainer.max_staleness": ceil(value) if isinstance(value, int | float) else value
    },
    f"{ASYNC}.partial_rollout": (by.only, "unfinished responses go on with new weights: leave it out", True),
    f"{ASYNC}.use_rollout_log_probs": (
        by.when,
        by.by_engine,
        lambda value, get: by.only(bool(value), get, by.OLD_PROBS, True),
    ),
    f"{ASYNC}.compute_prox_log_prob": {},
    "rollout.total_rollout_steps": lambda value, get: {
        "trainer.total_steps": max(1, value // by.prompts_of(get)) if isinstance(value, int) else value
    },
    "rollout.total_epochs": (by.when, "rollout.total_rollout_steps", "trainer.total_epochs", None),
    "rollout.test_freq": _EVERY,
    f"{ROLLOUT}.name": by.engine,
    f"{ROLLOUT}.rollout_per_device_batch_size": f"{ROLLOUT}.max_num_seqs",
    f"{ROLLOUT}.top_k": (by.but, f"{ROLLOUT}.top_k", 0, -1),
    f"{ROLLOUT}.do_sample": (by.only, "training samples: write temperature", True),
    f"{ROLLOUT}.max_model_len": by.model_length,
    f"{ROLLOUT}.prompt_length": (by.same_as, "data.max_prompt_length", "write data.max_prompt_length"),
    f"{ROLLOUT}.response_length": (by.same_as, "data.max_response_length", "write data.max_response_length"),
    f"{ROLLOUT}.val_kwargs.n": (by.when, by.evaluates, "trainer.eval_n"),
    f"{ROLLOUT}.val_kwargs.do_sample": (by.when, by.evaluates, (by.on, by.SAMPLED)),
    f"{ROLLOUT}.val_kwargs.temperature": (
        by.when,
        by.evaluates,
        lambda value, get: {"trainer.eval_temperature": value if get(f"{ROLLOUT}.val_kwargs.do_sample") else 0.0},
    ),
    f"{ROLLOUT}.val_kwargs.top_p": (by.when, by.evaluates, "trainer.eval_top_p"),
    f"{ROLLOUT}.val_kwargs.top_k": (by.when, by.evaluates, (by.but, "trainer.eval_top_k", 0, -1)),
    **_update("critic", "critic.optim"),
    "critic.cliprange_value": (by.option, "cliprange_value", 0.5),
    "critic.loss_agg_mode": (by.same_as, f"{ACTOR}.loss_agg_mode", "is the actor's: leave it out", "token-mean"),
    "algorithm.adv_estimator": by.algorithm,
    "algorithm.gamma": (by.option, "gamma", 1.0),
    "algorithm.lam": (by.when, "algorithm.adv_estimator", (by.option, "lam", 1.0), None, "gae"),
    "algorithm.norm_adv_by_std_in_grpo": (by.option, "norm_adv_by_std", True),
    by.KL_IN_REWARD: by.kl_in_reward,
    "algorithm.kl_penalty": (by.when, by.KL_IN_REWARD, "algorithm.kl_estimator"),
    "algorithm.kl_ctrl.type": (by.when, by.KL_IN_REWARD, (by.on, {"algorithm.kl_target": None}, "fixed")),
    "algorithm.kl_ctrl.kl_coef": (by.when, by.KL_IN_REWARD, "algorithm.kl_coef"),
    **{
        f"algorithm.kl_ctrl.{theirs}": (
            by.when,
            by.KL_IN_REWARD,
            (by.when, "algorithm.kl_ctrl.type", f"algorithm.{name}", "adaptive"),
        )
        for theirs, name in (("horizon", "kl_horizon"), ("target_kl", "kl_target"))
    },
    by.FILTERS: {},
    "algorithm.filter_groups.metric": by.filter_metric,
    "algorithm.filter_groups.max_num_gen_batches": (
        by.when,
        by.FILTERS,
        lambda value, get: {"trainer.max_resamples": value - 1 if value > 0 else 2**31 - 1},
    ),
    f"{CORRECTION}.rollout_is": (by.when, by.corrects, "algorithm.rollout_is"),
    f"{CORRECTION}.rollout_is_threshold": (by.when, by.corrects, "algorithm.rollout_is_threshold"),
    f"{CORRECTION}.rollout_is_batch_normalize": (by.when, by.corrects, "algorithm.rollout_is_normalize"),
    f"{CORRECTION}.rollout_rs": "algorithm.rollout_rs",
    f"{CORRECTION}.rollout_rs_threshold": (by.when, f"{CORRECTION}.rollout_rs", by.rejection),
    f"{CORRECTION}.rollout_rs_threshold_lower": (by.when, f"{CORRECTION}.rollout_rs", "algorithm.rollout_rs_lower"),
    f"{CORRECTION}.loss_type": (by.only, "write algorithm.name of such a loss, or leave it out", "ppo_clip"),
    f"{CORRECTION}.bypass_mode": {},
    "custom_reward_function.path": lambda value, get: (
        {"reward.path": f"{value}:{get('custom_reward_function.name') or 'compute_score'}"} if value else {}
    ),
    "custom_reward_function.name": {},
    "reward_model.enable": {},
    "reward_model.model.path": by.reward_model,
    "reward_model.model.input_tokenizer": (by.same_as, f"{MODEL}.path", "responses have the policy's: leave it out"),
    "reward_model.reward_manager": (by.only, "write a reward of your own: reward.path", *_MANAGERS),
    "reward_model.reward_kwargs.max_resp_len": {},
    **{f"{section}.{key}": {} for section in by.OVERLONG for key in ("enable", "len", "penalty_factor")},
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.total_epochs": (
        by.when,
        lambda get: by.is_streamed(get) or (by.is_theirs(get) and get("trainer.total_training_steps") is not None),
        "trainer.total_epochs",
        False,
    ),
    "trainer.save_freq": (by.but, "trainer.save_every", None, -1, 0),
    "trainer.test_freq": (by.when, by.is_streamed, _EVERY, False),
    "trainer.val_before_train": (
        by.when,
        by.evaluates,
        lambda value, get: {} if value else {"trainer.eval_before": False},
    ),
    "trainer.val_only": (by.on, {"trainer.total_steps": 0}),
    "trainer.logger": by.loggers,
    "trainer.project_name": (
        by.when,
        lambda get: any(
            name in (get("trainer.logger") or get("trainer.loggers") or ()) for name in ("wandb", "trackio", "mlflow")
        ),
        "trainer.project",
    ),
    "trainer.experiment_name": lambda value, get: {
        "trainer.run_name": re.sub(r"[^\w.-]+", "-", str(value)).strip("-.")
    },
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.max_ckpt_to_keep": "trainer.keep_checkpoints",
    f"{ROLLOUT}.tensor_model_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
    "trainer.n_gpus_per_node": by.gpus,
    "trainer.critic_warmup": (by.only, "there is no such phase here: leave it out", 0),
    "trainer.resume_mode": lambda value, get: (
        {"trainer.resume": False} if value == "disable" else by.only(value, get, by.GO_ON, "auto")
    ),
    "trainer.resume_from_path": (by.when, "trainer.resume_mode", (by.only, by.GO_ON, None), "resume_path"),
}
#: Their names that are ours, too, and mean the same.
OWN = frozenset((
    "data.max_response_length", "data.truncation", f"{ROLLOUT}.top_k", f"{ROLLOUT}.name", f"{ACTOR}.strategy",
    "critic.strategy", f"{ROLLOUT}.tensor_model_parallel_size", "algorithm.gamma", "algorithm.lam",
    "trainer.total_epochs", f"{MODEL}.fused_kernel_options.impl_backend",
))  # fmt: skip

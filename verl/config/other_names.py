"""Foreign names of our settings: all of volcengine/verl's, and some of DeepSpeed's and the articles'.

Each is taken where its meaning carries over, name and value alike; one that only says how the other library works
(`unused_names`) is noted once; one whose meaning differs is refused with what to write instead. Beside
`data.train_files` and `data.train_batch_size`, what is not given has their default, where ours would train otherwise.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

logger = logging.getLogger(__name__)

Get = Callable[[str], Any]
#: From a value, what else is given, and further arguments to our keys with their values.
Translate = Callable[..., Mapping[str, Any]]
#: Our key for the value as it is; settings whatever the value; a function; or one with further arguments.
Rule = str | Mapping[str, Any] | Translate | tuple[Any, ...]
#: A key that is set to something, or what else has to hold.
Condition = str | Callable[[Get], Any]
_ASYNC, _CORRECTION = "async_training", "algorithm.rollout_correction"
_FILTERS, _KL_IN_REWARD = "algorithm.filter_groups.enable", "algorithm.use_kl_in_reward"
ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
_ALGORITHMS = {"gae": "ppo", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
#: Our algorithm of GRPO's advantages with that loss.
_LOSSES = {"vanilla": "grpo", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo"}
_KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
_OVERLONG = ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer")


class RefusedError(Exception):
    """The setting is refused; the text says what to write instead."""


def ours(rule: Rule, value: Any, get: Get) -> Mapping[str, Any]:
    """Our settings for a value of one of theirs, by its rule; `get` has the others by name.

    Raises:
        RefusedError: the value is not taken.
    """
    if isinstance(rule, str):
        return {rule: value}
    if isinstance(rule, Mapping):
        return rule
    translate, *arguments = rule if isinstance(rule, tuple) else (rule,)
    return translate(value, get, *arguments)  # type: ignore[no-any-return]


def _value_of(condition: Condition, get: Get) -> Any:
    return get(condition) if isinstance(condition, str) else condition(get)


def _if(value: Any, get: Get, condition: Condition, rule: Rule, *values: Any) -> Mapping[str, Any]:
    """By the rule where a condition holds, or another key has one of `values`; else it is not read there either."""
    other = _value_of(condition, get)
    return ours(rule, value, get) if (other in values if values else other) else {}


def _unless(value: Any, get: Get, condition: Condition, rule: Rule) -> Mapping[str, Any]:
    return {} if _value_of(condition, get) else ours(rule, value, get)


def _on(value: Any, get: Get, rule: Rule, *values: Any) -> Mapping[str, Any]:
    """By the rule for one of `values`, or any that is not false; else it says nothing."""
    return _if(value, get, lambda get: value, rule, *values)


def _but(value: Any, get: Get, key: str, instead: Any, *values: Any) -> Mapping[str, Any]:
    """The value under our key, or `instead` for one of `values`, which mean that there."""
    return {key: instead if value in values else value}


def _only(value: Any, get: Get, instead: str, *allowed: Any) -> Mapping[str, Any]:
    """No effect with these values; others are refused."""
    if value not in allowed:
        raise RefusedError(instead)
    return {}


def _as(value: Any, get: Get, other: str, instead: str, *allowed: Any) -> Mapping[str, Any]:
    """No effect with the value of another key, or with these."""
    return {} if value == get(other) else _only(value, get, instead, *allowed)


def _source(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    return {key: {"path": value} if isinstance(value, list) else value}


def _kl_estimator(value: Any, get: Get) -> Mapping[str, Any]:
    return {"algorithm.kl_estimator": _KL.get(str(value), value)}


def is_theirs(get: Get) -> bool:
    """Whether these are the settings of a launch script, not of a file of ours with a few foreign names."""
    return get("data.train_files") is not None and get("data.train_batch_size") is not None


def is_streamed(get: Get) -> bool:
    """Whether the trainer takes samples as they come, in no batches of `data.train_batch_size`."""
    return get("rollout.total_rollout_steps") is not None or get(f"{_ASYNC}.trigger_parameter_sync_step") is not None


def _fetched(get: Get) -> Any:
    """Prompts that the schedule of the optimizer counts as one step: of streamed samples, those fetched at a time."""
    if is_streamed(get):
        return (get(f"{ACTOR}.ppo_mini_batch_size") or 256) * (get(f"{_ASYNC}.require_batches") or 1)
    generated = None if get(_FILTERS) else get("data.gen_batch_size")
    return get("data.train_batch_size") if generated is None else generated


def prompts_of(get: Get) -> Any:
    """Prompts of a step here: of streamed samples, those between two synchronisations of the weights."""
    return _fetched(get) * (get(f"{_ASYNC}.trigger_parameter_sync_step") or 4) if is_streamed(get) else _fetched(get)


def _batch_size(value: Any, get: Get) -> Mapping[str, Any]:
    return {"data.batch_size": prompts_of(get), **({} if get(f"{_ROLLOUT}.n") is not None else {f"{_ROLLOUT}.n": 1})}


def _rollout_steps(value: Any, get: Get) -> Mapping[str, Any]:
    return {"trainer.total_steps": max(1, value // prompts_of(get)) if isinstance(value, int) else value}


def _is_by_steps(get: Get) -> bool:
    return is_streamed(get) or (is_theirs(get) and get("trainer.total_training_steps") is not None)


def _staleness(value: Any, get: Get) -> Mapping[str, Any]:
    """A share of samples there, whole steps here."""
    return {"trainer.max_staleness": ceil(value) if isinstance(value, int | float) else value}


def _by_engine(get: Get) -> bool:
    """Whether the ratio of the loss is to the log-probs of the engine."""
    streamed = is_streamed(get) and not get(f"{_ASYNC}.compute_prox_log_prob")
    return bool(streamed or get(f"{_CORRECTION}.bypass_mode"))


_OLD_PROBS = (
    "old log-probs are the engine's here, or those of the weights that a step begins with: write "
    f"{_ASYNC}.compute_prox_log_prob=True"
)


def _samples(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    """Prompts there, samples here."""
    prompts = prompts_of(get) if is_theirs(get) else None
    if isinstance(value, int) and isinstance(prompts, int) and value > prompts:
        raise RefusedError(f"a mini-batch is a part of the batch of {prompts} prompts: lower it")
    return {key: value * (get(f"{_ROLLOUT}.n") or 1) if isinstance(value, int) else value}


def _of_all_gpus(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    gpus = get("trainer.n_gpus_per_node")
    if gpus is None or not isinstance(value, int):
        raise RefusedError("is of all GPUs: write ppo_micro_batch_size_per_gpu")
    return {key: max(1, value // (gpus * (get("trainer.nnodes") or 1)))}


def _rank(value: Any, get: Get) -> Mapping[str, Any]:
    usual = {} if get(f"{_MODEL}.lora_alpha") is not None else {f"{_MODEL}.lora.alpha": 16}
    return {f"{_MODEL}.lora.r": value, **usual} if value else {}


def _overlong(get: Get, key: str, usual: Any = None) -> Any:
    return next((value for section in _OVERLONG if (value := get(f"{section}.{key}")) is not None), usual)


def _punishes(get: Get) -> bool:
    return get("reward_model.reward_manager") == "dapo" and bool(_overlong(get, "enable"))


def _name(estimator: str, get: Get) -> str:
    """Our algorithm of an estimator of advantages and a loss.

    Raises:
        RefusedError: no algorithm here has that loss.
    """
    name, mode = _ALGORITHMS.get(estimator, estimator), str(get(_LOSS_MODE) or "vanilla")
    is_dapo = _punishes(get) or bool(get(_FILTERS))
    if (name == "gpg" or mode == "vanilla") and not is_dapo:
        return name
    if name != "grpo" or mode not in _LOSSES:
        what = f"{mode} with overlong_buffer or filter_groups" if is_dapo else f"loss_mode={mode}"
        raise RefusedError(
            f"there is no {what} for {estimator}: write one of {', '.join(_LOSSES)} beside grpo, or an algorithm of "
            "your own (algorithm.name=FILE.py:CLASS, docs/algorithms.md)"
        )
    return "dapo" if is_dapo and mode == "vanilla" else _LOSSES[mode]


def _algorithm(value: Any, get: Get) -> Mapping[str, Any]:
    options: dict[str, Any] = {}
    try:
        name = _name(value, get) if isinstance(value, str) else value
    except RefusedError:
        if (get(_LOSS_MODE) or "vanilla") != "vanilla":  # which is refused
            return {}
        raise
    if not (get(f"{ACTOR}.use_kl_loss") or get(_KL_IN_REWARD) or get("algorithm.kl_in")):
        options["kl_in"] = "none"
    if _by_engine(get):
        options["rollout_is"] = "ratio"
    elif is_theirs(get) and get(f"{_CORRECTION}.rollout_is") is None:
        options["rollout_is"] = None
    if name in ("dapo", "gspo", "gmpo", "cispo"):  # whose bounds are not 0.2
        both = get(f"{ACTOR}.clip_ratio") or 0.2
        options |= {side: both for side in _SIDES if get(f"{ACTOR}.{side}") is None}
    if name == "dapo" or get(_FILTERS):
        options["filter_groups"] = bool(get(_FILTERS))
    if _punishes(get):
        options |= _punishment(get)
    return {"algorithm.name": name, **{f"algorithm.{key}": option for key, option in options.items()}}


def _punishment(get: Get) -> dict[str, Any]:
    length, most = get("reward_model.reward_kwargs.max_resp_len"), get("data.max_response_length")
    if length not in (None, most):
        raise RefusedError(
            f"reward_kwargs.max_resp_len={length} is not data.max_response_length={most}: write it there"
        )
    return {
        "overlong_length": most,
        "overlong_buffer": _overlong(get, "len"),
        "overlong_penalty": _overlong(get, "penalty_factor", 1.0),
    }


def _loss_mode(value: Any, get: Get) -> Mapping[str, Any]:
    _name(str(get("algorithm.adv_estimator")), get)
    return {}


_SIDES = ("clip_ratio_low", "clip_ratio_high")
#: Algorithms whose loss has no such option there either.
_UNREAD = {
    "clip_ratio_c": ("gspo", "gmpo", "cispo", "gpg", "sapo"),
    "loss_agg_mode": ("gspo", "gmpo", "sapo"),
    **dict.fromkeys(("clip_ratio", *_SIDES), ("gpg", "sapo")),
}


def _of_loss(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    """An option of the policy's loss."""
    estimator, unread = get("algorithm.adv_estimator"), _UNREAD.get(key, ())
    try:
        if unread and isinstance(estimator, str) and _name(estimator, get) in unread:
            return {}
    except RefusedError:  # the estimator says so
        return {}
    if key == "clip_ratio" and all(get(f"{ACTOR}.{side}") is not None for side in _SIDES):
        return {}
    return {f"algorithm.{key}": value}


def _option(value: Any, get: Get, key: str, usual: Any) -> Mapping[str, Any]:
    """An option that all algorithms have there, and some here: with its usual value it says nothing."""
    return {} if value == usual and get("algorithm.adv_estimator") is not None else {f"algorithm.{key}": value}


def _kl_in_reward(value: Any, get: Get) -> Mapping[str, Any]:
    if value and get(f"{ACTOR}.use_kl_loss"):
        raise RefusedError("the KL counts once here: leave it or actor.use_kl_loss out")
    return {"algorithm.kl_in": "reward"} if value else {}


def _adapts(get: Get) -> bool:
    return bool(get(_KL_IN_REWARD)) and get("algorithm.kl_ctrl.type") == "adaptive"


def _corrects(get: Get) -> bool:
    """Whether the correction that `rollout_is` turns on is read."""
    return get(f"{_CORRECTION}.rollout_is") is not None and not _by_engine(get)


def _rejection(value: Any, get: Get) -> Mapping[str, Any]:
    """The bounds of rejection sampling: the upper one, or "0.999_1.001"."""
    if not isinstance(value, str):
        return {"algorithm.rollout_rs_threshold": value}
    lower, _, upper = value.partition("_")
    try:
        return {"algorithm.rollout_rs_lower": float(lower), "algorithm.rollout_rs_threshold": float(upper)}
    except ValueError:
        raise RefusedError("write one number, or LOWER_UPPER") from None


def _filter_metric(value: Any, get: Get) -> Mapping[str, Any]:
    if value == "seq_final_reward" and get(_KL_IN_REWARD):
        raise RefusedError("groups are compared before the KL is taken off here: write seq_reward")
    if value in ("seq_reward", "seq_final_reward") and _punishes(get) and get(_FILTERS):
        return {"algorithm.filter_metric": "outcome"}
    return _only(value, get, "write acc: the reward", "acc", "score", "seq_reward", "seq_final_reward")


def _rollouts(value: Any, get: Get) -> Mapping[str, Any]:
    return {"trainer.max_resamples": value - 1 if value > 0 else 2**31 - 1}


def _reward(value: Any, get: Get) -> Mapping[str, Any]:
    return {"reward.path": f"{value}:{get('custom_reward_function.name') or 'compute_score'}"} if value else {}


def _reward_model(value: Any, get: Get) -> Mapping[str, Any]:
    if get("reward_model.enable") and get("custom_reward_function.path"):
        raise RefusedError("a function that asks a model by its server is a reward of its own: leave reward_model out")
    return {"reward.model": value} if get("reward_model.enable") else {}


def _gpus(value: Any, get: Get) -> Mapping[str, Any]:
    """Under torchrun the ranks are there; else a run on several GPUs takes a Ray cluster."""
    if not isinstance(value, int):
        raise RefusedError("write a whole number")
    count = value * (get("trainer.nnodes") or 1)
    if (rollout := get("rollout.n_gpus_per_node")) is not None:
        first = rollout * (get("rollout.nnodes") or 1)
        return {"trainer.placement": {"rollout": f"cuda:0-{first - 1}", "actor": f"cuda:{first}-{first + count - 1}"}}
    return {} if count == 1 or "WORLD_SIZE" in os.environ else {"trainer.placement": f"cuda:0-{count - 1}"}


def _strategy(value: Any, get: Get, role: str) -> Mapping[str, Any]:
    """`megatron` cuts by tensor and pipeline alone here; what cuts the sequence or the experts is FSDP."""
    cuts = [get(f"{role}.megatron.{name}") or 1 for name in ("context_parallel_size", "expert_model_parallel_size")]
    return {f"{role}.strategy": "fsdp" if value == "fsdp2" or (value == "megatron" and max(cuts) > 1) else value}


def usual_strategy(role: str, get: Get) -> str | None:
    """The strategy that a script leaves out."""
    if any(get(f"{role}.megatron.{name}") is not None for name in _SIZES):
        return "megatron"
    fsdp = [get(f"{role}.fsdp_config.{name}") for name in ("param_offload", "optimizer_offload", "forward_prefetch")]
    several = (get("trainer.n_gpus_per_node") or 1) != 1 or (get("trainer.nnodes") or 1) != 1
    return "fsdp" if several or any(fsdp) or (get(f"{role}.fsdp_config.fsdp_size") or -1) != -1 else None


def _eval_temperature(value: Any, get: Get) -> Mapping[str, Any]:
    return {"trainer.eval_temperature": value if get(f"{_ROLLOUT}.val_kwargs.do_sample") else 0.0}


def _evaluates(get: Get) -> Any:
    return get("data.val_files") or get("data.eval")


_SAMPLED = (_if, f"{_ROLLOUT}.val_kwargs.temperature", {"trainer.eval_temperature": 1.0}, None)
_TRACKERS = ("swanlab", "clearml", "vemlp_wandb", "file", "rl_logging_board")


def _loggers(value: Any, get: Get) -> Mapping[str, Any]:
    """Trackers that are not here write nothing."""
    names = value if isinstance(value, list) else [value]
    if missing := [str(name) for name in names if name in _TRACKERS]:
        logger.warning("trainer.logger: %s: not here; metrics.jsonl has what they would get", ", ".join(missing))
    return {"trainer.loggers": [name for name in names if name not in missing]}


def _has_projects(get: Get) -> bool:
    loggers = get("trainer.logger") or get("trainer.loggers") or ()
    return any(name in loggers for name in ("wandb", "trackio", "mlflow"))


def _engine(value: Any, get: Get) -> Mapping[str, Any]:
    """Engines draw from one distribution: which one draws is a matter of speed."""
    if value in ("sglang", "trtllm"):
        logger.warning("%s.name: %s is not here: auto, which is vLLM on a GPU, draws the samples", _ROLLOUT, value)
        return {f"{_ROLLOUT}.name": "auto"}
    return {f"{_ROLLOUT}.name": value}


_ADAPTED = "write the layers that get adapters: model.lora={targets: [q_proj, v_proj]}"
_GO_ON = "write trainer.output_dir: the run there goes on"


def _resume(value: Any, get: Get) -> Mapping[str, Any]:
    return {"trainer.resume": False} if value == "disable" else _only(value, get, _GO_ON, "auto")


def _model_length(value: Any, get: Get) -> Mapping[str, Any]:
    longest = (get("data.max_prompt_length") or 0) + (get("data.max_response_length") or 0)
    if isinstance(value, int) and value < longest:
        raise RefusedError(f"cuts responses before {longest} tokens: write a smaller data.max_response_length")
    return {}


def _updates(get: Get) -> int:
    """Optimizer steps of one step: a schedule there counts steps, and here updates."""
    prompts, mini = _fetched(get), get(f"{ACTOR}.ppo_mini_batch_size")
    parts = max(1, prompts // mini) if isinstance(prompts, int) and isinstance(mini, int) and mini else 1
    return parts * (get(f"{ACTOR}.ppo_epochs") or 1)


def _steps(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    """Steps there, updates here; -1 is not given."""
    return {} if value == -1 else {key: value * _updates(get)}


def _warmup_share(value: Any, get: Get, optim: str) -> Mapping[str, Any]:
    total = get("trainer.total_training_steps")
    if not value or (get(f"{optim}.lr_warmup_steps") or -1) > 0:
        return {}
    if not isinstance(total, int) or not isinstance(value, float):
        return {f"{optim}.warmup_ratio": value}
    return {f"{optim}.warmup_steps": int(value * total) * _updates(get)}


def _decay(value: Any, get: Get, optim: str) -> Mapping[str, Any]:
    """The steps of Megatron's decay, unless the rate is constant."""
    decays = (get(f"{optim}.lr_decay_style") or "constant") != "constant"
    return _steps(value, get, f"{optim}.total_steps") if decays else {}


_SAVED = "megatron.use_dist_checkpointing"
_FILES = "leave it out: weights are read from model.path, in the form that transformers saves"


def _update(section: str, optim: str) -> dict[str, Rule]:
    """The names of a section of training, for the actor or the critic."""
    return {
        f"{section}.ppo_mini_batch_size": (_samples, f"{section}.mini_batch_size"),
        f"{section}.ppo_micro_batch_size_per_gpu": f"{section}.micro_batch_size",
        f"{section}.train_micro_batch_size_per_gpu": f"{section}.micro_batch_size",
        f"{section}.ppo_micro_batch_size": (_of_all_gpus, f"{section}.micro_batch_size"),
        f"{section}.ppo_max_token_len_per_gpu": f"{section}.max_tokens_per_micro_batch",
        f"{section}.ppo_epochs": f"{section}.epochs",
        f"{section}.grad_clip": f"{optim}.max_grad_norm",
        f"{section}.shuffle": (_only, "mini-batches keep the order of the batch: leave it out", False),
        f"{section}.strategy": (_strategy, section),
        f"{section}.megatron.dist_checkpointing_path": (_if, f"{section}.{_SAVED}", (_only, _FILES, "")),
        f"{section}.megatron.tensor_model_parallel_size": f"{section}.tensor_parallel_size",
        f"{section}.megatron.pipeline_model_parallel_size": f"{section}.pipeline_parallel_size",
        f"{section}.megatron.context_parallel_size": f"{section}.ulysses_sequence_parallel_size",
        f"{section}.megatron.expert_model_parallel_size": f"{section}.expert_parallel_size",
        f"{optim}.lr_warmup_steps": (_steps, f"{optim}.warmup_steps"),
        f"{optim}.lr_warmup_steps_ratio": (_warmup_share, optim),
        f"{optim}.warmup_style": f"{optim}.schedule",
        f"{optim}.lr_scheduler_type": f"{optim}.schedule",
        f"{optim}.lr_decay_style": f"{optim}.schedule",
        f"{optim}.lr_decay_steps": (_decay, optim),
        f"{optim}.total_training_steps": (_steps, f"{optim}.total_steps"),
        f"{optim}.optimizer": (_only, "the optimizer is AdamW: leave it out", "AdamW", "adam"),
        f"{optim}.optimizer_impl": (_only, "the optimizer is AdamW: leave it out", "torch.optim"),
        f"{optim}.min_lr_ratio": (_only, "schedules end at 0: leave it out", 0, 0.0),
        f"{optim}.min_lr": (_only, "schedules end at 0: leave it out", 0, 0.0),
        f"{optim}.num_cycles": (_only, "a cosine is half a period: leave it out", 0.5),
        f"{optim}.clip_grad": (_if, f"{section}.grad_clip", f"{optim}.max_grad_norm", None),
    }


_MANAGERS = ("naive", "batch", "prime", "dapo")
_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
)  # fmt: skip
#: Settings of the actor that are the algorithm's here.
_OF_ALGORITHMS = (
    "clip_ratio", *_SIDES, "clip_ratio_c", "entropy_coeff", "loss_agg_mode", "loss_scale_factor",
)  # fmt: skip
NAMES: dict[str, Rule] = {
    "data.rollout_batch_size": "data.batch_size",
    "data.train_files": (_source, "data.train"),
    "data.val_files": (_source, "data.eval"),
    "data.train_batch_size": _batch_size,
    "data.gen_batch_size": (_if, "data.train_batch_size", (_unless, _FILTERS, "data.batch_size"), None),
    "data.max_response_length": f"{_ROLLOUT}.max_new_tokens",
    "data.filter_overlong_prompts": (_on, {"data.truncation": "drop"}),
    "data.truncation": (_unless, "data.filter_overlong_prompts", "data.truncation"),
    "data.prompt_key": "data.prompt_column",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "data.reward_fn_key": (_only, "a reward reads any column by its name", "data_source"),
    "data.trust_remote_code": (_on, (_unless, f"{_MODEL}.trust_remote_code", {f"{_MODEL}.trust_remote_code": True})),
    f"{_MODEL}.tokenizer_path": f"{_MODEL}.tokenizer",
    f"{_MODEL}.torch_dtype": f"{_MODEL}.dtype",
    f"{_MODEL}.fused_kernel_options.impl_backend": lambda value, get: (
        {} if get(f"{_MODEL}.use_fused_kernels") is False else {f"{_MODEL}.fused_kernel_options.impl_backend": value}
    ),
    **{
        f"{section}.{override}.max_position_embeddings": f"{section}.max_position_embeddings"
        for section in (_MODEL, "critic.model")
        for override in ("override_config", "override_config.model_config")
    },
    f"{_MODEL}.lora_rank": _rank,
    f"{_MODEL}.lora_alpha": (_if, f"{_MODEL}.lora_rank", f"{_MODEL}.lora.alpha"),
    f"{_MODEL}.target_modules": (_if, f"{_MODEL}.lora_rank", f"{_MODEL}.lora.targets"),
    f"{_MODEL}.exclude_modules": (_if, f"{_MODEL}.lora_rank", (_only, _ADAPTED, "")),
    **_update(ACTOR, f"{ACTOR}.optim"),
    **{f"{ACTOR}.{name}": (_of_loss, name) for name in _OF_ALGORITHMS},
    _LOSS_MODE: _loss_mode,
    f"{ACTOR}.tau_pos": (_if, _LOSS_MODE, "algorithm.temperature_pos", "sapo"),
    f"{ACTOR}.tau_neg": (_if, _LOSS_MODE, "algorithm.temperature_neg", "sapo"),
    f"{ACTOR}.use_kl_loss": (_on, {"algorithm.kl_in": "loss"}),
    f"{ACTOR}.kl_loss_coef": (_if, f"{ACTOR}.use_kl_loss", "algorithm.kl_coef"),
    f"{ACTOR}.kl_loss_type": (_if, f"{ACTOR}.use_kl_loss", _kl_estimator),
    f"{ACTOR}.fsdp_config.grad_offload": (_on, {f"{ACTOR}.fsdp_config.optimizer_offload": True}),
    f"{ACTOR}.fsdp_config.model_dtype": f"{_MODEL}.dtype",
    "actor_rollout_ref.hybrid_engine": (_unless, is_streamed, (_on, {"trainer.max_staleness": 1}, False)),
    f"{_ASYNC}.require_batches": {},
    f"{_ASYNC}.trigger_parameter_sync_step": {},
    f"{_ASYNC}.staleness_threshold": _staleness,
    f"{_ASYNC}.partial_rollout": (_only, "unfinished responses go on with new weights: leave it out", True),
    f"{_ASYNC}.use_rollout_log_probs": (_if, _by_engine, lambda value, get: _only(bool(value), get, _OLD_PROBS, True)),
    f"{_ASYNC}.compute_prox_log_prob": {},
    "rollout.total_rollout_steps": _rollout_steps,
    "rollout.total_epochs": (_if, "rollout.total_rollout_steps", "trainer.total_epochs", None),
    "rollout.test_freq": (_if, _evaluates, (_but, "trainer.eval_every", None, -1, 0)),
    f"{_ROLLOUT}.name": _engine,
    f"{_ROLLOUT}.rollout_per_device_batch_size": f"{_ROLLOUT}.max_num_seqs",
    f"{_ROLLOUT}.top_k": (_but, f"{_ROLLOUT}.top_k", 0, -1),
    f"{_ROLLOUT}.do_sample": (_only, "training samples: write temperature", True),
    f"{_ROLLOUT}.max_model_len": _model_length,
    f"{_ROLLOUT}.prompt_length": (_as, "data.max_prompt_length", "write data.max_prompt_length"),
    f"{_ROLLOUT}.response_length": (_as, "data.max_response_length", "write data.max_response_length"),
    f"{_ROLLOUT}.val_kwargs.n": (_if, _evaluates, "trainer.eval_n"),
    f"{_ROLLOUT}.val_kwargs.do_sample": (_if, _evaluates, (_on, _SAMPLED)),
    f"{_ROLLOUT}.val_kwargs.temperature": (_if, _evaluates, _eval_temperature),
    f"{_ROLLOUT}.val_kwargs.top_p": (_if, _evaluates, "trainer.eval_top_p"),
    f"{_ROLLOUT}.val_kwargs.top_k": (_if, _evaluates, (_but, "trainer.eval_top_k", 0, -1)),
    **_update("critic", "critic.optim"),
    "critic.cliprange_value": (_option, "cliprange_value", 0.5),
    "critic.loss_agg_mode": (_as, f"{ACTOR}.loss_agg_mode", "is the actor's: leave it out", "token-mean"),
    "algorithm.adv_estimator": _algorithm,
    "algorithm.gamma": (_option, "gamma", 1.0),
    "algorithm.lam": (_if, "algorithm.adv_estimator", (_option, "lam", 1.0), None, "gae"),
    "algorithm.norm_adv_by_std_in_grpo": (_option, "norm_adv_by_std", True),
    _KL_IN_REWARD: _kl_in_reward,
    "algorithm.kl_penalty": (_if, _KL_IN_REWARD, _kl_estimator),
    "algorithm.kl_ctrl.type": (_if, _KL_IN_REWARD, (_on, {"algorithm.kl_target": None}, "fixed")),
    "algorithm.kl_ctrl.kl_coef": (_if, _KL_IN_REWARD, "algorithm.kl_coef"),
    "algorithm.kl_ctrl.horizon": (_if, _adapts, "algorithm.kl_horizon"),
    "algorithm.kl_ctrl.target_kl": (_if, _adapts, "algorithm.kl_target"),
    _FILTERS: {},
    "algorithm.filter_groups.metric": _filter_metric,
    "algorithm.filter_groups.max_num_gen_batches": (_if, _FILTERS, _rollouts),
    f"{_CORRECTION}.rollout_is": (_if, _corrects, "algorithm.rollout_is"),
    f"{_CORRECTION}.rollout_is_threshold": (_if, _corrects, "algorithm.rollout_is_threshold"),
    f"{_CORRECTION}.rollout_is_batch_normalize": (_if, _corrects, "algorithm.rollout_is_normalize"),
    f"{_CORRECTION}.rollout_rs": "algorithm.rollout_rs",
    f"{_CORRECTION}.rollout_rs_threshold": (_if, f"{_CORRECTION}.rollout_rs", _rejection),
    f"{_CORRECTION}.rollout_rs_threshold_lower": (_if, f"{_CORRECTION}.rollout_rs", "algorithm.rollout_rs_lower"),
    f"{_CORRECTION}.loss_type": (_only, "write algorithm.name of such a loss, or leave it out", "ppo_clip"),
    f"{_CORRECTION}.bypass_mode": {},
    "custom_reward_function.path": _reward,
    "custom_reward_function.name": {},
    "reward_model.enable": {},
    "reward_model.model.path": _reward_model,
    "reward_model.model.input_tokenizer": (_as, f"{_MODEL}.path", "responses have the policy's: leave it out"),
    "reward_model.reward_manager": (_only, "write a reward of your own: reward.path", *_MANAGERS),
    "reward_model.reward_kwargs.max_resp_len": {},
    **{f"{section}.{key}": {} for section in _OVERLONG for key in ("enable", "len", "penalty_factor")},
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.total_epochs": (_unless, _is_by_steps, "trainer.total_epochs"),
    "trainer.save_freq": (_but, "trainer.save_every", None, -1, 0),
    "trainer.test_freq": (_unless, is_streamed, (_if, _evaluates, (_but, "trainer.eval_every", None, -1, 0))),
    "trainer.val_before_train": (_if, _evaluates, lambda value, get: {} if value else {"trainer.eval_before": False}),
    "trainer.val_only": (_on, {"trainer.total_steps": 0}),
    "trainer.logger": _loggers,
    "trainer.project_name": (_if, _has_projects, "trainer.project"),
    "trainer.experiment_name": lambda value, get: {
        "trainer.run_name": re.sub(r"[^\w.-]+", "-", str(value)).strip("-.")
    },
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.max_ckpt_to_keep": "trainer.keep_checkpoints",
    f"{_ROLLOUT}.tensor_model_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "trainer.n_gpus_per_node": _gpus,
    "trainer.critic_warmup": (_only, "there is no such phase here: leave it out", 0),
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": (_if, "trainer.resume_mode", (_only, _GO_ON, None), "resume_path"),
}
#: Their names that are ours, too, and mean the same.
OWN = frozenset((
    "data.max_response_length", "data.truncation", f"{_ROLLOUT}.top_k", f"{_ROLLOUT}.name", f"{ACTOR}.strategy",
    "critic.strategy", f"{_ROLLOUT}.tensor_model_parallel_size", "algorithm.gamma", "algorithm.lam",
    "trainer.total_epochs", f"{_MODEL}.fused_kernel_options.impl_backend",
))  # fmt: skip

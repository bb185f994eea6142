"""Names that others have for our settings: those of volcengine/verl, and some of DeepSpeed and the articles.

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
#: From a value, and what else is given, to our keys with their values.
Translate = Callable[[Any, Get], Mapping[str, Any]]
_ASYNC = "async_training"
ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_ALGORITHMS = {"gae": "ppo", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
#: Our algorithm of GRPO's advantages with that loss.
_LOSSES = {"vanilla": "grpo", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo"}
_KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
_OVERLONG = ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer")


class RefusedError(Exception):
    """The setting is refused; the text says what to write instead."""


def _to(*keys: str) -> Translate:
    """The value as it is, under our keys."""
    return lambda value, get: dict.fromkeys(keys, value)


def _without(key: str, *nothing: Any) -> Translate:
    """The value as it is; `nothing` are values that mean null."""
    return lambda value, get: {key: None if value in nothing else value}


def _nothing(value: Any, get: Get) -> Mapping[str, Any]:
    """Read beside another key."""
    return {}


def _only(*allowed: Any, instead: str) -> Translate:
    """No effect with these values; others are refused."""

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        if value not in allowed:
            raise RefusedError(instead)
        return {}

    return translate


def _beside(switch: str, instead: str) -> Translate:
    """Read there where another key is set, and then refused."""
    return lambda value, get: _only("", instead=instead)(value, get) if get(switch) else {}


def _as(other: str, *allowed: Any, instead: str) -> Translate:
    """No effect with the value of another key, or with these."""
    return lambda value, get: {} if value == get(other) else _only(*allowed, instead=instead)(value, get)


def _source(key: str) -> Translate:
    return lambda value, get: {key: {"path": value} if isinstance(value, list) else value}


def is_theirs(get: Get) -> bool:
    """Whether these are the settings of a launch script, and not a few names beside ours."""
    return get("data.train_files") is not None and get("data.train_batch_size") is not None


def is_streamed(get: Get) -> bool:
    """Whether the trainer takes samples as they come, in no batches of `data.train_batch_size`."""
    return get("rollout.total_rollout_steps") is not None or get(f"{_ASYNC}.trigger_parameter_sync_step") is not None


def _fetched(get: Get) -> Any:
    """Prompts that the schedule of the optimizer counts as one step: of streamed samples, those fetched at a time."""
    if is_streamed(get):
        return (get(f"{ACTOR}.ppo_mini_batch_size") or 256) * (get(f"{_ASYNC}.require_batches") or 1)
    generated = None if get("algorithm.filter_groups.enable") else get("data.gen_batch_size")
    return get("data.train_batch_size") if generated is None else generated


def prompts_of(get: Get) -> Any:
    """Prompts of a step here: of streamed samples, those between two synchronisations of the weights."""
    return _fetched(get) * (get(f"{_ASYNC}.trigger_parameter_sync_step") or 4) if is_streamed(get) else _fetched(get)


def _batch_size(value: Any, get: Get) -> Mapping[str, Any]:
    return {"data.batch_size": prompts_of(get), **({} if get(f"{_ROLLOUT}.n") is not None else {f"{_ROLLOUT}.n": 1})}


def _rollout_steps(value: Any, get: Get) -> Mapping[str, Any]:
    return {"trainer.total_steps": max(1, value // prompts_of(get)) if isinstance(value, int) else value}


def _staleness(value: Any, get: Get) -> Mapping[str, Any]:
    """A share of samples there, whole steps here."""
    return {"trainer.max_staleness": ceil(value) if isinstance(value, int | float) else value}


def _by_engine(get: Get) -> bool:
    """Whether the ratio of the loss is to the log-probs of the engine."""
    if is_streamed(get) and not get(f"{_ASYNC}.compute_prox_log_prob"):
        return True
    return bool(get("algorithm.rollout_correction.bypass_mode"))


def _engine_log_probs(value: Any, get: Get) -> Mapping[str, Any]:
    if not value and _by_engine(get):
        raise RefusedError(
            "old log-probs are the engine's here, or those of the weights that a step begins with: write "
            f"{_ASYNC}.compute_prox_log_prob=True"
        )
    return {}


def _samples(key: str) -> Translate:
    """Prompts there, samples here."""

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        prompts = prompts_of(get) if is_theirs(get) else None
        if isinstance(value, int) and isinstance(prompts, int) and value > prompts:
            raise RefusedError(f"a mini-batch is a part of the batch of {prompts} prompts: lower it")
        return {key: value * (get(f"{_ROLLOUT}.n") or 1) if isinstance(value, int) else value}

    return translate


def _of_all_gpus(key: str) -> Translate:
    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        gpus = get("trainer.n_gpus_per_node")
        if gpus is None or not isinstance(value, int):
            raise RefusedError("is of all GPUs: write ppo_micro_batch_size_per_gpu")
        return {key: max(1, value // (gpus * (get("trainer.nnodes") or 1)))}

    return translate


def _lora(key: str) -> Translate:
    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        return {} if not get(f"{_MODEL}.lora_rank") else {f"{_MODEL}.lora.{key}": value}

    return translate


def _rank(value: Any, get: Get) -> Mapping[str, Any]:
    usual = {} if get(f"{_MODEL}.lora_alpha") is not None else {f"{_MODEL}.lora.alpha": 16}
    return {f"{_MODEL}.lora.r": value, **usual} if value else {}


def _overlong(get: Get, key: str) -> Any:
    return next((value for section in _OVERLONG if (value := get(f"{section}.{key}")) is not None), None)


def _punishes(get: Get) -> bool:
    return get("reward_model.reward_manager") == "dapo" and bool(_overlong(get, "enable"))


def _name(estimator: str, get: Get) -> str:
    """Our algorithm of an estimator of advantages and a loss.

    Raises:
        RefusedError: there is none.
    """
    name, mode = _ALGORITHMS.get(estimator, estimator), str(get(f"{ACTOR}.policy_loss.loss_mode") or "vanilla")
    is_dapo = _punishes(get) or bool(get("algorithm.filter_groups.enable"))
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
        if (get(f"{ACTOR}.policy_loss.loss_mode") or "vanilla") != "vanilla":  # which is refused
            return {}
        raise
    if not (get(f"{ACTOR}.use_kl_loss") or get("algorithm.use_kl_in_reward") or get("algorithm.kl_in")):
        options["kl_in"] = "none"
    if _by_engine(get):
        options["rollout_is"] = "ratio"
    elif is_theirs(get) and get("algorithm.rollout_correction.rollout_is") is None:
        options["rollout_is"] = None
    if name in ("dapo", "gspo", "gmpo", "cispo"):  # whose bounds are not 0.2
        both = get(f"{ACTOR}.clip_ratio") or 0.2
        options |= {side: both for side in _SIDES if get(f"{ACTOR}.{side}") is None}
    if name == "dapo" or get("algorithm.filter_groups.enable"):
        options["filter_groups"] = bool(get("algorithm.filter_groups.enable"))
    if _punishes(get):
        options |= _punishment(get)
    return {"algorithm.name": name, **{f"algorithm.{key}": option for key, option in options.items()}}


def _punishment(get: Get) -> dict[str, Any]:
    length, most = get("reward_model.reward_kwargs.max_resp_len"), get("data.max_response_length")
    if length not in (None, most):
        raise RefusedError(
            f"reward_kwargs.max_resp_len={length} is not data.max_response_length={most}: write it there"
        )
    factor = _overlong(get, "penalty_factor")
    return {
        "overlong_length": most,
        "overlong_buffer": _overlong(get, "len"),
        "overlong_penalty": 1.0 if factor is None else factor,
    }


def _loss_mode(value: Any, get: Get) -> Mapping[str, Any]:
    _name(str(get("algorithm.adv_estimator")), get)
    return {}


def _of_mode(mode: str, option: str) -> Translate:
    """An option that one loss reads."""
    loss = f"{ACTOR}.policy_loss.loss_mode"
    return lambda value, get: {f"algorithm.{option}": value} if get(loss) == mode else {}


_SIDES = ("clip_ratio_low", "clip_ratio_high")
#: Algorithms whose loss has no such option there either.
_UNREAD = {
    "clip_ratio_c": ("gspo", "gmpo", "cispo", "gpg", "sapo"),
    "loss_agg_mode": ("gspo", "gmpo", "sapo"),
    **dict.fromkeys(("clip_ratio", *_SIDES), ("gpg", "sapo")),
}


def _of_loss(key: str) -> Translate:
    """An option of the policy's loss."""

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        estimator, unread = get("algorithm.adv_estimator"), _UNREAD.get(key, ())
        try:
            if unread and isinstance(estimator, str) and _name(estimator, get) in unread:
                return {}
        except RefusedError:  # the estimator says so
            return {}
        if key == "clip_ratio" and all(get(f"{ACTOR}.{side}") is not None for side in _SIDES):
            return {}
        return {f"algorithm.{key}": value}

    return translate


def _option(key: str, usual: Any) -> Translate:
    """An option that all algorithms have there, and some here: with its usual value it says nothing."""

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        return {} if value == usual and get("algorithm.adv_estimator") is not None else {f"algorithm.{key}": value}

    return translate


def _kl_in(where: str) -> Translate:
    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        if value and where == "reward" and get(f"{ACTOR}.use_kl_loss"):
            raise RefusedError("the KL counts once here: leave it or actor.use_kl_loss out")
        return {"algorithm.kl_in": where} if value else {}

    return translate


def _kl(switch: str, key: str, names: Mapping[str, str] | None = None) -> Translate:
    """An option of the KL term that `switch` turns on."""

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        return {f"algorithm.{key}": (names or {}).get(str(value), value)} if get(switch) else {}

    return translate


def _adaptive(key: str) -> Translate:
    """An option of the adaptive coefficient of the KL in the reward."""

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        if not get("algorithm.use_kl_in_reward"):
            return {}
        if key == "type":
            return {"algorithm.kl_target": None} if value == "fixed" else {}
        return {f"algorithm.{key}": value} if get("algorithm.kl_ctrl.type") == "adaptive" else {}

    return translate


def _correction(key: str) -> Translate:
    """An option of the correction that `rollout_is` or `rollout_rs` turns on."""
    switch = "algorithm.rollout_correction." + ("rollout_rs" if "rs" in key else "rollout_is")

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        if get(switch) is None or ("is" in key and _by_engine(get)):
            return {}
        if key == "rollout_rs_threshold" and isinstance(value, str):  # "0.999_1.001"
            lower, _, upper = value.partition("_")
            return {"algorithm.rollout_rs_lower": _number(lower), "algorithm.rollout_rs_threshold": _number(upper)}
        return {f"algorithm.{key}": value}

    return translate


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        raise RefusedError("write one number, or LOWER_UPPER") from None


def _filter_metric(value: Any, get: Get) -> Mapping[str, Any]:
    if value == "seq_final_reward" and get("algorithm.use_kl_in_reward"):
        raise RefusedError("groups are compared before the KL is taken off here: write seq_reward")
    if value in ("seq_reward", "seq_final_reward") and _punishes(get) and get("algorithm.filter_groups.enable"):
        return {"algorithm.filter_metric": "outcome"}
    return _only("acc", "score", "seq_reward", "seq_final_reward", instead="write acc: the reward")(value, get)


def _rollouts(value: Any, get: Get) -> Mapping[str, Any]:
    if not get("algorithm.filter_groups.enable"):
        return {}
    return {"trainer.max_resamples": value - 1 if value > 0 else 2**31 - 1}


def _reward(value: Any, get: Get) -> Mapping[str, Any]:
    return {"reward.path": f"{value}:{get('custom_reward_function.name') or 'compute_score'}"} if value else {}


def _manager(value: Any, get: Get) -> Mapping[str, Any]:
    return _only("naive", "batch", "prime", "dapo", instead="write a reward of your own: reward.path")(value, get)


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


def _strategy(role: str) -> Translate:
    """`megatron` cuts by tensor and pipeline alone here; what cuts the sequence or the experts is FSDP."""

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        cuts = [get(f"{role}.megatron.{name}") or 1 for name in ("context_parallel_size", "expert_model_parallel_size")]
        return {f"{role}.strategy": "fsdp" if value == "fsdp2" or (value == "megatron" and max(cuts) > 1) else value}

    return translate


def usual_strategy(role: str, get: Get) -> str | None:
    """The strategy that a script leaves out."""
    if any(get(f"{role}.megatron.{name}") is not None for name in _SIZES):
        return "megatron"
    fsdp = [get(f"{role}.fsdp_config.{name}") for name in ("param_offload", "optimizer_offload", "forward_prefetch")]
    several = (get("trainer.n_gpus_per_node") or 1) != 1 or (get("trainer.nnodes") or 1) != 1
    return "fsdp" if several or any(fsdp) or (get(f"{role}.fsdp_config.fsdp_size") or -1) != -1 else None


def _greedy(value: Any, get: Get) -> Mapping[str, Any]:
    if value and get(f"{_ROLLOUT}.val_kwargs.temperature") is None:
        return {"trainer.eval_temperature": 1.0}
    return {}


def _eval_temperature(value: Any, get: Get) -> Mapping[str, Any]:
    return {"trainer.eval_temperature": value if get(f"{_ROLLOUT}.val_kwargs.do_sample") else 0.0}


def _evaluated(translate: Translate) -> Translate:
    """A setting of evaluations: it has no effect where nothing is evaluated."""
    return lambda value, get: translate(value, get) if get("data.val_files") or get("data.eval") else {}


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


_GO_ON = "write trainer.output_dir: the run there goes on"


def _resume(value: Any, get: Get) -> Mapping[str, Any]:
    return {"trainer.resume": False} if value == "disable" else _only("auto", instead=_GO_ON)(value, get)


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


def _steps(key: str) -> Translate:
    """Steps there, updates here; -1 is not given."""
    return lambda value, get: {} if value == -1 else {key: value * _updates(get)}


def _warmup_share(optim: str) -> Translate:
    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        total = get("trainer.total_training_steps")
        if not value or (get(f"{optim}.lr_warmup_steps") or -1) > 0:
            return {}
        if not isinstance(total, int) or not isinstance(value, float):
            return {f"{optim}.warmup_ratio": value}
        return {f"{optim}.warmup_steps": int(value * total) * _updates(get)}

    return translate


def _decay(optim: str) -> Translate:
    """The steps of Megatron's decay; a constant rate has none."""
    style = f"{optim}.lr_decay_style"
    steps = _steps(f"{optim}.total_steps")
    return lambda value, get: steps(value, get) if (get(style) or "constant") != "constant" else {}


_FILES = "leave it out: weights are read from model.path, in the form that transformers saves"


def _update(section: str, optim: str) -> dict[str, Translate]:
    """The names of a section of training, for the actor or the critic."""
    return {
        f"{section}.ppo_mini_batch_size": _samples(f"{section}.mini_batch_size"),
        f"{section}.ppo_micro_batch_size_per_gpu": _to(f"{section}.micro_batch_size"),
        f"{section}.train_micro_batch_size_per_gpu": _to(f"{section}.micro_batch_size"),
        f"{section}.ppo_micro_batch_size": _of_all_gpus(f"{section}.micro_batch_size"),
        f"{section}.ppo_max_token_len_per_gpu": _to(f"{section}.max_tokens_per_micro_batch"),
        f"{section}.ppo_epochs": _to(f"{section}.epochs"),
        f"{section}.grad_clip": _to(f"{optim}.max_grad_norm"),
        f"{section}.shuffle": _only(False, instead="mini-batches keep the order of the batch: leave it out"),
        f"{section}.strategy": _strategy(section),
        f"{section}.megatron.dist_checkpointing_path": _beside(f"{section}.megatron.use_dist_checkpointing", _FILES),
        f"{section}.megatron.tensor_model_parallel_size": _to(f"{section}.tensor_parallel_size"),
        f"{section}.megatron.pipeline_model_parallel_size": _to(f"{section}.pipeline_parallel_size"),
        f"{section}.megatron.context_parallel_size": _to(f"{section}.ulysses_sequence_parallel_size"),
        f"{section}.megatron.expert_model_parallel_size": _to(f"{section}.expert_parallel_size"),
        f"{optim}.lr_warmup_steps": _steps(f"{optim}.warmup_steps"),
        f"{optim}.lr_warmup_steps_ratio": _warmup_share(optim),
        f"{optim}.warmup_style": _to(f"{optim}.schedule"),
        f"{optim}.lr_scheduler_type": _to(f"{optim}.schedule"),
        f"{optim}.lr_decay_style": _to(f"{optim}.schedule"),
        f"{optim}.lr_decay_steps": _decay(optim),
        f"{optim}.total_training_steps": _steps(f"{optim}.total_steps"),
        f"{optim}.optimizer": _only("AdamW", "adam", instead="the optimizer is AdamW: leave it out"),
        f"{optim}.optimizer_impl": _only("torch.optim", instead="the optimizer is AdamW: leave it out"),
        f"{optim}.min_lr_ratio": _only(0, 0.0, instead="schedules end at 0: leave it out"),
        f"{optim}.min_lr": _only(0, 0.0, instead="schedules end at 0: leave it out"),
        f"{optim}.num_cycles": _only(0.5, instead="a cosine is half a period: leave it out"),
        f"{optim}.clip_grad": _clip_grad(section, optim),
    }


def _clip_grad(section: str, optim: str) -> Translate:
    """Megatron's name; beside `grad_clip` it says nothing there either."""
    return lambda value, get: {} if get(f"{section}.grad_clip") is not None else {f"{optim}.max_grad_norm": value}


_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
)  # fmt: skip
#: Settings of the actor that are the algorithm's here.
_OF_ALGORITHMS = (
    "clip_ratio", *_SIDES, "clip_ratio_c", "entropy_coeff", "loss_agg_mode", "loss_scale_factor",
)  # fmt: skip
NAMES: dict[str, Translate] = {
    "data.rollout_batch_size": _to("data.batch_size"),
    "data.train_files": _source("data.train"),
    "data.val_files": _source("data.eval"),
    "data.train_batch_size": _batch_size,
    "data.gen_batch_size": lambda value, get: (
        {}
        if get("data.train_batch_size") is not None or get("algorithm.filter_groups.enable")
        else {"data.batch_size": value}
    ),
    "data.max_response_length": _to(f"{_ROLLOUT}.max_new_tokens"),
    "data.filter_overlong_prompts": lambda value, get: {"data.truncation": "drop"} if value else {},
    "data.truncation": lambda value, get: {} if get("data.filter_overlong_prompts") else {"data.truncation": value},
    "data.prompt_key": _to("data.prompt_column"),
    "data.apply_chat_template_kwargs": _to("data.chat_template_kwargs"),
    "data.reward_fn_key": _only("data_source", instead="a reward reads any column by its name"),
    "data.trust_remote_code": lambda value, get: (
        {f"{_MODEL}.trust_remote_code": True} if value and not get(f"{_MODEL}.trust_remote_code") else {}
    ),
    f"{_MODEL}.tokenizer_path": _to(f"{_MODEL}.tokenizer"),
    f"{_MODEL}.torch_dtype": _to(f"{_MODEL}.dtype"),
    f"{_MODEL}.fused_kernel_options.impl_backend": lambda value, get: (
        {} if get(f"{_MODEL}.use_fused_kernels") is False else {f"{_MODEL}.fused_kernel_options.impl_backend": value}
    ),
    **{
        f"{section}.{override}.max_position_embeddings": _to(f"{section}.max_position_embeddings")
        for section in (_MODEL, "critic.model")
        for override in ("override_config", "override_config.model_config")
    },
    f"{_MODEL}.lora_rank": _rank,
    f"{_MODEL}.lora_alpha": _lora("alpha"),
    f"{_MODEL}.target_modules": _lora("targets"),
    f"{_MODEL}.exclude_modules": _beside(
        f"{_MODEL}.lora_rank", "write the layers that get adapters: model.lora={targets: [q_proj, v_proj]}"
    ),
    **_update(ACTOR, f"{ACTOR}.optim"),
    **{f"{ACTOR}.{name}": _of_loss(name) for name in _OF_ALGORITHMS},
    f"{ACTOR}.policy_loss.loss_mode": _loss_mode,
    **{f"{ACTOR}.tau_{sign}": _of_mode("sapo", f"temperature_{sign}") for sign in ("pos", "neg")},
    f"{ACTOR}.use_kl_loss": _kl_in("loss"),
    f"{ACTOR}.kl_loss_coef": _kl(f"{ACTOR}.use_kl_loss", "kl_coef"),
    f"{ACTOR}.kl_loss_type": _kl(f"{ACTOR}.use_kl_loss", "kl_estimator", _KL),
    f"{ACTOR}.fsdp_config.grad_offload": lambda value, get: (
        {f"{ACTOR}.fsdp_config.optimizer_offload": True} if value else {}
    ),
    f"{ACTOR}.fsdp_config.model_dtype": _to(f"{_MODEL}.dtype"),
    "actor_rollout_ref.hybrid_engine": lambda value, get: (
        {"trainer.max_staleness": 1} if value is False and not is_streamed(get) else {}
    ),
    f"{_ASYNC}.require_batches": _nothing,
    f"{_ASYNC}.trigger_parameter_sync_step": _nothing,
    f"{_ASYNC}.staleness_threshold": _staleness,
    f"{_ASYNC}.partial_rollout": _only(True, instead="unfinished responses go on with new weights: leave it out"),
    f"{_ASYNC}.use_rollout_log_probs": _engine_log_probs,
    f"{_ASYNC}.compute_prox_log_prob": _nothing,
    "rollout.total_rollout_steps": _rollout_steps,
    "rollout.total_epochs": lambda value, get: (
        {} if get("rollout.total_rollout_steps") is not None else {"trainer.total_epochs": value}
    ),
    "rollout.test_freq": _evaluated(_without("trainer.eval_every", -1, 0)),
    f"{_ROLLOUT}.name": _engine,
    f"{_ROLLOUT}.rollout_per_device_batch_size": _to(f"{_ROLLOUT}.max_num_seqs"),
    f"{_ROLLOUT}.top_k": lambda value, get: {f"{_ROLLOUT}.top_k": 0 if value == -1 else value},
    f"{_ROLLOUT}.do_sample": _only(True, instead="training samples: write temperature"),
    f"{_ROLLOUT}.max_model_len": _model_length,
    f"{_ROLLOUT}.prompt_length": _as("data.max_prompt_length", instead="write data.max_prompt_length"),
    f"{_ROLLOUT}.response_length": _as("data.max_response_length", instead="write data.max_response_length"),
    f"{_ROLLOUT}.val_kwargs.n": _evaluated(_to("trainer.eval_n")),
    f"{_ROLLOUT}.val_kwargs.do_sample": _evaluated(_greedy),
    f"{_ROLLOUT}.val_kwargs.temperature": _evaluated(_eval_temperature),
    f"{_ROLLOUT}.val_kwargs.top_p": _evaluated(_to("trainer.eval_top_p")),
    f"{_ROLLOUT}.val_kwargs.top_k": _evaluated(lambda value, get: {"trainer.eval_top_k": 0 if value == -1 else value}),
    **_update("critic", "critic.optim"),
    "critic.cliprange_value": _option("cliprange_value", 0.5),
    "critic.loss_agg_mode": _as(f"{ACTOR}.loss_agg_mode", "token-mean", instead="is the actor's: leave it out"),
    "algorithm.adv_estimator": _algorithm,
    "algorithm.gamma": _option("gamma", 1.0),
    "algorithm.lam": lambda value, get: (  # of GAE alone
        _option("lam", 1.0)(value, get) if get("algorithm.adv_estimator") in (None, "gae") else {}
    ),
    "algorithm.norm_adv_by_std_in_grpo": _option("norm_adv_by_std", True),
    "algorithm.use_kl_in_reward": _kl_in("reward"),
    "algorithm.kl_penalty": _kl("algorithm.use_kl_in_reward", "kl_estimator", _KL),
    "algorithm.kl_ctrl.type": _adaptive("type"),
    "algorithm.kl_ctrl.kl_coef": _kl("algorithm.use_kl_in_reward", "kl_coef"),
    "algorithm.kl_ctrl.horizon": _adaptive("kl_horizon"),
    "algorithm.kl_ctrl.target_kl": _adaptive("kl_target"),
    "algorithm.filter_groups.enable": _nothing,
    "algorithm.filter_groups.metric": _filter_metric,
    "algorithm.filter_groups.max_num_gen_batches": _rollouts,
    "algorithm.rollout_correction.rollout_is": _correction("rollout_is"),
    "algorithm.rollout_correction.rollout_is_threshold": _correction("rollout_is_threshold"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": _correction("rollout_is_normalize"),
    "algorithm.rollout_correction.rollout_rs": _to("algorithm.rollout_rs"),
    "algorithm.rollout_correction.rollout_rs_threshold": _correction("rollout_rs_threshold"),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": _correction("rollout_rs_lower"),
    "algorithm.rollout_correction.loss_type": _only(
        "ppo_clip", instead="write algorithm.name of such a loss, or leave it out"
    ),
    "algorithm.rollout_correction.bypass_mode": _nothing,
    "custom_reward_function.path": _reward,
    "custom_reward_function.name": _nothing,
    "reward_model.enable": _nothing,
    "reward_model.model.path": _reward_model,
    "reward_model.model.input_tokenizer": _as(f"{_MODEL}.path", instead="responses have the policy's: leave it out"),
    "reward_model.reward_manager": _manager,
    "reward_model.reward_kwargs.max_resp_len": _nothing,
    **{f"{section}.{key}": _nothing for section in _OVERLONG for key in ("enable", "len", "penalty_factor")},
    "trainer.total_training_steps": _to("trainer.total_steps"),
    "trainer.total_epochs": lambda value, get: (
        {}
        if (get("trainer.total_training_steps") is not None and is_theirs(get)) or is_streamed(get)
        else {"trainer.total_epochs": value}
    ),
    "trainer.save_freq": _without("trainer.save_every", -1, 0),
    "trainer.test_freq": lambda value, get: (
        {} if is_streamed(get) else _evaluated(_without("trainer.eval_every", -1, 0))(value, get)
    ),
    "trainer.val_before_train": _evaluated(lambda value, get: {} if value else {"trainer.eval_before": False}),
    "trainer.val_only": lambda value, get: {"trainer.total_steps": 0} if value else {},
    "trainer.logger": _loggers,
    "trainer.project_name": lambda value, get: {"trainer.project": value} if _has_projects(get) else {},
    "trainer.experiment_name": lambda value, get: {
        "trainer.run_name": re.sub(r"[^\w.-]+", "-", str(value)).strip("-.")
    },
    "trainer.default_local_dir": _to("trainer.output_dir"),
    "trainer.max_actor_ckpt_to_keep": _to("trainer.keep_checkpoints"),
    "trainer.max_ckpt_to_keep": _to("trainer.keep_checkpoints"),
    f"{_ROLLOUT}.tensor_model_parallel_size": _to(f"{_ROLLOUT}.tensor_model_parallel_size"),
    "trainer.n_gpus_per_node": _gpus,
    "trainer.critic_warmup": _only(0, instead="there is no such phase here: leave it out"),
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": lambda value, get: (
        {} if get("trainer.resume_mode") != "resume_path" else _only(None, instead=_GO_ON)(value, get)
    ),
}
#: Their names that are ours, too, and mean the same.
OWN = frozenset((
    "data.max_response_length", "data.truncation", f"{_ROLLOUT}.top_k", f"{_ROLLOUT}.name", f"{ACTOR}.strategy",
    "critic.strategy", f"{_ROLLOUT}.tensor_model_parallel_size", "algorithm.gamma", "algorithm.lam",
    "trainer.total_epochs", f"{_MODEL}.fused_kernel_options.impl_backend",
))  # fmt: skip

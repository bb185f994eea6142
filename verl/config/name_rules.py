"""How values of foreign settings become ours: the rules of the table `other_names`, each a function of a value and of
the other settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

Get = Callable[[str], Any]
#: From a value, what else is given, and further arguments to our keys with their values.
Translate = Callable[..., Mapping[str, Any]]
#: Our key for the value as it is; settings whatever the value; a function; or one with further arguments.
Rule = str | Mapping[str, Any] | Translate | tuple[Any, ...]
#: A key that is set to something, or what else has to hold.
Condition = str | Callable[[Get], Any]
OFF = (None, False)
ASYNC, CORRECTION = "async_training", "algorithm.rollout_correction"
FILTERS, KL_IN_REWARD = "algorithm.filter_groups.enable", "algorithm.use_kl_in_reward"
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
_ALGORITHMS = {"gae": "ppo", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
#: Our algorithm of GRPO's advantages with that loss.
_LOSSES = {"vanilla": "grpo", "gspo": "gspo", "geo_mean": "gmpo", "cispo": "cispo", "sapo": "sapo"}
OVERLONG = ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer")


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


def when(value: Any, get: Get, condition: Condition, rule: Rule, *values: Any) -> Mapping[str, Any]:
    """By the rule where a condition holds, or another key has one of `values`; else it is not read there either."""
    other = get(condition) if isinstance(condition, str) else condition(get)
    return ours(rule, value, get) if (other in values if values else other) else {}


def on(value: Any, get: Get, rule: Rule, *values: Any) -> Mapping[str, Any]:
    """By the rule for one of `values`, or any that is not false; else it says nothing."""
    return when(value, get, lambda get: value, rule, *values)


def but(value: Any, get: Get, key: str, instead: Any, *values: Any) -> Mapping[str, Any]:
    """The value under our key, or `instead` for one of `values`, which mean that there."""
    return {key: instead if value in values else value}


def only(value: Any, get: Get, instead: str, *allowed: Any) -> Mapping[str, Any]:
    """No effect with these values; others are refused."""
    if value not in allowed:
        raise RefusedError(instead)
    return {}


def same_as(value: Any, get: Get, other: str, instead: str, *allowed: Any) -> Mapping[str, Any]:
    """No effect with the value of another key, or with these."""
    return {} if value == get(other) else only(value, get, instead, *allowed)


def source(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    return {key: {"path": value} if isinstance(value, list) else value}


def is_theirs(get: Get) -> bool:
    """Whether these are the settings of a launch script, not of a file of ours with a few foreign names."""
    return get("data.train_files") is not None and get("data.train_batch_size") is not None


def is_streamed(get: Get) -> bool:
    """Whether the trainer takes samples as they come, in no batches of `data.train_batch_size`."""
    return get("rollout.total_rollout_steps") is not None or get(f"{ASYNC}.trigger_parameter_sync_step") is not None


def _fetched(get: Get) -> Any:
    """Prompts that the schedule of the optimizer counts as one step: of streamed samples, those fetched at a time."""
    if is_streamed(get):
        return (get(f"{ACTOR}.ppo_mini_batch_size") or 256) * (get(f"{ASYNC}.require_batches") or 1)
    generated = None if get(FILTERS) else get("data.gen_batch_size")
    return get("data.train_batch_size") if generated is None else generated


def prompts_of(get: Get) -> Any:
    """Prompts of a step here: of streamed samples, those between two synchronisations of the weights."""
    return _fetched(get) * (get(f"{ASYNC}.trigger_parameter_sync_step") or 4) if is_streamed(get) else _fetched(get)


def by_engine(get: Get) -> bool:
    """Whether the ratio of the loss is to the log-probs of the engine."""
    streamed = is_streamed(get) and not get(f"{ASYNC}.compute_prox_log_prob")
    return bool(streamed or get(f"{CORRECTION}.bypass_mode"))


OLD_PROBS = (
    "old log-probs are the engine's here, or those of the weights that a step begins with: write "
    f"{ASYNC}.compute_prox_log_prob=True"
)


def samples(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    """Prompts there, samples here."""
    prompts = prompts_of(get) if is_theirs(get) else None
    if isinstance(value, int) and isinstance(prompts, int) and value > prompts:
        raise RefusedError(f"a mini-batch is a part of the batch of {prompts} prompts: lower it")
    return {key: value * (get(f"{ROLLOUT}.n") or 1) if isinstance(value, int) else value}


def of_all_gpus(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    gpus = get("trainer.n_gpus_per_node")
    if gpus is None or not isinstance(value, int):
        raise RefusedError("is of all GPUs: write ppo_micro_batch_size_per_gpu")
    return {key: max(1, value // (gpus * (get("trainer.nnodes") or 1)))}


def rank(value: Any, get: Get) -> Mapping[str, Any]:
    usual = {} if get(f"{MODEL}.lora_alpha") is not None else {f"{MODEL}.lora.alpha": 16}
    return {f"{MODEL}.lora.r": value, **usual} if value else {}


def _overlong(get: Get, key: str, usual: Any = None) -> Any:
    return next((value for section in OVERLONG if (value := get(f"{section}.{key}")) is not None), usual)


def _punishes(get: Get) -> bool:
    return get("reward_model.reward_manager") == "dapo" and bool(_overlong(get, "enable"))


def _name(estimator: str, get: Get) -> str:
    """Our algorithm of an estimator of advantages and a loss.

    Raises:
        RefusedError: no algorithm here has that loss.
    """
    name, mode = _ALGORITHMS.get(estimator, estimator), str(get(LOSS_MODE) or "vanilla")
    is_dapo = _punishes(get) or bool(get(FILTERS))
    if (name == "gpg" or mode == "vanilla") and not is_dapo:
        return name
    if name != "grpo" or mode not in _LOSSES:
        what = f"{mode} with overlong_buffer or filter_groups" if is_dapo else f"loss_mode={mode}"
        raise RefusedError(
            f"there is no {what} for {estimator}: write one of {', '.join(_LOSSES)} beside grpo, or an algorithm of "
            "your own (algorithm.name=FILE.py:CLASS, docs/algorithms.md)"
        )
    return "dapo" if is_dapo and mode == "vanilla" else _LOSSES[mode]


def algorithm(value: Any, get: Get) -> Mapping[str, Any]:
    options: dict[str, Any] = {}
    try:
        name = _name(value, get) if isinstance(value, str) else value
    except RefusedError:
        if (get(LOSS_MODE) or "vanilla") != "vanilla":  # which is refused
            return {}
        raise
    if not (get(f"{ACTOR}.use_kl_loss") or get(KL_IN_REWARD) or get("algorithm.kl_in")):
        options["kl_in"] = "none"
    if by_engine(get):
        options["rollout_is"] = "ratio"
    elif is_theirs(get) and get(f"{CORRECTION}.rollout_is") is None:
        options["rollout_is"] = None
    if name in ("dapo", "gspo", "gmpo", "cispo"):  # whose bounds are not 0.2
        both = get(f"{ACTOR}.clip_ratio") or 0.2
        options |= {side: both for side in SIDES if get(f"{ACTOR}.{side}") is None}
    if name == "dapo" or get(FILTERS):
        options["filter_groups"] = bool(get(FILTERS))
    if _punishes(get):
        length, most = get("reward_model.reward_kwargs.max_resp_len"), get("data.max_response_length")
        if length not in (None, most):
            raise RefusedError(
                f"reward_kwargs.max_resp_len={length} is not data.max_response_length={most}: write it there"
            )
        options |= {"overlong_length": most, "overlong_buffer": _overlong(get, "len")}
        options["overlong_penalty"] = _overlong(get, "penalty_factor", 1.0)
    return {"algorithm.name": name, **{f"algorithm.{key}": option for key, option in options.items()}}


def loss_mode(value: Any, get: Get) -> Mapping[str, Any]:
    _name(str(get("algorithm.adv_estimator")), get)
    return {}


SIDES = ("clip_ratio_low", "clip_ratio_high")
#: Algorithms whose loss has no such option there either.
_UNREAD = {
    "clip_ratio_c": ("gspo", "gmpo", "cispo", "gpg", "sapo"),
    "loss_agg_mode": ("gspo", "gmpo", "sapo"),
    **dict.fromkeys(("clip_ratio", *SIDES), ("gpg", "sapo")),
}


def of_loss(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    """An option of the policy's loss."""
    estimator, unread = get("algorithm.adv_estimator"), _UNREAD.get(key, ())
    try:
        if unread and isinstance(estimator, str) and _name(estimator, get) in unread:
            return {}
    except RefusedError:  # the estimator says so
        return {}
    if key == "clip_ratio" and all(get(f"{ACTOR}.{side}") is not None for side in SIDES):
        return {}
    return {f"algorithm.{key}": value}


def option(value: Any, get: Get, key: str, usual: Any) -> Mapping[str, Any]:
    """An option that all algorithms have there, and some here: with its usual value it says nothing."""
    return {} if value == usual and get("algorithm.adv_estimator") is not None else {f"algorithm.{key}": value}


def kl_in_reward(value: Any, get: Get) -> Mapping[str, Any]:
    if value and get(f"{ACTOR}.use_kl_loss"):
        raise RefusedError("the KL counts once here: leave it or actor.use_kl_loss out")
    return {"algorithm.kl_in": "reward"} if value else {}


def corrects(get: Get) -> bool:
    """Whether the correction that `rollout_is` turns on is read."""
    return get(f"{CORRECTION}.rollout_is") is not None and not by_engine(get)


def rejection(value: Any, get: Get) -> Mapping[str, Any]:
    """The bounds of rejection sampling: the upper one, or "0.999_1.001"."""
    if not isinstance(value, str):
        return {"algorithm.rollout_rs_threshold": value}
    lower, _, upper = value.partition("_")
    try:
        return {"algorithm.rollout_rs_lower": float(lower), "algorithm.rollout_rs_threshold": float(upper)}
    except ValueError:
        raise RefusedError("write one number, or LOWER_UPPER") from None


def filter_metric(value: Any, get: Get) -> Mapping[str, Any]:
    if value == "seq_final_reward" and get(KL_IN_REWARD):
        raise RefusedError("groups are compared before the KL is taken off here: write seq_reward")
    if value in ("seq_reward", "seq_final_reward") and _punishes(get) and get(FILTERS):
        return {"algorithm.filter_metric": "outcome"}
    return only(value, get, "write acc: the reward", "acc", "score", "seq_reward", "seq_final_reward")


def reward_model(value: Any, get: Get) -> Mapping[str, Any]:
    if get("reward_model.enable") and get("custom_reward_function.path"):
        raise RefusedError("a function that asks a model by its server is a reward of its own: leave reward_model out")
    return {"reward.model": value} if get("reward_model.enable") else {}


def gpus(value: Any, get: Get) -> Mapping[str, Any]:
    """Under torchrun the ranks are there; else a run on several GPUs takes a Ray cluster."""
    if not isinstance(value, int):
        raise RefusedError("write a whole number")
    count = value * (get("trainer.nnodes") or 1)
    if (rollout := get("rollout.n_gpus_per_node")) is not None:
        first = rollout * (get("rollout.nnodes") or 1)
        return {"trainer.placement": {"rollout": f"cuda:0-{first - 1}", "actor": f"cuda:{first}-{first + count - 1}"}}
    return {} if count == 1 or "WORLD_SIZE" in os.environ else {"trainer.placement": f"cuda:0-{count - 1}"}


def strategy(value: Any, get: Get, role: str) -> Mapping[str, Any]:
    """`megatron` cuts by tensor and pipeline alone here; what cuts the sequence or the experts is FSDP."""
    cuts = [get(f"{role}.megatron.{name}") or 1 for name in ("context_parallel_size", "expert_model_parallel_size")]
    return {f"{role}.strategy": "fsdp" if value == "fsdp2" or (value == "megatron" and max(cuts) > 1) else value}


_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
)  # fmt: skip


def usual_strategy(role: str, get: Get) -> str | None:
    """The strategy that a script leaves out."""
    if any(get(f"{role}.megatron.{name}") is not None for name in _SIZES):
        return "megatron"
    fsdp = [get(f"{role}.fsdp_config.{name}") for name in ("param_offload", "optimizer_offload", "forward_prefetch")]
    several = (get("trainer.n_gpus_per_node") or 1) != 1 or (get("trainer.nnodes") or 1) != 1
    return "fsdp" if several or any(fsdp) or (get(f"{role}.fsdp_config.fsdp_size") or -1) != -1 else None


def evaluates(get: Get) -> Any:
    return get("data.val_files") or get("data.eval")


SAMPLED = (when, f"{ROLLOUT}.val_kwargs.temperature", {"trainer.eval_temperature": 1.0}, None)
_TRACKERS = ("swanlab", "clearml", "vemlp_wandb", "file", "rl_logging_board")


def loggers(value: Any, get: Get) -> Mapping[str, Any]:
    """Trackers that are not here write nothing."""
    names = value if isinstance(value, list) else [value]
    if missing := [str(name) for name in names if name in _TRACKERS]:
        logger.warning("trainer.logger: %s: not here; metrics.jsonl has what they would get", ", ".join(missing))
    return {"trainer.loggers": [name for name in names if name not in missing]}


def engine(value: Any, get: Get) -> Mapping[str, Any]:
    """Engines draw from one distribution: which one draws is a matter of speed."""
    if value in ("sglang", "trtllm"):
        logger.warning("%s.name: %s is not here: auto, which is vLLM on a GPU, draws the samples", ROLLOUT, value)
        return {f"{ROLLOUT}.name": "auto"}
    return {f"{ROLLOUT}.name": value}


ADAPTED = "write the layers that get adapters: model.lora={targets: [q_proj, v_proj]}"
GO_ON = "write trainer.output_dir: the run there goes on"


def model_length(value: Any, get: Get) -> Mapping[str, Any]:
    longest = (get("data.max_prompt_length") or 0) + (get("data.max_response_length") or 0)
    if isinstance(value, int) and value < longest:
        raise RefusedError(f"cuts responses before {longest} tokens: write a smaller data.max_response_length")
    return {}


def steps(value: Any, get: Get, key: str) -> Mapping[str, Any]:
    """A schedule there counts steps, and here updates, which are the optimizer's steps; -1 is not given."""
    prompts, mini = _fetched(get), get(f"{ACTOR}.ppo_mini_batch_size")
    parts = max(1, prompts // mini) if isinstance(prompts, int) and isinstance(mini, int) and mini else 1
    return {} if value == -1 else {key: value * parts * (get(f"{ACTOR}.ppo_epochs") or 1)}


def warmup_share(value: Any, get: Get, optim: str) -> Mapping[str, Any]:
    total = get("trainer.total_training_steps")
    if not value or (get(f"{optim}.lr_warmup_steps") or -1) > 0:
        return {}
    if not isinstance(total, int) or not isinstance(value, float):
        return {f"{optim}.warmup_ratio": value}
    return steps(int(value * total), get, f"{optim}.warmup_steps")

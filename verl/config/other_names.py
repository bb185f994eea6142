"""Names that others have for our settings: those of volcengine/verl, and some of DeepSpeed and the articles.

Each is taken where its meaning carries over, name and value alike; one that has no effect here is noted once, with the
reason; one whose meaning differs is refused with what to write instead. What is not given has our default, but for
`rollout.n`, which is 1 beside `data.train_batch_size`, as there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from verl.errors import ConfigError

logger = logging.getLogger(__name__)

Get = Callable[[str], Any]
#: From a value, and what else is given, to our keys with their values.
Translate = Callable[[Any, Get], Mapping[str, Any]]
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_ALGORITHMS = {"gae": "ppo"}
_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


class _RefusedError(Exception):
    """The setting is refused; the text says what to write instead."""


def _to(*keys: str) -> Translate:
    """The value as it is, under our keys."""
    return lambda value, get: dict.fromkeys(keys, value)


def _without(key: str, *nothing: Any) -> Translate:
    """The value as it is; `nothing` are values that mean null."""
    return lambda value, get: {key: None if value in nothing else value}


def _no_effect(value: Any, get: Get) -> Mapping[str, Any]:
    return {}


def _only(*allowed: Any, instead: str) -> Translate:
    """No effect with these values; others are refused."""

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        if value not in allowed:
            raise _RefusedError(instead)
        return {}

    return translate


def _refused(instead: str) -> Translate:
    return _only(instead=instead)


def _source(key: str) -> Translate:
    return lambda value, get: {key: {"path": value} if isinstance(value, list) else value}


def _batch_size(value: Any, get: Get) -> Mapping[str, Any]:
    return {"data.batch_size": value, **({} if get(f"{_ROLLOUT}.n") is not None else {f"{_ROLLOUT}.n": 1})}


def _samples(key: str) -> Translate:
    """Prompts there, samples here."""
    return lambda value, get: {key: value * (get(f"{_ROLLOUT}.n") or 1) if isinstance(value, int) else value}


def _lora(key: str) -> Translate:
    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        return {} if not get(f"{_MODEL}.lora_rank") else {f"{_MODEL}.lora.{key}": value}

    return translate


def _algorithm(value: Any, get: Get) -> Mapping[str, Any]:
    has_kl = get(f"{_ACTOR}.use_kl_loss") or get("algorithm.use_kl_in_reward") or get("algorithm.kl_in")
    return {"algorithm.name": _ALGORITHMS.get(str(value), value), **({} if has_kl else {"algorithm.kl_in": "none"})}


def _option(key: str, usual: Any) -> Translate:
    """An option that all algorithms have there, and some here: with its usual value it says nothing."""

    def translate(value: Any, get: Get) -> Mapping[str, Any]:
        return {} if value == usual and get("algorithm.adv_estimator") is not None else {f"algorithm.{key}": value}

    return translate


def _kl_in(where: str) -> Translate:
    return lambda value, get: {"algorithm.kl_in": where} if value else {}


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


def _reward(value: Any, get: Get) -> Mapping[str, Any]:
    return {"reward.path": f"{value}:{get('custom_reward_function.name') or 'compute_score'}"} if value else {}


def _reward_model(value: Any, get: Get) -> Mapping[str, Any]:
    return {"reward.model": value} if get("reward_model.enable") else {}


def _gpus(value: Any, get: Get) -> Mapping[str, Any]:
    """Under torchrun the ranks are there; else a run on several GPUs takes a Ray cluster."""
    if not isinstance(value, int):
        raise _RefusedError("write a whole number")
    count = value * (get("trainer.nnodes") or 1)
    return {} if count == 1 or "WORLD_SIZE" in os.environ else {"trainer.placement": f"cuda:0-{count - 1}"}


def _greedy(value: Any, get: Get) -> Mapping[str, Any]:
    if value and get(f"{_ROLLOUT}.val_kwargs.temperature") is None:
        return {"trainer.eval_temperature": 1.0}
    return {}


def _eval_temperature(value: Any, get: Get) -> Mapping[str, Any]:
    return {"trainer.eval_temperature": value if get(f"{_ROLLOUT}.val_kwargs.do_sample") else 0.0}


def _evaluated(translate: Translate) -> Translate:
    """A setting of evaluations: it has no effect where nothing is evaluated."""
    return lambda value, get: translate(value, get) if get("data.val_files") or get("data.eval") else {}


def _has_projects(get: Get) -> bool:
    loggers = get("trainer.logger") or get("trainer.loggers") or ()
    return any(name in loggers for name in ("wandb", "trackio", "mlflow"))


def _update(section: str, optim: str) -> dict[str, Translate]:
    """The names of a section of training, for the actor or the critic."""
    return {
        f"{section}.ppo_mini_batch_size": _samples(f"{section}.mini_batch_size"),
        f"{section}.ppo_micro_batch_size_per_gpu": _to(f"{section}.micro_batch_size"),
        f"{section}.train_micro_batch_size_per_gpu": _to(f"{section}.micro_batch_size"),
        f"{section}.ppo_micro_batch_size": _only(None, instead="is of all GPUs: write ppo_micro_batch_size_per_gpu"),
        f"{section}.ppo_max_token_len_per_gpu": _to(f"{section}.max_tokens_per_micro_batch"),
        f"{section}.use_dynamic_bsz": _no_effect,
        f"{section}.ppo_epochs": _to(f"{section}.epochs"),
        f"{section}.grad_clip": _to(f"{optim}.max_grad_norm"),
        f"{section}.shuffle": _no_effect,
        f"{optim}.lr_warmup_steps": lambda value, get: {} if value == -1 else {f"{optim}.warmup_steps": value},
        f"{optim}.lr_warmup_steps_ratio": _only(0, 0.0, instead=f"write {optim}.warmup_steps, in steps"),
        f"{optim}.warmup_style": _to(f"{optim}.schedule"),
        f"{optim}.lr_scheduler_type": _to(f"{optim}.schedule"),
        f"{optim}.total_training_steps": _without(f"{optim}.total_steps", -1),
    }


#: Settings of the actor that are the algorithm's here.
_OF_ALGORITHMS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "entropy_coeff", "loss_agg_mode")
NAMES: dict[str, Translate] = {
    "data.rollout_batch_size": _to("data.batch_size"),
    "data.train_files": _source("data.train"),
    "data.val_files": _source("data.eval"),
    "data.train_batch_size": _batch_size,
    "data.max_response_length": _to(f"{_ROLLOUT}.max_new_tokens"),
    "data.filter_overlong_prompts": lambda value, get: {"data.truncation": "drop"} if value else {},
    "data.truncation": lambda value, get: {} if get("data.filter_overlong_prompts") else {"data.truncation": value},
    "data.prompt_key": _to("data.prompt_column"),
    "data.reward_fn_key": _only("data_source", instead="a reward reads any column by its name"),
    f"{_MODEL}.lora_rank": lambda value, get: {f"{_MODEL}.lora.r": value} if value else {},
    f"{_MODEL}.lora_alpha": _lora("alpha"),
    f"{_MODEL}.target_modules": _lora("targets"),
    **_update(_ACTOR, f"{_ACTOR}.optim"),
    f"{_ACTOR}.strategy": lambda value, get: {f"{_ACTOR}.strategy": "fsdp" if value == "fsdp2" else value},
    **{f"{_ACTOR}.{name}": _to(f"algorithm.{name}") for name in _OF_ALGORITHMS},
    f"{_ACTOR}.use_kl_loss": _kl_in("loss"),
    f"{_ACTOR}.kl_loss_coef": _kl(f"{_ACTOR}.use_kl_loss", "kl_coef"),
    f"{_ACTOR}.kl_loss_type": _kl(f"{_ACTOR}.use_kl_loss", "kl_estimator", _KL),
    f"{_ACTOR}.fsdp_config.grad_offload": lambda value, get: (
        {f"{_ACTOR}.fsdp_config.optimizer_offload": True} if value else {}
    ),
    f"{_ROLLOUT}.rollout_per_device_batch_size": _to(f"{_ROLLOUT}.max_num_seqs"),
    f"{_ROLLOUT}.top_k": lambda value, get: {f"{_ROLLOUT}.top_k": 0 if value == -1 else value},
    f"{_ROLLOUT}.do_sample": _only(True, instead="training samples: write temperature"),
    f"{_ROLLOUT}.val_kwargs.n": _evaluated(_to("trainer.eval_n")),
    f"{_ROLLOUT}.val_kwargs.do_sample": _evaluated(_greedy),
    f"{_ROLLOUT}.val_kwargs.temperature": _evaluated(_eval_temperature),
    **_update("critic", "critic.optim"),
    "critic.cliprange_value": _option("cliprange_value", 0.5),
    "algorithm.adv_estimator": _algorithm,
    "algorithm.gamma": _option("gamma", 1.0),
    "algorithm.lam": _option("lam", 1.0),
    "algorithm.norm_adv_by_std_in_grpo": _option("norm_adv_by_std", True),
    "algorithm.use_kl_in_reward": _kl_in("reward"),
    "algorithm.kl_penalty": _kl("algorithm.use_kl_in_reward", "kl_estimator", _KL),
    "algorithm.kl_ctrl.type": _adaptive("type"),
    "algorithm.kl_ctrl.kl_coef": _kl("algorithm.use_kl_in_reward", "kl_coef"),
    "algorithm.kl_ctrl.horizon": _adaptive("kl_horizon"),
    "algorithm.kl_ctrl.target_kl": _adaptive("kl_target"),
    "custom_reward_function.path": _reward,
    "reward_model.model.path": _reward_model,
    "reward_model.reward_manager": _only("naive", "batch", "prime", instead="write a reward of your own: reward.path"),
    "trainer.total_training_steps": _to("trainer.total_steps"),
    "trainer.save_freq": _without("trainer.save_every", -1),
    "trainer.test_freq": _without("trainer.eval_every", -1),
    "trainer.logger": _to("trainer.loggers"),
    "trainer.project_name": lambda value, get: {"trainer.project": value} if _has_projects(get) else {},
    "trainer.experiment_name": _to("trainer.run_name"),
    "trainer.default_local_dir": _to("trainer.output_dir"),
    "trainer.max_actor_ckpt_to_keep": _to("trainer.keep_checkpoints"),
    "trainer.n_gpus_per_node": _gpus,
    "trainer.critic_warmup": _only(0, instead="there is no such phase here: leave it out"),
    "trainer.resume_mode": _only("auto", instead="write verl train --fresh: the same command goes on"),
}
#: Those that say how the other library works, not what is learned.
NAMES |= {f"{section}.{name}": _no_effect for section, names in {
    "data": "val_batch_size return_raw_chat",
    _MODEL: "use_shm",
    _ROLLOUT:
        "gpu_memory_utilization log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu max_num_batched_tokens enforce_eager free_cache_engine load_format "
        "layered_summon enable_chunked_prefill",
    "actor_rollout_ref.ref":
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu fsdp_config.param_offload",
    "critic.model.fsdp_config": "param_offload grad_offload optimizer_offload",
    "custom_reward_function": "name",
    "reward_model":
        "enable model.use_remove_padding model.fsdp_config.param_offload micro_batch_size micro_batch_size_per_gpu "
        "use_dynamic_bsz forward_max_token_len_per_gpu",
    "trainer":
        "max_critic_ckpt_to_keep nnodes val_before_train balance_batch device use_legacy_worker_impl",
}.items() for name in names.split()}  # fmt: skip
#: Their names that are ours, too, and mean the same.
_OWN = frozenset((
    "data.max_response_length", "data.truncation", f"{_ROLLOUT}.top_k", f"{_ACTOR}.strategy", "algorithm.gamma",
    "algorithm.lam",
))  # fmt: skip


def translated(content: dict[str, Any], locations: dict[tuple[str, ...], str], origin: str) -> dict[str, Any]:
    """The settings under our names, and `locations` likewise. `content` is changed.

    Raises:
        ConfigError: a key is given under two names, or has a value that means something else here.
    """
    theirs = {name: value for name in NAMES if (value := _get(content, name, _MISSING)) is not _MISSING}
    if not theirs.keys() - _OWN:
        return content
    if "data.train_files" not in theirs:  # ours then, which is about recorded responses
        theirs.pop("data.max_response_length", None)

    def get(name: str) -> Any:
        return theirs.get(name, _get(content, name, None))

    for name in theirs:
        _take(content, name)
    unused = []
    renamed: dict[str, tuple[str, Any]] = {}
    for name, value in theirs.items():
        try:
            ours = NAMES[name](value, get)
        except _RefusedError as refusal:
            raise ConfigError(f"{origin}: {name}{_where(name, locations)}: {value!r} is not taken: {refusal}") from None
        if not ours and NAMES[name] is _no_effect:
            unused.append(name)
        for key, item in ours.items():
            if key in renamed or _get(content, key, _MISSING) is not _MISSING:
                other = name.rpartition(".")[2] if name.rpartition(".")[0] == key.rpartition(".")[0] else name
                raise ConfigError(
                    f"{origin}: {key}: is given twice, as {other} too{_where(name, locations)}: leave one out"
                )
            renamed[key] = (name, item)
    for key, (name, item) in renamed.items():
        _put(content, key, item)
        if where := locations.get(tuple(name.split("."))):
            locations[tuple(key.split("."))] = where
    if unused:
        logger.warning("of no effect here: %s", ", ".join(unused))
    return content


_MISSING = object()


def _get(content: Mapping[str, Any], name: str, default: Any) -> Any:
    section: Any = content
    for part in name.split("."):
        if not isinstance(section, dict) or part not in section:
            return default
        section = section[part]
    return section


def _take(content: dict[str, Any], name: str) -> None:
    """Remove a key, and the sections that it leaves empty."""
    *path, last = name.split(".")
    sections = [content]
    for part in path:
        sections.append(sections[-1][part])
    del sections[-1][last]
    for part, section, inner in zip(reversed(path), reversed(sections[:-1]), reversed(sections[1:]), strict=True):
        if inner:
            break
        del section[part]


def _put(content: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    section = content
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value


def _where(name: str, locations: Mapping[tuple[str, ...], str]) -> str:
    where = locations.get(tuple(name.split(".")))
    return f" ({where})" if where else ""

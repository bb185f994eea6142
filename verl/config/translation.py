"""Settings under names of others become settings under ours: see `other_names` and `unused_names`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from verl.config.document import keys
from verl.config.name_rules import ACTOR, Get, RefusedError, is_streamed, is_theirs, ours, prompts_of, usual_strategy
from verl.config.other_names import NAMES, OWN
from verl.config.sft_names import SFT_KEY, of_sft
from verl.config.unused_names import reason_of, refusal
from verl.errors import ConfigError

logger = logging.getLogger(__name__)

#: What a script of theirs leaves out, where our default would train otherwise.
_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.adam_eps": 1e-8,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.adam_eps": 1e-8,
}


def translated(content: dict[str, Any], locations: dict[tuple[str, ...], str], origin: str) -> dict[str, Any]:
    """The settings under our names, and `locations` likewise. `content` is changed.

    Raises:
        ConfigError: a key is given under two names, or has a value that means something else here.
    """
    refusals: list[str] = []
    if _get(content, SFT_KEY, None) is not None:
        moved, refusals = of_sft({name: _get(content, name, None) for name in _leaves(content)})
        content.clear()
        _put_all(content, moved, locations)
    values = {name: value for name in NAMES if (value := _get(content, name, _MISSING)) is not _MISSING}
    reasons = {name: reason for name in _leaves(content) if (reason := reason_of(name)) and name not in _ours()}
    # A key that both have means ours, unless another of theirs says that the file is theirs.
    if not values.keys() - OWN and not reasons:
        return content
    ignored = {name: _get(content, name, None) for name in reasons}  # which others may go by all the same
    for name in (*values, *reasons):
        _take(content, name)
    if "data.train_files" in values:
        refusals += _take_refused(content, locations)
    if "data.train_files" not in values and (recorded := values.pop("data.max_response_length", None)) is not None:
        _put(content, "data.max_response_length", recorded)  # ours then, which is about recorded responses
    values = {name: value for name, value in values.items() if value is not None}

    # A rule may depend on any other key, under their name or ours, whether or not it has an effect here.
    def get(name: str) -> Any:
        return values[name] if name in values else ignored.get(name, _get(content, name, None))

    values = _with_defaults(values, content, get)
    renamed: dict[str, tuple[str, Any]] = {}
    for name, value in values.items():
        try:
            renames = ours(NAMES[name], value, get) if name in NAMES else {name: value}
        except RefusedError as error:
            refusals.append(f"{name}{_where(name, locations)}: {value!r} is not taken: {error}")
            continue
        for key, item in renames.items():
            # Two of their keys, or one of theirs and ours: neither could be said to win.
            if key in renamed or _get(content, key, _MISSING) is not _MISSING:
                other = name.rpartition(".")[2] if name.rpartition(".")[0] == key.rpartition(".")[0] else name
                raise ConfigError(
                    f"{origin}: {key}: is given twice, as {other} too{_where(name, locations)}: leave one out"
                )
            renamed[key] = (name, item)
    if refusals:
        raise ConfigError(f"{origin}: " + "\n  ".join(refusals))
    _put_all(content, renamed, locations)
    if reasons:
        logger.warning("of no effect here: %s", ", ".join(reasons))
    return content


def _with_defaults(values: dict[str, Any], content: dict[str, Any], get: Get) -> dict[str, Any]:
    """The settings of a launch script with that library's defaults; a critic that is not used is dropped."""
    if not is_theirs(get) or get("algorithm.name") is not None:
        return values
    with_critic = (get("algorithm.adv_estimator") or "gae") == "gae"
    prompts, mini_batch = prompts_of(get), f"{ACTOR}.ppo_mini_batch_size"
    usual = {**_DEFAULTS, mini_batch: min(256, prompts) if isinstance(prompts, int) else 256}
    usual["critic.ppo_mini_batch_size"] = get(mini_batch) or usual[mini_batch]
    usual["critic.ppo_epochs"] = get(f"{ACTOR}.ppo_epochs")
    for role, model in ((ACTOR, "actor_rollout_ref.model"), ("critic", "critic.model")):
        usual[f"{role}.strategy"] = strategy = usual_strategy(role, get)
        keys_of_dtype = ("dtype", "torch_dtype", "fsdp_config.model_dtype")
        is_given = any(get(f"{of}.{key}") is not None for of in (model, role) for key in keys_of_dtype)
        if not is_given and (get(f"{role}.strategy") or strategy) != "megatron":
            usual[f"{model}.dtype"] = "float32"  # Megatron's are in bf16 there, over fp32 ones of its optimizer
    if is_streamed(get):
        usual |= {"async_training.staleness_threshold": 0.1, "async_training.use_rollout_log_probs": True}
    elif get("trainer.total_training_steps") is None and get("trainer.total_steps") is None:
        usual["trainer.total_epochs"] = 30
    rewards = ("custom_reward_function.path", "reward", "tasks", "actor_rollout_ref.rollout.episode")
    if not get("reward_model.enable") and not any(get(name) for name in rewards):
        usual["reward.name"] = "data_source"
    values = values | {name: value for name, value in usual.items() if get(name) is None and value is not None}
    if with_critic:
        return values
    content.pop("critic", None)
    return {name: value for name, value in values.items() if not name.startswith("critic.")}


def _take_refused(content: dict[str, Any], locations: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    """Remove the keys that are refused; yields a line for each whose value is not the one that changes nothing."""
    for name in [name for name in _leaves(content) if name not in _ours()]:
        value = _get(content, name, None)
        if (answer := refusal(name, value)) is not None:
            _take(content, name)
            if answer:
                yield f"{name}{_where(name, locations)}: {value!r} is not taken: {answer}"


@cache
def _ours() -> set[str]:
    return {key.path for key in keys()} | NAMES.keys()


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of all values that are no mappings, or empty ones."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


_MISSING = object()


def _get(content: Any, name: str, default: Any) -> Any:
    first, _, rest = name.partition(".")
    if not isinstance(content, dict) or first not in content:
        return default
    return _get(content[first], rest, default) if rest else content[first]


def _take(content: dict[str, Any], name: str) -> None:
    """Remove a key, and the sections that it leaves empty."""
    first, _, rest = name.partition(".")
    if rest:
        _take(content[first], rest)
    if not (rest and content[first]):
        del content[first]


def _put(content: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    section = content
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value


def _put_all(
    content: dict[str, Any], renamed: Mapping[str, tuple[str, Any]], locations: dict[tuple[str, ...], str]
) -> None:
    """Values by key, each with the key that it had, whose place in a file it keeps."""
    for key, (name, value) in renamed.items():
        _put(content, key, value)
        if where := locations.get(tuple(name.split("."))):
            locations[tuple(key.split("."))] = where


def _where(name: str, locations: Mapping[tuple[str, ...], str]) -> str:
    where = locations.get(tuple(name.split(".")))
    return f" ({where})" if where else ""

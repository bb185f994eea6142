"""Settings under names of others become settings under ours: see `other_names` and `unused_names`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import reduce
from typing import Any

from verl.config.document import flat, keys
from verl.config.name_rules import ACTOR, RefusedError, is_streamed, is_theirs, ours, prompts_of, usual_strategy
from verl.config.other_names import NAMES, OWN
from verl.config.sft_names import SFT_KEY, of_sft
from verl.config.unused_names import is_unused, refusal
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
    """The settings under our names, and `locations` likewise.

    Raises:
        ConfigError: a key is given under two names, or has a value that means something else here.
    """

    def where(name: str) -> str:
        line = locations.get(tuple(name.split(".")))
        return f" ({line})" if line else ""

    def put(added: Mapping[str, tuple[str, Any]]) -> None:
        """Values by key, each with the key that it had, whose place in a file it keeps."""
        for key, (name, value) in added.items():
            settings[key] = value
            if line := locations.get(tuple(name.split("."))):
                locations[tuple(key.split("."))] = line

    whole = NAMES.keys() | {key.path for key in keys() if "a mapping" in key.type}  # whose keys are the user's own
    settings, refusals = dict(flat(content, whole)), list[tuple[str, Any, object]]()
    if settings.get(SFT_KEY) is not None:
        moved, refusals = of_sft(settings)
        settings.clear()
        put(moved)
    both = NAMES.keys() | {key.path for key in keys()}
    values = {name: settings[name] for name in NAMES if name in settings}
    unused = [name for name in settings if name not in both and is_unused(name)]
    # A key that both have means ours, unless another of theirs says that the file is theirs.
    if not values.keys() - OWN and not unused:
        return content
    known = {name: settings.pop(name) for name in (*values, *unused)}
    if "data.train_files" in values:
        for name in [name for name in settings if name not in both]:
            if (answer := refusal(name, settings[name])) is not None:
                value = settings.pop(name)
                refusals += [(name, value, answer)] if answer else []
    elif (recorded := values.pop("data.max_response_length", None)) is not None:
        settings["data.max_response_length"] = recorded  # ours then, which is about recorded responses
    values = {name: value for name, value in values.items() if value is not None}
    # A rule may depend on any other key, under their name or ours, whether or not it has an effect here.
    known |= settings
    get = known.get
    if is_theirs(get) and get("algorithm.name") is None:
        values |= _defaults(known)
        if (get("algorithm.adv_estimator") or "gae") != "gae":  # a critic that is not used is dropped
            for part in (values, settings):
                for name in [name for name in part if f"{name}.".startswith("critic.")]:
                    del part[name]
    known |= values
    renamed: dict[str, tuple[str, Any]] = {}
    for name, value in values.items():
        try:
            renames = ours(NAMES[name], value, get) if name in NAMES else {name: value}
        except RefusedError as error:
            refusals.append((name, value, error))
            continue
        for key, item in renames.items():
            # Two of their keys, or one of theirs and ours: neither could be said to win.
            if key in renamed or key in settings:
                other = name.rpartition(".")[2] if name.rpartition(".")[0] == key.rpartition(".")[0] else name
                raise ConfigError(f"{origin}: {key}: is given twice, as {other} too{where(name)}: leave one out")
            renamed[key] = (name, item)
    if refusals:
        lines = [f"{name}{where(name)}: {value!r} is not taken: {why}" for name, value, why in refusals]
        raise ConfigError(f"{origin}: " + "\n  ".join(lines))
    put(renamed)
    if unused:
        logger.warning("of no effect here: %s", ", ".join(unused))
    return _nested(settings)


def _defaults(known: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of that library for keys that a launch script omits."""
    get = known.get
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
    rewards = ("reward_model.enable", "custom_reward_function.path", "tasks", "actor_rollout_ref.rollout.episode")
    if not any(map(get, rewards)) and not any(name.startswith("reward.") for name in known):
        usual["reward.name"] = "data_source"
    return {name: value for name, value in usual.items() if get(name) is None and value is not None}


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.split(".")
        reduce(lambda section, part: section.setdefault(part, {}), path, content)[last] = value
    return content

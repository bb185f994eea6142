"""Names of volcengine/verl's `fsdp_sft_trainer`, whose sections differ from its other scripts'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_MODEL, _ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
#: The key by which its settings are recognised: no other script has it.
SFT_KEY = "model.partial_pretrain"
#: Prefixes of its keys, and what replaces them; the first that matches counts.
_MOVED = {
    SFT_KEY: f"{_MODEL}.path",
    "model.strategy": f"{_ACTOR}.strategy",
    "model.fsdp_config.": f"{_ACTOR}.fsdp_config.",
    "model.": f"{_MODEL}.",
    "optim.lr_scheduler": f"{_ACTOR}.optim.lr_scheduler_type",
    "optim.": f"{_ACTOR}.optim.",
    "ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    "use_remove_padding": f"{_MODEL}.use_remove_padding",
    "data.train_batch_size": "data.batch_size",
    "data.micro_batch_size_per_gpu": f"{_ACTOR}.micro_batch_size",
    "trainer.checkpoint.": f"{_ACTOR}.checkpoint.",
}
#: Prefixes of keys that `_rows` or `of_sft` reads, or that have no effect there either.
_NOT_MOVED = (
    "data.micro_batch_size", "data.balance_dp_token", "data.prompt_", "data.response_", "data.multiturn.",
    "data.max_length", "data.truncation",
)  # fmt: skip
#: Its defaults.
_DEFAULTS: dict[str, Any] = {
    "data.batch_size": 256,
    f"{_ACTOR}.optim.lr": 1e-5,
    f"{_ACTOR}.optim.betas": [0.9, 0.95],
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.optim.adam_eps": 1e-8,
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": 0.1,
    f"{_ACTOR}.optim.lr_scheduler_type": "cosine",
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.eval_before": False,
    "trainer.seed": 1,
}


def of_sft(values: Mapping[str, Any]) -> tuple[dict[str, tuple[str, Any]], list[tuple[str, Any, object]]]:
    """Translate settings of that trainer, by their keys.

    Returns:
        The settings and the trainer's defaults, by the names that other scripts use: each as (key of that trainer,
        value). And the settings that are refused, because they mean something else there: key, value and what to write.
    """
    moved: dict[str, tuple[str, Any]] = {}
    for name, value in values.items():
        prefix = next((part for part in _MOVED if name.startswith(part)), name)
        if value is not None and (prefix in _MOVED or not name.startswith(_NOT_MOVED)):
            moved[_MOVED.get(prefix, name) + name.removeprefix(prefix)] = (name, value)
    defaults = {**_DEFAULTS, "algorithm.name": "sft", **_rows(values.get)}
    if (values.get("ulysses_sequence_parallel_size") or 1) > 1:
        defaults[f"{_ACTOR}.strategy"] = "fsdp"
    for name, value in defaults.items():
        moved.setdefault(name, ("algorithm.name", value))  # a key that its files lack: defaults have no line there
    refused: list[tuple[str, Any, object]] = []
    if (cut := values.get("data.truncation")) not in (None, "error"):
        why = "it is of prompt and response together: write data.max_prompt_length and data.max_response_length"
        refused.append(("data.truncation", cut, f"{why}, or leave it out"))
    if (steps := values.get("trainer.total_training_steps")) is not None:
        why = "the schedule is of total_epochs there, whatever it says: write trainer.total_epochs"
        refused.append(("trainer.total_training_steps", steps, why))
    return moved, refused


def _rows(get: Callable[[str], Any]) -> dict[str, Any]:
    """How its files are read: a row is a chat, or a question and an answer, which become a chat."""
    if get("data.multiturn.enable"):
        names = {name: get(f"data.multiturn.{name}_key") for name in ("messages", "tools")}
        return {"data.columns": {name: theirs for name, theirs in names.items() if theirs not in (None, name)}}
    columns = {}
    for ours, theirs, default in (("prompt", "prompt", "question"), ("completion", "response", "answer")):
        name, keys_within = get(f"data.{theirs}_key") or default, get(f"data.{theirs}_dict_keys") or []
        columns[ours] = ".".join([name, *keys_within])
    return {"data.columns": columns, "data.chat": True}

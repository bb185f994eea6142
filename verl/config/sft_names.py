"""Names of volcengine/verl's `fsdp_sft_trainer`, which has sections of its own, for those of its other scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_MODEL, _ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
#: The key that only this trainer has.
MODEL = "model.partial_pretrain"
#: Beginnings of its keys, the first that fits; None: read beside others, or of no effect there either.
_MOVED: dict[str, str | None] = {
    MODEL: f"{_MODEL}.path",
    "model.strategy": f"{_ACTOR}.strategy",
    "model.fsdp_config.": f"{_ACTOR}.fsdp_config.",
    "model.": f"{_MODEL}.",
    "optim.lr_scheduler": f"{_ACTOR}.optim.lr_scheduler_type",
    "optim.": f"{_ACTOR}.optim.",
    "ulysses_sequence_parallel_size": f"{_ACTOR}.ulysses_sequence_parallel_size",
    "use_remove_padding": f"{_MODEL}.use_remove_padding",
    "data.train_batch_size": "data.batch_size",
    "data.micro_batch_size_per_gpu": f"{_ACTOR}.micro_batch_size",
    "data.micro_batch_size": None,
    "data.balance_dp_token": None,
    "data.prompt_": None,
    "data.response_": None,
    "data.multiturn.": None,
    "data.max_length": None,
    "data.truncation": None,
    "trainer.checkpoint.": f"{_ACTOR}.checkpoint.",
}
#: What a script leaves out.
_USUAL: dict[str, Any] = {
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


def of_sft(values: Mapping[str, Any]) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """Settings of that trainer, by their keys.

    Returns:
        (key, value) under the names of other scripts by their keys there, what is left out included; and what is
        refused, in words.
    """
    moved: dict[str, tuple[str, Any]] = {}
    for name, value in values.items():
        beginning = next((part for part in _MOVED if name.startswith(part)), name)
        target = _MOVED.get(beginning, name)
        if target is not None and value is not None:
            moved[target + name.removeprefix(beginning)] = (name, value)
    usual = {**_USUAL, "algorithm.name": "sft", **_rows(values.get)}
    if (values.get("ulysses_sequence_parallel_size") or 1) > 1:
        usual[f"{_ACTOR}.strategy"] = "fsdp"
    for name, value in usual.items():
        moved.setdefault(name, ("algorithm.name", value))
    return moved, [*_refused(values.get)]


def _rows(get: Callable[[str], Any]) -> dict[str, Any]:
    """How its files are read: a chat a row, or a question and an answer, which become one."""
    if get("data.multiturn.enable"):
        names = {name: get(f"data.multiturn.{name}_key") for name in ("messages", "tools")}
        return {"data.columns": {name: theirs for name, theirs in names.items() if theirs not in (None, name)}}
    columns = {}
    for ours, theirs, usual in (("prompt", "prompt", "question"), ("completion", "response", "answer")):
        name, inner = get(f"data.{theirs}_key") or usual, get(f"data.{theirs}_dict_keys") or []
        columns[ours] = ".".join([name, *inner])
    return {"data.columns": columns, "data.chat": True}


def _refused(get: Callable[[str], Any]) -> list[str]:
    refused = []
    if (cut := get("data.truncation")) not in (None, "error"):
        refused.append(
            f"data.truncation: {cut!r} is not taken: it is of prompt and response together: write "
            "data.max_prompt_length and data.max_response_length, or leave it out"
        )
    if (steps := get("trainer.total_training_steps")) is not None:
        refused.append(
            f"trainer.total_training_steps: {steps!r} is not taken: the schedule is of total_epochs there, whatever it "
            "says: write trainer.total_epochs"
        )
    return refused

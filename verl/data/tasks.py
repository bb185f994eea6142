"""Problems of `reasoning-gym` as rows, each with all that its verifier needs.

Some tasks' problems depend on Python's hash seed; to see the same ones again, fix PYTHONHASHSEED for those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import ConfigDict

from verl._base.checked import checked
from verl._base.names import check_known
from verl._base.record import Count, Record, Seed, result
from verl.errors import ConfigError, DataError, nearest

#: The column that carries a problem to its verifier.
TASK_COLUMN = "reasoning_gym"
_DRAWS_PER_ROW = 50


class TaskSource(Record):
    """Problems of a procedural task: a source of the section `data` of a file, with the task's own options as further
    fields."""

    model_config = ConfigDict(extra="allow")
    task: str = result(description="its name")
    size: Count = result(500, "problems")
    seed: Seed = result(0, "which problems")
    split: Literal["train", "eval"] | None = result(None, "only the held-out ones, or the others")
    holdout: float = result(0.2, "share that is held out", gt=0, lt=1)


def task_rows(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of `{"task": NAME, "size": N, "seed": S, "split": "train" | "eval", "holdout": 0.2, **task options}`.

    Problem `i` is the task's own number `i` under this seed. (The tasks draw problem `i` of seed `s` from `s + i`:
    neighbouring seeds share nearly all problems.) With a split, a problem belongs to "eval" if the hash of its
    question falls in the held-out share: the two splits are disjoint whatever sizes and seeds, and problems are
    drawn until `size` of the split are there. Held-out problems never repeat.

    Raises:
        ConfigError: reasoning-gym is not installed, or the task, an option or the split is unknown.
        DataError: the task has too few distinct problems for the split.
    """
    source = TaskSource.of(spec, f"task {spec.get('task')}")
    task, size, seed, split, holdout = source.task, source.size, source.seed, source.split, source.holdout
    settings = dict(source.model_extra or {})
    problems = make_task(task, seed=seed, size=size, **settings)
    draws = range(size) if split is None else range(size * _DRAWS_PER_ROW)
    try:
        problems[draws[-1]]
    except IndexError:  # some tasks have no problem beyond their size
        problems = make_task(task, seed=seed, size=len(draws), **settings)
    count, seen = 0, set[str]()
    for index in draws:
        entry = problems[index]
        question = entry["question"].strip()
        is_held_out = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") < holdout * 2**64
        if split is not None and (is_held_out != (split == "eval") or (is_held_out and question in seen)):
            continue
        seen.add(question)
        yield _row(task, settings, entry)
        count += 1
        if count == size:
            return
    raise DataError(
        f"task {task} gave only {count} {'distinct ' if split == 'eval' else ''}problems for split '{split}' in "
        f"{len(draws)} draws, not {size}: ask for fewer, or widen the task's options"
    )


@checked
def make_task(task: str, *, seed: Seed = 0, size: Count = 1, **options: Any) -> Any:
    """The procedural data set `task` of reasoning-gym, imported only now."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"task '{task}' needs reasoning-gym: pip install 'verl-hybrid[task]'") from error
    check_known("there is no task", [task], DATASETS)
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **options)
    except (TypeError, AssertionError, ValueError) as error:
        known = vars(DATASETS[task][1]())
        wrong = next((name for name in options if name not in known), None)
        hint = f"no option '{wrong}': {nearest(wrong, known)}" if wrong else str(error)
        raise ConfigError(f"task {task}: {hint}") from error


def decode_problem(text: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Name, options and entry out of a row's `TASK_COLUMN`."""
    content = json.loads(text, object_hook=lambda m: tuple(m["__tuple__"]) if m.keys() == {"__tuple__"} else m)
    return content["task"], content["options"], content["entry"]


def _row(task: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    content = _tag({"task": task, "options": dict(options), "entry": dict(entry)})
    return {
        "question": entry["question"],
        "data_source": f"reasoning_gym/{task}",
        "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
        TASK_COLUMN: json.dumps(content, default=str),
    }


def _tag(value: Any) -> Any:
    """JSON has no tuples, and some verifiers compare with them."""
    if isinstance(value, dict):
        return {key: _tag(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"__tuple__": [_tag(item) for item in value]}
    return [_tag(item) for item in value] if isinstance(value, list) else value

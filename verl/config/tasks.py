"""The tasks of a run that trains several: the list `tasks` of a YAML file."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator

from verl._base.record import AsTuple, AtOnce, NotNegative, Record, function_path, matching, result, wrong

TaskName = Annotated[str, AfterValidator(partial(matching, pattern=r"\w[\w-]*", rule="letters, digits, _ and -"))]
AlgorithmName = Annotated[str, AfterValidator(lambda value: function_path(value) if ":" in value else value)]


class TaskConfig(Record):
    """One of several tasks: prompts, algorithm and reward."""

    name: TaskName = result(description="what metrics call it, and its rows' column `task`")
    type: AlgorithmName = result(description="the algorithm, by name or FILE.py:CLASS")
    options: dict[str, Any] = result({}, "the algorithm's own options")
    reward_model: str | list[str] | dict[str, Any] | None = result(
        None,
        "a reward by name (rm_hf, code_evaluator, math, ...), FILE.py:FUNCTION, a model, or an address; "
        "several addresses; or a mapping of names to rewards, {source, weight} each, which are summed",
    )
    reward_config: dict[str, Any] = result({}, "options of the reward: model_name, device, timeout, ...")
    constraint_model: str | None = result(
        None, "what checks responses while they are generated: a built-in guard or FILE.py:FUNCTION"
    )
    constraint_config: dict[str, Any] = result({}, "options of that guard")
    share: NotNegative = result(1.0, "of the prompts, relative to other tasks")
    loss_weight: NotNegative | None = result(
        None, "of its loss, where 1 is an equal weight for each task (null: its share)"
    )
    n: AtOnce | None = result(None, "samples a prompt (null: what suits the algorithm)")
    sampling: dict[str, Any] = result({}, "how responses are drawn, where not as the actor does")

    def _check(self) -> None:
        for what in ("reward", "constraint"):
            if getattr(self, f"{what}_config") and getattr(self, f"{what}_model") is None:
                raise wrong(f"{what}_config", f"is for a {what}: it needs {what}_model")


class TasksFile(Record):
    """A file of tasks alone, such as `Trainer(config_path=...)` takes."""

    tasks: Annotated[tuple[TaskConfig, ...], AsTuple] = result(description="the tasks")

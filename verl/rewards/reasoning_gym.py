"""Rewards of procedural tasks, by the tasks' own verifiers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl._base.checked import checked
from verl.data.tasks import decode_problem, make_task
from verl.errors import RewardError
from verl.rewards.functions import FunctionReward
from verl.rewards.signatures import cell

Answer = Literal["last_number", "whole", "tag"]
# A minus belongs to the number unless it stands between two operands.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


class TaskReward(FunctionReward):
    """The task's `score_answer` of the answer in the response, for rows that `load_prompts` made from a task.

    The component `accuracy` is 1 where the verifier gives 1, and 0 elsewhere: no credit for the format or a part.

    Args:
        answer: what is verified: "last_number" of the response, the "whole" response (stripped), or the text in the
            last <answer>...</answer> ("tag"). A response without that has no answer.
        exact: `accuracy` is the reward.
        **options: see `FunctionReward`.

    Raises:
        ConfigError: `answer` is unknown.
    """

    @checked
    def __init__(
        self,
        *,
        answer: Answer = "whole",
        exact: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(_Verifier(answer, exact), **{"name": "task", **options})

    def check_data(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if cell(dict(rows[0]), "reasoning_gym") is None:
            raise RewardError(
                f"reward '{self.name}' verifies the answers of procedural tasks, such as data.train={{task: chain_sum, "
                "size: 1000}}, and these rows are of none: give them a reward of their own"
            )


@dataclass(eq=False)
class _Verifier:
    """The reward function of `TaskReward`."""

    judges = "last_turn"
    answer: Answer
    exact: bool
    verifiers: dict[str, Any] = field(default_factory=dict)

    def __call__(self, solution_str: str, reasoning_gym: str) -> dict[str, float]:
        task, options, entry = decode_problem(reasoning_gym)
        key = f"{task} {json.dumps(options, sort_keys=True, default=str)}"
        if key not in self.verifiers:
            self.verifiers[key] = make_task(task, **options)
        score = float(self.verifiers[key].score_answer(extract_answer(solution_str, self.answer), entry))
        accuracy = float(score == 1.0)
        return {"score": accuracy if self.exact else score, "accuracy": accuracy}


def extract_answer(response: str, how: Answer) -> str | None:
    """The answer in a response, or None. A number loses its thousands commas."""
    if how == "whole":
        return response.strip()
    if how == "tag":
        tags = _TAG.findall(response)
        return tags[-1].strip() if tags else None
    numbers = _NUMBER.findall(response.replace("−", "-"))
    return numbers[-1].replace(",", "") if numbers else None

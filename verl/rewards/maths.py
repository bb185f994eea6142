"""Answers to mathematical problems, read on both sides by one reader and compared as mathematics."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from verl._base.checked import checked
from verl.batch import Batch
from verl.errors import ConfigError, RewardError
from verl.rewards.answers import answer_in, plain
from verl.rewards.equality import UnsureError, is_same
from verl.rewards.functions import FunctionReward
from verl.rewards.source import run_reward
from verl.rewards.values import read

Alternatives = Literal["any", "all"]


logger = logging.getLogger(__name__)
#: Words of which an answer with one is not an answer with the other, whatever is equal beside them: "increasing on
#: (0, 1)", "decreasing on (0, 1)".
_OPPOSITES = [{*pair.split()} for pair in re.split(r"\s{2,}|\n", """
increasing decreasing  increases decreases  positive negative  even odd  maximum minimum  largest smallest
greatest least  up down  left right  above below  profit loss  gain loss  converges diverges
convergent divergent  rational irrational  clockwise counterclockwise  north south  east west  true false
acute obtuse  concave convex  inside outside  before after  real imaginary  prime composite
linear nonlinear  finite infinite
""".strip())]  # fmt: skip
#: Answers of the data that are judged against themselves before a run.
_JUDGED = 200


class MathReward(FunctionReward):
    """1 if the answer in the response is the row's, else 0; expressions are compared by math-verify.

    The row's answer is its column `ground_truth` (verl's, also within `reward_model`), or else `answer`. One
    reader reads both sides (see `answer_in` and `read`). A sample abstains, with the reason, if its row's answer cannot
    be read or is a mapping, or if the two cannot be compared without the question. Before a run the first 200 answers
    are given back as responses, and those that are not right then are named.

    Comparing expressions may take without end, and the library cannot be interrupted: it runs in worker processes, also
    where none were asked for. One that is late is killed, and its sample abstains.

    Args:
        alternatives: of a row's list of answers, "any" is right, or "all" are wanted, in any order.
        unevaluated: a response need not be worked out: `123*456` is right for 56088.
        timeout: seconds for one sample; 10 if not given.
        **options: see `FunctionReward`.

    Raises:
        ConfigError: math-verify is not installed.
    """

    one_of: ClassVar[tuple[str, ...]] = ("ground_truth", "answer")
    needs_processes: ClassVar[bool] = True

    @checked
    def __init__(
        self,
        *,
        alternatives: Alternatives = "any",
        unevaluated: bool = False,
        **options: Any,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "reward 'math' needs math-verify, which is not installed: pip install 'verl-hybrid[math]'"
            )
        super().__init__(Equality(alternatives, unevaluated), **{"name": "math", "timeout": 10.0, **options})
        self._itself = _Itself(alternatives, unevaluated)

    def check_data(self, rows: Sequence[Mapping[str, Any]]) -> None:
        super().check_data(rows)
        columns = ("reward_model", "extra_info", *self.one_of)
        answers = [{"response": "", **{key: row[key] for key in columns if key in row}} for row in rows[:_JUDGED]]
        judge = FunctionReward(self._itself, name=self.name, timeout=self.timeout, max_failure_rate=1.0)
        with closing(judge.group):
            result = run_reward(judge, Batch.from_rows(answers))
        wrong = [
            f"row {row}: {reason or 'it is wrong for itself'}"
            for row, (score, reason) in enumerate(zip(result.reward, result.reasons, strict=True))
            if score != 1.0
        ]
        text = f"reward '{self.name}': {len(wrong)} of the first {len(answers)} answers are not right when given back"
        if len(wrong) == len(answers):
            raise RewardError(f"{text} ({wrong[0]})")
        if wrong:
            logger.warning("%s, and abstain or score 0: %s", text, "; ".join(wrong[:5]))


@dataclass(frozen=True)
class Equality:
    """The reward function of `MathReward`."""

    judges = "last_turn"
    alternatives: Alternatives = "any"
    unevaluated: bool = False
    #: Imports the library, which takes seconds, before the deadline of a sample begins.
    load = staticmethod(partial(importlib.import_module, "math_verify"))

    def __call__(self, solution_str: str, ground_truth: Any = None, answer: Any = None) -> float:
        """1.0 if the answer in a response equals the row's, else 0.0. It has no deadline of its own.

        Raises:
            RewardError: the row has no answer, or one that cannot be read or compared.
        """
        expected, said = answer if ground_truth is None else ground_truth, answer_in(solution_str)
        golds = _answers(expected, self.alternatives)
        if isinstance(expected, str) and _bare(plain(expected)) == _bare(said):
            return 1.0
        errors: list[RewardError] = []
        for gold in golds:
            try:
                if _is_one(gold, said, self.unevaluated):
                    return 1.0
            except RewardError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return 0.0


class _Itself(Equality):
    """The verdict on a row's answer that is given back as the response."""

    def __call__(self, solution_str: str, ground_truth: Any = None, answer: Any = None) -> float:
        text = _answers(answer if ground_truth is None else ground_truth, self.alternatives)[0]
        if read(answer_in(text)) is None:
            raise RewardError(f"the row's answer cannot be read: {text[-100:]!r}")
        return super().__call__(text, ground_truth, answer)


def _answers(expected: Any, alternatives: str) -> list[str]:
    """The row's answers, of which one is enough."""
    if isinstance(expected, str) and re.match(r'\s*[\[{]\s*"', expected):
        with suppress(ValueError):
            expected = json.loads(expected)
    if isinstance(expected, Mapping):
        raise RewardError(f"the row's answer is a mapping ({', '.join(map(str, expected))}): give its answer alone")
    if isinstance(expected, list | tuple):
        texts = [str(each) for each in expected]
        return texts if alternatives == "any" and texts else [", ".join(texts)]
    if expected is None or expected != expected or not str(expected).strip():
        raise RewardError("the row has no answer: give it a column ground_truth or answer")
    return [str(expected)]


def _is_one(gold_text: str, said: str, unevaluated: bool) -> bool:
    wanted = answer_in(gold_text)
    gold = read(wanted) if re.search(r"\w|\\", wanted) else None
    if re.search(r"\w|\\", said) and _bare(wanted) == _bare(said):
        return True
    if gold is None:
        raise RewardError(f"the row's answer cannot be read: {gold_text[-100:]!r}")
    words, others = ({*re.findall("[a-z]+", text.casefold())} for text in (wanted, said))
    if any(len(words & pair) == len(others & pair) == 1 and words & pair != others & pair for pair in _OPPOSITES):
        return False
    answer = read(said)
    try:
        return answer is not None and is_same(gold, answer, unevaluated)
    except UnsureError as error:
        raise RewardError(
            f"the row's answer {wanted[-100:]!r} and {said[-100:]!r} cannot be compared: {error}"
        ) from None


def _bare(text: str) -> str:
    """A text without what says nothing: marks of words, its end, and spaces but those between numbers."""
    return re.sub(r"[«»]|(?<!\d)\s+|\s+(?!\d)", "", text).rstrip(".,;")

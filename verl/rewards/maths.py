"""Answers to mathematical problems, compared by math-verify."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, ClassVar

from typing_extensions import Unpack

from verl.errors import ConfigError, RewardError
from verl.rewards.calls import Caller
from verl.rewards.functions import FunctionReward, OnFailure

#: What precedes the answer in GSM8K.
_GSM8K = "####"
#: What shows that a text has LaTeX in it.
_LATEX = ("$", "\\boxed", "\\[", "\\(")


class MathReward(FunctionReward):
    """1 if the answer in the response equals the row's as mathematics, else 0, by math-verify.

    The row's answer is its column `ground_truth` (verl's, which may stand within `reward_model`), or else `answer`: a
    number, an expression, LaTeX, or a solution that ends with its answer. In both it is what follows the last `####`
    (GSM8K), or stands in `\\boxed{}`, or the last expression.

    Comparing expressions may take without end, and the library cannot be interrupted: it runs in worker processes, also
    where none were asked for. One that is late is killed, and its sample abstains.

    Args:
        timeout: seconds for one sample.
        **options: see `FunctionReward`.

    Raises:
        ConfigError: math-verify is not installed.
    """

    needs_processes: ClassVar[bool] = True

    def __init__(
        self,
        *,
        name: str = "math",
        timeout: float = 10.0,
        retries: int = 0,
        workers: Callable[..., Caller] | None = None,
        **options: Unpack[OnFailure],
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "reward 'math' needs math-verify, which is not installed: pip install 'verl-hybrid[math]'"
            )
        super().__init__(_Equality(), name=name, timeout=timeout, retries=retries, workers=workers, **options)


class _Equality:
    """The reward function of `MathReward`."""

    def load(self) -> None:
        """Import the library, which takes seconds, before the deadline of a sample begins."""
        importlib.import_module("math_verify")

    def __call__(self, solution_str: str, ground_truth: Any = None, answer: Any = None) -> float:
        return is_equal(solution_str, ground_truth, answer)


def is_equal(solution_str: str, ground_truth: Any = None, answer: Any = None) -> float:
    """1.0 if the answer in a response equals the row's, else 0.0. It has no deadline of its own.

    Raises:
        RewardError: the row has no answer, or one that cannot be read.
    """
    from math_verify import verify

    given = answer if ground_truth is None else ground_truth
    if given is None:
        raise RewardError("the row has no answer: give it a column ground_truth or answer")
    if not (wanted := _parse(str(given), is_answer=True)):
        raise RewardError(f"the row's answer cannot be read: {str(given)[-100:]!r}")
    return float(verify(wanted, _parse(solution_str), timeout_seconds=None))


def _parse(text: str, *, is_answer: bool = False) -> list[Any]:
    """The expressions that a text may end with; none if it has none."""
    from math_verify import parse

    # It warns that without a deadline of its own, which takes signals, somebody else must keep one.
    logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)
    _, marked, last = text.rpartition(_GSM8K)
    if marked:
        text, is_answer = last.strip().partition("\n")[0], True
    found: list[Any] = []
    if is_answer and not any(sign in text for sign in _LATEX):
        found = parse(f"\\boxed{{{text.strip()}}}", parsing_timeout=None)
    return list(found or parse(text, parsing_timeout=None))

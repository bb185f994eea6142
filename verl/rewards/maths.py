"""Answers to mathematical problems, compared by math-verify."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from verl.checked import checked
from verl.errors import ConfigError, RewardError
from verl.record import Retries, Seconds
from verl.rewards.answers import after_mark, amount, boxes, choice, conclusion, expression, words
from verl.rewards.functions import FunctionReward, OnFailure

if TYPE_CHECKING:
    from verl.rewards.calls import Caller

#: What shows that a text has LaTeX in it.
_LATEX = ("$", "\\boxed", "\\[", "\\(")


class MathReward(FunctionReward):
    """1 if the answer in the response equals the row's as mathematics, else 0, by math-verify.

    The row's answer is its column `ground_truth` (verl's, which may stand within `reward_model`), or else `answer`: a
    number, an expression, LaTeX, a word, or a text that ends with its answer. In both it is what follows the last
    `####` (GSM8K), or stands in `\\boxed{}`, or the last expression. A row whose answer cannot be read is left out.

    Comparing expressions may take without end, and the library cannot be interrupted: it runs in worker processes, also
    where none were asked for. One that is late is killed, and its sample abstains.

    Args:
        timeout: seconds for one sample.
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
        name: str = "math",
        timeout: Seconds = 10.0,
        retries: Retries = 0,
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

    judges = "last_turn"

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

    expected = answer if ground_truth is None else ground_truth
    if isinstance(expected, list | tuple):
        expected = ", ".join(map(str, expected))
    if expected is None or expected != expected or not str(expected).strip():
        raise RewardError("the row has no answer: give it a column ground_truth or answer")
    text, solution_str = conclusion(after_mark(str(expected))), conclusion(solution_str)
    if (letter := choice((boxes(text) or [text])[-1])) and choice(_last(solution_str)) == letter:
        return 1.0
    # Of a row that goes on ("1, 2, \\ldots") the library would compare the terms that are written.
    if wanted := [] if "dots" in text else _read(text):
        pairs = ((one, two) for one in wanted for two in _answers(solution_str) if not _tiny_apart(one, two))
        return float(any(verify(*pair, timeout_seconds=None) for pair in pairs))
    if wanted_words := words((boxes(text) or [text])[-1]):
        return float(words(_last(solution_str)) == wanted_words)
    raise RewardError(f"the row's answer cannot be read: {str(expected)[-100:]!r}")


def _tiny_apart(*values: Any) -> bool:
    """Whether two numbers only agree because the library rounds both to six digits behind the point."""
    if not all(getattr(value, "is_comparable", False) and value.is_finite for value in values):
        return False
    one, two = (value.doit().evalf() for value in values)
    most = max(abs(one), abs(two))
    return bool(most < 1e-3 and abs(one - two) > 1e-4 * most)


def _answers(response: str) -> list[Any]:
    """The expressions that a response may end with; none if it has none."""
    if after_mark(response) != response:
        return _read(after_mark(response))
    expressions, inside = _parse(response), boxes(response)
    if len(inside) == 1 and (amount(inside[0]) or expression(inside[0]) != inside[0].strip()):
        expressions += _read(inside[0])  # a sentence or a unit, which the library reads as a product of letters
    return expressions or _read(_last(response))


def _last(response: str) -> str:
    """Where a response has its answer: the last box, or else the last line."""
    return (boxes(response) or after_mark(response).strip().splitlines() or [""])[-1]


def _read(text: str) -> list[Any]:
    """What a text says that is an answer, by the first reading of it that is an expression; none: no reading is."""
    if any(sign in text for sign in _LATEX) and (expressions := _parse(text)):
        return expressions
    said = expression(text)
    if said is None:
        return []
    number = amount(said)
    return [one for part in (number, said) if part for one in _parse(f"\\boxed{{{part}}}")]


def _parse(text: str) -> list[Any]:
    """The expressions that the library finds in a text, without those that it only copies."""
    from math_verify import parse

    # It warns that without a deadline of its own, which takes signals, somebody else must keep one.
    logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)
    expressions = [item for item in parse(text, parsing_timeout=None) if not isinstance(item, str)]
    # Of an equation without variables the library would compare either side.
    return [item.rhs if getattr(item, "is_Equality", False) and not item.free_symbols else item for item in expressions]

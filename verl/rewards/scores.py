"""The result of a user's reward function as one optional number per sample. Imports nothing heavy."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Set, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any, NamedTuple

from verl._base.secrets import masked
from verl._host.user_calls import awaited, in_steps
from verl._host.user_code import describe, traceback_of
from verl.rewards.generators import seeded, watching_draws

_REASON_LENGTH = 300

_OPENRLHF = ("rewards", "scores", "extra_logs")
#: Of float32.
_LARGEST = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Score:
    """A number, or the reason for its absence. `failed` is False if the function returned None. `traceback`: if it
    raised. `note`, on the first score of a call: why scores differ between equal runs."""

    value: float | None
    reason: str | None = None
    failed: bool = False
    components: dict[str, float] = field(default_factory=dict)
    traceback: str | None = None
    note: str | None = None


class Call(NamedTuple):
    """The arguments of a call, and the number of its samples; None: of one, whose result is no list. `seed` is for the
    global random generators."""

    args: list[Any]
    kwargs: dict[str, Any]
    rows: int | None
    seed: int | None = None


def failure(reason: str, traceback: str | None = None) -> Score:
    return Score(None, masked(reason)[:_REASON_LENGTH], True, traceback=traceback)


def call_plain(function: Callable[..., Any], call: Call, loop: asyncio.AbstractEventLoop) -> list[Score]:
    """Call a function; `read_scores` reads its result. If it raises, or does not return an
    entry for each sample, the answer is one score, which says so.

    No event loop runs during the call, so the function may run its own; `loop` awaits an awaitable result. The global
    random generators begin from the seed.
    """
    with seeded(call.seed) as notes:
        try:
            result = function(*call.args, **call.kwargs)
            result = loop.run_until_complete(awaited(result)) if inspect.isawaitable(result) else result
            scores = read_scores(result, call.rows)
        except BaseException as error:  # sys.exit() in a user's function is a failed call, not the end of the run
            scores = [failure(f"raised {describe(error)}", traceback_of(error))]
    return _noted(scores, notes)


async def call_async(function: Callable[..., Any], call: Call, is_watched: bool) -> list[Score]:
    """`call_plain` for an async function, on the running event loop, and with generators that are not seeded."""
    with seeded(None) as notes:
        try:
            work: Any = awaited(function(*call.args, **call.kwargs))
            work = in_steps(work, partial(watching_draws, notes)) if is_watched else work
            scores = read_scores(await work, call.rows)
        except BaseException as error:  # as above
            scores = [failure(f"raised {describe(error)}", traceback_of(error))]
    return _noted(scores, notes)


def _noted(scores: list[Score], notes: list[str]) -> list[Score]:
    return [replace(scores[0], note=notes[0]), *scores[1:]] if notes and scores else scores


def read_scores(result: Any, rows: int | None) -> list[Score]:
    """The scores in a result: a sequence, an array or a tensor with an entry per sample, or a mapping of such columns
    (OpenRLHF's has `rewards`, `scores` and `extra_logs`). A bare entry is no list, not even of one sample. Where there
    are not as many entries as samples, one score says so. `rows` None: the result is a bare entry."""
    if rows is None:
        return [read_score(result)]
    original, result = result, _renamed(result)
    if isinstance(result, Mapping) and "score" in result:
        result = _transpose(result)
    if hasattr(result, "tolist"):
        result = result.tolist()
    # The entries of a mapping or a set do not belong to samples.
    if isinstance(result, str | bytes | Mapping | Set) or not isinstance(result, Iterable):
        wanted = f"{rows} results" if rows > 1 else "a list of 1 result: it gets a list, of however many samples"
        return [failure(f"returned {_show(original)} instead of {wanted}")]
    values = list(islice(result, rows + 1))
    if len(values) != rows:
        count = len(result) if isinstance(result, Sized) else "more" if len(values) > rows else len(values)
        return [failure(f"returned {count} results for {rows} samples")]
    return [read_score(value) for value in values]


def read_score(entry: Any) -> Score:
    """The score of one sample: a number, None, or a mapping with `score` (or `reward`) and further numbers, which are
    components then."""
    if isinstance(entry, Score):
        return entry
    value, components = _renamed(entry), dict[str, float]()
    if isinstance(value, Mapping):
        if "score" not in value:
            return failure(f"returned a mapping without 'score': its keys are {_show(list(value))}")
        for name, item in value.items():
            number = None if name == "score" else as_number(item)
            if number is not None and math.isfinite(number):
                components[str(name)] = rounded(number)
        value = value["score"]
    if value is None:
        return Score(None, "the function abstained (None)", False, components)
    number = as_number(value)
    if number is None:
        return failure(f"returned {_show(value)}, which is no number")
    if not is_usable(number):
        return failure(f"returned {number}")
    return Score(rounded(number), None, False, components)


def _renamed(result: Any) -> Any:
    """A mapping whose rewards are its `score`: its `reward`, or of OpenRLHF's, whose `extra_logs` are columns, its
    `rewards`. Anything else as it is."""
    if isinstance(result, Mapping) and "rewards" in result:
        rest = {**(result.get("extra_logs") or {}), **{k: v for k, v in result.items() if k not in _OPENRLHF}}
        result = {**rest, **({"scores": result["scores"]} if "scores" in result else {}), "reward": result["rewards"]}
    if isinstance(result, Mapping) and "reward" in result and "score" not in result:
        return {"score" if name == "reward" else name: item for name, item in result.items()}
    return result


def rounded(number: float, largest: float | None = None) -> float:
    """The decimal of nine digits that a number is but for binary rounding; any other number as it is. So 0.1 + 0.2 is
    0.3, and 0.7 + 0.2 + 0.1 reaches a bound of 1. Digits of a sum are counted from its `largest` term."""
    size = abs(number) if largest is None else largest
    if not size or not math.isfinite(size):
        return number
    places = 8 - math.floor(math.log10(size))
    decimal = round(number, places)
    return decimal if decimal == round(number, places + 3) else number


def is_usable(number: float) -> bool:
    """Whether training can compute with a reward: it is finite in float32."""
    return math.isfinite(number) and abs(number) <= _LARGEST


def as_number(value: Any) -> float | None:
    """A number of Python's, NumPy's or torch's, alone or the only entry of a list; None: it is not a number."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _transpose(columns: Mapping[str, Any]) -> Any:
    """A mapping of columns as one mapping per sample, without columns of another length than the scores'; as it is if
    its scores are no column."""
    lists = {name: item.tolist() if hasattr(item, "tolist") else item for name, item in columns.items()}
    if not isinstance(scores := lists["score"], list | tuple):
        return columns
    aligned = {k: v for k, v in lists.items() if isinstance(v, list | tuple) and len(v) == len(scores)}
    return [dict(zip(aligned, values, strict=True)) for values in zip(*aligned.values(), strict=True)]


def _show(value: Any) -> str:
    text = value[:60] if isinstance(value, str | bytes) else value
    try:
        return f"{type(value).__name__} {str(text)[:60]!r}"
    except Exception:  # as above
        return type(value).__name__

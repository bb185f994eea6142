"""What is searched: `KEY=LOW..HIGH`, `KEY=LOW..HIGH:log`, or `KEY=A,B,C`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from verl.errors import ConfigError

if TYPE_CHECKING:
    from optuna import Trial

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
HOW = "write LOW..HIGH, LOW..HIGH:log or A,B,C, such as actor_rollout_ref.actor.optim.lr=1e-6..1e-4:log"


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included; integers if both ends are written as such."""

    key: str
    low: float
    high: float
    log: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """What is checked before the first trial, as an override has it."""
        return (repr(self.low), repr(self.high))

    def suggest(self, trial: Trial) -> str:
        if isinstance(self.low, int) and isinstance(self.high, int):
            return repr(trial.suggest_int(self.key, self.low, self.high, log=self.log))
        return repr(trial.suggest_float(self.key, self.low, self.high, log=self.log))

    def __str__(self) -> str:
        kind = "integers" if isinstance(self.low, int) else "numbers"
        return f"{self.key}: {kind} from {self.low} to {self.high}{', by their logarithm' if self.log else ''}"


@dataclass(frozen=True)
class Choice:
    """One of some values, each as an override has it."""

    key: str
    values: tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        return self.values

    def suggest(self, trial: Trial) -> str:
        return trial.suggest_categorical(self.key, self.values)

    def __str__(self) -> str:
        return f"{self.key}: one of {', '.join(self.values)}"


Dimension = Range | Choice


def parse(searches: Sequence[str]) -> tuple[Dimension, ...]:
    """The dimensions of `--search` options.

    Raises:
        ConfigError: one is no search, or two are of one key.
    """
    if not searches:
        raise ConfigError(f"verl tune: nothing to search: give --search KEY=VALUES; {HOW}")
    found = tuple(map(_parse, searches))
    keys = [dimension.key for dimension in found]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"--search {twice} is given twice: leave one out")
    return found


def combinations(dimensions: Sequence[Dimension], most: int) -> list[dict[str, Any]]:
    """All settings of a space that has no more than `most`; none of a larger one."""
    columns: list[Sequence[Any]] = []
    size = 1
    for dimension in dimensions:
        if isinstance(dimension, Choice):
            columns.append(dimension.values)
        elif isinstance(dimension.low, int) and isinstance(dimension.high, int):
            columns.append(range(dimension.low, dimension.high + 1))
        else:
            return []
        size *= len(columns[-1])
    if size > most:
        return []
    keys = [dimension.key for dimension in dimensions]
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*columns)]


def _parse(search: str) -> Dimension:
    key, equals, text = search.partition("=")
    if not equals or not key or not text:
        raise ConfigError(f"--search '{search}' is no search: {HOW}")
    if match := _RANGE.fullmatch(text):
        whole = all(re.fullmatch(r"[-+]?\d+", end) for end in match.groups()[:2])
        low, high = (int(end) if whole else float(end) for end in match.groups()[:2])
        if not low < high:
            raise ConfigError(f"--search {key}: {match[1]} must be below {match[2]}")
        if match[3] and low <= 0:
            raise ConfigError(f"--search {key}: a range by logarithm begins above 0, not at {match[1]}")
        return Range(key, low, high, log=bool(match[3]))
    values = _values(key, text)
    if len(values) < 2:
        raise ConfigError(f"--search {key}: '{text}' is a single value: {HOW}; one value is an override, {key}={text}")
    if len(set(values)) < len(values):
        raise ConfigError(f"--search {key}: a value is there twice in '{text}'")
    return Choice(key, values)


def _values(key: str, text: str) -> tuple[str, ...]:
    """What commas part, as it is written; those in brackets and quotes part nothing."""
    source = f"[{text}]"
    try:
        node = yaml.compose(source, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(source):
        raise ConfigError(f"--search {key}: '{text}' is no list of values: {HOW}; put quotes around a text")
    return tuple(source[item.start_mark.index : item.end_mark.index].strip() for item in node.value)

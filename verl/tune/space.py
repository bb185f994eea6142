"""The search space: `KEY=LOW..HIGH`, `KEY=LOW..HIGH:log`, or `KEY=A,B,C`, as distributions of Optuna."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from verl._base.extras import load_extra
from verl.errors import ConfigError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
HOW = "write LOW..HIGH, LOW..HIGH:log or A,B,C, such as actor_rollout_ref.actor.optim.lr=1e-6..1e-4:log"


def parse(searches: Sequence[str]) -> dict[str, BaseDistribution]:
    """The distribution of each key of `--search` options; the values of a categorical one are texts, as an override
    has them. Numbers are integers if both ends are written as such.

    Raises:
        ConfigError: one is not a search, or two name one key; Optuna is not installed.
    """
    if not searches:
        raise ConfigError(f"verl tune: nothing to search: give --search KEY=VALUES; {HOW}")
    space: dict[str, BaseDistribution] = {}
    for search in searches:
        key, _, text = search.partition("=")
        if not key or not text:
            raise ConfigError(f"--search '{search}' is no search: {HOW}")
        if key in space:
            raise ConfigError(f"--search {key} is given twice: leave one out")
        space[key] = _distribution(key, text)
    return space


def ends(distribution: Any) -> tuple[str, ...]:
    """The values that are checked before the first trial, as text: both ends, or all values."""
    return getattr(distribution, "choices", None) or (repr(distribution.low), repr(distribution.high))


def combinations(space: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """All settings of a space that has no more than `most`; none of a larger one."""
    values: Any = [getattr(d, "choices", None) or (d.step and range(d.low, d.high + 1)) for d in space.values()]
    if None in values or math.prod(map(len, values)) > most:  # numbers that are no integers have no step
        return []
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


def _distribution(key: str, text: str) -> BaseDistribution:
    load_extra("optuna", "tune", "verl tune")
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if match := _RANGE.fullmatch(text):
        is_whole = all(re.fullmatch(r"[-+]?\d+", end) for end in match.groups()[:2])
        kind: Any = IntDistribution if is_whole else FloatDistribution
        low, high = (int(end) if is_whole else float(end) for end in match.groups()[:2])
        if not low < high:
            raise ConfigError(f"--search {key}: {match[1]} must be below {match[2]}")
        if match[3] and low <= 0:
            raise ConfigError(f"--search {key}: a range by logarithm begins above 0, not at {match[1]}")
        return kind(low, high, log=bool(match[3]))  # type: ignore[no-any-return]
    values = _values(key, text)
    if len(values) < 2:
        raise ConfigError(f"--search {key}: '{text}' is a single value: {HOW}; one value is an override, {key}={text}")
    if len(set(values)) < len(values):
        raise ConfigError(f"--search {key}: a value is there twice in '{text}'")
    return CategoricalDistribution(values)


def _values(key: str, text: str) -> tuple[str, ...]:
    """The values between commas, as they are written. A comma within brackets or quotes separates nothing, as in YAML,
    which is why YAML reads them."""
    source = f"[{text}]"
    try:
        node = yaml.compose(source, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if not isinstance(node, yaml.SequenceNode) or node.end_mark.index != len(source):
        raise ConfigError(f"--search {key}: '{text}' is no list of values: {HOW}; put quotes around a text")
    return tuple(source[item.start_mark.index : item.end_mark.index].strip() for item in node.value)

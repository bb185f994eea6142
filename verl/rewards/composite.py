"""Several rewards as one number: a weighted sum, with each part logged under its name; and a reward pulled towards its
running mean."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Annotated, Any

from pydantic import Field

from verl._base.checked import checked, validated
from verl._base.names import check_known, disjoint
from verl.batch import Batch
from verl.errors import ConfigError
from verl.rewards.scores import rounded
from verl.rewards.source import RewardResult, RewardSource, source_of


class CompositeReward:
    """The sum of `weight * reward` over its parts; a penalty is a part with a negative weight.

    If a part abstains on a sample, so does the sum: without that term the sample would look worse than it is. With
    `partial=True` (TRL's rule, for parts that each score some tasks only) it is the sum of the parts that did not.

    Args:
        parts: a mapping of names to sources, to `(source, weight)`, or to `{"source": ..., "weight": ...,
            **options}`; or a list of sources, named after themselves.
        weights: by name, or in order; they override the weights in `parts`.
        make: makes a source from a part that is not one (`make_reward`).
        **options: of `make`, for each part that is not a source already.

    Raises:
        ConfigError: there is no part, or the weights do not fit the parts or are not finite.
    """

    @checked
    def __init__(
        self,
        parts: Mapping[str, Any] | Sequence[Any],
        make: Callable[..., RewardSource],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        partial: bool = False,
        name: str = "sum",
        **options: Any,
    ) -> None:
        if not parts:
            raise ConfigError("a composition needs at least one reward")
        self.name, self.partial = name, partial
        self.parts: dict[str, RewardSource] = {}
        self.weights: dict[str, float] = {}
        for key, part in parts.items() if isinstance(parts, Mapping) else ((None, part) for part in parts):
            source, weight = _part(part, make, options)
            if key is None:
                numbered = (source.name + (f"_{number}" if number > 1 else "") for number in count(1))
                key = next(name for name in numbered if name not in self.parts)
            self.parts[key], self.weights[key] = source, weight
        if weights is not None and not isinstance(weights, Mapping):
            if len(weights) != len(self.parts):
                raise ConfigError(f"{len(weights)} weights for {len(self.parts)} rewards")
            weights = dict(zip(self.parts, weights, strict=True))
        check_known("weights: there is no reward", weights or (), self.parts)
        self.weights |= weights or {}
        for key, weight in self.weights.items():
            validated(f"reward '{key}'", {"weight": float}, {"weight": weight})
        self.whole_batch = any(source.whole_batch for source in self.parts.values())

    async def score(self, batch: Batch) -> RewardResult:
        results = await asyncio.gather(*(source.score(batch) for source in self.parts.values()))
        components = disjoint(
            f"a component of reward '{self.name}'",
            *(
                {name: result.reward, **{f"{name}/{inner}": values for inner, values in result.components.items()}}
                for name, result in zip(self.parts, results, strict=True)
            ),
        )
        reasons = [
            "; ".join(f"{name}: {reason}" for name, reason in zip(self.parts, row, strict=True) if reason) or None
            for row in zip(*(result.reasons for result in results), strict=True)
        ]
        rewards = [self._sum(row) for row in zip(*(result.reward for result in results), strict=True)]
        counts = sum((Counter(result.counts) for result in results), Counter[str]())
        return RewardResult(rewards, components, reasons, counts)

    def _sum(self, rewards: Sequence[float | None]) -> float | None:
        terms = [w * r for w, r in zip(self.weights.values(), rewards, strict=True) if r is not None]
        if not terms or (len(terms) < len(rewards) and not self.partial):
            return None
        largest = max(map(abs, terms))
        return rounded(math.fsum(terms), largest) if math.isfinite(largest) else sum(terms)


class Smoothed:
    """`(1 - decay) * reward + decay * mean`, where `mean` is the exponential moving average of the batches' means,
    this batch included (it starts at the first batch's mean).

    The order of samples within a batch stays the same, differences between batches shrink. Samples that abstain still
    do, and do not enter the mean. The source's own rewards are the component `raw`.

    Raises:
        ConfigError: not 0 <= decay < 1.
    """

    whole_batch = True

    @checked
    def __init__(self, source: RewardSource, decay: Annotated[float, Field(ge=0, lt=1)]) -> None:
        self.source, self.decay, self.name = source, decay, source.name
        self.parts = {source.name: source}
        self.mean: float | None = None

    async def score(self, batch: Batch) -> RewardResult:
        result = await self.source.score(batch)
        rewards = [reward for reward in result.reward if reward is not None]
        if rewards:
            mean = sum(rewards) / len(rewards)
            self.mean = mean if self.mean is None else self.decay * self.mean + (1 - self.decay) * mean
        mean = self.mean or 0.0
        smooth = [None if r is None else (1 - self.decay) * r + self.decay * mean for r in result.reward]
        components = disjoint(f"a component of reward '{self.name}'", result.components, {"raw": result.reward})
        return RewardResult(smooth, components, result.reasons, result.counts)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = None if state["mean"] is None else float(state["mean"])


def _part(part: Any, make: Callable[..., RewardSource], options: dict[str, Any]) -> tuple[RewardSource, float]:
    weight = 1.0
    if isinstance(part, tuple | list) and len(part) == 2 and isinstance(part[1], int | float):
        part, weight = part
    elif isinstance(part, Mapping) and "source" in part:
        weight = part.get("weight", 1.0)
        part = {key: value for key, value in part.items() if key != "weight"}
    is_source = isinstance(source_of(part), RewardSource)
    return make(part, **({} if is_source else options)), weight

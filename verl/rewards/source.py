"""The interface of a reward: samples in, one optional number per sample out, with a deadline on every wait.

A reward that cannot be computed is null, with a reason: the sample abstains. It never becomes 0 or delays others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from verl._host.user_calls import Running
from verl.batch import Batch
from verl.errors import RewardError


@dataclass
class RewardResult:
    """One entry per sample.

    Attributes:
        reward: the number, or None.
        components: further numbers by name.
        reasons: why the reward is missing, or is a default; else None.
        counts: "failures" (samples), "late" and "retries" (calls), "deaths" (of workers), "workers".

    Raises:
        RewardError: the lists differ in length.
    """

    reward: list[float | None]
    components: dict[str, list[float | None]] = field(default_factory=dict)
    reasons: list[str | None] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reasons = self.reasons or [None] * len(self.reward)
        for length in (len(self.reasons), *map(len, self.components.values())):
            if length != len(self.reward):
                raise RewardError("rewards, reasons and components of one result must have one length")

    def as_batch(self) -> Batch:
        """Columns `reward`, `abstain_reason` and `reward/<component>`."""
        components = {f"reward/{name}": pa.array(values, pa.float64()) for name, values in self.components.items()}
        return Batch.from_columns({"reward": self.reward, "abstain_reason": self.reasons, **components})


@runtime_checkable
class RewardSource(Protocol):
    """Anything that scores samples. `whole_batch`: a sample's score may depend on the rest of its batch."""

    name: str
    whole_batch: bool

    async def score(self, batch: Batch) -> RewardResult: ...


def source_of(reward: object) -> object:
    """The source within a `Reward`; anything else as it is."""
    source = getattr(reward, "source", None)
    return source if isinstance(source, RewardSource) and not isinstance(reward, RewardSource) else reward


def _tree(source: RewardSource, path: str = "reward") -> Iterator[tuple[str, RewardSource, bool]]:
    """The sources in a tree of compositions (mappings `parts`): the path of each, and whether it has no parts."""
    parts = getattr(source, "parts", None)
    yield path, source, not isinstance(parts, Mapping)
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        yield from _tree(part, f"{path}/{name}")


def leaves(source: RewardSource) -> Iterator[RewardSource]:
    """The sources at the ends of a tree of compositions."""
    return (one for _, one, is_leaf in _tree(source) if is_leaf)


def with_state(source: RewardSource) -> dict[str, Any]:
    """The sources of a tree of compositions whose state changes from batch to batch, by their path in it."""
    return {path: one for path, one, _ in _tree(source) if hasattr(one, "load_state_dict")}


def columns_read(source: RewardSource) -> tuple[str, ...]:
    """The columns that a source reads, by its attribute `columns`: as inputs of a `verl.dataflow.graph.Node`, where "?"
    ends the name of one that may be missing. ("*",), all of them, where a part does not say."""
    return tuple(dict.fromkeys(column for leaf in leaves(source) for column in getattr(leaf, "columns", ("*",))))


async def score_finished(source: RewardSource, batch: Batch) -> RewardResult:
    """`source.score` of the finished responses; those that were aborted or rejected abstain."""
    ends = batch["finish"] if "finish" in batch else [None] * len(batch)
    is_finished = [end not in ("abort", "reject") for end in ends]
    if all(is_finished):
        return await source.score(batch)
    errors = batch["episode_error"] if "episode_error" in batch else [None] * len(batch)
    others = [error or f"the response ended by {end}" for error, end in zip(errors, ends, strict=True)]
    scored = await source.score(batch.filter(is_finished)) if any(is_finished) else RewardResult([])

    def spread(values: Iterable[Any], others: Iterable[Any]) -> list[Any]:
        left = iter(values)
        return [next(left) if one else other for one, other in zip(is_finished, others, strict=True)]

    nothing = [None] * len(batch)
    return RewardResult(
        spread(scored.reward, nothing),
        {name: spread(values, nothing) for name, values in scored.components.items()},
        spread(scored.reasons, others),
        scored.counts,
    )


def run_reward(source: RewardSource, batch: Batch) -> RewardResult:
    """`score_finished` for synchronous code, whether or not an event loop runs in this thread."""
    try:
        # In this context: the call of a user's function that this may be inside of is known there, too.
        result: RewardResult = Running(copy_context().run, asyncio.run, score_finished(source, batch)).result()
    finally:
        log_failures(source)
    return result


def log_failures(source: RewardSource) -> None:
    """Log how many samples have failed since this was called last, in one line for each part of a source."""
    for leaf in leaves(source):
        if hasattr(leaf, "log_failures"):
            leaf.log_failures()

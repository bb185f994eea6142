"""Where rewards come from: samples in, one optional number a sample out, each wait with a deadline.

A reward that cannot be had is null, with a reason: the sample abstains. It never becomes 0, never stalls the others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import pyarrow as pa

from verl.batch import Batch
from verl.errors import RewardError


@dataclass
class RewardResult:
    """One entry a sample: the reward or None; named components; why a reward is missing, or is a default.

    `counts` says what went wrong on the way: "failures" (samples), "late" and "retries" (calls), "deaths" (of workers);
    and how many "workers" there are.
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
    """Anything that scores samples. `whole_batch` says that a sample's score may depend on the others beside it."""

    name: str
    whole_batch: bool

    async def score(self, batch: Batch) -> RewardResult: ...


def source_of(given: object) -> object:
    """The source that a `Reward` holds; anything else as it is."""
    held = getattr(given, "source", None)
    return held if isinstance(held, RewardSource) and not isinstance(given, RewardSource) else given


def leaves(source: RewardSource) -> Iterator[RewardSource]:
    """The sources that a source is made of (its mapping `parts`), down to those made of none; or it alone."""
    parts = getattr(source, "parts", None)
    if not isinstance(parts, Mapping):
        yield source
        return
    for part in parts.values():
        yield from leaves(part)


async def score_finished(source: RewardSource, batch: Batch) -> RewardResult:
    """`source.score` of the responses that were finished; those aborted or rejected abstain."""
    ends = batch["finish"] if "finish" in batch else [None] * len(batch)
    rows = [row for row, end in enumerate(ends) if end not in ("abort", "reject")]
    if len(rows) == len(batch):
        return await source.score(batch)
    errors = batch["episode_error"] if "episode_error" in batch else [None] * len(batch)
    reasons = [error or f"the response ended by {end}" for error, end in zip(errors, ends, strict=True)]
    scored = await source.score(batch.take(rows)) if rows else RewardResult([])
    place = {row: index for index, row in enumerate(rows)}

    def spread(values: Sequence[float | None]) -> list[float | None]:
        return [values[place[row]] if row in place else None for row in range(len(batch))]

    return RewardResult(
        spread(scored.reward),
        {name: spread(values) for name, values in scored.components.items()},
        [scored.reasons[place[row]] if row in place else reason for row, reason in enumerate(reasons)],
        scored.counts,
    )


def run_reward(source: RewardSource, batch: Batch) -> RewardResult:
    """`score_finished` from synchronous code, a running event loop or not; the source's own deadlines hold."""
    done: list[RewardResult | BaseException] = []

    def run() -> None:
        try:
            done.append(asyncio.run(score_finished(source, batch)))
        except BaseException as error:  # handed to the caller, whatever it is
            done.append(error)

    thread = threading.Thread(target=run, name=f"score {source.name}", daemon=True)
    thread.start()
    thread.join()
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]

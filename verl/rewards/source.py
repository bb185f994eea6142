"""Where rewards come from: samples in, one optional number a sample out, each wait with a deadline.

A reward that cannot be had is null, with a reason: the sample abstains. It never becomes 0, never stalls the others.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import pyarrow as pa

from verl.batch import Batch
from verl.errors import RewardError


@dataclass
class RewardResult:
    """One entry a sample: the reward or None; named components; why a reward is missing, or is a default."""

    reward: list[float | None]
    components: dict[str, list[float | None]] = field(default_factory=dict)
    reasons: list[str | None] = field(default_factory=list)

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


def run_reward(source: RewardSource, batch: Batch, timeout: float | None = None) -> RewardResult:
    """`source.score(batch)` from synchronous code, a running event loop or not.

    Raises:
        RewardError: no result within `timeout` seconds (None: the source's own deadlines hold).
    """
    done: list[RewardResult | BaseException] = []

    def run() -> None:
        try:
            done.append(asyncio.run(source.score(batch)))
        except BaseException as error:  # handed to the caller, whatever it is
            done.append(error)

    thread = threading.Thread(target=run, name=f"score {source.name}", daemon=True)
    thread.start()
    thread.join(timeout)
    if not done:
        raise RewardError(
            f"reward '{source.name}' gave no result within {timeout:g} s: is one of its waits without end?"
        )
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]

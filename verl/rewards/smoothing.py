"""Rewards pulled towards their running mean."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from verl.batch import Batch
from verl.checked import checked
from verl.errors import CheckpointError
from verl.names import disjoint
from verl.rewards.source import RewardResult, RewardSource


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
        inner = {"source": self.source.state_dict()} if hasattr(self.source, "state_dict") else {}
        return {"mean": self.mean, **inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`.

        Raises:
            CheckpointError: the state has no mean.
        """
        if "mean" not in state:
            raise CheckpointError(
                f"the reward '{self.name}' is smoothed here, but its saved state has no mean: leave smoothing "
                "out, or start a new run"
            )
        self.mean = None if state["mean"] is None else float(state["mean"])
        if "source" in state:
            self.source.load_state_dict(state["source"])  # type: ignore[attr-defined]

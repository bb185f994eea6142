"""`Reward`: where the numbers come from, as a user holds it."""

from __future__ import annotations

from typing import Any

from verl.batch import Batch
from verl.controller.once import once
from verl.errors import ConfigError
from verl.rewards.make import make_reward
from verl.rewards.source import RewardResult, RewardSource, run_reward, score_finished


class Reward:
    """Scores samples. Give exactly one of:

    Args:
        reward_fn: a function, recognised by its parameter names: `f(texts)`, `f(responses, prompts)`, verl's
            `f(data_source, solution_str, ground_truth, extra_info)`, TRL's `f(prompts, completions, **columns)`,
            each plain or async; "file.py:function"; any `RewardSource`; or a mapping of names to
            `(reward, weight)` pairs, summed.
        model: a reward model (`AutoModelForSequenceClassification` with one label), or its name or directory.
        url: the address of a service that scores (`RemoteReward`), or, with `template`, of an LLM judge
            (`JudgeReward`); several are one.
        **options: `timeout` in seconds, `retries`, `default_reward` (instead of abstaining), `max_failure_rate`,
            `smoothing` (EMA).

    A sample whose reward fails, is late, or is not a finite number abstains: its reward is null, and
    `abstain_reason` says why. So does one whose response was aborted or rejected: it is not scored at all.
    """

    def __init__(self, reward_fn: Any = None, *, model: Any = None, url: Any = None, **options: Any) -> None:
        given = [source for source in (reward_fn, model, url) if source is not None]
        if len(given) != 1:
            raise ConfigError("a Reward is made of one thing: give reward_fn=..., model=... or url=...")
        self.source: RewardSource = make_reward(given[0], **options)

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Reward:
        """A reward model by name or directory."""
        return cls(model=name, **options)

    @property
    def whole_batch(self) -> bool:
        """Whether a sample's reward may depend on the samples beside it."""
        return self.source.whole_batch

    async def score(self, sequences: Batch) -> Batch:
        """Columns `reward`, `abstain_reason` and `reward/<component>`, one number a sample."""
        return (await score_finished(_OnRankZero(self.source), sequences)).as_batch()

    def get_reward(self, sequences: Batch) -> Batch:
        """The same, waited for."""
        return run_reward(_OnRankZero(self.source), sequences).as_batch()

    def state_dict(self) -> dict[str, Any]:
        """What changes from batch to batch (a running average), as JSON."""
        return self.source.state_dict() if hasattr(self.source, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`."""
        if hasattr(self.source, "load_state_dict"):
            self.source.load_state_dict(state)


class _OnRankZero:
    """A source whose scores every rank of a torchrun job gets from rank 0: the user's code runs once."""

    def __init__(self, source: RewardSource) -> None:
        self.source, self.name, self.whole_batch = source, source.name, source.whole_batch

    async def score(self, batch: Batch) -> RewardResult:
        rows = ",".join(map(str, batch["id"])) if "id" in batch else str(len(batch))
        return await once(f"reward {self.name}: {rows}", lambda: self.source.score(batch))

"""`Reward`: the handle of reward functions and models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from verl._base.checked import checked
from verl._base.record import Processes
from verl._host.log import follow_log_level
from verl._host.ranks import registry
from verl.batch import Batch
from verl.cluster.controller import Controller, start
from verl.cluster.group import RankGroup
from verl.errors import CheckpointError, ConfigError, RewardError, nearest
from verl.models.portable import PortableModel
from verl.rewards.calls import ThreadCaller
from verl.rewards.failures import Failures
from verl.rewards.make import make_reward
from verl.rewards.model import TextScorer
from verl.rewards.source import RewardSource, leaves, log_failures, run_reward, score_finished, with_state
from verl.roles.columns import as_responses
from verl.roles.reward_pool import RewardPool
from verl.roles.settings import as_name
from verl.workers.reward import RewardWorker


class Reward:
    """Scores samples. Pass exactly one of `reward_fn`, `model` and `url`.

    Args:
        reward_fn: a function, recognised by its parameter names: `f(texts)`, `f(responses, prompts)`, verl's
            `f(data_source, solution_str, ground_truth, extra_info)`, TRL's `f(prompts, completions, **columns)`,
            each plain or async; "file.py:function"; a name (`register_reward`); any `RewardSource`; or a
            mapping of names to `(reward, weight)` pairs, summed.
        model: a reward model (`AutoModelForSequenceClassification` with one label), or its name or directory.
        url: the address, or a list of addresses, of a scoring service (`RemoteReward`) or, with `template`, of an LLM
            judge (`JudgeReward`).
        workers: score in this many processes (Ray actors), one sample (or `batch_size`) at a time in each. A sample
            whose worker hangs or dies is scored by another; see `RewardPool`. `group.scale(n)` changes how many there
            are. A model is loaded in each of them. 0: a function is called in one process of its own (see `process` of
            `FunctionReward`), anything else in this one.
        max_workers: upper limit when samples queue up.
        placement: names devices for the role "reward", see `DeviceMesh`: its models run there, and each rank
            scores its share of the rows. None: the models run in this process, on the accelerator where there is one.
        load: False: the files of its models are read when a trainer is made, or at the first score.
        **options: `timeout` in seconds, `retries`, `default_reward` (instead of abstaining), `max_failure_rate`
            (of the latest 256 samples, once there are 64; above it scoring raises), `smoothing` (EMA), `whole_batch` (a
            function is called once on all samples of a step, not for each prompt when its samples are finished),
            `process` (False: a function is called in this process, which ends if it holds the interpreter).

    A sample whose reward fails, is late, or is not a finite number abstains: its reward is null, with an
    `abstain_reason`. So does one whose response was aborted or rejected, which is not scored.
    """

    @checked
    def __init__(
        self,
        reward_fn: Any = None,
        *,
        model: Any = None,
        url: Any = None,
        workers: Annotated[int, Field(ge=0, le=1024)] = 0,
        max_workers: Processes | None = None,
        placement: Any = None,
        load: bool = True,
        **options: Any,
    ) -> None:
        follow_log_level()
        sources = [source for source in (reward_fn, model, url) if source is not None]
        if len(sources) != 1:
            hints = (nearest(name, ("reward_fn", "model", "url")) for name in options)
            close = "".join(f": {hint}" for hint in hints if hint.startswith("did"))
            raise ConfigError(f"a Reward takes exactly one of reward_fn=..., model=... and url=...{close}")
        if workers:
            options["workers"] = partial(RewardPool, workers=workers, max_workers=max_workers)
        elif max_workers:
            raise ConfigError(f"max_workers={max_workers} is the most that `workers` (at least 1) may grow to")
        self.source: RewardSource = make_reward(as_name(sources[0]), **options)
        for source in leaves(self.source):
            if getattr(source, "needs_processes", False) and not isinstance(source.group, RewardPool):  # type: ignore[attr-defined]
                source.call_in(partial(RewardPool, workers=1, max_workers=os.cpu_count()))  # type: ignore[attr-defined]
        here = [source for source in leaves(self.source) if isinstance(getattr(source, "group", None), ThreadCaller)]
        #: Reward models of this process among its parts.
        self._models = [source.function for source in here if isinstance(source.function, TextScorer)]  # type: ignore[attr-defined]
        if load:
            self.load()
        if placement is not None:
            self.set_placement(placement)

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> Reward:
        """A reward model by name or directory."""
        return cls(model=name, **options)

    def load(self) -> None:
        """Read the files of its models, unless that is done.

        Raises:
            ModelError: one cannot be loaded, or is no reward model.
        """
        for scorer in self._models:
            scorer.load()
            registry.add("Reward", model=scorer.model)

    def set_placement(self, placement: Any, role: str = "reward") -> None:
        """Run the reward's models on the devices that a placement has for `role`; without such devices they stay here.

        Raises:
            ConfigError: the reward has no model that could run there, or the ranks shall cut it.
        """
        self.load()
        controller = Controller.of(placement)
        pool = controller.mesh.pools.get(role)
        if pool is None:
            return
        if not self._models:
            raise ConfigError(
                f"placement has devices for the {role}, and '{self.source.name}' is no reward model of this "
                "process: functions run where the script does, or in processes of their own (workers=N)"
            )
        if pool.parallel != "data":
            raise ConfigError(f"placement: a {role} model is whole on each of its devices: parallel='data', not others")
        for scorer in self._models:
            recipe = partial(RewardWorker, PortableModel(scorer.model), scorer.batch_size)
            scorer.score_tokens = partial(_scores, controller.group(role, recipe))

    def set_seed(self, seed: int) -> None:
        """Seed the random generators of functions from a run's seed, and for each call from the ids of its rows."""
        for source in leaves(self.source):
            if hasattr(source, "seed"):
                source.seed = seed

    @property
    def groups(self) -> dict[str, RewardPool]:
        """The worker groups of the reward's functions, by name."""
        callers = {source.name: getattr(source, "group", None) for source in leaves(self.source)}
        return {name: caller for name, caller in callers.items() if isinstance(caller, RewardPool)}

    @property
    def group(self) -> RewardPool:
        """The worker group of the reward's function.

        Raises:
            ConfigError: the reward does not have exactly one, see `groups`.
        """
        groups = self.groups
        if len(groups) != 1:
            raise ConfigError(f"reward '{self.source.name}' has {len(groups)} groups of workers: give it workers=N")
        return next(iter(groups.values()))

    async def score(self, sequences: Batch) -> Batch:
        """Columns `reward`, `abstain_reason` and `reward/<component>`, one number a sample."""
        try:
            return (await self.score_and_count(sequences))[0]
        finally:
            log_failures(self.source)

    async def score_and_count(self, sequences: Batch) -> tuple[Batch, dict[str, float]]:
        """`score`, and metrics of failures, retries and workers."""
        result = await score_finished(self.source, sequences)
        names = {what: "workers/max" if what == "workers" else f"{what}/count" for what in result.counts}
        return result.as_batch(), {names[what]: float(count) for what, count in result.counts.items()}

    def get_reward(self, sequences: Any) -> Batch:
        """`score` for synchronous code, also of plain texts or (prompt, response) pairs instead of sequences.

        Raises:
            DataError: they have another form.
        """
        start()
        return run_reward(self.source, as_responses(sequences)).as_batch()

    def check_failures(self) -> None:
        """Raises RewardError if a component has failed on every sample so far, however few; for the end of a run."""
        for source in leaves(self.source):
            failures = getattr(source, "failures", None)
            if isinstance(failures, Failures) and failures.all:
                raise RewardError(
                    f"reward '{source.name}' failed on every sample (the warnings say why), so nothing was learned. "
                    "Mend it, or set max_failure_rate to 1"
                )

    @contextmanager
    def apart(self) -> Iterator[None]:
        """For evaluation: scores inside change neither the running mean nor the failure counts."""
        state = self.state_dict()
        counted: dict[Any, Failures] = {
            source: source.failures  # type: ignore[attr-defined]
            for source in leaves(self.source)
            if isinstance(getattr(source, "failures", None), Failures)
        }
        for source, failures in counted.items():
            source.failures = Failures(failures.most)
        try:
            yield
        finally:
            for source, failures in counted.items():
                source.failures = failures
            self.load_state_dict(state)

    def close(self) -> None:
        """End its processes; the next sample starts new ones."""
        for source in leaves(self.source):
            if hasattr(source, "group"):
                source.group.close()

    def state_dict(self) -> dict[str, Any]:
        """The state that changes from batch to batch (a running average), as JSON, if the source can restore it."""
        return {path: source.state_dict() for path, source in with_state(self.source).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`.

        Raises:
            CheckpointError: it is of another kind of reward.
        """
        sources = with_state(self.source)
        if sources.keys() != state.keys():
            raise CheckpointError(
                f"the parts of the reward with a state (a running mean) are {sorted(sources) or 'none'} here and were "
                f"{sorted(state) or 'none'} when it was saved: use those parts and their smoothing, or start a new run"
            )
        for path, source in sources.items():
            source.load_state_dict(state[path])


def _scores(group: RankGroup[RewardWorker], tokens: list[list[int]]) -> list[float]:
    """The scores of texts by the workers of a reward model."""
    rows = Batch.from_columns({"prompt_tokens": tokens, "response_tokens": [[] for _ in tokens]})
    return list(group.call(RewardWorker.scores, rows)["scores"])

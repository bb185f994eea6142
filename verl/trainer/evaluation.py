"""Evaluation on held-out problems, and how sure its numbers are."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from verl._base.checked import checked
from verl._base.record import Count, Natural, Seed
from verl.batch import Batch
from verl.data.files import digest
from verl.data.prompts import PromptDataset
from verl.dataflow.scores import one_row_per_episode
from verl.errors import ConfigError, DataError
from verl.report.metrics import Metric, MetricFn, mean
from verl.report.page import SHARES
from verl.report.reading import finite
from verl.report.samples import renamed, sample_names
from verl.rollout.options import Temperature

logger = logging.getLogger(__name__)

#: Metrics of the user's own by name; or one, or several, by their own names.
Metrics = Mapping[str, MetricFn] | Sequence[MetricFn] | MetricFn | None
#: What an interval of confidence leaves out on either side.
_TAIL = (1 - 0.95) / 2


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    samples: rows of all problems with their responses and scores; of an episode with several, the last trajectory.
    rows: by metric, one number a row (None: no number). "reward" is always there, "cost" where there is one.
    metrics: by metric, the mean over its rows or the metric's own number; and "abstained", rows without a reward.
    """

    samples: Batch
    rows: dict[str, list[float | None]]
    metrics: dict[str, float]

    def by_problem(self, metric: str) -> list[float | None]:
        """The metric of each problem, its samples averaged; problems in order of appearance."""
        values = self.rows[metric]
        means = (mean([values[row] for row in rows]) for rows in self.samples.group_indices())
        return [None if math.isnan(value) else value for value in means]


@checked
@dataclass
class HeldOut:
    """Held-out data: how they are evaluated during training, and the first and the latest result.

    Attributes:
        rows: problems to sample and score, or recorded rows whose loss is measured.
        every: steps from one evaluation to the next; None: only before the first step and after the last.
        metrics, n, temperature, top_p, top_k: see `Trainer.evaluate`; for problems.
        before: evaluate before the first step, too.
        kl: also log `kl/eval`, the KL to the reference policy (`kl_to_reference`); for problems. The reference is the
            actor as it is when the trainer is made, unless `Actor.make_reference` was called before.
        name: what an error calls these data.
        on_result: called with each result and, where samples were scored, their `Evaluation`.
        first, last: a result is {step, headline, metrics, problems}; with `by_problem` where samples were scored, with
            `low` and `high` (95 % interval) where the headline is a share. None: no result yet.
    """

    rows: PromptDataset | Batch
    every: Count | None = None
    metrics: Mapping[str, MetricFn] = field(default_factory=dict)
    n: Count = 1
    temperature: Temperature = 0.0
    top_p: float | None = None
    top_k: Natural | None = None
    before: bool = True
    kl: bool = False
    name: str = "the held-out data"
    on_result: Callable[[dict[str, Any], Evaluation | None], None] | None = None
    first: dict[str, Any] | None = None
    last: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.metrics = named_metrics(self.metrics)
        if self.kl and isinstance(self.rows, Batch):
            raise ConfigError(
                f"{self.name} are recorded responses, and kl/eval is of sampled ones: leave it out of "
                "trainer.eval_metrics (kl of HeldOut), or give problems"
            )

    def note(self, step: int, evaluation: Evaluation | Mapping[str, float]) -> dict[str, Any]:
        """Keep what an evaluation at a step found (for recorded rows: loss and metrics) as `last`, and return it."""
        sampled, measured = (
            (evaluation, evaluation.metrics) if isinstance(evaluation, Evaluation) else (None, evaluation)
        )
        metrics = finite(dict(measured))
        result: dict[str, Any] = {"step": step, "metrics": metrics}
        if sampled is not None:
            scored = any(value is not None for value in sampled.rows.get("accuracy", ()))
            headline = "accuracy" if scored else "reward"
            values = sampled.by_problem(headline)
            count = len(values) - values.count(None) or len(values)
            result |= {"headline": headline, "problems": len(values), "by_problem": values}
        else:
            assert isinstance(self.rows, Batch)
            headline = "pairs/accuracy" if metrics.get("pairs/accuracy") is not None else "loss"
            count = len(self.rows.group_indices())
            result |= {"headline": headline, "problems": count}
        if headline in SHARES and (value := metrics[headline]) is not None:
            # A sum over micro-batches rounds, and may come to a little more than all.
            share = binomial_interval(min(value, 1.0) * count, count)
            result |= {"low": share.low, "high": share.high}
        self.first, self.last = self.first or result, result
        if self.on_result is not None:
            self.on_result(result, sampled)
        return result

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What tells these rows from others."""
        rows = self.rows
        return {"rows": len(rows), "digest": digest(rows.rows()) if isinstance(rows, Batch) else rows.fingerprint()}

    def state_dict(self) -> dict[str, Any]:
        """Results and identity, as JSON."""
        return {"held_out": self.identity, "first": self.first, "last": self.last}

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raises DataError if a saved `identity` is of other rows."""
        saved, here = (f"{of.get('rows')} with the digest {of.get('digest')}" for of in (identity, self.identity))
        if saved != here:
            raise DataError(
                f"{self.name} is not what the run began with: the held-out rows were {saved}, are {here}, so that the "
                "numbers before and after would not be of the same problems. Give the same data, or start anew "
                "(--fresh)"
            )

    def summary(self, seed: int = 0) -> dict[str, Any]:
        """The headline metric before and after; of samples also the gain with its 95 % interval, None without pairs."""
        first, last = self.first, self.last
        if first is None or last is None or not self.before:
            return {}
        name = last["headline"]
        summary = {"headline": name, f"{name}_before": first["metrics"][name], f"{name}_after": last["metrics"][name]}
        summary["eval_problems"] = last["problems"]
        if "by_problem" not in last:
            return summary
        before, after = first["by_problem"], last["by_problem"]
        summary |= {"eval_problems": len(after) - after.count(None), "eval_unscored": after.count(None)}
        # What abstained has no value, and two headlines are no pair.
        if name != first["headline"] or all(None in pair for pair in zip(before, after, strict=True)):
            return summary | dict.fromkeys(("gain", "gain_low", "gain_high"))
        change = paired_bootstrap(before, after, seed=seed)
        return summary | {"gain": change.value, "gain_low": change.low, "gain_high": change.high}


def accuracy(samples: Batch) -> list[float | None]:
    """Exact match by the task's own verifier, where the reward has such a component; no credit for a format."""
    if "reward/accuracy" in samples:
        values = samples["reward/accuracy"]
        if all(value is None or 0 <= value <= 1 for value in values):  # a user's component of that name may be no share
            return values
    return [None] * len(samples)


def named_metrics(metrics: Metrics) -> dict[str, Metric]:
    """By name; metrics of a list, or a single one, have the names of their functions.

    Raises:
        ConfigError: one is no metric, or two have one name.
    """
    if metrics is None or isinstance(metrics, Mapping):
        named = dict(metrics or {})
    else:
        listed = [metrics] if callable(metrics) else list(metrics)
        named = {getattr(fn, "__name__", type(fn).__name__): fn for fn in listed}
        if len(named) < len(listed):
            raise ConfigError("two metrics have one name: give a mapping, metrics={NAME: FUNCTION, ...}")
    return {name: fn if isinstance(fn, Metric) else Metric(name, fn) for name, fn in named.items()}


def evaluation_of(samples: Batch, metrics: Mapping[str, Metric], seconds: float) -> Evaluation:
    """What samples of held-out problems, which have a `reward`, come to.

    Args:
        metrics: the user's own, by name.
        seconds: for each of them, see `Metric`.

    Raises:
        DataError, RewardError: see `Metric`.
        ConfigError: a metric is called "reward", "cost" or "abstained".
    """
    samples = one_row_per_episode(samples)
    rows: dict[str, list[float | None]] = {name: samples[name] for name in ("reward", "cost") if name in samples}
    values = {name: mean(numbers) for name, numbers in rows.items()}
    values["abstained"] = float(rows["reward"].count(None))
    for name, metric in metrics.items():
        if name in values:
            raise ConfigError(f"a metric cannot be called '{name}': that one is there already")
        values[name], numbers = metric(samples, seconds)
        if numbers is not None:
            rows[name] = numbers
    return Evaluation(samples, rows, values)


def together(evaluations: Mapping[str, Evaluation], users: Mapping[str, Metric]) -> Evaluation:
    """The evaluations of all tasks as one; each metric of a task is there under its name, too.

    Args:
        evaluations: by the prefix of the task's metrics; empty for a task alone.
        users: the user's metrics. One that gives a number for all samples is computed of all of them once more.
    """
    if "" in evaluations:
        return evaluations[""]
    rows: dict[str, list[float | None]] = {
        name: [value for each in evaluations.values() for value in each.rows.get(name, [None] * len(each.samples))]
        for name in dict.fromkeys(name for evaluation in evaluations.values() for name in evaluation.rows)
    }
    metrics = {name: mean(values) for name, values in rows.items()}
    metrics["abstained"] = sum(evaluation.metrics["abstained"] for evaluation in evaluations.values())
    samples: list[Batch] = []
    taken: set[str] = set()
    for begin, evaluation in evaluations.items():
        metrics |= {f"{begin}{name}": value for name, value in evaluation.metrics.items()}
        samples.append(renamed(evaluation.samples, taken))  # each task may have numbered its own problems
        taken |= sample_names(samples[-1])
    whole = Batch.concat(samples)
    metrics |= {name: metric(whole)[0] for name, metric in users.items() if name not in rows}
    return Evaluation(whole, rows, metrics)


@checked
def paired_bootstrap(
    before: Sequence[float | bool | None], after: Sequence[float | bool | None], n: Count = 10_000, seed: Seed = 0
) -> Interval:
    """Mean of `after - before` over the same problems, with its 95 % percentile bootstrap interval (Efron 1979).

    Problems are resampled whole, so what both share of a problem's difficulty cancels. A problem that lacks a value
    on either side is left out.

    Raises:
        DataError: the lengths differ, or no problem has both values.
    """
    if len(before) != len(after):
        raise DataError(f"paired samples must have one length, got {len(before)} and {len(after)}")
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if b is not None and a is not None]
    if not pairs:
        raise DataError("no problem has a value before and after")
    differences = np.array([float(a) - float(b) for b, a in pairs])
    rng = np.random.default_rng(seed)
    count = len(differences)
    block = max(1, 4_000_000 // count)  # bounds the memory of the drawn indices
    sizes = (min(block, n - start) for start in range(0, n, block))
    means = np.concatenate([differences[rng.integers(0, count, (size, count))].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [_TAIL, 1 - _TAIL])
    return Interval(float(differences.mean()), float(low), float(high))


@checked
def binomial_interval(successes: float, total: Natural) -> Interval:
    """A share of successes with its 95 % Wilson score interval (Wilson 1927); stays within 0 and 1, and is of use for
    shares near them.

    Raises:
        DataError: there is nothing to take a share of.
    """
    if not 0 <= successes <= total or not total:
        raise DataError(f"{successes} successes of {total} are no share")
    z = NormalDist().inv_cdf(1 - _TAIL)
    share = successes / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))

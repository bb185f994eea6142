import math
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl.batch import Batch
from verl.errors import ConfigError, DataError
from verl.report.completions import save_table
from verl.trainer.evaluation import Evaluation, binomial_interval, evaluation_of, named_metrics, paired_bootstrap

PROBLEMS = Batch.from_columns({"group": ["a", "b", "c"], "answer": ["1", "2", "3"]})


def collect(problems: Batch) -> Batch:
    rows = [{**row, "id": f"{row['group']}/{k}", "response": str(k + 1)} for row in problems for k in range(2)]
    rewards = [None if row["id"] == "c/0" else float(row["response"] == row["answer"]) for row in rows]
    return Batch.from_rows(rows).add({"reward": rewards})


def evaluate(samples: Batch, metrics: Any = None) -> Evaluation:
    return evaluation_of(samples, named_metrics(metrics), 60.0)


def test_samples_are_scored_and_measured_by_the_users_functions() -> None:
    found = evaluate(
        collect(PROBLEMS),
        {
            "length": lambda samples: [len(text) for text in samples["response"]],
            "array": lambda samples: np.arange(len(samples)),
            "share": lambda samples: sum(r == 1.0 for r in samples["reward"]) / len(samples),
        },
    )
    assert found.rows["reward"] == [1.0, 0.0, 0.0, 1.0, None, 0.0]
    assert found.metrics == {"reward": 0.4, "abstained": 1.0, "length": 1.0, "array": 2.5, "share": 2 / 6}
    assert found.by_problem("reward") == [0.5, 0.5, 0.0]
    assert found.samples["id"] == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]


def test_faults_are_named() -> None:
    with pytest.raises(DataError, match="'bad' returned 1 values for 6"):
        evaluate(collect(PROBLEMS), {"bad": lambda samples: [1.0]})
    for value in (None, "half", {"a": 1}, ["a"] * 6):
        with pytest.raises(DataError, match=r"metric 'bad' returned .*: give one number for all samples"):
            evaluate(collect(PROBLEMS), {"bad": lambda samples, value=value: value})
    with pytest.raises(ConfigError, match="called 'reward'"):
        evaluate(collect(PROBLEMS), {"reward": lambda samples: 1.0})


def test_costs_are_measured_where_there_are_some() -> None:
    found = evaluate(collect(PROBLEMS).add({"cost": [0.0, 1.0, 2.0, None, 4.0, 5.0]}))
    assert found.metrics == {"reward": 0.4, "cost": 2.4, "abstained": 1.0}
    assert found.by_problem("cost") == [0.5, 2.0, 4.5]


def test_problem_without_any_reward_has_no_value() -> None:
    found = evaluate(collect(PROBLEMS).drop(["reward"]).add({"reward": [None] * 6}))
    assert math.isnan(found.metrics["reward"])
    assert found.by_problem("reward") == [None] * 3


def test_paired_bootstrap_agrees_with_the_normal_approximation() -> None:
    rng = random.Random(1)
    before = [float(rng.random() < 0.4) for _ in range(600)]
    after = [max(b, float(rng.random() < 0.3)) for b in before]
    found = paired_bootstrap(before, after, seed=3)
    differences = np.array(after) - np.array(before)
    error = 1.96 * differences.std(ddof=1) / math.sqrt(600)
    assert found.value == pytest.approx(differences.mean())
    assert found.low == pytest.approx(found.value - error, abs=0.006)
    assert found.high == pytest.approx(found.value + error, abs=0.006)
    assert found == paired_bootstrap(before, after, seed=3)


def test_paired_bootstrap_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        before = rng.random(80) < 0.5
        after = rng.random(80) < 0.6
        interval = paired_bootstrap(before.tolist(), after.tolist(), n=1000, seed=trial)
        hits += interval.low <= 0.1 <= interval.high
    assert 180 <= hits <= 199  # 95 % of 200 is 190


def test_paired_bootstrap_leaves_out_what_has_no_pair() -> None:
    assert paired_bootstrap([None, 0.0, 1.0], [1.0, 1.0, None]).value == 1.0
    with pytest.raises(DataError, match="one length"):
        paired_bootstrap([1.0], [])
    with pytest.raises(DataError, match="no problem has a value"):
        paired_bootstrap([None], [1.0])


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    # By hand and as in Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval(successes: int, total: int, low: float, high: float) -> None:
    found = binomial_interval(successes, total)
    assert found.value == successes / total
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_share_of_nothing_is_refused() -> None:
    for successes, total in [(0, 0), (3, 2), (-1, 2)]:
        with pytest.raises(DataError):
            binomial_interval(successes, total)


def test_completions_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = collect(PROBLEMS)
    path = tmp_path / "completions" / "step-0.parquet"
    save_table(path, samples.slice(0, 3).select(["id", "response", "score"]).table)
    read = Batch.from_parquet(path)
    assert read["id"] == samples["id"][:3]
    assert read.columns == ["id", "response"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        save_table(path, samples.table)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "were not saved" in caplog.text
    assert Batch.from_parquet(path) == read
    assert [p.name for p in path.parent.iterdir()] == ["step-0.parquet"]

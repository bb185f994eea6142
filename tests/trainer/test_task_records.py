"""The record of a step of several tasks, against that of their samples put together."""

from __future__ import annotations

import pytest

from verl.batch import Batch
from verl.dataflow.scores import sample_metrics, score_metrics, without_baselines
from verl.report.samples import kl_to_reference
from verl.trainer.evaluation import Evaluation, together
from verl.trainer.tasks import joined


def scored(task: str, rewards: list[float | None], lengths: list[int], log_prob: float, tool: int = 0) -> Batch:
    """Samples of which the first `tool` tokens were written by a tool; a reward of -9 is a greedy baseline's."""
    rows = [
        {
            "id": f"{task}.{row}",
            "group": task,
            "baseline": reward == -9,
            "response_tokens": [1] * length,
            "response_mask": [0] * tool + [1] * (length - tool),
            "rollout_log_probs": [0.0] * tool + [log_prob] * (length - tool),
            "ref_log_probs": [0.0] * tool + [log_prob / 2] * (length - tool),
            "finish": "length",
            "reward": reward,
        }
        for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    ]
    return Batch.from_rows(rows)


def record_of(samples: Batch) -> dict[str, float]:
    own = without_baselines(samples)
    return {**score_metrics(own), **sample_metrics(own), "kl": kl_to_reference(own)}


def test_means_of_several_tasks_are_those_of_all_their_samples() -> None:
    """Tasks with unequal numbers of rewards, and of tokens that the policy wrote: a mean of means weighs neither."""
    tasks = {
        "few": scored("few", [1.0, None, None, None], [30, 40, 20, 10], -3.0),
        "short": scored("short", [0.0, 0.0, 0.5, 0.0, -9], [2, 3, 2, 1, 50], -0.5),
        "tools": scored("tools", [0.25], [25], -1.0, tool=20),
    }
    record = joined({f"task/{name}/": record_of(samples) for name, samples in tasks.items()})
    together = record_of(Batch.concat(tasks.values()))
    assert together["reward"] == pytest.approx(1.75 / 6)
    for name in ("reward", "reward/mean", "response/length", "response/cut", "rollout/entropy", "kl"):
        assert record[name] == pytest.approx(together[name], rel=1e-6), name


def test_a_task_that_abstains_has_no_part_in_the_mean() -> None:
    tasks = {"none": scored("none", [None, None], [3, 3], -1.0), "one": scored("one", [0.5], [3], -1.0)}
    record = joined({f"task/{name}/": record_of(samples) for name, samples in tasks.items()})
    assert record["reward"] == 0.5


def test_problems_of_several_tasks_stay_apart_where_each_numbers_its_own() -> None:
    first, second = (scored("0", [reward, reward], [2, 2], -1.0) for reward in (1.0, 0.0))
    found = together(
        {
            n: Evaluation(s, {"reward": s["reward"]}, {"abstained": 0.0})
            for n, s in (("task/a/", first), ("task/b/", second))
        },
        {},
    )
    assert found.by_problem("reward") == [1.0, 0.0]
    assert len(set(found.samples["id"])) == 4

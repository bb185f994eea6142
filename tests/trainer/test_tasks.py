"""Several tasks on one actor: their data, their joint update, what resumes, and what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import verl
from tests.exact import norm_in_fp64
from tests.trainer.cases import PROMPTS, SHORT, low_bytes
from verl.batch import Batch
from verl.data.loader import PromptLoader
from verl.data.prompts import load_prompts
from verl.data.task_loader import TaskLoader, by_task
from verl.dataflow.graph import Node
from verl.errors import CheckpointError, ConfigError, DataError
from verl.trainer.task import Task
from verl.weights.shard import checksum

ROWS = [{"prompt": prompt, "task": name} for prompt in PROMPTS for name in ("low", "high")]


def high_bytes(texts: list[str]) -> list[float]:
    return [1 - value for value in low_bytes(texts)]


def tasks(**options: Any) -> list[Task]:
    low = Task("low", "grpo", {"reward": low_bytes}, n=4, sampling=SHORT, **options)
    return [low, Task("high", "ppo", {"reward": low_bytes}, n=2, sampling=SHORT)]


def trainer_of(path: Path, made: list[Task], lr: float = 1e-2, **options: Any) -> verl.Trainer:
    actor = verl.Actor(str(path), optim={"lr": lr}, sampling=SHORT)
    return verl.Trainer(actor, tasks=made, **{"log_dir": False, **options})


def loader(batch_size: int = 4, seed: int = 0, **shares: float) -> TaskLoader:
    sources = {name: PromptLoader(load_prompts([f"{name} {i}" for i in range(7)]), 1) for name in ("low", "high")}
    return TaskLoader(sources, shares or None, batch_size=batch_size, seed=seed)


def exact_actor(path: Path) -> verl.Actor:
    """In fp64 throughout, trained by plain gradient descent."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    norm_in_fp64(model)
    return verl.Actor(model, str(path), optim=torch.optim.SGD(model.parameters(), lr=1.0), sampling=SHORT)


def weights(of: verl.Actor) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.detach().clone() for shard in of.shards()}


def test_the_reference_is_read_at_the_temperature_of_each_task(tiny: Path) -> None:
    cold = {"temperature": 0.5, "max_new_tokens": 6, "ignore_eos": True}
    made = [
        Task(name, verl.algorithms.make_algorithm("grpo", kl_in="loss"), {"reward": low_bytes}, n=4, sampling=sampling)
        for name, sampling in (("cold", cold), ("usual", SHORT))
    ]
    record = trainer_of(tiny, made).step({"cold": PROMPTS, "usual": PROMPTS})
    # The policy is its own reference before the first update.
    assert record["task/cold/kl"] < 1e-6 and record["task/usual/kl"] < 1e-6


def test_one_step_is_the_weighted_sum_of_the_losses_of_all_tasks(tiny: Path) -> None:
    """Against steps of each task alone."""
    settings: dict[str, dict[str, Any]] = {
        "a": {"sampling": {"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True}},
        "b": {"sampling": {"temperature": 0.5, "max_new_tokens": 6, "ignore_eos": True}},
    }
    given = {"a": PROMPTS, "b": PROMPTS[:1]}

    def made(name: str, **options: Any) -> Task:
        return Task(name, "grpo", {"reward": low_bytes}, n=4, **settings[name], **options)

    together = exact_actor(tiny)
    before = weights(together)
    trainer = verl.Trainer(together, tasks=[made("a", loss_weight=1.5), made("b", loss_weight=0.5)], log_dir=False)
    record = trainer.step(given)
    assert record["task/a/samples"] == 8 and record["task/b/samples"] == 4 and record["updated"]
    alone = {}
    for name, prompts in given.items():
        single = exact_actor(tiny)
        verl.Trainer(single, tasks=[made(name)], log_dir=False).step(single.prompts(prompts, key=f"s0.{name}"))
        alone[name] = weights(single)
    after = weights(together)
    for name, start in before.items():
        expected = start + 0.75 * (alone["a"][name] - start) + 0.25 * (alone["b"][name] - start)
        assert torch.allclose(after[name], expected, rtol=1e-9, atol=1e-12), name
    assert max(float((after[name] - start).abs().max()) for name, start in before.items()) > 1e-3


def test_a_task_of_weight_0_is_sampled_and_not_learned(tiny: Path) -> None:
    made = [Task(name, "grpo", {"reward": low_bytes}, n=4, loss_weight=w) for name, w in (("a", 1.0), ("b", 0.0))]
    both, single = exact_actor(tiny), exact_actor(tiny)
    record = verl.Trainer(both, tasks=made, log_dir=False).step({"a": PROMPTS, "b": PROMPTS})
    assert record["task/b/samples"] == 8 and "task/b/loss" not in record
    task = Task("a", "grpo", {"reward": low_bytes}, n=4)
    verl.Trainer(single, tasks=[task], log_dir=False).step(single.prompts(PROMPTS, key="s0.a"))
    start = weights(exact_actor(tiny))
    for name, weight in weights(single).items():
        expected = start[name] + (weight - start[name]) / 2
        assert torch.allclose(weights(both)[name], expected, rtol=1e-9, atol=1e-12), name


@pytest.mark.slow
def test_tasks_with_algorithms_of_their_own_learn_and_a_control_does_not(tiny: Path) -> None:
    curves: dict[float, list[dict[str, Any]]] = {}
    for lr in (1e-2, 0.0):
        trainer = trainer_of(tiny, tasks(), lr)
        curves[lr] = [trainer.step(ROWS) for _ in range(40)]
    for name in ("low", "high"):
        first, last, control = (
            sum(record[f"task/{name}/reward"] for record in records) / len(records)
            for records in (curves[1e-2][:3], curves[1e-2][-5:], curves[0.0][-5:])
        )
        assert last > first + 0.2 and last > control + 0.2, name
    record = curves[1e-2][-1]
    for key in ("samples_per_s", "updates_per_s", "rewards_per_s", "tokens_per_s", "rejection_rate", "share", "loss"):
        assert f"task/low/{key}" in record and f"task/high/{key}" in record
    assert "task/high/loss/critic" in record and "task/low/loss/critic" not in record
    assert record["busy/actor"] > 0 and "busy/reward" in record


def test_the_rollout_of_one_task_goes_on_while_anothers_reward_is_waited_for(tiny: Path) -> None:
    scored = threading.Event()

    async def waits(texts: list[str]) -> list[float]:
        assert await asyncio.to_thread(scored.wait, 60), "the other task was not sampled meanwhile"
        return low_bytes(texts)

    def frees(texts: list[str]) -> list[float]:
        scored.set()
        return low_bytes(texts)

    made = [Task(name, "grpo", {"reward": fn}, n=2) for name, fn in (("a", waits), ("b", frees))]
    record = trainer_of(tiny, made).step({"a": PROMPTS, "b": PROMPTS})
    assert record["reward/abstained"] == 0


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_mixture_and_weights(tiny: Path, tmp_path: Path) -> None:
    def run(steps: int, directory: Path, resume: bool) -> tuple[verl.Trainer, list[dict[str, Any]]]:
        records: list[dict[str, Any]] = []
        trainer = trainer_of(tiny, tasks(), checkpoint_dir=directory, save_every=1)
        trainer.on_log_hook(lambda step, record: records.append(record))
        if resume:
            assert trainer.resume() == 2
        trainer.fit(loader(low=3.0, high=1.0), steps)
        return trainer, records

    straight, all_records = run(4, tmp_path / "straight", False)
    run(2, tmp_path / "cut", False)
    resumed, records = run(2, tmp_path / "cut", True)
    assert [sorted(record) for record in records] == [sorted(record) for record in all_records[2:]]
    for left, right in zip(records, all_records[2:], strict=True):
        for key in ("task/low/reward", "task/high/reward", "task/low/samples", "task/high/samples", "loss/actor"):
            assert left.get(key) == right.get(key), key
    assert checksum(resumed.actor.shards()) == checksum(straight.actor.shards())
    assert resumed.position == straight.position
    content = json.loads((tmp_path / "cut" / "step-000004" / "trainer.json").read_text())
    assert sorted(content["tasks"]) == ["high", "low"] and "critic-high" in content["roles"]
    other = trainer_of(tiny, [*tasks(), Task("more", "grpo", {"reward": low_bytes})])
    with pytest.raises(CheckpointError, match="task"):
        other.load_checkpoint(tmp_path / "cut" / "step-000004")


@pytest.mark.parametrize("metric", ["share", "samples_per_s"])
def test_a_metric_of_a_node_hides_none_of_the_mixtures(tiny: Path, metric: str) -> None:
    class Counts:
        def as_node(self, name: str) -> Node:
            return Node(name=name, run=lambda rows: (None, {metric: 1.0}), inputs=("response_tokens",))

    trainer = trainer_of(tiny, tasks(nodes={"counts": Counts()}))
    with pytest.raises(ConfigError, match=f"two metrics of a step are called 'task/low/{metric}'"):
        trainer.step(ROWS)


def test_evaluation_has_each_tasks_metrics_and_all_together(tiny: Path) -> None:
    trainer = trainer_of(tiny, [*tasks()[:1], Task("high", "grpo", {"reward": high_bytes}, n=2, sampling=SHORT)])
    own = {
        "length": lambda samples: [float(len(r)) for r in samples["response"]],
        "different": lambda samples: float(len(set(samples["id"]))),  # of all together, no mean of the tasks'
    }
    found = trainer.evaluate(load_prompts(ROWS), own)
    assert len(found.samples) == 4 and len(found.by_problem("reward")) == 4
    low, high = (found.metrics[f"task/{name}/reward"] for name in ("low", "high"))
    assert found.metrics["reward"] == pytest.approx((low + high) / 2)
    assert found.metrics["task/low/length"] > 0
    assert found.metrics["task/low/different"] == 2 and found.metrics["different"] == 4


def test_rows_are_told_apart_by_their_task() -> None:
    batch = Batch.from_rows([{"task": "a", "x": 1}, {"task": "b", "y": "z"}, {"task": "a", "x": 3}])
    split = by_task(batch, ["b", "a"])
    assert [*split] == ["b", "a"] and split["a"]["x"] == [1, 3] and "y" not in split["a"]
    for rows, words in (
        ([{"prompt": "p"}], "row 0 names no task"),
        ([{"task": "a"}, {"task": "bb"}], "row 1: there is no task 'bb': did you mean 'b'"),
        ({"c": ["p"]}, "the prompts: there is no task 'c'"),
        (["text"], "row 0 names no task"),
    ):
        with pytest.raises(DataError, match=words):
            by_task(rows, ["a", "b"])


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    st.integers(1, 16),
    st.integers(-5, 2**40),
)
def test_shares_are_kept_in_every_batch_and_on_average(shares: list[float], size: int, seed: int) -> None:
    sources: dict[str, Any] = {str(i): None for i in range(len(shares))}
    mixed = TaskLoader(sources, dict(zip(sources, shares, strict=True)), batch_size=size, seed=seed)
    totals = dict.fromkeys(sources, 0)
    for mixed.batches in range(400):
        for name, count in mixed.counts().items():
            expected = mixed.shares[name] * size
            assert expected - 1 < count < expected + 1 or count == pytest.approx(expected)
            totals[name] += count
    assert sum(totals.values()) == 400 * size
    for name, total in totals.items():
        assert abs(total / 400 - mixed.shares[name] * size) < 0.15  # six standard deviations of a draw of 0 or 1


def test_a_loader_goes_on_where_it_was_saved() -> None:
    straight = loader(low=2.0, high=1.0)
    batches = [next(straight) for _ in range(6)]
    cut, resumed = loader(low=2.0, high=1.0), loader(low=2.0, high=1.0)
    for _ in range(3):
        next(cut)
    resumed.load_state_dict(json.loads(json.dumps(cut.state_dict())))
    assert [{k: list(v.rows()) for k, v in next(resumed).items()} for _ in range(3)] == [
        {k: list(v.rows()) for k, v in batch.items()} for batch in batches[3:]
    ]
    with pytest.raises(DataError, match="of the tasks"):
        TaskLoader({"a": straight.sources["low"]}, batch_size=2).load_state_dict(cut.state_dict())


def test_shares_that_are_given_anew_leave_the_others_alone() -> None:
    mixed = TaskLoader(dict.fromkeys(("a", "b", "c")), {"a": 1, "b": 1, "c": 2}, batch_size=4)  # type: ignore[arg-type]
    mixed.set_shares({"a": 0.9, "b": 0.1})
    assert mixed.shares == pytest.approx({"a": 0.45, "b": 0.05, "c": 0.5})
    for shares, words in (({"a": -1.0}, "at least 0"), ({"d": 1.0}, "not there, 'd'"), ({"a": 0.0, "b": 0.0}, "all 0")):
        with pytest.raises(ConfigError, match=words):
            mixed.set_shares(shares)


def test_what_several_tasks_cannot_have_is_refused(tiny: Path) -> None:
    low, high = tasks()
    for made, options, words in (
        ([], {}, "at least one task"),
        ([low, low], {}, "two tasks have the name 'low'"),
        ([low, high], {"update_freq": 8}, "leave buffer"),
        (
            [Task("a", "grpo", {"reward": low_bytes}, share=0), Task("b", "grpo", {"reward": low_bytes}, share=0)],
            {},
            "all 0",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer_of(tiny, made, **options)
    for options, words in (
        ({"name": "a/b"}, "letters, digits"),
        ({"share": -1}, "share: must"),
        ({"loss_weight": float("nan")}, "loss_weight: must"),
    ):
        with pytest.raises(ConfigError, match=words):
            Task(**{"name": "a", "algorithm": "grpo", "sources": {"reward": low_bytes}, **options})
    trainer = trainer_of(tiny, [low, high])
    with pytest.raises(ConfigError, match="this trainer has several tasks"):
        _ = trainer.algorithm
    with pytest.raises(DataError, match="names no task"):
        trainer.step(PROMPTS)

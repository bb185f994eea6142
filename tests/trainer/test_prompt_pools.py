"""Pools of prompts in training: who tells them, what a resume goes on with, and what is shown."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from tests.trainer import runs
from tests.trainer.cases import SHORT
from tests.trainer.test_interleaved import made
from tests.trainer.test_interleaved import trainer_of as interleaved
from verl.config import build_config
from verl.data.loader import PromptLoader
from verl.data.prompts import load_prompts
from verl.data.task_loader import TaskLoader
from verl.errors import ConfigError, DataError
from verl.report.reading import curves_in, read_rows
from verl.run.build import check_settings
from verl.run.train import train

POOLS = {"solved": 0.05, "failed": 0.5, "decay": 0.5}


def thirds(responses: list[str], prompts: list[str]) -> list[float]:
    """By the number in a prompt: every third is solved whatever is written, and every third never is."""
    numbers = [int(prompt.split()[-1].strip("?")) for prompt in prompts]
    return [(1.0, 0.0, len({*text}) / 50)[n % 3] for n, text in zip(numbers, responses, strict=True)]


def numbers(rows: int = 12, batch: int = 3, **pools: Any) -> PromptLoader:
    prompts = load_prompts([f"Tell me about the number {i}" for i in range(rows)])
    return PromptLoader(prompts, batch, pools={**POOLS, **pools})


def trainer_of(path: Path, algorithm: str = "grpo", **options: Any) -> verl.Trainer:
    actor = verl.Actor(str(path), optim={"lr": 1e-3}, sampling=SHORT)
    return verl.Trainer(actor, reward_fn=thirds, algorithm=algorithm, n=2, log_dir=False, **options)


def test_fit_tells_the_pools_how_samples_scored_and_a_resume_goes_on_with_them(tiny: Path, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    straight = trainer_of(tiny)
    straight.on_log_hook(lambda step, record: records.append(record))
    straight.fit(loader := numbers(), 8)
    assert [sum(record[f"pools/{name}"] for name in ("solved", "failed", "none")) for record in records] == [12] * 8
    assert (records[3]["pools/solved"], records[3]["pools/failed"], records[3]["pools/none"]) == (4, 4, 4)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) > (2, 0)  # 24 of 12 were drawn, and others passed over
    first = trainer_of(tiny)
    first.fit(numbers(), 5)
    first.save_checkpoint(tmp_path / "five")
    second = trainer_of(tiny)
    second.load_checkpoint(tmp_path / "five")
    again: list[dict[str, Any]] = []
    second.on_log_hook(lambda step, record: again.append(record))
    second.fit(other := numbers(), 3)
    assert other.state_dict() == loader.state_dict()
    for record, expected in zip(again, records[5:], strict=True):
        assert all(record[name] == expected[name] for name in expected if not any(t in name for t in runs.TIMED))
    for one, two in zip(straight.actor.shards(), second.actor.shards(), strict=True):
        assert torch.equal(one.tensor, two.tensor)


def test_beside_daposs_filter_all_samples_of_a_prompt_count(tiny: Path) -> None:
    """What a filter samples anew has another name there; the prompt is the same."""
    seen: list[dict[str, list[Any]]] = []

    class Noting(PromptLoader):
        def note(self, scores: Any) -> None:
            seen.append(dict(scores))
            super().note(scores)

    prompts = load_prompts([f"Tell me about the number {i}" for i in range(6)])
    trainer_of(tiny, "dapo", max_resamples=2).fit(Noting(prompts, 6, pools=POOLS), 1)
    assert seen[0].keys() == {f"e0.{row}" for row in range(6)}
    assert [len(seen[0][f"e0.{row}"]) for row in range(6)] == [6, 6, 2, 6, 6, 2]


def ones(texts: list[str]) -> list[float]:
    return [1.0] * len(texts)


@pytest.mark.slow
def test_several_tasks_and_interleaved_ones(tiny: Path, tmp_path: Path) -> None:
    def run(steps: int, folder: str) -> tuple[TaskLoader, list[dict[str, Any]]]:
        records: list[dict[str, Any]] = []
        trainer = interleaved(tiny, made(ones), checkpoint_dir=tmp_path / folder, save_every=1)
        trainer.on_log_hook(lambda step, record: records.append(record))
        trainer.resume()
        loader = TaskLoader({"low": numbers(6), "high": numbers(6)}, batch_size=4)
        trainer.fit(loader, steps)
        return loader, records

    loader, records = run(6, "a")
    assert records[-1]["task/low/pools/solved"] == 6 and records[-1]["task/high/pools/solved"] == 0
    # What was on its way when a run ended is drawn again, by the pools of then.
    place = loader.state_dict()
    again, _ = run(0, "a")
    assert again.state_dict() == place


@pytest.mark.slow
def test_asynchronous_training_tells_them_too(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), optim={"lr": 1e-3}, sampling=SHORT)
    trainer = verl.AsyncTrainer(
        actor, reward_fn=thirds, algorithm="grpo", n=2, log_dir=False, batch_size=3, max_staleness=1, deadline=200
    )
    try:
        record = trainer.fit(numbers(), 4)
    finally:
        trainer.close()
    assert (record["pools/solved"], record["pools/failed"], record["pools/none"]) == (4, 4, 4)


@pytest.mark.slow
def test_a_run_shows_its_pools_and_goes_on_with_them(tiny: Path, tmp_path: Path) -> None:
    def settings(folder: str, **changes: Any) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        made = runs.settings(tmp_path / folder, tiny, **changes)
        (tmp_path / folder / "reward.py").write_text(inspect.getsource(thirds))
        return build_config(made)

    changes = {"data.pools": POOLS, "reward.path": None}
    paths = {name: f"{tmp_path / name}/reward.py:thirds" for name in ("whole", "cut")}
    train(settings("whole", **{**changes, "reward.path": paths["whole"], "trainer.total_steps": 8}))
    for steps in (4, 8):
        train(settings("cut", **{**changes, "reward.path": paths["cut"], "trainer.total_steps": steps}))
    whole, cut = (runs.rows(runs.run_dir(tmp_path / name)) for name in ("whole", "cut"))
    assert [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in cut if "reward" in row] == [
        {k: v for k, v in row.items() if not k.startswith("eval/")} for row in whole if "reward" in row
    ]
    curves = curves_in(read_rows(runs.run_dir(tmp_path / "whole") / "metrics.jsonl"), [])
    assert [value for _, value in curves["pools/solved"]][-1] == 4 and len(curves["pools/failed"]) == 8
    saved = json.loads((runs.run_dir(tmp_path / "cut") / "checkpoints" / "latest" / "trainer.json").read_text())
    assert saved["position"]["pooled"]["solved"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.name": "sft", "reward.path": None}, "data.pools would not be read: they go by the rewards"),
        ({"data.pools": {"solved_at": {"a": 1.0}}}, "data.pools has numbers of task 'a': known: main"),
        ({"data.pools": {"failed": 0.0}}, "data.pools.failed: must be at least 0.01"),
    ],
)
def test_what_pools_do_not_go_with_is_refused_before_anything_starts(
    changes: dict[str, Any], message: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(build_config(runs.settings(tmp_path, tiny, **{"data.pools": {}, **changes})))


def test_a_metric_that_samples_lack_is_named(tiny: Path) -> None:
    with pytest.raises(DataError, match=r"reward/accurate"):
        trainer_of(tiny).fit(numbers(metric="reward/accurate"), 1)

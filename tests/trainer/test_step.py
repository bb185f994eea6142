"""Everything that trains runs the two functions of `verl.trainer.step`; and what overlaps in them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import verl
from tests.trainer.cases import PROMPTS, SHORT, low_bytes
from tests.trainer.timeline_file import read_timeline
from verl.config import load_config
from verl.dataflow import advantages, experience, prompts, responses, updates
from verl.run.train import train
from verl.trainer import pipeline as pipeline_module
from verl.trainer import step, task
from verl.trainer import trainer as trainer_module
from verl.trainer.task import Task


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The two functions of a step as they are called, with the number of tasks that learn; they do what they do."""
    made: list[str] = []

    def draw(*args: Any, **options: Any) -> Any:
        made.append("draw")
        return step.draw(*args, **options)

    def learn(actor: Any, drawn: Any, run: Any) -> Any:
        made.append(f"learn {len(drawn)}")
        return step.learn(actor, drawn, run)

    for module in (trainer_module, task, pipeline_module):
        monkeypatch.setattr(module, "draw", draw, raising=False)
        monkeypatch.setattr(module, "learn", learn, raising=False)
    return made


def test_a_step_is_read_on_two_screens() -> None:
    assert len(inspect.getsource(step).splitlines()) <= 130


def test_a_trainer_steps_through_them(tiny: Path, calls: list[str]) -> None:
    trainer = verl.Trainer(verl.Actor(str(tiny), sampling=SHORT), reward_fn=low_bytes, n=2, log_dir=False)
    records = [trainer.step(PROMPTS) for _ in range(2)]
    assert calls == ["draw", "learn 1"] * 2
    assert {type(value) for record in records for value in record.values()} <= {float, int, bool, str}


def test_several_tasks_step_through_them(tiny: Path, calls: list[str]) -> None:
    tasks = [Task(name, "grpo", {"reward": low_bytes}, n=2) for name in ("a", "b")]
    trainer = verl.Trainer(verl.Actor(str(tiny), sampling=SHORT), tasks=tasks, log_dir=False)
    record = trainer.step({"a": PROMPTS, "b": PROMPTS})
    assert {type(value) for value in record.values()} <= {float, int, bool, str}
    assert calls == ["draw", "draw", "learn 2"], "each task draws its samples; one update is of both"


def test_a_pipeline_steps_through_them(tiny: Path, calls: list[str]) -> None:
    actor = verl.Actor(str(tiny), sampling=SHORT)
    pipeline = verl.RLDataPipeline().add_stage("rollout", actor).add_stage("reward", low_bytes)
    pipeline.add_stage("update", verl.Updater("grpo", actor=actor)).run(PROMPTS)
    assert calls == ["draw", "learn 1"]


def test_an_expression_steps_through_them(tiny: Path, calls: list[str]) -> None:
    actor = verl.Actor(str(tiny), sampling=SHORT, algorithm="grpo")
    flow = verl.Controller().broadcast(prompts)
    flow = flow.scatter(responses, worker_group=verl.WorkerGroup(actor, verl.Reward(low_bytes))).gather(experience)
    flow.all_reduce(advantages).scatter(updates, worker_group=verl.WorkerGroup(actor)).sync().run(PROMPTS)
    assert calls == ["draw", "learn 1"]


def test_verl_train_steps_through_them(tiny: Path, tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "reward.py").write_text("def low(texts):\n    return [float(len(text) % 3) for text in texts]\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n' * 4)
    recipe = {
        "actor_rollout_ref": {"model": {"path": str(tiny)}, "rollout": {"n": 4, "max_new_tokens": 4}},
        "data": {"train": str(tmp_path / "prompts.jsonl"), "batch_size": 2},
        "reward": {"path": f"{tmp_path / 'reward.py'}:low"},
        "trainer": {"total_steps": 1, "output_dir": str(tmp_path / "runs"), "loggers": []},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(load_config(tmp_path / "recipe.yaml", []))
    assert calls == ["draw", "learn 1"]


@pytest.mark.slow
def test_asynchronous_training_steps_through_them(tiny: Path, calls: list[str]) -> None:
    trainer = verl.AsyncTrainer(
        verl.Actor(str(tiny), sampling=SHORT), reward_fn=low_bytes, n=2, batch_size=2, log_dir=False
    )
    try:
        trainer.fit(iter([PROMPTS]), 1)
    finally:
        trainer.close()
    assert calls == ["draw"] * 3 + ["learn 1"], "its workers have sampled; each group is scored once it is here"


class Unhurried(verl.Actor):
    """Its rollout and its reference take a while."""

    def rollout(self, *args: Any, **options: Any) -> Iterator[verl.Batch]:
        for samples in super().rollout(*args, **options):
            yield samples
            time.sleep(0.1)

    def compute_ref_log_probs(self, sequences: verl.Batch) -> verl.Batch:
        time.sleep(0.3)
        return super().compute_ref_log_probs(sequences)


def slowly(texts: list[str]) -> list[float]:
    time.sleep(0.4)
    return low_bytes(texts)


def test_rewards_overlap_with_the_rollout_and_the_reference(tiny: Path, tmp_path: Path) -> None:
    sampling = verl.SamplingParams(max_new_tokens=12)
    file = tmp_path / "timeline.json"
    trainer = verl.Trainer(
        Unhurried(str(tiny), sampling=sampling),
        reward_fn=slowly,
        algorithm="grpo",
        kl_in="loss",
        n=2,
        log_dir=False,
        timeline=file,
    )
    trainer.step([f"prompt {number}" for number in range(6)])
    when: dict[str, tuple[float, float]] = {}
    for span in read_timeline(file):
        start, end = when.get(span.node, (span.start, span.start))
        when[span.node] = min(start, span.start), max(end, span.start + span.seconds)
    assert when["reward"][0] < when["rollout"][1], "the first groups are scored while others are sampled"
    assert when["reference"][0] < when["reward"][1], "the reference does not wait for rewards"
    assert when["rollout"][1] <= when["reference"][0] + 0.01, "one model at a time"
    assert max(end for _, end in (when["reward"], when["reference"])) <= when["prepare"][0] + 0.01, "the barrier"

"""A script and a file of several tasks, as people write them."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import verl
from tests.trainer.cases import SHORT, low_bytes
from verl.config import load_tasks
from verl.data import get_dataloader
from verl.errors import ConfigError, DataError
from verl.models import get_actor_critic
from verl.report.progress import ConsoleSink
from verl.report.sinks import Logger
from verl.trainer.task import Task
from verl.trainer.tasks import task_of

REWARD = """
def low_bytes(texts):
    return [sum(ord(c) < 100 for c in text) / max(len(text), 1) for text in texts]
"""
ROWS = [{"prompt": f"{task} {i}", "task": task, "reference": "print(1)"} for i in range(6) for task in ("chat", "code")]


def write(tmp_path: Path, tasks: str) -> tuple[Path, Path]:
    (tmp_path / "rewards.py").write_text(REWARD)
    data, file = tmp_path / "mixed.jsonl", tmp_path / "tasks.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file.write_text(textwrap.dedent(tasks).replace("HERE", str(tmp_path)))
    return data, file


TASKS = """
    tasks:
      - name: chat
        type: ppo
        reward_model: HERE/rewards.py:low_bytes
        reward_config: {timeout: 20}
        sampling: {max_new_tokens: 6, ignore_eos: true}
      - name: code
        type: grpo
        n: 2
        options: {kl_in: loss, kl_coef: 0.01}
        reward_model: code_evaluator
        reward_config: {timeout: 5}
        sampling: {max_new_tokens: 6}
    """


@pytest.mark.slow
def test_a_script_of_two_tasks_trains_one_actor(tiny: Path, tmp_path: Path) -> None:
    data, file = write(tmp_path, TASKS)
    actor, critic = get_actor_critic(model_name=str(tiny), use_vllm=False, device_map="auto")
    dataloader = verl.data.get_dataloader(
        dataset_path=str(data), task_weights={"chat": 0.75, "code": 0.25}, batch_size=4
    )
    trainer = verl.Trainer(actor=actor, critic=critic, dataloader=dataloader, config_path=str(file), log_dir=False)
    out = io.StringIO()
    records: list[dict[str, Any]] = []
    trainer.use_logger(Logger([ConsoleSink(console=Console(file=out, width=300, highlight=False))]))
    trainer.on_log_hook(lambda step, record: records.append(record))
    trainer.train()
    assert trainer.steps == len(dataloader) == 3 and trainer.tasks["chat"].critic is critic
    assert sum(record.get("task/chat/samples", 0) for record in records) == 9
    assert sum(record.get("task/code/samples", 0) for record in records) == 2 * 3
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("step ") for line in lines) == 3
    chat = next(line for line in lines if line.startswith("  chat"))
    for word in ("samples/s", "updates/s", "rewards/s", "tokens/s", "rejected", "share 75%"):
        assert word in chat


def test_each_task_with_a_critic_has_its_own(tiny: Path) -> None:
    made = [Task(name, "ppo", {"reward": low_bytes}, sampling=SHORT) for name in ("a", "b")]
    actor, critic = get_actor_critic(str(tiny))
    trainer = verl.Trainer(actor, critic, tasks=made, log_dir=False)
    first, second = (trainer.tasks[name].critic for name in ("a", "b"))
    assert first is critic and second is not None and second is not critic
    before = {id(c): torch.cat([s.tensor.flatten() for s in c.shards()]) for c in (first, second)}
    assert torch.equal(before[id(first)], before[id(second)])
    trainer.step({"b": ["one", "two"]})
    assert torch.equal(before[id(first)], torch.cat([s.tensor.flatten() for s in first.shards()]))
    assert not torch.equal(before[id(second)], torch.cat([s.tensor.flatten() for s in second.shards()]))


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ("tasks: [{name: a}]", r"tasks\.0\.type: is missing \(tasks.yaml line 1\)"),
        (
            "tasks:\n  - {name: a, type: ppo, rewardmodel: x}",
            r"tasks\.0\.rewardmodel: unknown key.*reward_model.*line 2",
        ),
        ("tasks: [{name: a b, type: ppo}]", "letters, digits"),
        ("tasks: [{name: a, type: pppo, reward_model: task}]", "task 'a': no algorithm is called 'pppo'"),
        ("tasks: [{name: a, type: ppo}]", "task 'a': algorithm 'ppo' needs a reward"),
        ("tasks: [{name: a, type: ppo, reward_config: {timeout: 3}}]", "it needs reward_model"),
        ("tasks: [{name: a, type: ppo, reward_model: task, reward_config: {tmeout: 3}}]", "no option 'tmeout'"),
        ("tasks: []\nother: 1", "other: unknown key"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, tasks: str, words: str) -> None:
    _, file = write(tmp_path, tasks)
    with pytest.raises(ConfigError, match=words):
        [task_of(config) for config in load_tasks(file)]


class Stream:
    """Data without a length, read again for each pass."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def test_streams_are_split_by_task_and_go_on_at_the_exact_row() -> None:
    def loader() -> Any:
        return get_dataloader(Stream(), {"chat": 0.5, "code": 0.5}, batch_size=3)

    straight = loader()
    batches = [next(straight) for _ in range(8)]
    seen = [prompt for batch in batches for prompt in (batch["chat"]["prompt"] if "chat" in batch else [])]
    assert seen == [f"chat {i % 6}" for i in range(len(seen))] and len(seen) > 6
    cut, resumed = loader(), loader()
    for _ in range(5):
        next(cut)
    resumed.load_state_dict(json.loads(json.dumps(cut.state_dict())))
    for batch in batches[5:]:
        assert {name: rows["id"] for name, rows in next(resumed).items()} == {n: r["id"] for n, r in batch.items()}
    with pytest.raises(ConfigError, match="give task_weights"):
        get_dataloader(Stream())
    with pytest.raises(DataError, match="there is no task 'code"):
        next(get_dataloader(Stream(), {"chat": 1.0}))


def test_rows_without_a_task_and_shares_of_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names no task"):
        get_dataloader([{"prompt": "a"}], {"chat": 1.0})
    with pytest.raises(ConfigError, match="a share is given to a task that is not there, 'code'"):
        get_dataloader({"chat": ["a", "b"]}, {"chat": 1.0, "code": 1.0})
    mixed = get_dataloader(ROWS[:9], batch_size=4)
    assert mixed.shares == pytest.approx({"chat": 5 / 9, "code": 4 / 9})


@pytest.mark.slow
def test_every_kind_of_task_in_one_file(tiny: Path, tmp_path: Path) -> None:
    """A reward model, likeness to a reference and a model as a guard, over one actor."""
    model = tmp_path / "model"
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(model)
    _, file = write(
        tmp_path,
        f"""
        tasks:
          - name: chat
            type: ppo
            reward_model: rm_hf
            reward_config: {{model_name: {model}, device: cpu}}
          - name: code
            type: reward_conditioned
            reward_model: code_evaluator
            reward_config: {{evaluator: codebleu, timeout: 20}}
          - name: facts
            type: constrained_decoding
            constraint_model: fact_checker
            constraint_config: {{model_name: {tiny}, max_new_tokens: 4}}
        """,
    )
    data = tmp_path / "three.jsonl"
    rows = [{**row, "task": ("chat", "code", "facts")[number % 3]} for number, row in enumerate(ROWS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    actor, critic = get_actor_critic(model_name=str(tiny), use_vllm=False, device_map={"actor": "cpu:0"})
    actor.sampling = verl.SamplingParams(max_new_tokens=8)
    dataloader = get_dataloader(
        dataset_path=str(data), task_weights={"chat": 0.4, "code": 0.3, "facts": 0.3}, batch_size=8
    )
    trainer = verl.Trainer(actor=actor, critic=critic, dataloader=dataloader, config_path=str(file), log_dir=False)
    records: list[dict[str, Any]] = []
    trainer.on_log_hook(lambda step, record: records.append(record))
    trainer.train()
    assert trainer.steps == len(dataloader) > 0
    for name in ("chat", "code"):
        assert any(record.get(f"task/{name}/reward/mean") is not None for record in records)
    assert any("task/facts/constraint/accepted" in record for record in records)
    assert all(f"task/{name}/rejection_rate" in record for record in records for name in ("chat", "code", "facts"))

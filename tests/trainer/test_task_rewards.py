"""Every kind of reward from the file of a task, trained with for a step. (Reward models, likeness to a reference and
guard models: test_task_file.py.)"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.conftest import Plain
from tests.trainer.cases import SHORT, collected
from verl.config import load_tasks
from verl.data.prompts import load_prompts
from verl.errors import ConfigError
from verl.trainer.tasks import task_of

FUNCTIONS = """
def low_bytes(texts):
    return [sum(ord(c) < 100 for c in text) / max(len(text), 1) for text in texts]

def length(texts):
    return [float(len(text)) for text in texts]
"""
NEEDS = {"math": "math_verify", "problems": "reasoning_gym"}


@verl.register_reward("test_named")
def named(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def kinds(tmp_path: Path, server: Plain) -> dict[str, dict[str, Any]]:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    own = f"{tmp_path / 'rewards.py'}"
    return {
        "math": {"reward_model": "math", "reward_config": {"timeout": 20}},
        "problems": {"reward_model": "reasoning_gym", "reward_config": {"answer": "last_number"}},
        "tests": {"reward_model": "code_evaluator", "reward_config": {"timeout": 10, "partial": True}},
        "service": {"reward_model": f"{server.url}/score", "reward_config": {"timeout": 20, "retries": 1}},
        "services": {"reward_model": [f"{server.url}/score", f"{server.url}/score"]},
        "judge": {
            "reward_model": server.url,
            "reward_config": {"template": "{prompt}|{response}", "timeout": 20, "scale": [0, 100]},
        },
        "sum": {
            "reward_model": {
                "low": {"source": f"{own}:low_bytes", "weight": 2},
                "brief": [f"{own}:length", -0.1],
                "judged": {"source": server.url, "template": "{response}", "scale": [0, 100], "weight": 0.5},
            },
        },
        "own": {"reward_model": "test_named"},
    }


ROWS = [{"prompt": f"What is {i}?", "answer": str(i), "tests": ["assert f() == 1", "assert True"]} for i in range(2)]


def write(tmp_path: Path, kind: str, given: dict[str, Any]) -> Path:
    task = {"name": kind, "type": "grpo", "n": 2, "sampling": {"max_new_tokens": 6, "ignore_eos": True}, **given}
    file = tmp_path / "tasks.yaml"
    file.write_text(json.dumps({"tasks": [task]}))
    return file


@pytest.mark.quick("judge", "sum", "service", "own")
@pytest.mark.parametrize("kind", ["math", "problems", "tests", "service", "services", "judge", "sum", "own"])
def test_a_reward_of_each_kind_is_trained_with(
    tiny: Path, tmp_path: Path, serve: Callable[..., Plain], kind: str
) -> None:
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        pytest.skip(f"needs {NEEDS[kind]}")
    file = write(tmp_path, kind, kinds(tmp_path, serve(1))[kind])
    trainer = verl.Trainer(verl.Actor(str(tiny), sampling=SHORT), config_path=file, log_dir=False)
    try:
        given = {"task": "chain_sum", "size": 2} if kind == "problems" else ROWS
        prompts = load_prompts(given).batch
        samples = collected(trainer, prompts).rows
        assert len(samples) == 4 and None not in samples["reward"]
        if kind == "sum":
            parts = [samples[f"reward/{name}"] for name in ("low", "brief", "judged")]
            wanted = [2 * low - 0.1 * brief + 0.5 * judged for low, brief, judged in zip(*parts, strict=True)]
            assert samples["reward"] == pytest.approx(wanted, abs=1e-5)
        record = trainer.step(prompts)
        assert record["reward/mean"] is not None and not record.get("reward/failures/count")
    finally:
        trainer.close()


def test_what_is_wrong_in_a_sum_is_told(tmp_path: Path) -> None:
    file = write(tmp_path, "sum", {"reward_model": {"one": {"source": "mathh"}}})
    with pytest.raises(ConfigError, match="task 'sum': no reward is called 'mathh': did you mean 'math'"):
        [task_of(config) for config in load_tasks(file)]
    file = write(tmp_path, "sum", {"reward_model": {"one": "task"}, "reward_config": {"weights": {"two": 1}}})
    with pytest.raises(ConfigError, match=r"weights: there is no reward 'two'"):
        [task_of(config) for config in load_tasks(file)]

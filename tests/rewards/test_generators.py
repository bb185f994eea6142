"""Random numbers in rewards: each call begins from its rows, and nothing else's numbers change."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import verl
from tests.trainer.cases import SHORT
from verl.batch import Batch
from verl.rewards.calls import TURN
from verl.rewards.functions import FunctionReward
from verl.rewards.make import make_reward
from verl.rewards.source import run_reward
from verl.roles.reward import Reward

pytestmark = pytest.mark.reward_processes
ROWS = Batch.from_rows(
    [
        {"id": f"s0.{group}/{n}", "group": f"s0.{group}", "prompt": "p", "response": f"{group}{n}"}
        for group in range(3)
        for n in range(2)
    ]
)


def draw() -> float:
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


def by_group(texts: list[str]) -> list[float]:
    return [draw() for _ in texts]


def by_sample(solution_str: str) -> float:
    return draw()


def state() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("function", [by_group, by_sample])
@pytest.mark.parametrize("process", [True, False])
def test_a_call_draws_by_its_rows_and_leaves_the_generators_alone(function: Callable[..., Any], process: bool) -> None:
    first, second = Reward(function, process=process), Reward(function, process=process)
    before = state()
    rewards = first.get_reward(ROWS)["reward"]
    assert len({*rewards}) == len(ROWS)
    assert first.get_reward(ROWS)["reward"] == rewards  # whatever was drawn before
    draw()
    order = [4, 5, 0, 1, 2, 3]
    assert second.get_reward(ROWS.take(order))["reward"] == [rewards[row] for row in order]
    second.set_seed(1)
    assert not {*second.get_reward(ROWS)["reward"]} & {*rewards}
    draw()
    assert state() != before
    before = state()
    first.get_reward(ROWS)
    assert state() == before
    first.close(), second.close()


def test_a_late_call_leaves_the_generators_alone() -> None:
    go_on = threading.Event()

    def hangs(texts: list[str]) -> list[float]:
        numbers = by_group(texts)
        go_on.wait(30)
        return numbers

    before = state()
    reward = Reward(make_reward(hangs, process=False, timeout=0.3))
    assert reward.get_reward(ROWS)["reward"] == [None] * len(ROWS)
    assert state() == before
    other = Reward(by_group, process=False)
    rewards = other.get_reward(ROWS)["reward"]
    go_on.set()
    assert other.get_reward(ROWS)["reward"] == rewards and state() == before
    reward.close(), other.close()


def test_process_thread_and_halves_agree() -> None:
    def fails(texts: list[str]) -> list[float]:
        numbers = [draw() for _ in texts]
        if "10" in texts:
            raise ValueError
        return numbers

    one, other = (Reward(fails, process=process) for process in (True, False))
    rewards = one.get_reward(ROWS)["reward"]
    assert rewards.count(None) == 1 and other.get_reward(ROWS)["reward"] == rewards
    one.close()


@pytest.mark.slow
def test_workers_agree_however_many() -> None:
    rewards = [Reward(by_sample, workers=workers) for workers in (1, 3)] + [Reward(by_sample)]
    first, second, third = (reward.get_reward(ROWS)["reward"] for reward in rewards)
    assert first == second == third
    for reward in rewards:
        reward.close()


def test_functions_in_threads_do_not_draw_each_others_numbers() -> None:
    def slowly(texts: list[str]) -> list[float]:
        numbers = []
        for _ in texts:
            numbers.append(draw())
            for _ in range(2000):
                random.random()
        return numbers

    parts = {name: FunctionReward(slowly, name=name, process=False) for name in "ab"}
    alone = run_reward(parts["a"], ROWS).reward
    both = run_reward(make_reward(parts), ROWS)
    assert both.components["a"] == both.components["b"] == alone


def test_a_function_that_asks_another_reward_does_not_wait_for_itself() -> None:
    inner = Reward(by_group, process=False)

    def outer(texts: list[str]) -> list[float]:
        scores: list[float] = inner.get_reward(texts)["reward"]
        return [score + draw() for score in scores]

    reward = Reward(outer, process=False, timeout=20.0)
    assert reward.get_reward(ROWS)["reward"].count(None) == 0
    assert TURN._free == 1


def unseeded(texts: list[str]) -> list[float]:
    return [random.Random().random() for _ in texts]


def unseeded_numpy(texts: list[str]) -> list[float]:
    return [float(np.random.default_rng().random()) for _ in texts]


async def awaits(texts: list[str]) -> list[float]:
    await asyncio.sleep(0.01)
    return [random.random() for _ in texts]


def seeded(texts: list[str]) -> list[float]:
    with tempfile.TemporaryFile():  # whose name is drawn by a generator of Python's own
        return [random.Random(3).random() + float(np.random.default_rng(3).random()) for _ in texts]


async def draws_nothing(texts: list[str]) -> list[float]:
    await asyncio.sleep(0.01)
    return [random.Random(3).random() for _ in texts]


@pytest.mark.parametrize("process", [True, False])
@pytest.mark.parametrize(
    ("function", "note"),
    [
        (unseeded, "makes a random generator without a seed at test_generators.py"),
        (unseeded_numpy, "makes a random generator without a seed at test_generators.py"),
        (awaits, "draws from the global random generators, which are seeded for plain functions alone"),
        (seeded, None),
        (draws_nothing, None),
    ],
)
def test_what_a_seed_does_not_reach_is_named_once(
    function: Callable[..., Any], note: str | None, process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "verl")
    reward = Reward(function, process=process)
    for _ in range(3):
        reward.get_reward(ROWS)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (note is not None), said
    assert note is None or f"reward {function.__name__} {note}" in said[0]
    reward.close()


@pytest.mark.parametrize("process", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_goes_on_has_the_rewards_of_one_that_was_not_cut(tiny: Path, tmp_path: Path, process: bool) -> None:
    prompts = [{"prompt": text} for text in ("a", "b", "c", "d")]

    def rewards(folder: str, *parts: int) -> list[Any]:
        numbers: list[Any] = []
        for steps in parts:
            trainer = verl.Trainer(
                verl.Actor(str(tiny), optim={"lr": 1e-3}, seed=5, sampling=SHORT),
                reward=verl.Reward(by_group, process=process),
                algorithm="grpo",
                n=2,
                log_dir=tmp_path / folder,
                checkpoint_dir=tmp_path / folder / "checkpoints",
                save_every=2,
            )
            if numbers:
                trainer.resume()
            trainer.on_log_hook(lambda step, record: numbers.append((step, record.get("reward"), record.get("kl"))))
            trainer.fit(prompts, steps, batch_size=2)
            trainer.close()
        return [row for row in numbers if row[1] is not None]

    whole = rewards("whole", 4)
    assert len({reward for _, reward, _ in whole}) == 4
    assert rewards("again", 4) == whole
    assert rewards("cut", 2, 2) == whole

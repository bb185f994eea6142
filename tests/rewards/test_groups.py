"""A function of several samples gets those of one prompt as soon as they are finished, or all of a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.conftest import Plain
from tests.dataflow.test_groups import run_graph
from tests.trainer.cases import PROMPTS, SHORT, collected
from verl.batch import Batch
from verl.dataflow.graph import Graph, Node
from verl.errors import ConfigError
from verl.rewards.calls import Slots
from verl.rewards.make import make_reward

GROUPS = Batch.from_columns({"group": ["a", "b", "c"], "prompt": ["p", "q", "r"]})


def ids(prompts: Batch) -> list[list[str]]:
    return [[f"{group}/{k}" for k in range(2)] for group in prompts["group"]]


def rollout(between: Callable[[], Any]) -> Node:
    """Finishes the second group, does `between`, and finishes the others."""

    def generate(prompts: Batch) -> Iterator[Batch]:
        for number, group in enumerate("bca"):
            if number == 1:
                between()
            yield Batch.from_rows([{"id": f"{group}/{k}", "response": group * (k + 1)} for k in range(2)])

    return Node(name="rollout", run=generate, kind="source", outputs=("id", "response"), samples=ids)


class Recorder:
    """What a reward was called with, in order; the score is the place of a text among those of its call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.first = threading.Event()

    def record(self, texts: list[str]) -> list[float]:
        self.calls.append(texts)
        self.first.set()
        return [float(sorted(texts).index(text)) for text in texts]


@pytest.mark.parametrize("form", ["texts", "pairs", "trl", "async"])
def test_a_finished_group_is_scored_while_others_are_sampled(form: str) -> None:
    seen = Recorder()

    async def later(texts: list[str]) -> list[float]:
        return seen.record(texts)

    functions: dict[str, Callable[..., Any]] = {
        "texts": lambda texts: seen.record(texts),
        "pairs": lambda responses, prompts: seen.record(responses),
        "trl": lambda prompts, completions, **columns: seen.record(completions),
        "async": later,
    }
    events: list[str] = []

    def between() -> None:
        events.append("scored" if seen.first.wait(60) else "waited for in vain")

    node = verl.RewardNode(functions[form]).as_node("reward")
    result = run_graph(Graph([rollout(between), node]), GROUPS)
    assert events == ["scored"]
    assert seen.calls[0] == ["b", "bb"] and sorted(seen.calls) == [["a", "aa"], ["b", "bb"], ["c", "cc"]]
    assert result.batch["reward"] == [0.0, 1.0] * 3


def relative(seen: Recorder, how: str) -> verl.Reward:
    def place(texts: list[str]) -> list[float]:
        return seen.record(texts)

    if how == "attribute":
        place.whole_batch = True  # type: ignore[attr-defined]
        return verl.Reward(place)
    return verl.Reward(place, whole_batch=True)


@pytest.mark.parametrize("how", ["attribute", "option"])
def test_a_function_of_the_whole_step_is_called_once_at_its_end(how: str) -> None:
    seen = Recorder()
    early: list[bool] = []
    node = verl.RewardNode(relative(seen, how)).as_node("reward")
    result = run_graph(Graph([rollout(lambda: early.append(seen.first.is_set())), node]), GROUPS)
    assert early == [False] and seen.calls == [["a", "aa", "b", "bb", "c", "cc"]]
    assert result.batch["reward"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_the_numbers_are_the_same_however_a_step_is_scored() -> None:
    rows = Batch.from_columns({"group": ["a", "b", "a", "b"], "response": ["1", "22", "333", "4444"]})
    plain, smooth, mixed = (
        verl.Reward(Recorder().record),
        verl.Reward(Recorder().record, smoothing=0.0),
        verl.Reward({"one": Recorder().record, "all": (relative(Recorder(), "option"), 0.0)}),
    )
    for reward in (plain, smooth, mixed):
        assert reward.get_reward(rows)["reward"] == [0.0, 0.0, 1.0, 1.0]
    assert (plain.source.whole_batch, smooth.source.whole_batch, mixed.source.whole_batch) == (False, True, True)
    assert plain.get_reward(["b", "a"])["reward"] == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["plain", "smoothed"])
def test_the_trainer_scores_as_a_plain_loop_does(tiny: Path, kind: str) -> None:
    options = {"smoothing": 0.0} if kind == "smoothed" else {}
    reward = verl.Reward(Recorder().record, **options)
    trainer = verl.Trainer(verl.Actor(str(tiny), sampling=SHORT), reward=reward, log_dir=False)
    samples = collected(trainer, PROMPTS).rows
    assert max(samples["reward"]) < len(samples) / len(PROMPTS)
    again = reward.get_reward(samples.drop(["reward", "abstain_reason"]))
    assert again["reward"] == samples["reward"]


def test_services_and_judges_are_asked_by_group(serve: Callable[..., Plain]) -> None:
    url = serve(1).url
    for reward in (make_reward(f"{url}/score"), make_reward(url, template="{response}")):
        assert not reward.whole_batch
        result = run_graph(Graph([rollout(lambda: None), verl.RewardNode(reward).as_node("reward")]), GROUPS)
        assert result.batch["reward"] == [1.0, 2.0] * 3


def test_what_cannot_be_one_call_is_refused() -> None:
    def by_sample(solution_str: str) -> float:
        return 0.0

    for function, options in ((by_sample, {}), (lambda texts: [0.0], {"batch_size": 2})):
        with pytest.raises(ConfigError, match="whole_batch is one call on all samples"):
            make_reward(function, whole_batch=True, **options)


def test_slots_are_taken_in_turn_on_any_loop_and_never_lost() -> None:
    slots, inside, most, order = Slots(2), [0], [0], []

    async def one(number: int, leave: asyncio.Event) -> None:
        async with slots:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            order.append(number)
            try:
                await leave.wait()
            finally:
                inside[0] -= 1

    async def many() -> None:
        leave = asyncio.Event()
        tasks = [asyncio.create_task(one(number, leave)) for number in range(8)]
        while inside[0] < 2:
            await asyncio.sleep(0)
        tasks[0].cancel()  # has a slot
        tasks[3].cancel()  # waits for one
        await asyncio.gather(tasks[0], tasks[3], return_exceptions=True)
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    for _ in range(2):
        order.clear()
        asyncio.run(many())
        assert order == [0, 1, 2, 4, 5, 6, 7] and most == [2] and inside == [0]

"""A sample that makes the call of its group fail costs itself alone."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.dataflow.test_groups import run_graph
from verl.batch import Batch
from verl.dataflow.graph import Graph, Node
from verl.report.metrics import Metric
from verl.rewards.functions import isolate
from verl.rewards.make import make_reward
from verl.rewards.scores import Score, failure
from verl.rewards.source import run_reward
from verl.roles.reward import Reward


def texts(*responses: str, size: int = 8) -> Batch:
    return Batch.from_rows(
        [{"id": str(i), "group": str(i // size), "prompt": "p", "response": r} for i, r in enumerate(responses)]
    )


@pytest.mark.parametrize("count", range(2, 18))
def test_calls_are_at_most_twice_the_logarithm_for_each_bad_sample(count: int) -> None:
    for bad in [{i} for i in range(count)] + [{0, count - 1}, {*range(0, count, 3)}, {*range(count)}]:
        calls: list[list[int]] = []

        async def call(part: Any, bad: set[int] = bad, calls: list[list[int]] = calls) -> list[Score]:
            calls.append([*part])
            return [failure("raised ValueError")] if bad & {*part} else [Score(float(len(part)))] * len(part)

        scores = asyncio.run(isolate(call, count, failure("raised ValueError")))
        left = float(count - len(bad))
        assert [score.value for score in scores] == [None if i in bad else left for i in range(count)], bad
        assert len(calls) <= 2 * math.log2(count) * len(bad)


def scores_of(texts: list[str]) -> list[float]:
    if "bad" in texts:
        raise ValueError("cannot read bad")
    return [float(len(text)) for text in texts]


def drops(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts if text != "bad"]


def returns_nothing(texts: list[str]) -> list[float] | None:
    return None if "bad" in texts else scores_of(texts)


async def later(texts: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return scores_of(texts)


def of_trl(completions: list[str], length: list[int], **columns: Any) -> list[float | None]:
    scores_of(completions)
    return [None if text == "none" else float(n) for text, n in zip(completions, length, strict=True)]


def exits(texts: list[str]) -> list[float]:
    if "bad" in texts:
        raise SystemExit(3)
    return scores_of(texts)


@pytest.mark.parametrize("function", [scores_of, drops, returns_nothing, later, exits, of_trl])
def test_one_in_ten_costs_itself_in_every_form(function: Callable[..., Any]) -> None:
    responses = ["bad" if i % 10 == 3 else "none" if i == 5 else "x" * (i % 5) for i in range(40)]
    rows = texts(*responses).add({"length": [len(text) for text in responses]})
    result = run_reward(make_reward(function), rows)
    missing = {"bad", "none"} if function is of_trl else {"bad"}
    assert result.reward == [None if text in missing else float(len(text)) for text in responses]
    assert result.counts == {"failures": 4}
    in_order = run_reward(make_reward(function, batch_size=5), rows)
    assert in_order.reward == result.reward


def test_scores_that_are_relative_to_their_group_stay_so() -> None:
    def ranks(texts: list[str]) -> list[float]:
        scores_of(texts)
        return [float(sorted(texts).index(text)) for text in texts]

    assert run_reward(make_reward(ranks), texts("d", "bad", "c", "a", "b", "bad")).reward == [3, None, 2, 0, 1, None]


def test_a_call_on_the_whole_batch_stays_whole() -> None:
    reward = make_reward(scores_of, whole_batch=True)
    assert run_reward(reward, texts("a", "bad", "c")).reward == [None] * 3


def test_a_function_that_counts_wrong_costs_all() -> None:
    result = run_reward(make_reward(lambda texts: [1.0]), texts("a", "b", "c", "d"))
    assert result.reward == [None] * 4 and {*result.reasons} == {"returned 1 results for 4 samples"}


def test_a_call_that_fails_once_costs_nothing() -> None:
    calls: list[int] = []

    def flaky(texts: list[str]) -> list[float]:
        calls.append(len(texts))
        if len(calls) == 1:
            raise ConnectionError("try again")
        return [1.0] * len(texts)

    assert run_reward(make_reward(flaky), texts(*"abcdefgh")).reward == [1.0] * 8
    assert calls == [8, 4, 2, 1, 1, 7]


def test_metrics_and_costs_too() -> None:
    def metric(responses: list[str], prompts: list[str]) -> list[float]:
        return scores_of(responses)

    rows = texts("a", "bad", "bcd", "bad")
    assert Metric("m", metric)(rows) == (2.0, [1.0, None, 3.0, None])
    cost = verl.RewardNode(Reward(scores_of), column="cost").as_node("cost")
    assert run_graph(Graph([cost], rows.columns), rows).batch["cost"] == [1.0, None, 3.0, None]


def test_one_line_a_step(caplog: pytest.LogCaptureFixture) -> None:
    rows = texts(*("bad" if i in (3, 11, 12) else "a" for i in range(32)))
    source = Node(
        name="rollout",
        run=lambda prompts: iter([rows]),
        kind="source",
        inputs=("group",),
        outputs=("id", "group", "prompt", "response"),
        samples=lambda prompts: [[str(8 * g + i) for i in range(8)] for g in range(4)],
    )
    node = verl.RewardNode(Reward(scores_of)).as_node("reward")
    result = run_graph(Graph([source, node]), Batch.from_columns({"group": [*"0123"]}))
    assert result.batch["reward"].count(None) == 3
    lines = [record.getMessage() for record in caplog.records if "no score" in record.getMessage()]
    place = f"{os.path.basename(__file__)}:{scores_of.__code__.co_firstlineno + 2}"
    assert len(lines) == 1
    assert f"reward scores_of: 3 of 32 samples have no score: ValueError at {place} (x3); the latest: " in lines[0]
    assert "cannot read bad" in lines[0]


@pytest.mark.reward_processes
@pytest.mark.parametrize("how", ["late", "dead"])
def test_what_hangs_or_ends_its_process_costs_itself(how: str) -> None:
    def ends(texts: list[str]) -> list[float]:
        if "bad" in texts:
            if how == "dead":
                os._exit(1)
            re.match(r"(a+)+$", "a" * 60 + "b")
        return [1.0] * len(texts)

    reward, start = Reward(ends, timeout=4.0 if how == "late" else 60.0), time.monotonic()
    result = run_reward(reward.source, texts("a", "b", "c", "bad", "d", "e", "f", "g"))
    assert result.reward == [1.0] * 3 + [None] + [1.0] * 4
    assert time.monotonic() - start < 2 * 4.0 + 2
    reward.close()


@pytest.mark.reward_processes
def test_looking_for_what_hangs_takes_no_longer_than_the_call() -> None:
    def hangs(texts: list[str]) -> list[float]:
        time.sleep(60)
        return [1.0] * len(texts)

    reward, start = Reward(hangs, timeout=0.5), time.monotonic()
    result = run_reward(reward.source, texts(*"abcdefgh"))
    assert result.reward == [None] * 8 and time.monotonic() - start < 2 * 0.5 + 1.5
    assert {*result.reasons} == {"gave no answer within 0.5 s"}
    reward.close()


def test_a_step_goes_on_with_all_but_the_bad_samples(tiny: Path) -> None:
    bad: list[str] = []

    def raises_on_one(texts: list[str]) -> list[float]:
        bad.extend(texts[:1] if not bad else [])
        if bad[0] in texts:
            raise ValueError("bad")
        return [float(len(text)) for text in texts]

    sampling = verl.SamplingParams(max_new_tokens=8, ignore_eos=True)
    trainer = verl.Trainer(verl.Actor(str(tiny), sampling=sampling), reward=Reward(raises_on_one), n=4, log_dir=False)
    record = trainer.step(["a", "b", "c"])
    assert record["reward/failures/count"] == record["reward/abstained"] == 1 and record["updated"]
    trainer.close()


def test_a_column_that_no_service_takes_costs_its_sample() -> None:
    rows = texts("a", "b", "c", "d").add({"weight": [1.0, math.nan, 2.0, 3.0]})
    reward = Reward(url="http://127.0.0.1:9", timeout=0.2, retries=0)
    reasons = run_reward(reward.source, rows).reasons
    assert ["cannot be sent as JSON" in str(reason) for reason in reasons] == [False, True, False, False]

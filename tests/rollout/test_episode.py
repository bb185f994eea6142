from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import byte_tokenizer
from verl.errors import ConfigError, RolloutError
from verl.models.packed import PackedModel
from verl.rollout.base import Request, SamplingParams, generate
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.episode import Client, run_episodes, single_turn
from verl.rollout.turns import Outcome, Turns

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
ROWS = [{"id": f"row {i}", "prompt_tokens": [10 + i, 11, 12]} for i in range(6)]


@pytest.fixture
def engine(packed64: PackedModel) -> EmbeddedEngine:
    return EmbeddedEngine(packed64, eos_token_ids=(2,), seed=0, kv_memory=8 << 20)


def outcomes(engine: EmbeddedEngine, *args: Any, **options: Any) -> dict[int, Outcome]:
    async def collect() -> dict[int, Outcome]:
        return {outcome.index: outcome async for outcome in run_episodes(engine, ROWS, PARAMS, *args, **options)}

    return asyncio.run(asyncio.wait_for(collect(), 60))


def test_a_single_turn_is_a_request_under_the_id_of_the_row(engine: EmbeddedEngine) -> None:
    direct = {s.id: s for s in generate(engine, [Request(r["id"], r["prompt_tokens"], PARAMS) for r in ROWS])}
    result = outcomes(engine, single_turn)
    assert sorted(result) == list(range(len(ROWS)))
    for index, outcome in result.items():
        (turns,) = outcome.responses
        sample = direct[ROWS[index]["id"]]
        assert turns.response_tokens == sample.tokens
        assert turns.rollout_log_probs == sample.log_probs
        assert turns.response_mask == [1] * 12


def test_a_later_turn_that_positions_end_is_named_before_it_is_sampled(
    packed64: PackedModel, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EmbeddedEngine(packed64, eos_token_ids=(2,), seed=0, kv_memory=8 << 20, max_length=20)
    said: list[tuple[int, str]] = []

    async def two_turns(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
        turns = Turns()
        for _ in range(2):
            asked = asyncio.ensure_future(client.generate([*row["prompt_tokens"], *turns.response_tokens]))
            await asyncio.sleep(0)
            said.append((3 + len(turns.response_tokens), caplog.text))
            turns.wrote(await asked)
        return [turns]

    lengths = {len(outcome.responses[0].response_tokens) for outcome in outcomes(engine, two_turns).values()}
    assert lengths == {20 - 3}
    assert {prompt: "may have 20" in text for prompt, text in said} == {3: False, 15: True}
    assert caplog.text.count("a response to a prompt of 15 tokens ends before max_new_tokens=12") == 1


@pytest.mark.parametrize("result", [Turns(), ["a text"], 1.0])
def test_an_episode_that_returns_something_else_is_refused_by_name(engine: EmbeddedEngine, result: Any) -> None:
    async def episode(client: Client, row: Mapping[str, Any]) -> Any:
        return result

    with pytest.raises(ConfigError, match=r"an episode returns a list of Turns; that of row 'row \d' gave"):
        outcomes(engine, episode)


def test_turns_mask_what_the_policy_did_not_write(engine: EmbeddedEngine) -> None:
    async def with_tool(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
        turns = Turns()
        for turn in range(3):
            turns.wrote(await client.generate([*row["prompt_tokens"], *turns.response_tokens]))
            await asyncio.sleep(0.001 * turn)
            turns.read([40 + turn, 41])
        return [turns]

    for outcome in outcomes(engine, with_tool).values():
        (turns,) = outcome.responses
        assert turns.response_mask == ([1] * 12 + [0] * 2) * 3
        assert turns.response_tokens[12:14] == [40, 41]
        assert [lp == 0 for lp in turns.rollout_log_probs] == [m == 0 for m in turns.response_mask]
    # Six episodes of 36 steps each went side by side.
    assert engine.scheduler.steps < 100


def test_an_episode_that_raises_or_hangs_is_an_outcome_and_the_others_go_on(engine: EmbeddedEngine) -> None:
    async def odd(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
        if row["id"] == "row 1":
            raise KeyError("tool")
        if row["id"] == "row 2":
            await client.generate([])
        if row["id"] == "row 3":
            await client.generate(row["prompt_tokens"], SamplingParams(max_new_tokens=400, ignore_eos=True))
            await asyncio.sleep(60)
        return await single_turn(client, row)

    odd.deadline = 1.5  # type: ignore[attr-defined]
    result = outcomes(engine, odd)
    errors = {index: outcome.error for index, outcome in result.items() if outcome.error}
    assert sorted(errors) == [1, 2, 3]
    assert "KeyError: 'tool'" in str(errors[1])
    assert "prompt is empty" in str(errors[2])
    assert "longer than 1.5 s" in str(errors[3])
    assert all(len(result[i].responses[0].response_tokens) == 12 for i in (0, 4, 5))
    assert engine.unfinished == 0


def test_a_response_is_written_at_the_temperature_of_its_row(engine: EmbeddedEngine) -> None:
    async def colder(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
        turns = await single_turn(client, row)
        tokens = [*row["prompt_tokens"], *turns[0].response_tokens]
        sample = await client.generate(tokens, replace(client.params, temperature=0.2))
        return turns if row["id"] != wrong else [turns[0].wrote(sample)]

    wrong = "none"  # what an episode samples for its own use is its own affair
    assert all(outcome.error is None for outcome in outcomes(engine, colder).values())
    wrong = "row 4"
    with pytest.raises(ConfigError, match=r"row 4' sampled at temperature 0.2, but is trained at 1"):
        outcomes(engine, colder)
    assert engine.unfinished == 0


def test_an_engine_that_fails_ends_the_run(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(4))

    def step() -> list[Any]:
        if next(steps, None) is None:
            raise RolloutError("the server is gone")
        return EmbeddedEngine.step(engine)

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(RolloutError, match="the server is gone"):
        outcomes(engine)


def test_leaving_early_takes_the_requests_back(engine: EmbeddedEngine) -> None:
    async def first() -> Outcome:
        episodes = run_episodes(engine, ROWS, SamplingParams(max_new_tokens=400, ignore_eos=True))
        task = asyncio.ensure_future(anext(episodes))
        await asyncio.sleep(0.2)
        assert engine.unfinished == len(ROWS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await episodes.aclose()
        return Outcome(0, [])

    asyncio.run(asyncio.wait_for(first(), 60))
    assert engine.unfinished == 0
    assert engine.cache.available == engine.cache.num_blocks


def test_a_guard_that_fails_in_a_later_turn_ends_the_run_and_leaves_nothing_behind(packed64: PackedModel) -> None:
    class Away:
        every = 4

        def __call__(self, texts: Sequence[str]) -> list[None]:
            raise ConnectionError("the service is away")

    tokenizer = byte_tokenizer()
    engine = EmbeddedEngine(packed64, eos_token_ids=(2,), seed=0, kv_memory=8 << 20, tokenizer=tokenizer)
    again: list[str] = []

    async def two_turns(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
        turns = Turns().wrote(await client.generate(row["prompt_tokens"]))
        guard = Away() if row["id"] == "row 3" else None
        try:
            turns.wrote(await client.generate([*row["prompt_tokens"], *turns.response_tokens], guard=guard))
        except RolloutError:
            try:
                await client.generate(row["prompt_tokens"])
            except RolloutError as error:
                again.append(str(error))
        return [turns]

    with pytest.raises(ConnectionError, match="away"):
        outcomes(engine, two_turns)
    # Episodes that the failure cancels before they ask again ask no more.
    assert 0 < len(again) <= len(ROWS) and set(again) == {"the rollout engine failed: the service is away"}
    assert engine.unfinished == 0
    assert engine.cache.available == engine.cache.num_blocks
    assert all(len(outcome.responses[0].response_tokens) == 12 for outcome in outcomes(engine).values())


@pytest.mark.filterwarnings("error")
def test_an_episode_that_cancels_itself_or_exits_is_an_outcome_and_the_others_go_on(engine: EmbeddedEngine) -> None:
    closed: list[str] = []

    async def odd(client: Client, row: Mapping[str, Any]) -> Sequence[Turns]:
        if row["id"] == "row 1":
            raise asyncio.CancelledError
        if row["id"] == "row 2":
            raise SystemExit(3)
        if row["id"] == "row 3":
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                closed.append("in order")
        if row["id"] == "row 4":
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(3)
                    break
        return await single_turn(client, row)

    odd.deadline = 1  # type: ignore[attr-defined]
    result = outcomes(engine, odd)
    errors = {index: outcome.error for index, outcome in result.items() if outcome.error}
    assert sorted(errors) == [1, 2, 3, 4]
    assert "it cancelled itself" in str(errors[1]) and "SystemExit(3)" in str(errors[2])
    assert "longer than 1 s" in str(errors[3]) and "longer than 1 s" in str(errors[4])
    assert closed == ["in order"]

"""Environments of TRL's form: what reset gets and says, which methods are tools, rewards, failures, reuse."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import verl
from tests.rollout.test_tools import Scripted
from verl.config import load_config
from verl.errors import ConfigError
from verl.rewards.environments import EnvironmentReward
from verl.rollout.base import SamplingParams
from verl.rollout.environments import EnvironmentEpisode, as_environments
from verl.rollout.episode import run_episodes
from verl.rollout.gateway.template import ChatTemplate
from verl.rollout.turns import Outcome
from verl.run.build import check_settings
from verl.trl import GRPOConfig, GRPOTrainer

END = "<|end|>"
SMALL = {"max_new_tokens": 8}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{END}"


class Counter:
    """An environment that counts."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, start: int = 0, **row: Any) -> str | None:
        self.total, self.row = start, row
        return f" From {start}."

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: what to add
        """
        if number < 0:
            raise ValueError("no negative numbers")
        self.total += number
        return self.total

    async def read(self) -> list[dict[str, str]]:
        """Read the total."""
        return [{"type": "text", "text": f"total {self.total}"}]

    @property
    def broken(self) -> int:
        raise AssertionError("properties are not read")

    def _hidden(self) -> None: ...

    def get_reward(self) -> float:
        return float(self.total)


class Other(Counter):
    async def get_reward(self) -> float:  # type: ignore[override]
        return -1.0


class Silent:
    def reset(self, **row: Any) -> None: ...

    def ping(self) -> str:
        """Say pong."""
        return "pong"


@pytest.fixture(scope="module")
def chat(tiny: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny)  # type: ignore[no-any-return]


def row_of(text: str = "Count.", **columns: Any) -> dict[str, Any]:
    messages = json.dumps([{"role": "user", "content": text}])
    return {"id": "a", "group": "g", "messages": messages, "prompt_tokens": [1], **columns}


def play(
    episode: EnvironmentEpisode,
    tokenizer: Any,
    turns: Sequence[str],
    rows: Any = None,
    engine: Any = None,
    **params: Any,
) -> tuple[list[Outcome], Scripted]:
    scripted = engine or Scripted(tokenizer, turns)
    sampling = SamplingParams(**{"max_new_tokens": 900} | params)

    async def run() -> list[Outcome]:
        outcomes = run_episodes(scripted, rows or [row_of(start=3)], sampling, episode, tokenizer=tokenizer)
        return [outcome async for outcome in outcomes]

    return asyncio.run(run()), scripted


def hermes(factory: Any = Counter, *tools: Any, **options: Any) -> EnvironmentEpisode:
    return EnvironmentEpisode(factory, tools, chat_template="hermes", **options)


def test_an_episode_in_an_environment(chat: PreTrainedTokenizerBase) -> None:
    """Prompt, mask and messages are what the template makes of the conversation; the reward is the environment's."""
    turns = [call("add", number=4), "Let me see.\n" + call("add", number=-1), call("read"), "It is 7." + END]
    (outcome,), engine = play(hermes(), chat, turns)
    assert outcome.error is None
    (response,) = outcome.responses
    template = ChatTemplate(chat, "hermes")
    schemas = hermes().kinds[None].schemas
    assert [schema["function"]["name"] for schema in schemas] == ["add", "read"]
    first = template.chat.render([{"role": "user", "content": "Count. From 3."}], {"tools": schemas})
    assert chat.decode(response.prompt_tokens) == first and engine.requests[0].prompt_tokens == response.prompt_tokens
    said = [i for i, mask in enumerate(response.response_mask) if mask]
    assert chat.decode([response.response_tokens[i] for i in said]) == "".join(turns)
    text = chat.decode(response.response_tokens)
    for result in ("7", "{'error': 'no negative numbers'}", "total 7"):
        assert f"<tool_response>\n{result}\n</tool_response>" in text
    assert response.reward == 7.0 and response.finish == "stop"
    assert response.messages is not None
    assert [(m["role"], m["content"]) for m in response.messages] == [
        ("user", "Count. From 3."),
        ("assistant", ""), ("tool", "7"), ("assistant", "Let me see."), ("tool", "{'error': 'no negative numbers'}"),
        ("assistant", ""), ("tool", "total 7"), ("assistant", "It is 7."),
    ]  # fmt: skip
    assert response.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"number": 4}}
    again = template.write(_messages(template, turns), schemas, reply=False)
    assert (first + text).strip() == again.strip()


def _messages(template: ChatTemplate, turns: Sequence[str]) -> list[Any]:
    from verl.rollout.gateway.messages import Message

    tools = hermes().kinds[None].schemas
    said = [template.parse(turn.removesuffix(END), "", tools) for turn in turns]
    results = ["7", "{'error': 'no negative numbers'}", "total 7"]
    messages = [Message("user", "Count. From 3.")]
    for reply, result in zip(said, [*results, None], strict=True):
        messages += [reply] if result is None else [reply, Message("tool", result)]
    return messages


@pytest.mark.parametrize(
    ("written", "result"),
    [
        (call("nothing"), "{'error': 'Tool nothing not found.'}"),
        (call("add", wrong=1), "got an unexpected keyword argument 'wrong'"),
        (call("add"), "missing 1 required positional argument: 'number'"),
        (call("reset"), "{'error': 'Tool reset not found.'}"),
        (call("get_reward"), "{'error': 'Tool get_reward not found.'}"),
        (call("_hidden"), "{'error': 'Tool _hidden not found.'}"),
        (call("broken"), "{'error': 'Tool broken not found.'}"),
    ],
)
def test_what_a_call_cannot_do_is_its_result(chat: PreTrainedTokenizerBase, written: str, result: str) -> None:
    (outcome,), _ = play(hermes(), chat, [written, "Well." + END])
    assert result in chat.decode(outcome.responses[0].response_tokens)
    assert outcome.responses[0].reward == 3.0


def test_reset_gets_the_columns_and_adds_to_the_last_message(chat: PreTrainedTokenizerBase) -> None:
    seen: list[Any] = []

    class Watch(Silent):
        def reset(self, **row: Any) -> Any:
            seen.append(row)
            return row["says"]

    parts = [{"type": "text", "text": "B"}]
    for says, prompt in ((None, "A"), ("B", "AB"), (parts, "AB"), ("", "A")):
        (outcome,), _ = play(hermes(Watch), chat, ["Hi" + END], [row_of("A", says=says, extra=[1])])
        assert outcome.error is None and f"user\n{prompt}{END}" in chat.decode(outcome.responses[0].prompt_tokens)
    assert seen[0] == {"says": None, "extra": [1], "prompt": [{"role": "user", "content": "A"}]}
    for odd in (3, [{"type": "image", "image": "x"}]):
        (outcome,), _ = play(hermes(Watch), chat, [], [row_of("A", says=odd)])
        assert "reset() returned" in str(outcome.error)


def test_a_reset_that_takes_some_columns_gets_those(chat: PreTrainedTokenizerBase) -> None:
    class Few(Silent):
        def reset(self, secret: str) -> str:  # type: ignore[override]
            return secret

    (outcome,), _ = play(hermes(Few), chat, ["Hi" + END], [row_of("A", secret="S", more=1)])
    assert "user\nAS" in chat.decode(outcome.responses[0].prompt_tokens)
    (outcome,), _ = play(hermes(Few), chat, [], [row_of("A")])
    assert "Few.reset() raised TypeError" in str(outcome.error) and "secret" in str(outcome.error)


def test_rows_choose_their_environment(chat: PreTrainedTokenizerBase) -> None:
    episode = hermes({"count": Counter, "silent": Silent, "other": Other})
    rows = [row_of(environment=name) | {"id": name} for name in ("count", "silent", "other", "silnt")]
    outcomes, _ = play(episode, chat, ["Hi" + END] * 3, rows)
    by_name = {rows[outcome.index]["id"]: outcome for outcome in outcomes}
    assert "did you mean 'silent'" in str(by_name.pop("silnt").error)
    prompts = {name: chat.decode(outcome.responses[0].prompt_tokens) for name, outcome in by_name.items()}
    assert "ping" in prompts["silent"] and "add" not in prompts["silent"] and "ping" not in prompts["count"]
    assert {name: outcome.responses[0].reward for name, outcome in by_name.items()} == {
        "count": 0.0, "silent": None, "other": -1.0,
    }  # fmt: skip
    assert episode.rewards == {"Counter": ["count"], "Other": ["other"]}


def test_instances_are_used_again_but_not_those_that_failed(chat: PreTrainedTokenizerBase) -> None:
    Counter.made = 0
    episode = hermes()
    for _ in range(3):
        play(episode, chat, ["Hi" + END] * 2, [row_of() | {"id": "a"}, row_of() | {"id": "b"}])
    assert Counter.made == 2

    class Fails(Counter):
        def get_reward(self) -> float:
            raise RuntimeError("not now")

    Fails.made = 0
    episode = hermes(Fails)
    for _ in range(2):
        (outcome,), _ = play(episode, chat, ["Hi" + END])
        assert "Fails.get_reward() raised RuntimeError: not now" in str(outcome.error)
        assert "test_environments.py line" in str(outcome.error)
    assert Fails.made == 2


def test_one_that_is_late_runs_once_more(chat: PreTrainedTokenizerBase) -> None:
    runs: list[int] = []

    class Slow(Counter):
        def get_reward(self) -> float:
            runs.append(1)
            time.sleep(1.0 if len(runs) == 1 else 0)
            return 5.0

    (outcome,), engine = play(hermes(Slow, deadline=0.3), chat, ["Hi" + END] * 2)
    assert len(runs) == 2 and outcome.responses[0].reward == 5.0
    assert len({request.id for request in engine.requests}) == 2  # with other random numbers

    class Late(Counter):
        async def get_reward(self) -> float:  # type: ignore[override]
            await asyncio.sleep(5)
            return 5.0

    (outcome,), _ = play(hermes(Late, deadline=0.2), chat, ["Hi" + END] * 2)
    assert "twice: the environment took longer than 0.2 s" in str(outcome.error)


def test_a_second_run_gets_its_columns_as_they_were(chat: PreTrainedTokenizerBase) -> None:
    sizes: list[tuple[int, int]] = []

    class Takes(Counter):
        def reset(self, items: list[int], prompt: list[Any], **row: Any) -> None:  # type: ignore[override]
            sizes.append((len(items), len(prompt)))
            items.pop(), prompt.append(prompt[0])
            self.total = 0
            time.sleep(1.0 if len(sizes) == 1 else 0)

    (outcome,), _ = play(hermes(Takes, deadline=0.3), chat, ["Hi" + END], [row_of(items=[1, 2])])
    assert sizes == [(2, 1), (2, 1)] and [m["role"] for m in outcome.responses[0].messages or ()] == [
        "user",
        "assistant",
    ]


class Ends(Counter):
    async def leave(self) -> None:
        """Exit."""
        sys.exit(3)

    async def cancel(self) -> None:
        """Cancel."""
        raise asyncio.CancelledError


@pytest.mark.parametrize(("name", "says"), [("leave", "SystemExit(3)"), ("cancel", "it cancelled itself")])
def test_an_async_tool_that_ends_itself_fails_alone(chat: PreTrainedTokenizerBase, name: str, says: str) -> None:
    (outcome,), _ = play(hermes(Ends), chat, [call(name), "So." + END])
    assert outcome.error is None and str(outcome.responses[0].messages).count(says) == 1


def test_what_a_reset_says_is_unicode(chat: PreTrainedTokenizerBase) -> None:
    class Half(Counter):
        def reset(self, **row: Any) -> str:
            return "\ud83d"

    (outcome,), _ = play(hermes(Half), chat, [])
    assert "DataError: a message has a text that is not valid Unicode" in str(outcome.error)


def test_a_reward_that_training_cannot_compute_with_abstains() -> None:
    rewards = verl.Batch.from_columns({"episode_reward": [1e39, 1.0]})
    result = asyncio.run(EnvironmentReward("Game").score(rewards))
    assert [*result.reward] == [None, 1.0] and result.reasons[0] == "Game.get_reward() returned 1e+39"


def test_turns_are_bounded_as_trl_bounds_them(chat: PreTrainedTokenizerBase) -> None:
    """`max_turns` k + 1 are k rounds of tools; the last turn's calls are not made. An episode that is cut counts."""
    (outcome,), _ = play(hermes(max_turns=2), chat, [call("add", number=1)] * 2)
    response = outcome.responses[0]
    assert (response.reward, response.finish) == (4.0, "length")
    (outcome,), _ = play(hermes(), chat, [call("add", number=1), "x" * 400], max_new_tokens=150)
    assert outcome.responses[0].reward == 4.0 and outcome.responses[0].finish == "length"
    assert outcome.responses[0].messages[-1]["content"].startswith("xxx")  # type: ignore[index]


def test_further_tools_stand_beside_those_of_the_environment(chat: PreTrainedTokenizerBase) -> None:
    def double(number: int) -> int:
        """Double it.

        Args:
            number: any
        """
        return 2 * number

    (outcome,), _ = play(hermes(Counter, double), chat, [call("double", number=4), "8" + END])
    assert "<tool_response>\n8\n" in chat.decode(outcome.responses[0].response_tokens)
    (outcome,), _ = play(hermes(None, double), chat, [call("double", number=4), "8" + END])
    assert outcome.responses[0].reward is None and len(outcome.responses[0].messages or ()) == 4


class NoReset:
    def act(self) -> str:
        """Act."""
        return ""


class NoDocstring(Silent):
    def act(self, number: int) -> str:
        return ""


class NoType(Silent):
    def act(self, number) -> str:  # type: ignore[no-untyped-def]
        """Act.

        Args:
            number: any
        """
        return ""


class NoArgument(Silent):
    def act(self, number: int) -> str:
        """Act."""
        return ""


class Many(Silent):
    def act(self, *numbers: int) -> str:
        """Act.

        Args:
            numbers: any
        """
        return ""


class Keywords(Silent):
    def act(self, **numbers: int) -> str:
        """Act.

        Args:
            numbers: any
        """
        return ""


class Raises:
    def __init__(self) -> None:
        raise OSError("no server")

    def reset(self, **row: Any) -> None: ...


def add(number: int) -> int:
    """Add.

    Args:
        number: any
    """
    return number


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (NoReset, r"NoReset has no method reset\(self, \*\*row\): write one"),
        (NoDocstring, "NoDocstring.act is public, so it is a tool: .*docstring.*if it is no tool, call it _act"),
        (NoType, "NoType.act is public.*number is missing a type hint"),
        (NoArgument, "NoArgument.act is public.*number"),
        (Many, r"Many.act: a call names its arguments, and '\*numbers: .*int.*' has none: write them out"),
        (Keywords, r"Keywords.act: a call names its arguments, and '\*\*numbers: .*int.*' has none"),
        (Raises, r"Raises\(\) raised OSError: no server"),
        (3, "must be a class, or a function that makes environments, not 3"),
        ({"a": NoReset}, "environment 'a': NoReset has no method reset"),
        (Counter, "Counter.add and a tool have one name: rename one of them"),
    ],
)
def test_bad_classes_are_named(factory: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        EnvironmentEpisode(factory, [add] if factory is Counter else ())


def test_what_is_no_environment_is_named() -> None:
    for source in (3, NoReset, {}, lambda client, row: None):
        with pytest.raises(ConfigError, match="environment"):
            as_environments(source)


def test_a_template_that_shows_no_tools_is_refused_when_the_actor_is_made(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not show the tools of a request.*chat_template='hermes'"):
        verl.Actor(str(tiny), episode=Counter)
    assert verl.Actor(str(tiny), episode=hermes()).rewarding_episode is not None


ROWS = [{"prompt": [{"role": "user", "content": f"Q{i}"}], "start": i} for i in range(4)]


def test_rewards_of_a_trainer_and_of_environments_are_added(tiny: Path) -> None:
    states: list[tuple[int, str]] = []

    def first(completions: Any, environments: Any, **columns: Any) -> list[float]:
        states.extend((e.total, c[-1]["role"]) for c, e in zip(completions, environments, strict=True))
        return [10.0 * e.total for e in environments]

    async def second(completions: Any, environments: Any) -> list[float]:
        return [100.0] * len(environments)

    Counter.made = 0
    trainer = verl.Trainer(
        str(tiny), reward=[first, second], environment=hermes(), algorithm="grpo", n=2, sampling=SMALL, log_dir=False
    )
    for _ in range(2):
        metrics = trainer.step(ROWS)
        assert metrics["reward/first/mean"] == 15 and metrics["reward/Counter/mean"] == 1.5
        assert metrics["reward/mean"] == 116.5 and metrics["rollout/failed_episodes"] == 0
    assert sorted(states) == sorted([(i, "assistant") for i in range(4)] * 4)
    assert Counter.made <= 9  # each is held until its rewards are there
    assert trainer.evaluate(ROWS, n=1).metrics["reward"] == 116.5


def test_a_class_that_says_no_reward_needs_one(tiny: Path) -> None:
    with pytest.raises(
        ConfigError, match="nothing rewards the episodes: give the trainer a reward, or the environment"
    ):
        verl.Trainer(str(tiny), environment=hermes(Silent), algorithm="grpo", log_dir=False)


def test_no_node_writes_over_the_reward_of_environments(tiny: Path) -> None:
    class Ones(verl.RewardNode):
        def score(self, responses: list[str]) -> list[float]:
            return [1.0] * len(responses)

    with pytest.raises(ConfigError, match="reward"):
        verl.Trainer(str(tiny), environment=hermes(), algorithm="grpo", log_dir=False, nodes={"ones": Ones()})


def test_what_cannot_have_environments_says_so(tiny: Path) -> None:
    def reads(completions: Any, environments: Any) -> list[float]:
        return [0.0] * len(completions)

    task = verl.Task(sources={"reward": reads}, algorithm="grpo")
    with pytest.raises(ConfigError, match="tasks have their own reward, cost, episode"):
        verl.Trainer(str(tiny), tasks=[task], environment=Counter, log_dir=False)
    with pytest.raises(ConfigError, match="a class with a method reset"):
        verl.Trainer(str(tiny), reward=reads, environment=NoReset, algorithm="grpo", log_dir=False)


def test_rewards_that_are_none_or_not_finite_abstain(tiny: Path) -> None:
    class Odd(Counter):
        def get_reward(self) -> Any:
            return {0: None, 1: float("nan"), 2: 1.0, 3: True}[self.total]

    trainer = verl.Trainer(str(tiny), environment=hermes(Odd), algorithm="grpo", n=2, sampling=SMALL, log_dir=False)
    metrics = trainer.step(ROWS)
    assert metrics["reward/abstained"] == 4 and metrics["reward/mean"] == 1.0


@pytest.mark.slow
def test_the_page_s_environment_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "episodes.md").read_text()
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Shop" in code)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "shop"}
    exec(block.replace("models/SmolLM2-135M-Instruct", str(tiny)), names)
    assert names["trainer"].steps == 1 and names["shop"].rewards == {"Shop": [None]}


ENVIRONMENT = '''
from verl import EnvironmentEpisode


class Game:
    def reset(self, **row):
        self.done = False

    def finish(self) -> str:
        """End it."""
        self.done = True
        return "done"

    def get_reward(self):
        return 1.0


game = EnvironmentEpisode(Game, chat_template="hermes")
'''


def test_in_a_file_of_settings(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.run.train import train

    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(ENVIRONMENT)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    rollout = {"environment": "game.py:game", "max_new_tokens": 6, "n": 2}
    settings = {
        "data": {"train": "data.jsonl", "batch_size": 2},
        "actor_rollout_ref": {"model": {"path": str(tiny)}, "rollout": rollout},
        "trainer": {"total_steps": 1, "output_dir": "run"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    config = load_config(tmp_path / "run.yaml")
    check_settings(config)
    train(config)
    record = json.loads(next((tmp_path / "run").rglob("metrics.jsonl")).read_text().splitlines()[0])
    assert record["reward/Game/mean"] == record["reward/mean"] == 1.0


def trl(tiny: Path, tmp_path: Path, reward: Any, rows: Any, **more: Any) -> GRPOTrainer:
    options = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6, "max_steps": 1}
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = ChatTemplate(tokenizer, "hermes").chat.tokenizer.chat_template
    args = GRPOConfig(output_dir=str(tmp_path), save_strategy="no", logging_steps=1, **options)
    return GRPOTrainer(str(tiny), reward, args, rows, processing_class=tokenizer, **more)


def test_by_trl_s_names(tiny: Path, tmp_path: Path) -> None:
    trainer = trl(tiny, tmp_path / "a", None, None, environment_factory=Counter)  # the environment has the data
    trainer.train()
    assert trainer.trainer.steps == 1

    def reward(completions: Any, environments: Any, **columns: Any) -> list[float]:
        return [float(e.total) for e in environments]

    factories = {"count": Counter, "other": Other}
    rows = [{"environment": name, "start": 2} for name in ("count", "other")]
    trainer = trl(tiny, tmp_path / "b", [reward], rows, environment_factory=factories, tools=[])
    trainer.train()
    logged = next(record for record in trainer.state.log_history if "reward" in record)
    assert logged["reward"] == pytest.approx(((2 + 2) + (2 - 1)) / 2)
    shapes: list[int] = []

    def score(environments: Any, **columns: Any) -> list[float]:  # as of TRL's grpo_2048.py
        shapes.append(len(columns["completions"]))
        return [float(e.total) for e in environments]

    trainer = trl(tiny, tmp_path / "g", score, rows, environment_factory=factories)
    trainer.train()
    logged = next(record for record in trainer.state.log_history if "reward" in record)
    assert logged["reward"] == pytest.approx(((2 + 2) + (2 - 1)) / 2) and shapes == [4]
    trainer = trl(tiny, tmp_path / "c", lambda completions, **c: [1.0] * len(completions), ROWS, tools=[add])
    trainer.train()
    with pytest.raises(ConfigError, match="max_steps"):
        trl(tiny, tmp_path / "d", None, None, environment_factory=factories)
    with pytest.raises(ConfigError, match="reward_funcs"):
        trl(tiny, tmp_path / "e", None, ROWS, tools=[add])

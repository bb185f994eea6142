"""Tools in the hands of a policy whose turns are given, so that what follows them can be told exactly."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.conftest import CHAT
from tests.templates import FAMILIES
from verl._host.user_calls import MAX_HUNG
from verl.data.tokenize import to_prompts
from verl.errors import ConfigError, DataError
from verl.roles.actor import Actor
from verl.rollout.base import Request, Sample, SamplingParams
from verl.rollout.embedded.response import check_prompt
from verl.rollout.episode import Client, run_episodes
from verl.rollout.tools import ToolEpisode, calculator, interpreter, tool
from verl.rollout.turns import Outcome, Turns
from verl.sandbox import Limits
from verl.weights.shard import Shard


class Scripted:
    """An engine that says what it is told to, turn by turn, within what the request allows."""

    policy_version = 3
    tells_top = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str]) -> None:
        self.tokenizer, self.turns = tokenizer, list(turns)
        self.requests: list[Request] = []
        self._new: list[Request] = []

    @property
    def unfinished(self) -> int:
        return len(self._new)

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self._new.append(request)

    def step(self) -> list[Sample]:
        done, self._new = self._new, []
        samples = []
        for request in done:
            tokens = self.tokenizer(self.turns.pop(0), add_special_tokens=False)["input_ids"]
            kept = tokens[: request.params.max_new_tokens]
            finish = "stop" if kept == tokens else "length"
            tops = [[(token, -0.5), (0, -1.5), (1, -2.5)][: request.top_log_probs] for token in kept]
            numbers: Any = ([-0.5] * len(kept), finish, self.policy_version)
            samples.append(Sample(request.id, kept, *numbers, top_log_probs=tops if request.top_log_probs else []))
        return samples

    def abort(self, ids: Iterable[str]) -> None: ...
    def load_shards(self, shards: Iterable[Shard], version: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...


@pytest.fixture(scope="module")
def chat(tiny: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny)  # type: ignore[no-any-return]


def play(
    episode: ToolEpisode,
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[str],
    prompt: str = "Q",
    engine: type[Scripted] = Scripted,
    row: Any = None,
    **params: Any,
) -> tuple[Outcome, Scripted]:
    scripted = engine(tokenizer, turns)
    row = row or {"id": "a", "prompt_tokens": tokenizer(prompt)["input_ids"]}
    options = SamplingParams(**{"max_new_tokens": 400, **params})

    async def one() -> Outcome:
        episodes = run_episodes(scripted, [row], options, episode, tokenizer=tokenizer)
        (outcome,) = [outcome async for outcome in episodes]
        return outcome

    return asyncio.run(asyncio.wait_for(one(), 60)), scripted


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|end|>"


def text_of(outcome: Outcome, tokenizer: PreTrainedTokenizerBase, mask: int) -> str:
    (turns,) = outcome.responses
    return str(
        tokenizer.decode([t for t, m in zip(turns.response_tokens, turns.response_mask, strict=True) if m == mask])
    )


def test_chat_calls_are_answered_as_the_template_does(chat: PreTrainedTokenizerBase) -> None:
    turns = ["Let me see. " + call("calculator", expression="(2 + 3) * 4"), "It is 20.<|end|>"]
    outcome, engine = play(ToolEpisode([calculator]), chat, turns)
    (response,) = outcome.responses
    # The whole is what the template would have written for this chat.
    chat_so_far = [
        {"role": "assistant", "content": turns[0].removesuffix("<|end|>")},
        {"role": "tool", "content": "20"},
        {"role": "assistant", "content": "It is 20."},
    ]
    written = chat.apply_chat_template(chat_so_far, tokenize=False).removeprefix("<|assistant|>").removesuffix("\n")
    assert chat.decode(response.response_tokens) == written
    assert text_of(outcome, chat, 0) == "\n<|tool|>20<|end|>\n<|assistant|>"
    assert text_of(outcome, chat, 1) == "".join(turns)
    assert [lp != 0 for lp in response.rollout_log_probs] == [m == 1 for m in response.response_mask]
    assert (response.finish, response.policy_version) == ("stop", 3)
    # The second request goes on from the very tokens of the first.
    first, second = engine.requests
    assert second.id == "a#1"
    length = len(first.prompt_tokens) + len(chat(turns[0])["input_ids"])
    assert list(second.prompt_tokens[:length]) == [*first.prompt_tokens, *chat(turns[0])["input_ids"]]


def test_a_result_is_whole_where_a_template_writes_the_last_turn_in_another_way(chat: PreTrainedTokenizerBase) -> None:
    thinking = copy.deepcopy(chat)
    thinking.chat_template = CHAT.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}",
    )
    turn = call("calculator", expression="12 + 7")
    for ended, read in ((turn, ""), (turn.removesuffix("<|end|>"), "<|end|>")):
        outcome, _ = play(ToolEpisode([calculator]), thinking, [ended, "19<|end|>"])
        assert text_of(outcome, thinking, 0) == f"{read}\n<|tool|>19<|end|>\n<|assistant|>"


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", CHAT.replace("m in messages", "m in messages[:2]")])
def test_a_template_without_results_is_refused_before_anything_starts(tiny: Path, template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="does not write messages of the role tool"):
        Actor(str(tiny), tokenizer, episode=ToolEpisode([calculator]))
    Actor(str(tiny), tokenizer, episode=ToolEpisode([calculator], form="plain"))


def test_a_turn_that_does_not_end_itself_is_ended(chat: PreTrainedTokenizerBase) -> None:
    turns = [call("calculator", expression="1+1").removesuffix("<|end|>"), "2<|end|>"]
    outcome, _ = play(ToolEpisode([calculator]), chat, turns)
    assert text_of(outcome, chat, 0) == "<|end|>\n<|tool|>2<|end|>\n<|assistant|>"


def test_several_calls_of_one_turn_are_answered_in_order(chat: PreTrainedTokenizerBase) -> None:
    both = call("calculator", expression="1+1").removesuffix("<|end|>") + call("calculator", expression="2+2")
    outcome, _ = play(ToolEpisode([calculator]), chat, [both, "ok<|end|>"])
    assert text_of(outcome, chat, 0) == "\n<|tool|>2<|end|>\n<|tool|>4<|end|>\n<|assistant|>"


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("<tool_call>{broken</tool_call>", 'error: a call is {"name": ..., "arguments": {...}} in JSON'),
        ("<tool_call>[1]</tool_call>", 'error: a call is {"name": ..., "arguments": {...}} in JSON'),
        ('<tool_call>{"name": "calculator", "arguments": 3}</tool_call>', "error: name must be text"),
        (call("calculater"), "{'error': 'Tool calculater not found.'}"),
        (call("calculator", wrong=1), "{'error': \"calculator() got an unexpected keyword argument 'wrong'\"}"),
        (call("calculator", expression="__import__('os')"), "{'error': 'only numbers"),
        (call("calculator", expression="1/0"), "{'error': 'division by zero'}"),
        (call("calculator", expression="9" * 500), "{'error': 'the expression is longer"),
        (call("fails"), "{'error': 'SystemExit(3)'}"),
        (call("late"), "{'error': 'took longer than 0.2 s"),
        (call("waits"), "{'error': 'took longer than 0.2 s"),
        (call("table"), "{'a': [1, 2]}"),
        (call("long"), "x" * 16 + " [cut]"),
        (call("gives_up"), "{'error': 'CancelledError()'}"),
        (call("cancels"), "{'error': 'it cancelled itself'}"),
        (call("exits"), "{'error': 'SystemExit(4)'}"),
        (call("runs_out"), "{'error': 'StopIteration()'}"),
        (call("keys"), "{(1, 2): 3}"),
        (call("half"), "a?b"),
        (call("\ud83d"), r"{'error': 'Tool \ud83d not found.'}"),
        (call("calculator", **{"\ud83d": 1}), "{'error': "),
        (f"<tool_call>{'[' * 200_000}</tool_call>", "error: a call is"),
    ],
)
def test_what_goes_wrong_is_told_to_the_policy(chat: PreTrainedTokenizerBase, written: str, answer: str) -> None:
    def fails() -> str:
        """Fails."""
        raise SystemExit(3)

    def late() -> str:
        """Hangs."""
        time.sleep(2)
        return "never"

    async def waits() -> str:
        """Hangs without a thread."""
        await asyncio.sleep(30)
        return "never"

    def table() -> dict[str, Any]:
        """Returns a mapping."""
        return {"a": [1, 2]}

    def long() -> str:
        """Returns much."""
        return "x" * 1000

    def gives_up() -> str:
        """Waits for what has been cancelled."""
        future: Future[str] = Future()
        future.cancel()
        return future.result()

    async def cancels() -> str:
        """Cancels itself."""
        raise asyncio.CancelledError

    async def exits() -> str:
        """Exits."""
        raise SystemExit(4)

    def runs_out() -> str:
        """Takes the next of nothing."""
        return next(iter([]))

    def keys() -> dict[str, Any]:
        """Returns what is no JSON."""
        return {(1, 2): 3}  # type: ignore[dict-item]

    def half() -> str:
        """Returns half of a surrogate pair."""
        return "a\udce9b"

    late_ones = [tool(late, timeout=0.2), tool(waits, timeout=0.2)]
    tools = [calculator, fails, *late_ones, table, long, gives_up, cancels, exits, runs_out, keys, half]
    limit = 16 if "long" in written else 200
    options = {"max_new_tokens": 900 + len(written)}
    outcome, _ = play(ToolEpisode(tools, max_result_tokens=limit), chat, [written, "ok<|end|>"], **options)
    assert f"<|tool|>{answer}" in text_of(outcome, chat, 0)
    assert outcome.responses[0].finish == "stop"


def test_a_tool_that_hangs_again_and_again_is_not_called_any_more() -> None:
    done = threading.Event()

    def hangs() -> str:
        """Hangs."""
        done.wait(60)
        return ""

    stuck = tool(hangs, timeout=0.05)

    async def ask() -> list[str]:
        return [await stuck.call({}) for _ in range(MAX_HUNG + 1)]

    answers = asyncio.run(ask())
    done.set()
    assert all("{'error': 'took longer than 0.05 s" in answer for answer in answers[:MAX_HUNG])
    assert answers[MAX_HUNG:] == [f"{{'error': '{MAX_HUNG} calls of tools never returned, and cannot be stopped'}}"]


def test_turns_and_tokens_are_bounded(chat: PreTrainedTokenizerBase) -> None:
    again = call("calculator", expression="1+1")
    outcome, engine = play(ToolEpisode([calculator], max_turns=3), chat, [again] * 9, max_new_tokens=2000)
    (response,) = outcome.responses
    assert (len(engine.requests), response.finish) == (3, "length")
    assert response.response_mask[-1] == 1
    for limit in range(1, 220, 7):
        outcome, _ = play(ToolEpisode([calculator], max_turns=99), chat, [again] * 99, max_new_tokens=limit)
        (response,) = outcome.responses
        assert len(response.response_tokens) <= limit
        assert response.finish == "length" and response.response_mask[-1] == 1


def test_a_response_ends_where_the_model_has_no_positions_left(chat: PreTrainedTokenizerBase) -> None:
    class Bounded(Scripted):
        def add(self, request: Request) -> None:
            check_prompt(request.id, list(request.prompt_tokens), 300, 90)
            super().add(request)

    again = [call("calculator", expression="1+1")] * 2
    outcome, engine = play(ToolEpisode([calculator]), chat, again, engine=Bounded)
    (response,) = outcome.responses
    assert text_of(outcome, chat, 1) == again[0] and 0 not in response.response_mask
    assert (outcome.error, response.finish, len(engine.requests)) == (None, "length", 1)
    outcome, _ = play(ToolEpisode([calculator]), chat, again, "Q" * 90, engine=Bounded)
    assert "prompt has 90 tokens" in str(outcome.error)


def test_the_plain_form(tokenizer: PreTrainedTokenizerBase) -> None:
    one = ToolEpisode([calculator], form="plain", max_turns=3)
    outcome, engine = play(one, tokenizer, ["= <<12 + 7>>", " so 19. <<19*2>>", " 38"])
    assert tokenizer.decode(outcome.responses[0].response_tokens) == "= <<12 + 7>> [19] so 19. <<19*2>> [38] 38"
    assert text_of(outcome, tokenizer, 0) == " [19] [38]"
    assert engine.requests[0].params.stop == (">>",)
    assert one.schemas == []

    def echo(text: str) -> str:
        """Says it again.

        Args:
            text: what
        """
        return text

    two = ToolEpisode([calculator, echo], form="plain", max_turns=4)
    turns = ["<<calculator: 1>>", "<<echo: a: b>>", "<<3>>", "done"]
    outcome, _ = play(two, tokenizer, turns)
    assert text_of(outcome, tokenizer, 0) == " [1] [a: b] [error: a call is <<name: argument>>]"


def test_in_the_plain_form_a_call_ends_with_its_brackets_and_nothing_else(tokenizer: PreTrainedTokenizerBase) -> None:
    plain = ToolEpisode([calculator], form="plain", max_turns=2)
    # Brackets that close nothing end nothing: the turn goes on.
    outcome, engine = play(plain, tokenizer, ["x >>", " 3 <<1+1>>", " y >>", " 2"], min_new_tokens=8)
    assert tokenizer.decode(outcome.responses[0].response_tokens) == "x >> 3 <<1+1>> [2] y >> 2"
    assert text_of(outcome, tokenizer, 0) == " [2]" and outcome.responses[0].finish == "stop"
    assert [request.params.min_new_tokens for request in engine.requests] == [8, 4, 0, 0]
    # Neither the end of the text nor a later bracket is that of a call which was passed over.
    for turns in (["<<1+1>> so it is 3."], ["<<1+1>> x >>", " 3"]):
        outcome, _ = play(plain, tokenizer, turns)
        assert tokenizer.decode(outcome.responses[0].response_tokens) == "".join(turns)
        assert 0 not in outcome.responses[0].response_mask
    for stop in (">>", ">"):  # one's own stop string
        outcome, _ = play(plain, tokenizer, ["x >>"], stop=(stop,))
        assert outcome.responses[0].finish == "stop"
    outcome, _ = play(plain, tokenizer, ["x >>"], max_new_tokens=4)
    assert outcome.responses[0].finish == "length"


def test_the_interpreter_is_sandboxed() -> None:
    python = interpreter(Limits(seconds=1.0, output=200))

    async def ask(code: str) -> str:
        return await python.call({"code": code})

    for code, answer in {
        "print(6 * 7)": "42",
        "pass": "[no output]",
        "while True: pass": "[stopped after 1 s]",
        "print('x' * 300)": "x" * 200 + "\n[stopped: too much output]",
    }.items():
        assert asyncio.run(ask(code)) == answer
    assert "FileNotFoundError" in asyncio.run(ask("open('/etc/passwd')"))


def test_schemas_come_from_signature_and_docstring() -> None:
    (schema,) = ToolEpisode([calculator]).schemas
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"]["properties"]["expression"]["type"] == "string"
    assert schema["function"]["parameters"]["required"] == ["expression"]

    def bare(x: int) -> int:
        return x

    for problem, make in {
        "tool bare": lambda: tool(bare),
        "different names": lambda: ToolEpisode([calculator, calculator]),
        "one of chat, plain": lambda: ToolEpisode([calculator], form="xml"),  # type: ignore[arg-type]
        "the plain form passes one": lambda: ToolEpisode([tool(_two)], form="plain"),
    }.items():
        with pytest.raises(ConfigError, match=problem):
            make()


def _two(a: str, b: str) -> str:
    """Takes two.

    Args:
        a: one
        b: other
    """
    return a + b


def test_the_template_shows_the_tools(chat: PreTrainedTokenizerBase) -> None:
    from verl.batch import Batch
    from verl.data.tokenize import PromptTokenizer

    chat.chat_template = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + chat.chat_template
    rows = Batch.from_rows([{"messages": json.dumps([{"role": "user", "content": "2+2?"}])}])
    ids: list[list[int]] = PromptTokenizer(chat, tools=ToolEpisode([calculator]).schemas)(rows)["prompt_tokens"]
    assert chat.decode(ids[0]) == "[calculator]<|user|>2+2?<|end|>\n<|assistant|>"


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3", "mistral", "chatml of a base model"])
def test_each_turn_stands_behind_what_the_template_writes_for_it(family: str) -> None:
    """Several turns, tools and what else the template reads: the prompt of a turn is the rendering of the messages at
    that turn, and no token that was sampled is encoded again."""
    reader, end = FAMILIES[family].make(), FAMILIES[family].last
    asked = [{"role": "user", "content": "two plus two?"}]
    episode = ToolEpisode([calculator])
    more: dict[str, Any] = {"tools": episode.schemas}
    if family == "qwen3":
        more["chat_template_kwargs"] = {"enable_thinking": False}
    prompts = to_prompts(reader, [{"prompt": asked, **more}], episode.schemas)
    said = call("calculator", expression="2 + 2").removesuffix("<|end|>"), "It is 4."
    space = " " if family == "mistral" else ""  # as its template begins a reply
    row = {"id": "a", **next(iter(prompts.rows()))}
    outcome, engine = play(episode, reader, [f"{space}{text}{end}" for text in said], row=row)
    (response,) = outcome.responses
    chat = [*asked, {"role": "assistant", "content": said[0]}, {"role": "tool", "content": "4"}]
    inputs = {"tools": episode.schemas, **more.get("chat_template_kwargs", {})}
    turns = [asked, chat]
    for request, messages in zip(engine.requests, turns, strict=True):
        written = reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **inputs)
        assert reader.decode(request.prompt_tokens) == written
    length = len(engine.requests[0].prompt_tokens)
    whole = [*engine.requests[0].prompt_tokens, *response.response_tokens]
    assert whole[: len(engine.requests[1].prompt_tokens)] == list(engine.requests[1].prompt_tokens)
    sampled = [t for t, bit in zip(whole[length:], response.response_mask, strict=True) if bit]
    assert sampled == [t for text in said for t in reader(f"{space}{text}{end}", add_special_tokens=False)["input_ids"]]


def test_a_text_that_a_stop_string_ends_is_that_of_the_response(chat: PreTrainedTokenizerBase) -> None:
    seen: list[Any] = []

    async def episode(client: Client, row: Any) -> list[Turns]:
        params = SamplingParams(max_new_tokens=40, stop=("!",))
        for stops in (params, SamplingParams(max_new_tokens=40)):
            sample = await client.generate(row["prompt_tokens"], stops)
            assert client.text is not None
            seen.append((sample.text, client.text(sample.tokens)))
        return [Turns().wrote(sample)]

    play(episode, chat, ["<|user|>a , b !", "four<|end|>"])  # type: ignore[arg-type]
    assert seen == [("<|user|>a , b ", "<|user|>a , b !"), (None, "four")]

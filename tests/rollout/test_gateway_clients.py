"""The real clients `openai` and `anthropic` against the gateway: what each field of a request does, what is refused,
and what a client makes of each error. Without them, that none of these is left out here."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.agent_packages import PYTHON, ROOT
from tests.package import modules
from tests.rollout.agent_bodies import ANTHROPIC_TOOL, CHAT_TOOL, FLAT_TOOL, SCHEMA
from tests.rollout.test_gateway_dialects import ASK, DIALECTS, REFUSED, SAMPLING
from tests.rollout.test_gateway_server import CALL, HELLO, PARAMS, Broken, Run
from tests.rollout.test_gateway_streaming import Stepping
from tests.rollout.test_tools import Scripted
from tests.templates import TOOL_FAMILIES
from verl.rollout.base import Request, Sample
from verl.rollout.episode import run_episodes
from verl.rollout.gateway import server
from verl.rollout.gateway.agents import agent_of
from verl.rollout.gateway.dialects.base import RequestError
from verl.rollout.gateway.gateway import Gateway
from verl.rollout.gateway.linking import Conversations

pytest.importorskip("aiohttp")
CLIENT = {"chat": "openai", "responses": "openai", "anthropic": "anthropic"}
METHOD = {"chat": "chat.completions.create", "responses": "responses.create", "anthropic": "messages.create"}
BASE: dict[str, dict[str, Any]] = {name: {"model": "any", **ask} for name, ask in ASK.items()}
BASE["anthropic"]["max_tokens"] = 100
Ask = tuple[str, str, dict[str, Any], dict[str, Any]]


def ask(dialect: str, fields: Mapping[str, Any], **options: Any) -> Ask:
    """A request: the client's package, its method, the fields, and options of the client."""
    return CLIENT[dialect], METHOD[dialect], {**BASE[dialect], **fields}, options


COMMAND = [str(PYTHON), str(ROOT / "tests" / "rollout" / "real_clients.py")]


def play(folder: Path, asks: Sequence[Ask], turns: Sequence[str] = (), **options: Any) -> tuple[Run, list[Any]]:
    """An episode in which the clients ask these, and what they make of the answers."""
    row = {"asks": asks, "out": str(folder / "out.json"), "at_once": options.pop("at_once", False)}
    run = Run(COMMAND, turns, row=row, **options)
    return run, json.loads((folder / "out.json").read_text())


# What fields do.

Check = Callable[[Any, Sequence[Any], Sequence[Request]], object]


def decoded(call: Any) -> str:
    return str(TOOL_FAMILIES["qwen2.5"].make().decode(call.sample.tokens))


def text_of(answer: Any) -> str:
    """What an answer says, in whichever dialect."""
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "output" in answer:
        return "".join(
            part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]
        )
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    if "choices" in answer:
        functions = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"] or []]
        return [(function["name"], json.loads(function["arguments"])) for function in functions]
    if "output" in answer:
        items = [item for item in answer["output"] if item["type"] == "function_call"]
        return [(item["name"], json.loads(item["arguments"])) for item in items]
    return [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]


def streamed(events: list[Any]) -> str:
    """The text of a stream."""
    if "choices" in events[0]:
        return "".join(choice["delta"]["content"] or "" for event in events for choice in event["choices"])
    deltas = [event.get("delta") for event in events]
    return "".join(delta if isinstance(delta, str) else (delta or {}).get("text") or "" for delta in deltas)


def prompt_has(*texts: str) -> Check:
    return lambda answer, calls, requests: all(text in calls[0].prompt.text for text in texts)


def is_called(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    return calls_of(answer) == [("add", {"a": 2, "b": 2})]


def is_text(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    return "<tool_call>" in text_of(answer) and not calls_of(answer)


def is_held(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    """The reply has a grammar, and what it left no choice for is not trained."""
    return requests[0].grammar is not None and any(calls[0].forced)


def is_called_and_held(*seen: Any) -> bool:
    return is_called(*seen) and is_held(*seen)


def is_cut(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    end = (answer.get("choices") or [answer])[0]
    reason = end.get("finish_reason") or end.get("stop_reason") or answer["incomplete_details"]["reason"]
    return len(calls[0].sample.tokens) == 2 and reason in ("length", "max_tokens", "max_output_tokens")


def is_stopped(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    """The stop string is not in the text, but among the trained tokens."""
    return text_of(answer) == "One " and decoded(calls[0]) == "One ### " and not calls[0].excluded


def are_siblings(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    numbers = [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in answer["choices"]]
    assert not any(call.excluded for call in calls) and len(requests) == 2
    return texts == ["One.", "Two."] and numbers == [call.sample.log_probs for call in calls]


def have_top(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    """The two likeliest tokens come with each, whole or streamed."""
    events = answer if isinstance(answer, list) else [answer]
    shown = [choice["logprobs"]["content"] for event in events for choice in event.get("choices", ())
             if choice["logprobs"]]  # fmt: skip
    bodies = [event.get("response", event) for event in events]
    items = [item for body in bodies for item in body.get("output") or () if item["type"] == "message"]
    shown += [item["content"][0]["logprobs"] for item in items]
    tops = [[top["logprob"] for top in token["top_logprobs"]] for token in shown[-1]]
    return tops == [[-0.5, -1.5]] * len(calls[0].sample.tokens) and requests[0].top_log_probs == 2


def is_sampled_as_the_run(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    return requests[0].params == PARAMS or requests[0].params.max_new_tokens == 100


def chat_stream(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    usage = answer[-1]["usage"]
    return streamed(answer) == "Hi ä🙂." and usage["completion_tokens"] == len(calls[0].sample.tokens)


def stream(answer: Any, calls: Sequence[Any], requests: Sequence[Request]) -> bool:
    return streamed(answer) == "Hi ä🙂." and answer[-1]["type"] in ("response.completed", "message_stop")


SAID, NUMBERS, STOPPED = ["Hi ä🙂.<|im_end|>"], ['{"a": 1, "b": 2}<|im_end|>'], ["One ### "]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hm, "}, {"type": "text", "text": "so?"}]}]
FUNCTION = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5, "b": 7}'}}
CHAT_HISTORY = [
    {"role": "developer", "content": "Help."}, *HELLO, {"role": "assistant", "content": None, "tool_calls": [FUNCTION]},
    {"role": "tool", "tool_call_id": "call1", "content": "12"}, *PARTS,
]  # fmt: skip
ITEMS = [
    *HELLO, {"type": "function_call", "call_id": "call1", **FUNCTION["function"]},  # type: ignore[dict-item]
    {"type": "function_call_output", "call_id": "call1", "output": "12"}, {"role": "user", "content": "Hm, so?"},
]  # fmt: skip
BLOCKS = [
    *HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 5}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "12"}, *PARTS[0]["content"]]},
]  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "Sum", "schema": SCHEMA, "strict": True}}
FLAT_FORM = {"format": {"type": "json_schema", "name": "Sum", "schema": SCHEMA, "strict": True}}
#: Dialect, fields, what the policy says, and what is to be seen then.
ANSWERED: list[tuple[str, dict[str, Any], list[str], Check]] = [
    ("chat", {"model": "gpt-4o", "messages": CHAT_HISTORY}, SAID, prompt_has("Help.", '"a": 5', "12", "Hm, so?")),
    ("chat", {"tools": [CHAT_TOOL]}, [CALL], is_called_and_held),
    ("chat", {"tools": [CHAT_TOOL], "tool_choice": "required"}, [CALL], is_called_and_held),
    ("chat", {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, [CALL], is_held),
    ("chat", {"tools": [CHAT_TOOL], "tool_choice": "none"}, [CALL], is_text),
    ("chat", {"response_format": FORM}, NUMBERS, is_held),
    ("chat", {"max_tokens": 2}, SAID, is_cut),
    ("chat", {"max_completion_tokens": 2, "max_tokens": 9}, SAID, is_cut),
    ("chat", {"stop": ["###"]}, STOPPED, is_stopped),
    ("chat", {"n": 2, "logprobs": True}, ["One.<|im_end|>", "Two.<|im_end|>"], are_siblings),
    ("chat", {"logprobs": True, "top_logprobs": 2}, SAID, have_top),
    ("chat", {"logprobs": True, "top_logprobs": 2, "stream": True}, SAID, have_top),
    ("chat", {"stream": True, "stream_options": {"include_usage": True}}, SAID, chat_stream),
    ("chat", SAMPLING, SAID, is_sampled_as_the_run),
    ("responses", {"model": "gpt-4o", "input": ITEMS, "instructions": "Help."}, SAID,
     prompt_has("Help.", '"a": 5', "12", "Hm, so?")),
    ("responses", {"tools": [FLAT_TOOL]}, [CALL], is_called_and_held),
    ("responses", {"tools": [FLAT_TOOL], "tool_choice": "required"}, [CALL], is_called_and_held),
    ("responses", {"text": FLAT_FORM}, NUMBERS, is_held),
    ("responses", {"max_output_tokens": 2}, SAID, is_cut),
    ("responses", {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, SAID, have_top),
    ("responses", {"top_logprobs": 2, "stream": True}, SAID, have_top),
    ("responses", {"stream": True}, SAID, stream),
    ("responses", {**SAMPLING, "store": False, "background": False}, SAID, is_sampled_as_the_run),
    ("anthropic", {"model": "claude-sonnet-4-5", "messages": BLOCKS, "system": [{"type": "text", "text": "Help."}]},
     SAID, prompt_has("Help.", '"a": 5', "12", "Hm, so?")),
    ("anthropic", {"tools": [ANTHROPIC_TOOL]}, [CALL], is_called),
    ("anthropic", {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}, [CALL], is_called_and_held),
    ("anthropic", {"output_config": FLAT_FORM}, NUMBERS, is_held),
    ("anthropic", {"max_tokens": 2}, SAID, is_cut),
    ("anthropic", {"stop_sequences": ["###"]}, STOPPED, is_stopped),
    ("anthropic", {"stream": True}, SAID, stream),
    ("anthropic", SAMPLING, SAID, is_sampled_as_the_run),
]  # fmt: skip


def peer(test: Any) -> Any:
    absent = pytest.mark.skipif(not PYTHON.exists(), reason="`benchmarks/peer_env.sh agents` makes the environment")
    return pytest.mark.slow(pytest.mark.peer(absent(test)))


@peer
@pytest.mark.parametrize("dialect", DIALECTS)
def test_fields_that_are_answered(dialect: str, tmp_path: Path) -> None:
    """Each has its effect, and each call is a trajectory of its own, all of it trained."""
    pytest.importorskip("xgrammar")
    rows = [row for row in ANSWERED if row[0] == dialect]
    turns = [turn for row in rows for turn in row[2]]
    run, seen = play(tmp_path, [ask(dialect, fields) for _, fields, _, _ in rows], turns, train=lambda call: True)
    assert len(run.record.calls) == len(turns) and sum(len(one.calls) for one in run.record.trajectories) == len(turns)
    start = 0
    for (_, fields, said, check), result in zip(rows, seen, strict=True):
        assert "answer" in result, (fields, result)
        part = slice(start, start + len(said))
        assert check(result["answer"], run.record.calls[part], run.engine.requests[part]), (fields, result)
        start += len(said)


def refusal(dialect: str, fields: Mapping[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        DIALECTS[dialect].read({**ASK[dialect], **fields})
    return caught.value


@peer
@pytest.mark.parametrize("dialect", DIALECTS)
def test_fields_that_are_refused(dialect: str, tmp_path: Path) -> None:
    rows = [(fields, message) for name, fields, message in REFUSED if name == dialect]
    _, seen = play(tmp_path, [*(ask(dialect, fields) for fields, _ in rows), ask(dialect, {})], SAID)
    for (fields, message), result in zip(rows, seen, strict=False):
        assert "BadRequestError" in result.get("error", ()), (fields, result)
        assert re.search(message, result["message"]), (fields, result)
        if dialect != "anthropic":
            assert result["code"] == refusal(dialect, fields).code, (fields, result)
    assert text_of(seen[-1]["answer"]) == "Hi ä🙂."


# What clients make of errors.

#: Package, then status -> the class of its error; the others are `APIStatusError`.
CLASSES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    429: "RateLimitError", 500: "InternalServerError", 502: "InternalServerError", 503: "InternalServerError",
}  # fmt: skip
LONG = [*HELLO, {"role": "assistant", "content": "Yes."}, *HELLO] * 150
DEEP: Any = json.loads("[" * 70 + "]" * 70)
#: Status, code, what the message says, fields, and options of the client.
BAD_REQUESTS: list[tuple[int, str | None, str, dict[str, Any], dict[str, Any]]] = [
    (401, "invalid_api_key", "not that of an episode", {}, {"api_key": "sk-other"}),
    (421, None, "answers to no other name", {}, {"default_headers": {"Host": "example.org"}}),
    (403, None, "web pages", {}, {"default_headers": {"Origin": "http://127.0.0.1"}}),
    (415, "unsupported_media_type", "application/json", {}, {"default_headers": {"Content-Type": "text/plain"}}),
    (413, "request_too_large", "at most", {"user": "x" * (17 << 20)}, {}),
    (400, "invalid_json", "nested at most 64", {"deep": DEEP}, {}),
    (404, "model_not_found", "no model 'nobody'", {"model": "nobody"}, {}),
    (502, "model_failed", "'broken' cannot be asked", {"model": "broken"}, {}),
    (400, "context_length_exceeded", "prompt is too long", {"messages": LONG}, {}),
    (400, "context_length_exceeded", "prompt is too long", {"messages": LONG, "stream": True}, {}),
]
BUDGET = (403, "budget_exceeded", "bounds are used up")
#: What the server does to a good request, and what its client hears.
FAULTS = {
    "engine": (503, "engine_failed", "no weights"),
    "gateway": (500, None, "the gateway failed"),
    "late": (408, "timeout", "did not arrive"),
    "many": (429, "rate_limit_exceeded", "requests are open"),
    "ended": (403, "episode_ended", "has ended"),
}
#: Method of the client, its fields, status and code; what has no code is answered.
PLACES: dict[str, list[tuple[str, dict[str, Any], int, str | None]]] = {
    "openai": [
        ("embeddings.create", {"model": "any", "input": "x"}, 404, "not_found"),
        ("files.list", {}, 404, "not_found"),
        ("audio.speech.create", {"model": "any", "voice": "x", "input": "x"}, 404, "not_found"),
        ("batches.list", {}, 404, "not_found"),
        ("responses.retrieve", {"response_id": "resp_1"}, 404, "not_found"),
        ("get", {"path": "/chat/completions"}, 405, "method_not_allowed"),
        ("models.list", {}, 200, None),
        ("models.retrieve", {"model": "gpt-4o"}, 200, None),
    ],
    "anthropic": [
        ("messages.batches.list", {}, 404, None),
        ("get", {"path": "/v1/messages"}, 405, None),
        ("models.list", {}, 200, None),
        ("messages.count_tokens", {"model": "any", "messages": HELLO}, 200, None),
    ],
}
PACKAGES = {"openai": "chat", "anthropic": "anthropic"}


def check_error(result: Any, package: str, status: int, code: str | None, text: str) -> None:
    assert CLASSES.get(status, "APIStatusError") in result.get("error", ()), result
    assert result["status_code"] == status and text in result["message"], result
    if package == "openai":
        assert result["code"] == code, result


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all requests that arrive."""
    real, paths = server.Listener._handle, list[str]()

    async def handle(self: Any, request: Any) -> Any:
        paths.append(request.path)
        return await real(self, request)

    monkeypatch.setattr(server.Listener, "_handle", handle)
    return paths


@peer
@pytest.mark.parametrize("package", PACKAGES)
def test_requests_that_are_not_answered(package: str, tmp_path: Path, asked: list[str]) -> None:
    """Each is sent once, but for those that may succeed later."""
    dialect = PACKAGES[package]
    asks = [ask(dialect, fields, max_retries=1, **options) for _, _, _, fields, options in BAD_REQUESTS]
    asks += [ask(dialect, {}), ask(dialect, {}, max_retries=1)]
    models = {"nobody": None, "broken": "http://127.0.0.1:1/v1"}
    run, seen = play(tmp_path, asks, SAID, max_length=600, max_calls=1, models=models)
    for (status, code, text, *_), result in zip(BAD_REQUESTS, seen, strict=False):
        check_error(result, package, status, code, text)
    assert text_of(seen[-2]["answer"]) == "Hi ä🙂."
    check_error(seen[-1], package, *BUDGET)
    assert len(asked) == len(asks) + sum(status >= 500 for status, *_ in BAD_REQUESTS)
    assert run.record.truncated and run.outcome.responses[0].reward == 1.0


@peer
@pytest.mark.parametrize("package", PACKAGES)
def test_places(package: str, tmp_path: Path) -> None:
    asks: list[Ask] = [(package, call, fields, {}) for call, fields, _, _ in PLACES[package]]
    _, seen = play(tmp_path, [*asks, ask(PACKAGES[package], {})], SAID)
    for (_, _, status, code), result in zip(PLACES[package], seen, strict=False):
        if status == 200:
            assert "answer" in result, result
        else:
            check_error(result, package, status, code, "/v1/chat/completions" if status == 404 else "POST")


class Slow(Stepping):
    pause = 0.05


@peer
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_faults(dialect: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    package, count = CLIENT[dialect], 1
    options: dict[str, Any] = {"engine": Scripted}
    asks = [ask(dialect, {}, max_retries=1)]
    if fault == "engine":
        options = {"engine": Broken}
    elif fault == "gateway":
        monkeypatch.setattr(Conversations, "prompt", lambda *arguments: 1 / 0)
    elif fault == "late":
        monkeypatch.setattr(server, "BODY_SECONDS", 0.3)
        paths = {"chat": "/chat/completions", "responses": "/responses", "anthropic": "/v1/messages"}
        sent = {"path": paths[dialect], "content": "trickle"}
        headers = {"default_headers": {"Content-Type": "application/json"}}
        asks = [(package, "post", sent, {**headers, "max_retries": 1})]
    elif fault == "many":
        count = 40
        asks = [ask(dialect, {}) for _ in range(count)]
        options = {"engine": Slow, "at_once": True}
    if fault == "ended":
        seen = asyncio.run(with_an_ended_key(dialect, tmp_path))
    else:
        run, seen = play(tmp_path, asks, ["Word " * 20] * count, **options)
    refused = [result for result in seen if "error" in result]
    assert len(refused) == (count - 32 if fault == "many" else count)
    for result in refused:
        check_error(result, package, *FAULTS[fault])
    if fault in ("engine", "gateway"):
        assert run.outcome.reason == "fault" and len(asked) == 4  # sent twice, by the agent and once more
    elif fault == "late":
        assert len(asked) == 1


@peer
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_client_that_is_told_not_to_retry_asks_once(
    dialect: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """By `x-should-retry: false`, of a status that both packages try again by themselves."""

    async def late(request: Any) -> bytes:
        raise RequestError(408, "the body did not arrive", code="timeout")

    real = server.Listener._sent

    async def without_headers(self: Any, request: Any, body: Any, status: int = 200, headers: Any = None) -> Any:
        return await real(self, request, body, status)

    monkeypatch.setattr(server, "_body", late)
    if not is_told:
        monkeypatch.setattr(server.Listener, "_sent", without_headers)
    _, seen = play(tmp_path, [ask(dialect, {}, max_retries=2)])
    check_error(seen[0], CLIENT[dialect], *FAULTS["late"])
    assert len(asked) == (1 if is_told else 3)


async def with_an_ended_key(dialect: str, folder: Path) -> Any:
    """An episode whose agent uses the key of an earlier one."""
    keys: list[str] = []

    async def agent(base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        keys.append(api_key)
        if len(keys) == 1:
            return 1.0
        asks = [ask(dialect, {}, api_key=keys[0], max_retries=1)]
        agent = agent_of(COMMAND, {}, None, 60.0)
        return await agent(base_url, api_key, {"asks": asks, "out": str(folder / "out.json")})

    tokenizer = TOOL_FAMILIES["qwen2.5"].make()
    async with server.listening():
        for name in ("a", "b"):
            rows = [{"id": name, "prompt_tokens": [1]}]
            async for _ in run_episodes(Scripted(tokenizer, []), rows, PARAMS, Gateway(agent), tokenizer=tokenizer):
                pass
    return json.loads((folder / "out.json").read_text())


class Breaking(Stepping):
    """Fails after two tokens, slowly."""

    pause = 0.2

    def step(self) -> list[Sample]:
        if self.steps == 3:
            raise RuntimeError("out of memory")
        return super().step()


@peer
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_that_is_kept_alive_and_fails(dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ALIVE_SECONDS", 0.05)
    with pytest.raises(RuntimeError, match="out of memory"):
        play(tmp_path, [ask(dialect, {"stream": True})], ["Word word word.<|im_end|>"], engine=Breaking)
    (result,) = json.loads((tmp_path / "out.json").read_text())
    assert "APIError" in result["error"] and "out of memory" in result["message"], result


@peer
@pytest.mark.parametrize("dialect", DIALECTS)
def test_usage_has_cached_tokens_apart(dialect: str, tmp_path: Path) -> None:
    say = {"role": "assistant", "content": "One."}
    more = {"input" if dialect == "responses" else "messages": [*HELLO, say, *HELLO]}
    first = {"input" if dialect == "responses" else "messages": HELLO}
    run, seen = play(tmp_path, [ask(dialect, first), ask(dialect, more)], ["One.<|im_end|>", "Two.<|im_end|>"])
    one, two = run.record.calls
    length, cached = len(two.prompt.tokens), len(one.prompt.tokens) + len(one.sample.tokens)
    usage = seen[1]["answer"]["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    counted = (usage.get("prompt_tokens", usage.get("input_tokens")), details.get("cached_tokens"))
    sampled = usage.get("completion_tokens", usage.get("output_tokens"))
    if dialect == "anthropic":
        counted = (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"])
    assert (*counted, sampled) == (length, cached, len(two.sample.tokens)) and len(run.record.trajectories) == 1


# That nothing is left out.


def words(fields: Any) -> Iterator[str]:
    """The names of fields, and of types of what they hold."""
    for name, value in fields.items():
        yield name
        yield from types(value)


def types(value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            yield str(item.get("type"))
            for inner in item.values():
                yield from types(inner)


def sent(dialect: str) -> set[str]:
    tables = [row[:2] for row in ANSWERED] + [row[:2] for row in REFUSED]
    return {word for name, fields in tables if name == dialect for word in words(fields)}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_field_that_is_read_or_refused_is_sent(dialect: str) -> None:
    table = DIALECTS[dialect]
    assert {*table.fields, *table.refused, *SAMPLING} - sent(dialect) == set()


#: First cells of the table of fields in the docs -> what is sent of them, in each dialect that has it.
ROWS = {
    "`model`": {"chat": "model", "responses": "model", "anthropic": "model"},
    "`temperature`, `top_p`, `top_k`, penalties, `logit_bias`, `seed`": dict.fromkeys(
        DIALECTS, "temperature top_p top_k presence_penalty frequency_penalty logit_bias seed"
    ),
    "`max_tokens` and its kin": {
        "chat": "max_tokens max_completion_tokens", "responses": "max_output_tokens", "anthropic": "max_tokens",
    },
    "`stop`": {"chat": "stop", "anthropic": "stop_sequences"},
    "`n`, `logprobs`, `top_logprobs`": {"chat": "n logprobs top_logprobs", "responses": "top_logprobs include"},
    "`stream`": {"chat": "stream stream_options", "responses": "stream", "anthropic": "stream"},
    "what is stored (`previous_response_id`, `store`), images, files, hosted tools": {
        "chat": "store image_url file input_audio web_search audio",
        "responses": "previous_response_id store background conversation item_reference input_image input_file "
        "web_search",
        "anthropic": "image document bash_20250124 mcp_servers container",
    },
    "anything else": {"chat": "web_search_options", "responses": "include", "anthropic": "thinking"},
}  # fmt: skip


def test_each_row_of_the_table_of_fields_is_tried() -> None:
    page = (ROOT / "docs" / "episodes.md").read_text("utf-8").partition("### Fields of a request")[2]
    table = page.strip().partition("\n\n")[0].splitlines()
    assert {*ROWS} == {line.split(" | ")[0].removeprefix("| ") for line in table[2:]}
    for row, of_dialects in ROWS.items():
        for dialect, fields in of_dialects.items():
            assert {*fields.split()} - sent(dialect) == set(), row


def errors() -> set[tuple[int, str | None]]:
    """Status and code of each error in the source of the gateway."""
    result: set[tuple[int, str | None]] = {(400, "context_length_exceeded")}
    for place, (_, tree) in modules().items():
        if place.startswith("rollout/gateway/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "RequestError":
                    named = {word.arg: word.value for word in node.keywords}
                    code = named.get("code", node.args[3] if len(node.args) > 3 else None)
                    result.add((ast.literal_eval(node.args[0]), ast.literal_eval(code) if code is not None else None))
    return result


def test_each_error_is_met() -> None:
    tried = {row[:2] for row in (*BAD_REQUESTS, *FAULTS.values(), BUDGET)} | {(s, c) for *_, s, c in PLACES["openai"]}
    refusals = [refusal(dialect, fields) for dialect, fields, _ in REFUSED]
    tried |= {(error.status, error.code) for error in refusals}
    assert errors() - tried == set() and len(errors()) > 15
    assert {status for status, _ in errors()} <= {row[0] for row in (*BAD_REQUESTS, *FAULTS.values())} | {405}

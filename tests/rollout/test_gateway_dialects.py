"""The forms of OpenAI and Anthropic: what packages send is read, what the policy says comes back as it was, and what
would be ignored is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rollout import agent_bodies
from verl.rollout.gateway.dialects.anthropic import ANTHROPIC
from verl.rollout.gateway.dialects.base import (
    ChatAnswer,
    ChatRequest,
    Dialect,
    LongRequestError,
    Part,
    Reply,
    RequestError,
    Token,
)
from verl.rollout.gateway.dialects.chat import CHAT
from verl.rollout.gateway.dialects.responses import RESPONSES
from verl.rollout.gateway.messages import Message, ToolCall

DIALECTS = {"chat": CHAT, "responses": RESPONSES, "anthropic": ANTHROPIC}
BODIES = {"chat": agent_bodies.CHAT, "responses": agent_bodies.RESPONSES, "anthropic": agent_bodies.ANTHROPIC}
SENT = [(dialect, package) for dialect, bodies in BODIES.items() for package in bodies]
ASK = {
    "chat": {"messages": [{"role": "user", "content": "Hm?"}]},
    "responses": {"input": "Hm?"},
    "anthropic": {"messages": [{"role": "user", "content": "Hm?"}]},
}
CALLS = (ToolCall("add", '{"b": 2, "a": 2}', "call00000"), ToolCall("add", '{"a": 1, "b": 1}', "call00001"))
#: The policy's message, with white space around and characters of several bytes.
SAID = Message("assistant", "\n\nLet me compute äöü 🙂. " + "Long. " * 40, CALLS, "two and two")


def answer(message: Message = SAID, finish: Any = "tool_calls", **options: Any) -> ChatAnswer:
    reply = Reply("000003", message, finish, **options)
    return ChatAnswer(7, (reply,), 20, 5, 9)


@pytest.mark.parametrize(("dialect", "package"), SENT)
def test_what_packages_send_is_read(dialect: str, package: str) -> None:
    body = BODIES[dialect][package]
    request = DIALECTS[dialect].read(json.loads(json.dumps(body)))
    assert request.model == body["model"] and request.stream == body.get("stream", False)
    assert request.messages[-1] == Message("user", "What is 2 + 2?")
    assert [tool["function"]["name"] for tool in request.tools][:1] == (["add"] if "tools" in body else [])
    is_strict = any({**tool, **tool.get("function", {})}.get("strict") for tool in body.get("tools", ()))
    assert request.strict == (frozenset({"add"}) if is_strict else frozenset())
    assert all(tool["function"]["parameters"]["type"] == "object" for tool in request.tools)
    assert [m.content for m in request.messages[:-1]] == (["Help."] if {"system", "instructions"} & {*body} else [])
    assert request.max_tokens == body.get("max_tokens") and request.stop == tuple(body.get("stop", ()))
    assert request.choice == ("required" if body.get("tool_choice") == "required" else "auto")
    assert (request.schema is not None) == ("response_format" in body)
    assert request.stream_usage == ("stream_options" in body)


def history(dialect: str, message: Message, results: list[str]) -> dict[str, Any]:
    """The next request, which has the assistant's message as this dialect answered it."""
    form = DIALECTS[dialect]
    said: Any = json.loads(json.dumps(form.answer(form.read({"model": "any", **ASK[dialect]}), answer(message))))
    ids = [call.id for call in message.calls]
    if dialect == "chat":
        told = [{"role": "tool", "content": text, "tool_call_id": id_} for text, id_ in zip(results, ids, strict=True)]
        return {"messages": [*ASK[dialect]["messages"], said["choices"][0]["message"], *told]}
    if dialect == "responses":
        outputs = [
            {"type": "function_call_output", "call_id": i, "output": r} for r, i in zip(results, ids, strict=True)
        ]
        return {"input": [{"role": "user", "content": "Hm?"}, *said["output"], *outputs]}
    blocks = [{"type": "tool_result", "tool_use_id": i, "content": r} for r, i in zip(results, ids, strict=True)]
    turn = {"role": said["role"], "content": said["content"]}
    return {"messages": [*ASK[dialect]["messages"], turn, {"role": "user", "content": blocks or "On."}]}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("message", [SAID, Message("assistant", "Four."), Message("assistant", "", CALLS)])
def test_what_was_said_comes_back_equal(dialect: str, message: Message) -> None:
    body = history(dialect, message, ["4", "2"][: len(message.calls)])
    back = DIALECTS[dialect].read({"model": "any", **body}).messages
    assert back[0] == Message("user", "Hm?")
    assert back[1].key == message.key and back[1].reasoning == message.reasoning
    if message.calls:
        assert [(m.role, m.content, m.call_id) for m in back[2:]] == [
            ("tool", "4", "call00000"),
            ("tool", "2", "call00001"),
        ]


def test_forms_that_packages_send_back_are_equal() -> None:
    """Of the table in which each package rewrites the assistant's message in its own way."""
    said = Message("assistant", "Let me.", CALLS[:1], "two and two")
    function = {"name": "add", "arguments": '{"b":2,"a":2}'}
    call = {"id": "1", "type": "function", "function": function}
    pydantic = {"role": "assistant", "content": "Let me.", "reasoning_content": "two and two", "tool_calls": [call]}
    parts = [{"type": "text", "text": "Let "}, {"type": "text", "text": "me."}]
    other = {"function": {**function, "arguments": '{"a": 2.0, "b": 2}'}, "type": "function", "id": "2"}
    langgraph = {"content": parts, "role": "assistant", "tool_calls": [other]}
    for message in (pydantic, langgraph):
        assert CHAT.read({"messages": [message]}).messages[0].key == said.key
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"role": "assistant", "content": "Let me."},
        {"type": "function_call", "call_id": "1", **function},
    ]
    (message,) = RESPONSES.read({"input": items}).messages
    assert message.key == said.key and message.reasoning == ""
    # A text behind a call begins another message, and so does a thought.
    more = [*items, {"role": "assistant", "content": "And."}, items[2], items[0], items[1]]
    assert [len(m.calls) for m in RESPONSES.read({"input": more}).messages] == [1, 1, 0]


def events_of(form: Dialect, request: ChatRequest, result: ChatAnswer, size: int = 1000) -> Iterator[str]:
    """A stream whose replies are written in parts of so many characters."""
    events = form.events(request)
    empty = tuple(Reply(reply.id, Message("assistant"), "stop") for reply in result.replies)
    yield from events.begin(ChatAnswer(result.created, empty, result.prompt, result.cached, result.sampled))
    for index, reply in enumerate(result.replies):
        for name, text in (("reasoning", reply.message.reasoning), ("content", reply.message.content)):
            for start in range(0, len(text), size):
                yield from events.part(Part(index, **{name: text[start : start + size]}))
    yield from events.end(result)


def sse(text: Iterator[str]) -> list[tuple[str, Any]]:
    events = []
    for block in "".join(text).split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def streamed(dialect: str, events: list[tuple[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thought, text and calls of a stream, put together as clients do."""
    thought, text, calls = "", "", list[list[str]]()
    for name, data in events:
        if dialect == "chat":
            for choice in data["choices"] if data != "[DONE]" else []:
                delta = choice["delta"]
                thought += delta.get("reasoning_content") or ""
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or []:
                    if "id" in call:
                        calls.append([call["function"]["name"], ""])
                    calls[call["index"]][1] += call["function"]["arguments"]
        elif dialect == "responses":
            assert data["type"] == name
            thought += data["delta"] if name == "response.reasoning_text.delta" else ""
            text += data["delta"] if name == "response.output_text.delta" else ""
            if name == "response.output_item.added" and data["item"]["type"] == "function_call":
                calls.append([data["item"]["name"], ""])
            if name == "response.function_call_arguments.delta":
                calls[-1][1] += data["delta"]
        else:
            assert data["type"] == name
            delta = data.get("delta", {})
            thought += delta.get("thinking", "")
            text += delta.get("text", "")
            if name == "content_block_start" and data["content_block"]["type"] == "tool_use":
                calls.append([data["content_block"]["name"], ""])
            if "partial_json" in delta:
                calls[-1][1] += delta["partial_json"]
    return thought, text, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_says_what_the_answer_says(dialect: str) -> None:
    form = DIALECTS[dialect]
    request = form.read({"model": "any", **ASK[dialect], "stream": True})
    events = sse(events_of(form, request, answer(), 7))
    assert streamed(dialect, events) == (SAID.reasoning, SAID.content, [(c.name, c.arguments) for c in SAID.calls])


def test_the_order_of_a_stream() -> None:
    request = ChatRequest("any", ())
    short = answer(Message("assistant", "Hi.", CALLS[:1], "Hm."))
    assert [name for name, _ in sse(events_of(ANTHROPIC, request, short))] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"],  # and a signature
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        *["message_delta", "message_stop"],
    ]
    events = sse(events_of(RESPONSES, request, short))
    item = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert [name.removeprefix("response.") for name, _ in events] == [
        *["created", "in_progress"],
        *[*item[0], "reasoning_text.delta", "reasoning_text.done", *item[1]],
        *[*item[0], "output_text.delta", "output_text.done", *item[1]],
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"],
        "completed",
    ]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert events[-1][1]["response"] == RESPONSES.answer(request, short)
    chat = [data for _, data in sse(events_of(CHAT, request, short))]
    assert chat[-1] == "[DONE]" and chat[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert all("usage" not in chunk for chunk in chat[:-1])  # nobody asked
    asked = ChatRequest("any", (), stream_usage=True)
    last = [data for _, data in sse(events_of(CHAT, asked, short))][-2]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 29


def test_usage_has_cached_tokens_apart() -> None:
    request, result = ChatRequest("any", ()), answer()
    chat = CHAT.answer(request, result)["usage"]
    assert (chat["prompt_tokens"], chat["completion_tokens"], chat["prompt_tokens_details"]["cached_tokens"]) == (
        20,
        9,
        5,
    )
    responses = RESPONSES.answer(request, result)["usage"]
    assert (responses["input_tokens"], responses["input_tokens_details"]["cached_tokens"]) == (20, 5)
    anthropic = ANTHROPIC.answer(request, result)["usage"]
    assert (anthropic["input_tokens"], anthropic["cache_read_input_tokens"], anthropic["output_tokens"]) == (15, 5, 9)


def test_how_a_reply_ended() -> None:
    request, text = ChatRequest("any", ()), Message("assistant", "Hi.")
    assert CHAT.answer(request, answer(text, "length"))["choices"][0]["finish_reason"] == "length"
    cut = RESPONSES.answer(request, answer(text, "length"))
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    ends = [("stop", None, "end_turn"), ("length", None, "max_tokens"), ("stop", "###", "stop_sequence")]
    for finish, stopped_by, reason in ends:
        result = ANTHROPIC.answer(request, answer(text, finish, stopped_by=stopped_by))
        assert (result["stop_reason"], result["stop_sequence"]) == (reason, stopped_by)


def test_siblings_and_log_probs() -> None:
    request = CHAT.read({**ASK["chat"], "n": 2, "logprobs": True})
    assert request.n == 2 and request.log_probs
    replies = tuple(Reply(f"00000{n}", Message("assistant", "ä"), "stop", tokens=(Token("ä", -0.5),)) for n in range(2))
    choices = CHAT.answer(request, ChatAnswer(7, replies))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    token = {"token": "ä", "bytes": [195, 164], "logprob": -0.5, "top_logprobs": []}
    assert [choice["logprobs"]["content"] for choice in choices] == [[token]] * 2


TOKENS = (Token("H", -0.5, (("H", -0.5), ("ä", -1.5))), Token("i", -2.0, (("o", -0.25), ("e", -1.75))))


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_the_likeliest_tokens_come_whole_and_streamed(dialect: str) -> None:
    form = DIALECTS[dialect]
    fields = {"logprobs": True, "top_logprobs": 2} if dialect == "chat" else {"top_logprobs": 2}
    request = form.read({**ASK[dialect], **fields, "stream": True})
    assert request.log_probs and request.top_log_probs == 2
    result = answer(Message("assistant", "Hi", CALLS, "Hm." if dialect == "responses" else ""), tokens=TOKENS)
    body: Any = form.answer(request, result)
    events = sse(events_of(form, request, result, 1))
    if dialect == "chat":
        whole = body["choices"][0]["logprobs"]["content"]
        parts = [choice["logprobs"] for _, data in events if data != "[DONE]" for choice in data["choices"]]
        (streamed_,) = [part["content"] for part in parts if part is not None]
    else:
        whole = body["output"][1]["content"][0]["logprobs"]
        by_name = dict(events)
        streamed_ = by_name["response.output_text.done"]["logprobs"]
        assert by_name["response.completed"]["response"] == body
        assert [data["logprobs"] for name, data in events if name == "response.output_text.delta"] == [[], []]
        (done,) = [data["item"] for name, data in events if name.endswith("item.done") and "role" in data["item"]]
        assert done == body["output"][1]
    assert whole == streamed_
    assert [(token["token"], token["logprob"]) for token in whole] == [("H", -0.5), ("i", -2.0)]
    tops = [[(top["token"], top["logprob"], bytes(top["bytes"])) for top in token["top_logprobs"]] for token in whole]
    assert tops == [[(text, number, text.encode()) for text, number in token.top] for token in TOKENS]


def test_log_probs_of_the_responses() -> None:
    assert not RESPONSES.read(ASK["responses"]).log_probs
    request = RESPONSES.read({**ASK["responses"], "include": ["message.output_text.logprobs"]})
    assert (request.log_probs, request.top_log_probs) == (True, 0)


SAMPLING = {"temperature": 0.3, "top_p": 0.5, "top_k": 3, "presence_penalty": 1, "frequency_penalty": 1, "seed": 3,
            "logit_bias": {"3": 1}}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_sampling_is_recorded(dialect: str) -> None:
    assert DIALECTS[dialect].read({**ASK[dialect], **SAMPLING}).sampling == SAMPLING


def test_the_least_limit_of_tokens_holds() -> None:
    assert CHAT.read({**ASK["chat"], "max_tokens": 9, "max_completion_tokens": 7}).max_tokens == 7
    assert RESPONSES.read({**ASK["responses"], "max_output_tokens": 7}).max_tokens == 7
    assert ANTHROPIC.read({**ASK["anthropic"], "max_tokens": 64000}).max_tokens == 64000
    assert CHAT.read(ASK["chat"]).max_tokens is None


#: Fields that ask for what there is not, and what their error says.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("responses", {"previous_response_id": "resp_1"}, "'previous_response_id'.*send the whole conversation"),
    ("responses", {"conversation": "c"}, "'conversation'.*send the whole conversation"),
    ("responses", {"prompt": {"id": "p"}}, "'prompt'.*send the whole conversation"),
    ("responses", {"store": True}, "'store'.*send false"),
    ("responses", {"background": True}, "'background'.*stream it"),
    ("responses", {"include": ["x"]}, "'include' is not supported"),
    ("responses", {"top_logprobs": -1}, "'top_logprobs' is from 0 to 20"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].*'item_reference'"),
    ("responses", {"tools": [{"type": "web_search"}]}, "'web_search' is run by no one"),
    ("responses", {"input": []}, "'input' is empty"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file'"),
    ("responses", {"text": {"format": {"type": "grammar"}}}, "text.format"),
    ("chat", {"store": True}, "'store'.*nothing is stored"),
    ("chat", {"audio": {"voice": "x"}}, "'audio'.*models of text"),
    ("chat", {"modalities": ["text", "audio"]}, "'modalities'.*models of text"),
    ("chat", {"functions": [{}]}, "'functions'.*as tools"),
    ("chat", {"function_call": "auto"}, "'function_call'.*send tool_choice"),
    ("chat", {"tools": [{"type": "web_search"}]}, "'web_search' is run by no one"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "'input_audio'.*models of text"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "'file'.*models of text"),
    ("chat", {"web_search_options": {}}, "'web_search_options' is not supported here: leave it out"),
    ("chat", {"top_logprobs": 3}, "'top_logprobs' needs logprobs: true"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "'top_logprobs' is from 0 to 20"),
    ("chat", {"logprobs": True, "top_logprobs": True}, "'top_logprobs' is not of the type int"),
    ("chat", {"parallel_tool_calls": False}, "'parallel_tool_calls' is not supported"),
    ("chat", {"reasoning_effort": "high"}, "'reasoning_effort' is not supported"),
    ("chat", {"messages": []}, "'messages' is empty"),
    ("chat", {"messages": "Hm?"}, "'messages' is a list of objects"),
    ("chat", {"messages": [{"role": "god", "content": ""}]}, r"messages\[0\].role.*'god'"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'.*models of text"),
    ("chat", {"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "without a function's name"),
    ("chat", {"tool_choice": "required"}, "no tool to call"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, r"no tool to call \(f\)"),
    ("chat", {"response_format": {"type": "json_schema"}}, "no JSON schema"),
    ("chat", {"max_tokens": 0}, "'max_tokens' must be at least 1"),
    ("chat", {"max_tokens": "9"}, "'max_tokens' is not of the type int"),
    ("chat", {"max_tokens": True}, "'max_tokens' is not of the type int"),
    ("chat", {"n": 0}, "'n' must be at least 1"),
    ("chat", {"stop": 3}, "'stop' is a text"),
    ("anthropic", {"mcp_servers": [{}]}, "'mcp_servers'.*give tools"),
    ("anthropic", {"container": "c"}, "'container'.*give tools"),
    ("anthropic", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'.*models of text"),
    ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 1}}, "'thinking' is not supported"),
    ("anthropic", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124' is run by no one"),
    ("anthropic", {"tool_choice": {"type": "any"}}, "no tool to call"),
    ("anthropic", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'.*models of text"),
    ("anthropic", {"messages": [{"role": "assistant", "content": "y"}]}, "must end with a user"),
    ("anthropic", {"output_config": {"effort": "high"}}, "'output_config.effort'"),
]  # fmt: skip


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(("dialect", "fields", "message"), REFUSED)
def test_what_would_be_ignored_is_refused_by_name(dialect: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        DIALECTS[dialect].read({**ASK[dialect], **fields})
    assert caught.value.status == 400 and not caught.value.retry


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("chat", {"store": False, "parallel_tool_calls": True, "user": None, "top_logprobs": 0, "unknown": None}),
        ("responses", {"store": False, "include": [], "truncation": "disabled", "previous_response_id": None}),
        ("anthropic", {"thinking": {"type": "disabled"}, "metadata": None}),
    ],
)
def test_null_and_default_ask_for_nothing(dialect: str, fields: dict[str, Any]) -> None:
    assert DIALECTS[dialect].read({**ASK[dialect], **fields}) == DIALECTS[dialect].read(ASK[dialect])


def test_a_forced_tool_and_a_schema() -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    assert CHAT.read({**ASK["chat"], "tools": [agent_bodies.CHAT_TOOL], "tool_choice": tool}).choice == "add"
    forced = {"tools": [agent_bodies.FLAT_TOOL], "tool_choice": {"type": "function", "name": "add"}}
    assert RESPONSES.read({**ASK["responses"], **forced}).choice == "add"
    for kind, choice in (("any", "required"), ("auto", "auto"), ("none", "none")):
        body = {**ASK["anthropic"], "tools": [agent_bodies.ANTHROPIC_TOOL], "tool_choice": {"type": kind}}
        assert ANTHROPIC.read(body).choice == choice
    form = {"format": {"type": "json_schema", "name": "x", "schema": agent_bodies.SCHEMA}}
    assert RESPONSES.read({**ASK["responses"], "text": form}).schema == agent_bodies.SCHEMA
    assert ANTHROPIC.read({**ASK["anthropic"], "output_config": form}).schema == agent_bodies.SCHEMA
    assert CHAT.read({**ASK["chat"], "response_format": {"type": "json_object"}}).schema == {"type": "object"}


def test_results_and_texts_of_one_user_turn() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "4"}]},
        {"type": "text", "text": "So "},
        {"type": "text", "text": "what?"},
        {"type": "tool_result", "tool_use_id": "2"},
    ]
    messages = ANTHROPIC.read({"messages": [{"role": "user", "content": blocks}]}).messages
    assert messages == (
        Message("tool", "4", call_id="1"),
        Message("user", "So what?"),
        Message("tool", "", call_id="2"),
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_errors_have_the_form_of_their_dialect(dialect: str) -> None:
    form: Dialect = DIALECTS[dialect]
    long: Any = form.error(LongRequestError(9000, 8192))["error"]
    assert "prompt is too long: 9000 tokens > 8192" in long["message"]
    assert "context_length_exceeded" in long["message"]
    assert long["type"] == "invalid_request_error"
    if dialect != "anthropic":
        assert long["code"] == "context_length_exceeded" and long["param"] == "messages"
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    for status, kind in kinds.items():
        assert form.error(RequestError(status, "?"))["error"]["type"] == kind
    assert RequestError(503, "?").retry and not RequestError(403, "?").retry
    (event,) = sse(iter([form.failure(RequestError(503, "the engine failed"))]))
    assert "the engine failed" in json.dumps(event)

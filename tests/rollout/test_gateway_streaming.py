"""Replies while they are written: what a stream shows is what the reply says, nothing of it too early, and a client
that goes away ends its generation within a step."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.rollout.test_gateway_bounds import head, port_of
from tests.rollout.test_gateway_dialects import streamed
from tests.rollout.test_gateway_replies import WEATHER, WRITTEN
from tests.rollout.test_gateway_server import ADD, CALL, HELLO, Run, asking
from tests.rollout.test_tools import Scripted
from tests.templates import FAMILIES, TOOL_FAMILIES
from verl.models.packed import PackedModel
from verl.rollout.base import Request, Sample, SamplingParams, generate
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.rollout.gateway import server
from verl.rollout.gateway.messages import Message, without_begun
from verl.rollout.gateway.session import ReplyStream
from verl.rollout.gateway.template import ChatTemplate
from verl.rollout.hf import HFEngine
from verl.rollout.stop_strings import cut_text

pytest.importorskip("aiohttp")
LLAMA = '{"name": "weather", "parameters": {"days": 3}}'
#: Pieces that replies are made of: calls, what looks like the beginning of one, thoughts, bytes of several characters.
PIECES = [
    *WRITTEN.values(), LLAMA, f"<|python_tag|>{LLAMA}", "<|channel|>analysis<|message|>Hm.<|end|>", "\n\nLet me. ",
    "<tool", "_call>", "<tool_call>", "</tool_call>", "[TOOL", "_CALLS]", "{", "<think>", "\nhm\n", "</think>", "</thi",
    "äöü 🙂", " ", "\n\n", "It rains. ", "##", "#", "STOP", "<｜tool▁calls▁begin｜>", "<|python", "<|python_tag|>",
]  # fmt: skip
KINDS = {**TOOL_FAMILIES, "qwen3": FAMILIES["qwen3"], "r1": FAMILIES["r1"], "chatml": FAMILIES["chatml"]}


@pytest.mark.quick("qwen2.5", "mistral 11")
@pytest.mark.parametrize("family", KINDS)
def test_what_a_stream_shows_is_what_the_reply_says(family: str) -> None:
    template = ChatTemplate(KINDS[family].make())
    tokenizer, rng = template.chat.tokenizer, random.Random(family)
    shown = 0
    for _ in range(150):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 5)))
        letters = rng.random() < 0.5  # tokens that no tokenizer would choose
        parts = list(text) if letters else [text]
        tokens = [t for part in parts for t in tokenizer(part, add_special_tokens=False)["input_ids"]]
        tokens = tokens[: rng.randint(1, 400)]  # as where a limit cuts a character in two
        stop = rng.choice([(), (), ("###",), ("STOP", "ST", "rain")])
        params = SamplingParams(max_new_tokens=400, min_new_tokens=rng.choice([0, 0, 9]), stop=stop)
        prompt = rng.choice(["<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"])
        tools = rng.choice([(), [WEATHER]])
        told: list[tuple[str, str]] = []
        stream = ReplyStream(template, params, prompt, tools, lambda *new, told=told: told.append(new))  # type: ignore[misc]
        end = 0
        while end < len(tokens):
            end += rng.choice([1, 1, 1, 3])
            stream.read(tokens[:end])
            if stream._watch._cut:  # where the engine ends
                tokens = tokens[:end]
        early = [sum(len(new[part]) for new in told) for part in (0, 1)]
        written = stream.finish(tokens)
        reply = template.parse(written, prompt, tools)
        stream.show(reply.reasoning, reply.content)
        whole = cut_text(template.text, tokens, params) if stop else template.text(tokens)
        assert written == whole or "\ufffd" in whole  # broken bytes are decoded by what stands around them
        assert ("".join(new[0] for new in told), "".join(new[1] for new in told)) == (reply.reasoning, reply.content)
        shown += sum(early)
    assert shown > 500 or family == "gpt-oss"  # not all at the end


def test_what_can_be_a_beginning_is_held_back() -> None:
    parse = ChatTemplate(FAMILIES["qwen3"].make()).parse
    for text, tools, settled in (
        ("Let me <tool", [WEATHER], ("", "Let me")),
        ("Let me <tool", (), ("", "Let me <tool")),
        ("Let me <b>", [WEATHER], ("", "Let me <b>")),
        ('A <tool_call>\n{"na', [WEATHER], ("", "A")),
        ("\n<thi", (), ("", "")),
        ("<think>\nHm.\n", (), ("Hm.", "")),
        ("<think>\nHm.</thin", (), ("Hm.", "")),
        ("<think>\nHm.\n</think>\n\nYes", (), ("Hm.", "Yes")),
    ):
        assert parse.settled(text, "", tools) == settled, text
    assert without_begun("1#", ["###"]) == "1" and without_begun("1####", ["###x"]) == "1#"
    assert without_begun("abc", []) == "abc"


class Stepping(Scripted):
    """One token a step, each told; slowly, if it has a pause."""

    pause = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps = 0
        self.running: dict[str, tuple[Request, list[int], list[int]]] = {}
        self.aborted_at: dict[str, tuple[int, int]] = {}

    @property
    def unfinished(self) -> int:
        return len(self._new) + len(self.running)

    def step(self) -> list[Sample]:
        for request in self._new:
            tokens = self.tokenizer(self.turns.pop(0), add_special_tokens=False)["input_ids"]
            self.running[request.id] = (request, tokens[: request.params.max_new_tokens], [])
        self._new = []
        self.steps += 1
        time.sleep(self.pause)
        done = []
        for name, (request, tokens, said) in list(self.running.items()):
            if name not in self.aborted_at:
                said.append(tokens[len(said)])
                if request.on_token is not None:
                    request.on_token(said[-1])
            if len(said) == len(tokens) or name in self.aborted_at:
                del self.running[name]
                finish: Any = "abort" if name in self.aborted_at else "stop"
                done.append(Sample(name, said, [-0.5] * len(said), finish, 3))
        return done

    def abort(self, ids: Iterable[str]) -> None:
        for name in ids:
            if name in self.running:
                self.aborted_at.setdefault(name, (self.steps, len(self.running[name][2])))


ASKING: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {"messages": HELLO, "tools": [ADD]}),
    "responses": ("/responses", {"input": "Hello.", "tools": [{"type": "function", **ADD["function"]}]}),
    "anthropic": (
        "/messages",
        {"messages": HELLO, "max_tokens": 999, "tools": [{"name": "add", "input_schema": {"type": "object"}}]},
    ),
}


def sse(text: str) -> list[tuple[str, Any]]:
    events = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        if "data" in fields:
            data = fields["data"]
            events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


@pytest.mark.parametrize("dialect", ASKING)
def test_a_streamed_reply_equals_an_unstreamed_one(dialect: str) -> None:
    path, body = ASKING[dialect]
    seen: list[httpx.Response] = []
    bodies = [{**body, "stream": True}, body]
    Run(asking(seen, *bodies, path=path), [f"Let mé 🙂.\n{CALL}"] * 2, engine=Stepping)
    parts = streamed(dialect, sse(seen[0].text))
    assert parts == ("", "Let mé 🙂.", [("add", '{"a": 2, "b": 2}')])
    whole = seen[1].json()
    if dialect == "responses":
        last = sse(seen[0].text)[-1][1]["response"]
        assert {**last["output"][0], "id": ""} == {**whole["output"][0], "id": ""}
        assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    text = {
        "chat": lambda: whole["choices"][0]["message"]["content"],
        "responses": lambda: whole["output"][0]["content"][0]["text"],
        "anthropic": lambda: whole["content"][0]["text"],
    }[dialect]()
    assert text == parts[1]
    texts = [data for _, data in sse(seen[0].text) if '"Let mé' in json.dumps(data, ensure_ascii=False)]
    deltas = [data for _, data in sse(seen[0].text) if data != "[DONE]" and "🙂" in str(data.get("delta", data))]
    assert deltas and (dialect != "chat" or not texts)  # in parts, of whole characters


@pytest.mark.quick("chat")
@pytest.mark.parametrize("dialect", ASKING)
def test_tokens_come_as_they_are_sampled(dialect: str) -> None:
    """The first part is there while most steps are still to come."""
    path, body = ASKING[dialect]
    engines: list[Stepping] = []
    first: list[tuple[int, str]] = []

    class Slow(Stepping):
        pause = 0.02

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            engines.append(self)

    def agent(base_url: str, api_key: str, row: Any) -> None:
        auth = {"Authorization": f"Bearer {api_key}"}
        with httpx.stream("POST", base_url + path, json={**body, "stream": True}, headers=auth, timeout=30) as answer:
            for text in answer.iter_text():
                if "W" in text and not first:
                    first.append((engines[0].steps, text))

    Run(agent, ["Word " * 20 + "<|im_end|>"], engine=Slow)
    assert first and first[0][0] < 20 < engines[0].steps, first


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_generation_within_a_step(stream: bool) -> None:
    engines: list[Stepping] = []
    closed: list[int] = []

    class Slow(Stepping):
        pause = 0.1

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            engines.append(self)

    def agent(base_url: str, api_key: str, row: Any) -> None:
        body = json.dumps({"messages": HELLO, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", port_of(base_url))) as link:
            link.sendall(head(base_url, api_key, f"Content-Length: {len(body)}") + body)
            while not engines or engines[0].steps < 5:
                time.sleep(0.005)
            if stream:
                assert b"data: " in link.recv(65_536)
            closed.append(engines[0].steps)
        end = time.monotonic() + 5
        while not engines[0].aborted_at and time.monotonic() < end:
            time.sleep(0.005)

    run = Run(agent, ["Word " * 200 + "<|im_end|>"], engine=Slow)
    assert "made no call" in str(run.outcome.error)
    ((step, tokens),) = engines[0].aborted_at.values()
    assert step <= closed[0] + 1 and tokens == step, (closed, step, tokens)


def test_other_streams_go_on_when_one_client_goes_away() -> None:
    class Slow(Stepping):
        pause = 0.01

    texts: list[str] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        auth = {"Authorization": f"Bearer {api_key}"}

        def one(number: int) -> None:
            body = {"messages": [{"role": "user", "content": str(number)}], "stream": True}
            with httpx.stream("POST", f"{base_url}/chat/completions", json=body, headers=auth, timeout=30) as answer:
                for text in answer.iter_text():
                    if number % 2:
                        return  # it goes away
                    texts.append(text)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run = Run(agent, ["Word " * 30 + "<|im_end|>"] * 6, engine=Slow)
    assert sum(text.count("[DONE]") for text in texts) == 3
    assert run.records[0].excluded == {"aborted": 3} and len(run.records[0].trajectories) == 3


def test_several_replies_are_streamed_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[httpx.Response] = []
    body = {"messages": HELLO, "stream": True, "n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
    Run(asking(seen, body), ["One two.<|im_end|>", "Two.<|im_end|>"], engine=Stepping)
    chunks = [data for _, data in sse(seen[0].text)]
    assert chunks[-1] == "[DONE]" and chunks[-2]["choices"] == []
    texts, log_probs = ["", ""], [0, 0]
    for chunk in chunks[:-2]:
        assert chunk["usage"] is None and chunk["id"] == "chatcmpl-000000"
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        log_probs[choice["index"]] += len((choice["logprobs"] or {}).get("content", []))
    assert texts == ["One two.", "Two."] and min(log_probs) > 1
    assert chunks[-2]["usage"]["completion_tokens"] == sum(log_probs)


@pytest.mark.parametrize("dialect", ASKING)
def test_a_stream_that_waits_is_kept_alive_and_its_failure_is_told(
    dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ALIVE_SECONDS", 0.05)

    class Breaks(Stepping):
        pause = 0.2

        def step(self) -> list[Sample]:
            if self.steps == 2:
                raise RuntimeError("out of memory")
            return super().step()

    path, body = ASKING[dialect]
    seen: list[str] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        auth = {"Authorization": f"Bearer {api_key}"}
        with httpx.stream("POST", base_url + path, json={**body, "stream": True}, headers=auth, timeout=30) as answer:
            seen.append("".join(answer.iter_text()))

    with pytest.raises(RuntimeError, match="out of memory"):
        Run(agent, ["Word word.<|im_end|>"], engine=Breaks)
    assert ": alive" in seen[0] and "out of memory" in seen[0].rpartition("data: ")[2]
    assert "[DONE]" not in seen[0]


@pytest.mark.quick("embedded")
@pytest.mark.parametrize("kind", ["embedded", "torch", "hf"])
def test_engines_tell_each_token_once(kind: str, packed64: PackedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    if kind == "hf":
        engine: Any = HFEngine(packed64.model, tokenizer, eos_token_ids=(2,), seed=0, max_batch=2)
    else:
        options: Any = {"tokenizer": tokenizer, "compiled": kind == "embedded", "kv_memory": 1 << 20, "max_batch": 4}
        engine = EmbeddedEngine(packed64, eos_token_ids=(2,), seed=0, **options)
    told: dict[str, list[int]] = {str(number): [] for number in range(8)}
    params = SamplingParams(max_new_tokens=20)
    requests = [Request(name, [5, 6, 7 + int(name)], params, on_token=said.append) for name, said in told.items()]
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    engine.sleep()  # all are put back, and go on
    engine.wake()
    samples = {sample.id: sample.tokens for sample in generate(engine, [])}
    assert told == samples | {name: told[name] for name in told.keys() - samples.keys()}
    assert len(samples) >= 6 and all(told.values())


@pytest.mark.slow
def test_a_real_tokenizer_streams_what_it_says(smol: Path) -> None:
    template = ChatTemplate(AutoTokenizer.from_pretrained(smol), "hermes")
    text = 'Grüße, 日本語 🙂!\n<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call><|im_end|>'
    tokens = template.chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    told: list[tuple[str, str]] = []
    stream = ReplyStream(template, SamplingParams(), "", [ADD], lambda *new: told.append(new))
    for end in range(1, len(tokens) + 1):
        stream.read(tokens[:end])
    assert "".join(new[1] for new in told) == "Grüße, 日本語 🙂!" and len(told) > 5
    assert all("\ufffd" not in new[1] for new in told)
    reply = template.parse(stream.finish(tokens), "", [ADD])
    assert isinstance(reply, Message) and [call.name for call in reply.calls] == ["add"]

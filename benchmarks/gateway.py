"""CPU milliseconds that the gateway spends on a call, by the length of its history, beside an engine that answers at
once: reading, linking, rendering, tokenising, parsing and answering, without HTTP; and all of it over HTTP, with many
clients open, of which one calls at a time.

    python benchmarks/gateway.py [--model models/SmolLM2-135M-Instruct] [--tokens 8000] [--clients 64]
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from transformers import AutoTokenizer

from verl.rollout.base import Request, Sample, SamplingParams
from verl.rollout.episode import run_episodes
from verl.rollout.gateway.dialects.base import ChatAnswer, Reply
from verl.rollout.gateway.dialects.chat import CHAT
from verl.rollout.gateway.gateway import Gateway
from verl.rollout.gateway.linking import Conversations
from verl.rollout.gateway.template import ChatTemplate

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = ' <tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
TEXT = "The quick brown fox jumps over the lazy dog and so on, then it goes home to sleep. " * 3


def conversation(template: ChatTemplate, limit: int) -> list[tuple[int, float]]:
    """Of each call of a conversation up to `limit` tokens, the tokens of its prompt and the milliseconds."""
    tokenizer = template.chat.tokenizer
    episode, chat, calls = Conversations(template), list[Any]([{"role": "user", "content": "Begin."}]), []
    while not calls or calls[-1][0] < limit:
        body = json.dumps({"model": "any", "messages": chat, "tools": [TOOL]}).encode()
        says_call = len(calls) % 2 == 1
        tokens = tokenizer(TEXT + CALL * says_call, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        start = time.process_time()
        request = CHAT.read(json.loads(body))
        prompt = episode.prompt(request.messages, request.tools)
        length = len(prompt.tokens)
        reply = template.parse(template.text(tokens), prompt.text, prompt.tools)
        call = episode.answer(prompt, Sample("", tokens, [0.0] * len(tokens), "stop", 0), reply)
        answer = CHAT.answer(request, ChatAnswer("any", 0, (Reply(call.id, call.reply, "stop"),)))
        json.dumps(answer)
        calls.append((length, (time.process_time() - start) * 1e3))
        chat += [answer["choices"][0]["message"], {"role": "tool" if says_call else "user", "content": TEXT}]
    return calls


class Ready:
    """An engine that answers at once."""

    policy_version = 0
    max_length = None

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._new = tokens, list[Request]()

    @property
    def unfinished(self) -> int:
        return len(self._new)

    def add(self, request: Request) -> None:
        self._new.append(request)

    def step(self) -> list[Sample]:
        done, self._new = self._new, []
        return [Sample(request.id, self._tokens, [0.0] * len(self._tokens), "stop", 0) for request in done]

    def abort(self, ids: Iterable[str]) -> None: ...


def call_all(line: Connection, limit: int, clients: int) -> None:
    """The clients, in a process of their own: each says when it is about to call, and after its last call."""
    agents = [line.recv() for _ in range(clients)]
    links = [http.client.HTTPConnection("127.0.0.1", int(url.split(":")[2].split("/")[0])) for url, _ in agents]
    chats = [[{"role": "user", "content": f"Begin {number}."}] for number in range(clients)]
    length, going_on = 0, clients
    while length < limit:
        for link, (_, key), chat in list(zip(links, agents, chats, strict=True))[:going_on]:
            body = json.dumps({"model": "any", "messages": chat, "tools": [TOOL]})
            line.send(length)
            line.recv()
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            link.request("POST", "/v1/chat/completions", body, headers)
            answer = json.loads(link.getresponse().read())
            length = answer["usage"]["prompt_tokens"]
            chat += [answer["choices"][0]["message"], {"role": "user", "content": TEXT}]
        going_on = 5  # the others have called once, and stay open
    line.send(None)


def over_http(tokenizer: Any, limit: int, clients: int) -> list[tuple[int, float]]:
    """Of each call, about the tokens of its prompt, and the milliseconds of this process."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=call_all, args=(theirs, limit, clients))
    process.start()
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    over, times = asyncio.Event(), list[tuple[int, float]]()

    async def agent(base_url: str, api_key: str, row: Mapping[str, Any]) -> None:
        ours.send((base_url, api_key))
        await over.wait()

    async def run() -> None:
        def about_to_call() -> None:
            length = ours.recv()
            times.append((length or limit, time.process_time() * 1e3))
            over.set() if length is None else ours.send(None)

        asyncio.get_running_loop().add_reader(ours.fileno(), about_to_call)
        rows = [{"id": str(number), "prompt_tokens": [1]} for number in range(clients)]
        gateway = Gateway(agent, chat_template="hermes", deadline=3600.0)
        episodes = run_episodes(Ready(tokens), rows, SamplingParams(), gateway, tokenizer=tokenizer)
        assert [outcome.error async for outcome in episodes] == [None] * clients

    asyncio.run(run())
    process.join()
    return [(length, after - before) for (length, before), (_, after) in pairwise(times)]


def show(calls: list[tuple[int, float]], limit: int) -> None:
    for start in range(0, limit, 2000):
        taken = sorted(ms for length, ms in calls if start <= length < start + 2000)
        median, late = taken[len(taken) // 2], taken[int(len(taken) * 0.95)]
        print(f"{start:6d} to {start + 2000:6d} tokens of history: median {median:5.1f} ms, p95 {late:5.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    template = ChatTemplate(tokenizer, "hermes")
    print("without HTTP")
    show([call for _ in range(options.episodes) for call in conversation(template, options.tokens)], options.tokens)
    print(f"over HTTP, {options.clients} clients open")
    show(over_http(tokenizer, options.tokens, options.clients), options.tokens)


if __name__ == "__main__":
    main()

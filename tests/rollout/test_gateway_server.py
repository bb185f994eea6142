"""The gateway under an engine that says what it is told: what it answers over HTTP, and what becomes of an episode."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.rollout.test_tools import Scripted
from tests.sockets import LOOPBACK, listeners
from tests.templates import TOOL_FAMILIES
from verl._host import user_calls
from verl.batch import Batch
from verl.errors import ConfigError, RolloutError
from verl.rollout.base import Request, Sample, SamplingParams
from verl.rollout.episode import run_episodes
from verl.rollout.gateway import server, session
from verl.rollout.gateway.gateway import EpisodeRecord, Gateway
from verl.rollout.gateway.linking import Conversations
from verl.rollout.turns import Outcome, episode_rows

pytest.importorskip("aiohttp")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "Hello."}]
PARAMS = SamplingParams(max_new_tokens=400)


class Sleeper(Scripted):
    """Never finishes, unless a request is aborted."""

    aborted: set[str]

    def step(self) -> list[Sample]:
        time.sleep(0.01)
        self.aborted = getattr(self, "aborted", set())
        done = [request for request in self._new if request.id in self.aborted]
        self._new = [request for request in self._new if request.id not in self.aborted]
        return [Sample(request.id, [], [], "abort", 3) for request in done]

    def abort(self, ids: Iterable[str]) -> None:
        self.aborted = getattr(self, "aborted", set()) | set(ids)


class Broken(Scripted):
    def add(self, request: Request) -> None:
        raise RolloutError("no weights")


class Run:
    """One episode: its outcome, what is known of it, and its engine."""

    def __init__(
        self,
        agent: Any,
        turns: Iterable[str] = ("Hi.<|im_end|>",),
        engine: type[Scripted] = Scripted,
        params: SamplingParams = PARAMS,
        max_length: int | None = None,
        row: Mapping[str, Any] | None = None,
        start: Scripted | None = None,
        **options: Any,
    ) -> None:
        tokenizer = TOOL_FAMILIES["qwen2.5"].make()
        self.engine = engine(tokenizer, list(turns))
        self.engine.max_length = max_length  # type: ignore[attr-defined]
        self.start = start
        self.gateway, self.records = Gateway(agent, **options), list[EpisodeRecord]()
        real = self.gateway.run

        async def run(client: Any, row: Any) -> EpisodeRecord:
            self.records.append(await real(client, row))
            return self.records[-1]

        self.gateway.run = run  # type: ignore[method-assign]
        self.outcome: Outcome = asyncio.run(asyncio.wait_for(self._play(tokenizer, params, row), 60))

    async def _play(self, tokenizer: Any, params: SamplingParams, row: Any) -> Outcome:
        rows = [{"id": "a", "prompt_tokens": [1], **(row or {})}]
        episodes = run_episodes(self.engine, rows, params, self.gateway, tokenizer=tokenizer, start=self.start)
        (outcome,) = [outcome async for outcome in episodes]
        assert not server._listeners
        return outcome

    @property
    def record(self) -> EpisodeRecord:
        assert self.outcome.error is None, self.outcome.error
        return self.records[-1]


def post(url: str, key: str, body: Any, path: str = "/chat/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    return httpx.post(f"{url}{path}", content=content, headers=sent, timeout=30, verify=False)


def asking(seen: list[Any], *bodies: Any, **options: Any) -> Callable[..., float]:
    """An agent that sends these."""

    def agent(base_url: str, api_key: str, row: Any) -> float:
        for body in bodies:
            seen.append(post(base_url, api_key, body, **options))
        return 1.0

    return agent


def test_an_agent_of_several_turns_is_one_trajectory() -> None:
    def agent(base_url: str, api_key: str, row: Any) -> float:
        chat: list[Any] = [{"role": "user", "content": row["question"]}]
        for text in ("4", None):
            body = {"model": "gpt-4o", "messages": chat, "tools": [ADD]}
            chat.append(post(base_url, api_key, body).json()["choices"][0]["message"])
            if text is not None:
                chat.append({"role": "tool", "content": text, "tool_call_id": chat[-1]["tool_calls"][0]["id"]})
        return float(chat[-1]["content"] == "It is 4.")

    run = Run(agent, [CALL, "It is 4.<|im_end|>"], row={"question": "2 + 2?"})
    (turns,) = run.outcome.responses
    tokenizer = run.engine.tokenizer
    text = tokenizer.decode([*(turns.prompt_tokens or []), *turns.response_tokens])
    assert text.endswith(
        f"<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n{CALL}\n<|im_start|>user\n<tool_response>\n4\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>"
    )
    trained = [token for token, mask in zip(turns.response_tokens, turns.response_mask, strict=True) if mask]
    assert tokenizer.decode(trained) == f"{CALL}It is 4.<|im_end|>"
    assert turns.reward == 1.0 and turns.finish == "stop" and turns.policy_version == 3
    second = list(run.engine.requests[1].prompt_tokens)
    assert second == [*turns.prompt_tokens, *turns.response_tokens][: len(second)]  # type: ignore[misc]
    assert [request.id for request in run.engine.requests] == ["a", "a#1"]


class Growing(Scripted):
    """Has newer weights at each step."""

    def step(self) -> list[Sample]:
        done = super().step()
        self.policy_version += bool(done)
        return done


def test_each_token_names_the_weights_that_wrote_it() -> None:
    def agent(base_url: str, api_key: str, row: Any) -> float:
        reply = post(base_url, api_key, {"messages": HELLO}).json()["choices"][0]["message"]
        post(base_url, api_key, {"messages": [*HELLO, reply, *HELLO]})
        return 1.0

    run = Run(agent, ["Hi.<|im_end|>", "Yes.<|im_end|>"], engine=Growing)
    prompts = Batch.from_columns({"id": ["a"], "prompt_tokens": [[1]]})
    rows = episode_rows(prompts, [run.outcome], version=0)
    first, second = (len(call.sample.tokens) for call in run.record.calls)
    read = len(run.record.calls[1].prompt.read)
    assert rows["token_versions"] == [[3] * first + [-1] * read + [4] * second]
    assert [version >= 0 for version in rows["token_versions"][0]] == [bool(mask) for mask in rows["response_mask"][0]]
    assert rows["policy_version"] == [3]


@pytest.mark.parametrize(
    ("headers", "body", "status", "message"),
    [
        ({"Host": "example.org"}, {}, 421, "this is 127.0.0.1"),
        ({"Host": "localhost"}, {}, 421, "this is 127.0.0.1"),
        ({"Origin": "http://127.0.0.1"}, {}, 403, "web pages"),
        ({"Authorization": "Bearer verl-0-" + "0" * 32}, {}, 401, "not that of an episode"),
        ({"Authorization": "Bearer sk-x"}, {}, 401, "not that of an episode"),
        ({"Authorization": ""}, {}, 401, "not that of an episode"),
        ({"Content-Type": "text/plain"}, {}, 415, "application/json"),
        ({"Content-Encoding": "gzip"}, {}, 415, "not compressed"),
        ({}, b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "nested at most 64"),
        ({}, b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", 400, "nested at most 64"),
        ({}, b"[]", 400, "no object of JSON"),
        ({}, b"{", 400, "no object of JSON"),
        ({}, {"messages": []}, 400, "'messages' is empty"),
        ({}, {"messages": [{"role": "user", "content": "?"}], "audio": {}}, 400, "'audio'"),
    ],
)
def test_requests_that_are_not_answered(headers: dict[str, str], body: Any, status: int, message: str) -> None:
    seen: list[httpx.Response] = []
    run = Run(asking(seen, body, **headers))
    assert (seen[0].status_code, message in seen[0].json()["error"]["message"]) == (status, True), seen[0].text
    assert seen[0].headers["x-should-retry"] == "false" and "access-control-allow-origin" not in seen[0].headers
    assert "made no call" in str(run.outcome.error) and not run.engine.requests


def test_a_body_that_is_too_long_is_not_read() -> None:
    answers: list[str] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        port = int(base_url.split(":")[2].split("/")[0])
        head = f"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nx-api-key: {api_key}\r\n"
        for length in (f"Content-Length: {1 << 30}", "Transfer-Encoding: chunked"):
            with socket.create_connection(("127.0.0.1", port)) as link:
                link.sendall(f"{head}Content-Type: application/json\r\n{length}\r\n\r\n".encode())
                part = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
                for _ in range(17 if "chunked" in length else 0):
                    link.sendall(part)
                answers.append(link.recv(4096).decode())

    Run(agent)
    assert all(answer.startswith("HTTP/1.1 413") and "request_too_large" in answer for answer in answers), answers


def test_a_body_that_trickles_in_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_SECONDS", 0.3)
    answers: list[str] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        port = int(base_url.split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as link:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {api_key}"
            link.sendall(f"{head}\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n".encode())
            for _ in range(5):
                link.sendall(b" ")
                time.sleep(0.1)
            answers.append(link.recv(4096).decode())

    Run(agent)
    assert answers[0].startswith("HTTP/1.1 408")


def test_other_paths() -> None:
    seen: list[httpx.Response] = []
    known: list[httpx.Response] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        for path in ("/embeddings", "/files", "/audio/speech", "/batches"):
            seen.append(post(base_url, api_key, {}, path))
        auth = {"Authorization": f"Bearer {api_key}"}
        seen.append(httpx.get(f"{base_url}/chat/completions", headers=auth))
        known.append(httpx.get(f"{base_url}/models", headers=auth))
        known.append(httpx.get(f"{base_url}/models/gpt-4o", headers=auth))
        known.append(post(base_url, api_key, {"messages": HELLO}, "/messages/count_tokens"))

    run = Run(agent)
    assert [answer.status_code for answer in seen] == [404] * 4 + [405]
    assert all("/v1/chat/completions" in answer.json()["error"]["message"] for answer in seen)
    assert [answer.status_code for answer in known] == [200] * 3
    assert known[0].json()["data"][0]["id"] == "policy" and known[1].json()["id"] == "gpt-4o"
    tokenizer = run.engine.tokenizer
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert known[2].json() == {"input_tokens": len(tokenizer(text)["input_ids"])}
    assert not run.engine.requests  # no generation


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": HELLO}),
        ("/responses", {"input": "Hello."}),
        ("/messages", {"messages": HELLO, "max_tokens": 64000}),
    ],
)
def test_each_dialect_is_answered_and_streamed(path: str, body: dict[str, Any]) -> None:
    seen: list[httpx.Response] = []
    texts = ["Hi ä🙂.<|im_end|>", "So.<|im_end|>"]
    run = Run(asking(seen, body, {**body, "stream": True}, path=path), texts)
    whole, stream = seen
    assert whole.status_code == stream.status_code == 200
    assert "Hi ä🙂." in whole.text and whole.headers["content-type"].startswith("application/json")
    assert '"So."' in stream.text and stream.headers["content-type"] == "text/event-stream"
    assert len(run.outcome.responses) == 2  # equal requests: best of two
    assert len(run.records[0].trajectories) == 2


def test_limits_of_tokens_and_stop_strings() -> None:
    seen: list[httpx.Response] = []
    bodies = [{"messages": HELLO, "max_tokens": 2}, {"messages": HELLO, "stop": ["###"], "max_tokens": 64_000}]
    run = Run(asking(seen, *bodies), ["Two plus two.<|im_end|>", "One ### "], max_length=300)
    first, second = (answer.json()["choices"][0] for answer in seen)
    assert first["finish_reason"] == "length"
    assert second["message"]["content"] == "One " and second["finish_reason"] == "stop"
    limits = [request.params.max_new_tokens for request in run.engine.requests]
    assert limits == [2, 300 - len(run.engine.requests[1].prompt_tokens)]
    assert run.engine.requests[1].params.stop == ("###",)
    kept = run.records[0].trajectories[1]
    assert run.engine.tokenizer.decode(kept.response_tokens) == "One ### "  # it is trained


def test_a_conversation_that_is_too_long() -> None:
    seen: list[httpx.Response] = []
    run = Run(asking(seen, {"messages": HELLO}, {"messages": [*HELLO, *HELLO] * 40}), max_length=200)
    error = seen[1].json()["error"]
    assert (seen[1].status_code, error["code"]) == (400, "context_length_exceeded")
    assert "context_length_exceeded" in error["message"] and "prompt is too long" in error["message"]
    assert run.record.truncated and run.outcome.responses[0].reward == 1.0  # it counts


@pytest.mark.parametrize("bounds", [{"max_calls": 1}, {"max_tokens": 3}])
def test_bounds_that_are_used_up_refuse_and_count(bounds: dict[str, int]) -> None:
    seen: list[httpx.Response] = []
    run = Run(asking(seen, {"messages": HELLO}, {"messages": HELLO}), **bounds)
    assert [answer.status_code for answer in seen] == [200, 403]
    assert seen[1].headers["x-should-retry"] == "false" and seen[1].json()["error"]["code"] == "budget_exceeded"
    assert run.record.truncated and run.outcome.responses[0].reward == 1.0


def test_replies_beside_each_other_keep_the_bound_of_tokens() -> None:
    long, short = "Two plus two is four. " * 9, "Hi.<|im_end|>"

    def agent(base_url: str, api_key: str, row: Any) -> float:
        bodies = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            seen.extend(pool.map(lambda body: post(base_url, api_key, body).status_code, bodies))
        return 1.0

    for texts, statuses in (([long] * 3, [200] * 3 + [403] * 3), ([short] * 6, [200] * 6)):
        seen: list[int] = []
        run = Run(agent, texts, params=SamplingParams(max_new_tokens=16), max_tokens=40)
        assert sum(len(call.sample.tokens) for call in run.record.calls) <= 40
        assert sorted(seen) == statuses and run.record.truncated == (403 in seen)
    run = Run(
        asking([], {"messages": HELLO, "n": 4}), [long] * 4, params=SamplingParams(max_new_tokens=16), max_tokens=40
    )
    assert [len(call.sample.tokens) for call in run.record.calls] == [10] * 4


def test_a_key_ends_with_its_episode() -> None:
    late: list[Any] = []

    async def agent(base_url: str, api_key: str, row: Any) -> None:
        async with httpx.AsyncClient() as client:
            headers = {"Authorization": f"Bearer {api_key}"}
            await client.post(f"{base_url}/chat/completions", json={"messages": HELLO}, headers=headers)
        late.append((base_url, api_key))
        if len(late) == 2:
            late.append(await asyncio.to_thread(post, base_url, late[0][1], {"messages": HELLO}))
            late.append(await asyncio.to_thread(post, base_url, late[0][1], {}, "/messages"))

    async def play() -> None:
        tokenizer = TOOL_FAMILIES["qwen2.5"].make()
        engine, gateway = Scripted(tokenizer, ["Hi.<|im_end|>"] * 2), Gateway(agent)
        async with server.listening():  # as other episodes do
            for name in ("a", "b"):
                rows = [{"id": name, "prompt_tokens": [1]}]
                async for outcome in run_episodes(engine, rows, PARAMS, gateway, tokenizer=tokenizer):
                    assert outcome.error is None

    asyncio.run(play())
    assert late[0][0] == late[1][0] and late[0][1] != late[1][1]  # one listener, two keys
    assert [answer.status_code for answer in late[2:]] == [403, 403]
    assert all("has ended" in answer.text and answer.headers["x-should-retry"] == "false" for answer in late[2:])
    assert len(late[0][1].split("-")[2]) == 32


def test_it_listens_on_loopback_while_there_are_episodes_only() -> None:
    before = listeners([os.getpid()])
    seen: list[set[str]] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        seen.append(listeners([os.getpid()]) - before)
        post(base_url, api_key, {"messages": HELLO})

    Run(agent)
    assert seen[0] <= LOOPBACK and listeners([os.getpid()]) == before


def test_a_client_that_goes_away_ends_its_generation() -> None:
    def agent(base_url: str, api_key: str, row: Any) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{base_url}/chat/completions", json={"messages": HELLO}, timeout=0.5,
                headers={"Authorization": f"Bearer {api_key}"},
            )  # fmt: skip
        end = time.monotonic() + 5
        while not getattr(engines[-1], "aborted", None) and time.monotonic() < end:
            time.sleep(0.01)

    engines: list[Sleeper] = []

    class Watched(Sleeper):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            engines.append(self)

    run = Run(agent, engine=Watched)
    assert engines[0].aborted == {"a"} and "made no call" in str(run.outcome.error)


def test_a_stream_that_has_to_wait_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ALIVE_SECONDS", 0.05)

    class Slow(Scripted):
        def step(self) -> list[Sample]:
            time.sleep(0.3)
            return super().step()

    seen: list[httpx.Response] = []
    Run(asking(seen, {"messages": HELLO, "stream": True}), engine=Slow)
    assert seen[0].text.startswith(": alive\n\n") and seen[0].text.endswith("data: [DONE]\n\n")


def test_too_many_open_requests() -> None:
    statuses: list[int] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        def one() -> None:
            try:
                statuses.append(post(base_url, api_key, {"messages": HELLO}).status_code)
            except httpx.HTTPError:
                statuses.append(0)

        threads = [threading.Thread(target=one) for _ in range(40)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 10
        while statuses.count(429) < 8 and time.monotonic() < end:
            time.sleep(0.01)

    Run(agent, engine=Sleeper)
    assert statuses.count(429) == 8


def asking_again(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    """An agent whose first answer is lost on the way, so that it sends the request again."""
    real, lost = server.Listener._sent, list[int]()

    async def sent(self: Any, request: Any, *answer: Any) -> Any:
        if not lost:
            lost.append(1)
            request.transport.close()
            raise ConnectionResetError
        return await real(self, request, *answer)

    def agent(base_url: str, api_key: str, row: Any) -> float:
        with pytest.raises(httpx.HTTPError):
            post(base_url, api_key, {"messages": HELLO})
        post(base_url, api_key, {"messages": HELLO}, **{"x-stainless-retry-count": "1"})
        return 1.0

    monkeypatch.setattr(server.Listener, "_sent", sent)
    return agent


def test_a_retry_takes_the_place_of_what_was_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(asking_again(monkeypatch), ["One.<|im_end|>", "Two.<|im_end|>"])
    assert run.record.excluded == {"retried": 1}
    assert run.engine.tokenizer.decode(run.outcome.responses[0].response_tokens) == "Two.<|im_end|>"


def test_calls_that_are_left_out() -> None:
    bodies = [
        ({"messages": [*HELLO, *HELLO]}, {"X-Verl-Train": "0"}),
        ({"messages": HELLO, "tools": [ADD]}, {}),
        ({"messages": [{"role": "user", "content": "Judge."}], "tools": [ADD]}, {"X-Verl-Train": "0"}),
    ]

    def agent(base_url: str, api_key: str, row: Any) -> float:
        for body, headers in bodies:
            post(base_url, api_key, body, **headers)
        return 1.0

    turns = [f"{name}.<|im_end|>" for name in ("Title", "Work", "Judged")]
    run = Run(agent, turns)
    assert run.record.excluded == {"excluded": 2}
    assert run.engine.tokenizer.decode(run.outcome.responses[0].response_tokens) == "Work.<|im_end|>"
    chosen = Run(agent, turns, train=lambda call: call.reply.content == "Judged.")
    assert chosen.record.excluded == {"excluded": 2}
    assert chosen.engine.tokenizer.decode(chosen.outcome.responses[0].response_tokens) == "Judged.<|im_end|>"


def test_names_of_trajectories_and_rewards_by_name() -> None:
    def agent(base_url: str, api_key: str, row: Any) -> dict[str, Any]:
        answer = post(base_url, api_key, {"messages": HELLO}, **{"X-Verl-Name": "critic"}).json()
        return {"reward": 0.5, "trajectories": {"critic": 1.0}, "calls": {answer["id"]: 0.25}}

    run = Run(agent)
    assert run.record.trajectories[0].name == "critic"
    assert run.record.result.trajectories == {"critic": 1.0} and run.record.result.calls == {"chatcmpl-000000": 0.25}
    (turns,) = run.outcome.responses
    assert (turns.name, turns.own_reward, turns.reward) == ("critic", 1.0, 0.5)
    assert turns.call_rewards == {len(turns.response_tokens) - 1: 0.25}
    assert [message["role"] for message in turns.messages or ()] == ["user", "assistant"]


@pytest.mark.parametrize("value", [{"trajectories": {"nobody": 1.0}}, {"calls": {"chatcmpl-000007": 1.0}}])
def test_a_reward_of_what_there_was_not_is_refused_by_name(value: Any) -> None:
    run = Run(failing({"reward": 1.0, **value}))
    assert f"gave '{next(iter(next(iter(value.values()))))}' a reward" in str(run.outcome.error)
    assert run.outcome.reason == "raised"


def test_a_sub_agent_is_a_trajectory_and_the_last_one_has_the_last_call() -> None:
    """The parent goes on after its sub-agent, so that its conversation is the one that ends."""

    def agent(base_url: str, api_key: str, row: Any) -> dict[str, Any]:
        chat: list[Any] = [*HELLO]
        chat.append(post(base_url, api_key, {"messages": chat}).json()["choices"][0]["message"])
        sub = [{"role": "system", "content": "Judge."}, *HELLO]
        post(base_url, api_key, {"messages": sub}, **{"X-Verl-Name": "judge"})
        post(base_url, api_key, {"messages": [*chat, {"role": "user", "content": "And?"}]})
        return {"reward": 1.0, "trajectories": {"judge": 0.0}}

    run = Run(agent, ["Hi.<|im_end|>", "Bad.<|im_end|>", "So.<|im_end|>"])
    judge, parent = run.outcome.responses
    assert (judge.name, judge.own_reward, parent.name, parent.own_reward) == ("judge", 0.0, "", None)
    assert run.engine.tokenizer.decode(parent.response_tokens).endswith("So.<|im_end|>")
    assert parent.reward == 1.0 and judge.prompt_tokens != parent.prompt_tokens


def test_an_episode_of_which_nothing_is_trained_counts_all_the_same() -> None:
    (turns,) = Run(asking([], {"messages": HELLO}), train=lambda call: False).outcome.responses
    assert (turns.response_tokens, turns.reward, turns.calls_left_out) == ([], 1.0, {"excluded": 1})


def failing(*results: Any) -> Callable[..., Any]:
    attempts = iter(results)

    def agent(base_url: str, api_key: str, row: Any) -> Any:
        post(base_url, api_key, {"messages": HELLO})
        result = next(attempts)
        if isinstance(result, BaseException):
            raise result
        return result() if callable(result) else result

    return agent


def test_an_agent_that_raises_is_left_out_with_its_last_frame() -> None:
    run = Run(failing(ValueError("the policy said so")))
    assert "the agent raised: ValueError: the policy said so" in str(run.outcome.error)
    assert "test_gateway_server.py line" in str(run.outcome.error)
    assert Run(failing(ValueError()), on_agent_error=0.0).outcome.responses[0].reward == 0.0
    assert "RuntimeError" in str(Run(failing(SystemExit(3))).outcome.error)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"), 1e39, "good", {"rewards": 1}, {"reward": "x"}, {"calls": {"a": None, "b": ""}},
        {"trajectories": [1]}, {"calls": "x"},
    ],
)  # fmt: skip
def test_an_agent_that_returns_no_reward_at_all_is_left_out(value: Any) -> None:
    assert "the agent raised" in str(Run(failing(value)).outcome.error)


@pytest.mark.parametrize("value", [np.float32(0.5), np.array([0.5]), torch.tensor(0.5), {"reward": np.float64(0.5)}])
def test_a_reward_is_a_number_of_whichever_library(value: Any) -> None:
    assert Run(failing(value)).outcome.responses[0].reward == 0.5


async def asked(reward: Any, base_url: str, api_key: str, row: Any) -> Any:
    async with httpx.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {api_key}"}
        await client.post(f"{base_url}/chat/completions", json={"messages": HELLO}, headers=headers)
    return reward() if callable(reward) else reward


def cancels() -> None:
    raise asyncio.CancelledError


def test_an_async_function_behind_another_is_awaited() -> None:
    for agent in (partial(asked, 0.5), lambda base_url, api_key, row: asked(0.5, base_url, api_key, row)):
        assert Run(agent).outcome.responses[0].reward == 0.5


@pytest.mark.parametrize("ends", [sys.exit, cancels])
def test_an_agent_that_ends_itself_has_raised(ends: Callable[[], None]) -> None:
    async def agent(base_url: str, api_key: str, row: Any) -> None:
        await asked(ends, base_url, api_key, row)

    assert "the agent raised" in str(Run(agent).outcome.error)
    assert Run(agent, on_agent_error=0.0).outcome.responses[0].reward == 0.0


def test_a_second_run_gets_its_row_as_it_was() -> None:
    seen: list[Any] = []

    def agent(base_url: str, api_key: str, row: Any) -> float:
        seen.append(len(row["messages"]))
        row["messages"] += HELLO
        time.sleep(1.5 if len(seen) == 1 else 0)
        post(base_url, api_key, {"messages": row["messages"]})
        return 1.0

    assert Run(agent, deadline=0.7, row={"messages": HELLO}).outcome.error is None and seen == [1, 1]


HALF = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages"])
def test_half_of_a_pair_of_utf_16_is_no_text(path: str) -> None:
    """Of a client it is refused by name; of the policy it is no call, so that an answer can always be written."""
    seen: list[httpx.Response] = []
    fields = {"messages": HELLO, "max_tokens": 400} if path == "/messages" else {"messages": HELLO}
    fields = {"input": "Hello."} if path == "/responses" else fields
    asking_half = json.dumps(fields).replace("Hello.", "\\ud83d")
    flat = {"name": "add", "input_schema": {}} if path == "/messages" else {"type": "function", "name": "add"}
    body = {**fields, "tools": [ADD if path == "/chat/completions" else flat]}
    bodies = [asking_half.encode(), asking_half.encode("utf-16"), body, {**body, "stream": True}]
    run = Run(asking(seen, *bodies, path=path), [HALF, HALF])
    assert [answer.status_code for answer in seen] == [400, 400, 200, 200], run.outcome.error
    assert "not valid Unicode" in seen[0].text and "ud83d" in seen[2].text and "ud83d" in seen[3].text
    assert [call.reply.calls for call in run.record.calls] == [(), ()]


def test_an_agent_may_leave_the_reward_to_others() -> None:
    assert Run(failing(None)).outcome.responses[0].reward is None


def test_an_agent_that_is_late_runs_once_more() -> None:
    turns = ["One.<|im_end|>", "Two.<|im_end|>"]
    run = Run(failing(lambda: time.sleep(2), 1.0), turns, deadline=0.5)
    assert run.outcome.responses[0].reward == 1.0
    assert run.engine.tokenizer.decode(run.outcome.responses[0].response_tokens) == "Two.<|im_end|>"
    assert [request.id for request in run.engine.requests] == ["a", "a#1"]  # new random numbers
    twice = Run(failing(lambda: time.sleep(1), lambda: time.sleep(1)), turns, deadline=0.3)
    assert "twice: the agent took longer than 0.3 s" in str(twice.outcome.error)


def test_functions_that_never_return_are_left_behind_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_calls, "MAX_HUNG", 2)
    stop = threading.Event()
    first = Gateway(lambda base_url, api_key, row: stop.wait(30), deadline=0.2)
    tokenizer = TOOL_FAMILIES["qwen2.5"].make()

    async def play(name: str) -> Outcome:
        rows = [{"id": name, "prompt_tokens": [1]}]
        (outcome,) = [o async for o in run_episodes(Scripted(tokenizer, []), rows, PARAMS, first, tokenizer=tokenizer)]
        return outcome

    try:
        assert "twice: the agent took longer than 0.2 s" in str(asyncio.run(play("a")).error)
        with pytest.raises(RolloutError, match="2 calls of agent never returned"):  # and the run ends
            asyncio.run(play("b"))
    finally:
        stop.set()
    assert server._listeners == {}


def test_a_grammar_is_made_and_read_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compilation takes 0.25 s and more, and one event loop serves all episodes."""
    pytest.importorskip("xgrammar")
    threads = set[str]()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.add(f"{function.__name__} {threading.current_thread() is threading.main_thread()}")
            return function(*args)

        return call

    for name in ("grammar_of", "only_choices"):
        monkeypatch.setattr(session, name, noted(getattr(session, name)))
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}

    async def agent(base_url: str, api_key: str, row: Any) -> float:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=30) as client:
            body = {"messages": [{"role": "user", "content": "a"}], "response_format": schema}
            assert (await client.post(f"{base_url}/chat/completions", json=body)).status_code == 200
        return 1.0

    run = Run(agent, ["{}<|im_end|>"])
    assert run.outcome.error is None
    assert threads == {"grammar_of False", "only_choices False"}


def test_no_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    keys: list[str] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        keys.append(api_key)
        post(base_url, api_key, {"messages": HELLO, "temperature": 0.5})
        post(base_url, api_key, b"{")
        raise ValueError("no")

    with caplog.at_level("DEBUG"):
        run = Run(agent)
    secret = keys[0].split("-")[2]
    assert secret not in caplog.text and secret not in str(run.outcome.error)


def test_an_engine_that_fails_is_no_fault_of_the_agent() -> None:
    seen: list[httpx.Response] = []
    run = Run(asking(seen, {"messages": HELLO}), engine=Broken, on_agent_error=0.0)
    assert [answer.status_code for answer in seen] == [503, 503]
    assert "twice: no weights" in str(run.outcome.error)


def test_a_fault_of_the_gateway_itself_runs_the_agent_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Conversations.prompt
    faults = [RuntimeError("broken")]

    def ask(self: Any, messages: Any, tools: Any = ()) -> Any:
        if faults:
            raise faults.pop()
        return real(self, messages, tools)

    monkeypatch.setattr(Conversations, "prompt", ask)
    seen: list[httpx.Response] = []
    run = Run(asking(seen, {"messages": HELLO}))
    assert [answer.status_code for answer in seen] == [500, 200]
    assert "the gateway failed: RuntimeError('broken')" in seen[0].json()["error"]["message"]
    assert run.outcome.responses[0].reward == 1.0


@pytest.mark.parametrize("count", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_many_episodes_at_once_on_one_listener(count: int) -> None:
    """Each gets its own answers, and its own key."""
    addresses: set[str] = set()
    keys: set[str] = set()

    class Echo(Scripted):
        def step(self) -> list[Sample]:
            done, self._new = self._new, []
            return [self.sample(request) for request in done]

        def sample(self, request: Request) -> Sample:
            said = self.tokenizer.decode(request.prompt_tokens).split("Say ")[-1].partition("<|im_end|>")[0]
            tokens = self.tokenizer(f"{said}<|im_end|>", add_special_tokens=False)["input_ids"]
            return Sample(request.id, tokens, [-0.5] * len(tokens), "stop", 3)

    async def agent(base_url: str, api_key: str, row: Any) -> float:
        addresses.add(base_url)
        keys.add(api_key)
        chat: list[Any] = []
        auth = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=auth, timeout=60, verify=False) as client:
            for turn in range(2):
                chat.append({"role": "user", "content": f"Say {row['id']}-{turn}"})
                answer = await client.post(f"{base_url}/chat/completions", json={"messages": chat})
                chat.append(answer.json()["choices"][0]["message"])
        return float([message["content"] for message in chat[1::2]] == [f"{row['id']}-0", f"{row['id']}-1"])

    async def play() -> list[Outcome]:
        tokenizer = TOOL_FAMILIES["qwen2.5"].make()
        rows = [{"id": f"r{number}", "prompt_tokens": [1], "messages": "[]"} for number in range(count)]
        episodes = run_episodes(Echo(tokenizer, []), rows, PARAMS, Gateway(agent), tokenizer=tokenizer)
        return [outcome async for outcome in episodes]

    outcomes = asyncio.run(play())
    assert [outcome.error for outcome in outcomes] == [None] * count
    assert {outcome.responses[0].reward for outcome in outcomes} == {1.0}
    assert len(addresses) == 1 and len(keys) == count


def test_a_row_has_its_messages_as_a_list() -> None:
    seen: list[Any] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        seen.append(row["messages"])
        post(base_url, api_key, {"messages": row["messages"]})

    Run(agent, row={"messages": json.dumps(HELLO)})
    assert seen == [HELLO]


def test_a_template_that_refuses_a_conversation() -> None:
    seen: list[httpx.Response] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        seen.append(post(base_url, api_key, {"messages": [{"role": "user", "content": "x"}]}))

    tokenizer = TOOL_FAMILIES["qwen2.5"].make()
    tokenizer.chat_template = "{{ raise_exception('never') }}"

    async def play() -> None:
        rows = [{"id": "a", "prompt_tokens": [1]}]
        async for _ in run_episodes(Scripted(tokenizer, []), rows, PARAMS, Gateway(agent), tokenizer=tokenizer):
            pass

    asyncio.run(play())
    assert seen[0].status_code == 400 and "never" in seen[0].json()["error"]["message"]


COMMAND = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
assert not any(os.environ["OPENAI_API_KEY"] in word for word in sys.argv)
body = json.dumps({"messages": [{"role": "user", "content": row["question"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/chat/completions"
assert os.environ["OPENAI_BASE_URL"] + "/chat/completions" == url
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
print("working")
"""


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("end", "reward", "error"),
    [
        ("print(json.dumps({'reward': 0.5}))", 0.5, ""),
        ("print(0.25)", 0.25, ""),
        ("print('done')", None, ""),
        ("print(os.environ.get('SECRET', 1))", 1.0, ""),  # a clean environment
        ("print(os.environ['MORE'])", 7.0, ""),
        ("raise ValueError('no such tool')", None, "status 1: ValueError: no such tool"),
        ("os.kill(os.getpid(), 9)", None, "twice: the agent was killed by signal 9"),
    ],
)
def test_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, reward: float | None, error: str) -> None:
    monkeypatch.setenv("SECRET", "2")
    (tmp_path / "agent.py").write_text(COMMAND + end)
    words = [sys.executable, str(tmp_path / "agent.py")]
    run = Run(words, ["Hi.<|im_end|>"] * 2, row={"question": "Q"}, environment={"MORE": "7"})
    assert error in (run.outcome.error or "") and bool(error) == bool(run.outcome.error)
    assert error or run.outcome.responses[0].reward == reward


def test_a_command_that_never_ends_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! >> {pids}; sleep 600"
    run = Run(["sh", "-c", script], deadline=0.4)
    assert "twice: the agent took longer than 0.4 s" in str(run.outcome.error)
    started = [int(line) for line in pids.read_text().split()]
    end = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(started) == 2 and not any(
        Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in started
    )


LEFT = "import subprocess; subprocess.Popen(['sleep', '15'], start_new_session=%s); print(0.5)"


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("end", [LEFT % False, LEFT % True, "print('x' * 300_000); print(0.5)"])
def test_a_command_has_ended_when_its_process_has(tmp_path: Path, end: str) -> None:
    """Whether what it started goes on, with its output open, or it says much before it reads its row."""
    (tmp_path / "agent.py").write_text(COMMAND.replace("sys.stdin.readline()", '\'{"question": "Q"}\'') + end)
    run = Run([sys.executable, str(tmp_path / "agent.py")], row={"long": "y" * 300_000}, deadline=6.0)
    assert run.outcome.error is None and run.outcome.responses[0].reward == 0.5


def test_a_program_that_is_not_there_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="there is no program 'no-such-program'"):
        Gateway("no-such-program agent.py")


@pytest.mark.parametrize(
    ("status", "body", "end"),
    [
        (200, b"0.5", 0.5), (204, b"", None), (200, b"fine", "answered 200: 'fine'"), (302, b"", "answered 302"),
        (500, b"Internal Server Error", "answered 500: 'Internal Server Error'"),
    ],
)  # fmt: skip
def test_what_an_address_answers(status: int, body: bytes, end: Any) -> None:
    class Agent(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            post(sent["base_url"], sent["api_key"], {"messages": HELLO})
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Agent) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        run = Run(f"http://127.0.0.1:{there.server_port}/run")
        there.shutdown()
    if isinstance(end, str):
        assert run.outcome.reason == "raised" and end in str(run.outcome.error)
    else:
        assert run.outcome.responses[0].reward == end


def test_an_address_is_one_of_this_machine() -> None:
    for url in ("http://example.org/agent", "http://10.0.0.1:80", "https://[2001:db8::1]/", "http://["):
        with pytest.raises(ConfigError, match="one of this machine"):
            Gateway(url)
    for url in ("http://127.0.0.1:1/agent", "http://localhost:1", "http://[::1]:1"):
        Gateway(url)
    for other in (3, "", "python 'agent.py", [], [3], b"agent"):
        with pytest.raises(ConfigError, match="a function"):
            Gateway(other)
    run = Run("http://127.0.0.1:1/agent")
    assert "twice: the agent at http://127.0.0.1:1/agent cannot be reached" in str(run.outcome.error)


def test_templates_are_asked_when_the_actor_is_made() -> None:
    tokenizer = TOOL_FAMILIES["qwen2.5"].make()
    Gateway(failing(1.0)).check_tokenizer(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "")
    with pytest.raises(ConfigError, match="chat_template='hermes'"):
        Gateway(failing(1.0)).check_tokenizer(tokenizer)
    Gateway(failing(1.0), chat_template="hermes").check_tokenizer(tokenizer)

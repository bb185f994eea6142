"""What clients and agents may not do to the gateway: each thing that they do wrong ends within its deadline, the run
goes on, and nothing listens afterwards."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.rollout.test_gateway_server import ADD, CALL, HELLO, PARAMS, Run, Sleeper, post
from tests.rollout.test_tools import Scripted
from tests.sockets import listeners
from tests.templates import TOOL_FAMILIES
from verl._host.user_calls import MAX_HUNG
from verl.errors import RolloutError
from verl.rollout.base import Sample, SamplingParams
from verl.rollout.episode import run_episodes
from verl.rollout.gateway import server
from verl.rollout.gateway.gateway import Gateway
from verl.rollout.gateway.linking import Conversations
from verl.rollout.turns import Outcome

pytest.importorskip("aiohttp")


def port_of(base_url: str) -> int:
    return int(base_url.split(":")[2].split("/")[0])


def head(base_url: str, api_key: str, length: str = "Content-Length: 100") -> bytes:
    lines = (
        "POST /v1/chat/completions HTTP/1.1", f"Host: 127.0.0.1:{port_of(base_url)}",
        f"Authorization: Bearer {api_key}", "Content-Type: application/json", length,
    )  # fmt: skip
    return "\r\n".join((*lines, "", "")).encode()


def until_closed(link: socket.socket, send: Iterator[bytes], pause: float = 0.05) -> tuple[bytes, float]:
    """What a connection answers, and the seconds until it is closed, while it is sent to in steps."""
    link.settimeout(pause)
    start, answer = time.monotonic(), b""
    while time.monotonic() < start + 10:
        try:
            link.sendall(next(send, b""))
            if not (part := link.recv(65_536)):
                break
            answer += part
        except TimeoutError:
            continue
        except ConnectionError:
            break
    return answer, time.monotonic() - start


def slow_head(base_url: str, api_key: str) -> Iterator[bytes]:
    for byte in head(base_url, api_key):
        yield bytes([byte])


def silence(base_url: str, api_key: str) -> Iterator[bytes]:
    yield from ()


def one_answer(base_url: str, api_key: str) -> Iterator[bytes]:
    body = json.dumps({"messages": HELLO}).encode()
    yield head(base_url, api_key, f"Content-Length: {len(body)}") + body


def one_answer_and_a_slow_head(base_url: str, api_key: str) -> Iterator[bytes]:
    yield from one_answer(base_url, api_key)
    yield from slow_head(base_url, api_key)


@pytest.mark.parametrize("send", [slow_head, silence, one_answer, one_answer_and_a_slow_head])
def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch, send: Callable[..., Any]) -> None:
    """Sixteen of them, while another client is answered."""
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.5)
    seen: list[tuple[bytes, float]] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        def one() -> None:
            with socket.create_connection(("127.0.0.1", port_of(base_url))) as link:
                seen.append(until_closed(link, send(base_url, api_key)))

        threads = [threading.Thread(target=one) for _ in range(16)]
        for thread in threads:
            thread.start()
        assert post(base_url, api_key, {"messages": HELLO}).status_code == 200
        for thread in threads:
            thread.join()

    Run(agent, ["Hi.<|im_end|>"] * 17)
    assert len(seen) == 16 and all(0.4 < seconds < 5 for _, seconds in seen), seen
    assert all((b"200 OK" in answer) == ("answer" in send.__name__) for answer, _ in seen)


def test_a_client_that_does_not_take_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TAKE_SECONDS", 0.5)
    seen: list[Any] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        body = json.dumps({"messages": HELLO, "logprobs": True}).encode()
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", port_of(base_url)))
            link.sendall(head(base_url, api_key, f"Content-Length: {len(body)}") + body)
            time.sleep(5)
            answer = b"".join(iter(lambda: link.recv(1 << 20), b""))
        assert answer.startswith(b"HTTP/1.1 200") and not answer.endswith(b"}")  # its end was never sent
        seen.append(post(base_url, api_key, {"messages": HELLO}).status_code)

    params = SamplingParams(max_new_tokens=1 << 20)
    run = Run(agent, ["x" * 100_000, "Hi.<|im_end|>"], params=params, max_tokens=1 << 22)
    assert seen == [200] and run.record.excluded == {"aborted": 1}


def test_connections_are_no_more_than_half_of_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.resource, "getrlimit", lambda kind: (8, 8))  # four connections
    closed: list[bytes] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        links = [socket.create_connection(("127.0.0.1", port_of(base_url))) for _ in range(12)]
        time.sleep(0.3)
        for link in links:
            link.setblocking(False)
            try:
                closed.append(link.recv(1))
            except BlockingIOError:
                link.close()
        time.sleep(0.1)
        assert post(base_url, api_key, {"messages": HELLO}).status_code == 200

    Run(agent)
    assert closed == [b""] * 8


def test_what_is_no_http_ends_at_once_and_no_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[bytes, float]] = []
    keys: list[str] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        keys.append(api_key.split("-")[2])
        whole = head(base_url, api_key)
        for sent in (
            b"\x16\x03\x01 hello\r\n\r\n",
            whole.replace(b"HTTP/1.1", b"HTTP/9"),
            whole.replace(b"\r\n", b"\r\nbroken header " + api_key.encode() + b"\r\n", 1),
            whole.replace(api_key.encode(), api_key.encode() * 1000),
            whole.replace(b"Content-Length: 100", b"Content-Length: -1"),
            whole.replace(b"Content-Length: 100", b"Content-Length: 5\r\nTransfer-Encoding: chunked"),
        ):
            with socket.create_connection(("127.0.0.1", port_of(base_url))) as link:
                seen.append(until_closed(link, iter([sent])))
        raise RuntimeError(f"no luck with {api_key}")

    with caplog.at_level("DEBUG"):
        run = Run(agent)
    assert all(answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400")) and seconds < 5 for answer, seconds in seen), seen
    assert keys[0] not in caplog.text and keys[0] not in str(run.outcome.error)
    assert "RuntimeError: no luck with (its key)" in str(run.outcome.error)


def play(agent: Any, count: int, engine: type[Scripted] = Scripted, **options: Any) -> list[Outcome]:
    """Episodes at once; the first of them does what `agent` does, unless it is a command."""

    async def run() -> list[Outcome]:
        tokenizer = TOOL_FAMILIES["qwen2.5"].make()
        rows = [{"id": str(number), "prompt_tokens": [1], "number": number} for number in range(count)]
        turns = ["Hi.<|im_end|>"] * 10_000
        gateway = Gateway(agent, **options)
        episodes = run_episodes(engine(tokenizer, turns), rows, PARAMS, gateway, tokenizer=tokenizer)
        return [outcome async for outcome in episodes]

    before = listeners([os.getpid()])
    done = asyncio.run(asyncio.wait_for(run(), 60))
    assert not server._listeners and listeners([os.getpid()]) == before
    return sorted(done, key=lambda outcome: outcome.index)


WICKED = """
import json, os, sys, time, urllib.request
row = json.loads(sys.stdin.readline())
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
assert not any(key in word for word in sys.argv)

def ask(**more):
    body = json.dumps({"messages": [{"role": "user", "content": "Hi."}], **more}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)).read()

if row["number"] == 16:
    ask()
    print(1.0)
    sys.exit()
"""
ENDS = {
    "never return": ("time.sleep(600)", "twice: the agent took longer than 2 s"),
    "flood": (
        "while True:\n    try:\n        ask(audio={})\n    except Exception:\n        pass",
        "twice: the agent took longer than 2 s",
    ),
    "print without end": ("while True:\n    print('x' * 65536)", "twice: the agent took longer than 2 s"),
    "are killed": ("os.kill(os.getpid(), 9)", "twice: the agent was killed by signal 9"),
}


@pytest.mark.quick("are killed")
@pytest.mark.parametrize("kind", ENDS)
def test_sixteen_commands_that(kind: str, tmp_path: Path) -> None:
    """Beside them the seventeenth does its work."""
    wrong, error = ENDS[kind]
    (tmp_path / "agent.py").write_text(WICKED + wrong)
    start = time.monotonic()
    done = play([sys.executable, "-S", "-E", str(tmp_path / "agent.py")], 17, deadline=2.0 if "2 s" in error else 20.0)
    assert all(error in str(outcome.error) for outcome in done[:16]), done
    assert time.monotonic() - start < 40
    assert done[16].error is None or "longer than 2 s" in done[16].error  # where the machine is slow


@pytest.mark.slow
def test_agents_that_never_answer_a_tool_call() -> None:
    """They ask, get a call, and do nothing more; async ones end by themselves."""

    async def agent(base_url: str, api_key: str, row: Any) -> None:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=30) as client:
            body = {"messages": HELLO, "tools": [ADD]}
            assert (await client.post(f"{base_url}/chat/completions", json=body)).status_code == 200
            if row["number"] < 16:
                await asyncio.sleep(600)

    class Calls(Scripted):
        def step(self) -> list[Sample]:
            self.turns = [CALL] * 40
            return super().step()

    done = play(agent, 17, Calls, deadline=2.0)
    assert all("twice: the agent took longer than 2 s" in str(outcome.error) for outcome in done[:16])
    assert done[16].error is None


def test_a_synchronous_client_in_an_async_agent_is_answered_and_its_line_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def agent(base_url: str, api_key: str, row: Any) -> float:
        with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=30) as client:
            assert client.post(f"{base_url}/chat/completions", json={"messages": HELLO}).status_code == 200
        if not row["number"]:
            time.sleep(2.0)
        return 1.0

    done = play(agent, 3, deadline=20.0)
    assert [outcome.error for outcome in done] == [None] * 3
    (said,) = [text for text in caplog.messages if "has held its event loop for 1 s" in text]
    assert f"{__file__} line" in said and "in agent" in said and "an async client" in said


def test_an_async_agent_that_blocks_is_late_by_its_line_and_the_others_are_trained() -> None:
    async def agent(base_url: str, api_key: str, row: Any) -> float:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=30) as client:
            assert (await client.post(f"{base_url}/chat/completions", json={"messages": HELLO})).status_code == 200
        if not row["number"]:
            time.sleep(8.0)
        return 1.0

    late, *others = play(agent, 3, deadline=2.0)
    assert "twice: the agent took longer than 2 s (it was at" in str(late.error) and "in agent" in str(late.error)
    assert [outcome.error for outcome in others] == [None] * 2


def test_functions_that_never_return_end_the_run_by_name() -> None:
    stop = threading.Event()

    def agent(base_url: str, api_key: str, row: Any) -> None:
        stop.wait(60)

    try:
        with pytest.raises(RolloutError, match=f"{MAX_HUNG} calls of agent never returned, and cannot be"):
            play(agent, 17, deadline=0.3)
    finally:
        stop.set()
    assert not server._listeners


def test_an_ended_episode_is_not_kept() -> None:
    alive: list[int] = []

    async def agent(base_url: str, api_key: str, row: Any) -> None:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=30) as client:
            await client.post(f"{base_url}/chat/completions", json={"messages": HELLO})

    async def run() -> None:
        tokenizer = TOOL_FAMILIES["qwen2.5"].make()
        engine, gateway = Scripted(tokenizer, ["Hi.<|im_end|>"] * 20), Gateway(agent)
        async with server.listening() as listener:
            for number in range(20):
                rows = [{"id": str(number), "prompt_tokens": [1]}]
                async for outcome in run_episodes(engine, rows, PARAMS, gateway, tokenizer=tokenizer):
                    assert outcome.error is None
            gc.collect()
            alive.append(sum(isinstance(thing, Conversations) for thing in gc.get_objects()))
            assert len(listener._keys) == 20 and not listener._sessions

    before = sum(isinstance(thing, Conversations) for thing in gc.get_objects())
    asyncio.run(run())
    assert alive[0] - before <= 1  # that of the last, which its outcome has


def test_a_request_whose_body_ends_after_its_episode_is_not_begun() -> None:
    links: list[socket.socket] = []

    def agent(base_url: str, api_key: str, row: Any) -> float:
        if row["number"] == 0:
            link = socket.create_connection(("127.0.0.1", port_of(base_url)))
            link.sendall(head(base_url, api_key, f"Content-Length: {len(body)}") + body[:5])
            links.append(link)
            post(base_url, api_key, {"messages": HELLO})
            return 1.0
        time.sleep(0.5)
        links[0].sendall(body[5:])
        assert b"403" in links[0].recv(4096).splitlines()[0]
        post(base_url, api_key, {"messages": HELLO})
        return 1.0

    body = json.dumps({"messages": HELLO}).encode()
    assert [outcome.error for outcome in play(agent, 2)] == [None, None]


def test_open_requests_end_with_their_episode() -> None:
    """Nothing of it is generated any more, and its connections are closed."""
    links: list[socket.socket] = []

    def agent(base_url: str, api_key: str, row: Any) -> None:
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        for _ in range(4):
            links.append(socket.create_connection(("127.0.0.1", port_of(base_url))))
            links[-1].sendall(head(base_url, api_key, f"Content-Length: {len(body)}") + body)
        time.sleep(0.3)

    run = Run(agent, engine=Sleeper)
    assert run.engine.aborted == {"a", "a#1", "a#2", "a#3"}  # type: ignore[attr-defined]
    for link in links:
        link.settimeout(5)
        assert not link.recv(65_536)

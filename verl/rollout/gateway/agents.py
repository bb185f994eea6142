"""Agents of three kinds: a function, a command, an address. Each gets the gateway's address, a key and its row."""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import json
import math
import os
import shlex
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from verl.data.forms import plain
from verl.errors import ConfigError
from verl.rollout.episode import EndOfRunError
from verl.user_code import describe

#: Functions that are left behind, as they cannot be stopped, before the run ends.
MAX_LEFT = 16
#: Of the environment of a command's process, what it gets besides the gateway's address and key.
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "SSL_CERT_FILE")
#: Bytes of a command's output that are kept, from its end.
_OUTPUT = 65_536
Row = Mapping[str, Any]


class AgentError(Exception):
    """The agent failed by its own doing, which may be the policy's."""


class KilledError(Exception):
    """The agent was killed, or cannot be reached."""


class Agent(Protocol):
    async def __call__(self, base_url: str, api_key: str, row: Row) -> Any:
        """What the agent returns.

        Raises:
            AgentError: it raised.
            KilledError: it was killed.
        """


@dataclass(frozen=True)
class Verdict:
    """What an agent says of its episode.

    Attributes:
        reward: of the episode; None: it says none.
        trajectories, calls: rewards by name of a trajectory, and by id of a response.
    """

    reward: float | None = None
    trajectories: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)


def verdict_of(value: Any) -> Verdict:
    """A number, None, or a mapping of `Verdict`'s fields.

    Raises:
        AgentError: it is something else, or not finite.
    """
    fields = value if isinstance(value, Mapping) else {"reward": value}
    if unknown := fields.keys() - {"reward", "trajectories", "calls"}:
        raise AgentError(f"the agent returned '{min(map(str, unknown))}': it may say reward, trajectories, calls")
    parts = {name: fields.get(name) or {} for name in ("trajectories", "calls")}
    rewards = [fields.get("reward"), *(number for part in parts.values() for number in part.values())]
    for number in rewards:
        if number is not None and not (isinstance(number, int | float) and math.isfinite(number)):
            raise AgentError(f"a reward is a finite number, not {number!r:.40}")
    reward = fields.get("reward")
    return Verdict(None if reward is None else float(reward), **parts)


def agent_of(agent: Any, environment: Mapping[str, str] | None = None) -> Agent:
    """A function, a command (a text or its words), or an address `http://127.0.0.1:...`.

    Raises:
        ConfigError: it is none, or an address of another machine.
    """
    if callable(agent):
        return _Function(agent)
    if isinstance(agent, str) and agent.startswith(("http://", "https://")):
        return _Address(agent)
    words = agent
    with suppress(ValueError):  # quotes that do not close
        words = shlex.split(agent) if isinstance(agent, str) else agent
    is_list = isinstance(words, Sequence) and not isinstance(words, str) and len(words) > 0
    if not is_list or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"an agent is a function (base_url, api_key, row), a command or an address, not {agent!r}")
    return _Command(words, environment or {})


class _Function:
    """Runs plain functions in threads, which cannot be stopped: those that are late are left behind."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        call = function if inspect.isroutine(function) else type(function).__call__
        self._is_async = inspect.iscoroutinefunction(call)
        self._left: list[threading.Thread] = []

    async def __call__(self, base_url: str, api_key: str, row: Row) -> Any:
        try:
            if self._is_async:
                return await self._function(base_url, api_key, row)
            return await self._in_thread(base_url, api_key, row)
        except EndOfRunError:
            raise
        except Exception as error:  # a user's code may raise anything
            raise AgentError(describe(error)) from error

    async def _in_thread(self, *arguments: Any) -> Any:
        self._left = [thread for thread in self._left if thread.is_alive()]
        if len(self._left) >= MAX_LEFT:
            raise EndOfRunError(
                f"{MAX_LEFT} agents never returned, and a function cannot be stopped: give it deadlines"
            )
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(result)

        def run() -> None:
            result, fault = None, None
            try:
                result = self._function(*arguments)
            except BaseException as error:  # exit() in an agent is an error like any other
                is_odd = not isinstance(error, Exception) or isinstance(error, StopIteration)
                fault = RuntimeError(repr(error)) if is_odd else error
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, result, fault)

        thread = threading.Thread(target=run, name="agent", daemon=True)
        thread.start()
        try:
            return await future
        except asyncio.CancelledError:
            self._left.append(thread)
            raise


class _Command:
    """Runs a program in a process group of its own, with a clean environment; the row is JSON on its stdin."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._words, self._environment = list(words), dict(environment)

    async def __call__(self, base_url: str, api_key: str, row: Row) -> Any:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        keys = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "ANTHROPIC_API_KEY": api_key}
        keys["ANTHROPIC_BASE_URL"] = base_url.removesuffix("/v1")
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
                env={**kept, **self._environment, **keys},
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"the agent's command cannot be started: {error}") from error
        try:
            return await self._finished(process, row)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            process._transport.close()  # type: ignore[attr-defined]  # its pipes, or waiting would be for their end
            await process.wait()

    async def _finished(self, process: asyncio.subprocess.Process, row: Row) -> Any:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(plain(row), default=str).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        said, faults = await asyncio.gather(_end_of(process.stdout), _end_of(process.stderr))
        status = await process.wait()
        if status < 0:
            raise KilledError(f"the agent was killed by signal {-status}")
        if status:
            last = (faults.strip().splitlines() or ["no message"])[-1]
            raise AgentError(f"the agent's command ended with status {status}: {last[:200]}")
        line = (said.strip().splitlines() or [""])[-1]
        value = None
        with suppress(ValueError, RecursionError):
            value = json.loads(line)
        return value if isinstance(value, dict | int | float) and not isinstance(value, bool) else None


async def _end_of(stream: asyncio.StreamReader) -> str:
    """The end of what a stream has."""
    kept = b""
    while part := await stream.read(_OUTPUT):
        kept = (kept + part)[-_OUTPUT:]
    return kept.decode(errors="replace")


class _Address:
    """Posts `{base_url, api_key, row}` to an agent that runs on this machine."""

    def __init__(self, url: str) -> None:
        host = ""
        with suppress(ValueError):  # no address at all, or no number
            host = urlsplit(url).hostname or ""
            host = "localhost" if ipaddress.ip_address(host).is_loopback else host
        if host != "localhost":
            raise ConfigError(f"an agent's address is one of this machine (http://127.0.0.1:PORT), not of '{host}'")
        self._url = url

    async def __call__(self, base_url: str, api_key: str, row: Row) -> Any:
        body = json.dumps({"base_url": base_url, "api_key": api_key, "row": plain(row)}, default=str)
        try:
            async with httpx.AsyncClient(timeout=None, trust_env=False, follow_redirects=False) as client:
                headers = {"Content-Type": "application/json"}
                response = await client.post(self._url, content=body, headers=headers)
            value = response.json() if response.content else None
        except (httpx.HTTPError, ValueError) as error:
            raise KilledError(f"the agent at {self._url} cannot be reached: {type(error).__name__}: {error}") from error
        if response.status_code >= 400:
            raise AgentError(f"the agent at {self._url} answered {response.status_code}: {value!r:.200}")
        return value

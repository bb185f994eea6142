"""Agents of three kinds: a function, a command, an address. Each gets the gateway's address, a key and its row."""

from __future__ import annotations

import asyncio
import copy
import ipaddress
import json
import os
import shlex
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from verl._base.secrets import is_secret, masked, note_secret
from verl._host.user_calls import HungError, LateError, UserCode
from verl._host.user_code import describe
from verl.data.forms import plain
from verl.errors import ConfigError, shown
from verl.rewards.scores import as_number, is_usable
from verl.rollout.episode import EndOfRunError, Row
from verl.rollout.gateway.server import listening
from verl.sandbox import Limits, command_job, jailed

#: Variables that a command gets besides the gateway's address and key.
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "SSL_CERT_FILE")
#: Bytes of a command's output that are kept, from its end, and seconds between two looks whether it has ended: a child
#: of it may keep its output open.
_OUTPUT, _LOOK = 65_536, 0.5
#: Of a command in a sandbox: bytes of address space of a process, processes and threads, bytes of files, and the
#: seconds by which its own deadline is behind the episode's.
_MEMORY, _PROCESSES, _DISK, _SPARE = 4 << 30, 128, 256 << 20, 10.0


class AgentError(Exception):
    """The agent failed by its own doing, which may be the policy's."""


class KilledError(Exception):
    """The agent was killed, or cannot be reached."""


#: Called with the gateway's address, a key and a row, it gives what the agent returns; it raises AgentError if the
#: agent raised, and KilledError if it was killed.
Agent = Callable[[str, str, Row], Awaitable[Any]]


@dataclass(frozen=True)
class AgentResult:
    """What an agent returned.

    Attributes:
        reward: of the episode, if it has any.
        trajectories, calls: rewards by name of a trajectory, and by id of a response.
    """

    reward: float | None = None
    trajectories: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)


def result_of(value: Any) -> AgentResult:
    """A number of Python's, NumPy's or torch's, None, or a mapping of `AgentResult`'s fields.

    Raises:
        AgentError: it is something else, or not finite.
    """
    fields = value if isinstance(value, Mapping) else {"reward": value}
    if unknown := fields.keys() - {"reward", "trajectories", "calls"}:
        raise AgentError(f"the agent returned '{min(map(str, unknown))}': it may say reward, trajectories, calls")
    parts = []
    for name in ("trajectories", "calls"):
        part = {} if fields.get(name) is None else fields[name]
        if not isinstance(part, Mapping):
            raise AgentError(f"'{name}' is a mapping of names to rewards, not {shown(part)}")
        parts.append({str(key): reward for key, value in part.items() if (reward := _reward(value)) is not None})
    return AgentResult(_reward(fields.get("reward")), *parts)


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    number = as_number(value)
    if number is None or not is_usable(number):
        raise AgentError(f"a reward is a finite number, not {shown(value)}")
    return number


def agent_of(agent: Any, environment: Mapping[str, str], readable: Sequence[str] | None, seconds: float) -> Agent:
    """A function, a command (a text or its words), or an address `http://127.0.0.1:...`.

    Args:
        readable: a command runs in a sandbox, where it may read these files and folders besides its program and the
            files that it names; None: it runs in none.
        seconds: that a function, and a command in a sandbox, may run.

    Raises:
        ConfigError: it is no agent, or the address of another machine; or it is no command, and a sandbox is wanted.
    """
    if readable is not None and (callable(agent) or str(agent).startswith(("http://", "https://"))):
        raise ConfigError("sandbox=True is for a command: a function runs in this process, an address somewhere else")
    if callable(agent):
        return partial(_call, UserCode("agent"), agent, seconds)
    if isinstance(agent, str) and agent.startswith(("http://", "https://")):
        if not is_loopback(agent):
            where = f"not {masked(agent)!r:.100}"
            raise ConfigError(f"an agent's address is one of this machine (http://127.0.0.1:PORT), {where}")
        return partial(_post, agent)
    words = agent
    with suppress(ValueError):  # quotes that do not close
        words = shlex.split(agent) if isinstance(agent, str) else agent
    is_list = isinstance(words, Sequence) and not isinstance(words, str) and len(words) > 0
    if not is_list or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"an agent is a function (base_url, api_key, row), a command or an address, not {masked(shown(agent, 200))}"
        )
    return _Command(words, environment, readable, seconds)


def is_loopback(url: str) -> bool:
    """Whether an address is a loopback one."""
    host = ""
    with suppress(ValueError):  # no address at all, or no number
        host = urlsplit(url).hostname or ""
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


async def _call(
    code: UserCode, function: Callable[..., Any], seconds: float, base_url: str, api_key: str, row: Row
) -> Any:
    """Call an agent's function, not on the gateway's event loop, which it might block."""
    row = copy.deepcopy(dict(row))  # a second run of the agent gets it unchanged
    try:
        return await code.call(seconds, function, base_url, api_key, row)
    except HungError as error:
        raise EndOfRunError(f"{error}: give them deadlines") from None
    except (EndOfRunError, LateError):
        raise
    except Exception as error:  # a user's code may raise anything
        raise AgentError(describe(error)) from error


class _Command:
    """Runs a program in a process group of its own, with a clean environment; the row is JSON on its stdin. In a
    sandbox the only address that it reaches is the gateway's."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], readable: Sequence[str] | None, seconds: float
    ) -> None:
        self._words, self._environment, self._readable = list(words), dict(environment), readable
        self._limits = Limits(seconds + _SPARE, _MEMORY, _PROCESSES, disk=_DISK)
        parts = [part for word in words for part in (word, word.partition("=")[2])]
        #: That the command names, such as its script.
        self.files = [part for part in parts if os.path.isfile(part) and part != words[0]]
        for name, value in environment.items():
            if is_secret(name):
                note_secret(value)
        if readable is not None:
            command_job(words, {}, self._limits, readable, {})  # which refuses one that is not here
        elif shutil.which(words[0], path=environment.get("PATH")) is None:
            raise ConfigError(f"the agent's command cannot be started: there is no program '{words[0]}'")

    async def __call__(self, base_url: str, api_key: str, row: Row) -> Any:
        keys = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "ANTHROPIC_API_KEY": api_key}
        keys["ANTHROPIC_BASE_URL"] = base_url.removesuffix("/v1")
        if self._readable is not None:
            return await self._in_sandbox({**self._environment, **keys}, urlsplit(base_url).port or 0, row)
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        async with _running(self._words, env={**kept, **self._environment, **keys}, start_new_session=True) as process:
            out, err = await _talked(process, row)
            return self._returned(await process.wait(), out, err)

    def _returned(self, status: int, out: str, err: str) -> Any:
        """The last line of stdout, if it is JSON. Raises AgentError or KilledError unless the status is 0."""
        if status < 0:
            raise KilledError(f"the agent was killed by signal {-status}")
        if status:
            raise AgentError(f"the agent's command ended with status {status}: {masked(err)[:200] or 'no message'}")
        value = None
        with suppress(ValueError, RecursionError):
            value = json.loads(out)
        return value if isinstance(value, dict | int | float) and not isinstance(value, bool) else None

    async def _in_sandbox(self, variables: Mapping[str, str], port: int, row: Row) -> Any:
        ours, theirs = socket.socketpair()
        ours.settimeout(self._limits.seconds)  # by which what is in the sandbox has ended
        network = {"port": port, "fd": theirs.fileno()}
        job = command_job(self._words, variables, self._limits, self._readable or (), network)
        with ours, jailed(job, [theirs.detach()]) as jail:
            async with _running(jail.command, **jail.options) as process, AsyncExitStack() as stack:
                jail.started()
                # The sandbox's own network has no gateway: it hands out a listening socket, unless nothing runs in it.
                if fds := (await asyncio.to_thread(socket.recv_fds, ours, 1, 1))[1]:
                    listener = await stack.enter_async_context(listening())
                    await stack.enter_async_context(listener.serving(socket.socket(fileno=fds[0])))
                out, err = await _talked(process, row)
                await process.wait()
                if (status := jail.exit_code()) is None:
                    raise KilledError(f"the agent took longer than {self._limits.seconds:g} s")
                return self._returned(status, out, err)


@asynccontextmanager
async def _running(words: Sequence[str], **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process with pipes, which is killed at last."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe, **options)
    except OSError as error:
        raise ConfigError(f"the agent's command cannot be started: {error}") from error
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
        process._transport.close()  # type: ignore[attr-defined]  # its pipes, or waiting would be for their end
        await process.wait()


async def _talked(process: asyncio.subprocess.Process, row: Row) -> tuple[str, str]:
    """The last lines of stdout and of stderr of a command that reads the row, when both have ended or it has."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    out, err = bytearray(), bytearray()
    body = json.dumps(plain(row), default=str).encode() + b"\n"
    talk = asyncio.gather(_keep(process.stdout, out), _keep(process.stderr, err), _write(process.stdin, body))
    try:
        while not (await asyncio.wait([talk], timeout=_LOOK))[0]:
            if process.returncode is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it left behind, unless that has a session of its own
                await asyncio.wait([talk], timeout=_LOOK)
                process._transport.close()  # type: ignore[attr-defined]  # as in `_running`
                break
    finally:
        talk.cancel()
    lines = [kept.decode(errors="replace").strip().splitlines() or [""] for kept in (out, err)]
    return lines[0][-1], lines[1][-1]


async def _keep(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """Read a stream, and keep the end of it."""
    while part := await stream.read(_OUTPUT):
        kept += part
        del kept[:-_OUTPUT]


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError):  # it need not read it
        stream.write(data)
        await stream.drain()
    stream.close()


async def _post(url: str, base_url: str, api_key: str, row: Row) -> Any:
    """Post a row to an agent that runs on this machine."""
    body = json.dumps({"base_url": base_url, "api_key": api_key, "row": plain(row)}, default=str)
    try:
        async with httpx.AsyncClient(timeout=None, trust_env=False, follow_redirects=False) as client:
            response = await client.post(url, content=body, headers={"Content-Type": "application/json"})
    except httpx.HTTPError as error:
        raise KilledError(masked(f"the agent at {url} cannot be reached: {type(error).__name__}: {error}")) from error
    with suppress(ValueError, RecursionError):
        value = response.json() if response.content else None
        if response.status_code < 300:
            return value
    raise AgentError(f"the agent at {masked(url)} answered {response.status_code}: {masked(repr(response.text))[:200]}")

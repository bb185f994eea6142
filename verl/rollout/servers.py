"""Several HTTP servers of one kind as one: each call goes to one of them, has a deadline, and is tried elsewhere if it
fails.

A call's `key` (its prompt) sticks to a server, which has the prompt in its cache, until that one has much more to do
than the least loaded. A server that does not answer, answers an error or nonsense is left alone for a while, twice as
long after each further failure in a row. All waiting happens on one event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from verl.errors import ConfigError, RolloutError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_STICKY_SLACK = 8
_REMEMBERED = 10_000
_CONNECT_SECONDS = 10.0
_REST_SECONDS = (1.0, 60.0)
_REFUSED = (400, 413, 422)
_AWAY = (502, 503, 504)  # what stands in front of a server says so of it
_MOST_BYTES = 1 << 26
_OF_MODELS = re.compile(r"/v1(/.*)?$")


class RefusedError(RolloutError):
    """A server says that the request itself is wrong; another would say so, too."""


class NoServerError(RolloutError):
    """No server answers any more."""


class StatusError(OSError):
    """A server answers with a status that is no success."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Server:
    """One address. `answered` is when it last did; `usable` is taken away by whoever knows that it must not be used."""

    url: str
    running: int = 0
    failures: int = 0
    answered: float = -math.inf
    resting_until: float = 0.0
    usable: bool = True

    def failed(self) -> None:
        """Leave it alone for a while; calls that fail together count as one failure."""
        if time.monotonic() < self.resting_until:
            return
        first, most = _REST_SECONDS
        self.resting_until = time.monotonic() + min(most, first * 2.0**self.failures)
        self.failures += 1

    @property
    def ready(self) -> bool:
        return self.usable and time.monotonic() >= self.resting_until


class ServerPool:
    """Calls to servers of one kind.

    Args:
        urls: an address, or several: "http://host:8000"; a path after the port is `path`. What stands before "/v1" in
            it is part of every address that is asked.
        timeout: seconds for one answer.
        retries: further tries of a call that failed, elsewhere where possible.
        api_key: sent as a bearer token.

    Raises:
        ConfigError: an address is none, or the paths differ.
    """

    def __init__(
        self, urls: str | Sequence[str], *, timeout: float = 600.0, retries: int = 3, api_key: str | None = None
    ) -> None:
        given = [urlsplit(url.rstrip("/")) for url in ([urls] if isinstance(urls, str) else urls)]
        paths = {url.path for url in given}
        if not given or any(url.scheme not in ("http", "https") or not url.netloc for url in given) or len(paths) > 1:
            raise ConfigError(f"servers are addresses like http://host:8000, all with the same path, not {urls!r}")
        if timeout <= 0 or retries < 0:
            raise ConfigError(f"servers: timeout must be above 0 and retries at least 0, not {timeout} and {retries}")
        before, of_models = paths.pop(), _OF_MODELS.search(given[0].path)
        before, self.path = (before[: of_models.start()], of_models[0]) if of_models else ("", before)
        self.servers = [Server(f"{url.scheme}://{url.netloc}{before}") for url in given]
        self.timeout, self.retries = timeout, retries
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._homes: OrderedDict[Any, Server] = OrderedDict()
        self._routes: dict[Server, asyncio.Task[frozenset[str]]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="servers", daemon=True).start()
        self._client: httpx.AsyncClient | None = None
        #: Raises when a server that failed before must not be used as it is now.
        self.check: Callable[[Server], Coroutine[Any, Any, None]] | None = None
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the pool's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def ask(
        self,
        path: str | Callable[[Server], Awaitable[str]],
        body: Any,
        read: Callable[[Any], T],
        *,
        key: Any = None,
        method: str = "POST",
    ) -> T:
        """`read` of the JSON that a server answers. To be awaited on the pool's loop.

        Args:
            path: where it is asked, or what finds that out of the server; when it raises, the server has failed.
            body: what it is sent, or what makes that for a path.
            read: takes the answer apart; any exception it raises means nonsense.
            key: what a server may have in its cache.

        Raises:
            RefusedError: a server finds the request itself wrong.
            NoServerError: the tries failed, and no server has answered anything, an error of its own neither, since
                the first did.
            RolloutError: the tries failed.
        """
        faults: dict[Server, str] = {}
        failing = math.inf
        for attempt in range(1 + self.retries):
            server = await self._choose(key, faults)
            server.running += 1
            try:
                if server.failures and self.check is not None:
                    await self.check(server)
                where = path if isinstance(path, str) else await path(server)
                sent = body(where) if callable(body) else body
                answer = read(await self.send(server, where, sent, method=method))
            except RefusedError:
                raise
            except Exception as error:  # whatever a stranger's server brings about is its failure
                faults[server] = f"{type(error).__name__}: {error}"[:200]
                failing = min(failing, time.monotonic())
                if isinstance(error, StatusError) and error.status not in _AWAY:
                    server.answered = time.monotonic()
                server.failed()
                logger.warning("%s failed (try %d): %s", server.url, attempt + 1, faults[server])
                continue
            finally:
                server.running -= 1
            server.failures, server.answered = 0, time.monotonic()
            return answer
        told = "; ".join(f"{server.url}: {fault}" for server, fault in faults.items())
        if all(not server.usable or (server.failures and server.answered < failing) for server in self.servers):
            raise NoServerError(f"no server answers any more ({told}): look at their logs and start them again")
        raise RolloutError(f"a request failed {1 + self.retries} times ({told})")

    async def send(
        self, server: Server, path: str, body: Any = None, params: Mapping[str, Any] | None = None, method: str = "POST"
    ) -> Any:
        """The JSON that this server answers.

        Raises:
            RefusedError: a status that says the request is wrong.
            StatusError: any other status that is no success.
            httpx.HTTPError, OSError, ValueError, asyncio.TimeoutError: it fails, is late, or answers no JSON or more
                than 64 MiB.
        """
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            timeout = httpx.Timeout(self.timeout, connect=min(_CONNECT_SECONDS, self.timeout))
            self._client = httpx.AsyncClient(limits=limits, timeout=timeout, headers=self._headers)
        request = self._client.build_request(method, server.url + path, json=body, params=params)
        status, content = await asyncio.wait_for(_answer(self._client, request), self.timeout)
        if not 200 <= status < 300:
            said = f"{server.url}{path} answers {status}: {content[:300].decode(errors='replace')}"
            raise RefusedError(said) if status in _REFUSED else StatusError(status, said)
        return json.loads(content) if content else None

    async def routes(self, server: Server) -> frozenset[str]:
        """The paths that a server says it has; none where it does not describe itself. It is asked once, whoever waits.

        Raises:
            as `send`: it is away.
        """
        asked = self._routes.get(server)
        if asked is None or (asked.done() and (asked.cancelled() or asked.exception() is not None)):
            asked = self._routes[server] = asyncio.create_task(self._described(server))
        return await asyncio.shield(asked)

    async def _described(self, server: Server) -> frozenset[str]:
        try:
            description = await self.send(server, "/openapi.json", method="GET")
        except (RefusedError, StatusError, ValueError) as error:
            if isinstance(error, StatusError) and error.status >= 500:
                raise  # it is not up yet
            return frozenset()
        paths = description.get("paths") if isinstance(description, dict) else None
        return frozenset(paths if isinstance(paths, dict) else ())

    async def _choose(self, key: Any, faults: Mapping[Server, str]) -> Server:
        """The server for a try: the key's own, else the least loaded, those that failed this call last.

        Raises:
            NoServerError: none may be used.
        """
        while True:
            ready = [server for server in self.servers if server.ready]
            fresh = [server for server in ready if server not in faults] or ready
            if fresh:
                break
            usable = [server.resting_until for server in self.servers if server.usable]
            if not usable:
                raise NoServerError("no server may be used: none has the weights of now. Look at their logs")
            await asyncio.sleep(max(0.01, min(usable) - time.monotonic()))
        least = min(fresh, key=lambda server: server.running)
        home = self._homes.get(key)
        if home not in fresh or home.running > least.running + _STICKY_SLACK:
            home = least
        if key is not None:
            self._homes[key] = home
            self._homes.move_to_end(key)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)
        return home


def check_model_path(url: str) -> None:
    """Raises ConfigError for an address with a path that no server of models has: it would not be asked there."""
    path = urlsplit(url.rstrip("/")).path
    if path and not path.endswith("/generate") and not _OF_MODELS.search(path):
        raise ConfigError(f"servers of models are addresses like http://host:8000, .../v1 or .../generate, not '{url}'")


async def _answer(client: httpx.AsyncClient, request: httpx.Request) -> tuple[int, bytes]:
    """Status and body.

    Raises:
        ValueError: the body is longer than any answer, or has no end.
    """
    response, content = await client.send(request, stream=True), bytearray()
    try:
        async for part in response.aiter_bytes():
            content += part
            if len(content) > _MOST_BYTES:
                raise ValueError(f"{request.url} answers more than {_MOST_BYTES} bytes")
    finally:
        await response.aclose()
    return response.status_code, bytes(content)

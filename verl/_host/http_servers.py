"""HTTP servers of one kind: each call has a deadline; one that fails is retried, on another server if there is one.

A call's `key` (its prompt) decides its server, which then has the prompt in its cache, unless that server is far busier
than another. A server that failed gets no new calls for a while, longer after each further failure. All calls run on
one event loop in a thread of its own.
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
from base64 import b64encode
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import httpx

from verl._base.checked import checked
from verl._base.record import Retries, Seconds
from verl._base.secrets import from_environment, is_secret, key_of, masked
from verl.errors import ConfigError, RolloutError, shown

T = TypeVar("T")
logger = logging.getLogger(__name__)

_STICKY_SLACK = 8  # a key leaves its server once that has this many more calls than the idlest one
_LONGEST_PAUSE = 60.0
_LONG = 12  # characters of a value in a query from which it may be a key, whatever it is called
# The longest answer that is accepted, since all other calls wait while its JSON is parsed: so many bytes in any case,
# more for each byte that was sent and for each token that was requested, up to the last number.
_BASE_BYTES, _BYTES_PER_BYTE_SENT, _BYTES_PER_TOKEN, _MAX_BYTES = 1 << 20, 64, 1 << 10, 1 << 26
_MODEL_PATH = re.compile(r"(/v1(/.*)?|/generate)$")


class RefusedError(RolloutError):
    """A server rejected the request as invalid, as any other server would."""


class NoServerError(RolloutError):
    """No server works any more."""


class StatusError(OSError):
    """A server answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _without_credentials(record: logging.LogRecord) -> bool:
    record.msg, record.args = masked(record.getMessage()), ()
    return True


logging.getLogger("httpx").addFilter(_without_credentials)  # it logs each address


@dataclass(eq=False)
class Server:
    """One address.

    Attributes:
        answered: time of its last valid answer.
        absent: paths that it answers with 404.
        weights: policy version that it was given, None if it may have any weights.
        query, headers: of each request, besides its own.
        checked: whether it is known to still serve them: a server that failed may have been restarted.
    """

    url: str
    running: int = 0
    failures: int = 0
    answered: float = -math.inf
    paused_until: float = 0.0
    absent: set[str] = field(default_factory=set)
    weights: int | None = None
    checked: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    query: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def note_failure(self) -> None:
        """Pause new calls to this server; calls that fail together count as one failure."""
        self.checked = False
        self.absent.clear()
        if (now := time.monotonic()) >= self.paused_until:
            self.paused_until = now + min(_LONGEST_PAUSE, 2.0**self.failures)
            self.failures += 1


class ServerPool:
    """Calls to servers of one kind.

    Args:
        urls: an address, or several with the same path, such as "http://host:8000/v1". User and password
            ("http://USER:$NAME@host"), a bearer token ("http://$NAME@host") and a query ("?token=$NAME") are sent with
            each request, from those variables of the environment, and are hidden in messages.
        timeout: seconds for one answer; a call with its retries takes at most twice that.
        retries: further tries of a call that failed.
        api_key: sent as a bearer token; "$NAME" is in that variable of the environment.
        kind: what messages call these servers.

    Raises:
        ConfigError: an address is not one, or the paths differ; or see `key_of`.
    """

    @checked
    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        timeout: Seconds = 600.0,
        retries: Retries = 3,
        api_key: str | None = None,
        kind: str = "server",
    ) -> None:
        urls = [urls] if isinstance(urls, str) else urls
        parsed = [urlsplit(url) for url in urls]
        paths = {url.path.rstrip("/") for url in parsed}
        if not parsed or any(url.scheme not in ("http", "https") or not url.netloc for url in parsed) or len(paths) > 1:
            raise ConfigError(
                f"servers are addresses like http://host:8000, all with the same path, not {masked(shown(urls, 200))}"
            )
        bearer = key_of(api_key, kind)
        path = paths.pop()
        known = _MODEL_PATH.search(path)
        #: The path of a protocol; what precedes it belongs to every address.
        self.path = known[0] if known else path
        self.servers = [_server(url, path.removesuffix(self.path), kind) for url in parsed]
        self.timeout, self.retries, self.kind = timeout, retries, kind
        #: Called before each use of a server; if it raises, the server has failed.
        self.prepare: Callable[[Server], Coroutine[Any, Any, None]] | None = None
        self._headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {bearer}"} if bearer else {})}
        self._client: httpx.AsyncClient | None = None
        self._model: str | None = None
        self._naming = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="servers", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the pool's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def ask(
        self, bodies: Mapping[str, Any], read: Callable[[Any], T], *, key: Any = None, method: str = "POST"
    ) -> T:
        """`read` of the JSON that a server answers. To be awaited on the pool's loop.

        Args:
            bodies: what to send, by path; a server gets the first whose path it has.
            read: parses the answer; any exception it raises counts as a failure of the server.
            key: what a server may have in its cache.

        Raises:
            RefusedError: a server finds the request itself invalid.
            NoServerError: all tries failed, and no server has given any valid answer since the first of them.
            RolloutError: all tries failed.
        """
        faults: dict[Server, str] = {}
        first_fault, end, tries = math.inf, time.monotonic() + 2 * self.timeout, 0
        while tries <= self.retries and time.monotonic() < end:
            server = self._choose(key, faults)
            if server in faults:
                await asyncio.sleep(min(2.0 ** (tries - 1), _LONGEST_PAUSE))
            server.running += 1
            tries += 1
            try:
                if self.prepare is not None:
                    await self.prepare(server)
                answer = read(await self._send_first(server, bodies, method))
            except RefusedError:
                server.answered = time.monotonic()
                raise
            except Exception as error:  # an answer may be wrong in any way
                faults[server] = masked(f"{type(error).__name__}: {error}")[:300]
                first_fault = min(first_fault, time.monotonic())
                server.note_failure()
                logger.warning("%s %s failed (try %d): %s", self.kind, server.url, tries, faults[server])
            else:
                server.failures, server.answered = 0, time.monotonic()
                return answer
            finally:
                server.running -= 1
        reasons = "; ".join(f"{server.url}: {fault}" for server, fault in faults.items())
        if not await self._answers_since(first_fault, end):
            raise NoServerError(f"no {self.kind} works any more ({reasons}): look at its log and start it again")
        raise RolloutError(f"a request to a {self.kind} failed {tries} times ({reasons})")

    async def model(self) -> str:
        """The first model that a server lists.

        Raises:
            as `ask`.
        """
        async with self._naming:  # calls that begin together ask once
            if self._model is None:
                self._model = await self.ask(
                    {"/v1/models": None}, lambda answer: str(answer["data"][0]["id"]), method="GET"
                )
            return self._model

    async def send(
        self, server: Server, path: str, body: Any = None, params: Mapping[str, Any] | None = None, method: str = "POST"
    ) -> Any:
        """The JSON that this server answers.

        Raises:
            RefusedError: a status that says the request is invalid.
            StatusError: any other error status.
            httpx.HTTPError, OSError, ValueError, asyncio.TimeoutError: it fails, is late, or answers something else
                than plain JSON of a size that fits the request, at most 64 MiB.
        """
        if self._client is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            timeout = httpx.Timeout(self.timeout, connect=min(10.0, self.timeout))
            self._client = httpx.AsyncClient(limits=limits, timeout=timeout, headers=self._headers)
        query, address = [*server.query, *(params or {}).items()], server.url + path
        request = self._client.build_request(method, address, json=body, params=query, headers=server.headers)
        most = _most_bytes(body, int(request.headers.get("Content-Length", 0)))
        status, content = await asyncio.wait_for(_answer(self._client, request, most), self.timeout)
        if not 200 <= status < 300:
            said = masked(f"{server.url}{path} answers {status}: {content[:300].decode(errors='replace')}")
            raise RefusedError(said) if status in (400, 413, 422) else StatusError(status, said)
        return json.loads(content) if content else None

    async def _send_first(self, server: Server, bodies: Mapping[str, Any], method: str) -> Any:
        """Send the first body whose path the server has."""
        present = [path for path in bodies if path not in server.absent]
        *others, last = present or list(bodies)  # if it lacked all of them, it may have been restarted since
        for path in others:
            try:
                return await self.send(server, path, bodies[path], method=method)
            except StatusError as error:
                if error.status != 404:
                    raise
                server.absent.add(path)
        return await self.send(server, last, bodies[last], method=method)

    async def _answers_since(self, moment: float, end: float) -> bool:
        """Whether any server has answered any call since `moment`: then a request that failed on all of them is at
        fault, not the servers. Waits for calls in progress, until `end` at most."""
        while time.monotonic() < end and any(server.running for server in self.servers):
            if any(server.answered > moment for server in self.servers):
                break
            await asyncio.sleep(0.05)
        return any(server.answered >= moment for server in self.servers)

    def _choose(self, key: Any, faults: Collection[Server]) -> Server:
        """The server of the key, or the next one if that failed or is far busier; without a key the least busy."""
        idlest = min(server.running for server in self.servers)
        home = hash(key) if key is not None else self.servers.index(min(self.servers, key=lambda s: s.running))
        home, now = home % len(self.servers), time.monotonic()
        return min(  # of equal ones the first from the key's own on
            self.servers[home:] + self.servers[:home],
            key=lambda s: (s in faults, now < s.paused_until, max(0, s.running - idlest - _STICKY_SLACK)),
        )


def _server(url: SplitResult, path: str, kind: str) -> Server:
    """The server at an address, with credentials and query moved out of its URL."""
    user, _, host = url.netloc.rpartition("@")
    name, colon, password = (unquote(part) for part in user.partition(":"))
    headers = {}
    if name.startswith("$") and not colon:
        headers = {"Authorization": f"Bearer {key_of(name, kind)}"}
    elif user:
        pair = f"{name}:{from_environment(password, kind)}"
        headers = {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
    query = [
        (name, from_environment(value, kind) if is_secret(name) or value[:1] == "$" or len(value) >= _LONG else value)
        for name, value in parse_qsl(url.query, keep_blank_values=True)
    ]
    return Server(f"{url.scheme}://{host}{path}", query=query, headers=headers)


def check_model_path(url: str) -> None:
    """Raises ConfigError for an address whose path no server of models has."""
    path = urlsplit(url).path.rstrip("/")
    if path and not _MODEL_PATH.search(path):
        raise ConfigError(
            f"servers of models are addresses like http://host:8000, .../v1 or .../generate, not '{masked(url)}'"
        )


def _most_bytes(body: Any, sent: int) -> int:
    """The most bytes of an answer to a request of `sent` bytes."""
    asked = body if isinstance(body, Mapping) else {}
    tokens = int(asked.get("max_tokens") or 0) * int(asked.get("n") or 1)
    return min(_MAX_BYTES, _BASE_BYTES + _BYTES_PER_BYTE_SENT * sent + _BYTES_PER_TOKEN * tokens)


async def _answer(client: httpx.AsyncClient, request: httpx.Request, most: int) -> tuple[int, bytes]:
    """Status and body.

    Raises:
        ValueError: the body is compressed, or longer than any valid answer.
    """
    response, content = await client.send(request, stream=True), bytearray()
    try:
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise ValueError(f"{request.url.host} answers in the encoding '{encoding}', none was accepted")
        async for part in response.aiter_raw():
            content += part
            if len(content) > most:
                raise ValueError(f"{request.url.host} answers more than {most} bytes")
    finally:
        await response.aclose()
    return response.status_code, bytes(content)

"""The listener: HTTP on 127.0.0.1 for all episodes of a process, each with a key of its own.

Before a body is read a request must name this host (against rebinding of names), come from no web page, and have the
key of an episode. Each thing that a client does has a deadline: its head, its body, taking the answer, its next
request. It uses aiohttp (extra `gateway`), whose handlers are cancelled when their client goes away.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import os
import re
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import cached_property
from typing import Any, cast
from weakref import WeakKeyDictionary

import httpx

from verl._base.extras import load_extra
from verl.rollout.gateway.dialects.anthropic import ANTHROPIC
from verl.rollout.gateway.dialects.base import Body, ChatAnswer, Dialect, Events, Part, RequestError
from verl.rollout.gateway.dialects.chat import CHAT
from verl.rollout.gateway.dialects.responses import RESPONSES
from verl.rollout.gateway.session import LARGE, MAX_OPEN, START, Delivery, Session, ended

logger = logging.getLogger(__name__)
#: Bytes of a body, and how deep its JSON may be nested.
MAX_BYTES, MAX_DEPTH = 16 << 20, 64
#: Seconds within which a body must have arrived, and an answer must have been taken.
BODY_SECONDS, TAKE_SECONDS = 60.0, 60.0
#: Seconds until a connection without a complete head is closed: of its first request, or of the next one.
HEAD_SECONDS = 60.0
#: Seconds for which what is left of a refused body is read, so that its client sees the answer.
_LINGER_SECONDS = 2.0
#: Seconds between two signs that a stream is alive.
ALIVE_SECONDS = 10.0
#: Of aiohttp, which would log heads that are no HTTP, with the key in them.
_silent = logging.getLogger(f"{__name__}.http")
_silent.disabled = True
_DIALECTS = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/messages": ANTHROPIC}
#: How a body may write half of a pair of UTF-16, which is no text that a tokenizer takes.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_COUNT, _MODELS = "/v1/messages/count_tokens", "/v1/models"
_listeners: WeakKeyDictionary[asyncio.AbstractEventLoop, Listener] = WeakKeyDictionary()


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    """The listener of this event loop, while anybody needs it."""
    loop = asyncio.get_running_loop()
    listener = _listeners.setdefault(loop, Listener())
    listener.users += 1
    try:
        async with listener.lock:
            if not listener.port:
                await listener.start()
        yield listener
    finally:
        listener.users -= 1
        if not listener.users:
            _listeners.pop(loop, None)
            await listener.stack.aclose()


class Listener:
    """One listening socket.

    Attributes:
        port: 0 until it has started.
        users: how many episodes need it.
        stack: what it has open.
    """

    def __init__(self) -> None:
        self.port = self.users = 0
        self.lock, self.stack = asyncio.Lock(), AsyncExitStack()
        self._numbers = itertools.count()
        self._keys: dict[str, bytes] = {}  # of all episodes, by their number
        self._sessions: dict[str, Session] = {}  # of those that run
        self._unasked: set[Any] = set()  # connections without a request so far
        self._connection: Any = None  # makes the handler of one

    async def start(self) -> None:
        web = self._web = load_extra("aiohttp.web", "gateway", "a gateway")
        server = web.Server(
            self._handle, handler_cancellation=True, auto_decompress=False, access_log=None,
            keepalive_timeout=HEAD_SECONDS, lingering_time=_LINGER_SECONDS, logger=_silent,
        )  # fmt: skip
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        self.stack.push_async_callback(runner.cleanup)
        await runner.setup()
        loop, most = asyncio.get_running_loop(), resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        coming: list[Any] = []

        def end_unasked(handler: Any) -> None:
            if handler in self._unasked:
                self._unasked.discard(handler)
                handler.force_close()

        def connection() -> Any:
            handler = server()
            # So many at a time that the run itself can always open files.
            seconds = HEAD_SECONDS if len(server.connections) + len(coming) < most else 0.0
            coming.append(handler)
            loop.call_soon(coming.pop)  # when it is one of the server's connections
            self._unasked.add(handler)
            loop.call_later(seconds, end_unasked, handler)
            return handler

        self._connection = connection
        listening_socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        await self.stack.enter_async_context(self.serving(listening_socket))
        self.port = listening_socket.getsockname()[1]

    @asynccontextmanager
    async def serving(self, listening_socket: socket.socket) -> AsyncIterator[None]:
        """Answer on a socket meanwhile, such as one in a sandbox's own network, under the same address."""
        server = await asyncio.get_running_loop().create_server(self._connection, sock=listening_socket)
        try:
            yield
        finally:
            server.close()

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        """For other models; it has no key of ours, and each request has a deadline."""
        client = httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits())
        self.stack.push_async_callback(client.aclose)
        return client

    @contextmanager
    def admitting(self, session: Session) -> Iterator[None]:
        """Let requests with the session's key in meanwhile. Afterwards the key alone is kept.

        It has 128 random bits behind the number of its episode.
        """
        number = str(next(self._numbers))
        session.key = f"verl-{number}-{secrets.token_hex(16)}"
        self._keys[number], self._sessions[number] = session.key.encode(), session
        try:
            yield
        finally:
            session.end()
            del self._sessions[number]

    async def _handle(self, request: Any) -> Any:
        self._unasked.discard(request.protocol)
        dialect = _DIALECTS.get(request.path.removesuffix("/count_tokens"), CHAT)
        session = None
        try:
            session = self._admitted(request)
            async with session.room:
                return await self._answered(request, session, dialect)
        except ConnectionError:  # the client went away
            raise
        except Exception as error:
            fault = _fault(session, request.path, error)
        headers = {} if fault.retry else {"x-should-retry": "false"}
        return await self._sent(request, dialect.error(fault), fault.status, headers)

    def _admitted(self, request: Any) -> Session:
        """The session of a request's key.

        Raises:
            RequestError: another host is meant, a web page asks, or the key belongs to no running episode, or to one
                that has too many requests open.
        """
        if request.headers.get("Host") != f"127.0.0.1:{self.port}":
            raise RequestError(421, f"this is 127.0.0.1:{self.port}, and answers to no other name")
        if "Origin" in request.headers:
            raise RequestError(403, "requests of web pages are not answered")
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        number = next(iter(key.split("-")[1:2]), "")
        sent = key.encode("utf-8", "surrogateescape")  # which a header may hold
        if number not in self._keys or not hmac.compare_digest(sent, self._keys[number]):
            raise RequestError(401, "the key is not that of an episode", code="invalid_api_key")
        if number not in self._sessions:
            raise ended()
        if (session := self._sessions[number]).room.locked():
            raise RequestError(429, f"more than {MAX_OPEN} requests are open", code="rate_limit_exceeded")
        return session

    async def _answered(self, request: Any, session: Session, dialect: Dialect) -> Any:
        path = request.path
        if path.startswith(_MODELS) and request.method == "GET":
            named = path.removeprefix(_MODELS).strip("/")
            one = {"id": named or "policy", "object": "model", "created": 0, "owned_by": "verl", "type": "model"}
            listed: Body = one if named else {"object": "list", "data": [one], "has_more": False}
            return await self._sent(request, listed)
        if path != _COUNT and path not in _DIALECTS:
            known = ", ".join((*_DIALECTS, _COUNT, _MODELS))
            raise RequestError(404, f"{path} is not here; there are {known}", code="not_found")
        if request.method != "POST":
            raise RequestError(405, f"{path} is asked by POST", code="method_not_allowed")
        content = await _body(request)
        body = _parsed(content) if len(content) < LARGE else await asyncio.to_thread(_parsed, content)
        if path == _COUNT:
            return await self._sent(request, {"input_tokens": await session.count(dialect.read(body))})
        if (model := str(body.get("model"))) not in session.gateway.models:
            return await self._replied(request, session, dialect, body, content)
        if session.gateway.models[model] == START and session.start is not None:
            response = await self._replied(request, session.start, dialect, body, content)
        else:
            with session.during(self._other_model(request, session, model, content)) as other:
                response = await other
        session.others[model] += response.status < 400
        return response

    async def _replied(self, request: Any, session: Session, dialect: Dialect, body: Body, content: bytes) -> Any:
        asked = dialect.read(body)
        news = asyncio.Queue[ChatAnswer | Part | None]()  # the empty answer, its deltas, None when it is finished
        send = news.put_nowait if asked.stream else None
        with session.during(session.answer(asked, request.headers, content, send)) as answering:
            if asked.stream:
                answering.add_done_callback(lambda done: news.put_nowait(None))
                texts = _texts(dialect.events(asked), answering, news)
                return await self._stream(request, session, dialect, answering, texts)
            delivery = await answering
            response = await self._sent(request, dialect.answer(asked, delivery.answer))
            delivery.delivered()
            return response

    async def _other_model(self, request: Any, session: Session, name: str, content: bytes) -> Any:
        """What another server answers to this body, as it comes. Nothing of it is trained."""
        gateway = session.gateway
        url = gateway.models[name]
        if url is None:
            raise RequestError(404, f"there is no model '{name}' here", "model", "model_not_found")
        sent = {"Content-Type": "application/json"}
        if version := request.headers.get("anthropic-version"):
            sent["anthropic-version"] = version
        if (variable := gateway.model_keys.get(name)) is not None:
            if (key := os.environ.get(variable)) is None:
                raise RequestError(502, f"the variable {variable} has no key here", code="model_failed")
            is_anthropic = _DIALECTS.get(request.path) is ANTHROPIC
            sent |= {"x-api-key": key} if is_anthropic else {"Authorization": f"Bearer {key}"}
        address, response = url.rstrip("/") + request.path.removeprefix("/v1"), cast(Any, None)
        stream = self._client.stream("POST", address, content=content, headers=sent)
        try:
            async with asyncio.timeout(gateway.model_deadline), stream as answer:
                kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
                response = self._web.StreamResponse(status=answer.status_code, headers=kind)
                await _taken(request, response.prepare(request))
                async for part in answer.aiter_bytes():
                    await _taken(request, response.write(part))
        except (TimeoutError, httpx.HTTPError) as error:
            if response is not None:  # it has begun, so that it can only be cut off
                raise ConnectionResetError from error
            why = repr(error) if isinstance(error, httpx.HTTPError) else f"no answer in {gateway.model_deadline:g} s"
            raise RequestError(502, f"the model '{name}' cannot be asked: {why}", code="model_failed") from error
        await _taken(request, response.write_eof())
        return response

    async def _sent(self, request: Any, body: Body, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        response = self._web.Response(body=content, status=status, headers=headers, content_type="application/json")
        await _taken(request, response.prepare(request))
        await _taken(request, response.write_eof())
        return response

    async def _stream(
        self, request: Any, session: Session, dialect: Dialect, task: asyncio.Task[Delivery], texts: AsyncIterator[str]
    ) -> Any:
        """Server-sent events, while the replies are written. What fails before they begin has a status of its own."""
        response = self._web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        delivery = None
        try:
            async for text in texts:
                if not response.prepared:
                    await _taken(request, response.prepare(request))
                await _taken(request, response.write(text.encode()))
            delivery = task.result()
        except Exception as error:
            if isinstance(error, ConnectionError) or not response.prepared:
                raise
            await _taken(request, response.write(dialect.failure(_fault(session, request.path, error)).encode()))
        await _taken(request, response.write_eof())
        if delivery is not None:
            delivery.delivered()
        return response


def _fault(session: Session | None, path: str, error: Exception) -> RequestError:
    """An error as a refusal. One that is no refusal is the gateway's own, after which the episode runs once more."""
    if isinstance(error, RequestError):
        return error
    logger.exception("the gateway failed on %s", path)
    if session is not None:
        session.fault = error
    return RequestError(500, f"the gateway failed: {error!r}")


async def _texts(events: Events, answering: asyncio.Task[Delivery], news: asyncio.Queue[Any]) -> AsyncIterator[str]:
    """A stream's events, joined if they come at the same time, with signs of life between.

    Raises:
        RequestError: there is no answer.
    """
    text, is_over = "", False
    while not is_over:
        try:
            items = [await asyncio.wait_for(news.get(), ALIVE_SECONDS)]
        except TimeoutError:
            yield ": alive\n\n" + text
            text = ""
            continue
        while not news.empty():
            items.append(news.get_nowait())
        is_over = items[-1] is None
        for item in items:
            if isinstance(item, ChatAnswer):
                text += "".join(events.begin(item))
            elif item is not None:
                text += "".join(events.part(item))
            else:
                text += "".join(events.end(answering.result().answer))
        if not isinstance(items[-1], ChatAnswer):  # which may still be refused with a status of its own
            yield text
            text = ""


async def _taken(request: Any, work: Coroutine[Any, Any, Any]) -> None:
    """Send something. A client that does not take it in time is cut off, which cancels its handler."""
    if request.transport is None:
        work.close()
        raise ConnectionResetError
    timer = asyncio.get_running_loop().call_later(TAKE_SECONDS, request.transport.abort)
    try:
        await work
    finally:
        timer.cancel()


async def _body(request: Any) -> bytes:
    """A body, while it arrives in time and in bounds.

    Raises:
        RequestError: it is of another type, too long, or late.
    """
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError(415, "a body is application/json, not compressed", code="unsupported_media_type")
    content, size = bytearray(), request.content_length or 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while size <= MAX_BYTES and (part := await request.content.readany()):
                content += part
                size = max(size, len(content))
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {BODY_SECONDS:g} s", code="timeout") from None
    if size > MAX_BYTES:
        raise RequestError(413, f"a body has at most {MAX_BYTES} bytes", code="request_too_large")
    return bytes(content)


def _parsed(content: bytes) -> Body:
    """Raises RequestError unless this is an object of JSON that is not nested too deeply."""
    body = None
    with suppress(ValueError, RecursionError):
        body = json.loads(content.decode("utf-8-sig"))
    layer: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner = [item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, dict | list)]
        layer = [item for items in inner for item in items]
    if not isinstance(body, dict) or layer:
        raise RequestError(400, f"the body is no object of JSON nested at most {MAX_DEPTH} times", code="invalid_json")
    try:
        if _HALF.search(content):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        refusal = f"the body has a text that is not valid Unicode: {error}"
        raise RequestError(400, refusal, code="invalid_json") from error
    return body

"""One episode behind the gateway: requests become calls of the policy, within the episode's bounds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from verl.errors import ConfigError, DataError, RolloutError
from verl.rollout.base import LongPromptError, Sample, SamplingParams, as_sampling
from verl.rollout.episode import NO_TOP, Client
from verl.rollout.gateway.dialects.base import (
    ChatAnswer,
    ChatRequest,
    LongRequestError,
    Part,
    Reply,
    RequestError,
    Token,
    Usage,
)
from verl.rollout.gateway.forced import asks_form, grammar_of, only_choices
from verl.rollout.gateway.linking import Call, Conversations, Prompt
from verl.rollout.gateway.messages import Message
from verl.rollout.gateway.replies import Tools
from verl.rollout.gateway.streaming import ReplyStream
from verl.rollout.gateway.template import ChatTemplate
from verl.rollout.stop_strings import cut_text

if TYPE_CHECKING:
    from verl.rollout.grammar import Grammar

logger = logging.getLogger(__name__)

#: Characters of a conversation, and bytes of a body, from which on they are worked on in a thread.
LARGE = 65_536
#: In the place of a model's address: the weights that training began with.
START = "start"
#: Takes the answer as it is before its replies begin, then what is new of them.
Tell = Callable[[ChatAnswer | Part], None]
_said: set[str] = set()
T = TypeVar("T")


@dataclass(frozen=True)
class Bounds:
    """Of an episode.

    Attributes:
        calls: replies of the policy.
        tokens: that it samples.
        open: requests at a time.
    """

    calls: int = 512
    tokens: int = 65_536
    open: int = 32


@dataclass(frozen=True)
class Rules:
    """What a gateway says of all its episodes.

    Attributes:
        models: addresses of other models by name, or `START`; None: there is no such model.
        keys: of these, variables of the environment that hold the keys of their servers.
        model_deadline: seconds for an answer of such a server.
        agent_samples: whether requests say how rows are sampled that are greedy, which are never trained.
    """

    bounds: Bounds = Bounds()
    models: Mapping[str, str | None] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    model_deadline: float = 600.0
    agent_samples: bool = False


@dataclass(frozen=True)
class Headers:
    """What a request's headers say.

    Attributes:
        name: of the trajectory.
        excluded: whether it is not to be trained.
        is_retry: whether the client has sent this before.
    """

    name: str = ""
    excluded: bool = False
    is_retry: bool = False


@dataclass
class Delivery:
    """An answer, and the calls that it consists of."""

    answer: ChatAnswer
    calls: list[Call]
    is_delivered: bool = False

    def delivered(self) -> None:
        """The last byte was handed to the agent."""
        self.is_delivered = True
        for call in self.calls:
            call.delivered = True
            call.left_out = "" if call.left_out == "aborted" else call.left_out


class Session:
    """The requests of one episode.

    Args:
        key: that the agent sends with each.
        inputs: of the chat template, besides messages and tools.
        is_policy: whether the policy answers; else the weights that training began with do, sampled as requests say.

    Attributes:
        rules: of its gateway.
        start: the requests that go to the weights that training began with: as they are the policy's, but in no
            trajectory, and within bounds of their own. None: there are no such weights.
        others: how many requests other models have answered, by the name of the model.
        lost: how many requests ended without a sample: "aborted", as their connection closed, or "late".
        truncated: whether a bound, or the model's context, was used up.
        fault: why the gateway itself failed.
        ended: whether the episode is over.
    """

    def __init__(
        self,
        key: str,
        client: Client,
        template: ChatTemplate,
        inputs: Mapping[str, Any] | None = None,
        rules: Rules | None = None,
        *,
        is_policy: bool = True,
    ) -> None:
        self.key, self.rules, self.is_policy = key, rules or Rules(), is_policy
        self.bounds, self.others = self.rules.bounds, Counter[str]()
        self.start: Session | None = None
        if client.start is not None:
            self.start = Session(key, client.start, template, inputs, rules, is_policy=False)
        self.conversations = Conversations(template, inputs)
        self.lost: Counter[str] = Counter()
        self.truncated = False
        self.fault: Exception | None = None
        self.ended = False
        self._client, self._template = client, template
        self._answering: set[asyncio.Task[Any]] = set()
        self._open = self._begun = self._tokens = 0
        self._reserved = 0  # tokens that open requests may sample yet
        self._freed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._sent: dict[bytes, Delivery] = {}

    @property
    def calls(self) -> list[Call]:
        return self.conversations.calls

    @property
    def failure(self) -> Exception | None:
        """Why the gateway itself failed, in these requests or in those to the starting weights."""
        return self.fault or (None if self.start is None else self.start.fault)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A request is answered meanwhile.

        Raises:
            RequestError: the episode is over, or has too many open.
        """
        if self.ended:
            raise ended()
        if self._open >= self.bounds.open:
            raise RequestError(429, f"more than {self.bounds.open} requests are open", code="rate_limit_exceeded")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def end(self) -> None:
        """Answer nothing more."""
        self.ended = True
        for task in self._answering:
            task.cancel()
        if self.start is not None:
            self.start.end()

    def during(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work as a task that ends with the episode.

        Raises:
            RequestError: it has ended, while the body was read.
        """
        if self.ended:
            work.close()
            raise ended()
        task = asyncio.ensure_future(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        return task

    async def answer(self, request: ChatRequest, headers: Headers, body: bytes, tell: Tell | None = None) -> Delivery:
        """Replies of the policy.

        Args:
            tell: called with the answer before any reply begins, and with what is new of replies as they are written.

        Raises:
            RequestError: the request cannot be answered.
        """
        if request.top_log_probs and not self._client.tells_top:
            raise RequestError(400, f"'top_logprobs': {NO_TOP}", "top_logprobs", "unsupported_parameter")
        if self.is_policy:
            self._note_sampling(request.sampling)
        digest = hashlib.blake2b(body, digest_size=16).digest()
        if headers.is_retry:
            self._retried(digest)
        try:
            async with self._lock:
                prompt = await self._prompt(request)
                grammar = await self._grammar(request, prompt)
                await self._others(request)
        except DataError as error:
            raise RequestError(400, str(error), "messages", "invalid_value") from error
        tokens = prompt.tokens
        params = self._params(request, len(tokens))
        self._begun += request.n
        reserved, samples = request.n * params.max_new_tokens, list[Sample]()
        self._reserved += reserved
        ids = [self.conversations.new_id() for _ in range(request.n)]
        streams = self._streams(request, prompt, params, tell)
        if tell is not None:
            empty = tuple(Reply(self._shown_id(id), Message("assistant"), "stop") for id in ids)
            tell(ChatAnswer(request.model, int(time.time()), empty, Usage(len(tokens), prompt.cached)))
        try:
            asked = (self._sample(request, tokens, params, grammar, stream) for stream in streams)
            samples = await asyncio.gather(*asked)
            forced = [await self._forced(grammar, sample.tokens) for sample in samples]
        except asyncio.CancelledError:
            self.lost["late" if self.ended else "aborted"] += 1
            raise
        finally:
            self._reserved -= reserved
            self._tokens += sum(len(sample.tokens) for sample in samples)
            self._freed.set()
        calls = [
            self._call(request, prompt, sample, params, headers, id, stream, only)
            for sample, id, stream, only in zip(samples, ids, streams, forced, strict=True)
        ]
        replies = tuple(self._reply(request, call, params) for call in calls)
        usage = Usage(len(tokens), prompt.cached, sum(len(sample.tokens) for sample in samples))
        delivery = self._sent[digest] = Delivery(ChatAnswer(request.model, int(time.time()), replies, usage), calls)
        return delivery

    async def count(self, request: ChatRequest) -> int:
        """Tokens of a prompt, without a call.

        Raises:
            RequestError: the template refuses it.
        """
        template, inputs = self._template, self.conversations.inputs
        try:
            text = template.write(request.messages, request.tools, inputs, reply=True)
        except DataError as error:
            raise RequestError(400, str(error), "messages", "invalid_value") from error
        return len(template.chat.encode(text))

    def _retried(self, digest: bytes) -> None:
        """What an earlier request of the same body sampled and could not deliver is asked for again."""
        earlier = self._sent.get(digest)
        if earlier is not None and not earlier.is_delivered:
            for call in earlier.calls:
                call.left_out = "retried"

    async def _prompt(self, request: ChatRequest) -> Prompt:
        ask = self.conversations.ask
        if sum(len(message.content) for message in request.messages) < LARGE:
            return ask(request.messages, request.tools)
        return await asyncio.to_thread(ask, request.messages, request.tools)

    async def _grammar(self, request: ChatRequest, prompt: Prompt) -> Grammar | None:
        """What holds the reply to its form. It is made in a thread, as the loop serves all episodes."""
        if not asks_form(request):
            return None
        return await asyncio.to_thread(grammar_of, request, self._template.parse.family, prompt.text)

    async def _forced(self, grammar: Grammar | None, tokens: Sequence[int]) -> list[bool]:
        """Of each token of a reply, whether its grammar left no other one; empty without a grammar."""
        if grammar is None:
            return []
        return await asyncio.to_thread(
            only_choices, grammar, self._template.chat.tokenizer, self._template.ends, tokens
        )

    def _params(self, request: ChatRequest, length: int) -> SamplingParams:
        """How a reply is sampled: as the run says, within what the request and the bounds leave.

        Raises:
            RequestError: nothing is left.
        """
        params, left = self._sampling(request), self._left(request)
        if self._begun + request.n > self.bounds.calls or left < 1:
            self.truncated = True
            raise RequestError(403, f"the episode's bounds are used up ({self.bounds})", code="budget_exceeded")
        limit = self._client.max_length
        if limit is not None and length >= limit:
            self.truncated = True
            raise LongRequestError(length, limit)
        room = left if limit is None else min(left, limit - length)
        most = min(params.max_new_tokens, request.max_tokens or params.max_new_tokens, room)
        stop = (*params.stop, *request.stop)
        if most == params.max_new_tokens and not request.stop:
            return params
        return replace(params, max_new_tokens=most, min_new_tokens=min(params.min_new_tokens, most), stop=stop)

    def _left(self, request: ChatRequest) -> int:
        """Tokens of the episode for each reply to a request."""
        return (self.bounds.tokens - self._tokens - self._reserved) // request.n

    async def _others(self, request: ChatRequest) -> None:
        """Wait for open requests that may use up tokens which this one may want."""
        most = self._client.params.max_new_tokens
        while self._reserved and self._left(request) < min(most, request.max_tokens or most):
            self._freed.clear()
            await self._freed.wait()

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        """The run's; of what is never trained (greedy rows, if that is wanted, and other weights) the agent's.

        Raises:
            RequestError: it cannot be had.
        """
        params, sampling = self._client.params, request.sampling
        wanted = {name: value for name, value in sampling.items() if value or name == "temperature"}
        if self.is_policy and (params.temperature or not self.rules.agent_samples):
            return params
        try:
            return as_sampling(wanted, params)
        except ConfigError as error:
            raise RequestError(400, str(error), min(wanted), "invalid_value") from error

    def _streams(
        self, request: ChatRequest, prompt: Prompt, params: SamplingParams, tell: Tell | None
    ) -> list[ReplyStream | None]:
        """One for each reply that is shown while it is written."""
        if tell is None:
            return [None] * request.n
        tools = _callable_tools(request, prompt)

        def telling(index: int) -> Callable[[str, str], None]:
            return lambda reasoning, content: tell(Part(index, reasoning, content))

        return [ReplyStream(self._template, params, prompt.text, tools, telling(index)) for index in range(request.n)]

    async def _sample(
        self,
        request: ChatRequest,
        tokens: list[int],
        params: SamplingParams,
        grammar: Grammar | None,
        stream: ReplyStream | None,
    ) -> Sample:
        try:
            read = None if stream is None else stream.read
            top = request.top_log_probs
            return await self._client.generate(tokens, params, grammar=grammar, on_tokens=read, top_log_probs=top)
        except LongPromptError as error:
            self.truncated = True
            raise LongRequestError(len(tokens), self._client.max_length or len(tokens)) from error
        except RolloutError as error:
            self.fault = error
            raise RequestError(503, f"the engine failed: {error}", code="engine_failed") from error

    def _call(
        self,
        request: ChatRequest,
        prompt: Prompt,
        sample: Sample,
        params: SamplingParams,
        headers: Headers,
        id: str,
        stream: ReplyStream | None,
        forced: Sequence[bool],
    ) -> Call:
        text = self._template.text(sample.tokens)
        if stream is not None:
            text = stream.finish(sample.tokens)
        elif params.stop:
            text = cut_text(self._template.text, sample.tokens, params)
        left_out = "late" if self.ended else "excluded" if headers.excluded else "aborted"
        reply = self._template.parse(text, prompt.text, _callable_tools(request, prompt))
        if stream is not None:
            stream.tell_rest(reply)
        return self.conversations.answer(prompt, sample, reply, id, name=headers.name, left_out=left_out, forced=forced)

    def _reply(self, request: ChatRequest, call: Call, params: SamplingParams) -> Reply:
        text, tokens = self._template.text, call.sample.tokens
        stopped_by = None
        if params.stop and call.sample.finish == "stop":
            rest = text(tokens)[len(cut_text(text, tokens, params)) :]
            stopped_by = next((stop for stop in request.stop if rest.startswith(stop)), None)
        finish = "length" if call.sample.finish == "length" else "tool_calls" if call.reply.calls else "stop"
        shown = self._tokens_of(call.sample) if request.log_probs else ()
        return Reply(self._shown_id(call.id), call.reply, finish, stopped_by, shown)  # type: ignore[arg-type]

    def _shown_id(self, id: str) -> str:
        """Of a reply; the agent gives rewards by those of the policy's."""
        return id if self.is_policy else f"{START}{id}"

    def _tokens_of(self, sample: Sample) -> tuple[Token, ...]:
        spell = self._template.spelled
        tokens = [Token(spell([token]), p) for token, p in zip(sample.tokens, sample.log_probs, strict=True)]
        for index, top in enumerate(sample.top_log_probs):
            tokens[index] = tokens[index]._replace(top=tuple((spell([token]), p) for token, p in top))
        return tuple(tokens)

    @staticmethod
    def _note_sampling(fields: Mapping[str, Any]) -> None:
        for name in sorted(fields.keys() - _said):
            _said.add(name)
            logger.info("requests of the agent set %s; in training the run's own sampling holds", name)


def _callable_tools(request: ChatRequest, prompt: Prompt) -> Tools:
    return prompt.tools if request.choice != "none" else ()


def ended() -> RequestError:
    """The answer to a key whose episode is over."""
    return RequestError(403, "the episode of this key has ended", code="episode_ended")

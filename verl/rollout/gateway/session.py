"""One episode behind the gateway: requests become calls of the policy, within the episode's bounds."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from verl.data.text import spelled
from verl.errors import ConfigError, DataError, RolloutError
from verl.rollout.base import LongPromptError, Sample, SamplingParams, as_sampling
from verl.rollout.episode import NO_TOP, Client
from verl.rollout.gateway.dialects import base
from verl.rollout.gateway.dialects.base import ChatAnswer, ChatRequest, Reply, RequestError
from verl.rollout.gateway.forced import constrains_reply, grammar_of, only_choices
from verl.rollout.gateway.linking import Call, Conversations, Prompt
from verl.rollout.gateway.messages import Message, Tools, without_begun
from verl.rollout.gateway.template import ChatTemplate
from verl.rollout.stop_strings import StopWatch

if TYPE_CHECKING:
    from verl.rollout.gateway.gateway import Gateway
    from verl.rollout.grammar import Grammar

logger = logging.getLogger(__name__)

#: Characters of a conversation, and bytes of a body, from which on they are worked on in a thread.
LARGE = 65_536
#: Stands for a model's address: the weights that training began with.
START = "start"
#: Requests of an episode at a time.
MAX_OPEN = 32
#: Takes the answer as it is before its replies begin, then their deltas.
Send = Callable[[ChatAnswer | base.Part], None]
#: The answer to a key whose episode is over.
ended = partial(RequestError, 403, "the episode of this key has ended", code="episode_ended")
_logged: set[str] = set()
T = TypeVar("T")


@dataclass
class Delivery:
    """An answer, and the calls that it consists of."""

    answer: ChatAnswer
    calls: list[Call]

    def delivered(self) -> None:
        """The last byte was handed to the agent."""
        for call in self.calls:
            call.delivered = True
            call.excluded = "" if call.excluded == "aborted" else call.excluded


class Session:
    """The requests of one episode.

    Args:
        inputs: of the chat template, besides messages and tools.
        gateway: whose bounds and models hold.

    Attributes:
        key: that the agent sends with each; "" before the session is admitted.
        is_policy: whether the policy answers; else the weights that training began with do, sampled as requests say.
        start: answers from the weights that training began with, in no trajectory, and within bounds of its own. None:
            there are no such weights.
        others: requests that other models answered, by the name of the model.
        lost: requests that ended without a sample: "aborted", as their connection closed, or "late".
        truncated: whether a bound, or the model's context, was used up.
        fault: why the gateway itself failed.
        ended: whether the episode is over.
        room: for requests at a time.
    """

    def __init__(self, client: Client, template: ChatTemplate, inputs: Mapping[str, Any], gateway: Gateway) -> None:
        self.key, self.gateway, self.is_policy = "", gateway, True
        self.others: Counter[str] = Counter()
        self.start: Session | None = None
        if client.start is not None:
            self.start = Session(client.start, template, inputs, gateway)
            self.start.is_policy = False
        self.conversations = Conversations(template, inputs)
        self.calls = self.conversations.calls
        self.lost: Counter[str] = Counter()
        self.truncated = self.ended = False
        self.fault: Exception | None = None
        self._client, self._template = client, template
        self._answering: set[asyncio.Task[Any]] = set()
        self.room = asyncio.Semaphore(MAX_OPEN)
        self._begun = self._tokens = 0
        self._reserved = 0  # tokens that open requests may sample yet
        self._freed = asyncio.Event()
        self._lock = asyncio.Lock()
        self._sent: dict[bytes, Delivery] = {}

    @property
    def failure(self) -> Exception | None:
        """Why the gateway itself failed, in these requests or in those to the starting weights."""
        return self.fault or (None if self.start is None else self.start.fault)

    def end(self) -> None:
        """Answer nothing more."""
        self.ended = True
        for task in self._answering:
            task.cancel()
        if self.start is not None:
            self.start.end()

    @contextmanager
    def during(self, work: Coroutine[Any, Any, T]) -> Iterator[asyncio.Task[T]]:
        """Work as a task that ends with the episode, or with the request where the client goes away.

        Raises:
            RequestError: the episode has ended, while the body was read.
        """
        if self.ended:
            work.close()
            raise ended()
        task = asyncio.ensure_future(work)
        self._answering.add(task)
        try:
            yield task
        finally:
            task.cancel()
            self._answering.discard(task)

    async def answer(
        self, request: ChatRequest, headers: Mapping[str, str], body: bytes, send: Send | None = None
    ) -> Delivery:
        """Replies of the policy.

        Args:
            send: called with the answer before any reply begins, and with deltas while they are sampled.

        Raises:
            RequestError: the request cannot be answered.
        """
        if request.top_log_probs and not self._client.tells_top:
            raise RequestError(400, f"'top_logprobs': {NO_TOP}", "top_logprobs", "unsupported_parameter")
        if self.is_policy and (names := sorted(request.sampling.keys() - _logged)):
            _logged.update(names)
            logger.info("requests of the agent set %s; in training the run's own sampling holds", ", ".join(names))
        digest = hashlib.blake2b(body, digest_size=16).digest()
        earlier, retries = self._sent.get(digest), headers.get("x-stainless-retry-count", "0")
        if retries.isdigit() and int(retries) and earlier is not None and not earlier.calls[0].delivered:
            for call in earlier.calls:  # sampled but never delivered: only what is sampled now is trained
                call.excluded = "retried"
        replies = await self._pending(request)
        count = len(replies[0].tokens)
        cached = count - len(replies[0].prompt.read)  # which an earlier call had
        reserved, samples = request.n * replies[0].params.max_new_tokens, list[Sample]()
        self._reserved += reserved
        if send is not None:
            empty = tuple(Reply(reply.shown_id, Message("assistant"), "stop") for reply in replies)
            send(ChatAnswer(int(time.time()), empty, count, cached))
            for index, reply in enumerate(replies):
                show = lambda *parts, index=index: send(base.Part(index, *parts))  # noqa: E731
                reply.stream = ReplyStream(self._template, reply.params, reply.prompt.text, reply.tools, show)
        try:
            samples = await asyncio.gather(*(reply.sample() for reply in replies))
        except asyncio.CancelledError:
            self.lost["late" if self.ended else "aborted"] += 1
            raise
        finally:
            self._reserved -= reserved
            self._tokens += sum(len(sample.tokens) for sample in samples)
            self._freed.set()
        # Only now, so that calls are in the order of their ids.
        calls = [reply.call(sample, headers) for reply, sample in zip(replies, samples, strict=True)]
        shown = tuple(reply.shown(call) for reply, call in zip(replies, calls, strict=True))
        answer = ChatAnswer(int(time.time()), shown, count, cached, sum(len(sample.tokens) for sample in samples))
        delivery = self._sent[digest] = Delivery(answer, calls)
        return delivery

    async def count(self, request: ChatRequest) -> int:
        """Tokens of a prompt, without a call.

        Raises:
            RequestError: the template refuses it.
        """
        try:
            text = self._template.write(request.messages, request.tools, self.conversations.inputs, reply=True)
        except DataError as error:
            raise base.invalid("messages", str(error)) from error
        return len(self._template.chat.encode(text))

    async def _pending(self, request: ChatRequest) -> list[_PendingReply]:
        """The replies to a request, before they are sampled.

        Raises:
            RequestError: the template or the grammar refuses it, or the bounds are used up.
        """
        make_prompt, grammar = partial(self.conversations.prompt, request.messages, request.tools), None
        is_large = sum(len(message.content) for message in request.messages) >= LARGE
        try:
            async with self._lock:
                prompt = await asyncio.to_thread(make_prompt) if is_large else make_prompt()
                if constrains_reply(request):  # compiled in a thread, as the loop serves all episodes
                    grammar = await asyncio.to_thread(grammar_of, request, self._template.parse.family, prompt.text)
                most = self._client.params.max_new_tokens
                # Open requests may not use all that they have reserved.
                while self._reserved and self._left(request) < min(most, request.max_tokens or most):
                    self._freed.clear()
                    await self._freed.wait()
        except DataError as error:
            raise base.invalid("messages", str(error)) from error
        tokens = prompt.tokens
        params = self._params(request, len(tokens))
        self._begun += request.n
        ids = [next(self.conversations.ids) for _ in range(request.n)]
        return [_PendingReply(self, request, prompt, tokens, params, grammar, id) for id in ids]

    def _params(self, request: ChatRequest, length: int) -> SamplingParams:
        """How a reply is sampled: as the run says, within what the request and the bounds leave.

        Raises:
            RequestError: nothing is left, or the agent's sampling is invalid.
        """
        params, left, limit = self._client.params, self._left(request), self._client.max_length
        # What is never trained (greedy rows, if that is wanted, and other weights) is sampled as the agent says.
        if not self.is_policy or (self.gateway.agent_samples and not params.temperature):
            wanted = {name: value for name, value in request.sampling.items() if value or name == "temperature"}
            try:
                params = as_sampling(wanted, params)
            except ConfigError as error:
                raise base.invalid(min(wanted), str(error)) from error
        if self._begun + request.n > self.gateway.max_calls or left < 1:
            self.truncated = True
            bounds = f"max_calls={self.gateway.max_calls}, max_tokens={self.gateway.max_tokens}"
            raise RequestError(403, f"the episode's bounds are used up ({bounds})", code="budget_exceeded")
        if limit is not None and length >= limit:
            self.truncated = True
            raise base.LongRequestError(length, limit)
        room = left if limit is None else min(left, limit - length)
        most = min(params.max_new_tokens, request.max_tokens or params.max_new_tokens, room)
        if most == params.max_new_tokens and not request.stop:
            return params
        least, stop = min(params.min_new_tokens, most), (*params.stop, *request.stop)
        return replace(params, max_new_tokens=most, min_new_tokens=least, stop=stop)

    def _left(self, request: ChatRequest) -> int:
        """Tokens of the episode for each reply to a request."""
        return (self.gateway.max_tokens - self._tokens - self._reserved) // request.n


@dataclass
class ReplyStream:
    """A reply while it is sampled: whatever no later token can change is shown at once.

    Attributes:
        prompt: the rendered chat before it.
        tools: those that it may call.
        send: called with the deltas of its thought and of its text.
    """

    template: ChatTemplate
    params: SamplingParams
    prompt: str
    tools: Tools
    send: Callable[[str, str], None]

    def __post_init__(self) -> None:
        self._watch = StopWatch(self.template.text, self.params.stop, self.params.min_new_tokens)
        self._count, self._shown = 0, ("", "")

    def read(self, tokens: Sequence[int]) -> None:
        """Take the tokens so far, and show whatever no later token can change."""
        if len(tokens) > self._count:
            self._advance(tokens)
            text = without_begun(self._watch.text, self.params.stop)
            self.show(*self.template.parse.settled(text, self.prompt, self.tools))

    def finish(self, tokens: Sequence[int]) -> str:
        """The text of the finished reply, up to the stop string that ended it."""
        self._advance(tokens)
        self._watch.saw_stop(tokens, final=True)
        return self._watch.text

    def _advance(self, tokens: Sequence[int]) -> None:
        """Each token by itself, as the engine looks for stop strings."""
        for count in range(self._count + 1, len(tokens) + 1):
            self._watch.saw_stop(tokens[:count])
        self._count = len(tokens)

    def show(self, *parts: str) -> None:
        """Send what is new of the thought and of the text."""
        new = [part[len(shown) :] for part, shown in zip(parts, self._shown, strict=True)]
        if any(new):
            self._shown = (self._shown[0] + new[0], self._shown[1] + new[1])
            self.send(*new)


@dataclass
class _PendingReply:
    """One reply to a request, until it is a call.

    Attributes:
        tokens: of the prompt.
        forced: see `Call`.
    """

    session: Session
    request: ChatRequest
    prompt: Prompt
    tokens: list[int]
    params: SamplingParams
    grammar: Grammar | None
    id: str
    stream: ReplyStream | None = None
    forced: Sequence[bool] = ()

    def __post_init__(self) -> None:
        self.client, self.template = self.session._client, self.session._template
        self.tools: Tools = self.prompt.tools if self.request.choice != "none" else ()
        #: Agents give rewards by the ids of the policy's replies.
        self.shown_id = self.id if self.session.is_policy else f"{START}{self.id}"

    async def sample(self) -> Sample:
        read, top = None if self.stream is None else self.stream.read, self.request.top_log_probs
        options: Any = {"grammar": self.grammar, "on_tokens": read, "top_log_probs": top}
        try:
            sample = await self.client.generate(self.tokens, self.params, **options)
        except LongPromptError as error:
            self.session.truncated = True
            count = len(self.tokens)
            raise base.LongRequestError(count, self.client.max_length or count) from error
        except RolloutError as error:
            self.session.fault = error
            raise RequestError(503, f"the engine failed: {error}", code="engine_failed") from error
        if self.grammar is not None:
            tokenizer, ends = self.template.chat.tokenizer, self.template.ends
            self.forced = await asyncio.to_thread(only_choices, self.grammar, tokenizer, ends, sample.tokens)
        return sample

    def call(self, sample: Sample, headers: Mapping[str, str]) -> Call:
        text = self.template.text(sample.tokens) if sample.text is None else sample.text
        if self.stream is not None:
            text = self.stream.finish(sample.tokens)
        reply = self.template.parse(text, self.prompt.text, self.tools)
        if self.stream is not None:
            self.stream.show(reply.reasoning, reply.content)
        # A call counts as aborted until its answer has been delivered.
        excluded = "late" if self.session.ended else "excluded" if headers.get("X-Verl-Train") == "0" else "aborted"
        options: Any = {"name": headers.get("X-Verl-Name", ""), "excluded": excluded, "forced": self.forced}
        return self.session.conversations.answer(self.prompt, sample, reply, self.id, **options)

    def shown(self, call: Call) -> Reply:
        """The reply as its request is answered."""
        sample, written = call.sample, partial(spelled, self.template.chat.tokenizer)
        stopped_by, tokens = None, list[base.Token]()
        if sample.text is not None and sample.finish == "stop":
            rest = self.template.text(sample.tokens)[len(sample.text) :]
            stopped_by = next((stop for stop in self.request.stop if rest.startswith(stop)), None)
        if self.request.log_probs:
            tops = sample.top_log_probs or [[]] * len(sample.tokens)
            for token, log_prob, top in zip(sample.tokens, sample.log_probs, tops, strict=True):
                tokens.append(base.Token(written([token]), log_prob, tuple((written([t]), p) for t, p in top)))
        finish: Any = "length" if sample.finish == "length" else "tool_calls" if call.reply.calls else "stop"
        return Reply(self.shown_id, call.reply, finish, stopped_by, tuple(tokens))

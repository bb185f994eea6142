"""Calls of one episode, each of which may continue an earlier one, and the trajectories that they make.

Clients send the whole conversation with each call. A call continues an earlier one if its messages begin with that
one's messages and its reply, see `Message.key`; all earlier calls are looked at, the longest match first. Its prompt is
then the earlier tokens, the sampled tokens, and what the template writes behind them: no token is encoded again. A
thought that the client left out is put back. A call that continues none (its messages are others, or the template
writes an earlier part otherwise than before, such as one that drops thoughts) begins a trajectory.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from verl.rollout.base import Sample
from verl.rollout.gateway.messages import Message, longer, prefix_digests
from verl.rollout.gateway.replies import Tools
from verl.rollout.gateway.template import ChatTemplate
from verl.rollout.gateway.tokens import Piece, PieceReader
from verl.rollout.turns import Turns


@dataclass(eq=False)
class Prompt:
    """What a call asks for, and where it stands.

    Attributes:
        messages: of the conversation, thoughts put back.
        text: what the template writes for it.
        parent: the call that it continues.
        read: tokens behind those of the parent; all of them, if there is none.
        digest: of the messages, see `prefix_digests`.
    """

    messages: tuple[Message, ...]
    tools: Tools
    text: str
    parent: Call | None
    read: list[int]
    digest: int

    @property
    def tokens(self) -> list[int]:
        """Of the whole prompt."""
        tokens: list[int] = []
        for call in lineage(self.parent):
            tokens += call.prompt.read
            tokens += call.sample.tokens
        return tokens + self.read

    @property
    def cached(self) -> int:
        """How many of its tokens an earlier call had already."""
        return sum(len(call.prompt.read) + len(call.sample.tokens) for call in lineage(self.parent))


@dataclass(eq=False)
class Call:
    """A reply of the policy.

    Attributes:
        id: by which a client names it.
        delivered: whether its last byte was handed to the agent.
        left_out: why it is not trained; "" if it is.
        name: of its trajectory, as the agent chose it.
        forced: of each token, whether a grammar left no other one, so that it is not trained; empty: of none.
        behind: what was read behind it, see `PieceReader`.
    """

    id: str
    prompt: Prompt
    sample: Sample
    reply: Message
    name: str = ""
    delivered: bool = False
    left_out: str = ""
    is_continued: bool = False
    forced: Sequence[bool] = ()
    behind: Piece = field(default_factory=Piece)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The conversation with the reply."""
        return (*self.prompt.messages, self.reply)


def lineage(call: Call | None) -> list[Call]:
    """A call behind those that it continues, the first one first."""
    calls = []
    while call is not None:
        calls.append(call)
        call = call.prompt.parent
    return calls[::-1]


class Conversations:
    """The calls of one episode.

    Args:
        inputs: what the template reads besides messages and tools, the same for all calls.

    Attributes:
        calls: those that were answered, in order.
    """

    def __init__(self, template: ChatTemplate, inputs: Mapping[str, Any] | None = None) -> None:
        self.template, self.inputs = template, dict(inputs or {})
        self.calls: list[Call] = []
        self._numbers = itertools.count()
        self.reader = PieceReader(template.chat)
        self._begin = Piece()
        self._known: dict[Message, Message] = {}
        self._by_messages: defaultdict[int, list[Call]] = defaultdict(list)

    def ask(self, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """The prompt of a call.

        Raises:
            DataError: the template refuses the messages.
        """
        # What is known of a message, and its text's hash, is kept for all calls in which it stands.
        messages = [self._known.setdefault(message, message) for message in messages]
        first: tuple[tuple[Message, ...], str] | None = None
        digests = [*prefix_digests(messages)]
        for call in self._candidates(messages, digests):
            whole = (*call.messages, *messages[len(call.messages) :])
            text = first[1] if first is not None and first[0] == whole else self._write(whole, tools)
            first = first or (whole, text)
            last = call.sample.tokens[-1:]
            behind = self.template.behind(text, call.prompt.text, call.reply, bool(call.prompt.tools), last)
            if behind is not None:
                call.is_continued = True
                read = self.reader.read(call.behind, last, behind)
                return Prompt(whole, tools, text, call, read, digests[-1])
        # Where the template would show thoughts, they are put back all the same.
        whole, text = first or (tuple(messages), self._write(messages, tools))
        return Prompt(whole, tools, text, None, self.reader.read(self._begin, [], text), digests[-1])

    def new_id(self) -> str:
        """Of a call that will be answered."""
        return f"{next(self._numbers):06d}"

    def answer(self, prompt: Prompt, sample: Sample, reply: Message, id: str | None = None, **options: Any) -> Call:
        """Add what was sampled, which is this message.

        Args:
            id: of `new_id`.
            **options: of `Call`.
        """
        id = id or self.new_id()
        # Nine letters or digits: Mistral's templates take no other ids.
        named = [replace(call, id=f"call{int(id):03d}{index:02d}") for index, call in enumerate(reply.calls)]
        call = Call(id, prompt, sample, replace(reply, calls=tuple(named)), **options)
        self.calls.append(call)
        self._by_messages[longer(prompt.digest, call.reply)].append(call)
        return call

    def _write(self, messages: Sequence[Message], tools: Tools) -> str:
        return self.template.write(messages, tools, self.inputs, reply=True)

    def _candidates(self, messages: Sequence[Message], digests: Sequence[int]) -> Iterator[Call]:
        """Calls whose messages and reply these begin with, the longest first. Of equal ones, first those that were
        delivered and that nothing continues yet, then the earliest."""
        for digest in digests[:0:-1]:
            equal = [call for call in self._by_messages.get(digest, ()) if _is_begun(call.messages, messages)]
            yield from sorted(equal, key=lambda call: (not call.delivered, call.is_continued))


def _is_begun(before: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether a conversation is the beginning of one of equal hash; a message may leave out its thought."""
    pairs = zip(before, messages, strict=False)
    return all(earlier.key == later.key and later.has_thought(earlier.reasoning) for earlier, later in pairs)


@dataclass
class Trajectory(Turns):
    """One conversation of an episode as one response to a prompt of its own.

    Attributes:
        prompt_tokens: what stands before the first token that is trained here. Of a fork, that is all of the calls that
            another trajectory trains.
        calls: those whose tokens are trained here.
        parent: the trajectory that this one forks from, and how many of the tokens, prompt and response, they share.
    """

    prompt_tokens: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    parent: tuple[int, int] | None = None


def trajectories(calls: Sequence[Call], rewards: Mapping[str, float] = MappingProxyType({})) -> list[Trajectory]:
    """The trajectories of an episode's calls. Each call that is not left out is trained in exactly one.

    Of the calls that continue one, the first goes on in its trajectory, and each other begins a trajectory of its own,
    a fork. A call that is left out, and that nothing goes on from that is not, is in none.

    Args:
        rewards: of single calls, by their ids.
    """
    kept = {id(each) for call in calls if not call.left_out for each in lineage(call)}
    position: dict[int, int] = {}  # of each call, its trajectory
    lines: list[list[Call]] = []
    forks: list[Call | None] = []
    for call in calls:
        if id(call) in kept:
            parent = call.prompt.parent
            index = position[id(parent)] if parent is not None else -1
            if parent is None or lines[index][-1] is not parent:
                index = len(lines)
                lines.append([])
                forks.append(parent)
            position[id(call)] = index
            lines[index].append(call)
    return [
        _trajectory(line, None if fork is None else (position[id(fork)], fork), rewards)
        for line, fork in zip(lines, forks, strict=True)
    ]


def _trajectory(line: Sequence[Call], fork: tuple[int, Call] | None, rewards: Mapping[str, float]) -> Trajectory:
    first = next(index for index, call in enumerate(line) if not call.left_out)
    trained = [call for call in line if not call.left_out]
    whole = Trajectory(prompt_tokens=line[first].prompt.tokens, calls=trained)
    whole.name = next((call.name for call in trained if call.name), "")
    whole.messages = [message.for_template("reasoning") for message in trained[-1].messages]
    if fork is not None:
        whole.parent = (fork[0], len(fork[1].prompt.tokens) + len(fork[1].sample.tokens))
    for call in line[first:]:
        if call is not line[first]:
            whole.read(call.prompt.read)
        if call.left_out:
            whole.read(call.sample.tokens)
        else:
            whole.wrote(call.sample, rewards.get(call.id), call.forced)
    return whole

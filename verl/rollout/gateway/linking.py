"""Calls of one episode, each of which may continue an earlier one, and the trajectories that they make.

Clients send the whole conversation with each call. A call continues an earlier one if its messages begin with that
one's messages and its reply, see `Message.key`; all earlier calls are looked at, the longest match first. Its prompt is
then the earlier tokens, the sampled tokens, and the template's text after them: no token is encoded again. A
thought that the client left out is put back. A call that continues none (its messages are others, or the template
writes an earlier part otherwise than before, such as one that drops thoughts) begins a trajectory.

Each character of an episode is tokenised once. Texts that may follow the same tokens (prompts that begin an episode's
conversations; what the template writes behind a reply) share their beginnings, up to the last special token that they
have in common: such a token never merges with others, so that the text before it has the same tokens whatever follows.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

from verl.data.chat import ChatTokenizer
from verl.data.tokenize import encode_behind
from verl.rollout.base import Sample
from verl.rollout.gateway.messages import Message, Tools, longer
from verl.rollout.gateway.template import ChatTemplate
from verl.rollout.turns import Turns


@dataclass
class Piece:
    """A text up to a special token, its tokens, and the pieces that were read behind it."""

    tokens: list[int] = field(default_factory=list)
    behind: dict[str, Piece] = field(default_factory=dict)


class PieceReader:
    """Tokenises texts.

    Attributes:
        characters: how many were tokenised so far.
    """

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        names = sorted(filter(None, chat.added.values()), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.characters = 0

    def read(self, start: Piece, before: Sequence[int], text: str) -> list[int]:
        """Tokens of a text after `start`; `before` is the last token before it, or none.

        It is cut after its special tokens, and each piece is looked up in the tree of those read before.
        """
        cuts = [0, *(match.end() for match in self._special.finditer(text)), len(text)]
        pieces = [text[begin:end] for begin, end in pairwise(cuts) if end > begin]
        tokens, piece_before, known = list[int](), start, 0
        while known < len(pieces) and pieces[known] in piece_before.behind:
            piece_before = piece_before.behind[pieces[known]]
            tokens += piece_before.tokens
            known += 1
        rest = "".join(pieces[known:])
        if rest in piece_before.behind:
            tokens += piece_before.behind[rest].tokens
        elif rest:
            self.characters += len(rest)
            new = encode_behind(self._chat, (tokens or list(before))[-1:], rest)
            tokens += new
            for piece, part in self._parts(pieces[known:], new):
                piece_before = piece_before.behind.setdefault(piece, Piece(part))
        return tokens

    def _parts(self, pieces: list[str], tokens: list[int]) -> list[tuple[str, list[int]]]:
        """Each piece with its tokens; one piece, if the tokenizer splits the text in another way."""
        ends = [position + 1 for position, token in enumerate(tokens) if token in self._chat.added]
        if not ends or ends[-1] < len(tokens):
            ends.append(len(tokens))
        if len(ends) != len(pieces):
            return [("".join(pieces), tokens)]
        return [(piece, tokens[begin:end]) for piece, begin, end in zip(pieces, [0, *ends[:-1]], ends, strict=True)]


@dataclass(eq=False)
class Prompt:
    """The prompt of a call.

    Attributes:
        messages: of the conversation, thoughts put back.
        text: the rendered chat.
        parent: the call that it continues.
        read: tokens after the parent's; without a parent, all.
        digest: of the messages, see `longer`.
    """

    messages: tuple[Message, ...]
    tools: Tools
    text: str
    parent: Call | None
    read: list[int]
    digest: int

    @property
    def tokens(self) -> list[int]:
        """The whole prompt."""
        tokens: list[int] = []
        for call in lineage(self.parent):
            tokens += call.prompt.read
            tokens += call.sample.tokens
        return tokens + self.read


@dataclass(eq=False)
class Call:
    """A reply of the policy.

    Attributes:
        id: by which a client names it.
        delivered: whether its last byte was handed to the agent.
        excluded: why it is not trained; "" if it is.
        name: of its trajectory, as the agent chose it.
        forced: for each token, whether a grammar allowed no other, so that it is not trained; empty: for none.
        behind: the texts that follow it, see `PieceReader`.
    """

    id: str
    prompt: Prompt
    sample: Sample
    reply: Message
    name: str = ""
    delivered: bool = False
    excluded: str = ""
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

    def __init__(self, template: ChatTemplate, inputs: Mapping[str, Any]) -> None:
        self.template, self.inputs = template, inputs
        self.calls: list[Call] = []
        #: Of calls that will be answered.
        self.ids: Iterator[str] = map("{:06d}".format, itertools.count())
        self.reader = PieceReader(template.chat)
        self._begin = Piece()
        self._known: dict[Message, Message] = {}
        self._by_messages: defaultdict[int, list[Call]] = defaultdict(list)

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Prompt:
        """The prompt of a call.

        Raises:
            DataError: the template refuses the messages.
        """
        # Equal messages are one object, which keeps its key and its form for the template.
        messages = [self._known.setdefault(message, message) for message in messages]
        first: tuple[Message, ...] = ()
        digests = [*accumulate(messages, longer, initial=0)]  # of each prefix, the empty one first
        write = cache(partial(self.template.write, tools=tools, inputs=self.inputs, reply=True))
        for call in self._candidates(messages, digests):
            whole = (*call.messages, *messages[len(call.messages) :])
            first, text = first or whole, write(whole)
            last = call.sample.tokens[-1:]
            behind = self.template.behind(text, call.prompt.text, call.reply, bool(call.prompt.tools), last)
            if behind is not None:
                call.is_continued = True
                return Prompt(whole, tools, text, call, self.reader.read(call.behind, last, behind), digests[-1])
        # Where the template would show thoughts, they are put back all the same.
        whole = first or tuple(messages)
        text = write(whole)
        return Prompt(whole, tools, text, None, self.reader.read(self._begin, [], text), digests[-1])

    def answer(self, prompt: Prompt, sample: Sample, reply: Message, id: str, **options: Any) -> Call:
        """Add a sample, and the message in it.

        Args:
            id: of `ids`.
            **options: of `Call`.
        """
        # Nine letters or digits: Mistral's templates take no other ids.
        named = [replace(call, id=f"call{int(id):03d}{index:02d}") for index, call in enumerate(reply.calls)]
        call = Call(id, prompt, sample, replace(reply, calls=tuple(named)), **options)
        self.calls.append(call)
        self._by_messages[longer(prompt.digest, call.reply)].append(call)
        return call

    def _candidates(self, messages: Sequence[Message], digests: Sequence[int]) -> Iterator[Call]:
        """Calls whose messages and reply these begin with, the longest first. Of equal ones, first those that were
        delivered and that nothing continues yet, then the earliest."""
        for digest in digests[:0:-1]:
            equal = [
                call
                for call in self._by_messages.get(digest, ())
                # Clients send thoughts back, or not.
                if all(
                    one.key == later.key and later.reasoning.strip() in ("", one.reasoning.strip())
                    for one, later in zip(call.messages, messages, strict=False)
                )
            ]
            yield from sorted(equal, key=lambda call: (not call.delivered, call.is_continued))


@dataclass
class Trajectory(Turns):
    """One conversation of an episode as one response to a prompt of its own.

    Attributes:
        prompt_tokens: everything before the first token that is trained here; in a fork, with the calls that another
            trajectory trains.
        calls: those whose tokens are trained here.
        parent: the trajectory that this one forks from, and how many of the tokens, prompt and response, they share.
    """

    prompt_tokens: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    parent: tuple[int, int] | None = None


def trajectories(calls: Sequence[Call], rewards: Mapping[str, float] = MappingProxyType({})) -> list[Trajectory]:
    """The trajectories of an episode's calls. Each call that is not left out is trained in exactly one.

    The first call that continues another goes on in its trajectory; each further one begins a trajectory of its own, a
    fork. A call that is left out is in none, unless a trained call continues it.

    Args:
        rewards: of single calls, by their ids.
    """
    kept = {id(each) for call in calls if not call.excluded for each in lineage(call)}
    position: dict[int, int] = {}  # of each call, its trajectory
    result: list[Trajectory] = []
    latest: list[Call] = []  # of each trajectory, trained or not
    for call in (call for call in calls if id(call) in kept):
        parent = call.prompt.parent
        index = position[id(parent)] if parent is not None else -1
        if parent is None or latest[index] is not parent:
            result.append(Trajectory())
            latest.append(call)
            if parent is not None:
                result[-1].parent = (index, len(parent.prompt.tokens) + len(parent.sample.tokens))
            index = len(result) - 1
        position[id(call)], latest[index], whole = index, call, result[index]
        if whole.calls:
            whole.read(call.prompt.read)
        elif not call.excluded:
            whole.prompt_tokens = call.prompt.tokens  # with the calls before, which are not trained here
        if not call.excluded:
            whole.calls.append(call)
            whole.wrote(call.sample, rewards.get(call.id), call.forced)
        elif whole.calls:
            whole.read(call.sample.tokens)
    for whole in result:
        whole.name = next((call.name for call in whole.calls if call.name), "")
        said = whole.calls[-1].messages
        whole.messages = [{**one.shown, "reasoning": one.reasoning} if one.reasoning else one.shown for one in said]
    return result

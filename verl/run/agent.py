"""What would be trained of an agent or an environment: a few of its episodes, against the policy as it is."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from verl._host.user_functions import load_function
from verl.batch import Batch
from verl.errors import ConfigError
from verl.report.completions import spans
from verl.roles.actor import Actor
from verl.rollout.environments import as_episode
from verl.rollout.episode import Client
from verl.rollout.gateway.gateway import EpisodeRecord, Gateway
from verl.rollout.gateway.linking import Call
from verl.rollout.gateway.messages import Message
from verl.rollout.turns import Turns

#: Characters of a message in a warning.
_SHOWN = 60
_OF_TITLES = re.compile(r"\b(titles?|summar(y|ies|i[sz]e[ds]?|i[sz]ing)|compact(ed|ion)?)\b", re.IGNORECASE)
_LEAVE_OUT = (
    "To leave it out, send it with the header X-Verl-Train: 0; or with X-Verl-Name: title, and give "
    "Gateway(train=lambda call: call.name != 'title')"
)


@dataclass
class CheckedEpisode:
    """An episode as it would be trained.

    Attributes:
        row: its id.
        conversations: of each, its parts in order: `text`, and whether it is `trained`.
        reward: what the agent or the environment says; None: nothing.
        left_out: why the whole episode would be; None: it would not.
        calls, calls_left_out: of an agent: how many were answered, and how many of these are not trained, by reason.
        other_calls: how many requests other models answered, by name.
        warnings: what somebody should look at.
        trained: whether any token would be.
    """

    row: str
    conversations: list[list[dict[str, Any]]] = field(default_factory=list)
    reward: float | None = None
    left_out: str | None = None
    calls: int | None = None
    calls_left_out: dict[str, int] = field(default_factory=dict)
    other_calls: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    trained: bool = False


def episode_of(spec: str, chat_template: str | None) -> Any:
    """The episode that a script is: FILE.py, a program of its own; FILE.py:NAME, an agent's function, a `Gateway`, a
    class of environments, or any episode.

    Raises:
        ConfigError: there is no such file or name; or a template is set for an episode that has its own.
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        if spec.endswith(".py") and not Path(spec).is_file():
            raise ConfigError(f"{spec} does not exist: give a script, FILE.py:NAME, or a command")
        return Gateway([sys.executable, spec] if spec.endswith(".py") else spec, chat_template=chat_template)
    source = load_function(spec)
    if inspect.isroutine(source) and "base_url" in inspect.signature(source).parameters:
        return Gateway(source, chat_template=chat_template)
    episode = as_episode(source)
    if chat_template is not None:
        if not hasattr(episode, "chat_template"):
            raise ConfigError(f"{name} has no chat template that another one could replace: leave --chat-template out")
        episode.chat_template = chat_template
    return episode


def check_agent(episode: Any, model: str, rows: Sequence[Mapping[str, Any]], **sampling: Any) -> list[CheckedEpisode]:
    """One episode a row, in the order of the rows; nothing is trained.

    Args:
        sampling: fields of `SamplingParams`.

    Raises:
        ConfigError: the chat template does not show what the agent needs.
    """
    watch = _Watch(episode)
    actor = Actor(model, episode=watch, sampling=sampling)
    samples = actor.generate_sequences(list(rows))
    decode = actor.tokenizer.decode
    return [watch.checked(samples.take([row]), decode) for row in range(len(samples))]


class _Watch:
    """An episode that keeps what was said in another one."""

    def __init__(self, episode: Any) -> None:
        self._episode = episode
        self.schemas = getattr(episode, "schemas", ())
        self.deadline = getattr(episode, "deadline", 600.0)
        self.asks_start = getattr(episode, "asks_start", False)
        self.check_tokenizer = getattr(episode, "check_tokenizer", None)
        self._records: dict[str, EpisodeRecord] = {}
        self._turns: dict[str, list[Turns]] = {}

    async def __call__(self, client: Client, row: Mapping[str, Any]) -> list[Turns]:
        if isinstance(self._episode, Gateway):
            self._records[row["id"]] = await self._episode.run(client, row)
        else:
            self._turns[row["id"]] = list(await self._episode(client, row))
        return [Turns()]

    def checked(self, sample: Batch, decode: Any) -> CheckedEpisode:
        ((row_id, error),) = zip(sample["id"], sample["episode_error"], strict=True)
        if error is not None:
            return CheckedEpisode(row_id, left_out=error)
        record, prompt = self._records.get(row_id), sample["prompt_tokens"][0]
        turns: Sequence[Turns] = self._turns[row_id] if record is None else record.trajectories
        parts = [spans(t.prompt_tokens or prompt, t.response_tokens, t.response_mask, decode) for t in turns]
        done = CheckedEpisode(row_id, parts)
        if record is None:
            done.reward = next((turn.reward for turn in turns if turn.reward is not None), None)
        else:
            done.reward, done.calls, done.calls_left_out = record.result.reward, len(record.calls), {**record.excluded}
            done.other_calls, done.warnings = {**record.others}, _of_calls(record)
        done.trained = any(part["trained"] for conversation in parts for part in conversation)
        if not done.trained:
            done.warnings.append("nothing would be trained: no token of the policy is in it")
        if done.reward is None:
            done.warnings.append("it says no reward: a reward function of the trainer has to")
        return done


def _of_calls(record: EpisodeRecord) -> list[str]:
    warnings = []
    if record.truncated:
        warnings.append("a bound, or the model's context, was used up: see max_calls, max_tokens, max_new_tokens")
    for number, call in enumerate(record.calls[1:], start=2):
        if call.prompt.parent is None:
            why = _difference(record, call)
            warnings.append(f"call {number} continues none before it, and begins a conversation: {why}")
    for number, call in enumerate(record.calls, start=1):
        if call.prompt.tools and "tool_call" in call.reply.content:
            warnings.append(f"reply {number} looks like a call of a tool, but is none: {call.reply.content[:_SHOWN]!r}")
    for number, call in enumerate(record.calls, start=1):
        if _may_be_title(record, call):
            warnings.append(f"call {number} looks like one for a title or a summary, and is trained. {_LEAVE_OUT}")
    return warnings


def _may_be_title(record: EpisodeRecord, call: Call) -> bool:
    """Whether it asks for a title or a summary, without tools, and nothing continues it; of several calls."""
    asked = (call.prompt.messages[0], call.prompt.messages[-1])
    is_last = not any(other.prompt.parent is call for other in record.calls)
    is_plain = not call.prompt.tools and not call.excluded and len(record.calls) > 1
    return is_plain and is_last and any(_OF_TITLES.search(message.content) for message in asked)


def _difference(record: EpisodeRecord, call: Call) -> str:
    """Where a call's messages differ from the most similar earlier call's."""
    messages = call.prompt.messages
    known = [earlier.messages for earlier in record.calls[: record.calls.index(call)]]
    nearest = max(known, key=lambda said: _common(said, messages))
    index = _common(nearest, messages)
    if index == len(messages):
        return "its messages end before the reply of another"
    if index == len(nearest):
        return "the chat template now writes what was said in another way, or leaves out thoughts"
    now, before = messages[index], nearest[index]
    return (
        f"message {index + 1} is {now.role} {now.content[:_SHOWN]!r}, and was {before.role} {before.content[:_SHOWN]!r}"
    )


def _common(one: Sequence[Message], other: Sequence[Message]) -> int:
    """With how many equal messages two conversations begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0].key == pair[1].key, zip(one, other, strict=False)))

"""Environments of TRL's form: a class whose public methods are the tools of an episode.

class Game:
    def reset(self, **row):       # before each episode; what it returns is appended to the last message
        self.secret, self.won = row["secret"], False
        return "Guess a number."

    def guess(self, number: int) -> str:
        \"\"\"Guess the number.

        Args:
            number: between 1 and 10
        \"\"\"
        self.won = number == self.secret
        return "right" if self.won else "wrong"

    def get_reward(self) -> float:
        return float(self.won)

Trainer(actor, environment=Game)
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from verl._base.checked import checked
from verl._base.names import check_known
from verl._base.record import Count, Portion, Seconds
from verl._host.user_calls import HungError, LateError, UserCode, is_async, within
from verl._host.user_code import describe, show_once, traceback_of
from verl._host.user_functions import load_function
from verl.batch import WRITTEN, Batch
from verl.data.chat import template_inputs
from verl.data.prompts import USER_PREFIX
from verl.data.tokenize import encode_behind
from verl.errors import ConfigError, DataError, RolloutError, shown
from verl.rewards.signatures import user_columns
from verl.rollout.base import Sample
from verl.rollout.episode import Client, Row
from verl.rollout.gateway.messages import Message, ToolCall
from verl.rollout.gateway.template import ChatTemplate, template_of
from verl.rollout.tools import Call, CallSyntax, Tool, ToolEpisode, is_text, tool
from verl.rollout.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass
class EnvironmentKind:
    """What one factory makes.

    Attributes:
        name: of the class.
        free: instances that wait for an episode.
        methods: names of those that are tools.
    """

    name: str
    factory: Callable[[], Any]
    methods: tuple[str, ...]
    schemas: list[dict[str, Any]]
    has_reward: bool
    free: list[Any] = field(default_factory=list)


class EnvironmentEpisode(ToolEpisode):
    """Episodes in an environment of TRL's form, turn after turn, until the policy answers without a call.

    An environment has `reset(**row)`, which gets the columns of its row and returns None, or a text (or parts) that is
    appended to the row's last message. Its public methods, plain or async, with annotations and a docstring, are tools.
    `get_reward()`, if it has one, is a reward of the episode, added to the trainer's own. Instances are used again
    after an episode that has come to its end.

    The result of a tool is its return value as text (`str`), or `{'error': ...}` for an exception. An episode whose
    `reset` or `get_reward` raises is left out; one that is late is run once more, then left out.

    Args:
        factory: a class, or a function without arguments; a mapping of names to these, which a row chooses from by its
            column `environment`; None: tools alone.
        tools: further tools, see `ToolEpisode`.
        chat_template: replaces the tokenizer's: "hermes", or a file.
        max_turns: of the policy; None: as many as `max_new_tokens` has room for.
        max_result_tokens: of one result; None: `max_new_tokens`.
        deadline: seconds for one run of an episode.
        max_left_out: share of a step's episodes; where more are left out, the run ends.

    Raises:
        ConfigError: the environment has no `reset`, or a public method is no tool.
    """

    #: What `get_reward` says.
    gives_reward = True

    @checked
    def __init__(
        self,
        factory: Any = None,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        *,
        chat_template: str | None = None,
        max_turns: Count | None = None,
        max_result_tokens: Count | None = None,
        deadline: Seconds = 600.0,
        max_left_out: Portion = 0.5,
    ) -> None:
        factories = {} if factory is None else factory if isinstance(factory, Mapping) else {None: factory}
        if not factories and not tools:
            raise ConfigError("EnvironmentEpisode: give it an environment, or tools")
        functions = [one if isinstance(one, Tool) else tool(one) for one in tools]
        self.tools = {one.name: replace(one, timeout=deadline) for one in functions}
        if len(self.tools) < len(functions):
            raise ConfigError("EnvironmentEpisode.tools: must have different names")
        #: By the value of the column `environment`; of an only one, None.
        self.kinds: dict[str | None, EnvironmentKind] = {
            name: self._kind(name, make) for name, make in factories.items()
        }
        #: The prompts of rows are rendered here, with the tools of their environments.
        self.schemas: list[dict[str, Any]] = []
        self.chat_template, self.seconds = chat_template, deadline
        self.max_left_out = max_left_out
        self.max_turns, self.max_result_tokens = max_turns, max_result_tokens
        #: Of the episode: two runs, and a moment to end each.
        self.deadline = 2 * deadline + 10.0
        #: Whether rewards read the environments, as they are when an episode has ended: then each is held, by the id of
        #: its row, until `release`.
        self.is_read = False
        self.held: dict[str, tuple[EnvironmentKind, Any]] = {}
        self._code = UserCode("environments")

    def check_values(self, where: str, rows: Batch) -> None:
        """Raises DataError if a row chooses an environment that there is not."""
        if self.kinds and None not in self.kinds:
            names = rows["environment"] if "environment" in rows.columns else [None]
            check_known(f"{where}: the column 'environment' has", names, [*self.kinds], DataError)

    def _kind(self, name: str | None, factory: Any) -> EnvironmentKind:
        what = "environment" if name is None else f"environment '{name}'"
        if not callable(factory):
            raise ConfigError(f"{what}: must be a class, or a function that makes environments, not {shown(factory)}")
        try:
            instance = factory()
        except Exception as error:  # a user's code may raise anything
            raise ConfigError(f"{what}: {getattr(factory, '__name__', factory)}() raised {describe(error)}") from error
        members = dict(inspect.getmembers(type(instance), inspect.isfunction))  # properties of an instance would run
        kind = type(instance).__name__
        if "reset" not in members:
            raise ConfigError(f"{what}: {kind} has no method reset(self, **row): write one, which may return None")
        methods = tuple(name for name in members if not name.startswith("_") and name not in ("reset", "get_reward"))
        if clash := next((method for method in methods if method in self.tools), None):
            raise ConfigError(f"{what}: {kind}.{clash} and a tool have one name: rename one of them")
        schemas = [_schema(kind, method, getattr(instance, method)) for method in methods]
        return EnvironmentKind(kind, factory, methods, schemas, "get_reward" in members, [instance])

    @property
    def rewards(self) -> dict[str, list[str | None]]:
        """Classes with `get_reward`: name -> under which names rows choose them."""
        rewards: dict[str, list[str | None]] = {}
        for name, kind in self.kinds.items():
            if kind.has_reward:
                rewards.setdefault(kind.name, []).append(name)
        return rewards

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError if the chat template does not show tools, calls and results, or not behind a turn."""
        if self.tools or any(kind.methods for kind in self.kinds.values()):
            template = ChatTemplate(tokenizer, self.chat_template)
            template.check()
            syntax = _TemplateSyntax(template, [], {}, "")
            syntax.said = Message("assistant", "", (ToolCall("tool", "{}", "call00000"),))
            syntax.reply(Sample("", [0], [0.0], "stop", 0), ["?"])

    async def __call__(self, client: Client, row: Row) -> list[Turns]:
        for _ in range(2):
            try:
                return [await within(self._episode(client, row), self.seconds)]
            except LateError as error:
                late = f"twice: the environment {error}"
        raise RolloutError(late)

    async def _episode(self, client: Client, row: Row) -> Turns:
        assert client.tokenizer is not None and client.text is not None
        kind, instance = await self._take(row)
        chat = _chat(row)
        tools: dict[str, Tool] = dict(self.tools)
        schemas = [one.schema for one in self.tools.values()]
        if kind is not None:
            chat = _with_observation(chat, await self._call(kind, instance, "reset", self._columns(instance, row)))
            lock = asyncio.Lock()  # plain methods of one environment are called one after the other
            for name in kind.methods:
                method = getattr(instance, name)
                at_once = nullcontext() if is_async(method) else lock
                tools[name] = Tool(name, {}, method, self.seconds, self._code, at_once)
            schemas += kind.schemas
        template = template_of(client.text.tokenizer, self.chat_template, client.text.ends)
        inputs = template_inputs({**row, "tools": None}, schemas)
        text = template.chat.render(chat, inputs)
        prompt = list(client.tokenizer([text], add_special_tokens=False)["input_ids"][0])
        syntax = _TemplateSyntax(template, schemas, inputs, text)
        turns, _ = await self.run_turns(client, prompt, tools, syntax)
        turns.prompt_tokens, turns.messages = prompt, [*chat, *syntax.whole(turns)]
        if kind is not None:
            if kind.has_reward and (value := await self._call(kind, instance, "get_reward", {})) is not None:
                try:
                    turns.reward = float(value)
                except (TypeError, ValueError) as error:
                    text = f"{kind.name}.get_reward() returned {shown(value)}: it is a number, or None"
                    raise RolloutError(text) from error
            if self.is_read:
                self.held[str(row["id"])] = kind, instance
            else:
                kind.free.append(instance)
        return turns

    async def _take(self, row: Row) -> tuple[EnvironmentKind | None, Any]:
        """An environment for a row: one that is free, or a new one."""
        if not self.kinds:
            return None, None
        name = None if None in self.kinds else row.get("environment")
        check_known(f"row '{row['id']}': the column 'environment' has", [name], [*self.kinds], DataError)
        kind = self.kinds[name]
        return kind, kind.free.pop() if kind.free else await self._code.call(self.seconds, kind.factory)

    async def _call(self, kind: EnvironmentKind, instance: Any, method: str, arguments: Row) -> Any:
        """Raises RolloutError if it raises, or if too many calls never returned."""
        try:
            return await self._code.call(self.seconds, getattr(instance, method), **arguments)
        except HungError as error:
            raise RolloutError(f"{error}: set timeouts") from None
        except Exception as error:  # a user's code may raise anything
            show_once(logger, f"{kind.name}.{method}", traceback_of(error))
            raise RolloutError(f"{kind.name}.{method}() raised {describe(error)}") from error

    def _columns(self, instance: Any, row: Row) -> dict[str, Any]:
        """The columns of the data that `reset` takes."""
        values = {
            name: row.get(USER_PREFIX + name, row.get(name)) for name in user_columns(dict(row)) if name not in WRITTEN
        }
        values["prompt"] = _chat(row) if row.get("messages") is not None else row.get("prompt")
        if None not in self.kinds:
            del values["environment"]
        parameters = inspect.signature(instance.reset).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            values = {p.name: values[p.name] for p in parameters if p.name in values}
        return copy.deepcopy(values)  # a second run of the episode gets them as they were

    def release(self, row_ids: Iterable[str]) -> None:
        """Nobody reads the environments of these rows any more."""
        for row_id in row_ids:
            if row_id in self.held:
                kind, instance = self.held.pop(row_id)
                kind.free.append(instance)


class _TemplateSyntax(CallSyntax):
    """The syntax of the model's own chat template.

    Attributes:
        said: the latest turn of the policy.
        messages: all turns and results so far, as TRL has them.
    """

    def __init__(self, template: ChatTemplate, schemas: Sequence[Row], inputs: Row, prompt: str) -> None:
        self._template, self._schemas, self._inputs, self._prompt = template, schemas, inputs, prompt
        self.said = Message("assistant")
        self.messages: list[dict[str, Any]] = []
        self._read = 0  # tokens of the response that `messages` has

    def calls(self, sample: Sample, stop: Sequence[str]) -> list[Call] | None:
        self._say(sample.tokens)
        return [(call.name, json.loads(call.arguments or "{}")) for call in self.said.calls]

    def reply(self, sample: Sample, results: Sequence[str]) -> list[int]:
        """Rendered in a chat of the calls and their results alone, so that nothing earlier is written again."""
        asked, said = Message("user", "?"), Message("assistant", "", self.said.calls)
        pairs = list(zip(said.calls, results, strict=True))
        answers = [Message("tool", result, call_id=call.id) for call, result in pairs]
        before = self._template.write([asked], self._schemas, self._inputs, reply=True)
        text = self._template.write([asked, said, *answers], self._schemas, self._inputs, reply=True)
        last = sample.tokens[-1:]
        behind = self._template.behind(text, before, said, bool(self._schemas), last)
        if behind is None:
            raise ConfigError(
                "the chat template does not write results behind a turn that calls tools: name another one, as "
                "chat_template='hermes'"
            )
        self.messages += [{"role": "tool", "name": call.name, "content": result} for call, result in pairs]
        return encode_behind(self._template.chat, last, behind)

    def whole(self, turns: Turns) -> list[dict[str, Any]]:
        """All messages of an episode that has ended, the turn that was cut off too."""
        written = [token for token, mask in zip(turns.response_tokens, turns.response_mask, strict=True) if mask]
        if len(written) > self._read:
            self._say(written[self._read :])
        return self.messages

    def _say(self, tokens: Sequence[int]) -> None:
        said = self._template.parse(self._template.text(tokens), self._prompt, self._schemas)
        calls = [replace(call, id=f"call{number:05d}") for number, call in enumerate(said.calls)]
        self.said = replace(said, calls=tuple(calls))
        self._read += len(tokens)
        functions = [{"name": call.name, "arguments": json.loads(call.arguments or "{}")} for call in calls]
        shown_calls = [{"type": "function", "function": function} for function in functions]
        optional = {"reasoning_content": said.reasoning, "tool_calls": shown_calls}
        kept = {key: value for key, value in optional.items() if value}
        self.messages.append({"role": "assistant", "content": said.content, **kept})


_of_factory = cache(EnvironmentEpisode)


def as_episode(source: Any) -> Any:
    """An episode; of a class or function that makes environments, theirs, always the same."""
    makes = inspect.isclass(source) and hasattr(source, "reset")
    if callable(source) and not inspect.isclass(source) and not inspect.iscoroutinefunction(source):
        with suppress(TypeError, ValueError):
            inspect.signature(source).bind()  # without arguments: an episode takes two
            makes = True
    return _of_factory(source) if makes else source


def as_environments(source: Any) -> EnvironmentEpisode:
    """Episodes in environments, of what `EnvironmentEpisode` takes, or "FILE.py:NAME" of that.

    Raises:
        ConfigError: it makes no environments.
    """
    if isinstance(source, str):
        source = load_function(source)
    episode = EnvironmentEpisode(source) if isinstance(source, Mapping) else as_episode(source)
    if not isinstance(episode, EnvironmentEpisode):
        raise ConfigError(f"environment: must be a class with a method reset(self, **row), not {shown(source)}")
    return episode


def _schema(kind: str, name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """As chat templates expect it, see `transformers.utils.get_json_schema`."""
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{kind}.{name}: a call names its arguments, and '{parameter}' has none: write them out")
    try:
        return tool(method).schema
    except ConfigError as error:
        hint = f"or, if it is no tool, call it _{name}"
        raise ConfigError(f"{kind}.{name} is public, so it is a tool: {error}; {hint}") from error


def _chat(row: Row) -> list[dict[str, Any]]:
    """The messages of a row; a text is the user's."""
    if row.get("messages") is not None:
        return list(row["messages"])
    if row.get("prompt") is None:
        raise DataError("an environment adds to a row's messages, and this row has tokens alone: give it messages")
    return [{"role": "user", "content": row["prompt"]}]


def _with_observation(chat: list[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """A chat with what `reset` returned, appended to its last message.

    Raises:
        RolloutError: it is neither None, nor text, nor a list of parts.
    """
    if observation is None:
        return chat
    content = chat[-1].get("content") or ""
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    if type(observation) is not type(content):
        raise RolloutError(f"reset() returned {shown(observation)}: None, a text or a list of parts is appended")
    if isinstance(observation, list) and (odd := next((p for p in observation if not is_text(p)), None)):
        raise RolloutError(f"reset() returned {shown(odd)}: models of text are trained here, parts are of type text")
    return [*chat[:-1], {**chat[-1], "content": content + observation}]

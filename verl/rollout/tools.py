"""Tools: functions that a policy may call between its turns, and the syntax of a call.

There are two. That of chat templates (Hermes style), for tokenizers whose template has the role `tool`:

    <tool_call>{"name": "calculator", "arguments": {"expression": "12 + 7"}}</tool_call>

and a plain one for models without a chat template, for tools with one argument, a text; the policy continues after the
result:

    <<12 + 7>> [19]          with one tool; with several: <<calculator: 12 + 7>> [19]
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import logging
import math
import operator
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, Protocol

from verl import sandbox
from verl._base.checked import checked
from verl._base.record import Count, Processes, Seconds
from verl._base.syntax import syntax_tree
from verl._host.user_calls import UserCode
from verl._host.user_code import show_once, traceback_of
from verl.data.chat import ChatTokenizer, template_inputs
from verl.data.text import runs, spelled
from verl.data.tokenize import encode_behind
from verl.errors import ConfigError, DataError
from verl.rollout.base import LongPromptError, Sample
from verl.rollout.episode import Client, Row
from verl.rollout.turns import Turns

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
#: Placeholders for the policy's message and a tool's result in a chat.
_SPOKEN, _RESULT = "what-the-policy-said", "what-the-tool-said"
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


@dataclass
class Tool:
    """A function that a policy may call by name.

    Attributes:
        schema: as chat templates expect it.
        timeout: seconds for a call; a late one is left behind in its thread.
        code: calls it.
        lock: held during a call.
    """

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    timeout: float = 10.0
    code: UserCode = field(default_factory=lambda: UserCode("tools"))
    lock: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The function's result as text, or its error as `{'error': ...}`, as TRL has them. Never raises, and takes at
        most `timeout` seconds and a moment for an async function to close what it has open."""
        try:
            async with self.lock:
                result = await self.code.call(self.timeout, self.function, **arguments)
            if isinstance(result, list) and result and all(map(is_text, result)):
                return "".join(str(part["text"]) for part in result)
            return str(result)
        except Exception as error:  # a user's code may raise anything; the model gets it as the result
            show_once(logger, f"tool {self.name}", traceback_of(error))
            return str({"error": str(error)})


def is_text(part: Any) -> bool:
    """Whether this is a part of a content, of type text."""
    return isinstance(part, Mapping) and part.get("type") == "text"


@checked
def tool(function: Callable[..., Any], *, timeout: Seconds = 10.0) -> Tool:
    """A function, plain or async, as a tool; its schema is derived from its annotations and docstring.

    Raises:
        ConfigError: an annotation, the docstring, or an argument's description in it (`Args:`) is missing.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:  # of built-in ones
        name = getattr(function, "__name__", function)
        raise ConfigError(f"tool {name}: {error}; write annotations and a docstring with Args") from error
    return Tool(str(schema["function"]["name"]), schema, function, timeout)


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: numbers, + - * / // % and parentheses, such as "(2 + 3) * 4"
    """
    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")
    value = _evaluate(syntax_tree(expression.strip(), mode="eval").body)
    return str(int(value) if value == int(value) else value)


def _evaluate(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and math.isfinite(node.value):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))  # type: ignore[no-any-return]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.operand))  # type: ignore[no-any-return]
    raise ValueError("only numbers, + - * / // % and parentheses are allowed")


@checked
def interpreter(
    limits: sandbox.Limits | None = None, *, packages: Sequence[str | Path] = (), parallel: Processes | None = None
) -> Tool:
    """A tool `python` that runs a program in the sandbox, `parallel` at a time (None: one per core).

    Raises:
        SandboxError: programs cannot be isolated on this machine.
    """
    limits = limits or sandbox.Limits()
    sandbox.require()
    slots = threading.Semaphore(parallel or os.cpu_count() or 1)

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the program
        """
        with slots:
            run = sandbox.run_python(code, limits=limits, packages=packages)
        stopped = {"time": f"\n[stopped after {limits.seconds:g} s]", "output": "\n[stopped: too much output]"}
        return (run.stdout + run.stderr + stopped.get(run.status, "")).strip() or "[no output]"

    # The deadline includes the wait for a free slot.
    return tool(python, timeout=60 + 8 * limits.seconds)


class ToolEpisode:
    """An episode in which the policy may call tools, turn after turn, until it answers without a call.

    The response, results included, has at most `max_new_tokens` tokens, and ends before a result for which the model
    has no positions. Results are masked: no loss, no log-prob. The result of a call that cannot be parsed, names an
    unknown tool, or fails is an error message.

    Args:
        tools: `Tool`s, or functions for `tool`.
        form: the syntax of calls: "chat" or "plain", see above.
        max_turns: of the policy.
        max_result_tokens: of one result; a longer one is cut.
        deadline: seconds for an episode.

    Raises:
        ConfigError: there is no tool, two have one name, or the plain form cannot call one.
    """

    @checked
    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        *,
        form: Literal["chat", "plain"] = "chat",
        max_turns: Count = 4,
        max_result_tokens: Count = 256,
        deadline: Seconds = 600.0,
    ) -> None:
        all_tools = [one if isinstance(one, Tool) else tool(one) for one in tools]
        self.tools = {one.name: one for one in all_tools}
        if not all_tools or len(self.tools) < len(all_tools):
            raise ConfigError("ToolEpisode.tools: must be one tool or more, of different names")
        #: Of the plain form: the only argument of each tool.
        self._arguments: dict[str, str] | None = None
        if form == "plain":
            names = {name: list(inspect.signature(one.function).parameters) for name, one in self.tools.items()}
            if wrong := next((name for name in names if len(names[name]) != 1), None):
                raise ConfigError(f"tool {wrong} takes {len(names[wrong])} arguments: the plain form passes one")
            self._arguments = {name: only for name, (only,) in names.items()}
        self.schemas = [] if form == "plain" else [one.schema for one in all_tools]
        self.max_turns: int | None = max_turns
        self.max_result_tokens: int | None = max_result_tokens
        self.deadline = deadline

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises DataError if this tokenizer's chat template cannot express a tool's result."""
        if self._arguments is None:
            _ChatSyntax(ChatTokenizer(tokenizer), {}).behind([_RESULT])

    async def __call__(self, client: Client, row: Row) -> list[Turns]:
        assert client.tokenizer is not None
        chat = ChatTokenizer(client.tokenizer)
        syntax: CallSyntax = _ChatSyntax(chat, template_inputs(row, self.schemas))
        if self._arguments is not None:
            syntax = _PlainSyntax(chat, self._arguments)
        turns, answers = await self.run_turns(client, row["prompt_tokens"], self.tools, syntax)
        assert client.text is not None
        said = [client.text(tokens) for tokens in runs(turns.response_tokens, turns.response_mask)]
        messages = [*(row.get("messages") or [{"role": "user", "content": row.get("prompt") or ""}])]
        for text, results in zip_longest(said, answers[: len(said) - 1], fillvalue=()):
            messages += [{"role": "assistant", "content": text}, *({"role": "tool", "content": one} for one in results)]
        turns.messages = messages
        return [turns]

    async def run_turns(
        self, client: Client, prompt: Sequence[int], tools: Mapping[str, Tool], syntax: CallSyntax
    ) -> tuple[Turns, list[list[str]]]:
        """The policy's turns after a prompt, and the results that answer each but the last."""
        turns, limit, answers = Turns(), client.params.max_new_tokens, list[list[str]]()
        reply: list[int] = []
        while True:
            written = len(turns.response_tokens) + len(reply)
            if written >= limit and turns.response_tokens:
                break
            params = replace(
                client.params,
                max_new_tokens=limit - written,
                min_new_tokens=0 if answers else max(client.params.min_new_tokens - written, 0),
                stop=(*client.params.stop, *syntax.stop),
            )
            try:
                sample = await client.generate([*prompt, *turns.response_tokens, *reply], params)
            except LongPromptError:
                if not turns.response_tokens:
                    raise
                break
            turns.read(reply).wrote(sample)
            calls = syntax.calls(sample, client.params.stop) if sample.finish == "stop" else []
            if calls is None:  # the policy continues
                reply = []
                continue
            if not calls:
                return turns, answers
            if len(answers) + 1 == self.max_turns:  # nobody would read the results
                break
            called = (_result(call, tools) for call in calls)
            answers.append([self._cut(result, client) for result in await asyncio.gather(*called)])
            reply = syntax.reply(sample, answers[-1])
        turns.finish = "length"  # cut before a result
        return turns, answers

    def _cut(self, whole: str, client: Client) -> str:
        """A result, without what is behind `max_result_tokens`."""
        assert client.tokenizer is not None
        most = self.max_result_tokens or client.params.max_new_tokens
        # A token has about 64 characters at most: what is longer for sure is cut before it is tokenised. JSON and file
        # names may hold half a surrogate pair, which a tokenizer does not accept.
        text = whole[: 64 * most].encode("utf-8", "replace").decode()
        tokens = client.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) <= most and len(text) == len(whole):
            return text
        return spelled(client.tokenizer, tokens[:most]) + " [cut]"


#: A tool's name and arguments, or an error message.
Call = tuple[str, dict[str, Any]] | str


async def _result(call: Call, tools: Mapping[str, Tool]) -> str:
    if isinstance(call, str):
        return call
    name, arguments = call
    return await tools[name].call(arguments) if name in tools else str({"error": f"Tool {name} not found."})


class CallSyntax(Protocol):
    """How calls and results are written in one episode.

    Attributes:
        stop: strings that end a turn.
    """

    stop: tuple[str, ...] = ()

    def calls(self, sample: Sample, stop: Sequence[str]) -> list[Call] | None:
        """The calls of a turn; None: the policy is not done with it.

        Args:
            stop: further strings that end a response.
        """

    def reply(self, sample: Sample, results: Sequence[str]) -> list[int]:
        """Tokens between a turn and the next one: the results of its calls, and the template's text around them."""


@dataclass
class _ChatSyntax(CallSyntax):
    """Hermes calls in chat templates; `inputs`: of the template, see `template_inputs`."""

    chat: ChatTokenizer
    inputs: Mapping[str, Any]

    def calls(self, sample: Sample, stop: Sequence[str]) -> list[Call] | None:
        return [_read_call(text) for text in _CALL.findall(spelled(self.chat.tokenizer, sample.tokens))]

    def reply(self, sample: Sample, results: Sequence[str]) -> list[int]:
        """The rest of the end of the policy's message, the results, a new turn."""
        text, last = self.behind(results), sample.tokens[-1]
        if last in self.chat.added:
            # A template ends a message by the token that ends a response, then continues: do not repeat that token.
            # Look for it before the results only, as each of them may end with it, too.
            before, end = self.behind([_RESULT]).partition(_RESULT)[0], self.chat.added[last]
            text = text[before.index(end) + len(end) :] if end in before else text
        return encode_behind(self.chat, [last], text)

    def behind(self, results: Sequence[str]) -> str:
        """The template's text after a message that these results answer. It is rendered as one chat, since a template
        may write the last message differently from earlier ones.

        Raises:
            DataError: the template does not write the message, or not the results after it.
        """
        spoken = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SPOKEN}]
        messages = [*spoken, *({"role": "tool", "content": result} for result in results)]
        try:
            text = self.chat.render(messages, self.inputs).partition(_SPOKEN)[2]
        except DataError as error:
            raise DataError(f"{error}; or use form='plain'") from error
        if not text:
            raise DataError("the chat template writes nothing behind what the assistant says: use form='plain'")
        return text


def _read_call(text: str) -> Call:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 'error: a call is {"name": ..., "arguments": {...}} in JSON'
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "error: name must be text, arguments a mapping"
    return name, arguments


@dataclass
class _PlainSyntax(CallSyntax):
    """`<<...>>`; `arguments`: the only argument of each tool."""

    chat: ChatTokenizer
    arguments: Mapping[str, str]
    stop = (">>",)

    def calls(self, sample: Sample, stop: Sequence[str]) -> list[Call] | None:
        """The call that ends these tokens; None if they end with a `>>` outside a call, which ends nothing.

        Args:
            stop: further strings that end a response.
        """
        text, before = (spelled(self.chat.tokenizer, tokens) for tokens in (sample.tokens, sample.tokens[:-1]))
        ends = [end for end in (*stop, *self.stop) if text.rfind(end) > before.rfind(end)]
        if ">>" not in ends:  # a call before `min_new_tokens` was ignored
            return []
        opened = text.rfind("<<", 0, text.rfind(">>"))
        closed = text.find(">>", opened + 2)
        if opened < 0 or closed <= before.rfind(">>"):
            return [] if len(ends) > 1 else None
        inside = text[opened + 2 : closed]
        name, colon, argument = inside.partition(":")
        if len(self.arguments) == 1:
            (only,) = self.arguments
            name, argument = (only, argument) if colon and name.strip() == only else (only, inside)
        elif not colon:
            return ["error: a call is <<name: argument>>"]
        return [(name.strip(), {self.arguments.get(name.strip(), ""): argument.strip()})]

    def reply(self, sample: Sample, results: Sequence[str]) -> list[int]:
        return encode_behind(self.chat, sample.tokens[-1:], f" [{results[0]}]")

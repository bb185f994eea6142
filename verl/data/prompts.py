"""Prompts from wherever they are: a path, a data set object, a list, a stream, a procedural task.

Columns are recognised by shape. The prompt is a string (tokenised as it is), a list of messages (goes through
the chat template) or a list of token ids (passes through). All other columns travel along untouched, for
rewards: verl's (`data_source`, `reward_model`, `extra_info`), TRL's (anything), yours. A column whose name
the system needs for itself is kept as `user.<name>`; rewards see it under its own name again.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import count, islice
from typing import Any

import pyarrow as pa

from verl._base.checked import checked
from verl._base.record import Count
from verl.batch import SCHEMA, WRITTEN, Batch
from verl.data.files import digest, named, rows_by_file
from verl.data.forms import COLLATED, chat_of, loaded, plain, readable_row, table_rows, usual_row
from verl.data.tasks import task_rows
from verl.errors import ConfigError, DataError, nearest

logger = logging.getLogger(__name__)

PROMPT_COLUMNS = ("prompt", "messages", "prompt_tokens", "question", "problem")
USER_PREFIX = "user."
#: A row's prompt as the system keeps it: the first of these that the row has.
_PROMPT_FIELDS = ("prompt", "messages", "prompt_tokens")
#: What the assistant says in a message besides its content.
SAID = ("tool_calls", "reasoning_content", "reasoning", "thinking")
#: A column in a template, or a doubled brace.
_BRACES = re.compile(r"\{\{|\}\}|\{([^\W\d]\w*)\}")
#: Names that the system fills in itself, so that a user's column of that name has to step aside.
_RESERVED = (frozenset(SCHEMA) | WRITTEN) - {"task"}


class PromptDataset:
    """Prompts in memory: a `Batch` with `prompt`, `messages` (JSON) or `prompt_tokens`, and the user's columns."""

    def __init__(self, batch: Batch, name: str = "prompts") -> None:
        if not len(batch):
            raise DataError(f"{name}: the set of prompts is empty")
        self.batch = batch
        self.name = name

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return next(self.batch.take([range(len(self))[index]]).rows())

    def texts(self) -> list[str]:
        """The question of each row, without system messages and surrounding space: prompts are equal by it."""
        return [prompt_text(row) for row in self.batch.select(_PROMPT_FIELDS).rows()]

    def fingerprint(self) -> str:
        """A digest of all columns, the same before and after tokenising: a cursor belongs to one data set."""
        return digest({**row, "prompt_tokens": prompt_text(row)} for row in self.batch.rows())


@dataclass(eq=False, repr=False)
class PromptStream:
    """Prompts read one after another from an iterable that has no length and is not shuffled here.

    The source is iterated again each epoch (after `set_epoch(epoch)`, where it has that) and must repeat itself:
    resuming skips the rows that were consumed, by the source's own `state_dict` and `load_state_dict` where it has them
    and they lead to the row at which the state was taken.

    Attributes:
        prepare: applied to each row, with its number; it may drop the row.
    """

    source: Iterable[Any]
    form: PromptForm
    name: str = "stream"
    prepare: Callable[[Batch, int], Batch] | None = None

    def rows(self, epoch: int, start: int = 0, mark: Any = None) -> Iterator[tuple[int, dict[str, Any], Any]]:
        """Row numbers, rows and their marks from number `start` on; a row that `prepare` drops is left out.

        Args:
            mark: the source's own position at row `start - 1`; None: it has no such thing.
        """
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        values, first = (self._resumed(mark), start) if start and mark else (None, 0)
        if values is None:
            values, first = iter(self.source), 0
        for number in count(first):
            state = self._state(number) if number >= start else None
            try:
                value = next(values)
            except StopIteration:
                return
            if number < start:
                continue
            mark = None if state is None else {"state": state, "row": digest([{"row": repr(value)}])}
            row = self.form.row(value, f"{self.name}, row {number}")
            prepared = [row] if self.prepare is None else self.prepare(Batch.from_rows([row]), number).rows()
            for each in prepared:
                yield number, each, mark

    def _state(self, number: int) -> Any:
        """The source's own position before its row of this number."""
        if not (hasattr(self.source, "state_dict") and hasattr(self.source, "load_state_dict")):
            return None
        if "num_samples" in signature(self.source.state_dict).parameters:  # of MosaicML's StreamingDataset
            return copy.deepcopy(self.source.state_dict(number, True))
        return copy.deepcopy(self.source.state_dict())

    def _resumed(self, mark: Any) -> Iterator[Any] | None:
        """The source after the row of a mark; None: its state does not lead there, as with a shuffled buffer."""
        source: Any = self.source
        before = self._state(0)
        try:
            source.load_state_dict(mark["state"])
            values: Iterator[Any] = iter(source)
            if digest([{"row": repr(next(values))}]) == mark["row"]:
                return values
            reason = "another row is there"
        except Exception as error:  # of whatever kind of source the user has
            reason = f"{type(error).__name__}: {error}"
        logger.warning("%s: its own state does not lead on (%s): what was read is read again", self.name, reason)
        if before is not None:
            source.load_state_dict(before)
        return None


@checked
@dataclass(frozen=True, slots=True)
class PromptForm:
    """How a row of a data set becomes a prompt.

    `template` is a text with `{prompt}` where the prompt goes, and other columns by their names. Braces around
    anything but a name are text (`\\boxed{}`), and so is a doubled brace, once. It is applied to a string, or to the
    last message of a chat. `system_prompt` starts each chat; a string becomes a chat's
    user message if `chat` is set or there is a system prompt, and else stays as it is. `chat_template_kwargs` are
    variables of the chat template; a row's own take precedence.
    """

    prompt_column: str | None = None
    template: str | None = None
    system_prompt: str | None = None
    chat: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.template is not None and not any(_BRACES.findall(self.template)):
            raise ConfigError("template: names no column: the prompt goes where {prompt} stands in it")
        try:
            json.dumps(self.chat_template_kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"chat_template_kwargs: must be what JSON has a form of: {error}") from None

    def row(self, value: Any, where: str) -> dict[str, Any]:
        """The row as the system keeps it. `where` begins an error's message."""
        value = value if isinstance(value, Mapping) else plain(value)
        if isinstance(value, str) or is_messages(value):
            value = {"prompt": value}
        elif isinstance(value, list):
            value = {"prompt_tokens": value}
        elif not isinstance(value, Mapping):
            raise DataError(f"{where} is a {type(value).__name__}: a row is a mapping, a text, a chat or token ids")
        fields = usual_row(readable_row(value, where), where)
        name = self._column(fields, where)
        prompt = chat_of(fields.pop(name), f"{where}: column '{name}'")
        if name == "messages" and is_messages(prompt) and prompt[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: the messages end with what the assistant says: take it off, as a prompt ends with what is "
                "to be answered; or call the column 'prompt', if the response is to go on with it"
            )
        kept = {(USER_PREFIX + key if key in _RESERVED else key): item for key, item in fields.items()}
        row = {**self._prompt(prompt, fields, f"{where}: column '{name}'"), **kept}
        of_row = loaded(row.get("chat_template_kwargs")) or {}
        if self.chat_template_kwargs and "messages" in row and isinstance(of_row, Mapping):
            of_row = {key: item for key, item in of_row.items() if item is not None}
            row["chat_template_kwargs"] = json.dumps({**self.chat_template_kwargs, **of_row})
        return row

    def _column(self, fields: Mapping[str, Any], where: str) -> str:
        names = (self.prompt_column,) if self.prompt_column else PROMPT_COLUMNS
        for name in names:
            if fields.get(name) is not None:
                return name
        if self.prompt_column:
            raise DataError(f"{where} has no prompt in '{self.prompt_column}': {nearest(self.prompt_column, fields)}")
        problem = f"{where} has no prompt: none of {', '.join(names)} among its columns {sorted(fields)}"
        raise DataError(f"{problem}; {COLLATED}" if isinstance(fields.get("role"), list | tuple) else problem)

    def _prompt(self, prompt: Any, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        prompt = self._fill(prompt, fields, where) if isinstance(prompt, str) else prompt
        if prompt in ("", []):
            raise DataError(f"{where} is an empty prompt")
        if isinstance(prompt, str):
            if not self.chat and self.system_prompt is None:
                return {"prompt": prompt}
            messages = [{"role": "user", "content": prompt}]
        elif is_messages(prompt):
            *earlier, last = prompt
            filled = {} if self.template is None else {"content": self._fill(content_text(last), fields, where)}
            messages = [*earlier, {**last, **filled}]
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return {"prompt_tokens": prompt}
        else:
            raise DataError(f"{where} is neither a text, nor messages with role and content, nor token ids")
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return {"messages": chat_json(messages, where)}

    def _fill(self, prompt: str, fields: Mapping[str, Any], where: str) -> str:
        if self.template is None:
            return prompt
        values = {**fields, "prompt": prompt}
        for name in filter(None, _BRACES.findall(self.template)):
            if name not in values:
                raise DataError(
                    f"{where}: the prompt template names '{name}', which the row lacks: {nearest(name, values)} "
                    f"(columns: {', '.join(sorted(values))}; text in braces is written {{{{{name}}}}})"
                )
        return _BRACES.sub(lambda match: str(values[match[1]]) if match[1] else match[0][0], self.template)


@checked
def load_prompts(
    source: Any,
    *,
    prompt_column: str | None = None,
    template: str | None = None,
    system_prompt: str | None = None,
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    limit: Count | None = None,
) -> PromptDataset:
    """Prompts from `source`, in memory. (Data without a length: `stream_prompts`.)

    Args:
        source: a JSONL, JSON or Parquet path, a list of such, or a directory (`rows_by_file`); `{"path": PATH}`; a
            procedural task `{"task": NAME, "size": N, "seed": S, ...}` (`task_rows`); a torch or Hugging Face data set;
            a list of strings, chats, token ids or mappings; a batch of columns, as a collator makes it.
        prompt_column: where the prompt is; found by itself among `PROMPT_COLUMNS` if not given.
        template, system_prompt, chat, chat_template_kwargs: see `PromptForm`. A task's question is a chat unless `chat`
            is False.
        limit: take only the first rows.

    Raises:
        DataError: no such file, a broken line, no or an empty prompt (by row), columns of mixed types, or no rows.
    """
    is_task = isinstance(source, Mapping) and "task" in source
    chat = is_task if chat is None else chat
    form = PromptForm(prompt_column, template, system_prompt, chat, chat_template_kwargs)
    values: Iterable[Any]
    if is_task:
        name, values = f"task {source['task']}", task_rows(source)
    else:
        source = source["path"] if isinstance(source, Mapping) and "path" in source else source
        name = named(source)
        values = [source] if is_messages(source) else (row for _, row in rows_by_file(source))
    rows = [form.row(value, f"{name}, row {number}") for number, value in enumerate(islice(values, limit))]
    return PromptDataset(to_batch(rows, name), name)


@checked
def stream_prompts(source: Iterable[Any], **form: Any) -> PromptStream:
    """Prompts of an iterable that may have no end: a torch or Hugging Face `IterableDataset`, a MosaicML
    `StreamingDataset`. Rows are as for `load_prompts`.

    Args:
        **form: see `PromptForm`.
    """
    source = table_rows(source) if isinstance(source, Mapping) else source
    return PromptStream(source, PromptForm(**form), type(source).__name__)


def check_disjoint(train: Sequence[PromptDataset], held_out: PromptDataset) -> tuple[PromptDataset, int]:
    """The held-out prompts that do not occur in training, and how many did. Compared are `PromptDataset.texts`.

    Raises:
        DataError: none is left.
    """
    seen = {text for prompts in train for text in prompts.texts()}
    keep = [text not in seen for text in held_out.texts()]
    overlap = keep.count(False)
    if not overlap:
        return held_out, 0
    if not any(keep):
        raise DataError(
            f"{overlap} of {len(keep)} held-out prompts of {held_out.name} occur in training "
            f"({', '.join(prompts.name for prompts in train)}): nothing is left to evaluate on. Give other held-out "
            "problems"
        )
    return PromptDataset(held_out.batch.filter(keep), held_out.name), overlap


def to_batch(rows: Sequence[Mapping[str, Any]], name: str) -> Batch:
    """Rows as a table; an error names the column that mixes types, and where."""
    try:
        return Batch.from_rows(rows)
    except DataError as error:
        for column in dict.fromkeys(key for row in rows for key in row):
            _check_column(column, rows, name)
        raise DataError(f"{name}: {error}") from error


def _check_column(column: str, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    values = {number: row[column] for number, row in enumerate(rows) if row.get(column) is not None}
    first = next(iter(values.values()), None)
    for number, value in values.items():
        try:
            pa.array([first, value])
        except UnicodeEncodeError:  # which the error at hand tells already
            return
        except OverflowError as error:
            raise DataError(
                f"{name}: column '{column}' has a whole number of more than 64 bits in row {number}. Make it text"
            ) from error
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"{name}: column '{column}' mixes types: row {number} does not fit the rows before it "
                f"({str(error)[:200]}). Make them one type, such as text"
            ) from error


def prompt_text(row: Mapping[str, Any]) -> str:
    """The text of a row's prompt, system messages left out; of token ids, the ids."""
    if row.get("prompt") is not None:
        return str(row["prompt"]).strip()
    if row.get("messages") is not None:
        messages = json.loads(row["messages"])
        return "\n".join(content_text(m).strip() for m in messages if m["role"] != "system")
    return " ".join(map(str, row["prompt_tokens"]))


def chat_json(messages: Sequence[Mapping[str, Any]], where: str) -> str:
    """Messages as JSON, without keys that are null: Arrow fills them in where other messages have a value.

    Raises:
        DataError: a message says nothing, or content is in parts that are no text, such as images, or is no JSON.
    """
    for message in messages:
        if all(message.get(name) is None for name in ("content", *SAID)):
            raise DataError(f"{where} is a chat with a message of role '{message['role']}' whose content is null")
        if isinstance(message.get("content"), float):
            raise DataError(f"{where} is a chat with content {message['content']}, which is no text")
        parts = message["content"] if isinstance(message.get("content"), list) else []
        for part in parts:
            kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(
                    f"{where} is a chat with a part of type '{kind}': models of text are trained here, and parts are "
                    '{"type": "text", "text": ...}. Take out what is no text'
                )
    kept = [{key: item for key, item in message.items() if item is not None} for message in messages]
    try:
        return json.dumps(kept, ensure_ascii=False)
    except TypeError as error:
        raise DataError(f"{where} is a chat with content that is no text: {error}") from error


def content_text(message: Mapping[str, Any]) -> str:
    """A message's text; of content in parts, its text parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def is_messages(value: Any) -> bool:
    """Whether this is a chat: a list of mappings that have a role, a text, and a content or calls of tools."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value)
        and all("content" in m or m.get("tool_calls") for m in value)
    )

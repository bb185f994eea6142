"""Rows of other data sets' forms, and batches that a collator made, as the rows that the loaders read.

ShareGPT    `conversations`: [{"from": "human", "value": "..."}, {"from": "gpt", ...}], with `system`, `tools`
Alpaca      `instruction`, `input`, `output`, with `system`, `history`
OpenRLHF    `input`, `output`
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from functools import partial
from itertools import compress
from typing import Any

from verl.errors import DataError

#: Who speaks in ShareGPT -> role of a chat.
_ROLES = {
    **{"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"},
    **{role: role for role in ("user", "assistant", "system", "tool")},
}
_SHAREGPT, _ALPACA, _OPENRLHF = "conversations", ("instruction", "output"), ("input", "output")
#: What torch's own collation makes of rows is one mapping of columns, or a chat whose roles are lists.
COLLATED = "a DataLoader needs collate_fn=list, which leaves the rows as they are"
#: Keys of the assistant's messages that say whether they are trained: OpenAI's, Axolotl's.
TRAINED = ("weight", "train")
#: Columns that chat templates write.
_OF_TEMPLATES = frozenset((
    "prompt", "messages", "conversations", "completion", "response", "chosen", "rejected", "tools", "documents",
    "chat_template_kwargs",
))  # fmt: skip
_CHATS = ("prompt", "messages", "conversations")
#: How the text of a chat begins.
_WRITTEN_CHAT = re.compile(r"\s*\[\s*\{\s*[\"'](?:role|from|content|value)[\"']\s*:")
#: Columns that hold no text.
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def table_rows(source: Any) -> Iterable[Any]:
    """The rows of data in memory: a list or data set, a batch of columns, a table of pandas, Arrow or Polars.

    Raises:
        DataError: it is a mapping of splits, has no length, or is no data.
    """
    name = type(source).__name__
    if (records := records_of(source)) is not None:
        return map(without_fills, records())
    if hasattr(source, "tolist"):
        return table_rows(source.tolist())
    if isinstance(source, Mapping):
        # Columns hold one value a row, and few of them are all mappings; splits are sets of rows.
        if source and all(map(_is_split, source.values())):
            raise DataError(f"a {name} has several sets of rows, {sorted(map(str, source))}: choose one, data['train']")
        if not source or not all(hasattr(v, "tolist") or isinstance(v, list | tuple) for v in source.values()):
            raise DataError(f"a mapping as data needs a task or a path; it has {sorted(map(str, source))}; {COLLATED}")
        return uncollated(source, "the batch")
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        rows = (source[index] for index in range(len(source)))
        return map(without_fills, rows) if hasattr(source, "features") else rows  # of Hugging Face: Arrow, too
    if isinstance(source, Iterable):
        raise DataError(f"a {name} has no length: read it with stream_prompts, or make a list of it")
    raise DataError(f"rows cannot be read from a {name}: give a path, a data set, a list or a task")


def records_of(value: Any) -> Callable[[], Iterable[Any]] | None:
    """What gives the rows of a table of Arrow, Polars or pandas; None: this is no such table."""
    if hasattr(value, "iloc") and hasattr(value, "columns"):
        return partial(value.to_dict, "records")
    return getattr(value, "to_pylist", None) or getattr(value, "to_dicts", None)


def without_fills(row: Any) -> Any:
    """A row of a typed table without the nulls that it has for keys which only other mappings of a list have: chat
    templates would write them."""
    if not isinstance(row, Mapping):
        return row
    return {name: _without_nulls(value) if name in _OF_TEMPLATES else value for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def loaded(value: Any) -> Any:
    """A text of JSON decoded; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _is_split(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(row, Mapping) and "role" not in row for row in value)
    return not isinstance(value, str | Mapping) and not hasattr(value, "tolist") and isinstance(value, Iterable | Sized)


def readable_row(row: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """A row of plain values; what pandas calls missing (NaN, NaT, NA) is None.

    Raises:
        DataError: a value is an image, a video or a sound.
    """
    try:
        fields = {str(key): plain(value) for key, value in row.items()}
    except RecursionError as error:
        raise DataError(f"{where}: a value is nested too deeply") from error
    for name, value in fields.items():
        if isinstance(value, float) and math.isnan(value):
            fields[name] = None
        elif _is_media(value) or (name in _MEDIA and value and not isinstance(value, str)):
            raise DataError(
                f"{where}: column '{name}' holds images or sounds, and models of text are trained here: leave the "
                "column out, or rows that cannot be understood without it"
            )
    return fields


def _is_media(value: Any) -> bool:
    """Whether this is an image of Pillow, or an encoded one or a sound as Hugging Face's data sets have them."""
    if isinstance(value, list):
        return any(map(_is_media, value))
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes) or {"array", "sampling_rate"} <= value.keys()
    return type(value).__module__.partition(".")[0] == "PIL"


def plain(value: Any) -> Any:
    """Tensors and arrays as lists, sequences and mappings as lists and dictionaries, all through; pandas' NaT and NA as
    None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def chat_of(value: Any, where: str) -> Any:
    """A chat that is written as text of JSON as the chat; anything else as it is.

    Raises:
        DataError: it is written as Python prints one.
    """
    if not isinstance(value, str) or not _WRITTEN_CHAT.match(value):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{where} is the text of a chat that is no JSON ({error}): write it with json.dumps") from error


def usual_row(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row in TRL's columns: `messages`, or `prompt` and `completion`; rows in other forms are returned as they are.

    Raises:
        DataError: a turn has not ShareGPT's form.
    """
    has = {name for name, value in fields.items() if value is not None}
    row = {name: chat_of(v, f"{where}: column '{name}'") if name in _CHATS else v for name, v in fields.items()}
    if _SHAREGPT in has and not has & {"messages", "prompt"}:
        said = row.pop(_SHAREGPT)
        if not isinstance(said, list) or not said:
            raise DataError(f"{where}: 'conversations' is a list of turns with from and value, not {said!r:.80}")
        messages = [*_system(row, where), *(_turn(turn, where) for turn in said)]
        replied = [name for name in ("chosen", "rejected") if isinstance(row.get(name), dict)]
        replies = {name: [_turn(row[name], where)] for name in replied}
        return row | ({"prompt": messages, **replies} if replies else {"messages": messages})
    if has.issuperset(_ALPACA) and "prompt" not in has:
        parts = [row.pop(name, None) or "" for name in ("instruction", "input")]
        history = row.pop("history", None) or []
        pairs = [*history, parts] if isinstance(history, list) else [history]
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise DataError(
                    f"{where}: 'instruction' and 'input' are texts, 'history' a list of pairs of texts (asked, "
                    f"answered), not {pair!r:.80}"
                )
        before = [{"role": role, "content": text} for pair in history
                  for role, text in zip(("user", "assistant"), pair, strict=True)]  # fmt: skip
        asked = {"role": "user", "content": "\n".join(filter(None, parts))}
        return row | {"prompt": [*_system(row, where), *before, asked], "completion": row.pop("output")}
    if has.issuperset(_OPENRLHF) and not has & {"prompt", "completion", "response", "messages"}:
        return row | {"prompt": row.pop("input"), "completion": row.pop("output")}
    return row


def tool_schemas(value: Any) -> list[dict[str, Any]]:
    """The column `tools`: JSON schemas of functions, a list or JSON of one.

    Raises:
        DataError: it is neither.
    """
    try:
        schemas = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"column 'tools' is no JSON: {error}") from error
    if not isinstance(schemas, list) or not all(isinstance(tool, Mapping) for tool in schemas):
        raise DataError(f"column 'tools' is a list of JSON schemas, not {value!r:.60}")
    return [dict(tool) for tool in schemas]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if isinstance(turn, Mapping) and "role" in turn:
        return dict(turn)
    speaker = turn.get("from") if isinstance(turn, Mapping) else None
    if not isinstance(speaker, str) or speaker not in _ROLES or not isinstance(turn.get("value"), str):
        raise DataError(
            f"{where}: a turn of 'conversations' has from ({', '.join(_ROLES)}) and value, not {turn!r:.80}"
        )
    if speaker != "function_call":
        return {"role": _ROLES[speaker], "content": turn["value"], **{k: turn[k] for k in TRAINED if k in turn}}
    try:
        calls = json.loads(turn["value"])
    except ValueError as error:
        raise DataError(f"{where}: a function_call is JSON of name and arguments: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}


def _system(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    text = row.pop("system", None)
    if not isinstance(text, str | None):
        raise DataError(f"{where}: 'system' is a text, not {text!r:.80}")
    return [{"role": "system", "content": text}] if text else []


def uncollated(batch: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The rows of a batch of columns, as collators make them: torch's default, or one that pads `input_ids`.

    Args:
        batch: column -> values of B rows: a list, a tensor or an array whose first size is B. A chat is also taken as
            torch's default collator makes it: a list of messages whose `role` and `content` are lists of B.

    Raises:
        DataError: it is no mapping of columns of one length.
    """
    columns: dict[str, list[Any]] = {}
    for name, column in batch.items():
        values = column.tolist() if hasattr(column, "tolist") else list(column)
        if values and all(isinstance(m, Mapping) and isinstance(m.get("role"), list | tuple) for m in values):
            count = len(values[0]["role"])  # chats out of messages whose roles are lists
            values = [[{key: of[row] for key, of in m.items()} for m in values] for row in range(count)]
        columns[str(name)] = values
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) != 1:
        raise DataError(f"{where}: a collator makes columns of one length, and these have {sizes} rows")
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [_without_padding(row) for row in rows]


def _without_padding(row: dict[str, Any]) -> dict[str, Any]:
    """`input_ids` (with `attention_mask`) as `prompt_tokens`; with `labels`, as prompt and response."""
    if not isinstance(row.get("input_ids"), list):
        return row
    ids = row.pop("input_ids")
    real = row.pop("attention_mask", None) or [1] * len(ids)
    tokens, labels = list(compress(ids, real)), row.pop("labels", None)
    if not isinstance(labels, list):
        return {"prompt_tokens": tokens, **row}
    trained = [int(label != -100) for label in compress(labels, real)]
    start = max(1, trained.index(1) if any(trained) else len(tokens))  # a first token is predicted by nothing
    parts = {"prompt_tokens": tokens[:start], "response_tokens": tokens[start:], "response_mask": trained[start:]}
    return {**parts, **row}

"""Rows of other data sets' forms, and batches that a collator made, as the rows that the loaders read.

ShareGPT    `conversations`: [{"from": "human", "value": "..."}, {"from": "gpt", ...}], with `system`, `tools`
Alpaca      `instruction`, `input`, `output`, with `system`, `history`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import DataError

#: Who speaks in ShareGPT -> role of a chat.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}
_SHAREGPT, _ALPACA = "conversations", ("instruction", "output")


def usual_row(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row in TRL's columns: `messages`, or `prompt` and `completion`; rows of other forms are returned as they are.

    Raises:
        DataError: a turn is none of ShareGPT's.
    """
    has = {name for name, value in fields.items() if value is not None}
    row = dict(fields)
    if _SHAREGPT in has and not has & {"messages", "prompt"}:
        turns = [_turn(turn, where) for turn in row.pop(_SHAREGPT)]
        messages = [*_system(row), *turns]
        given = [name for name in ("chosen", "rejected") if isinstance(row.get(name), dict)]
        replies = {name: [_turn(row[name], where)] for name in given}
        return row | ({"prompt": messages, **replies} if replies else {"messages": messages})
    if has.issuperset(_ALPACA) and "prompt" not in has:
        asked = "\n".join(text for text in (row.pop("instruction"), row.pop("input", None)) if text)
        before = [{"role": role, "content": text} for pair in row.pop("history", None) or ()
                  for role, text in zip(("user", "assistant"), pair, strict=True)]  # fmt: skip
        prompt = [*_system(row), *before, {"role": "user", "content": asked}]
        return row | {"prompt": prompt, "completion": row.pop("output")}
    return row


def tool_schemas(value: Any, where: str) -> list[dict[str, Any]]:
    """The column `tools`: JSON schemas of functions, a list or JSON of one.

    Raises:
        DataError: it is neither.
    """
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{where}: column 'tools' is no JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise DataError(f"{where}: column 'tools' is a list of JSON schemas, not {value!r:.60}")
    return [dict(tool) for tool in found]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if isinstance(turn, Mapping) and "role" in turn:
        return dict(turn)
    speaker = turn.get("from") if isinstance(turn, Mapping) else None
    if speaker not in _ROLES or not isinstance(turn.get("value"), str):
        raise DataError(
            f"{where}: a turn of 'conversations' has from ({', '.join(_ROLES)}) and value, not {turn!r:.80}"
        )
    if speaker != "function_call":
        return {"role": _ROLES[speaker], "content": turn["value"]}
    try:
        calls = json.loads(turn["value"])
    except ValueError as error:
        raise DataError(f"{where}: a function_call is JSON of name and arguments: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}


def _system(row: dict[str, Any]) -> list[dict[str, Any]]:
    text = row.pop("system", None)
    return [{"role": "system", "content": text}] if text else []


def is_collated(batch: Mapping[str, Any]) -> bool:
    """Whether a mapping is a batch of columns."""
    return bool(batch) and all(hasattr(v, "tolist") or isinstance(v, list | tuple) for v in batch.values())


def uncollated(batch: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The rows of a batch of columns, as collators make them: torch's default, or one that pads `input_ids`.

    Args:
        batch: column -> values of B rows: a list, a tensor or an array whose first size is B. A chat is also taken as
            torch's default collator makes it: a list of messages whose `role` and `content` are lists of B.

    Raises:
        DataError: it is no mapping of columns of one length.
    """
    columns = {str(name): _unstacked(v.tolist() if hasattr(v, "tolist") else v) for name, v in batch.items()}
    sizes = {name: len(values) for name, values in columns.items()}
    if len(set(sizes.values())) != 1:
        raise DataError(f"{where}: a collator makes columns of one length, and these have {sizes} rows")
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [_without_padding(row) for row in rows]


def _unstacked(values: Sequence[Any]) -> list[Any]:
    """Chats out of messages whose roles are lists."""
    if values and all(isinstance(m, Mapping) and isinstance(m.get("role"), list | tuple) for m in values):
        return [[{key: of[row] for key, of in m.items()} for m in values] for row in range(len(values[0]["role"]))]
    return list(values)


def _without_padding(row: dict[str, Any]) -> dict[str, Any]:
    """`input_ids` (with `attention_mask`) as `prompt_tokens`; with `labels`, as prompt and response."""
    if not isinstance(row.get("input_ids"), list):
        return row
    ids = row.pop("input_ids")
    mask: Sequence[int] = row.pop("attention_mask", None) or [1] * len(ids)
    kept = [place for place, real in enumerate(mask) if real]
    labels = row.pop("labels", None)
    if not isinstance(labels, list):
        return {"prompt_tokens": [ids[place] for place in kept], **row}
    trained = [labels[place] != -100 for place in kept]
    # A first token is predicted by nothing.
    start = max(1, trained.index(True) if True in trained else len(kept))
    tokens = [ids[place] for place in kept]
    return {
        "prompt_tokens": tokens[:start],
        "response_tokens": tokens[start:],
        "response_mask": [int(t) for t in trained[start:]],
        **row,
    }

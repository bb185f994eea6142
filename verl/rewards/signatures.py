"""The signatures that reward functions have, recognised by parameter names.

    f(texts)                            the response texts (the one parameter may have any name)
    f(responses, prompts)               texts; a prompt that is a chat is a list of messages
    f(prompts, completions, **columns)  TRL's: of a chat, a completion is a list with the assistant's message;
                                        `**columns` gets the data set's own columns and `completion_ids`; of an
                                        episode with tools a completion has all of its messages; `completion_ids` or
                                        `environments` alone will do
    f(queries, prompts, labels)         OpenRLHF's: a query is the prompt's text and the response behind it; of a chat
                                        the texts of its messages, a line each; a label is the row's `labels`, `label`,
                                        `answer` or `ground_truth`, the first that it has
    f(data_source, solution_str, ground_truth, extra_info=None)   verl's, called once per sample

All but the last are called on several samples at once and return one result per sample. Any further parameter gets the
data set's column of that name; `messages` gets the whole conversation of each sample, its response included, and
`trajectories` the list of an episode's: mappings of `name`, `messages`, `response` and `reward` (its own, or None).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from verl.batch import SCHEMA
from verl.data.prompts import content_text
from verl.errors import ConfigError, RewardError, nearest

Row = dict[str, Any]
#: A data set's column with one of the system's names is kept as "user.<name>".
_USER = "user."
#: What one sample would be called, and what several are.
_PLURALS = {one: f"{one}s" for one in ("text", "response", "completion", "prompt")} | {"query": "queries"}
#: Parameters that get texts.
TEXTS = frozenset({*_PLURALS, *_PLURALS.values(), "solution_str"})
#: Parameters that TRL's functions alone have: one of them is enough.
OF_TRL = frozenset({"completions", "completion_ids", "environments"})
#: Parameters that get conversations.
_CHATS = frozenset({"messages", "trajectories"})
_LABELS = ("labels", "label", "answer", "ground_truth")
_OWN = {
    "texts": frozenset({"texts"}),
    "pairs": frozenset({"responses", "prompts"}),
    "trl": frozenset({"prompts", "completions", "completion_ids"}),
    "openrlhf": frozenset({"queries", "prompts", "labels"}),
    "verl": frozenset({"solution_str"}),
}


class Signature(NamedTuple):
    """How to call a function.

    Attributes:
        kind: the signature: a key of `_OWN`.
        positional: values of the signature's own that are passed by position.
        named: parameters that are passed by name.
        required: those without a default.
        rest: whether `**columns` takes the remaining columns.
        judges: the column whose text replaces both the response and the conversation of an episode, which includes tool
            results: the policy's turns (`response`) or its last turn (`last_turn`). None: nothing is replaced.
    """

    kind: str
    positional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    rest: bool = False
    judges: str | None = None

    @property
    def by_row(self) -> bool:
        """Whether it is called once per sample."""
        return self.kind == "verl"

    @property
    def columns(self) -> tuple[str, ...]:
        """See `verl.rewards.source.columns_read`. Columns of the data are known once rows arrive."""
        read = ("response", *(("prompt?", "messages?") if self.kind in ("pairs", "trl", "openrlhf") else ()))
        read = (*read, *(("response_tokens?", "conversation?") if self.kind == "trl" else ()))
        read = (*read, *([f"{self.judges}?"] if self.judges else []))
        further = [name for name in self.named if name not in _OWN[self.kind]]
        user = [f"{name}?" for name in further if name not in SCHEMA]
        return (*read, *user, *(["*"] if further or self.rest or self.kind == "openrlhf" else []))

    def check(self, name: str, row: Row) -> None:
        """Raises RewardError if a column that the function `name` (a reward or a metric) needs is missing."""
        if "response" not in row:
            raise RewardError(f"{name}: the samples have no column 'response', the decoded text")
        for column in sorted(self.required - _OWN[self.kind]):
            if not _has(row, column):
                hint = nearest(column, {*user_columns(row), *_OWN[self.kind]} - {"texts"})
                raise RewardError(f"{name} needs a column '{column}', which the data do not have: {hint}")

    def arguments(self, rows: Sequence[Row]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments of a call on these samples."""
        if self.judges:  # of an episode what the policy wrote, not its conversation with the results of tools
            texts = [row["response"] if (text := row.get(self.judges)) is None else text for row in rows]
            rows = [{**row, "response": text, "conversation": None} for row, text in zip(rows, texts, strict=True)]
        if self.by_row:
            row = rows[0]
            known = {"solution_str": row["response"] or "", "extra_info": cell(row, "extra_info") or {}}
            return [], {k: known[k] if k in known else cell(row, k) for k in self.named if k in known or _has(row, k)}
        values = _own_values(self.kind, rows)
        names = [name for name in self.named if name in values or _has(rows[0], name)]
        if self.rest:
            names += [name for name in (*values, *user_columns(rows[0])) if name not in names]
        columns = {name: values[name] if name in values else [cell(row, name) for row in rows] for name in names}
        return [values[role] for role in self.positional], columns


def recognise(function: Callable[..., Any]) -> Signature:
    """The signature of a function.

    Raises:
        ConfigError: its signature is unknown, or names one sample where it would get lists of several.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # compiled code may have no signature
        return Signature("texts", ("texts",))
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    listed = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names = [p.name for p in listed]
    named = tuple(p.name for p in listed if p.kind is not p.POSITIONAL_ONLY)
    needed = frozenset(p.name for p in listed if p.default is p.empty)
    singular = [name for name in names if name in needed and name in _PLURALS]
    if "solution_str" not in names and (len(singular) > 1 or names[:1] in (["prompt"], ["query"])):
        renamed = ", ".join(_PLURALS.get(name, name) for name in names)
        raise ConfigError(
            f"the reward function {name_of(function)}({', '.join(names)}) names one sample, and functions get lists of "
            f"several: did you mean {name_of(function)}({renamed}), which returns a list? Only "
            "f(data_source, solution_str, ground_truth, extra_info) is called on each sample by itself"
        )
    if OF_TRL & {*names}:
        return Signature("trl", (), named, needed, rest)
    if "queries" in names or "solution_str" in names:
        return Signature("openrlhf" if "queries" in names else "verl", (), named, needed)
    first = next((name for name in names if name in needed and name != "prompts"), None)
    leading = names[: 2 if {*names[:2]} == {first, "prompts"} else 1]
    if first in leading:
        kind, role = ("pairs", "responses") if len(leading) == 2 else ("texts", "texts")
        roles = tuple(name if name == "prompts" else role for name in leading)
        return Signature(kind, roles, tuple(name for name in named if name not in leading), needed - {*leading})
    raise ConfigError(
        f"the reward function {name_of(function)}({', '.join(names)}) has none of the known signatures: f(texts); "
        "f(responses, prompts); f(prompts, completions, **columns); f(queries, prompts, labels); "
        "f(data_source, solution_str, ground_truth, extra_info)"
    )


def user_columns(row: Row) -> list[str]:
    """The data set's own columns, under their own names."""
    names = [name for name in row if name not in SCHEMA and not name.startswith("reward/")]
    return [name.removeprefix(_USER) for name in names]


def name_of(function: Callable[..., Any]) -> str:
    while hasattr(function, "func"):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _own_values(kind: str, rows: Sequence[Row]) -> dict[str, Any]:
    texts = [row["response"] or "" for row in rows]
    if kind == "texts":
        return {"texts": texts}
    chats = [json.loads(row["messages"]) if row.get("messages") is not None else None for row in rows]
    prompts = [row.get("prompt") if chat is None else chat for chat, row in zip(chats, rows, strict=True)]
    if kind == "pairs":
        return {"responses": texts, "prompts": prompts}
    if kind == "openrlhf":
        before = [
            "".join(f"{content_text(part)}\n" for part in prompt) if isinstance(prompt, list) else str(prompt or "")
            for prompt in prompts
        ]
        queries = [prompt + text for prompt, text in zip(before, texts, strict=True)]
        labels = [next((cell(row, name) for name in _LABELS if _has(row, name)), None) for row in rows]
        return {"queries": queries, "prompts": before, "labels": labels}
    completions: list[Any] = []
    for chat, text, row in zip(chats, texts, rows, strict=True):
        # Of an episode the messages behind its prompt, those of the tools too; a text was the user's message.
        turns = [] if row.get("conversation") is None else _conversation(row)[len(chat or "?") :]
        completions.append(turns or (text if chat is None else [{"role": "assistant", "content": text}]))
    ids = [row.get("response_tokens") for row in rows]
    return {"prompts": prompts, "completions": completions, "completion_ids": ids}


def _conversation(row: Row) -> list[Any]:
    """Its messages, as far as they are known."""
    if row.get("conversation") is not None:
        return list(json.loads(row["conversation"]))
    chat = row.get("messages")
    before = json.loads(chat) if chat is not None else [{"role": "user", "content": row.get("prompt") or ""}]
    return [*before, {"role": "assistant", "content": row["response"] or ""}]


def _has(row: Row, name: str) -> bool:
    if name in _CHATS or _USER + name in row or (name in row and (name not in SCHEMA or name == "task")):
        return True
    return name == "extra_info" or (name == "ground_truth" and name in (row.get("reward_model") or {}))


def cell(row: Row, name: str) -> Any:
    """The value of a row in a column of the data, or None."""
    if _USER + name in row:
        return row[_USER + name]
    if name == "messages":
        return _conversation(row)
    if name == "trajectories":
        if name in row:
            return json.loads(row[name])
        said = {"name": row.get("trajectory"), "reward": row.get("trajectory_reward")}
        return [{**said, "messages": _conversation(row), "response": row["response"] or ""}]
    if name == "ground_truth" and name not in row:
        return (row.get("reward_model") or {}).get(name)
    return row.get(name)

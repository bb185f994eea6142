"""Recorded data for offline training: preference pairs, labelled responses, demonstrations, past experience.

Recognised by their columns (TRL's and verl's names; a response is a text or messages):

    pairs           `chosen` and `rejected`, with `prompt` or with a common beginning
    labels          `prompt`, `completion` or `response`, and `label`
    demonstrations  `prompt` and `completion` or `response`; `messages` (with `tools`) that end with the assistant, of
                    which every turn of the assistant is trained; or `text`, all of which is
    experience      `prompt_tokens` and `response_tokens`, as a run records it

ShareGPT's and Alpaca's rows are read as well (`verl.data.forms`). Where there is no `prompt`, a `question` or `problem`
takes its place. All become one `Batch`; a pair is a group of two rows, the chosen one (label 1) before the rejected one
(label 0). A reply of a chat is trained as the template writes
it, with its `tool_calls` or `reasoning_content`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import reduce
from itertools import count, filterfalse, takewhile
from operator import gt
from typing import Annotated, Any, ClassVar

from pydantic import Field

from verl._base.checked import checked
from verl._base.record import Count
from verl.batch import COMPUTED, Batch
from verl.data.chat import TEMPLATE_COLUMNS, ChatTokenizer
from verl.data.cursor import Cursor, Resumable
from verl.data.files import digest, is_files, named, recorded_files, rows_by_file
from verl.data.forms import chat_of, readable_row, usual_row
from verl.data.prompts import PromptForm, chat_json, content_text, is_messages, to_batch
from verl.data.tokenize import Encoded, PromptTokenizer, Truncation, encode_row, naming
from verl.errors import ConfigError, DataError, shown

_RESPONSES = ("completion", "response")
#: In the place of a prompt, beside responses that have none.
_QUESTIONS = ("question", "problem")
#: What data sets call a prompt that is put together from several columns: only their user knows how.
_PARTS_OF_PROMPTS = ("instruction", "input", "query", "context", "history")
_KINDS = (
    "pairs (chosen, rejected), labels (prompt, completion or response, label), demonstrations (prompt, completion or "
    "response; messages that end with the assistant; or text), experience (prompt_tokens, response_tokens)"
)


class OfflineDatasetLoader(Resumable):
    """Offline data as a whole (`batch`) and in batches of whole groups without end, resumable exactly.

    Args:
        source: a path or a list of paths (`rows_by_file`), or a list or data set of mappings.
        tokenizer: adds `prompt_tokens`, `response_tokens` and `response_mask`; `tokenize` does that later.
        batch_size: groups in a batch that iteration gives (a pair is one group).
        system_prompt: starts each chat without one.
        chat: a prompt that is a text becomes a chat's user message.
        max_prompt_length, truncation: as for prompts; a dropped prompt takes its whole group along.
        max_response_length: longer responses lose their end, and are counted in `counts`.
        max_length: of prompt and response together: a longer response loses its end likewise, and a group with a prompt
            that leaves it no room is dropped.
        columns: what your data call a column of the forms above, such as {"prompt": "input", "chosen": "better"};
            "a.b" is the part b of a column a that holds mappings.

    `kind` is "pairs", "labels", "demonstrations" or "experience".

    Raises:
        DataError: no rows, or a row is not of the kind of the first, or a pair of equal responses; the message has its
            number.
    """

    #: What walks through the groups.
    cursor: ClassVar[type[Cursor]] = Cursor
    #: Whether a pair of equal responses is an error, and experience keeps the tokens that it has.
    refuses_equal_pairs: ClassVar[bool] = True
    keeps_tokens: ClassVar[bool] = True

    @checked
    def __init__(
        self,
        source: Any,
        tokenizer: Any = None,
        *,
        batch_size: Count = 32,
        seed: int = 0,
        shuffle: bool = True,
        system_prompt: str | None = None,
        chat: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_length: Count | None = None,
        max_response_length: Count | None = None,
        max_length: Annotated[int, Field(ge=2)] | None = None,
        truncation: Truncation = "error",
        columns: Mapping[str, str] | None = None,
    ) -> None:
        if max_length is not None:
            if max_prompt_length is not None or truncation != "error":
                raise ConfigError("OfflineDatasetLoader.max_length: goes without max_prompt_length and truncation")
            max_prompt_length, truncation = max_length - 1, "drop"
        self.max_length = max_length
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.max_prompt_length, self.max_response_length = max_prompt_length, max_response_length
        self.truncation: Truncation = truncation
        self.counts: Counter[str] = Counter()
        self.name = named(source)
        form = PromptForm(system_prompt=system_prompt, chat=chat, chat_template_kwargs=chat_template_kwargs)
        self.kind, self._rows = _read(source, self.name, form, columns or {})
        self._digest = digest(self._rows.rows())
        self._begin(self._rows)
        self._refuse_equal_pairs("response", "reply")
        if tokenizer is not None:
            self.tokenize(tokenizer)

    def tokenize(self, tokenizer: Any) -> None:
        """Add the token columns, except to experience, which has them. Iteration starts over."""
        if self.kind == "experience" and self.keeps_tokens:
            return
        encode = PromptTokenizer(tokenizer, max_prompt_length=self.max_prompt_length, truncation=self.truncation)
        names = ("prompt_tokens", "response_tokens", "response_mask")
        columns = map(list, zip(*self._encoded(ChatTokenizer(tokenizer)), strict=True))
        kept = encode(self._rows.drop(names).add(dict(zip(names, columns, strict=True))))
        if not len(kept):
            raise DataError(f"every prompt is longer than {self.max_prompt_length} tokens; none is left")
        longest, whole = self.max_response_length or sys.maxsize, self.max_length or sys.maxsize
        limits = [min(longest, whole - length) for length in kept.lengths("prompt_tokens")]
        cut = {name: [each[:limit] for each, limit in zip(kept[name], limits, strict=True)] for name in names[1:]}
        self.counts = encode.counts
        self.counts["responses_truncated"] = sum(map(gt, kept.lengths("response_tokens"), limits))
        self._begin(kept.drop(cut).add(cut))
        self._refuse_equal_pairs("response_tokens")

    def _refuse_equal_pairs(self, *columns: str) -> None:
        """Raises DataError: the chosen response of a pair is also the rejected one, as text or once it is cut."""
        if self.kind != "pairs" or not self.refuses_equal_pairs:
            return
        values = [self.batch[name] for name in columns if name in self.batch]
        equal = [
            self.batch["group"][chosen]
            for chosen, rejected in self.batch.group_indices()
            if all(of[chosen] == of[rejected] for of in values)
        ]
        if equal:
            cut = ", up to the length at which they are cut" if "response_tokens" in columns else ""
            raise DataError(
                f"{self.name}, row {equal[0]}: chosen and rejected are the same{cut} (so in {len(equal)} of "
                f"{len(self._rows) // 2} pairs): nothing can be learned from such rows, leave them out"
            )

    def _encoded(self, chat: ChatTokenizer) -> list[Encoded]:
        """Each row's prompt and response as tokens, and which of the response are trained."""
        encoded = []
        names = ("group", "prompt", "messages", "prompt_tokens", "turns", "response", "reply", *TEMPLATE_COLUMNS)
        for row in self._rows.select(names).rows():
            with naming(f"{self.name}, row {row['group']}"):
                encoded.append(encode_row(chat, row))
        return encoded

    def __len__(self) -> int:
        """Groups in an epoch."""
        return len(self._groups)

    def take(self, count: int) -> Batch:
        """The next `count` groups, as `next` would give them."""
        visits = self._walk.take(count)
        rows = [(epoch, row) for epoch, group in visits for row in self._groups[group]]
        batch = self.batch.take([row for _, row in rows])
        # A group that two epochs bring into one batch must not become a group of four.
        names = {
            column: [f"e{epoch}.{name}" for (epoch, _), name in zip(rows, batch[column], strict=True)]
            for column in ("id", "group")
        }
        return batch.drop(names).add(names)

    def _begin(self, batch: Batch) -> None:
        self.batch, self._groups = batch, batch.group_indices()
        identity = {"groups": len(self), "kind": self.kind, "digest": self._digest}
        self._walk = self.cursor(len(self), seed=self.seed, shuffle=self.shuffle, name=self.name, data=identity)


def _rows(kind: str, form: PromptForm, fields: dict[str, Any], number: int, where: str) -> list[dict[str, Any]]:
    """The rows that one row of the data becomes."""
    if kind == "experience":
        return [fields]
    if kind == "pairs":
        chosen, rejected = fields.pop("chosen"), fields.pop("rejected")
        prompt = fields.pop("prompt", None)
        parts = [name for name in _PARTS_OF_PROMPTS if name in fields]
        if prompt is None and parts and isinstance(chosen, str):
            raise DataError(
                f"{where} has no prompt, and {' and '.join(parts)} beside the replies: what both of these begin "
                "with is not taken for it; make a column 'prompt'"
            )
        prompt, (chosen, rejected) = _split_pair(prompt, chosen, rejected, where)
        shared = {"group": str(number), **form.row({"prompt": prompt, **fields}, where)}
        return [
            {"id": f"{number}/{i}", **shared, **_response(text, shared, where), "label": label}
            for i, (text, label) in enumerate(((chosen, 1.0), (rejected, 0.0)))
        ]
    row: dict[str, Any] = {"id": str(number), "group": str(number)}
    if kind == "labels":
        label = fields.pop("label")
        if label not in (True, False):
            raise DataError(f"{where}: label is true or false (1 or 0), not {shown(label)}")
        row["label"] = float(label)
    replies = [name for name in _RESPONSES if name in fields]
    if "prompt" in fields and replies:
        response = fields.pop(replies[0])
    elif "messages" in fields:
        messages = fields.pop("messages")
        first = len(messages) - 1
        if kind == "demonstrations":  # every turn of the assistant is trained
            first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
        if not first:
            raise DataError(f"{where}: the chat begins with the assistant: put what it answers before that")
        fields["prompt"], response = messages[:first], messages[first:]
    else:
        text = fields.pop("text")
        return [{**row, **fields, "response": text}]
    prompted = form.row(fields, where)
    return [{**row, **prompted, **_response(response, prompted, where)}]


def _read(source: Any, name: str, form: PromptForm, columns: Mapping[str, str]) -> tuple[str, Batch]:
    if is_files(source) and (recorded := recorded_files(source)):  # Parquet keeps its Arrow types
        batches = [Batch.from_parquet(file) for file in recorded]
        numbers = [number for number, batch in enumerate(batches) for _ in range(len(batch))]
        return "experience", _named(Batch.concat(batches), numbers)
    kind, rows, files = None, [], []
    for number, (file, value) in enumerate(rows_by_file(source)):
        where = f"{name}, row {number}"
        value = _renamed(value, columns, where)
        fields = _fields(value, where)
        of_row = _kind(fields)
        kind = kind or of_row
        if kind is None:
            raise DataError(f"{name}: columns {sorted(value)} are none of: {_KINDS}")
        if of_row != kind:
            raise DataError(f"{where} is no row of {kind} like those before it: it has values in {sorted(fields)}")
        rows += _rows(kind, form, fields, number, where)
        files.append(file)
    if kind is None:
        raise DataError(f"{name}: the data set is empty")
    batch = to_batch(rows, name)
    return kind, _named(batch, files) if kind == "experience" else batch


def _named(batch: Batch, files: Sequence[Hashable]) -> Batch:
    """Experience with an id and a group in each row: a row without one gets a number that no other row has. Columns
    computed by the recording models are dropped, and so is the version of the policy, which counts their updates."""
    named = {}
    for column in ("id", "group"):
        saved = batch[column] if column in batch else [None] * len(batch)
        names = _apart(saved, files)
        free = filterfalse(set(names).__contains__, map(str, count()))
        names = [next(free) if name is None else name for name in names]
        if names != saved:
            named[column] = names
    return batch.drop([*named, "policy_version", "policy_id", *COMPUTED]).add(named)


def _apart(names: list[str | None], files: Sequence[Hashable]) -> list[str | None]:
    """Names of which no two files have the same. Every actor's first groups are called alike, so a name that several
    files have begins with the file's number."""
    numbers = {file: number for number, file in enumerate(dict.fromkeys(files))}
    while True:
        pairs = set(zip(names, files, strict=True))
        counts = Counter(name for name, _ in pairs if name is not None)
        shared: set[str | None] = {name for name, times in counts.items() if times > 1}
        if not shared:
            return names
        owned = zip(names, files, strict=True)
        names = [f"{numbers[file]}.{name}" if name in shared else name for name, file in owned]


def _kind(fields: Mapping[str, Any]) -> str | None:
    if {"prompt_tokens", "response_tokens"} <= fields.keys():
        return "experience"
    if {"chosen", "rejected"} <= fields.keys():
        return "pairs"
    messages: Any = fields.get("messages")
    is_answered = is_messages(messages) and len(messages) > 1 and messages[-1]["role"] == "assistant"
    if is_answered or ("prompt" in fields and not fields.keys().isdisjoint(_RESPONSES)):
        return "labels" if "label" in fields else "demonstrations"
    is_text = isinstance(fields.get("text"), str) and not fields.keys() & {"prompt", "messages", *_RESPONSES}
    return "demonstrations" if is_text else None


def _renamed(row: Any, columns: Mapping[str, str], where: str) -> Any:
    """A row under the names of the forms.

    Raises:
        DataError: it lacks a column that is named.
    """
    if not columns or not isinstance(row, Mapping):
        return row
    renamed = {name: value for name, value in row.items() if name not in columns.values()}
    for ours, name in columns.items():
        try:
            # A column, or, by its path, a part of one that holds mappings.
            renamed[ours] = row[name] if name in row else reduce(lambda of, part: of[part], name.split("."), row)
        except (KeyError, TypeError):
            columns_there = sorted(map(str, row))
            raise DataError(f"{where}: there is no column '{name}' (data.columns): it has {columns_there}") from None
    return renamed


def _fields(value: Any, where: str) -> dict[str, Any]:
    """The columns of a row that it has a value in, under their usual names."""
    if not isinstance(value, Mapping):
        raise DataError(
            f"{where} is a {type(value).__name__}, not a mapping of columns such as an OfflineDatasetLoader takes"
        )
    fields = {name: item for name, item in readable_row(value, where).items() if item is not None}
    for name in fields.keys() & {*_RESPONSES, "chosen", "rejected"}:
        fields[name] = chat_of(fields[name], f"{where}: column '{name}'")
    fields = usual_row(fields, where)
    has = fields.keys()
    replies = {"chosen", "rejected"} <= has or ("messages" not in has and not has.isdisjoint(_RESPONSES))
    question = next((name for name in _QUESTIONS if name in has), None)
    if replies and question is not None and not has & {"prompt", "prompt_tokens"}:
        fields["prompt"] = fields.pop(question)
    return fields


def _split_pair(prompt: Any, chosen: Any, rejected: Any, where: str) -> tuple[Any, tuple[Any, Any]]:
    """Prompt and responses of a pair that may repeat the prompt in both, or have it only there."""
    if is_messages(chosen) and is_messages(rejected):
        if chosen[0]["role"] == "assistant":
            if prompt is None:
                raise DataError(f"{where} has no prompt: neither a column of that name nor messages before the reply")
            return prompt, (chosen, rejected)
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        # A prompt that has more before what both repeat, such as a system message, is the whole of it.
        is_whole = is_messages(prompt) and shared and prompt[-shared:] == chosen[:shared]
        return prompt if is_whole else chosen[:shared], (chosen[shared:], rejected[shared:])
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            is_long = isinstance(prompt, str) and " " in prompt.strip()
            if is_long and chosen.startswith(prompt) and rejected.startswith(prompt):
                raise DataError(
                    f"{where}: chosen and rejected begin with the prompt, which would stand there twice: take it off "
                    "them, or leave out the column 'prompt'"
                )
            return prompt, (chosen, rejected)
        # A word is not divided: the prompt ends before the last space of what both begin with.
        both = takewhile(lambda signs: signs[0] == signs[1], zip(chosen, rejected, strict=False))
        end = max((index for index, (sign, _) in enumerate(both) if sign.isspace()), default=0)
        return chosen[:end], (chosen[end:], rejected[end:])
    raise DataError(f"{where}: chosen and rejected must both be texts or both be messages")


def _response(value: Any, prompted: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The reply's text, behind the prompt of that row; the whole message as JSON (`reply`) if there is more to it."""
    if isinstance(value, str):
        return {"response": value}
    if not is_messages(value):
        raise DataError(f"{where}: the response is neither a text nor messages")
    roles = [message["role"] for message in value]
    if len(value) > 1 and "messages" in prompted and roles[0] == roles[-1] == "assistant":  # between them tools answer
        return {"response": content_text(value[-1]), "turns": chat_json(value, where)}
    if roles != ["assistant"]:
        raise DataError(
            f"{where}: the response must be one message of the assistant, or several of a chat that begin and end with "
            "one; put what comes before it into the prompt"
        )
    text = content_text(value[0])
    message = {key: item for key, item in value[0].items() if item is not None}
    more = [key for key in message if key not in ("role", "content")]
    if "messages" not in prompted and more:
        raise DataError(
            f"{where}: the response has {', '.join(more)} besides its content, which only a chat template writes: "
            "make the prompt messages, or take them out"
        )
    if message.get("content") == text and not more:
        return {"response": text}
    return {"response": text, "reply": chat_json([message], where)[1:-1]}

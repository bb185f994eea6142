"""Prompts to token ids: a string as it is, messages through the chat template, ids as they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, overload

from verl.batch import Batch
from verl.data.prompts import PromptDataset, PromptStream, load_prompts
from verl.errors import ConfigError, DataError

Truncation = Literal["left", "right", "drop", "error"]


class PromptTokenizer:
    """Adds `prompt_tokens` to rows and applies a policy to prompts of more than `max_prompt_length` tokens.

    Args:
        truncation: "left" cuts the beginning off and keeps the end, "right" cuts the end off, "drop" leaves the row
            out, "error" refuses the data.
        tools: JSON schemas that the chat template shows.

    `counts` sums up what was done: "rows", "truncated", "dropped", and "longest" (tokens, before the policy).
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_prompt_length: int | None = None,
        truncation: Truncation = "error",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if truncation not in get_args(Truncation):
            raise ConfigError(f"truncation is one of {', '.join(get_args(Truncation))}, not '{truncation}'")
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ConfigError(f"max_prompt_length must be at least 1, not {max_prompt_length}")
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.truncation = truncation
        self.tools = tools
        self.counts: Counter[str] = Counter(rows=0, truncated=0, dropped=0, longest=0)

    def __call__(self, batch: Batch, first_row: int = 0) -> Batch:
        """The rows with `prompt_tokens`; those that the policy drops are gone. Rows are named from `first_row` on.

        Raises:
            DataError: a prompt is empty, over-long under the policy "error", or there is no chat template.
        """
        tokens = encode_prompts(self.tokenizer, batch, first_row, self.tools)
        limit = self.max_prompt_length
        self.counts["rows"] += len(tokens)
        self.counts["longest"] = max([self.counts["longest"], *map(len, tokens)])
        long = [row for row, ids in enumerate(tokens) if limit is not None and len(ids) > limit]
        keep = range(len(tokens))
        if long and limit is not None:
            if self.truncation == "error":
                raise DataError(
                    f"{len(long)} of {len(tokens)} prompts are longer than {limit} tokens, the first in row "
                    f"{first_row + long[0]} with {len(tokens[long[0]])}: raise max_prompt_length, or set truncation "
                    "to left, right or drop"
                )
            if self.truncation == "drop":
                self.counts["dropped"] += len(long)
                keep = sorted(set(keep).difference(long))  # type: ignore[assignment]
            else:
                self.counts["truncated"] += len(long)
                cut = slice(-limit, None) if self.truncation == "left" else slice(limit)
                for row in long:
                    tokens[row] = tokens[row][cut]
        bare = batch.drop(["prompt_tokens"]).take(keep)
        return bare.add({"prompt_tokens": [tokens[row] for row in keep]})


@overload
def tokenize_prompts(data: PromptDataset, tokenizer: Any, **options: Any) -> tuple[PromptDataset, Counter[str]]: ...


@overload
def tokenize_prompts(data: PromptStream, tokenizer: Any, **options: Any) -> tuple[PromptStream, Counter[str]]: ...


def tokenize_prompts(
    data: PromptDataset | PromptStream, tokenizer: Any, **options: Any
) -> tuple[PromptDataset | PromptStream, Counter[str]]:
    """The prompts with `prompt_tokens`, and the counts of `PromptTokenizer` (of a stream: they grow as it is read),
    which the options are those of.

    Raises:
        DataError: see `PromptTokenizer`; or no prompt is left.
    """
    encode = PromptTokenizer(tokenizer, **options)
    if isinstance(data, PromptStream):
        return PromptStream(data.source, data.form, data.name, encode), encode.counts
    try:
        batch = encode(data.batch)
    except DataError as error:
        raise DataError(f"{data.name}: {error}") from error
    if not len(batch):
        raise DataError(f"{data.name}: every prompt is longer than {encode.max_prompt_length} tokens; none is left")
    return PromptDataset(batch, data.name), encode.counts


def to_prompts(tokenizer: Any, prompts: Any, tools: Sequence[Mapping[str, Any]] = ()) -> Batch:
    """Prompts with `prompt_tokens`; one that was given as token ids has its text as `prompt`, for rewards to read.

    Args:
        prompts: a `Batch`, one text, or a list or data set that `load_prompts` takes.

    Raises:
        DataError: see `PromptTokenizer` and `load_prompts`.
    """
    listed = [prompts] if isinstance(prompts, str) else prompts  # a lone text is a prompt, not the path of a file
    batch = listed if isinstance(listed, Batch) else load_prompts(listed).batch
    if "prompt_tokens" not in batch or None in batch["prompt_tokens"]:
        batch = PromptTokenizer(tokenizer, tools=tools)(batch)
    given = [batch[name] for name in ("prompt", "messages") if name in batch]
    missing = [row for row in range(len(batch)) if all(column[row] is None for column in given)]
    if not missing:
        return batch
    texts = batch["prompt"] if "prompt" in batch else [None] * len(batch)
    tokens, begin = batch["prompt_tokens"], list(tokenizer("")["input_ids"])
    for row in missing:
        # Special tokens are spelt out, but those with which the tokenizer begins every text: it would add them again.
        ids = tokens[row][len(begin) :] if tokens[row][: len(begin)] == begin else tokens[row]
        texts[row] = tokenizer.decode([token for token in ids if token >= 0])  # the engine refuses the others by name
    return batch.drop(["prompt"]).add({"prompt": texts})


def encode_prompts(
    tokenizer: Any, batch: Batch, first_row: int = 0, tools: Sequence[Mapping[str, Any]] = ()
) -> list[list[int]]:
    """Token ids of each row's prompt.

    Raises:
        DataError: a prompt is empty (by row), or there is no chat template.
    """
    rows = batch.select(("prompt_tokens", "prompt", "messages")).rows()
    tokens: list[list[int]] = []
    plain: dict[int, str] = {}
    rendered: dict[int, str] = {}
    for row, fields in enumerate(rows):
        tokens.append(fields.get("prompt_tokens") or [])
        if fields.get("prompt_tokens") is None and fields.get("prompt") is not None:
            plain[row] = fields["prompt"]
        elif fields.get("prompt_tokens") is None and fields.get("messages") is not None:
            rendered[row] = render(tokenizer, json.loads(fields["messages"]), tools=tools)
    for texts, special_tokens in ((plain, True), (rendered, False)):
        if texts:
            encoded = tokenizer(list(texts.values()), add_special_tokens=special_tokens)["input_ids"]
            for row, ids in zip(texts, encoded, strict=True):
                tokens[row] = list(ids)
    for row, ids in enumerate(tokens):
        if not ids or plain.get(row) == "":
            raise DataError(f"row {first_row + row} has an empty prompt: remove the row")
    return tokens


def render(
    tokenizer: Any, messages: Sequence[Any], *, reply: bool = True, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """A chat as the template writes it, up to where the reply begins; a last message that the assistant has begun
    goes on. With `reply` false: the finished chat, nothing added.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the chat.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the prompts are chats, but the tokenizer has no chat template: give plain text, or another tokenizer"
        )
    begun = reply and messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=reply and not begun,
            continue_final_message=begun,
        )
    except Exception as error:  # a template is a program of its own: it raises what its author chose
        raise DataError(f"the chat template cannot render {str(messages)[:200]}: {error}") from error
    return str(text)


def encode_reply(tokenizer: Any, reply: str | Mapping[str, Any], messages: Sequence[Any] | None = None) -> list[int]:
    """Tokens of a reply and its end: as the chat template writes it after `messages`, else the text and EOS.

    Args:
        reply: its text; or a whole message of the assistant, with what only a template writes (`tool_calls`).

    Raises:
        DataError: the template does not write a whole message behind `messages`, or not its calls.
    """
    eos = tokenizer.eos_token_id
    message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    if messages is not None:
        before = render(tokenizer, messages)
        whole = render(tokenizer, [*messages, message], reply=False)
        if message.get("tool_calls"):
            silent = {name: item for name, item in message.items() if name != "tool_calls"}
            if whole == render(tokenizer, [*messages, silent], reply=False):
                raise DataError("the chat template does not write tool_calls: put the calls into the content")
        if whole.startswith(before):
            tokens = list(tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"])
            # What the template writes after the end of the turn is never generated.
            return tokens[: len(tokens) - tokens[::-1].index(eos)] if eos in tokens else tokens
    if not isinstance(reply, str):
        raise DataError(f"the chat template does not write this reply behind its prompt: {str(reply)[:200]}")
    tokens = list(tokenizer(reply, add_special_tokens=False)["input_ids"])
    return tokens if eos is None or tokens[-1:] == [eos] else [*tokens, eos]


def encode_turns(
    tokenizer: Any, messages: Sequence[Any], turns: Sequence[Any], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[int], list[int], list[int]]:
    """Tokens of a chat in which every turn of the assistant is trained.

    Args:
        messages: before the first of these turns.
        turns: from there on; the last one is the assistant's.

    Returns:
        Prompt tokens; response tokens; and of these, 1 for what the assistant says and 0 for the rest.

    Raises:
        DataError: the template writes earlier turns otherwise once there are later ones.
    """
    chat, first = [*messages], render(tokenizer, messages, tools=tools)
    prompt = list(tokenizer(first, add_special_tokens=False)["input_ids"])
    written, response, mask = first, [], []
    for turn in turns:
        if turn["role"] == "assistant":
            before = render(tokenizer, chat, tools=tools)
            whole = render(tokenizer, [*chat, turn], reply=False, tools=tools)
            if not before.startswith(written) or not whole.startswith(before):
                raise DataError(
                    "the chat template writes earlier turns otherwise once there are later ones: make a row of each "
                    "turn of the assistant, with the chat before it as its prompt"
                )
            between = list(tokenizer(before[len(written) :], add_special_tokens=False)["input_ids"])
            reply, written = _until_end(tokenizer, whole, len(before))
            response += [*between, *reply]
            mask += [*[0] * len(between), *[1] * len(reply)]
        chat.append(turn)
    return prompt, response, mask


def _until_end(tokenizer: Any, text: str, start: int) -> tuple[list[int], str]:
    """Tokens of a reply that begins at `start`, up to the end of the turn; and the text up to there."""
    end, eos = len(text), tokenizer.eos_token
    if eos and (place := text.rfind(eos, start)) >= 0:
        end = place + len(eos)
    return list(tokenizer(text[start:end], add_special_tokens=False)["input_ids"]), text[:end]


def encode_text(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Tokens of a plain text and its end: the first one, which nothing predicts, and the others.

    Raises:
        DataError: the text is empty.
    """
    tokens, eos = list(tokenizer(text)["input_ids"]), tokenizer.eos_token_id
    if eos is not None and tokens[-1:] != [eos]:
        tokens.append(eos)
    if len(tokens) < 2:
        raise DataError("a text is empty: remove the row")
    return tokens[:1], tokens[1:]

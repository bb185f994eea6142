"""Prompts and replies to token ids: a string as it is, messages through the chat template, ids as they are.

A text is tokenised as a whole and its tokens are then divided between prompt and reply, so that they are the tokens of
that text: `decode(prompt + reply)` is a prefix of the template's text, and a reply ends with a token that stops
generation.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from verl._base.checked import checked
from verl._base.record import Count
from verl.batch import Batch
from verl.data.chat import TEMPLATE_COLUMNS, ChatTokenizer, template_inputs
from verl.data.forms import TRAINED
from verl.data.prompts import PromptDataset, PromptStream, content_text, load_prompts
from verl.data.text import spelled
from verl.errors import DataError

Truncation = Literal["left", "right", "drop", "error"]
#: A prompt, the response behind it, and which of its tokens are trained.
Encoded = tuple[list[int], list[int], list[int]]
#: Numbers that models computed for tokens behind the prompt that a sample was drawn with.
_OF_THE_PROMPT = ("rollout_log_probs", "log_probs", "old_log_probs", "ref_log_probs", "values", "cost_values")
PromptsT = TypeVar("PromptsT", PromptDataset, PromptStream)


@checked
@dataclass(eq=False, repr=False)
class PromptTokenizer:
    """Adds `prompt_tokens` to rows and applies a policy to prompts of more than `max_prompt_length` tokens.

    Args:
        truncation: "left" cuts the beginning off and keeps the end, "right" cuts the end off, "drop" leaves the row
            out, "error" refuses the data.
        tools: JSON schemas that the chat template shows.

    `counts` sums up what was done: "rows", "truncated", "dropped", and "longest" (tokens, before the policy).
    """

    tokenizer: Any
    _: KW_ONLY
    max_prompt_length: Count | None = None
    truncation: Truncation = "error"
    tools: Sequence[Mapping[str, Any]] = ()
    counts: Counter[str] = field(
        init=False, default_factory=partial(Counter, rows=0, truncated=0, dropped=0, longest=0)
    )

    def __call__(self, batch: Batch, first_row: int = 0) -> Batch:
        """The rows with `prompt_tokens`; those that the policy drops are gone. Rows are named from `first_row` on.

        Raises:
            DataError: a prompt is empty, over-long under the policy "error", or there is no chat template.
        """
        tokens = encode_prompts(self.tokenizer, batch, first_row, self.tools)
        limit = self.max_prompt_length or sys.maxsize
        self.counts["rows"] += len(tokens)
        self.counts["longest"] = max([self.counts["longest"], *map(len, tokens)])
        long = [row for row, ids in enumerate(tokens) if len(ids) > limit]
        if long and self.truncation == "error":
            raise DataError(
                f"{len(long)} of {len(tokens)} prompts are longer than {limit} tokens, the first in row "
                f"{first_row + long[0]} with {len(tokens[long[0]])}: raise max_prompt_length, or set truncation "
                "to left, right or drop"
            )
        drops, cut = self.truncation == "drop", slice(-limit, None) if self.truncation == "left" else slice(limit)
        self.counts["dropped" if drops else "truncated"] += len(long)
        batch = batch.drop(["prompt_tokens"]).add({"prompt_tokens": [ids[cut] for ids in tokens]})
        return batch.filter([len(ids) <= limit for ids in tokens]) if drops else batch


def tokenize_prompts(data: PromptsT, tokenizer: Any, **options: Any) -> tuple[PromptsT, Counter[str]]:
    """The prompts with `prompt_tokens`, and the counts of the `PromptTokenizer` that the options make (for a stream
    they grow as it is read).

    Raises:
        DataError: see `PromptTokenizer`; or no prompt is left.
    """
    encode = PromptTokenizer(tokenizer, **options)
    if isinstance(data, PromptStream):
        return replace(data, prepare=encode), encode.counts
    with naming(data.name):
        batch = encode(data.batch)
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
    written = [batch[name] for name in ("prompt", "messages") if name in batch]
    missing = [row for row in range(len(batch)) if all(column[row] is None for column in written)]
    if not missing:
        return batch
    texts = batch["prompt"] if "prompt" in batch else [None] * len(batch)
    tokens, begin = batch["prompt_tokens"], ChatTokenizer(tokenizer).around[0]
    for row in missing:
        # Special tokens are spelt out, but those with which the tokenizer begins every text: it would add them again.
        ids = tokens[row][len(begin) :] if tokens[row][: len(begin)] == begin else tokens[row]
        texts[row] = spelled(tokenizer, [token for token in ids if token >= 0])  # the engine refuses others by name
    return batch.drop(["prompt"]).add({"prompt": texts})


@dataclass(eq=False)
class KnownPrompts:
    """`to_prompts`, whose latest results are kept: for problems that are evaluated again and again. Rows are compared
    by content, so that a list which has changed is tokenised again."""

    _latest: deque[tuple[tuple[Any, ...], Batch, Batch]] = field(default_factory=lambda: deque(maxlen=4))

    def __call__(self, tokenizer: Any, prompts: Any, tools: Sequence[Mapping[str, Any]] = ()) -> Batch:
        """Raises DataError as `to_prompts`."""
        if not isinstance(prompts, Batch):
            prompts = load_prompts([prompts] if isinstance(prompts, str) else prompts).batch
        written_with = (tokenizer, getattr(tokenizer, "chat_template", None), [*tools])
        for how, rows, tokenized in self._latest:
            if how == written_with and rows == prompts:
                return tokenized
        tokenized = to_prompts(tokenizer, prompts, tools)
        self._latest.append((written_with, prompts, tokenized))
        return tokenized


def encode_prompts(
    tokenizer: Any, batch: Batch, first_row: int = 0, tools: Sequence[Mapping[str, Any]] = ()
) -> list[list[int]]:
    """Token ids of each row's prompt: of a text behind the tokenizer's first tokens (BOS), of a chat as its template
    writes it with the row's `tools`, `documents` and `chat_template_kwargs`, up to where the reply begins.

    Raises:
        DataError: a prompt is empty, or the chat template does not write it (by row), or there is no template.
    """
    names = ("prompt_tokens", "prompt", "messages", *TEMPLATE_COLUMNS)
    rows, chat = batch.select(names).rows(), ChatTokenizer(tokenizer)
    tokens: list[list[int]] = []
    plain: dict[int, str] = {}
    rendered: dict[int, str] = {}
    for row, fields in enumerate(rows):
        tokens.append(fields.get("prompt_tokens") or [])
        if fields.get("prompt_tokens") is None and fields.get("prompt") is not None:
            plain[row] = fields["prompt"]
        elif fields.get("prompt_tokens") is None and fields.get("messages") is not None:
            with naming(f"row {first_row + row}"):
                rendered[row] = chat.render(json.loads(fields["messages"]), template_inputs(fields, tools))
    if texts := {**plain, **rendered}:
        encoded = tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
        for row, ids in zip(texts, map(list, encoded), strict=True):
            tokens[row] = _begun(chat, ids) if row in plain else ids
    for row, ids in enumerate(tokens):
        if not ids or plain.get(row) == "":
            raise DataError(f"row {first_row + row} has an empty prompt: remove the row")
    return tokens


def with_prefixes(tokenizer: Any, batch: Batch, prefixes: Sequence[str]) -> Batch:
    """The rows with these texts before their prompts, instead of their own. The policy alone reads
    them: rewards read `prompt` and `messages` without.

    `prompt_tokens` begin with the tokens of the text, behind those with which the tokenizer begins every text (BOS);
    the column `prefix_tokens` says which they are. Numbers of tokens behind another prompt (log-probs, values) are left
    out where a prompt of the batch changes.

    Args:
        batch: with `prompt_tokens`, and `prefix_tokens` if it has been here before.
        prefixes: one for each row.

    Raises:
        DataError: two texts have the same tokens, or a text has no tokens.
    """
    tokens_of = {text: list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in dict.fromkeys(prefixes)}
    text_of: dict[tuple[int, ...], str] = {}
    for text, tokens in tokens_of.items():
        if not tokens or (other := text_of.setdefault(tuple(tokens), text)) != text:
            what = f"no tokens for the prefix {text!r}" if not tokens else f"the same tokens for {other!r} and {text!r}"
            raise DataError(f"the tokenizer has {what}, so the policy cannot read it: write it with other words")
    begin = ChatTokenizer(tokenizer).around[0]
    former = batch["prefix_tokens"] if "prefix_tokens" in batch else [[]] * len(batch)
    wanted = [tokens_of[text] for text in prefixes]
    if former == wanted:
        return batch
    prompts = []
    for prompt, old, new in zip(batch["prompt_tokens"], former, wanted, strict=True):
        start = len(begin) if prompt[: len(begin)] == begin else 0
        prompts.append([*prompt[:start], *new, *prompt[start + len(old or ()) :]])
    rest = batch.drop(["prompt_tokens", "prefix_tokens", *_OF_THE_PROMPT])
    return rest.add({"prompt_tokens": prompts, "prefix_tokens": wanted})


def encode_plain(chat: ChatTokenizer, text: str, *, closed: bool = False) -> list[int]:
    """Tokens of a text after the tokenizer's first ones (BOS), once if the text begins with them itself; with
    `closed`, and its last ones (EOS), if it has such."""
    return [*_begun(chat, chat.encode(text)), *(chat.around[1] if closed else ())]


def encode_chat(
    chat: ChatTokenizer, messages: Sequence[Any], turns: Sequence[Any], inputs: Mapping[str, Any] | None = None
) -> Encoded:
    """Tokens of a chat in which the assistant's turns are trained, each up to the token that stops generation.

    Together they are a prefix of the rendered chat, and each turn follows the rendered prompt of that turn.

    Args:
        messages: before the first of these turns.
        turns: from there on; the last one is the assistant's. A text is a reply; it goes on with the last message if
            that is the assistant's, too.
        inputs: what the template reads besides, see `template_inputs`.

    Returns:
        Prompt tokens; response tokens; and for each of these 1 if the assistant says it (unless its `weight` or `train`
        is 0), else 0.

    Raises:
        DataError: the template writes a reply otherwise than its prompt begins it, leaves out a part, writes earlier
            turns otherwise once there are later ones, or ends one with no token that stops generation.
    """
    said, inputs = [*messages], inputs or {}
    pieces, trained, written = [], list[int](), ""
    for turn in turns:
        message = {"role": "assistant", "content": turn} if isinstance(turn, str) else turn
        if message["role"] == "assistant":
            begun = isinstance(turn, str) and said[-1]["role"] == "assistant"
            before = chat.render(said, inputs, begun=begun)
            if begun:
                start = said.pop()
                message = {**start, "content": content_text(start) + turn}
            whole = chat.render([*said, message], inputs, reply=False)
            _check_order(written, before, whole)
            chat.check_reply([*said, message], inputs, before[len(written) :], whole[len(written) :])
            end = chat.reply_end(whole, len(before), calls=bool(message.get("tool_calls")))
            pieces += [before[len(written) :], whole[len(before) : end]]
            written = whole[:end]
            trained += [0, _is_trained(message)]
        said.append(message)
    prompt, *behind = _pieces(chat, pieces)
    mask = [bit for bit, tokens in zip(trained[1:], behind, strict=True) for _ in tokens]
    if not any(mask):
        raise DataError(f"no turn of the assistant is trained, as {' and '.join(TRAINED)} say: remove the row")
    return prompt, [token for tokens in behind for token in tokens], mask


def encode_row(chat: ChatTokenizer, row: Mapping[str, Any]) -> Encoded:
    """A row of recorded data as tokens, its response with an end: of a chat (see `encode_chat`), of a text behind a
    prompt, or of a text that is trained as a whole.

    Raises:
        DataError: the text is empty, or the tokenizer has no end.
    """
    if row.get("messages") is not None:
        reply = row["response"] if row.get("reply") is None else json.loads(row["reply"])
        turns = json.loads(row["turns"]) if row.get("turns") else [reply]
        return encode_chat(chat, json.loads(row["messages"]), turns, template_inputs(row))
    if row.get("prompt") is not None:
        before, behind = _pieces(chat, [row["prompt"], row["response"]])
        prompt, response = _begun(chat, before), _ended(chat, behind)
    elif row.get("prompt_tokens") is not None:
        prompt = row["prompt_tokens"]
        response = _ended(chat, encode_behind(chat, prompt, row["response"]))
    else:
        tokens = _ended(chat, encode_plain(chat, row["response"]))
        if not row["response"] or len(tokens) < 2:
            raise DataError("a text is empty: remove the row")
        prompt, response = tokens[:1], tokens[1:]  # nothing predicts the first one
    return prompt, response, [1] * len(response)


def _is_trained(message: Mapping[str, Any]) -> int:
    for name in TRAINED:
        if message.get(name) not in (None, 0, 1):
            raise DataError(f"{name} of a message is 0 or 1, not {message[name]!r:.40}")
    return int(all(message.get(name) in (None, 1) for name in TRAINED))


def _check_order(written: str, before: str, whole: str) -> None:
    """Raises DataError unless each of these renderings is the beginning of the next one."""
    if not before.startswith(written):
        raise DataError(
            "the chat template writes earlier turns otherwise once there are later ones: make a row of each turn of "
            "the assistant, with the chat before it as its prompt"
        )
    if not whole.startswith(before):
        pairs = enumerate(zip(before, whole, strict=False))
        same = next((index for index, (mine, other) in pairs if mine != other), len(whole))
        raise DataError(
            f"the chat template does not write this reply behind its prompt, which goes on with {before[same:][:40]!r} "
            f"where the finished chat has {whole[same:][:20]!r}: set the tokenizer's chat_template to one that writes "
            "both alike, or give prompt and reply as texts"
        )


def _pieces(chat: ChatTokenizer, pieces: Sequence[str]) -> list[list[int]]:
    """Tokens of each piece of a text, as the tokenizer writes the whole.

    Raises:
        DataError: the tokens are not the text, though the tokenizer can write it.
    """
    tokens_of: list[list[int]] = []
    context, known = "", list[int]()  # since the last token that never merges with others
    for piece in pieces:
        tokens_of.append(encode_behind(chat, known, piece, context))
        context, known = context + piece, [*known, *tokens_of[-1]]
        if known and known[-1] in chat.added:
            context, known = chat.added[known[-1]], known[-1:]
    text, tokens = "".join(pieces), [token for piece in tokens_of for token in piece]
    if spelled(chat.tokenizer, tokens) != text and spelled(chat.tokenizer, chat.encode(text)) == text:
        raise DataError(f"the tokenizer cannot write {pieces[-1][:40]!r} behind what stands before it")
    return tokens_of


def encode_behind(chat: ChatTokenizer, before: Sequence[int], piece: str, context: str | None = None) -> list[int]:
    """Tokens of a text that follows fixed tokens.

    A token that would be of both is divided, as it is in generation, which goes on behind the tokens of a prompt.

    Args:
        context: the text of the tokens `before`; None: as they are spelt out.
    """
    known = list(before)
    whole = chat.encode((spelled(chat.tokenizer, known) if context is None else context) + piece)
    if whole[: len(known)] == known:
        return whole[len(known) :]
    tokens, text = chat.encode(piece), spelled(chat.tokenizer, known) + piece
    if chat.added and spelled(chat.tokenizer, [*known, *tokens]) != text:
        # Some tokenizers begin each text with a space, but none behind a token that never merges.
        marked = chat.encode(next(iter(chat.added.values())) + piece)[1:]
        return marked if spelled(chat.tokenizer, [*known, *marked]) == text else tokens
    return tokens


def _begun(chat: ChatTokenizer, tokens: list[int]) -> list[int]:
    begin, _ = chat.around
    return tokens if tokens[: len(begin)] == begin else [*begin, *tokens]


def _ended(chat: ChatTokenizer, tokens: list[int]) -> list[int]:
    """The tokens with one that stops generation at their end."""
    if tokens and tokens[-1] in chat.added and tokens[-1] in chat.ends:
        return tokens
    if chat.tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no eos_token, so that nothing ends a response: set tokenizer.eos_token")
    return [*tokens, chat.tokenizer.eos_token_id]


@contextmanager
def naming(row: str) -> Iterator[None]:
    """Errors in here begin with the name of the row."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{row}: {error}") from error

"""The samples that a step learned from, as people read them: a table, and its file for each step."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl._base.durable import write_atomic
from verl.batch import Batch
from verl.data.prompts import content_text
from verl.dataflow.scores import left_out_words, without_baselines
from verl.report.reading import TOKENS

logger = logging.getLogger(__name__)

#: How many of a step a tracker is shown; the file has all.
SHOWN = 16
_TEXTS = (
    "id", "group", "task", "question", "prompt", "response", "finish", "ground_truth", "abstain_reason",
    "episode", "trajectory", "left_out", "calls_left_out",
)  # fmt: skip
Decode = Callable[..., Any]  # as tokenizers type it


def completions(samples: Mapping[str, Batch], prepared: Mapping[str, Batch], decode: Decode) -> pa.Table:
    """One row a sample of the policy, in the order of the samples.

    Args:
        samples: of each task.
        prepared: the same, with `advantages` ([float] a token) where the algorithm has any; without the rows it drops.
        decode: token ids to text.

    Returns:
        `id`, `group`, `task`, `question` (what the user says last in the prompt), `prompt` (as the model reads it),
        `response`, `finish`, `ground_truth`, `abstain_reason` (text), `reward`, its
        components (`reward/<name>`), `cost`, `advantage` (mean over the tokens that the policy wrote) (double), and
        `length` (tokens of the response). A column that the samples lack is null; components that no sample has are no
        columns.
        Of episodes also `episode`, `trajectory` (its name), `trajectory_reward` (its own), `left_out` (why the episode
        counts for nothing, in a word), `calls_left_out` (JSON: turns that are not trained, by reason), and `turns`:
        the conversation cut by author (`trained`: the policy), as `text` with its number of `tokens`.
        The first `SHOWN` samples of a task also have lists over the response's tokens: `tokens/text`, `tokens/mask`
        (1: the policy wrote it), `tokens/advantage`, `tokens/entropy` (-log p of the token, whose mean estimates the
        entropy), and `tokens/mismatch` (its log p for the trainer less that for the engine, for the same weights).
    """
    tables = [_table(name, without_baselines(batch), prepared.get(name), decode) for name, batch in samples.items()]
    return pa.concat_tables(tables, promote_options="default")


def _table(task: str, batch: Batch, prepared: Batch | None, decode: Decode) -> pa.Table:
    size = len(batch)
    columns: dict[str, list[Any]] = {name: batch[name] if name in batch else [None] * size for name in _TEXTS}
    columns["task"] = [task] * size
    text_of = cache(lambda prompt: decode([*prompt]))  # a group has one prompt
    columns["question"] = _questions(batch)
    columns["prompt"] = [text_of(tuple(tokens)) for tokens in batch["prompt_tokens"]]
    if "response" not in batch:
        columns["response"] = [decode(tokens) for tokens in batch["response_tokens"]]
    if "ground_truth" not in batch:
        # verl's data have it within `reward_model`, others call it `answer`.
        columns["ground_truth"] = batch["answer"] if "answer" in batch else [None] * size
        if "reward_model" in batch:
            models = batch["reward_model"]
            columns["ground_truth"] = [row.get("ground_truth") if isinstance(row, Mapping) else None for row in models]
    if "episode" in batch:
        columns["left_out"] = left_out_words(batch)
    texts = {name: pa.array(map(_text, columns[name]), pa.string()) for name in _TEXTS}
    parts = [name for name in batch.columns if name.startswith("reward/") or name == "trajectory_reward"]
    numbers = {name: batch[name] if name in batch else [None] * size for name in ("reward", *parts, "cost")}
    advantages = {} if prepared is None else _advantages(prepared)
    numbers["advantage"] = [advantages.get(name) for name in columns["id"]]
    columns = texts | {name: pa.array(values, pa.float64()) for name, values in numbers.items()}
    columns["length"] = pa.array(batch.lengths("response_tokens"), pa.int64())
    if "episode" in batch:
        pairs = zip(batch["response_tokens"], batch["response_mask"], strict=True)
        columns["turns"] = pa.array([spans([], tokens, mask, decode) for tokens, mask in pairs])
    return pa.table(columns | _tokens(batch, prepared, decode))


def _tokens(batch: Batch, prepared: Batch | None, decode: Decode) -> dict[str, pa.Array]:
    """The columns `TOKENS`."""
    first, names = batch.slice(0, SHOWN), set(batch.slice(0, SHOWN)["id"])
    learned = [first] if prepared is None else [first, prepared.filter([name in names for name in prepared["id"]])]

    def of(column: str) -> list[list[float] | None]:
        values: dict[str, list[float] | None] = {}
        for part in learned:
            values |= dict(zip(part["id"], part[column], strict=True)) if column in part else {}
        return [values.get(name) for name in first["id"]]

    texts = {token: decode([token]) for token in set().union(*first["response_tokens"])}
    engine, trainer = of("rollout_log_probs"), of("log_probs")
    lists: tuple[list[Any], ...] = (
        [[texts[token] for token in tokens] for tokens in first["response_tokens"]],
        of("response_mask"),
        of("advantages"),
        [p and [-value for value in p] for p in engine],
        [p and q and [a - b for a, b in zip(q, p, strict=True)] for p, q in zip(engine, trainer, strict=True)],
    )
    kinds = (pa.string(), *[pa.float32()] * 4)
    missing = [None] * (len(batch) - len(first))
    return {
        name: pa.array([*values, *missing], pa.list_(kind))
        for name, values, kind in zip(TOKENS, lists, kinds, strict=True)
    }


def without_tokens(table: pa.Table) -> pa.Table:
    """The first `SHOWN` samples, as trackers take them: without lists."""
    return table.slice(0, SHOWN).drop_columns([name for name in (*TOKENS, "turns") if name in table.column_names])


def _questions(batch: Batch) -> list[str | None]:
    """The last message of the user, or a prompt that is a text; null for token ids."""
    texts = batch["prompt"] if "prompt" in batch else [None] * len(batch)
    chats = batch["messages"] if "messages" in batch else [None] * len(batch)
    said: dict[str | None, str | None] = {None: None}
    for chat in {*chats} - {None}:
        said[chat] = next((content_text(m) for m in reversed(json.loads(chat)) if m["role"] == "user"), None)
    return [text if chat is None else said[chat] for text, chat in zip(texts, chats, strict=True)]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) or value is None else json.dumps(value, ensure_ascii=False, default=str)


def _advantages(prepared: Batch) -> dict[str, float]:
    """Mean advantage of each sample that has tokens of the policy."""
    if "advantages" not in prepared:
        return {}
    means = {}
    for name, values, mask in zip(*(prepared[c] for c in ("id", "advantages", "response_mask")), strict=True):
        if trained := [*compress(values or (), mask)]:
            means[name] = sum(trained) / len(trained)
    return means


def spans(prompt: Sequence[int], response: Sequence[int], mask: Sequence[int], decode: Decode) -> list[dict[str, Any]]:
    """A conversation in order, cut where the author changes: `trained` (the policy wrote it), `text`, `tokens`."""
    tokens, flags = [*prompt, *response], [0] * len(prompt) + list(mask)
    starts = [i for i, flag in enumerate(flags) if i == 0 or flag != flags[i - 1]]
    return [
        {"trained": bool(flags[start]), "text": decode(tokens[start:end]), "tokens": end - start}
        for start, end in pairwise([*starts, len(tokens)])
    ]


def save_table(path: Path, table: pa.Table) -> None:
    """Write samples to a Parquet file, whole or not at all; a disk that does not take it is a warning."""
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content.getvalue())
    except OSError as error:  # the next step may find room
        logger.warning("completions were not saved to %s: %s", path, error)

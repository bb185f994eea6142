"""Batches of rows of like length, bounded by padded tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl._base.checked import checked
from verl._base.record import Count, Natural, Portion, Seed
from verl.data.cursor import permutation
from verl.errors import ConfigError, DataError, shown


class DynamicBatchSampler:
    """A `DataLoader` batch sampler: lists of row numbers, each row once an epoch.

    Rows of like length go together. Rows x longest row never passes `max_tokens_per_batch` (a longer row goes alone),
    and padding is less than `max_padding` of a batch's positions. Rows of one length meet others each epoch, and the
    batches come in another order: a function of seed and epoch. Each iteration is the next epoch; `set_epoch` says
    which.

        sampler = DynamicBatchSampler(dataset, max_tokens_per_batch=4096)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=sampler.collate_fn)

    Args:
        dataset: rows that are token ids, or mappings with `input_ids` or `prompt_tokens`, or a `length`.
        lengths: tokens of each row, instead of looking.
        pad_token_id: what `collate_fn` pads `input_ids` with.

    Raises:
        DataError: a row's length cannot be seen.
    """

    @checked
    def __init__(
        self,
        dataset: Any,
        max_tokens_per_batch: Count = 4096,
        *,
        lengths: Sequence[Natural] | None = None,
        max_padding: Portion = 0.1,
        shuffle: bool = True,
        seed: Seed = 0,
        pad_token_id: Natural = 0,
    ) -> None:
        if isinstance(dataset, Mapping) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise ConfigError(
                f"DynamicBatchSampler.dataset: must have a length and rows by number, not {shown(dataset)}"
            )
        if lengths is None:
            lengths = [_row_length(dataset[row]) for row in range(len(dataset))]
        if len(lengths) != len(dataset):
            raise DataError(f"{len(lengths)} lengths were given for {len(dataset)} rows")
        self.lengths = list(lengths)
        self.max_tokens_per_batch, self.max_padding = max_tokens_per_batch, max_padding
        self.shuffle, self.seed, self.pad_token_id = shuffle, seed, pad_token_id
        self.epoch = 0
        # Which lengths share a batch depends on the sorted lengths alone, so every epoch has as many batches.
        self._bounds = self._cut(sorted(self.lengths, reverse=True))

    def __len__(self) -> int:
        return len(self._bounds)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        rows, batches = list(range(len(self.lengths))), list(range(len(self)))
        if self.shuffle:
            rows = permutation(len(rows), self.seed, 2 * self.epoch).tolist()
            batches = permutation(len(batches), self.seed, 2 * self.epoch + 1).tolist()
        # The sort is stable: rows of one length keep their shuffled order, so they meet others each epoch.
        rows.sort(key=lambda row: -self.lengths[row])
        self.epoch += 1
        for batch in batches:
            yield rows[slice(*self._bounds[batch])]

    def collate_fn(self, rows: Sequence[Any]) -> dict[str, Any]:
        """`collate_fn` with this sampler's padding id."""
        return collate_fn(rows, self.pad_token_id)

    def _cut(self, lengths: list[int]) -> list[tuple[int, int]]:
        """Bounds of batches over descending lengths."""
        bounds: list[tuple[int, int]] = []
        start = total = 0
        for end, length in enumerate(lengths):
            size = (end + 1 - start) * lengths[start]
            if end > start and (size > self.max_tokens_per_batch or total + length <= (1 - self.max_padding) * size):
                bounds.append((start, end))
                start, total = end, 0
            total += length
        return [*bounds, (start, len(lengths))] if lengths else []


@checked
def collate_fn(rows: Sequence[Any], pad_token_id: Natural = 0) -> dict[str, Any]:
    """Rows as one padded batch of tensors `[B, T]`, T the longest row.

    `input_ids` (also of rows that are bare token ids) is padded with `pad_token_id`, `labels` with -100, other integer
    sequences as long as `input_ids` with 0, and `attention_mask` is made. Numbers become `[B]`; the rest stays a list.

    Raises:
        DataError: a row lacks a column that another has.
    """
    import torch

    fields = [dict(row) if isinstance(row, Mapping) else {"input_ids": row} for row in rows]
    for row in fields:
        if "input_ids" not in row and "prompt_tokens" in row:
            row["input_ids"] = row.pop("prompt_tokens")
        row.setdefault("attention_mask", [1] * len(row["input_ids"]))
    batch: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in fields for name in row):
        if (lacking := next((number for number, row in enumerate(fields) if name not in row), None)) is not None:
            raise DataError(f"row {lacking} of the batch lacks column '{name}': give it to all rows, or to none")
        values = [row[name] for row in fields]
        values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
        if all(_is_aligned(value, row) for value, row in zip(values, fields, strict=True)):
            filler, longest = {"input_ids": pad_token_id, "labels": -100}.get(name, 0), max(map(len, values))
            padded = [[*value, *[filler] * (longest - len(value))] for value in values]
            batch[name] = torch.tensor(padded, dtype=None if longest else torch.int64)  # torch takes nothing for floats
        elif all(isinstance(value, int | float) for value in values):
            batch[name] = torch.tensor(values)
        else:
            batch[name] = values
    return batch


def _is_aligned(value: Any, row: Mapping[str, Any]) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == len(row["input_ids"])
        and all(isinstance(item, int | float) for item in value)
    )


def _row_length(row: Any) -> int:
    if isinstance(row, Mapping):
        for name in ("input_ids", "prompt_tokens"):
            if row.get(name) is not None:
                return _row_length(row[name])
        if isinstance(row.get("length"), int):
            return int(row["length"])
    elif hasattr(row, "__len__") and getattr(row, "ndim", None) != 0 and not isinstance(row, str):
        return len(row)
    text = "row" if isinstance(row, str) else "row['text']"
    raise DataError(
        f"the tokens of a row ({type(row).__name__}) cannot be counted: pass lengths=, such as "
        f"[len(tokenizer({text})['input_ids']) for row in dataset]"
    )

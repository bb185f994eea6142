"""A micro-batch as flat tokens, and what each of them attends to.

Rows of one group share one forward of their prompt: the tokens of a prompt stand in the flat row once, the responses
behind it. Where flash attention takes rows of different lengths it gets them as they are; elsewhere rows of nearly
equal size are put into buckets, whatever prompts they belong to. A T x T mask never exists.

Shapes: T flat tokens, S rows, R response tokens of all rows, L longest row, H query heads, K key/value heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.attention import packed as attention
from verl.attention import varlen
from verl.attention.packed import Bucket, attend
from verl.device import to_device
from verl.errors import DataError

# A bucket may hold this many padded scores for each real one before a new bucket is opened.
_WASTE = 1.5


@dataclass(frozen=True)
class Packed:
    """One training micro-batch as flat tokens."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    context: Segments
    predict: Tensor  # [R] index into [T] of the hidden state that predicts each response token, rows in order
    targets: Tensor  # [R] the response tokens
    last: Tensor  # [S] index into [T] of the last token of each row that was fed
    # From numbers read at `predict` or `last` to those of all rows, where ranks each hold a slice of the tokens.
    gather: Callable[[Tensor], Tensor] = lambda values: values


@dataclass(frozen=True)
class PaddedRows:
    """The same tokens as one right-padded row a sample, shared prompts repeated."""

    source: Tensor  # [S, L] index into [T]; padding repeats the row's first token
    mask: Tensor  # [S, L] True on real tokens
    place: Tensor  # [T] index into [S * L] of one copy of each flat token


def pack_rows(
    prompts: Sequence[Sequence[int] | None],
    responses: Sequence[Sequence[int] | None],
    device: torch.device | str = "cpu",
    share_prompts: bool = True,
    keep_last: bool = False,
) -> Packed:
    """Lay prompts and responses, one of each a row, out as flat tokens.

    Args:
        share_prompts: adjacent rows with equal prompts share one forward of it. The numbers do not change.
        keep_last: feed the last response token too. Nothing is predicted from it, so it is left out by
            default; scores at the last token need it.

    Raises:
        DataError: a row has an empty prompt (no state would predict its first token), or there are no rows.
    """
    rows = [
        _Row(i, list(p or ()), list(r or ()), keep_last)
        for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]
    if not rows:
        raise DataError("a batch without rows cannot be packed: drop empty micro-batches before the forward")
    if empty := [row.index for row in rows if not row.prompt]:
        raise DataError(f"row {empty[0]} has an empty prompt_tokens: give every prompt at least one token (a BOS)")
    device = torch.device(device)
    pieces, tokens, positions = _layout(rows, share_prompts)
    predict = [np.concatenate([[row.start + len(row.prompt) - 1], row.own()])[: len(row.response)] for row in rows]
    targets = [token for row in rows for token in row.response]

    def ints(values: Any) -> Tensor:
        return to_device(torch.from_numpy(np.asarray(values, dtype=np.int64)), device)

    return Packed(
        tokens=ints(tokens),
        positions=ints(positions),
        context=Segments(pieces, rows, len(tokens), device),
        predict=ints(np.concatenate(predict)),
        targets=ints(targets),
        last=ints([row.indices()[-1] for row in rows]),
    )


class Segments:
    """The attention context of a packed micro-batch: causal within a row, shared prompts computed once."""

    def __init__(self, pieces: list[attention.Row], rows: list[_Row], size: int, device: torch.device) -> None:
        self._pieces = pieces
        self._rows = rows
        self._size = size
        self._device = device

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """query `[T, H, D]`, key and value `[T, K, D]` -> `[T, H, D]`. The same for every layer."""
        if (kernel := varlen.flash_attention(value)) is not None:
            return varlen.varlen_attend(kernel, query, key, value, self._ragged, scale, window)
        return attend(query, key, value, self._buckets, scale, window)

    @cached_property
    def _ragged(self) -> varlen.Ragged:
        return varlen.Ragged(self._pieces, self._device)

    @cached_property
    def _buckets(self) -> list[Bucket]:
        return _buckets(self._pieces, self._device)

    def padded_rows(self) -> PaddedRows:
        """The layout for models that have no packed forward."""
        indices = [row.indices() for row in self._rows]
        longest = max(len(index) for index in indices)
        source = np.stack([np.pad(index, (0, longest - len(index)), constant_values=index[0]) for index in indices])
        place = np.empty(self._size, dtype=np.int64)
        for number, index in enumerate(indices):
            place[index] = number * longest + np.arange(len(index))
        mask = np.arange(longest) < np.array([[len(index)] for index in indices])
        device = self._device
        return PaddedRows(*(torch.from_numpy(array).to(device) for array in (source, mask, place)))


class _Row:
    """A sample on its way into the flat row."""

    def __init__(self, index: int, prompt: list[int], response: list[int], keep_last: bool) -> None:
        self.index = index
        self.prompt = prompt
        self.response = response
        self.fed = response if keep_last else response[:-1]
        self.start = 0  # of the prompt in the flat row
        self.own_start = 0  # of the response

    def own(self) -> np.ndarray[Any, Any]:
        return np.arange(self.own_start, self.own_start + len(self.fed))

    def indices(self) -> np.ndarray[Any, Any]:
        return np.concatenate([np.arange(self.start, self.start + len(self.prompt)), self.own()])


def _layout(rows: list[_Row], share_prompts: bool) -> tuple[list[attention.Row], list[int], list[int]]:
    """Pieces, tokens and positions of the flat row; sets `start` and `own_start` of each row."""
    families: list[list[_Row]] = []
    for row in rows:
        if share_prompts and families and families[-1][0].prompt == row.prompt:
            families[-1].append(row)
        else:
            families.append([row])
    tokens: list[int] = []
    positions: list[int] = []
    pieces: list[attention.Row] = []

    def put(piece: list[int], parent: attention.Row | None = None) -> attention.Row:
        pieces.append(attention.Row(len(tokens), len(piece), parent))
        tokens.extend(piece)
        before = 0 if parent is None else parent.length
        positions.extend(range(before, before + len(piece)))
        return pieces[-1]

    for family in families:
        prompt, fed = family[0].prompt, [row for row in family if row.fed]
        # With one response to feed, or none, the whole family reads from a single plain row.
        first = put(prompt + (fed[0].fed if len(fed) == 1 else []))
        for row in family:
            row.start, row.own_start = first.start, first.start + len(prompt)
            if len(fed) > 1 and row.fed:
                row.own_start = put(row.fed, first).start
    return pieces, tokens, positions


def _buckets(rows: list[attention.Row], device: torch.device) -> list[Bucket]:
    """Rows sorted by size, largest first, cut where padding would waste too much or scores would take too much."""
    buckets: list[list[attention.Row]] = []
    real = before = longest = 0
    # Prefixes of nearly equal length stand together, and among them rows of nearly equal length.
    for row in sorted(rows, key=lambda row: (row.prefix[1] // 32, row.length), reverse=True):
        size = row.length * (row.prefix[1] + row.length)
        if buckets:
            before, longest = max(before, row.prefix[1]), max(longest, row.length)
            padded = (len(buckets[-1]) + 1) * longest * (before + longest)
            if padded <= _WASTE * (real + size) and (device.type != "cpu" or padded <= attention.PIECE):
                buckets[-1].append(row)
                real += size
                continue
        buckets.append([row])
        real, before, longest = size, row.prefix[1], row.length
    return [Bucket(bucket, device) for bucket in buckets]

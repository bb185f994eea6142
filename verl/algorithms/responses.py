"""The response tokens of a whole batch as flat tensors: the form that all whole-batch statistics are computed in.

Shapes: R response tokens of S rows, flat, row after row. Everything is fp64 on the CPU, whatever the batch
holds; `store` rounds results to fp32 unless the batch itself carries fp64 columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import pyarrow as pa
import torch
from torch import Tensor

from verl._base.autograd import sum_rows
from verl.batch import Batch
from verl.errors import DataError


class Responses:
    """Lengths, masks and groups of a batch, and the way between row and token shapes.

    Attributes:
        rows: S.
        sequence: `[R]` int64, the row of each token; a number of each row `[S]` becomes one of each token by
            `numbers[sequence]`.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.lengths: list[int] = batch.lengths("response_tokens")
        self.rows = len(self.lengths)
        self.sequence = torch.arange(self.rows).repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64))

    @cached_property
    def position(self) -> Tensor:
        """`[R]` int64: the place of each token in its own response."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        starts = lengths.cumsum(0) - lengths
        return torch.arange(len(self.sequence)) - starts[self.sequence]

    @cached_property
    def written(self) -> Tensor:
        """`[R]` bool: tokens that the policy wrote (`response_mask`; without that column, all)."""
        return self.tokens("response_mask", absent=1.0) != 0

    @cached_property
    def trained(self) -> Tensor:
        """`[R]` bool: written tokens that the loss counts (`loss_mask`; without that column, all written ones)."""
        return self.written & (self.tokens("loss_mask", absent=1.0) != 0)

    @cached_property
    def groups(self) -> Tensor:
        """`[S]` int64: number of each row's group, in order of appearance."""
        return numbers_of(self.batch.group_indices(), self.rows)

    @property
    def rewards(self) -> Tensor:
        """`[S]` fp64: the reward of each row: of its `token_rewards`, where given, the sum."""
        if "token_rewards" in self.batch:
            return self.sum(self.tokens("token_rewards"))
        return self.batch.tensor("reward", torch.float64)

    def tokens(self, name: str, absent: float | None = None) -> Tensor:
        """A token-aligned column, `[R]` fp64; where the batch lacks it `absent`, if given.

        Raises:
            DataError: there is no such column, or a row of it is not as long as its response.
        """
        if absent is not None and name not in self.batch:
            return torch.full((len(self.sequence),), absent, dtype=torch.float64)
        for row, (have, want) in enumerate(zip(self.batch.lengths(name), self.lengths, strict=True)):
            if have != want:
                what = f"row {row} has {have} values for {want} tokens"
                raise DataError(f"column '{name}' must be aligned with 'response_tokens': {what}")
        return self.batch.tensor(name, torch.float64)

    def sum(self, values: Tensor) -> Tensor:
        """`[R]` -> `[S]` fp64: the sum over each row's tokens; of a mask, how many are set."""
        return sum_rows(values.double(), self.sequence, self.rows)

    def at_last_token(self, outcome: Tensor) -> Tensor:
        """`[S]` -> `[R]`: each row's number at the last token that the policy wrote, 0 elsewhere."""
        # A row in which the policy wrote nothing keeps -1, which is no position.
        places = torch.where(self.written, self.position, -1)
        last = torch.full((self.rows,), -1, dtype=torch.int64).scatter_reduce(0, self.sequence, places, "amax")
        here = self.written & (self.position == last[self.sequence])
        return torch.where(here, outcome[self.sequence], 0.0)

    def at_written(self, values: Tensor) -> Tensor:
        """`[R]` -> `[R]`: numbers brought to tokens that the policy wrote: each to the nearest at or before it, those
        before the first to the first. A row without such a token has no place for any."""
        index, nowhere = torch.arange(len(values)), len(values)
        # The running maximum reaches into earlier rows: where it does, the row's first written token is taken instead.
        nearest = torch.where(self.written, index, -1).cummax(0).values
        first = torch.full((self.rows,), nowhere).scatter_reduce(
            0, self.sequence, torch.where(self.written, index, nowhere), "amin"
        )
        target = torch.where(nearest >= index - self.position, nearest, first[self.sequence])
        exists = target < nowhere
        return torch.zeros_like(values).index_add(0, target[exists], values[exists])

    def pad(self, values: Tensor) -> Tensor:
        """`[R]` -> `[S, L]` with zeros behind each response, for recursions over time."""
        padded = values.new_zeros(self.rows, max(self.lengths, default=0))
        padded[self.sequence, self.position] = values
        return padded

    def store(self, columns: Mapping[str, Tensor]) -> Batch:
        """The batch with token-aligned columns `[R]` added."""
        kinds = (self.batch.arrow(name).type for name in self.batch.columns)
        wide = any(pa.types.is_large_list(kind) and kind.value_type == pa.float64() for kind in kinds)
        floats = torch.float64 if wide else torch.float32
        return self.batch.add(
            {name: (v.to(floats) if v.is_floating_point() else v, self.lengths) for name, v in columns.items()}
        )


def numbers_of(parts: Sequence[Sequence[int]], rows: int) -> Tensor:
    """`[rows]` int64: for each row the number of the part that it is in."""
    numbers = torch.zeros(rows, dtype=torch.int64)
    for number, members in enumerate(parts):
        numbers[members] = number
    return numbers

"""The table of experience: what flows between all parts of the system.

A `Batch` is a typed Arrow table with one row a sample and ragged columns as Arrow lists, never padded.

Columns the system knows (others are the user's and travel along untouched):

    id                 string   names the sample: "<prompt id>/<number>"
    group              string   which prompt (a preference pair is a group of two rows)
    task               string   which task
    prompt             string   a plain prompt, tokenised as it is; the text of one given as token ids
    messages           string   a chat as JSON, rendered by the chat template
    prompt_tokens      [int32]  P tokens
    prefix_tokens      [int32]  those of them that the algorithm has put before the prompt
    response_tokens    [int32]  R tokens; the columns below are aligned with it
    response_mask      [uint8]  0 on tokens that the policy did not write
    rollout_log_probs  [float]  by the engine that sampled
    log_probs          [float]  by the trainer, before the update; null: it leaves the row out
    ref_log_probs      [float]  by the reference policy
    values, advantages, returns   [float]
    token_rewards      [float]  in the place of `reward`; one on a token not written counts at the one before it
    call_rewards       [float]  beside `reward`: those of single calls of an episode, each at its last token
    response           string   what the policy wrote, decoded: all its turns, a line each, without what it read
    last_turn          string   the last of these turns; null: there is one turn, the response
    reward             double   null: the reward abstained (null is not zero)
    abstain_reason     string   why
    cost, label        double   Safe-RLHF's cost; KTO's or a preference's label (1 good, 0 bad)
    finish             string   "stop", "length", "abort" or "reject"
    policy_version     int64    version of the weights that wrote the response
    token_versions     [int64]  of several turns: that of each token; -1: no policy wrote it
    policy_id          str      `Actor.policy_id` of these weights; null: they were older than the actor's then
    tokenizer          str      id of the vocabulary of the tokens, see `verl.data.text`

House rules: columns are added, never overwritten; nulls stand at row level only; exactly one function,
`Batch.tensor`, turns a column into a tensor, and it copies (Arrow memory is read-only).
"""

from __future__ import annotations

import mmap
import operator
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl._base.checked import checked, hinted
from verl._base.exact import ExactType, exact, unified
from verl._base.names import check_known
from verl._base.record import Natural
from verl.errors import ConfigError, DataError, shown

if TYPE_CHECKING:
    import torch

_FLOATS, _LISTS = pa.large_list(pa.float32()), (pa.ListType, pa.LargeListType)
#: Arrow types of the columns the system knows. fp64 runs keep fp64: see `_list_type`.
SCHEMA: dict[str, pa.DataType] = {
    name: kind
    for kind, names in (
        (pa.string(), "id group task prompt messages response last_turn abstain_reason finish tokenizer policy_id"),
        (pa.large_list(pa.int32()), "prompt_tokens prefix_tokens response_tokens"),
        (pa.large_list(pa.uint8()), "response_mask"),
        (_FLOATS, "rollout_log_probs log_probs ref_log_probs values advantages returns token_rewards call_rewards"),
        (pa.float64(), "reward cost label"),
        (pa.int64(), "policy_version"),
        (pa.large_list(pa.int64()), "token_versions"),
    )
    for name in names.split()
}

#: Columns of episodes, see `verl.rollout.turns`; a row is one of an episode's trajectories.
EPISODE = frozenset((
    "episode", "episode_error", "episode_reward", "left_out", "truncated", "calls_left_out", "rejected", "trajectory",
    "trajectory_reward", "call_rewards", "conversation", "trajectories", "token_versions", "other_calls",
    "last_turn",
))  # fmt: skip

#: Further columns that the system writes; rows of a data set come without them.
WRITTEN = EPISODE | {
    "baseline", "loss_mask", "old_log_probs", "rollout_is_weights", "reward_baseline", "cost_values", "cost_returns",
    "kl_coef", "kto_kl", "mismatched", "scores", "temperature", "reply", "condition",
}  # fmt: skip

#: Columns that a step computes from its models and their samples: in a recording they are of another trainer's models.
COMPUTED = frozenset((
    "log_probs", "old_log_probs", "ref_log_probs", "values", "cost_values", "advantages", "returns", "cost_returns",
    "loss_mask", "rollout_is_weights", "reward_baseline", "kl_coef", "kto_kl", "condition",
))  # fmt: skip


@hinted
class Batch:
    """An immutable table of samples. Slices and concatenations share memory; every call returns a new one."""

    __slots__ = ("table",)

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    @classmethod
    @checked
    def from_columns(cls, columns: Mapping[str, Any]) -> Batch:
        """Columns by name: lists, lists of lists, Arrow arrays, or pairs `(flat tensor, lengths)` for ragged ones.

        Raises:
            DataError: columns differ in length, or a known column holds the wrong type.
        """
        if any(not isinstance(odd := name, str) for name in columns):
            raise DataError(f"a column's name is a text, not {shown(odd)}")
        arrays = {name: _to_arrow(name, values) for name, values in columns.items()}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns of one batch must have one length, got {lengths}")
        return cls(pa.table(arrays))

    @classmethod
    @checked
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """One mapping a row; a key that a row lacks is null there. What one Arrow type would change is kept as it is,
        see `verl._base.exact`."""
        if any(not isinstance(odd := row, Mapping) for row in rows):
            raise DataError(f"a row is a mapping of columns to values, not {shown(odd)}")
        names = dict.fromkeys(name for row in rows for name in row)
        columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        for name in names.keys() - SCHEMA.keys() - WRITTEN:
            columns[name] = exact(columns[name], _to_arrow(name, columns[name]))
        return cls.from_columns(columns)

    @classmethod
    @checked
    def concat(cls, batches: Iterable[Batch]) -> Batch:
        """Rows of all batches in order; a column that one of them lacks is null there. A user's column of several types
        keeps its values, see `verl._base.exact`.

        Raises:
            DataError: a column's types have nothing in common, and some of its values are no JSON.
        """
        batches = list(batches)
        if any(not isinstance(odd := batch, Batch) for batch in batches):
            raise DataError(f"only batches are put behind each other, not {shown(odd)}")
        tables = [b.table for b in batches if len(b) or b.columns]
        if not tables:
            return cls(pa.table({}))
        columns = [dict(zip(table.column_names, table.columns, strict=True)) for table in tables]
        for name in {name for of in columns for name in of} - SCHEMA.keys() - WRITTEN:
            having = [of for of in columns if name in of]
            for of, column in zip(having, unified([of[name] for of in having]), strict=True):
                of[name] = column
        try:
            return cls(pa.concat_tables(map(pa.table, columns), promote_options="permissive").combine_chunks())
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"batches do not fit together: {error}") from error

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __contains__(self, name: object) -> bool:
        return name in self.table.column_names

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows: {', '.join(self.columns)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and bool(self.table.equals(other.table))

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, name: str) -> list[Any]:
        """The column as plain Python values; a ragged column as a list of lists."""
        return self.arrow(name).to_pylist()  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
        # Arrow's own pickle hands its buffers out as they are, which for a slice are those of its whole parent.
        if protocol < 5:
            return Batch, (self._own(),)
        # Picklers with reducers of their own, such as Ray's, take many times longer over the parts of a table.
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(self._own(), protocol, buffer_callback=buffers.append)
        return _unpickled, (data, buffers)

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    def arrow(self, name: str) -> pa.Array:
        """The column as one Arrow array.

        Raises:
            DataError: there is no such column.
        """
        check_known("the batch has no column", [name], self.table.column_names, DataError)
        return _single(self.table.column(name))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows as dictionaries, in order."""
        for chunk in self.table.to_batches(max_chunksize=256):
            yield from chunk.to_pylist()

    __iter__ = rows

    @checked
    def row(self, index: Natural) -> dict[str, Any]:
        return next(self.take([index]).rows())

    @checked
    def add(self, columns: Mapping[str, Any] | Batch) -> Batch:
        """This batch with more columns, aligned row for row. A `Batch` adds the columns this one lacks.

        Raises:
            DataError: a column exists already, or the lengths differ.
        """
        if isinstance(columns, Batch):
            table = columns.drop(self.columns).table
            columns = dict(zip(table.column_names, map(_single, table.columns), strict=True))
        there = {*self.columns}
        size, arrays, fields = self.table.num_rows if there else None, self.table.columns, [*self.table.schema]
        for name, values in columns.items():
            array = _to_arrow(name, values)
            if name in there:
                raise DataError(f"column '{name}' is there already: columns are added, never overwritten")
            size = len(array) if size is None else size
            if len(array) != size:
                raise DataError(f"column '{name}' has {len(array)} rows, the batch has {size}")
            arrays.append(array)
            fields.append(pa.field(name, array.type))
        return Batch(pa.Table.from_arrays(arrays, schema=pa.schema(fields, self.table.schema.metadata)))

    def changed(self, before: Batch) -> list[str]:
        """Columns of both batches that have other values here than in the same rows of `before`, whatever their types;
        NaN is like NaN. Rows are the same by `id`, or by position where there are no ids; of rows that cannot be
        matched so, nothing is said."""
        both, ids = [name for name in self.columns if name in before], "id" in self and "id" in before
        if ids and not self.arrow("id").equals(before.arrow("id")):
            row_of = {id_: row for row, id_ in enumerate(before["id"])}
            if len(row_of) < len(before) or not row_of.keys() >= set(self["id"]):
                return []
            before = before.select(both).take([row_of[id_] for id_ in self["id"]])
        changed: list[str] = []
        for name in both if len(self) == len(before) else ():
            one, other = self.arrow(name), before.arrow(name)
            if not one.equals(other):  # nor are equal values of two types, or NaN
                values, others = one.to_pylist(), other.to_pylist()
                changed += [name] if values != others and repr(values) != repr(others) else []
        return changed

    @checked
    def select(self, names: Iterable[str]) -> Batch:
        there = {*self.columns}
        return Batch(self.table.select([name for name in names if name in there]))

    @checked
    def drop(self, names: Iterable[str]) -> Batch:
        dropped = set(names)
        return Batch(self.table.select([name for name in self.columns if name not in dropped]))

    @checked
    def slice(self, start: Natural, length: Natural | None = None) -> Batch:
        """The rows from number `start` on, at most `length` of them; None: all."""
        return Batch(self.table.slice(start, length))

    def take(self, indices: Sequence[int]) -> Batch:
        """The rows of these numbers, in this order.

        Raises:
            DataError: there is no such row.
        """
        try:
            wrong = [index for index in map(operator.index, indices) if not 0 <= index < len(self)][:3]
        except TypeError as error:
            raise DataError(f"rows are taken by their numbers: {error}") from None
        if wrong:
            raise DataError(f"the batch has {len(self)} rows: there is none of number {', '.join(map(str, wrong))}")
        # Runs of neighbouring rows: the first of each, and how many.
        starts = [i for i in range(len(indices)) if not i or indices[i] != indices[i - 1] + 1]
        runs = [(indices[start], end - start) for start, end in pairwise([*starts, len(indices)])]
        if len(runs) == 1:
            return Batch(self.table.slice(*runs[0]))
        rows = pa.array(indices, pa.int64())
        columns = {name: self.arrow(name) for name in self.columns}
        for name, array in columns.items():
            # Arrow takes lists value by value; concatenated slices are copies of whole rows, many times faster.
            by_runs = isinstance(array.type, _LISTS) and runs
            columns[name] = pa.concat_arrays([array.slice(*run) for run in runs]) if by_runs else array.take(rows)
        return Batch(pa.table(columns))

    def among(self, rows: Sequence[int], count: int) -> Batch:
        """A batch of `count` rows: those of the numbers `rows` are these, in their order, the others null."""
        number: list[int | None] = [None] * count
        for index, row in enumerate(rows):
            number[row] = index
        return Batch(self.table.take(pa.array(number, pa.int64())))

    @checked
    def filter(self, keep: Sequence[bool]) -> Batch:
        if len(keep) != len(self):
            raise DataError(f"keep has {len(keep)} values, the batch has {len(self)} rows")
        return Batch(self.table.filter(pa.array(keep, pa.bool_())))

    def lengths(self, name: str) -> list[int]:
        """Items of a ragged column, by row (null counts 0)."""
        return pc.fill_null(pc.list_value_length(self.arrow(name)), 0).to_pylist()  # type: ignore[no-any-return]

    def group_indices(self, column: str = "group") -> list[list[int]]:
        """Row numbers of each group, groups in order of appearance; without a column `group` each row is one."""
        if column not in self:
            return [[row] for row in range(len(self))]
        rows: dict[Any, list[int]] = {}
        for index, value in enumerate(self[column]):
            rows.setdefault(("null", index) if value is None else value, []).append(index)
        return list(rows.values())

    @property
    def samples(self) -> int:
        """Episodes; without a column `episode`, rows."""
        return len(self.group_indices("episode")) if "episode" in self else len(self)

    def tensor(self, name: str, dtype: torch.dtype | None = None, device: Any = "cpu") -> torch.Tensor:
        """A copy of a column as a tensor: `[N]` for a plain column, the flat values `[T]` of a ragged one.

        Nulls of a plain number column become NaN; a null row of a ragged column is empty.

        Raises:
            DataError: the column holds text, or integers with nulls.
        """
        import torch

        array = self.arrow(name)
        if isinstance(array.type, ExactType):
            array = _to_arrow(name, array.to_pylist())
        if isinstance(array.type, _LISTS):
            array = array.flatten()
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type)):
            raise DataError(f"column '{name}' of type {array.type} cannot become a tensor")
        if array.null_count and not pa.types.is_floating(array.type):
            raise DataError(f"column '{name}' has nulls; an integer tensor cannot hold them")
        try:
            return torch.tensor(array.to_numpy(zero_copy_only=False), dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"column '{name}' cannot be a tensor of dtype={shown(dtype)} on device={shown(device)}: {error}"
            ) from error

    def to_ipc(self) -> bytes:
        """Arrow IPC stream of just these rows."""
        table = self._own()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]

    def _own(self) -> pa.Table:
        """The table without rows of a parent."""
        arrays = {name: self.arrow(name) for name in self.columns}
        for name, array in arrays.items():
            # A slice keeps its parent's buffers; taking rows by index copies just them. Buffers are padded a little.
            if array.get_total_buffer_size() > 1.05 * array.nbytes + 1024:
                arrays[name] = pa.concat_arrays([array.slice(0), array.slice(0, 0)])
        return pa.table(arrays)

    @classmethod
    def from_ipc(cls, data: bytes | mmap.mmap) -> Batch:
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            return cls(reader.read_all())

    @checked
    def to_parquet(self, path: str | Path) -> None:
        """Write all rows to a file.

        Raises:
            DataError: it cannot be written there.
        """
        try:
            pq.write_table(self.table, path, compression="zstd")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}") from error

    @classmethod
    @checked
    def from_parquet(cls, path: str | Path) -> Batch:
        try:
            table = pq.read_table(path)
            # Known columns in their own types: a file may hold `list` where we keep `large_list`.
            return cls(pa.table({name: _to_arrow(name, table.column(name)) for name in table.column_names}))
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _unpickled(data: bytes, buffers: list[Any]) -> Batch:
    return Batch(pickle.loads(data, buffers=buffers))


def _single(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _list_type(name: str, values: pa.DataType) -> pa.DataType:
    """Known float columns are fp32, except that fp64 stays fp64: exactness checks compare in it."""
    known = SCHEMA.get(name)
    if known == _FLOATS and values == pa.float64():
        return pa.large_list(pa.float64())
    return known if isinstance(known, _LISTS) else pa.large_list(values)


def _to_arrow(name: str, values: Any) -> pa.Array:
    known = SCHEMA.get(name)
    try:
        if isinstance(values, pa.ChunkedArray):
            values = _single(values)
        elif isinstance(values, tuple) and len(values) == 2 and hasattr(values[0], "detach"):
            return _ragged(name, values[0], values[1])
        elif hasattr(values, "detach"):
            if values.is_floating_point() and values.ndim == 1:
                known = known or pa.float64()  # the type of no rows, too
            values = values.detach().cpu().double().tolist() if values.is_floating_point() else values.tolist()
        array = values if isinstance(values, pa.Array) else pa.array(list(values), known)
        kind = _list_type(name, array.type.value_type) if isinstance(array.type, _LISTS) else known or array.type
        return array if array.type == kind else array.cast(kind)
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON lets pass
        raise DataError(f"column '{name}' has a text that is not valid Unicode: {error.object[:60]!r}") from error
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, OverflowError) as error:
        raise DataError(f"column '{name}' cannot be stored{f' as {known}' if known else ''}: {error}") from error


def _ragged(name: str, flat: torch.Tensor, lengths: Sequence[int]) -> pa.Array:
    """Rows of the given lengths out of flat values `[T]`; bf16 and fp16 are stored as fp32."""
    import torch

    flat = flat.detach().cpu()
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    offsets = list(accumulate(map(int, lengths), initial=0))
    if offsets[-1] != flat.numel():
        raise DataError(f"column '{name}': lengths sum to {offsets[-1]}, the flat tensor has {flat.numel()} values")
    values = pa.array(flat.contiguous().numpy())
    kind = _list_type(name, values.type)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values.cast(kind.value_type))

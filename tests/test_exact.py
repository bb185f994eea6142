"""Rows of a user's data get their own values back, wherever the table has been."""

from __future__ import annotations

import pickle
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from verl.batch import Batch
from verl.data.buffers import DiskBuffer, MemoryBuffer
from verl.data.prompts import load_prompts
from verl.errors import DataError

COLUMNS: dict[str, list[Any]] = {
    "numbers": [42, 3.5, None],
    "nested": [{"ground_truth": 42}, {"ground_truth": 3.5}, None],
    "keys": [{"x": 1}, {}, {"y": [None]}],
    "lists": [[1, 2.5], [], [3]],
    "nothing": [{}, {}, None],
    "nothing inside": [{"meta": {}}, {"meta": {}}, None],
    "inner": [[{"input": "1", "output": "2"}, {"input": "1"}], [], None],
}


def kinds(value: Any) -> str:
    return repr(value)  # 42 and 42.0 are equal, but not the same


@pytest.mark.parametrize("name", COLUMNS)
def test_values_are_the_rows_own(name: str, tmp_path: Path) -> None:
    values = COLUMNS[name]
    batch = load_prompts([{"prompt": "a", name: value} for value in values]).batch
    batch.to_parquet(tmp_path / "x.parquet")
    buffer = MemoryBuffer(100)
    buffer.add(batch)
    there = {
        "as it is": batch,
        "pickled": pickle.loads(pickle.dumps(batch)),
        "sent": Batch.from_ipc(batch.to_ipc()),
        "written": Batch.from_parquet(tmp_path / "x.parquet"),
        "waiting": buffer.drain(),
        "apart": Batch.concat([batch.slice(0, 1), batch.take([1, 2])]),
    }
    for way, table in there.items():
        assert kinds(table[name]) == kinds(values), way
        assert kinds([row[name] for row in table.rows()]) == kinds(values), way
    assert kinds(batch.take([1, 0])[name]) == kinds([values[1], values[0]])
    assert kinds(batch.filter([True, False, False])[name]) == kinds(values[:1])


def test_what_one_type_holds_stays_what_it_is() -> None:
    rows = [{"f": 1.0, "i": 2, "d": {"when": date(2020, 1, 1), "x": 1}}, {"f": 0.5, "i": None, "d": {"x": 2}}]
    batch = Batch.from_rows(rows)
    assert [str(batch.arrow(name).type) for name in ("f", "i")] == ["double", "int64"]
    assert batch["d"][1] == {"when": None, "x": 2}  # a date is no JSON
    assert Batch.from_rows([{"x": 1}, {"x": 0.5}]).tensor("x").tolist() == [1.0, 0.5]
    mixed = Batch.concat([Batch.from_rows([{"x": 1}, {"x": 0.5}]), Batch.from_rows([{"x": 7}])])
    assert kinds(mixed["x"]) == kinds([1, 0.5, 7])


@pytest.mark.parametrize("name", COLUMNS)
def test_values_of_batches_made_apart_are_the_rows_own(name: str) -> None:
    values = COLUMNS[name]
    joined = Batch.concat([Batch.from_rows([{"id": "a", name: value}]) for value in values])
    assert kinds(joined[name]) == kinds(values)
    joined = Batch.concat([joined, Batch.from_rows([{"id": "b"}])])
    assert kinds(joined[name]) == kinds([*values, None])


@pytest.mark.parametrize(
    "values", [[1, "two"], [1, 2.5], [[1], ["a"]], [{"a": 1}, {"b": "x"}], [{}, {"a": 1}], [None, 2.5], [True, 1]]
)
def test_batches_of_several_types_keep_their_values(values: list[Any], tmp_path: Path) -> None:
    """Each step's rows are a list of their own, so nothing but the values says what a column's type is."""
    buffer, disk = MemoryBuffer(9), DiskBuffer(tmp_path, 9)
    for value in values:
        for each in (buffer, disk):
            each.add(load_prompts([{"prompt": "a", "x": value}]).batch)
    for batch in (buffer.state(), disk.state(), buffer.drain(), disk.drain()):
        assert kinds(batch["x"]) == kinds(values)


def test_types_without_anything_in_common_are_an_error() -> None:
    whens = [Batch.from_rows([{"when": value}]) for value in (date(2020, 1, 1), None, "then")]
    assert Batch.concat(whens[:2])["when"] == [date(2020, 1, 1), None]
    with pytest.raises(DataError, match=r"batches do not fit together.*when"):
        Batch.concat(whens)
    whole = Batch.concat([Batch.from_columns({"x": pa.array([1], kind)}) for kind in (pa.int32(), pa.int64())])
    assert whole.arrow("x").type == pa.int64()

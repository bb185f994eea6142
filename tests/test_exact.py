"""Rows of a user's data get their own values back, wherever the table has been."""

from __future__ import annotations

import pickle
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from verl.batch import Batch
from verl.data.buffers import MemoryBuffer
from verl.data.prompts import load_prompts

COLUMNS: dict[str, list[Any]] = {
    "numbers": [42, 3.5, None],
    "nested": [{"ground_truth": 42}, {"ground_truth": 3.5}, None],
    "keys": [{"x": 1}, {}, {"y": [None]}],
    "lists": [[1, 2.5], [], [3]],
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

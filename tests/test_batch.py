import pickle
import time

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from verl.batch import Batch
from verl.errors import DataError

ROWS = [
    {"id": "a", "response_tokens": [1, 2], "reward": 1.0, "mine": "x"},
    {"id": "b", "response_tokens": [], "reward": None, "mine": "y"},
    {"id": "c", "response_tokens": [3], "reward": 2.0, "mine": None},
]


def test_known_columns_have_their_types_and_null_is_not_zero() -> None:
    batch = Batch.from_rows(ROWS)
    assert batch.arrow("response_tokens").type == pa.large_list(pa.int32())
    assert batch["reward"] == [1.0, None, 2.0]
    assert torch.isnan(batch.tensor("reward")[1])
    assert batch.lengths("response_tokens") == [2, 0, 1]
    assert batch.tensor("response_tokens", torch.int64).tolist() == [1, 2, 3]


def test_tensor_is_a_writable_copy() -> None:
    batch = Batch.from_rows(ROWS)
    tensor = batch.tensor("response_tokens")
    tensor += 100
    assert batch["response_tokens"] == [[1, 2], [], [3]]


def test_a_slice_gives_the_tensor_of_its_own_rows() -> None:
    batch = Batch.from_rows(ROWS).slice(2)
    assert batch.tensor("response_tokens").tolist() == [3]
    assert batch.lengths("response_tokens") == [1]


def test_pickle_of_a_slice_ships_only_its_rows() -> None:
    whole = Batch.from_columns({"response_tokens": [[7] * 1000] * 1000, "id": [str(i) for i in range(1000)]})
    part = whole.slice(500, 2)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(part, protocol)
        assert len(data) < 10_000 + 2 * 1000 * 4
        assert pickle.loads(data) == part


def test_columns_are_added_never_overwritten() -> None:
    batch = Batch.from_rows(ROWS)
    with pytest.raises(DataError, match="never overwritten"):
        batch.add({"reward": [0.0, 0.0, 0.0]})
    with pytest.raises(DataError, match="has 1 rows, the batch has 3"):
        batch.add({"cost": [0.0]})


def test_errors_name_the_column_and_the_nearest_one() -> None:
    batch = Batch.from_rows(ROWS)
    with pytest.raises(DataError, match="did you mean 'reward'"):
        batch["rewards"]
    with pytest.raises(DataError, match=r"'mine'.*cannot become a tensor"):
        batch.tensor("mine")
    with pytest.raises(DataError, match="one length"):
        Batch.from_columns({"id": ["a"], "reward": [1.0, 2.0]})
    with pytest.raises(DataError, match="response_tokens"):
        Batch.from_columns({"response_tokens": [["a"]]})


def test_flat_tensors_become_ragged_columns_and_fp64_stays() -> None:
    flat = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    batch = Batch.from_rows(ROWS).add({"log_probs": (flat, [2, 0, 1]), "values": (flat.bfloat16(), [2, 0, 1])})
    assert torch.equal(batch.tensor("log_probs"), flat)
    assert batch.tensor("values").dtype == torch.float32
    with pytest.raises(DataError, match="lengths sum to 2"):
        batch.add({"returns": (flat, [1, 0, 1])})


def test_concat_fills_missing_columns_with_null() -> None:
    joined = Batch.concat([Batch.from_rows(ROWS), Batch.from_rows([{"id": "d"}])])
    assert joined["response_tokens"] == [[1, 2], [], [3], None]
    assert len(Batch.concat([])) == 0


def test_group_indices_keep_order_and_null_groups_stand_alone() -> None:
    batch = Batch.from_columns({"group": ["x", "y", "x", None, None]})
    assert batch.group_indices() == [[0, 2], [1], [3], [4]]


def test_parquet_round_trip_keeps_types(tmp_path: object) -> None:
    batch = Batch.from_rows(ROWS)
    path = f"{tmp_path}/batch.parquet"
    batch.to_parquet(path)
    assert Batch.from_parquet(path) == batch
    with pytest.raises(DataError, match=r"nowhere.*cannot be written"):
        batch.to_parquet(f"{tmp_path}/nowhere/batch.parquet")
    with open(path, "r+b") as file:
        file.truncate(20)
    with pytest.raises(DataError, match="not a readable Parquet file"):
        Batch.from_parquet(path)


@examples(50)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=8), st.data())
def test_slice_take_concat_agree_with_lists(rows: list[list[int]], data: st.DataObject) -> None:
    batch = Batch.from_columns({"response_tokens": rows})
    start = data.draw(st.integers(0, len(rows)))
    order = data.draw(st.permutations(range(len(rows))))
    assert batch.slice(start)["response_tokens"] == rows[start:]
    assert batch.take(order)["response_tokens"] == [rows[i] for i in order]
    assert Batch.concat([batch.slice(0, start), batch.slice(start)])["response_tokens"] == rows
    assert Batch.from_ipc(batch.slice(start).to_ipc())["response_tokens"] == rows[start:]
    assert batch.slice(start).tensor("response_tokens").tolist() == [t for r in rows[start:] for t in r]


def seconds_of(columns: int) -> float:
    """CPU seconds of what a step does with a batch of so many columns."""
    rows = [{"id": str(row), "group": "a", **{f"c{i}": i for i in range(columns)}} for row in range(4)]
    other = [{**row, **{f"c{i}": 0.5 for i in range(columns)}} for row in rows]
    first, second = Batch.from_rows(rows), Batch.from_rows(other)
    began = time.process_time()
    joined = Batch.concat([first, second])
    wide = joined.add({f"d{i}": [1] * 8 for i in range(columns)}).add(joined)
    assert len(wide.select(wide.columns).columns) == 2 * columns + 2
    return time.process_time() - began


def test_many_columns_take_one_pass() -> None:
    few, many = (min(seconds_of(count) for _ in range(3)) for count in (100, 800))
    assert many < 25 * few  # eight times as many: 64 if each looked for its place among the others

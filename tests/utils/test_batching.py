from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from verl.errors import ConfigError, DataError
from verl.utils.batching import DynamicBatchSampler, collate_fn


def padding(batches: list[list[int]], lengths: list[int]) -> float:
    places = sum(len(rows) * max(lengths[row] for row in rows) for rows in batches)
    return 1 - sum(lengths) / places


@given(
    lengths=st.lists(st.integers(1, 300), max_size=120),
    cap=st.integers(1, 1000),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_each_row_once_never_over_the_cap(lengths: list[int], cap: int, seed: int, shuffle: bool) -> None:
    sampler = DynamicBatchSampler(lengths, cap, lengths=lengths, seed=seed, shuffle=shuffle)
    for _ in range(2):
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= cap
        if lengths:
            assert padding(batches, lengths) < 0.1


def test_batches_are_full_on_realistic_lengths() -> None:
    draw = random.Random(0)
    lengths = [min(2048, 1 + int(draw.lognormvariate(5, 0.8))) for _ in range(2000)]
    sampler = DynamicBatchSampler(lengths, max_tokens_per_batch=4096, lengths=lengths)
    batches = list(sampler)
    assert padding(batches, lengths) < 0.03
    assert sum(lengths) / len(batches) > 0.85 * 4096


def test_order_is_a_function_of_seed_and_epoch() -> None:
    lengths = [5, 5, 5, 5, 9, 9, 9, 9] * 8
    one, same, other = (DynamicBatchSampler(lengths, 20, lengths=lengths, seed=s) for s in (1, 1, 2))
    first, second = list(one), list(one)
    assert first == list(same)
    assert first != second
    assert first != list(other)
    one.set_epoch(0)
    assert list(one) == first
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in second}


def test_with_a_data_loader() -> None:
    rows = [
        {"input_ids": list(range(1, 2 + i % 9)), "labels": [1] * (1 + i % 9), "score": i / 2, "text": str(i)}
        for i in range(40)
    ]
    sampler = DynamicBatchSampler(rows, 40, pad_token_id=99)
    seen: list[str] = []
    for batch in DataLoader(rows, batch_sampler=sampler, collate_fn=sampler.collate_fn):  # type: ignore[arg-type]
        assert batch["input_ids"].numel() <= 40
        for row, text in enumerate(batch["text"]):
            item, length = rows[int(text)], 1 + int(text) % 9
            assert batch["input_ids"][row, :length].tolist() == item["input_ids"]
            assert set(batch["input_ids"][row, length:].tolist()) <= {99}
            assert set(batch["labels"][row, length:].tolist()) <= {-100}
            assert batch["attention_mask"][row].sum() == length
            assert batch["score"][row] == item["score"]
        seen += batch["text"]
    assert sorted(seen, key=int) == [str(i) for i in range(40)]


@pytest.mark.parametrize(
    "rows",
    [[[1, 2], [3]], [torch.tensor([1, 2]), torch.tensor([3])], [{"prompt_tokens": [1, 2]}, {"prompt_tokens": [3]}]],
)
def test_kinds_of_rows(rows: list[Any]) -> None:
    assert DynamicBatchSampler(rows, 4).lengths == [2, 1]
    batch = collate_fn(rows, pad_token_id=7)
    assert batch["input_ids"].tolist() == [[1, 2], [3, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_lengths_that_cannot_be_seen() -> None:
    with pytest.raises(DataError, match="pass lengths="):
        DynamicBatchSampler(["text"])
    assert DynamicBatchSampler(["text"], lengths=[4]).lengths == [4]
    with pytest.raises(DataError, match="2 lengths were given for 1 rows"):
        DynamicBatchSampler(["x"], lengths=[1, 2])
    with pytest.raises(ConfigError, match="at least 1"):
        DynamicBatchSampler([[1]], 0)


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, verl.utils.batching; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_column_that_a_row_lacks_is_named() -> None:
    for rows in ([{"input_ids": [1], "w": 1.0}, {"input_ids": [1]}], [{"input_ids": [1]}, {"input_ids": [1], "w": 1}]):
        with pytest.raises(DataError, match=r"row [01] of the batch lacks column 'w'"):
            collate_fn(rows)


def test_rows_without_tokens_are_still_token_ids() -> None:
    batch = collate_fn([[], []])
    assert batch["input_ids"].shape == (2, 0) and batch["input_ids"].dtype == torch.int64

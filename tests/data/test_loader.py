from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.data.cursor import permutation
from verl.data.loader import PromptLoader
from verl.data.prompts import load_prompts, stream_prompts
from verl.data.tokenize import tokenize_prompts
from verl.errors import ConfigError, DataError


@given(size=st.integers(0, 200), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation_and_a_function_of_seed_and_epoch(size: int, seed: int, epoch: int) -> None:
    order = permutation(size, seed, epoch).tolist()
    assert sorted(order) == list(range(size))
    assert order == permutation(size, seed, epoch).tolist()


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    firsts = [int(permutation(10, 0, epoch)[0]) for epoch in range(2000)]
    assert all(150 < firsts.count(row) < 250 for row in range(10))  # uniform: 200 +- 13.4


def test_every_row_once_an_epoch_with_unique_ids() -> None:
    loader = PromptLoader(load_prompts([f"p{i}" for i in range(7)]), 3, seed=4)
    batches = [next(loader) for _ in range(14)]
    ids = [name for batch in batches for name in batch["id"]]
    assert len(set(ids)) == 42
    for epoch in range(6):
        assert {f"e{epoch}.{row}" for row in range(7)} == {name for name in ids if name.startswith(f"e{epoch}.")}
    for batch in batches:
        assert batch["group"] == batch["id"]
        assert [f"p{name.split('.')[1]}" for name in batch["id"]] == batch["prompt"]


@pytest.mark.parametrize(
    ("rows", "size", "epochs", "sizes"), [(7, 4, 1, [4, 3]), (3, 8, 1, [3]), (7, 4, 2, [4, 4, 4, 2])]
)
def test_the_last_batch_of_the_last_epoch_has_what_is_left(rows: int, size: int, epochs: int, sizes: list[int]) -> None:
    loader = PromptLoader(load_prompts([f"p{i}" for i in range(rows)]), size, seed=4)
    loader.end = rows * epochs
    batches = [next(loader) for _ in sizes]
    assert [len(batch) for batch in batches] == sizes
    ids = {name for batch in batches for name in batch["id"]}
    assert ids == {f"e{epoch}.{row}" for epoch in range(epochs) for row in range(rows)}
    assert len(next(loader)) == size  # which is read ahead and not used


def test_a_run_of_one_epoch_goes_on_for_another() -> None:
    prompts = load_prompts([f"p{i}" for i in range(7)])
    first = PromptLoader(prompts, 4, seed=4)
    first.end = 7
    seen = [name for _ in range(2) for name in next(first)["id"]]
    longer = PromptLoader(prompts, 4, seed=4)
    longer.load_state_dict(first.state_dict())
    longer.end = 14
    later = [next(longer)["id"] for _ in range(2)]
    assert [len(ids) for ids in later] == [4, 3] and len({*seen, *later[0], *later[1]}) == 14


class Stream:
    """Rows that depend on the epoch, as a shuffled stream's do."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"prompt": f"{self.epoch}/{i}"} for i in range(self.size))


@pytest.mark.parametrize("kind", ["shuffled", "in order", "stream"])
@pytest.mark.parametrize("taken", [0, 1, 5, 7, 8])
def test_resume_is_exact(kind: str, taken: int) -> None:
    def make() -> PromptLoader:
        if kind == "stream":
            return PromptLoader(stream_prompts(Stream(11)), 4)
        return PromptLoader(load_prompts([f"p{i}" for i in range(11)]), 4, seed=3, shuffle=kind == "shuffled")

    straight = make()
    expected = [next(straight) for _ in range(taken + 9)][taken:]
    first = make()
    for _ in range(taken):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = make()
    second.load_state_dict(state)
    assert [next(second) for _ in range(9)] == expected
    assert second.state_dict() == straight.state_dict()


def test_uneven_takes_do_not_change_the_order() -> None:
    data = load_prompts([f"p{i}" for i in range(10)])
    one, other = PromptLoader(data, 4, seed=1), PromptLoader(data, 5, seed=1)
    steady = [name for _ in range(5) for name in next(one)["id"]]
    uneven = [name for count in (1, 9, 3, 7) for name in other.take(count)["id"]]
    assert steady == uneven


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: PromptLoader(load_prompts(["a", "b", "x"]), 2), "digest was .* the same data and seed, or start anew"),
        (lambda: PromptLoader(load_prompts(["a", "b"]), 2), "rows was 3, is 2"),
        (lambda: PromptLoader(load_prompts(["a", "b", "c"]), 2, seed=1), "seed was 0, is 1"),
        (lambda: PromptLoader(load_prompts(["a", "b", "c"]), 2, shuffle=False), "shuffle"),
        (lambda: PromptLoader(stream_prompts(iter("abc")), 2), "is a stream"),
    ],
)
def test_a_place_in_other_data_is_refused(other: Any, message: str) -> None:
    state = PromptLoader(load_prompts(["a", "b", "c"]), 2).state_dict()
    with pytest.raises(DataError, match=message):
        other().load_state_dict(state)


def test_a_place_is_refused_where_any_column_changed_and_taken_where_only_tokens_came(tokenizer: Any) -> None:
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1), "extra_info": {"level": i}} for i in range(4)]

    def make(rows: list[Any], **options: Any) -> PromptLoader:
        return PromptLoader(load_prompts(rows, **options), 2)

    loader = make(rows)
    next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    again = PromptLoader(tokenize_prompts(load_prompts(rows), tokenizer)[0], 2)
    again.load_state_dict(state)
    assert next(again)["prompt"] == next(loader)["prompt"]
    changed = [rows[0] | {"answer": "0"}, *rows[1:]]
    for other in (make(changed), make([*rows[:3], rows[3] | {"extra_info": {"level": 9}}]), make(rows[::-1])):
        with pytest.raises(DataError, match="other data than list: digest was"):
            other.load_state_dict(state)
    chat = make(rows, system_prompt="Be brief.").state_dict()
    with pytest.raises(DataError, match="digest"):
        make(rows, system_prompt="Be verbose.").load_state_dict(chat)


def test_a_stream_that_ends_for_good_is_an_error_not_a_hang() -> None:
    loader = PromptLoader(stream_prompts(text for text in "abc"), 2)
    assert next(loader)["prompt"] == ["a", "b"]
    with pytest.raises(DataError, match="can be read only once"):
        next(loader)


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        PromptLoader(load_prompts(["a"]), 0)
    with pytest.raises(ConfigError, match="shuffle it at its source"):
        PromptLoader(stream_prompts(iter("ab")), 1, shuffle=True)


def test_batches_are_views_of_one_schema() -> None:
    data = load_prompts([{"prompt": "a", "extra_info": {"x": 1}}, {"prompt": "b", "extra_info": {"y": "z"}}])
    loader = PromptLoader(data, 1, seed=0)
    schemas = [next(loader).table.schema for _ in range(4)]
    assert all(one == other for one, other in pairwise(schemas))

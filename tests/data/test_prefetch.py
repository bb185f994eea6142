"""Reading ahead changes when a batch is read, never which, nor where a run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from verl.batch import Batch
from verl.data.loader import PromptLoader
from verl.data.prefetch import Prefetch, RowsAhead
from verl.data.prompts import load_prompts
from verl.errors import DataError


def loader() -> PromptLoader:
    return PromptLoader(load_prompts([f"prompt {i}" for i in range(7)]), batch_size=3, seed=1)


def test_batches_and_places_are_the_loaders_own() -> None:
    plain, ahead = loader(), Prefetch(loader())
    assert ahead.state_dict() == plain.state_dict()
    for _ in range(6):
        assert next(ahead) == next(plain)
        assert ahead.state_dict() == plain.state_dict()


@pytest.mark.parametrize("stop", range(4))
def test_a_run_goes_on_where_it_was(stop: int) -> None:
    plain = loader()
    expected = [next(plain)["id"] for _ in range(6)]
    first = Prefetch(loader())
    seen = [next(first)["id"] for _ in range(stop)]
    place = first.state_dict()
    next(first)  # what comes after the checkpoint is lost with the run
    second = Prefetch(loader())
    next(second)
    second.load_state_dict(place)
    assert seen + [next(second)["id"] for _ in range(6 - stop)] == expected


class Slow:
    """A loader of which every batch takes a while; the fourth cannot be read."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Slow:
        return self

    def __next__(self) -> Batch:
        time.sleep(0.2)
        self.number += 1
        if self.number == 4:
            raise DataError("line 4 is no JSON")
        return Batch.from_columns({"id": [str(self.number)]})

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def test_reading_and_training_overlap_and_errors_come_when_it_is_their_turn() -> None:
    ahead = Prefetch(Slow())
    assert next(ahead)["id"] == ["1"]
    for number in ("2", "3"):
        time.sleep(0.3)  # training
        began = time.perf_counter()
        assert next(ahead)["id"] == [number]
        assert time.perf_counter() - began < 0.15
    with pytest.raises(DataError, match="line 4"):
        next(ahead)
    assert ahead.state_dict() == {"number": 3}


@given(size=st.integers(0, 30), broken=st.integers(0, 40), counts=st.lists(st.integers(1, 7), max_size=12))
@examples(60)
def test_rows_read_ahead_are_those_of_the_source_and_errors_come_where_their_row_would(
    size: int, broken: int, counts: list[int]
) -> None:
    def source() -> Iterator[int]:
        for number in range(size):
            if number == broken:
                raise DataError(f"row {number}")
            yield number

    plain, ahead = source(), RowsAhead(source())
    for count in counts:
        for _ in range(count):
            try:
                expected: Any = next(plain, None)
            except DataError as error:
                with pytest.raises(DataError, match=str(error)):
                    ahead.next(None)
            else:
                assert ahead.next(None) == expected
        ahead.read(count)
    ahead.close()

"""Sources without a length: their own state at a resume, and one source for several tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from verl.data import get_dataloader
from verl.data.loader import PromptLoader
from verl.data.prompts import stream_prompts
from verl.data.task_loader import MixedLoader, TaskLoader
from verl.errors import ConfigError


class Rows:
    """Rows of tasks by turns; counts what is read."""

    def __init__(self, size: int = 40, tasks: str = "ab") -> None:
        self.size, self.tasks, self.reads, self.epoch = size, tasks, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def row(self, number: int) -> dict[str, Any]:
        self.reads += 1
        return {"prompt": f"{self.epoch}.{number}", "task": self.tasks[number % len(self.tasks)]}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.row, range(self.size))


class Stateful(Rows):
    """As data sets of Hugging Face: an iteration of the epoch of a state begins there."""

    state: dict[str, int] | None = None
    at = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        state, self.at = self.state, 0
        self.at = state["at"] if state is not None and state["epoch"] == self.epoch else 0
        while self.at < self.size:
            self.at += 1
            yield self.row(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Cursor(Rows):
    """All its iterators have one cursor."""

    at = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.at >= self.size:
            self.at = 0
        while self.at < self.size:
            self.at += 1
            yield self.row(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Mosaic(Stateful):
    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:  # type: ignore[override]
        assert from_beginning
        return {"epoch": self.epoch, "at": num_samples}


class Shuffled(Stateful):
    """Its state does not hold its buffer, so that it goes on with other rows."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        buffer: list[dict[str, Any]] = []
        rng = random.Random(self.epoch)
        for row in super().__iter__():
            buffer.append(row)
            if len(buffer) > 5:
                yield buffer.pop(rng.randrange(len(buffer)))
        yield from buffer


class Unsavable(Stateful):
    def state_dict(self) -> Any:
        return {"state": object()}


def taken(loader: PromptLoader, count: int) -> list[str]:
    return [text for _ in range(count) for text in next(loader)["prompt"]]


@pytest.mark.parametrize("kind", [Stateful, Cursor, Mosaic])
@pytest.mark.parametrize("before", [1, 5, 9, 10, 11, 25])
def test_a_resume_goes_on_by_the_sources_own_state(kind: type[Rows], before: int) -> None:
    whole = taken(PromptLoader(stream_prompts(kind()), 4), before + 12)
    first = PromptLoader(stream_prompts(kind()), 4)
    taken(first, before)
    place = json.loads(json.dumps(first.state_dict()))
    source = kind()
    second = PromptLoader(stream_prompts(source), 4)
    second.load_state_dict(place)
    assert taken(second, 1) == whole[4 * before : 4 * before + 4]
    assert source.reads <= 4 + 1  # and the row that it was at, to see that it is there
    assert taken(second, 11) == whole[4 * before + 4 :]


@pytest.mark.parametrize("kind", [Shuffled, Unsavable, Rows])
def test_a_state_that_does_not_lead_on_is_skipped_to(kind: type[Rows], caplog: pytest.LogCaptureFixture) -> None:
    whole = taken(PromptLoader(stream_prompts(kind()), 4), 15)
    first = PromptLoader(stream_prompts(kind()), 4)
    taken(first, 5)
    second = PromptLoader(stream_prompts(kind()), 4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert taken(second, 10) == whole[20:]
    assert ("does not lead on" in caplog.text) == (kind is Shuffled)


@pytest.mark.parametrize("mark", [3, "x", [], {}, {"state": 3}, {"state": {"at": "x", "epoch": 0}, "row": "y"}])
def test_any_mark_is_harmless(mark: object) -> None:
    loader = PromptLoader(stream_prompts(Stateful()), 4)
    loader.load_state_dict({"epoch": 0, "position": 8, "stream": True, "mark": mark})
    assert taken(loader, 1) == ["0.8", "0.9", "0.10", "0.11"]


@examples(100)
@given(st.sampled_from([Rows, Cursor, Stateful]), st.lists(st.sampled_from("abc"), max_size=60), st.integers(0, 59))
def test_each_task_gets_all_its_rows_of_a_source_that_they_share(kind: type[Rows], order: list[str], cut: int) -> None:
    def make() -> dict[str, Any]:
        return get_dataloader(kind(12, "abc"), dict.fromkeys("abc", 1.0), 3).sources

    alone = {
        name: [f"{epoch}.{row}" for epoch in range(99) for row in range("abc".index(name), 12, 3)] for name in "abc"
    }
    sources, read = make(), dict.fromkeys("abc", 0)
    for number, name in enumerate(order):
        if number == cut:  # a resume, in whatever epochs the tasks are
            states = {task: source.state_dict() for task, source in sources.items()}
            sources = make()
            for task, source in sources.items():
                source.load_state_dict(states[task])
        (text,) = sources[name].take(1)["prompt"]
        assert text == alone[name][read[name]]
        read[name] += 1


def test_a_source_is_read_once_for_all_tasks() -> None:
    source = Rows(40, "ab")
    loader = get_dataloader(source, {"a": 1.0, "b": 1.0}, 4)
    for _ in range(9):
        next(loader)
    assert source.reads <= 40
    mapped = Cursor(40)
    loader = get_dataloader({"x": mapped, "y": mapped}, None, 4)
    seen = [next(loader) for _ in range(5)]
    for name in "xy":
        texts = [text for batch in seen if name in batch for text in batch[name]["prompt"]]
        assert texts == [f"0.{number}" for number in range(len(texts))]
    mapped = Cursor(40)
    mixed = MixedLoader({"x": mapped, "y": mapped}, {"x": 1.0, "y": 1.0}, batch_size=4)
    assert sorted(next(mixed)["prompt"]) == ["0.0", "0.0", "0.1", "0.1"]
    streams = {name: PromptLoader(stream_prompts(mapped), 1) for name in "xy"}
    with pytest.raises(ConfigError, match="two tasks read one iterable"):
        TaskLoader(streams, batch_size=2)

"""What `fit` takes: a `DataLoader` with its collator, data sets of torch and of Hugging Face's kind, files, lists."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import verl
from tests.data.frame import Frame
from tests.trainer.cases import SHORT, low_bytes, make
from verl.data.loader import PromptLoader
from verl.data.prompts import load_prompts
from verl.data.task_loader import TaskLoader
from verl.errors import ConfigError, DataError
from verl.models.loading import load_tokenizer
from verl.weights.shard import checksum

ROWS = [{"prompt": f"Say {number}: ", "answer": number} for number in range(6)]
PAIRS = [{"prompt": f"Say {i}: ", "chosen": "aaaa", "rejected": "zzzz zz"} for i in range(4)]


class Rows(Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class HubRows:
    """What a `datasets.Dataset` shows of itself."""

    column_names = ("prompt", "answer")

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


def seen(tiny: Path, data: Any, steps: int | None = None, **options: Any) -> list[list[str]]:
    """The prompts of each step of `fit`."""
    steps_seen: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], answer: list[int]) -> list[float]:
        assert [f"Say {number}: " for number in answer] == prompts
        steps_seen.append(sorted(set(prompts)))
        return low_bytes(completions)

    reward.whole_batch = True  # type: ignore[attr-defined]
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
    verl.Trainer(actor, reward_fn=reward, algorithm="grpo", n=2, log_dir=False).fit(data, steps, **options)
    return steps_seen


@pytest.mark.parametrize("kind", ["torch", "hub", "list", "file", "arrow", "frame"])
def test_rows_are_taken_as_they_are(tiny: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data: Any = {
        "torch": Rows(ROWS),
        "hub": HubRows(ROWS),
        "list": ROWS,
        "file": str(tmp_path / "rows.jsonl"),
        "arrow": pa.Table.from_pylist(ROWS),
        "frame": Frame(ROWS),
    }[kind]
    found = seen(tiny, data, batch_size=4)
    assert [len(step) for step in found] == [4, 4] and len({prompt for step in found for prompt in step}) == 6
    if kind != "list":
        with pytest.raises(ConfigError, match="needs their number in a step: batch_size=N"):
            seen(tiny, data)


def test_several_splits_are_no_batches(tiny: Path) -> None:
    splits = {"train": Rows(ROWS), "test": Rows(ROWS)}
    with pytest.raises(ConfigError, match="needs their number in a step: batch_size=N"):
        seen(tiny, splits, 1)
    with pytest.raises(DataError, match=r"several sets of rows, \['test', 'train'\]"):
        seen(tiny, splits, 1, batch_size=2)


def test_a_stream_needs_its_number_of_steps(tiny: Path) -> None:
    assert seen(tiny, Stream(), 2, batch_size=2) == [["Say 0: ", "Say 1: "], ["Say 2: ", "Say 3: "]]
    with pytest.raises(ConfigError, match="the data have no length: say how many steps"):
        seen(tiny, Stream(), batch_size=2)


def test_a_data_loader_with_its_own_collator_begins_anew(tiny: Path) -> None:
    plain: DataLoader[Any] = DataLoader(Rows(ROWS), batch_size=4)
    expected = [[f"Say {number}: " for number in range(4)], ["Say 4: ", "Say 5: "]]
    assert seen(tiny, plain) == expected and seen(tiny, plain, 3) == [*expected, expected[0]]
    with pytest.raises(ConfigError, match="a DataLoader has batches of its own size"):
        seen(tiny, plain, 1, batch_size=2)


def test_a_collator_that_tokenizes(tiny: Path) -> None:
    """Padded `input_ids` are the prompts, and with `labels` the demonstrations."""
    tokenizer = load_tokenizer(tiny)

    def collate(rows: list[Any]) -> dict[str, Any]:
        padded = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left", return_tensors="pt")
        return {**padded, "answer": torch.tensor([row["answer"] for row in rows])}

    loader: DataLoader[Any] = DataLoader(Rows([*ROWS, {"prompt": "Say 10: ", "answer": 10}]), 4, collate_fn=collate)
    assert seen(tiny, loader)[1] == ["Say 10: ", "Say 4: ", "Say 5: "]

    def labelled(rows: list[Any]) -> dict[str, Any]:
        ids = [tokenizer(row["prompt"] + "aaaa")["input_ids"] for row in rows]
        asked = [len(tokenizer(row["prompt"])["input_ids"]) for row in rows]
        labels = [[-100] * count + tokens[count:] for tokens, count in zip(ids, asked, strict=True)]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}

    ours, theirs = (offline(tiny, "sft") for _ in range(2))
    ours.fit(DataLoader(Rows(ROWS), 6, collate_fn=labelled), 2)  # type: ignore[arg-type]
    rows = [{**row, "completion": "aaaa"} for row in ROWS]
    data = verl.OfflineDatasetLoader(rows, tokenizer, batch_size=6, max_response_length=4)  # without their ends
    theirs.fit([data.batch, data.batch], 2)
    assert checksum(ours.actor.shards()) == checksum(theirs.actor.shards())


def offline(tiny: Path, name: str) -> verl.Trainer:
    return verl.Trainer(verl.Actor(str(tiny), optim={"lr": 3e-3}), algorithm=name, log_dir=False)


def test_recorded_rows_go_straight_into_fit(tiny: Path) -> None:
    trainer = offline(tiny, "dpo")
    before = trainer.evaluate_loss(PAIRS)["loss"]
    trainer.fit(Rows(PAIRS), batch_size=2)
    assert trainer.steps == 2
    trainer.fit(DataLoader(Rows(PAIRS), 4), 2)
    assert trainer.steps == 4 and trainer.evaluate_loss(PAIRS)["loss"] < before


def test_lists_of_batches_are_batches(tiny: Path) -> None:
    trainer = make(tiny, "grpo", n=2)
    trainer.fit([["a", "b"], ["c"]])
    assert trainer.steps == 2


class Slow:
    """Data that say when a batch begins to be read."""

    def __init__(self) -> None:
        self.begun = 0
        self.changed = threading.Condition()

    def note(self) -> None:
        with self.changed:
            self.begun += 1
            self.changed.notify_all()

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.begun >= count, timeout=10)


class SlowLoader(PromptLoader):
    slow: Slow

    def __next__(self) -> Any:
        self.slow.note()
        return super().__next__()


class SlowTasks(TaskLoader):
    slow: Slow

    def __next__(self) -> Any:
        self.slow.note()
        return super().__next__()


class SlowRows(Rows):
    slow: Slow

    def __getitem__(self, index: int) -> Any:
        self.slow.note()
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["loader", "DataLoader", "tasks"])
def test_the_next_batch_is_read_while_this_one_trains(tiny: Path, kind: str) -> None:
    slow, seen, steps = Slow(), [], 3
    prompts = load_prompts(ROWS)
    given: Any
    if kind == "loader":
        given = SlowLoader(prompts, 2)
    elif kind == "DataLoader":
        rows = SlowRows([row["prompt"] for row in ROWS])
        rows.slow, given = slow, DataLoader(rows, batch_size=1)
    else:
        given = SlowTasks({"a": PromptLoader(prompts, 1), "b": PromptLoader(prompts, 1)}, batch_size=2)
    given.slow = slow

    def reward(texts: list[str]) -> list[float]:
        step = trainer.steps + 1
        seen.append((step, slow.wait_for(step + 1)))  # which would be in vain if the next batch came after the step
        return low_bytes(texts)

    reward.whole_batch = True  # type: ignore[attr-defined]
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
    names = ["a", "b"] if kind == "tasks" else ["main"]
    tasks = [verl.Task(name, "grpo", {"reward": reward}, n=2) for name in names]
    trainer = verl.Trainer(actor, tasks=tasks, log_dir=False)
    trainer.fit(given, steps)
    assert {step for step, _ in seen} == {1, 2, 3} and all(in_time for _, in_time in seen)
    if kind == "loader":  # what was read ahead is the next batch again
        assert given.state_dict()["position"] == (2 * steps) % 6 and given.state_dict() == trainer.position
        trainer.fit(given, 1)
        assert given.state_dict()["position"] == 2


@pytest.mark.parametrize("kind", [list, iter])
def test_prompts_of_rows_keep_to_a_length(tiny: Path, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = ["a" * length for length in (3, 9, 4, 12)]
    trainer = make(tiny, "grpo", n=2)
    seen: list[int] = []
    trainer.add_metric(
        "longest", lambda samples: float(max(seen.append(n) or n for n in samples.lengths("prompt_tokens")))
    )
    trainer.fit(kind(rows), 1, batch_size=2, max_prompt_length=5, truncation="drop")
    assert sorted({*seen}) == [3, 4]
    if kind is list:
        assert "2 prompts of" in caplog.text and "longer than 5 tokens and were dropped" in caplog.text
        seen.clear()
        trainer.fit(rows, 2, batch_size=2, max_prompt_length=5, truncation="left")
        assert sorted({*seen}) == [3, 4, 5]
        with pytest.raises(DataError, match="raise max_prompt_length, or set truncation"):
            trainer.fit(rows, 1, batch_size=2, max_prompt_length=5)
        with pytest.raises(ConfigError, match="max_prompt_length is of rows"):
            trainer.fit([rows], 1, max_prompt_length=5)

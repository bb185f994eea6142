"""While a step goes on the next one's data are read, whatever the data and the trainer; nothing of it is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

import verl
from tests.trainer.cases import SHORT, low_bytes
from tests.trainer.test_interleaved import made
from tests.trainer.test_interleaved import trainer_of as interleaved
from verl.batch import Batch
from verl.data.loader import PromptLoader
from verl.data.offline import OfflineDatasetLoader
from verl.data.prompts import load_prompts, stream_prompts
from verl.data.task_loader import MixedLoader, TaskLoader
from verl.trainer.batches import prepare_prompts
from verl.trainer.evaluation import HeldOut
from verl.trainer.task_weights import DynamicTaskWeightScheduler

WAIT = 60  # seconds, at most: what is waited for comes at once


class Read:
    """Set once a number of rows have been read by a thread that is not the one that trains."""

    def __init__(self, rows: int) -> None:
        self._left, self._main = rows, threading.get_ident()
        self.done = threading.Event()

    def __call__(self) -> None:
        self._left -= 1
        if self._left <= 0 and threading.get_ident() != self._main:
            self.done.set()


class Rows:
    """Prompts without a length; `read` is called for each."""

    def __init__(self, read: Callable[[], None], size: int = 1000) -> None:
        self.read, self.size = read, size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.size):
            self.read()
            yield {"prompt": f"Tell me about the number {number}"}


class Listed(Dataset[dict[str, Any]]):
    def __init__(self, read: Callable[[], None]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read()
        return {"prompt": f"Tell me about the number {index}"}


class Own:
    """A loader of a user's."""

    def __init__(self, read: Callable[[], None]) -> None:
        self.read, self.number = read, 0

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> list[str]:
        self.read()
        self.read()
        self.number += 1
        return [f"Prompt {self.number}", f"Another {self.number}"]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Recorded(OfflineDatasetLoader):
    """Recorded responses of which each batch counts as two rows."""

    read: Callable[[], None] = staticmethod(lambda: None)

    def take(self, count: int) -> Batch:
        self.read()
        self.read()
        return super().take(count)


def recorded(tiny: Path, rows: list[dict[str, Any]], read: Callable[[], None]) -> Recorded:
    loader = Recorded(rows, verl.Actor(str(tiny)).tokenizer, batch_size=2)
    loader.read = read
    return loader


def streams(read: Callable[[], None]) -> dict[str, PromptLoader]:
    return {name: PromptLoader(stream_prompts(Rows(read)), 1) for name in ("low", "high")}


def tasks() -> list[verl.Task]:
    return made()


def of_one(tiny: Path, algorithm: str = "grpo") -> verl.Trainer:
    actor = verl.Actor(str(tiny), optim={"lr": 1e-3}, sampling=SHORT)
    reward = low_bytes if algorithm == "grpo" else None
    options: dict[str, Any] = {"n": 2} if algorithm == "grpo" else {}
    return verl.Trainer(actor, reward=reward, algorithm=algorithm, log_dir=False, **options)


def of_tasks(tiny: Path) -> verl.Trainer:
    return verl.Trainer(verl.Actor(str(tiny), optim={"lr": 1e-3}, sampling=SHORT), tasks=tasks(), log_dir=False)


def scheduled(tiny: Path) -> verl.Trainer:
    trainer = of_tasks(tiny)
    trainer.set_task_scheduler(DynamicTaskWeightScheduler({"low": 1.0, "high": 1.0}))
    return trainer


PAIRS = [{"prompt": f"{i} + 1 =", "chosen": " more", "rejected": " less"} for i in range(40)]
TEXTS = [{"prompt": f"{i} + 1 =", "completion": " more"} for i in range(40)]
#: By kind: the trainer, and its data of two rows a batch (of several tasks four). Rows are counted where they are read.
KINDS: dict[str, tuple[Callable[[Path], verl.Trainer], Callable[[Path, Callable[[], None]], Any]]] = {
    "a stream": (of_one, lambda tiny, read: PromptLoader(stream_prompts(Rows(read)), 2)),
    "rows of a stream": (of_one, lambda tiny, read: Rows(read)),
    "a DataLoader": (of_one, lambda tiny, read: DataLoader(Listed(read), 2)),
    "a user's loader": (of_one, lambda tiny, read: Own(read)),
    "data sets by shares": (of_one, lambda tiny, read: MixedLoader(streams(read), {"low": 1, "high": 1}, batch_size=4)),
    "demonstrations": (lambda tiny: of_one(tiny, "sft"), lambda tiny, read: recorded(tiny, TEXTS, read)),
    "pairs": (lambda tiny: of_one(tiny, "dpo"), lambda tiny, read: recorded(tiny, PAIRS, read)),
    "several tasks": (of_tasks, lambda tiny, read: TaskLoader(streams(read), batch_size=4)),
    "a scheduler": (scheduled, lambda tiny, read: TaskLoader(streams(read), batch_size=4)),
    "interleaved": (
        lambda tiny: interleaved(tiny, tasks()),
        lambda tiny, read: TaskLoader(streams(read), batch_size=4),
    ),
}


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_batch_is_read_while_a_step_goes_on(kind: str, tiny: Path) -> None:
    """The log record of the first step, which is a part of it, waits until rows of the next one have been read."""
    make, data = KINDS[kind]
    trainer, read = make(tiny), Read(3)
    waited: list[bool] = []
    trainer.on_log_hook(lambda step, record: waited.append(read.done.wait(WAIT)))
    trainer.fit(data(tiny, read), 2, batch_size=2 if kind == "rows of a stream" else None)
    assert waited == [True, True]


@pytest.mark.slow
def test_asynchronous_training_reads_ahead_too(tiny: Path) -> None:
    actor, read, waited = verl.Actor(str(tiny), optim={"lr": 1e-3}, sampling=SHORT), Read(3), []
    trainer = verl.AsyncTrainer(
        actor, reward_fn=low_bytes, algorithm="grpo", n=2, log_dir=False, batch_size=2, max_staleness=0, deadline=200
    )
    trainer.on_log_hook(lambda step, record: waited.append(read.done.wait(WAIT)))
    try:
        trainer.fit(PromptLoader(stream_prompts(Rows(read)), 2), 2)
    finally:
        trainer.close()
    assert waited == [True, True]


@pytest.mark.quick("interleaved")
@pytest.mark.parametrize("kind", ["a scheduler", "interleaved", "data sets by shares"])
def test_what_was_read_ahead_is_not_lost_on_a_checkpoint(kind: str, tiny: Path, tmp_path: Path) -> None:
    """A run that is cut in two learns from the same prompts as a whole one; so does a `fit` after another."""
    make, data = KINDS[kind]

    def run(*steps: int, resume: bool = False) -> tuple[Any, list[dict[str, Any]]]:
        records: list[dict[str, Any]] = []
        trainer = make(tiny)
        trainer.on_log_hook(lambda step, record: records.append(record))
        if resume:
            trainer.load_checkpoint(tmp_path / "cut")
        loader = data(tiny, lambda: None)
        for count in steps:
            trainer.fit(loader, count)
        if not resume and len(steps) == 1 and steps[0] == 2:
            trainer.save_checkpoint(tmp_path / "cut")
        return loader.state_dict(), [{k: v for k, v in r.items() if k.endswith("reward/mean")} for r in records]

    if kind == "interleaved":  # what is trained with what depends on the clock; where a run goes on does not
        place, _ = run(2)
        assert run(0, resume=True)[0] == place
        return
    place, records = run(5)
    assert run(2, 3) == (place, records)
    _, first = run(2)
    again, rest = run(3, resume=True)
    assert (again, first + rest) == (place, records)


class Counting:
    """A tokenizer that counts how often it is called for texts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.texts = tokenizer, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: Any, **options: Any) -> Any:
        self.texts += text if isinstance(text, list) else [text]
        return self._tokenizer(text, **options)


@pytest.mark.slow
def test_what_is_evaluated_again_is_tokenised_once(tiny: Path) -> None:
    trainer = of_one(tiny)
    counting = trainer.actor.tokenizer = Counting(trainer.actor.tokenizer)
    asked = ["Say one", "Say two"]
    first = trainer.evaluate(asked)
    trainer.held_out = HeldOut(load_prompts(asked), every=1)
    trainer.fit(PromptLoader(load_prompts(["Go"]), 1), 2)
    assert [counting.texts.count(text) for text in asked] == [1, 1]
    assert trainer.held_out.first["headline"] == "reward" and trainer.held_out.last["step"] == 2
    asked[1] = "Say three"  # the same list, with another problem
    again = trainer.evaluate(asked)
    assert counting.texts.count("Say three") == 1 and again.samples["prompt"] == asked != first.samples["prompt"]
    trainer.actor.tokenizer = other = Counting(counting._tokenizer)
    trainer.evaluate(asked)
    assert other.texts.count("Say three") == 1, "another tokenizer has other tokens"


def test_prompts_are_tokenised_by_the_thread_that_reads(tiny: Path) -> None:
    trainer, threads = of_one(tiny), []
    tokenizer = trainer.actor.tokenizer

    class Noting(verl.Trainer):
        def step(self, prompts: Any) -> dict[str, Any]:
            threads.append("prompt_tokens" in prompts)
            return super().step(prompts)

    trainer = Noting(trainer.actor, reward_fn=low_bytes, algorithm="grpo", n=2, log_dir=False)
    prompts = load_prompts(["Say one", "Say two", "Say three"])
    trainer.fit(PromptLoader(prompts, 2), 2)
    assert threads == [True, True] and "prompt_tokens" not in prompts.batch
    assert prepare_prompts(trainer, ["Say one"])["prompt_tokens"] == [tokenizer.encode("Say one")]

"""Whatever a public constructor or call is given: an error of this package, a TypeError about a missing or unknown
argument, or something that works with finite numbers. Calls are made from signatures."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from tests.algorithms import test_options
from tests.algorithms.support import OFFLINE, ONLINE
from tests.conftest import save_tiny
from verl.algorithms import make_algorithm
from verl.batch import Batch
from verl.data.prompts import load_prompts
from verl.data.task_loader import get_dataloader
from verl.errors import VerlError
from verl.rewards.make import make_reward
from verl.rollout.guards import GuardModel
from verl.rollout.tools import ToolEpisode, tool
from verl.trainer.evaluation import HeldOut, binomial_interval, paired_bootstrap
from verl.trainer.guard import SafetyGuard
from verl.trainer.task_weights import DynamicTaskWeightScheduler
from verl.utils.batching import DynamicBatchSampler

ODD: tuple[Any, ...] = (
    "x", "", "1", b"x", 0, 1, -1, -2, 2, 2**31, 2**63, 10**400, 0.0, 0.5, 1.5, -0.5, -1.0, 1e308, math.nan, math.inf,
    -math.inf, True, False, None, [], [None], ["a"], [1, 2], (), (1.0,), {}, {"a": 1}, {1: 2}, {"a": math.nan},
    object(),
    Path("some/where"), torch.zeros(2), range(3), complex(1, 1),
)  # fmt: skip
#: Arguments that no call is tried with: they start processes or listen.
LEFT_OUT = {"placement", "device_map", "num_rollout_workers", "num_update_workers", "workers"}


@dataclass
class Target:
    """A call with arguments that work, and what is then done with its result, whose numbers are given back."""

    call: Callable[..., Any]
    good: dict[str, Any]
    use: Callable[[Any], Any] = lambda made: None
    #: Of another call, to which `**options` go.
    further: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        own = [p.name for p in inspect.signature(self.call).parameters.values() if p.kind not in kinds]
        return [name for name in (*own, *self.further) if name not in LEFT_OUT | {"self"}]


@cache
def model(folder: Path) -> verl.Actor:
    return verl.Actor(str(save_tiny(folder / "fuzzed")), sampling={"max_new_tokens": 3})


def letters(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def step(trainer: Any) -> Any:
    numbers = trainer.step(["ab", "cd"])
    return [value for value in numbers.values() if isinstance(value, float)]


def sampled(actor: verl.Actor, params: verl.SamplingParams) -> Any:
    if params.max_new_tokens > 50:
        return []
    return actor.generate_sequences(["ab"], **asdict(params)).tensor("rollout_log_probs").tolist()


def learned(name: str) -> Callable[[Any], Any]:
    def use(algorithm: Any) -> Any:
        batch = algorithm.extend(test_options.samples(name, 0))
        if name == "kto":
            return []
        return test_options.losses(algorithm, "actor", algorithm.prepare(batch)[0], 0)[:1]

    return use


def targets(folder: Path) -> Iterator[Target]:
    actor = model(folder)
    path = actor.path if hasattr(actor, "path") else str(folder / "fuzzed")
    options = ("lr", "max_new_tokens", "top_p", "micro_batch_size", "use_amp", "dtype", "epochs", "kv_cache_gb")
    yield Target(verl.Actor, {"model": path}, lambda made: made.generate_sequences(["ab"], max_new_tokens=2), options)
    yield Target(verl.Critic, {"model": path}, further=options[:1])
    reward = (
        "timeout",
        "retries",
        "default_reward",
        "max_failure_rate",
        "smoothing",
        "batch_size",
        "whole_batch",
        "name",
    )
    yield Target(verl.Reward, {"reward_fn": letters}, lambda made: made.get_reward(["ab", "c"])["reward"], reward)
    yield Target(
        make_reward, {"source": {"a": letters, "b": (letters, 0.5)}}, further=("weights", "partial", "timeout")
    )
    for kind in ("math", "code", "task"):
        yield Target(
            make_reward, {"source": kind}, further=("timeout", "retries", "name", "exact", "parallel", "partial")
        )
    url = {"url": "http://127.0.0.1:9"}
    judge = ("template", "parse", "scale", "system", "max_tokens", "temperature", "timeout", "retries", "api_key")
    yield Target(verl.Reward, {**url, "template": "{response}"}, further=judge)
    yield Target(
        verl.Updater, {"algorithm": "grpo", "actor": actor}, further=("clip_ratio", "kl_in", "norm_adv_by_std")
    )
    trainer = {"actor": actor, "reward_fn": letters, "log_dir": False, "n": 2}
    yield Target(verl.Trainer, trainer, step, ("clip_ratio", "kl_coef", "gamma"))
    yield Target(verl.AsyncTrainer, {**trainer, "batch_size": 2}, further=("clip_ratio", "n", "save_every"))
    task = {"algorithm": "grpo", "sources": {"reward": letters}}
    yield Target(verl.Task, {"name": "a", **task})
    both = [verl.Task(name, **task) for name in ("a", "b")]
    yield Target(verl.InterleavedTrainer, {"actor": actor, "tasks": both, "log_dir": False}, further=("update_freq",))
    yield Target(verl.SamplingParams, {"max_new_tokens": 3}, lambda made: sampled(actor, params=made))
    yield Target(
        actor.generate_sequences, {"prompts": ["ab"]}, further=("max_new_tokens", "temperature", "top_k", "stop")
    )
    rows = [{"prompt": "ab", "task": "x"}, {"prompt": "cd", "task": "y"}]
    yield Target(get_dataloader, {"dataset_path": rows}, next)
    yield Target(load_prompts, {"source": rows})
    yield Target(verl.OfflineDatasetLoader, {"source": [{"prompt": "a", "response": "b"}]}, next)
    yield Target(DynamicBatchSampler, {"dataset": ["ab", "abc"]}, list)
    yield Target(verl.RLDataPipeline, {})
    yield Target(verl.RolloutNode, {"actor": actor})
    yield Target(verl.RewardNode, {"reward": letters}, further=reward)
    yield Target(verl.UpdateNode, {"updater": verl.Updater("grpo", actor=actor)})
    yield Target(verl.ResourcePool, {"devices": "cpu:0-1"}, len)
    yield Target(verl.DeviceMesh, {"placement": {"actor": "cpu:0"}}, str)
    batch = Batch.from_columns({"a": [1.0, 2.0]})
    yield Target(batch.take, {"indices": [0, 1]}, len)
    yield Target(batch.slice, {"start": 0}, len)
    yield Target(batch.row, {"index": 0})
    yield Target(Batch.from_columns, {"columns": {"a": [1]}}, len)
    yield Target(Batch.from_rows, {"rows": [{"a": 1}]}, len)
    yield Target(SafetyGuard, {"monitor_metrics": ["reward"]}, lambda made: made.observe({"reward": 0.5, "step": 1}))
    weights = {"initial_weights": {"a": 1.0, "b": 2.0}}
    yield Target(DynamicTaskWeightScheduler, weights, lambda made: made.update(1, {"a": {"reward/mean": 1.0}}))
    yield Target(HeldOut, {"rows": load_prompts(["ab"])})
    yield Target(binomial_interval, {"successes": 1, "total": 2}, lambda made: [made.low, made.high])
    yield Target(paired_bootstrap, {"before": [0.0, 1.0], "after": [1.0, 1.0]}, lambda made: [made.low, made.high])
    yield Target(ToolEpisode, {"tools": [count]})
    yield Target(tool, {"function": count})
    yield Target(GuardModel, {"model_name": path})
    for name in (*ONLINE, *OFFLINE):
        further = tuple(field for field in vars(make_algorithm(name)) if not field.startswith("_"))
        yield Target(lambda _name=name, **given: make_algorithm(_name, **given), {}, learned(name), further)


def count(text: str) -> int:
    """Letters of a text.

    Args:
        text: the text.
    """
    return len(text)


def numbers_of(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_of(item)


def attempt(target: Target, name: str, value: Any) -> str | None:
    """What is wrong with what came of it; None: nothing."""
    given = {**target.good, name: value}
    try:
        made = target.call(**given)
        if not (isinstance(value, int) and abs(value) > 2**20):  # what is large in earnest may take its time
            numbers = list(numbers_of(target.use(made)))
            return None if all(map(math.isfinite, numbers)) else f"numbers that are not finite: {numbers[:5]}"
    except VerlError as error:
        return None if str(error) else "an error without a message"
    except TypeError as error:
        if re.search(r"(missing|unexpected keyword|positional|multiple values)", str(error)):
            return None
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def check(folder: Path, share: float = 1.0) -> int:
    """So many calls of all, drawn at random; how many there were."""
    rng, wrong, calls = random.Random(0), [], 0
    for target in targets(folder):
        for name, value in itertools.product(target.names, ODD):
            if rng.random() < share:
                calls += 1
                if problem := attempt(target, name, value):
                    wrong.append(f"{target.call.__qualname__}({name}={value!r}): {problem}")
    assert not wrong, "\n".join(wrong)
    return calls


def test_odd_arguments_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(tmp_path, 0.04) >= 300


@pytest.mark.slow
def test_every_odd_argument_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(tmp_path) >= 3000

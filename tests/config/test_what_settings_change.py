"""Every setting states at its definition what it changes, and does."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from tests.conftest import save_tiny
from verl.algorithms import make_algorithm
from verl.batch import Batch
from verl.config import describe
from verl.config.schema import AlgorithmConfig, Config
from verl.config.tasks import TasksFile
from verl.models.options import LoraOptions
from verl.record import Change, Record, extra, section
from verl.roles.updater import Updater
from verl.training import torch_engine
from verl.training.micro_batch import split
from verl.training.options import OptimConfig, TrainSettings


def records(record: type[Record]) -> set[type[Record]]:
    """The record and all below it, also those in lists and mappings."""
    found, waiting = {record}, [record]
    while waiting:
        for field in waiting.pop().model_fields.values():
            parts = [field.annotation]
            while parts:
                part = parts.pop()
                parts += [argument for argument in typing.get_args(part) if argument is not Ellipsis]
                inner = section(part)
                if inner is not None and inner not in found:
                    found.add(inner)  # type: ignore[arg-type]
                    waiting.append(inner)  # type: ignore[arg-type]
    return found


def test_every_field_states_what_it_changes() -> None:
    kinds = typing.get_args(Change)
    assert {LoraOptions, AlgorithmConfig} <= records(Config)
    for record in records(Config) | records(TasksFile):
        for name, field in record.model_fields.items():
            assert section(field.annotation) or extra(field, "changes") in kinds, f"{record.__name__}.{name}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Llama's norms are in fp32 whatever its dtype: GPT-2's are not.
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", "gpt2", torch.float64)


PROMPTS = ["one two", "three", "a much longer prompt than the others", "four"]


def sampled(tiny: Path, **rollout: Any) -> list[list[int]]:
    settings = {"max_new_tokens": 12, **rollout}
    actor = verl.Actor(str(tiny), rollout=verl.roles.actor.RolloutOptions(**settings))  # type: ignore[attr-defined]
    return actor.generate_sequences(PROMPTS * 3)["response_tokens"]  # type: ignore[no-any-return]


SAMPLING: dict[str, tuple[Any, Any]] = {
    "max_new_tokens": (4, 9), "min_new_tokens": (0, 9), "temperature": (1.0, 0.3), "top_k": (0, 3), "top_p": (1.0, 0.2),
    "min_p": (0.0, 0.9), "stop": ((), ("a", "e", "i", "o", "1", "2")),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING)
def test_a_setting_of_samples_changes_them(tiny: Path, name: str) -> None:
    one, two = (sampled(tiny, **{name: value}) for value in SAMPLING[name])
    assert one != two


@pytest.mark.parametrize(("name", "value"), [("max_num_seqs", 2), ("kv_cache_gb", 0.01), ("batch_invariant", True)])
def test_a_setting_of_their_cost_does_not(tiny: Path, name: str, value: Any) -> None:
    assert sampled(tiny) == sampled(tiny, **{name: value})


@pytest.fixture(scope="module")
def samples(tiny: Path) -> Batch:
    """Of a policy, with rewards."""
    actor = verl.Actor(str(tiny), sampling={"max_new_tokens": 9})
    made = actor.generate_sequences(PROMPTS, n=4)
    return made.add({"reward": [float(len(tokens) % 3 + sum(tokens) % 5) for tokens in made["response_tokens"]]})


def trained(tiny: Path, samples: Batch, *, updates: int = 2, **settings: Any) -> tuple[list[torch.Tensor], list[float]]:
    """The weights after some updates, and the gradient norms on the way."""
    actor = verl.Actor(str(tiny), **{"lr": 1e-2, **settings})
    updater, norms = Updater(make_algorithm("grpo"), actor=actor), []
    for _ in range(updates):
        norms.append(updater.update(samples)["grad_norm/actor"])
    return [weight.detach().clone() for weight in actor.model.parameters()], norms


TRAINING: dict[str, tuple[Any, Any]] = {
    "lr": (1e-2, 2e-2), "betas": ((0.9, 0.999), (0.5, 0.9)), "adam_eps": (1e-6, 1e-1), "weight_decay": (0.0, 0.5),
    "max_grad_norm": (None, 1e-3), "warmup_steps": (0, 4), "epochs": (1, 2), "mini_batch_size": (None, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_a_setting_of_training_changes_the_weights(tiny: Path, samples: Batch, name: str) -> None:
    one, two = (trained(tiny, samples, **{name: value})[0] for value in TRAINING[name])
    assert any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_schedule_and_its_end_change_the_weights(tiny: Path, samples: Batch) -> None:
    runs = [{}, {"schedule": "linear", "total_steps": 4}, {"schedule": "cosine", "total_steps": 4},
            {"schedule": "linear", "total_steps": 8}]  # fmt: skip
    weights = [trained(tiny, samples, **settings)[0] for settings in runs]
    for first, one in enumerate(weights):
        for two in weights[first + 1 :]:
            assert any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("micro_batch_size", 3), ("max_tokens_per_micro_batch", 40), ("gradient_checkpointing", True),
        ("use_remove_padding", False), ("fused_kernels", False),
    ],
)  # fmt: skip
def test_a_setting_of_the_cost_of_training_does_not(tiny: Path, samples: Batch, name: str, value: Any) -> None:
    usual, other = trained(tiny, samples, updates=1), trained(tiny, samples, updates=1, **{name: value})
    assert other[1] == pytest.approx(usual[1], rel=1e-10)
    for a, b in zip(usual[0], other[0], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-7, atol=1e-9)  # Adam magnifies rounding


@pytest.mark.parametrize(("name", "value"), [("micro_batch_size", 3), ("max_tokens_per_micro_batch", 40)])
def test_a_limit_of_micro_batches_changes_their_number(
    tiny: Path, samples: Batch, name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def counted(*args: Any, **options: Any) -> Any:
        parts = split(*args, **options)
        counts.append(len(parts))
        return parts

    monkeypatch.setattr(torch_engine, "split", counted)
    trained(tiny, samples, updates=1)
    usual = max(counts)
    trained(tiny, samples, updates=1, **{name: value})
    assert max(counts) > usual == 1


def test_what_is_shown_here_is_what_is_stated() -> None:
    results = {key.path.rsplit(".", 1)[-1] for key in describe() if key.changes == "result"}
    assert results >= {*SAMPLING, *TRAINING, "schedule"}
    # Of bf16 weights, and of bf16 products: tests/training.
    assert OptimConfig.model_fields.keys() <= {*TRAINING, "schedule", "total_steps", "moments"}
    assert results & TrainSettings.model_fields.keys() <= {*TRAINING, "use_amp"}

"""The trainer: checkpoints, resume, rollback, and updates that are not finite."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import verl
import verl.trainer.task
from tests.trainer.cases import PROMPTS, SHORT, low_bytes, make
from verl.data.loader import PromptLoader
from verl.data.prompts import load_prompts
from verl.errors import CheckpointError, ConfigError, TrainingError
from verl.weights.shard import checksum


def test_updates_that_are_not_finite_are_skipped_and_end_the_run(tiny: Path) -> None:
    class Poisoned(verl.BaseAlgorithm):
        def compute_loss(self, x: verl.LossInput) -> verl.Loss:
            assert x.log_probs is not None
            return verl.Loss(total=(x.log_probs * float("nan")).sum())

    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
    trainer = verl.Trainer(actor, reward_fn=low_bytes, algorithm=Poisoned(), n=4, log_dir=False, max_skipped_updates=3)
    before = checksum(actor.shards())
    assert trainer.step(PROMPTS)["update/skipped/actor"] == 1.0
    trainer.step(PROMPTS)
    with pytest.raises(TrainingError, match="3 updates in a row"):
        trainer.step(PROMPTS)
    assert checksum(actor.shards()) == before


class PoisonedFrom(verl.BaseAlgorithm):
    """Its loss is NaN from a number of updates on."""

    good: int = 0

    def compute_loss(self, x: verl.LossInput) -> verl.Loss:
        assert x.log_probs is not None
        self.good -= 1
        return verl.Loss(total=(x.log_probs * (-1.0 if self.good >= 0 else float("nan"))).sum())


def test_skipped_updates_in_a_row_lead_back_to_the_last_good_checkpoint_and_end_the_run(
    tiny: Path, tmp_path: Path
) -> None:
    def make_one(good: int) -> verl.Trainer:
        actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT)
        options: dict[str, Any] = {"checkpoint_dir": tmp_path, "save_every": 1, "max_skipped_updates": 3}
        return verl.Trainer(actor, reward_fn=low_bytes, algorithm=PoisonedFrom(good=good), log_dir=False, **options)

    loader = PromptLoader(load_prompts([f"Prompt {i}" for i in range(7)]), batch_size=2, seed=3)
    with pytest.raises(TrainingError, match=r"3 updates in a row .* newest checkpoint are those of step 2"):
        (trainer := make_one(good=2)).fit(loader, steps=9)
    assert (trainer.steps, trainer.skipped, trainer.updates) == (2, 0, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001", "step-000002"]
    assert (tmp_path / "latest").resolve().name == "step-000002"
    again = make_one(good=9)
    assert again.resume() == 2
    assert checksum(again.actor.shards()) == checksum(trainer.actor.shards())
    again.fit(loader, steps=1)
    assert (again.steps, loader.state_dict()["position"]) == (3, 6)


def test_a_rollback_is_the_trainer_as_it_was_and_removes_what_came_after(tiny: Path, tmp_path: Path) -> None:
    trainer = make(tiny, "grpo", n=2, checkpoint_dir=tmp_path, save_every=1)
    with pytest.raises(CheckpointError, match="step-000001"):
        trainer.rollback(1)
    sums = [checksum(trainer.actor.shards()) for _ in range(3) if trainer.step(PROMPTS)]
    trainer.rollback(1)
    assert trainer.steps == 1 and checksum(trainer.actor.shards()) == sums[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]
    for _ in range(2):
        trainer.step(PROMPTS)
    assert checksum(trainer.actor.shards()) == sums[2]
    with pytest.raises(ConfigError, match="no automatic checkpoints"):
        make(tiny, "grpo").resume()


def test_one_mini_batch_that_is_not_finite_is_no_skipped_update(tiny: Path) -> None:
    class PoisonedEverySecond(verl.BaseAlgorithm):
        calls: int = 0

        def compute_loss(self, x: verl.LossInput) -> verl.Loss:
            assert x.log_probs is not None
            self.calls += 1
            return verl.Loss(total=(x.log_probs * (float("nan") if self.calls % 2 else -1.0)).sum())

    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SHORT, mini_batch_size=2)
    algorithm = PoisonedEverySecond()
    trainer = verl.Trainer(actor, reward_fn=low_bytes, algorithm=algorithm, n=2, log_dir=False, max_skipped_updates=2)
    records = [trainer.step(PROMPTS) for _ in range(3)]
    assert [(r["update/steps/actor"], r["update/skipped/actor"]) for r in records] == [(2.0, 1.0)] * 3
    assert (trainer.skipped, trainer.updates) == (0, 3)


def test_fit_goes_on_in_the_data_where_a_checkpoint_was_saved(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loader(count: int = 7) -> PromptLoader:
        return PromptLoader(load_prompts([f"Prompt {i}" for i in range(count)]), batch_size=2, seed=3)

    whole = make(tiny, "grpo", n=2)
    whole.fit(loader(), steps=5)
    make(tiny, "grpo", n=2, checkpoint_dir=tmp_path, save_every=3).fit(loader(), steps=4)
    trainer = make(tiny, "grpo", n=2)
    trainer.load_checkpoint(tmp_path / "step-000003")
    trainer.fit(again := loader(), steps=2)
    assert checksum(trainer.actor.shards()) == checksum(whole.actor.shards())
    assert (again.state_dict()["epoch"], again.state_dict()["position"]) == (1, 3)
    trainer.load_checkpoint(tmp_path / "step-000003")
    trainer.fit(others := loader(8), steps=1)
    assert others.state_dict()["position"] == 2 and "saved over other prompts" in caplog.text
    trainer.fit(others, steps=1)
    assert others.state_dict()["position"] == 4


def test_checkpoints_resume_exactly(tiny: Path, tmp_path: Path) -> None:
    once = make(tiny, "ppo", n=4)
    for _ in range(4):
        once.step(PROMPTS)
    first = make(tiny, "ppo", n=4)
    for _ in range(2):
        first.step(PROMPTS)
    first.save_checkpoint(tmp_path / "ckpt")
    second = make(tiny, "ppo", n=4)
    second.load_checkpoint(tmp_path / "ckpt")
    for _ in range(2):
        second.step(PROMPTS)
    assert checksum(second.actor.shards()) == checksum(once.actor.shards())
    assert second.critic is not None and once.critic is not None
    assert checksum(second.critic.shards()) == checksum(once.critic.shards())


def test_another_optimizer_or_smoothing_is_refused_before_anything_is_replaced(tiny: Path, tmp_path: Path) -> None:
    def own(kind: type[torch.optim.Optimizer] | None, **options: Any) -> verl.Trainer:
        model = AutoModelForCausalLM.from_pretrained(tiny)
        optim = None if kind is None else kind(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
        actor = verl.Actor(model, str(tiny), optim=optim, sampling=SHORT)
        reward = verl.Reward(low_bytes, **options)
        return verl.Trainer(actor, reward=reward, algorithm="grpo", n=4, log_dir=False)

    paths = {}
    for kind in (None, torch.optim.SGD):
        trainer = own(kind)
        trainer.step(PROMPTS)
        trainer.save_checkpoint(paths.setdefault(kind, tmp_path / str(kind)))
    own(None, smoothing=0.5).save_checkpoint(tmp_path / "smoothed")
    sgd, rmsprop = torch.optim.SGD, torch.optim.RMSprop
    for trainer, path, words in (
        (own(None), paths[sgd], "saved by SGD, and AdamW trains here"),
        (own(rmsprop), paths[sgd], "saved by SGD, and RMSprop trains here"),
        (own(sgd), paths[None], "saved by AdamW, and SGD trains here"),
        (own(None, smoothing=0.5), paths[None], r"are \['reward'\] here and were none"),
        (own(None), tmp_path / "smoothed", r"are none here and were \['reward'\]"),
    ):
        before = checksum(trainer.actor.shards())
        with pytest.raises(CheckpointError, match=words):
            trainer.load_checkpoint(path)
        assert checksum(trainer.actor.shards()) == before and trainer.steps == 0
    for kind in (None, sgd):
        again = own(kind)
        again.load_checkpoint(paths[kind])
        again.step(PROMPTS)


def test_automatic_checkpoints(tiny: Path, tmp_path: Path) -> None:
    trainer = make(tiny, "grpo", n=2, checkpoint_dir=tmp_path, save_every=2)
    for _ in range(4):
        trainer.step(PROMPTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000002", "step-000004"]
    assert (tmp_path / "latest").resolve().name == "step-000004"


def test_only_the_newest_automatic_checkpoints_are_kept(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    trainer = make(tiny, "grpo", n=2, checkpoint_dir=tmp_path, save_every=1, keep_checkpoints=2)
    for _ in range(4):
        trainer.step(PROMPTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "notes", "step-000003", "step-000004"]
    make(tiny, "grpo", n=2).load_checkpoint(tmp_path / "step-000003")


def test_weights_of_another_dtype_are_refused_before_anything_is_replaced(tiny: Path, tmp_path: Path) -> None:
    def own(dtype: str) -> verl.Trainer:
        actor = verl.Actor(str(tiny), dtype=dtype, sampling=SHORT)
        return verl.Trainer(actor, reward_fn=low_bytes, n=2, log_dir=False)

    saved = own("float32")
    saved.step(PROMPTS)
    saved.save_checkpoint(tmp_path / "fp32")
    trainer = own("bfloat16")
    before = checksum(trainer.actor.shards())
    with pytest.raises(CheckpointError, match=r"another dtype than the bfloat16 here"):
        trainer.load_checkpoint(tmp_path / "fp32")
    assert checksum(trainer.actor.shards()) == before and trainer.steps == 0


def test_a_disk_that_is_full_stops_what_was_asked_for_and_no_training(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(tiny, "grpo", n=2, checkpoint_dir=tmp_path / "own", save_every=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        trainer.step(PROMPTS)
        assert "step-000001 was not saved" in caplog.text and "training goes on" in caplog.text
        caplog.clear()
        with pytest.raises(CheckpointError, match=r"asked was not saved: .* what was there before is untouched"):
            trainer.save_checkpoint(tmp_path / "asked")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "training goes on" not in caplog.text
    trainer.step(PROMPTS)
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["latest", "step-000002"]

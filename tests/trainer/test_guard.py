"""The guard: what counts as a fall, and the way back from one."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.properties import examples
from tests.trainer.cases import SHORT, low_bytes, make
from verl.checkpoint.directory import CheckpointStore
from verl.data.loader import PromptLoader
from verl.data.prompts import load_prompts
from verl.errors import ConfigError, TrainingError
from verl.report.page import write_report
from verl.trainer import Alert, SafetyGuard
from verl.weights.shard import checksum

FIRST_BAD = 8


def alarm(values: Iterable[float], **options: Any) -> int | None:
    """The number of the value at which a guard sees a fall."""
    guard = SafetyGuard(["reward"], **options)
    for number, value in enumerate(values):
        guard.observe({"reward": value, "other": 0.0})
        if guard.fall() is not None:
            return number
    return None


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("seed", range(20))
def test_noise_growth_and_a_small_drift_are_no_fall(seed: int) -> None:
    rng = random.Random(seed)
    for level in (lambda t: 0.5, lambda t: 0.02, lambda t: 0.3 + 0.6 * t / 400, lambda t: 0.8 - 0.05 * t / 400):
        assert alarm(rng.gauss(level(t), 0.08) for t in range(400)) is None


STREAMS = json.loads((Path(__file__).parent / "healthy_rewards.json").read_text())


@pytest.mark.parametrize("name", STREAMS)
def test_a_healthy_run_is_left_alone_and_the_same_with_a_fall_is_not(name: str) -> None:
    """Mean rewards of real runs of 100 steps: ten algorithms in two seeds, on the task of `benchmarks/learning.py`."""
    rewards = STREAMS[name]
    assert len(rewards) == 100 and alarm(rewards) is None
    at = alarm([reward if step < 80 else reward / 2 for step, reward in enumerate(rewards)])
    assert at is not None and 80 <= at < 90


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda t: 0.8 if t < 100 else 0.5, {}),
        (lambda t: -2.0 if t < 100 else -3.0, {}),  # relative to the size of a negative level
        (lambda t: 0.01 if t < 100 else 0.6, {"threshold_delta": 0.5, "absolute": True}),  # such as a KL
    ],
)
def test_a_fall_is_seen_within_the_window(change: Callable[[int], float], options: dict[str, Any]) -> None:
    rng = random.Random(1)
    at = alarm((change(t) + rng.gauss(0, 0.05) for t in range(200)), **options)
    assert at is not None and 100 <= at < 110


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("at", [13, 21, 33, 55])
def test_an_early_fall_is_seen_soon_and_its_begin_is_known(noise: float, at: int) -> None:
    """By half, at a value of this number."""
    for seed in range(10):
        rng = random.Random(seed)
        guard = SafetyGuard(["reward"])
        for step in range(1, at + 15):
            guard.observe({"reward": (0.6 if step < at else 0.3) + rng.gauss(0, noise)}, step)
            if (found := guard.fall()) is not None:
                break
        assert found is not None, (seed, guard._metrics["reward"].values)
        assert at <= step <= at + 8 and abs(found[3] - (at - 1)) <= (noise > 0.03)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.gauss(0.5, 0.3),
        lambda rng: sum(rng.random() < 0.5 for _ in range(8)) / 8,
        lambda rng: float(rng.random() < 0.1),
        lambda rng: rng.expovariate(1.0),
    ],
)
def test_noise_is_no_fall_however_little_is_known(draw: Callable[[random.Random], float]) -> None:
    for seed in range(examples(500).max_examples):
        rng = random.Random(seed)
        assert alarm(draw(rng) for _ in range(80)) is None, seed


def test_a_guard_says_when_it_is_armed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    guard = SafetyGuard(["reward", "other"])
    said = []
    for step in range(1, 40):
        guard.observe({"reward": 0.5, "other": 1.0} if step % 2 else {"reward": 0.5})
        said.append(len(caplog.records))
    assert [said.index(1) + 1, said.index(2) + 1, said[-1]] == [13, 25, 2]
    assert "the guard is armed for 'reward': 0.5 in the mean of 8 values" in caplog.text


def test_a_guard_goes_on_from_its_state(tmp_path: Path) -> None:
    rng = random.Random(4)
    values = [(0.6 if n < 40 else 0.3) + rng.gauss(0, 0.04) for n in range(60)]
    for cut in (5, 12, 41, 44):
        whole, first, second = (SafetyGuard(["reward"]) for _ in range(3))
        for number, value in enumerate(values, 1):
            whole.observe({"reward": value})
            if number == cut:
                second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            (first if number < cut else second).observe({"reward": value})
            assert number < cut or second.fall() == whole.fall()
    state = whole.state_dict()
    state["metrics"]["reward"]["steps"] = [1]
    with pytest.raises(ValueError, match="values of"):
        second.load_state_dict(state)


def test_a_slow_decline_is_seen_against_the_best_level() -> None:
    assert alarm(0.8 - 0.3 * min(1.0, max(0, t - 100) / 400) for t in range(600)) is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"monitor_metrics": []}, "monitor_metrics: must have at least 1 item,"),
        ({"threshold_delta": -2}, "threshold_delta: must be a change such as -0.15"),
        ({"threshold_delta": 0.0}, "threshold_delta: must be a change such as -0.15"),
        ({"rollback_steps": 0}, "rollback_steps: must be at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SafetyGuard(**{"monitor_metrics": ["reward"], **options})


class Sabotaged:
    """A reward that answers wrongly from a number of calls on, for a while. A call has a whole step."""

    whole_batch = True

    def __init__(self, calls: range) -> None:
        self.calls, self.count = calls, 0

    def __call__(self, texts: list[str]) -> list[float]:
        self.count += 1
        return [value - 3.0 * (self.count in self.calls) for value in low_bytes(texts)]


def guarded(
    model: Path, folder: Path, reward: Any, alerts: list[Alert], **options: Any
) -> tuple[verl.Trainer, PromptLoader]:
    actor = verl.Actor(str(model), optim={"lr": 1e-3}, sampling=SHORT)
    where: dict[str, Any] = {"checkpoint_dir": folder, "save_every": 1, "keep_checkpoints": 1}
    trainer = verl.Trainer(actor, reward_fn=reward, algorithm="grpo", n=4, log_dir=False, **where)
    trainer.add_guard(
        SafetyGuard(["reward"], rollback_steps=4, window=2, baseline=4, on_alert=alerts.append, **options)
    )
    return trainer, PromptLoader(load_prompts([f"Prompt {i}" for i in range(40)]), batch_size=2, seed=3)


def test_a_sabotaged_reward_is_noticed_and_training_goes_back_and_on_with_other_data(
    tiny: Path, tmp_path: Path
) -> None:
    alerts: list[Alert] = []
    sums: dict[int, str] = {}
    trainer, loader = guarded(tiny, tmp_path, Sabotaged(range(FIRST_BAD, FIRST_BAD + 1)), alerts)
    trainer.on_log_hook(lambda step, _: sums.setdefault(step, checksum(trainer.actor.shards())))
    record = trainer.fit(loader, steps=12)
    (alert,) = alerts
    assert (alert.metric, alert.step, alert.back_to) == ("reward", FIRST_BAD, FIRST_BAD - 4)
    assert trainer.steps == 12 and record["reward"] > alert.value + 1
    # Four steps were made anew, on prompts of their own.
    assert loader.state_dict()["position"] == 2 * (12 + 4)
    assert min(CheckpointStore(tmp_path).steps()) == 12 - 4

    # What went back had the weights and is the newest checkpoint, with the data that are skipped.
    again, _ = guarded(tiny, tmp_path, low_bytes, [])
    again.rollback(8)
    assert again.position is not None and again.position["position"] == 2 * (8 + 4)
    assert [guard.rollbacks for guard in again.guards] == [1]


@pytest.mark.slow
def test_a_run_that_is_resumed_right_after_a_rollback_skips_the_data_too(tiny: Path, tmp_path: Path) -> None:
    alerts: list[Alert] = []
    trainer, loader = guarded(tiny, tmp_path, Sabotaged(range(FIRST_BAD, FIRST_BAD + 1)), alerts)
    sums = {}
    batches = iter(loader)
    trainer._loader = loader
    while not alerts:
        trainer.step(next(batches))
        sums[trainer.steps] = sums.get(trainer.steps) or checksum(trainer.actor.shards())
    again, fresh = guarded(tiny, tmp_path, low_bytes, [])
    assert again.resume() == alerts[0].back_to == trainer.steps
    assert checksum(again.actor.shards()) == checksum(trainer.actor.shards()) == sums[alerts[0].back_to]
    assert [g.state_dict() for g in again.guards] == [g.state_dict() for g in trainer.guards]
    again.fit(fresh, steps=1)
    assert fresh.state_dict()["position"] == 2 * (FIRST_BAD + 1)


@pytest.mark.slow
def test_a_fall_that_comes_again_ends_the_run_by_name(tiny: Path, tmp_path: Path) -> None:
    trainer, loader = guarded(tiny, tmp_path, Sabotaged(range(FIRST_BAD, 99)), [], max_rollbacks=0)
    with pytest.raises(TrainingError, match=r"gone back 0 times, as often as it may .*'reward' is"):
        trainer.fit(loader, steps=12)


def test_a_metric_that_nobody_logs_is_named_once(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tiny, "grpo", n=2, checkpoint_dir=tmp_path, save_every=5)
    trainer.add_guard(SafetyGuard(["truthfulness", "mine"]))
    trainer.add_metric("mine", lambda samples: 1.0)
    with caplog.at_level(logging.WARNING):
        trainer.fit([["a", "b"]] * 3, steps=3)
    assert [r.message for r in caplog.records if "guard" in r.message] == [
        "the guard has not seen metric 'truthfulness' yet: nothing logs it so far"
    ]


@pytest.mark.slow
def test_a_guard_in_the_articles_words_saves_checkpoints_where_the_run_is(tiny: Path, tmp_path: Path) -> None:
    """The constructor's arguments, `add_guard`, and a plain loop of steps; nothing about checkpoints."""
    alerts: list[Alert] = []
    actor = verl.Actor(str(tiny), optim={"lr": 1e-3}, sampling=SHORT)
    trainer = verl.Trainer(
        actor, reward_fn=Sabotaged(range(12, 99)), algorithm="grpo", n=2, log_dir=tmp_path / "run", critic=None
    )
    guard = SafetyGuard(monitor_metrics=["reward"], threshold_delta=-0.15, rollback_steps=4, on_alert=alerts.append)
    trainer.add_guard(guard)
    for _ in range(18):
        record = trainer.step(["a", "b"])
        if alerts:
            break
    (alert,) = alerts
    # 11 is the last step whose reward was good; what it logs is of the weights of step 10.
    assert 12 <= alert.step <= 17 and alert.back_to == trainer.steps == record["guard/back_to"] <= 10
    assert (tmp_path / "run" / "checkpoints" / "latest").is_dir()
    assert max(CheckpointStore(tmp_path / "run" / "checkpoints").steps()) == alert.back_to


def test_metrics_that_never_came_are_in_the_report(tiny: Path, tmp_path: Path) -> None:
    trainer = verl.Trainer(
        verl.Actor(str(tiny), sampling=SHORT), reward_fn=low_bytes, algorithm="grpo", n=2, log_dir=tmp_path
    )
    trainer.add_guard(SafetyGuard(["reward", "eval/truth", "<b>"]))
    trainer.fit([["a", "b"]] * 2, steps=2)
    assert "the guard&#39;s metrics that never came: eval/truth, &lt;b&gt;" in write_report(tmp_path).read_text()


def test_a_guard_without_checkpoints_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="give the trainer checkpoint_dir= and save_every="):
        make(tiny, "grpo").add_guard(SafetyGuard(["reward"]))

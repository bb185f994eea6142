"""Asynchronous training: nothing is lost when workers die or come and go, staleness is bounded, and it learns."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import verl
from tests import ranks
from tests.cluster.functions import pids
from tests.trainer import refused_agents
from tests.trainer.timeline_file import read_timeline
from verl._host.ray_session import connect
from verl.batch import Batch
from verl.cluster.ray import pool
from verl.errors import CheckpointError, ClusterError, ConfigError, DataError, RewardError, RolloutError
from verl.rollout.base import SamplingParams
from verl.trainer.asynchronous import AsyncTrainer
from verl.weights.shard import checksum

ENGINE = Path(__file__).with_name("slow_engine.py")


def low_bytes(texts: list[str]) -> list[float]:
    return [sum(ord(c) < 100 for c in text) / max(len(text), 1) for text in texts]


class Prompts:
    """Two prompts a batch, each with its number as its group; a cursor to go on from."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        numbers = [self.position, self.position + 1]
        self.position += 2
        return Batch.from_columns({"prompt": [f"Say {n}" for n in numbers], "group": [f"p{n}" for n in numbers]})


class Recorder(AsyncTrainer):
    """Keeps which samples were trained, and how old they were."""

    def learn(self, samples: Any) -> dict[str, Any]:
        self.trained = getattr(self, "trained", [])
        self.trained += samples["main"]["id"]
        assert self.actor.policy_version - min(samples["main"]["policy_version"]) <= self.schedule.max_staleness
        return super().learn(samples)


def make(path: Path, lr: float = 1e-2, engine: str = "embedded", tokens: int = 6, **options: Any) -> Recorder:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    actor = verl.Actor(str(path), optim={"lr": lr}, sampling=params, rollout=engine, max_num_seqs=16)
    options = {"reward_fn": low_bytes, "n": 2, "batch_size": 2, "deadline": 120, **options}
    return Recorder(actor, algorithm="grpo", log_dir=False, **options)


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it was dead already, and has been replaced
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_workers_are_killed_and_scaled_and_nothing_is_lost(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW_ENGINE_SECONDS", "0.05")
    trainer = make(tiny, engine=f"{ENGINE}:SlowEngine", rollout_workers=2, max_staleness=2)
    prompts, chance = Prompts(), random.Random(0)
    try:
        trainer.advance(prompts)
        at_first = set(pids(trainer.group))
        for _ in range(3):
            victim = chance.choice(pids(trainer.group))
            killer = threading.Timer(chance.random() * 0.5, kill, (victim,))
            killer.start()
            for _ in range(2):
                assert trainer.advance(prompts)["rollout/workers"] == 2
            killer.join()
        assert len(at_first & set(pids(trainer.group))) < 2  # some were replaced
        trainer.group.scale(1)
        assert trainer.advance(prompts)["rollout/workers"] == 1
        trainer.group.scale(2)
        assert trainer.advance(prompts)["rollout/workers"] == 2
        untrained = [*trainer.schedule.ready, *trainer.schedule.unfinished]
    finally:
        trainer.close()
    assert max(Counter(trainer.trained).values()) == 1
    assert len(trainer.trained) == 9 * 4
    groups = {int(id_.split("/")[0][1:]) for id_ in trainer.trained} | {int(g[1:]) for g in untrained}
    assert groups == set(range(prompts.position))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_runs_in_which_a_worker_dies_at_a_random_moment(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW_ENGINE_SECONDS", "0.03")
    chance = random.Random(1)
    for run in range(20):
        reward = verl.Reward(slow_low_bytes, workers=2, retries=1)
        trainer = make(tiny, engine=f"{ENGINE}:SlowEngine", rollout_workers=2, reward_fn=reward)
        killer = threading.Thread(target=kill_one, args=(trainer, reward if run % 2 else None, chance))
        prompts, records = Prompts(), []
        killer.start()
        try:
            records = [trainer.advance(prompts) for _ in range(6)]
            killer.join()
            untrained = [*trainer.schedule.ready, *trainer.schedule.unfinished]
        finally:
            trainer.close()
        assert [record["reward/abstained"] for record in records] == [0] * 6
        assert len(trainer.trained) == len(set(trainer.trained)) == 6 * 4
        groups = {int(id_.split("/")[0][1:]) for id_ in trainer.trained} | {int(g[1:]) for g in untrained}
        assert groups == set(range(prompts.position))


@pytest.mark.slow
def test_a_worker_of_each_kind_dies_between_two_steps(tiny: Path) -> None:
    reward = verl.Reward(slow_low_bytes, workers=1)
    trainer, prompts = make(tiny, reward_fn=reward), Prompts()
    try:
        trainer.advance(prompts)
        for group in (trainer.group, reward.group):
            kill(pids(group)[0])
        record = trainer.advance(prompts)
    finally:
        trainer.close()
    assert record["reward/abstained"] == 0 and record["reward/workers/max"] == 1
    assert len(trainer.trained) == len(set(trainer.trained)) == 2 * 4


def slow_low_bytes(texts: list[str]) -> list[float]:
    time.sleep(0.05)
    return low_bytes(texts)


def kill_one(trainer: Recorder, reward: verl.Reward | None, chance: random.Random) -> None:
    """SIGKILL one rollout worker, or one of the reward's, at a random moment of a random one of the first steps."""
    step, late = chance.randrange(4), chance.random() * 0.4
    while trainer.steps < step or len(pids((reward or trainer).group)) < 2:
        time.sleep(0.01)
    time.sleep(late)
    os.kill(chance.choice(pids((reward or trainer).group)), signal.SIGKILL)


class Unhurried(verl.Actor):
    """Its update takes a while."""

    def train_parts(self, parts: Any) -> dict[str, float]:
        time.sleep(2.0)
        return super().train_parts(parts)


def slowly(texts: list[str]) -> list[float]:
    time.sleep(0.2)
    return low_bytes(texts)


@pytest.mark.slow
def test_rewards_are_computed_beside_the_update(tiny: Path, tmp_path: Path) -> None:
    """While a step updates, the groups of the next ones come and are scored: nothing is left to score then."""
    file, sampling = tmp_path / "timeline.json", SamplingParams(max_new_tokens=6, ignore_eos=True)
    actor = Unhurried(str(tiny), optim={"lr": 1e-2}, sampling=sampling)
    options: dict[str, Any] = {"batch_size": 2, "deadline": 120, "log_dir": False, "timeline": file}
    trainer = AsyncTrainer(actor, reward_fn=slowly, algorithm="grpo", n=2, max_staleness=1, **options)
    prompts = Prompts()
    try:
        records = [trainer.advance(itertools.islice(prompts, count)) for count in (2, 1, 0)]
        ready = trainer.schedule.ready
    finally:
        trainer.close()
    spans = read_timeline(file)
    rewards = sorted(span.start for span in spans if span.node == "reward")
    updates = sorted(span.start for span in spans if span.node == "update_actor")
    assert (len(rewards), len(updates), ready) == (6, 3, {}), "each group is scored once"
    assert rewards[3] < updates[0] + 2.0, "the second step's groups before the first update's end"
    assert rewards[5] < updates[1] + 2.0, "the third step's, which begin after the first, before the second's"
    assert [record["rollout/staleness/max"] for record in records] == [0, 1, 1]
    assert sum(record["rollout/tokens"] for record in records) == 3 * 2 * 2 * 6
    assert not any(record["reward/abstained"] for record in records)


@pytest.mark.slow
def test_scores_that_are_not_trained_yet_are_no_part_of_a_checkpoint(tiny: Path, tmp_path: Path) -> None:
    """They are made anew after a resume, and the step is the one of the run that goes on."""
    rewards = []
    trainer, prompts = make(tiny), Prompts()
    try:
        trainer.advance(itertools.islice(prompts, 2))
        while len(trainer.schedule.ready) < 2:
            trainer._receive(trainer.group.event(trainer.limits.deadline))
        concurrent.futures.wait(trainer._scores.values(), timeout=60)
        trainer.save_checkpoint(tmp_path / "checkpoint")
        rewards.append(trainer.advance(iter([]))["reward"])
        trainer.load_checkpoint(tmp_path / "checkpoint")
        assert len(trainer.schedule.ready) == 2 and "reward" not in next(iter(trainer.schedule.ready.values()))[1]
        rewards.append(trainer.advance(iter([]))["reward"])
    finally:
        trainer.close()
    assert rewards[0] == rewards[1]


def late(texts: list[str]) -> list[float]:
    raise ValueError("no such judge")


@pytest.mark.slow
def test_rewards_that_fail_beside_an_update_end_the_step_that_trains_them(tiny: Path) -> None:
    trainer = make(tiny, n=32, reward_fn=verl.Reward(late, max_failure_rate=0.5))
    try:
        with pytest.raises(RewardError, match=r"(?s)node 'reward'.*failed on .*no such judge"):
            trainer.advance(Prompts())
    finally:
        trainer.close()


@pytest.mark.slow
def test_in_flight_prompts_survive_a_resume(tiny: Path, tmp_path: Path) -> None:
    first, prompts = make(tiny, max_staleness=1), Prompts()
    try:
        first.fit(prompts, 2)
        first.save_checkpoint(tmp_path / "checkpoint")
        position, trained = prompts.position, list(first.trained)
    finally:
        first.close()
    second, prompts = make(tiny, max_staleness=1), Prompts(position)
    try:
        second.load_checkpoint(tmp_path / "checkpoint")
        assert (second.steps, second.schedule.version) == (2, 2)
        second.fit(prompts, 2)
        untrained = [*second.schedule.ready, *second.schedule.unfinished]
    finally:
        second.close()
    every = [*trained, *second.trained]
    assert len(every) == len(set(every)) == 4 * 4
    assert {id_.split("/")[0] for id_ in every} | set(untrained) == {f"p{n}" for n in range(prompts.position)}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_transports_and_staleness_zero_are_synchronous_training(tiny: Path, transport: str) -> None:
    """With no staleness and a policy that does not move within a step, both drivers sample the same tokens."""
    asynchronous = make(tiny, max_staleness=0, transport=transport)
    try:
        records = [asynchronous.advance(prompts) for prompts in [Prompts()] * 3]  # one cursor, three steps
    finally:
        asynchronous.close()
    assert [record["rollout/staleness/max"] for record in records] == [0, 0, 0]
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=SamplingParams(max_new_tokens=6, ignore_eos=True))
    trainer = verl.Trainer(actor, reward_fn=low_bytes, algorithm="grpo", n=2, log_dir=False)
    prompts = Prompts()
    assert [record["reward"] for record in records] == [trainer.advance(prompts)["reward"] for _ in range(3)]


@pytest.fixture(scope="module")
def running(tiny: Path) -> Iterator[Recorder]:
    """A trainer that has made a step. A test that uses it leaves nothing on its way."""
    trainer = make(tiny)
    try:
        trainer.fit(iter([["a", "b"]]), 1)
        yield trainer
    finally:
        trainer.close()


@pytest.mark.slow
def test_a_rollout_worker_that_dies_between_two_steps_is_replaced(running: Recorder) -> None:
    before = len(running.trained)
    kill(pids(running.group)[0])
    running.fit(iter([["c", "d"]]), 1)
    assert len(running.trained) == len(set(running.trained)) == before + 4
    assert not running.schedule.untrained and running.group.size == 1


def test_every_process_of_the_cluster_pulls_the_weights_with_their_version(running: Recorder) -> None:
    ray = connect()

    @ray.remote(num_cpus=0.001)
    def pull(weights: Any) -> tuple[int, list[str], str]:
        import ray

        from verl.weights.shard import checksum

        shards = [shard for part in weights.parts for shard in ray.get(part, timeout=60)]
        return weights.version, [shard.name for shard in shards], checksum(shards)

    version, names, sums = ray.get(pull.remote(running.group.weights), timeout=120)
    shards = list(running.actor.shards())
    assert version == running.actor.policy_version > 0
    assert names == [shard.name for shard in shards] and sums == checksum(shards)


def test_as_many_steps_as_there_are_batches(running: Recorder) -> None:
    batches = [["a", "b"], ["c", "d"], ["e", "f"]]
    steps, samples = running.steps + 3, len(running.trained) + 12
    running.fit(iter(batches), 3)
    assert (running.steps, len(set(running.trained)), len(running.schedule.untrained)) == (steps, samples, 0)
    with pytest.raises(DataError, match=f"the batches of prompts ended after {steps} steps"):
        running.fit(iter([]), 1)
    odd = iter([*batches[:2], ["g"]])
    running.fit(odd, 2)  # what was taken ahead is told when a step wants it
    with pytest.raises(ConfigError, match="a batch of 1 prompts came, batch_size is 2"):
        running.fit(odd, 1)
    running.fit(iter(batches[:1]), 1)


def test_a_checkpoint_with_samples_on_their_way_is_not_taken_where_they_would_be_lost(
    running: Recorder, tiny: Path, tmp_path: Path
) -> None:
    prompts = iter([["e", "f"], ["g", "h"]])
    running.fit(prompts, 1)
    running.save_checkpoint(tmp_path / "checkpoint")
    running.fit(prompts, 1)
    actor = verl.Actor(str(tiny), sampling=SamplingParams(max_new_tokens=6, ignore_eos=True))
    synchronous = verl.Trainer(actor, reward_fn=low_bytes, algorithm="grpo", n=2, log_dir=False)
    with pytest.raises(CheckpointError, match="asynchronous training, with prompts and samples on their way"):
        synchronous.load_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"2 (finished and 0 unfinished )?groups (are )?on their way"):
        make(tiny, batch_size=3, max_staleness=0).load_checkpoint(tmp_path / "checkpoint")


def test_metrics_of_ones_own_are_logged(running: Recorder) -> None:
    running.add_metric("my/rows", lambda samples: len(samples["reward"]))
    assert running.advance(iter([["i", "j"]]))["my/rows"] == 4


@pytest.mark.slow
def test_a_partial_rollout_goes_on_under_new_weights(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW_ENGINE_SECONDS", "0.05")
    trainer = make(tiny, engine=f"{ENGINE}:SlowEngine", tokens=12, max_staleness=2)
    prompts = Prompts()
    try:
        records = [trainer.advance(prompts) for _ in range(5)]
    finally:
        trainer.close()
    assert max(record["rollout/staleness/max"] for record in records) >= 1
    assert any("mismatch/ess" in record for record in records)  # off-policy correction was at work


@pytest.mark.slow
def test_an_engine_that_fails_ends_the_run_with_its_own_traceback(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from verl.rollout.embedded.engine import EmbeddedEngine\n"
        "def Broken(packed, tokenizer, eos, options):\n    raise ValueError('no such accelerator')\n"
    )
    trainer = make(tiny, engine=f"{tmp_path / 'broken.py'}:Broken")
    try:
        with pytest.raises(RolloutError, match=r"(?s)rollout worker 0 .*no such accelerator"):
            trainer.advance(Prompts())
    finally:
        trainer.close()


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_run_by_its_deadline(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW_ENGINE_SECONDS", "600")
    trainer = make(tiny, engine=f"{ENGINE}:SlowEngine", deadline=1)
    began = time.monotonic()
    try:
        with pytest.raises(ClusterError, match="no rollout worker finished a group within 1 s"):
            trainer.advance(Prompts())
    finally:
        trainer.close()
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_the_start_of_a_worker_has_a_deadline_of_its_own(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late.py").write_text(
        "import importlib.util, os, time\n"
        f"spec = importlib.util.spec_from_file_location('slow_engine', {str(ENGINE)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        f"def Late(*args):\n    time.sleep(0 if os.getpid() == {os.getpid()} else 16)\n"
        "    return module.SlowEngine(*args)\n"
    )
    monkeypatch.setenv("SLOW_ENGINE_SECONDS", "0")
    trainer = make(tiny, engine=f"{tmp_path / 'late.py'}:Late", deadline=15)
    try:
        assert trainer.advance(Prompts())["rollout/workers"] == 1
    finally:
        trainer.close()


@pytest.mark.slow
def test_waiting_for_samples_brings_rollout_workers(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW_ENGINE_SECONDS", "0.1")
    monkeypatch.setattr(pool, "PATIENCE", 0.5)
    trainer = make(tiny, engine=f"{ENGINE}:SlowEngine", max_rollout_workers=2)
    prompts = Prompts()
    try:
        assert trainer.advance(prompts)["rollout/workers"] == 1
        assert [trainer.advance(prompts)["rollout/workers"] for _ in range(2)] == [2, 2]
        learn = trainer.learn

        def long_update(samples: Batch) -> dict[str, Any]:
            time.sleep(2)
            return learn(samples)

        trainer.learn = long_update  # type: ignore[method-assign]
        assert trainer.group.size == 2
        records = [trainer.advance(prompts) for _ in range(4)]
    finally:
        trainer.close()
    assert records[-1]["rollout/workers"] == 1
    assert len(trainer.trained) == len(set(trainer.trained)) == 7 * 4


@pytest.mark.slow
def test_two_ranks_of_torchrun_equal_one_process(make_tiny: Callable[..., Path], tmp_path: Path) -> None:
    script, model = Path(__file__).with_name("async_steps.py"), make_tiny("llama", torch.float64)
    ranks.alone(script, model, tmp_path / "one")
    done = ranks.torchrun(2, script, model, tmp_path / "two")
    assert done.stdout.count("done") == 1
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert one["version"] == two["version"] == 2 and len(set(one["rewards"])) > 1
    assert two["rewards"] == pytest.approx(one["rewards"], abs=1e-9)
    # Log-probs travel in fp32, so ranks that add in another order may round one of them the other way.
    assert two["weights"] == pytest.approx(one["weights"], abs=1e-5)


def test_what_cannot_be_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="does not correct for samples of an older policy"):
        make(tiny, rollout_is=None)
    with pytest.raises(ConfigError, match="rollout_workers: must be at least 1"):
        make(tiny, rollout_workers=0)
    with pytest.raises(ConfigError, match="leave update_freq, buffer_size out"):
        make(tiny, update_freq=8, buffer_size=16)
    for played in (refused_agents.gateway, refused_agents.shop):
        actor = verl.Actor(str(tiny), episode=played)
        with pytest.raises(ConfigError, match=r"no episodes, agents or environments: leave max_staleness out"):
            verl.AsyncTrainer(actor, algorithm="grpo", batch_size=2)
    trainer = make(tiny)
    with pytest.raises(ConfigError, match="advance"):
        trainer.step(["one"])


@pytest.mark.slow
def test_it_learns_as_well_as_synchronous_training(tiny: Path) -> None:
    last: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}
    for seed in range(3):
        for kind in last:
            params = SamplingParams(max_new_tokens=6, ignore_eos=True)
            actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=params, seed=seed)
            options: dict[str, Any] = {"reward_fn": low_bytes, "algorithm": "grpo", "log_dir": False, "n": 8}
            trainer = (
                verl.Trainer(actor, **options)
                if kind == "synchronous"
                else AsyncTrainer(actor, batch_size=2, max_staleness=1, deadline=120, **options)
            )
            prompts = Prompts()
            try:
                curve = [trainer.advance(prompts)["reward"] for _ in range(50)]
            finally:
                trainer.close()
            last[kind].append(sum(curve[-8:]) / 8)
            assert last[kind][-1] > sum(curve[:3]) / 3 + 0.15
    means = {kind: sum(values) / len(values) for kind, values in last.items()}
    assert means["asynchronous"] > means["synchronous"] - 0.1, last


def test_workers_have_the_name_that_settings_give_them(tiny: Path) -> None:
    trainer = make(tiny, num_rollout_workers=2)
    assert trainer._make_group.keywords["size"] == trainer._make_group.keywords["most"] == 2
    assert trainer.actor.controller.is_local  # no rank stands idle beside them
    with pytest.raises(ConfigError, match="num_rollout_workers=2 is another name of rollout_workers=3"):
        make(tiny, num_rollout_workers=2, rollout_workers=3)


def test_sequences_of_a_worker_have_the_name_that_settings_give_them(tiny: Path) -> None:
    actor = verl.Actor(str(tiny), rollout_per_device_batch_size=5)
    assert actor.rollout_options.max_num_seqs == 5

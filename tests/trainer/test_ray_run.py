"""`verl train` on a Ray cluster: a run that a dead rank or a lost node ends, and a second start takes up."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import verl
from tests.ranks import ENV
from tests.trainer.runs import assert_same_run, count_lines, run_dir, settings
from tests.trainer.test_trainer import low_bytes
from verl.batch import Batch
from verl.cluster.ray.pool import Pool
from verl.trainer.asynchronous import AsyncTrainer

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
CHANGES = {"trainer.total_steps": 20, "trainer.save_every": 1, "data.eval": None, "trainer.eval_every": None}


def command(folder: Path, model: Path, placement: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(json.dumps(settings(folder, model, **CHANGES, **{"trainer.placement": placement})))
    return [sys.executable, "-m", "verl", "train", str(file)]


def whole(folder: Path, model: Path, placement: Any, env: dict[str, str] = ENV) -> None:
    done = subprocess.run(command(folder, model, placement), env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]


def interrupted(line: list[str], folder: Path, harm: Callable[[dict[int, int]], None], env: dict[str, str]) -> str:
    """Start a run, do harm to it in its second step or later (given rank -> process); what it said at its end."""
    metrics, logs = folder / "runs" / "latest" / "metrics.jsonl", folder / "runs" / "latest" / "logs"
    wanted = count_lines(metrics) + 1
    process = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and count_lines(metrics) <= wanted:
        time.sleep(0.01)
    time.sleep(random.Random(0).uniform(0, 0.3))
    newest = max(int(log.name[:3]) for log in logs.glob("*.rank0.log"))
    told = {rank: (logs / f"{newest:03d}.rank{rank}.log").read_text() for rank in (0, 1)}
    harm({rank: int(re.findall(r"process (\d+)", text)[-1]) for rank, text in told.items()})
    began = time.monotonic()
    _, errors = process.communicate(timeout=120)
    assert time.monotonic() - began < 60
    assert process.returncode != 0, errors[-3000:]
    return errors


def test_a_killed_rank_ends_the_run_and_the_same_command_resumes(tmp_path: Path, tiny: Path) -> None:
    whole(tmp_path / "whole", tiny, "cpu:0-1")
    line = command(tmp_path / "cut", tiny, "cpu:0-1")
    for rank in (1, 0):
        errors = interrupted(line, tmp_path / "cut", lambda pids, rank=rank: os.kill(pids[rank], signal.SIGKILL), ENV)
        assert re.search(rf"rank {rank} of 2 \(device cpu:{rank}, host .*\) died", errors), errors[-3000:]
    whole(tmp_path / "cut", tiny, "cpu:0-1")
    assert_same_run(run_dir(tmp_path / "whole"), run_dir(tmp_path / "cut"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two nodes of one CPU each, on this machine."""
    from ray._private.authentication.authentication_token_setup import _enable_token_auth
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()  # what another module's tests were connected to
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # restored afterwards
    _enable_token_auth()  # as any Ray that this process had before: the mode is read once
    small = {"num_cpus": 1, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    made.small = small
    made.second = made.add_node(**small)
    yield made
    made.shutdown()


def environment(cluster: Any) -> dict[str, str]:
    """Of a process that shall find the cluster; what Ray has put into this one's says how one talks to it."""
    return {**os.environ, **ENV, "RAY_ADDRESS": cluster.address}


@pytest.mark.timeout(600)  # two runs, and Ray takes a while to see that a node is gone
def test_a_lost_node_ends_the_run_and_the_same_command_resumes(tmp_path: Path, tiny: Path, cluster: Any) -> None:
    env = environment(cluster)
    whole(tmp_path / "whole", tiny, "cpu:0-1", env)
    line = command(tmp_path / "cut", tiny, "cpu:0-1")
    errors = interrupted(
        line, tmp_path / "cut", lambda _: cluster.remove_node(cluster.second, allow_graceful=False), env
    )
    assert re.search(r"ClusterError|rank \d of 2 .* died", errors), errors[-3000:]
    cluster.add_node(**cluster.small)
    whole(tmp_path / "cut", tiny, "cpu:0-1", env)
    assert_same_run(run_dir(tmp_path / "whole"), run_dir(tmp_path / "cut"))


class Prompts:
    """Two prompts a batch, each with its number as its group."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        numbers = [self.taken, self.taken + 1]
        self.taken += 2
        named = {"prompt": [f"Say {n}" for n in numbers], "group": [f"p{n}" for n in numbers]}
        return Batch.from_columns({**named, "number": numbers})


class Noting:
    """Keeps which samples were trained."""

    def learn(self, samples: Any) -> dict[str, Any]:
        self.trained = [*getattr(self, "trained", []), *samples["main"]["id"]]
        return super().learn(samples)  # type: ignore[misc]


class Synchronous(Noting, verl.Trainer):
    pass


class Asynchronous(Noting, AsyncTrainer):
    pass


REWARD = """
import os
import time


def score(texts, number):
    time.sleep(0.2)
    with open({file!r}, "a") as file:
        file.write(str(number[0]) + "\\n")
    return [sum(ord(c) < 100 for c in text) / max(len(text), 1) for text in texts]
"""


class Loss(threading.Thread):
    """Some time after four workers stand on two nodes: SIGKILL of all that runs on the second one."""

    def __init__(self, cluster: Any, pool: Callable[[], Pool]) -> None:
        super().__init__(daemon=True)
        self.cluster, self.pool = cluster, pool
        self.killed: list[int] = []
        self.start()

    def run(self) -> None:
        while len(there := [worker for worker in self.pool().workers if worker.is_ready]) < 4:
            time.sleep(0.01)
        self.killed = [worker.pid for worker in there if worker.node == self.cluster.second.node_id]
        time.sleep(random.Random(0).uniform(0.5, 1.0))
        for pid in self.killed:
            os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(self.cluster.second, allow_graceful=False)

    def is_mended(self) -> bool:
        """Whether four new workers work on what is left."""
        workers = [worker for worker in self.pool().workers if worker.is_ready]
        return not self.is_alive() and len(workers) == 4


@pytest.fixture
def connected(cluster: Any) -> Iterator[Any]:
    ray.init(cluster.address)
    yield cluster
    ray.shutdown()


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_lost_node_of_reward_workers_loses_no_sample(
    tmp_path: Path, tiny: Path, connected: Any, algorithm: str
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARD.format(file=str(tmp_path / "scored")))
    reward = verl.Reward(f"{file}:score", workers=4, retries=1)
    actor = verl.Actor(str(tiny), sampling=verl.SamplingParams(max_new_tokens=6, ignore_eos=True))
    trainer = Synchronous(actor, reward=reward, algorithm=algorithm, n=4, log_dir=False)
    prompts, steps, over = Prompts(), 0, time.monotonic() + 90
    try:
        loss = Loss(connected, lambda: reward.group)
        while steps < 12 or not loss.is_mended():
            assert trainer.step(next(prompts))["reward/abstained"] == 0
            steps += 1
            assert time.monotonic() < over
    finally:
        trainer.close()
        reward.close()
    assert len(loss.killed) == 2  # they had been spread
    assert len(trainer.trained) == len(set(trainer.trained)) == 8 * steps
    scored = Counter((tmp_path / "scored").read_text().split())
    assert {int(number) for number in scored} == set(range(prompts.taken)) and min(scored.values()) == 4
    # Of what a worker was at when it died, the reward may have been written down and not told.
    assert scored.total() <= 8 * steps + len(loss.killed)


def test_a_lost_node_of_rollout_workers_loses_no_sample(tiny: Path, connected: Any) -> None:
    params = verl.SamplingParams(max_new_tokens=48, ignore_eos=True)
    actor = verl.Actor(str(tiny), optim={"lr": 1e-2}, sampling=params, max_num_seqs=16)
    trainer = Asynchronous(
        actor, algorithm="grpo", reward_fn=low_bytes, n=2, batch_size=2, max_staleness=2, rollout_workers=4,
        deadline=60, log_dir=False,
    )  # fmt: skip
    prompts, steps, over = Prompts(), 0, time.monotonic() + 240
    try:
        loss = Loss(connected, lambda: trainer.group)
        while steps < 12 or not loss.is_mended():
            assert trainer.advance(prompts)["rollout/workers"] == 4
            steps += 1
            assert time.monotonic() < over
        untrained = [*trainer.schedule.ready, *trainer.schedule.unfinished]
    finally:
        trainer.close()
    assert len(loss.killed) == 2
    assert len(trainer.trained) == len(set(trainer.trained)) == 4 * steps
    groups = {int(id_.split("/")[0][1:]) for id_ in trainer.trained} | {int(group[1:]) for group in untrained}
    assert groups == set(range(prompts.taken))


def test_a_script_that_never_closes_its_workers_leaves_none_and_sees_their_stacks(tmp_path: Path, cluster: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import verl\n"
        "reward = verl.Reward(lambda texts: [len(text) for text in texts], workers=2)\n"
        "print(reward.get_reward(verl.Batch.from_rows([{'response': 'abc'}] * 20))['reward'] == [3.0] * 20)\n"
        "workers = [worker for worker in reward.group.workers if worker.is_ready]\n"
        "print(len({process.node for process in workers}), *(process.pid for process in workers))\n"
        "reward.group.dump_stacks()\n"
        "import time\n"
        "time.sleep(3)  # Ray brings what they say\n"
    )
    env = environment(cluster)
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "in main_loop\n" in done.stderr, done.stderr[-3000:]
    told, nodes, *pids = done.stdout.split()
    assert told == "True" and int(nodes) == len(pids)
    over = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < over
        time.sleep(0.1)

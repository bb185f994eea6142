"""The same script on a Ray cluster: the same parameters, metrics and samples; what happens when ranks fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import verl
from tests import forked, ranks
from tests.cluster.test_torchrun import SCRIPT, assert_equal_runs
from verl.batch import Batch
from verl.cluster.group import RankGroup
from verl.cluster.placement import DeviceMesh
from verl.cluster.rank_context import ALONE, RankContext, RoleMeshes, dispatch
from verl.errors import ClusterError, ConfigError
from verl.weights.layout import Layout, Mesh
from verl.weights.shard import Shard

ray = pytest.importorskip("ray")
BOTH = RoleMeshes("probe", {"train": Mesh((0, 1), Layout(replicate=2))})


class Probe:
    """A worker that does what a test asks it to."""

    def __init__(self, *, context: RankContext = ALONE) -> None:
        self.context, self.held = context, ""

    @dispatch("train", split="rows", collect="rows")
    def double(self, batch: Batch) -> Batch:
        return Batch.from_columns({"y": [2 * x for x in batch["x"]], "by": [self.context.rank] * len(batch)})

    @dispatch("train", split="rows", collect="batches")
    def each(self, batch: Batch) -> Iterator[Batch]:
        for row in range(len(batch)):
            yield batch.slice(row, 1)

    @dispatch("train", collect="shards")
    def shards(self) -> Iterator[Shard]:
        for index in range(3):
            values = torch.full((2,), float(index))
            dist.all_reduce(values, group=self.context.groups["train"])
            yield Shard.whole(f"w{index}", values)

    @dispatch(collect="none")
    def load(self, shards: Iterable[Shard]) -> None:
        self.held = ",".join(f"{shard.name}={shard.tensor.tolist()}" for shard in shards)

    @dispatch("train", split="rows", collect="rows")
    def loaded(self, batch: Batch) -> Batch:
        return Batch.from_columns({"held": [self.held] * len(batch)})

    @dispatch("train", split="rows", collect="rows")
    def picky(self, batch: Batch) -> Batch:
        if 3 in batch["x"]:
            raise ZeroDivisionError("three")
        return batch

    @dispatch("train", split="rows", collect="rows")
    def total(self, batch: Batch) -> Batch:
        columns = [batch[name] for name in ("x", "y", "z") if name in batch]
        return Batch.from_columns({"total": [sum(values) for values in zip(*columns, strict=True)]})

    @dispatch("train")
    def meet(self, how: str) -> float:
        if self.context.rank == 1:
            if how == "raise":
                raise ZeroDivisionError("the loss of rank 1")
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                time.sleep(600)
        total = torch.ones(1)
        dist.all_reduce(total, group=self.context.groups["train"])
        return float(total)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.shutdown()  # what another module's tests were connected to
    verl._host.ray_session.import_ray()  # and its workers will be forked
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    yield
    ray.shutdown()


@pytest.fixture
def job(cluster: None) -> Iterator[Any]:
    from verl.cluster.ray.transport import RayTransport

    made = RayTransport(DeviceMesh("cpu:0-1"), timeout=60)
    yield made
    made.close()


def probe(job: Any) -> Any:
    return RankGroup(BOTH, partial(Probe), job)


@pytest.fixture(scope="module")
def alone(make_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and what one process made of it."""
    model, out = make_tiny("gpt2", torch.float64), tmp_path_factory.mktemp("alone")
    ranks.alone(SCRIPT, model, out)
    return model, out


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_slots_equal_one_process(alone: tuple[Path, Path], tmp_path: Path, strategy: str) -> None:
    model, expected = alone
    ranks.alone(SCRIPT, model, tmp_path, json.dumps("cpu:0-1"), json.dumps({"strategy": strategy}))
    assert_equal_runs(expected, tmp_path)


@pytest.mark.slow
def test_one_slot_rolls_out_and_one_trains(alone: tuple[Path, Path], tmp_path: Path) -> None:
    model, expected = alone
    placement = {"rollout": "cpu:0", "actor": "cpu:1", "critic": "cpu:1", "reference": "cpu:0"}
    ranks.alone(SCRIPT, model, tmp_path, json.dumps(placement))
    assert_equal_runs(expected, tmp_path)


@pytest.mark.slow
def test_data_travel_as_declared(job: Any) -> None:
    group = probe(job)
    batch = Batch.from_rows([{"x": x, "prompt_tokens": [x], "response_tokens": [3]} for x in range(5)])
    doubled = group.call(Probe.double, batch)
    assert doubled["y"] == [0, 2, 4, 6, 8]
    assert set(doubled["by"]) == {0, 1}
    assert sorted(row["x"] for part in group.call(Probe.each, batch) for row in part) == list(range(5))
    assert group.call(Probe.meet, "well") == 2.0
    weights = {shard.name: shard.tensor.tolist() for shard in group.call(Probe.shards)}
    assert weights == {"w0": [0.0, 0.0], "w1": [2.0, 2.0], "w2": [4.0, 4.0]}
    next(iter(group.call(Probe.shards)))  # who stops listening leaves no rank behind
    group.call(Probe.load, (shard for shard in group.call(Probe.shards)))
    assert set(group.call(Probe.loaded, batch)["held"]) == {"w0=[0.0, 0.0],w1=[2.0, 2.0],w2=[4.0, 4.0]"}
    # A failure of a call that ranks do apart leaves them as they were.
    with pytest.raises(ZeroDivisionError, match="three") as caught:
        group.call(Probe.picky, batch)
    assert "in picky" in str(caught.value.__cause__) and "role 'probe'" in str(caught.value.__cause__)
    assert group.call(Probe.meet, "well") == 2.0


@pytest.mark.slow
def test_a_batch_that_grows_reaches_every_rank(job: Any) -> None:
    group = probe(job)
    batch = Batch.from_rows([{"x": x, "prompt_tokens": [x], "response_tokens": [3]} for x in range(3, 8)])
    assert group.call(Probe.total, batch)["total"] == [3, 4, 5, 6, 7]
    grown = batch.add({"y": [10] * 5}).add({"z": [100 * x for x in range(5)]})
    for _ in range(2):
        assert group.call(Probe.total, grown)["total"] == [13, 114, 215, 316, 417]
    with pytest.raises(ZeroDivisionError):
        group.call(Probe.picky, grown)
    assert group.call(Probe.total, grown)["total"] == [13, 114, 215, 316, 417]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind", "text"), [
    ("raise", ZeroDivisionError, "the loss of rank 1"),
    ("die", ClusterError, r"rank 1 of 2 \(device cpu:1, host .*, pid \d+\) died in 'probe.meet'"),
])  # fmt: skip
def test_the_first_failure_ends_the_wait_and_the_slots(job: Any, how: str, kind: type, text: str) -> None:
    group = probe(job)
    assert group.call(Probe.meet, "well") == 2.0
    began = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        group.call(Probe.meet, how)
    assert time.monotonic() - began < 20
    if how == "raise":
        trace = str(caught.value.__cause__)
        assert "raise ZeroDivisionError" in trace and "rank 1 of 2, host" in trace and "role 'probe'" in trace
    with pytest.raises(ClusterError, match="have been ended"):
        group.call(Probe.meet, "well")


@pytest.mark.slow
def test_a_map_works_again_after_its_slots_have_ended(cluster: None) -> None:
    from verl.cluster.controller import Controller

    def probe_of(controller: Controller) -> Any:
        return controller.group("actor", partial(Probe))

    at_first = Controller.of("cpu:0-1")
    assert Controller.of("cpu:0-1") is at_first and probe_of(at_first).call(Probe.meet, "well") == 2.0
    with pytest.raises(ClusterError, match="died in"):
        probe_of(at_first).call(Probe.meet, "die")
    second = Controller.of("cpu:0-1")
    assert probe_of(second).call(Probe.meet, "well") == 2.0
    with pytest.raises(ClusterError, match="have been ended"):
        probe_of(at_first).call(Probe.meet, "well")
    second.close()
    third = Controller.of("cpu:0-1")
    assert third not in (at_first, second) and third is Controller.of("cpu:0-1")
    third.close()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_all_stacks_are_told(job: Any, caplog: pytest.LogCaptureFixture) -> None:
    group = probe(job)
    assert group.call(Probe.meet, "well") == 2.0
    job.timeout = 3.0
    with pytest.raises(ClusterError, match=r"'probe.meet' did not end within 3 s: waited for .*device cpu:1"):
        group.call(Probe.meet, "hang")
    assert "time.sleep(600)" in caplog.text and "all_reduce" in caplog.text


@pytest.mark.slow
def test_slots_have_the_deadline_of_the_trainer_that_places_them(cluster: None, tiny: Path) -> None:
    from verl.cluster.controller import Controller

    def timeout(placement: Any, deadline: float) -> float:
        trainer = verl.Trainer(str(tiny), reward_fn=len, placement=placement, deadline=deadline, log_dir=False)
        return trainer.actor.controller.transport.timeout

    assert timeout("cpu:0-1", 77) == 77
    assert timeout("cpu:0-1", 88) == 88  # nothing has started yet
    given = Controller("cpu:0-1", timeout=5)
    assert timeout(given, 77) == 5
    given.close()
    shared = Controller.of("cpu:0-1")
    shared.start()
    assert timeout("cpu:0-1", 77) == 88
    shared.close()


def test_a_cluster_that_does_not_answer_is_named_at_once() -> None:
    script = "import verl\nverl.Controller('cpu:0-1')"
    env = {**ranks.ENV, "RAY_ADDRESS": "127.0.0.1:1"}
    done = forked.run([sys.executable, "-c", script], env=env, timeout=60)
    assert "ClusterError: no Ray cluster answers at 127.0.0.1:1 (UNAVAILABLE)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "text"), [
    ("cuda:0-3", r"asks for device cuda:0 .* Ray cluster of 1 nodes has 0 cuda devices"),
    ({"cpu_ids": [0, 1], "node": "elsewhere"}, r"cpu:0@elsewhere names no one node of the Ray cluster; it has 0 \("),
    ({"cpu_ids": [0, 1], "node": 0, "accelerator": "H100"}, r"wants accelerator H100, and the Ray cluster has: none"),
    ({"actor": "cpu:0", "critic": "cuda:0"}, "of one kind, got cpu and cuda"),
    ("cpu:0-199", r"200 cpu devices take 0.02 CPUs each or more, and of the 2 CPUs of the Ray cluster [0-9.]+ are"),
])  # fmt: skip
def test_a_map_that_cannot_be_met_fails_with_the_numbers(cluster: None, placement: Any, text: str) -> None:
    from verl.cluster.controller import Controller

    with pytest.raises(ConfigError, match=text):
        Controller(placement)


@pytest.mark.slow
def test_an_optimizer_of_this_process_is_refused_before_ranks_start(
    cluster: None, make_tiny: Callable[..., Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny("gpt2", torch.float32))
    actor = verl.Actor(model, placement="cpu:0-1", optim=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="your own SGD"):
        _ = actor.group


def test_without_ray_a_map_of_two_slots_says_what_to_do() -> None:
    code = "import sys; sys.modules['ray'] = None; import verl; verl.Controller('cpu:0-1')"
    done = forked.run([sys.executable, "-c", code], env=ranks.ENV)
    assert "ConfigError" in done.stderr
    assert "pip install 'ray>=2.59'" in done.stderr and "torchrun --nproc_per_node=2" in done.stderr


def descendants(pid: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, edge = set(), {pid}
    while edge := {child for child, parent in parents.items() if parent in edge}:
        found |= edge
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_script(tmp_path: Path, end: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time, verl\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job of a shell ignores it
        "verl.Controller('cpu:0-1').start()\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], env=ranks.ENV, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any("up" in line for line in process.stdout)
    children = descendants(process.pid)
    assert len(children) >= 3
    process.send_signal(end)
    process.wait(60)
    until = time.monotonic() + 120  # Ray's own agents look for a dead Ray for about 60 s
    while (left := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left

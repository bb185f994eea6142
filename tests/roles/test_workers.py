"""Actors under the names of training back ends, and models that a subclass builds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy
from transformers import AutoModelForCausalLM

import verl
from tests.ranks import alone, job
from verl.errors import ConfigError
from verl.training.options import FSDPConfig
from verl.utils import init_device_mesh

SAMPLING = verl.SamplingParams(max_new_tokens=4)


@pytest.fixture(autouse=True)
def leave_the_job() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("sharding", "strategy", "reshard", "size"),
    [
        ("FULL_SHARD", "fsdp", True, -1),
        ("SHARD_GRAD_OP", "fsdp", False, -1),
        ("NO_SHARD", "ddp", True, -1),
        ("HYBRID_SHARD", "fsdp", True, 1),
        (ShardingStrategy.FULL_SHARD, "fsdp", True, -1),
    ],
)
def test_sharding_strategies_have_their_settings(
    tiny: Path, sharding: Any, strategy: str, reshard: bool, size: int
) -> None:
    worker = verl.FSDPWorker(model_name=str(tiny), fsdp_config={"sharding_strategy": sharding})
    options = worker.train_options
    assert options.strategy == strategy
    assert (options.fsdp_config.reshard_after_forward, options.fsdp_config.fsdp_size) == (reshard, size)


def test_what_has_no_engine_or_strategy_is_refused_by_name(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'FULL_SHARD'"):
        verl.FSDPWorker(model_name=str(tiny), fsdp_config={"sharding_strategy": "FULL_SHRD"})
    with pytest.raises(ConfigError, match="did you mean 'tensor_model_parallel_size'"):
        verl.MegatronWorker(model_name=str(tiny), megatron_config={"tensor_parallel_size": 2})
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not divide the 1 rank"):
        verl.MegatronWorker(
            model_name=str(tiny), megatron_config={"tensor_model_parallel_size": 2}, sampling=SAMPLING
        ).generate_sequences(["a"])
    with pytest.raises(ConfigError, match=r"override_model_config \(attention_dropout\)"):
        verl.FSDPWorker(str(tiny), override_model_config={"attention_dropout": 0.0})


class Halved(verl.FSDPWorker):
    """Its head is halved; it is stepped by SGD, whose rate falls by ten at each step."""

    def _build_model_optimizer(
        self, model_path: Any, fsdp_config: Any, optim_config: Any, override_model_config: Any, role: str = "actor"
    ) -> Any:
        assert isinstance(fsdp_config, FSDPConfig) and role == "actor"
        assert self.device_mesh.mesh_dim_names == ("dp",)
        with self.init_context():
            model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
            model.get_output_embeddings().weight.mul_(override_model_config["factor"])
        optimizer = torch.optim.SGD(model.parameters(), lr=optim_config.lr)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)


def test_a_subclass_makes_model_optimizer_and_schedule(tiny: Path) -> None:
    worker = Halved(str(tiny), optim_config={"lr": 1e-2}, override_model_config={"factor": 0.5}, sampling=SAMPLING)
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    head = plain.get_output_embeddings().weight
    torch.testing.assert_close(worker.model.get_output_embeddings().weight.detach(), 0.5 * head.detach())
    sequences = worker.generate_sequences(["a", "b"], n=2)
    rates = [worker.update(sequences, [1.0, 0.0, 0.5, 0.2])["lr"] for _ in range(3)]
    assert rates == pytest.approx([1e-2, 1e-3, 1e-4])


def test_a_function_makes_the_optimizer_of_every_actor(tiny: Path) -> None:
    make = partial(torch.optim.SGD, lr=1e-2)
    actor = verl.Actor(str(tiny), optim=make, sampling=SAMPLING)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    own = verl.Actor(model, str(tiny), optim=torch.optim.SGD(model.parameters(), lr=1e-2), sampling=SAMPLING)
    sequences = actor.generate_sequences(["a", "b"], n=2)
    for one in (actor, own):
        one.update(sequences, [1.0, 0.0, 0.5, 0.2])
    theirs = {shard.name: shard.tensor for shard in own.shards()}
    for shard in actor.shards():
        assert shard.tensor.numpy() == pytest.approx(theirs[shard.name].numpy(), rel=1e-4, abs=1e-6), shard.name


def test_the_mesh_has_the_names_that_are_given() -> None:
    mesh = init_device_mesh("cpu", (1, 1), dim_names=("dp", "sp"))
    assert mesh.mesh_dim_names == ("dp", "sp") and mesh["sp"].size() == 1
    assert init_device_mesh(dp=-1, sp=1).size() == 1
    with pytest.raises(ConfigError, match="dp=2 x sp=1 are not the 1 rank of this job"):
        init_device_mesh(dp=2, sp=1)
    with pytest.raises(ConfigError, match="give 2 dim_names"):
        init_device_mesh("cpu", (1, 1))


@pytest.mark.slow
def test_megatron_worker_learns_what_an_actor_learns(make_tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, files = make_tiny("qwen2", torch.float64), [tmp_path / name for name in ("alone", "megatron")]
    script = Path(__file__).with_name("rank_megatron_worker.py")
    alone(script, model, files[0])
    job(2, script, model, files[1], json.dumps({"tensor_model_parallel_size": 2}))
    one, megatron = (torch.load(file) for file in files)
    assert one["metrics"] and one["weights"].keys() == megatron["weights"].keys()
    for ours, theirs in zip(one["metrics"], megatron["metrics"], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-9)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(megatron["weights"][name], weight, rtol=0, atol=1e-9, msg=name)

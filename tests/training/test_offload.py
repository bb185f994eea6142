"""Shards in host memory under ranks on accelerators, which this machine has none of: meta tensors are in the place of
a device's, and torch's own checks refuse what they refuse there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.training.cases import tiny_model
from verl.models.packed import PackedModel
from verl.models.portable import empty_copy
from verl.training.options import EngineOptions
from verl.training.ranks import Ranks
from verl.training.torch_engine import TorchEngine
from verl.weights.layout import Layout, Mesh
from verl.weights.plan import transition
from verl.weights.shards import model_shards
from verl.weights.transition import Transfer
from verl.workers import streams

DEVICE = torch.device("meta")


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """This process is the first of two; what it sends and receives goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def offloaded(monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """An engine that computes on the device."""
    mesh_of = Ranks.device_mesh  # torch has no mesh of meta devices
    monkeypatch.setattr(Ranks, "device_mesh", lambda ranks, device, *dims: mesh_of(ranks, torch.device("cpu"), *dims))
    whole = tiny_model("llama")
    model = empty_copy(whole, "meta")
    packed = PackedModel(model, device="cpu")
    packed._device = DEVICE
    options = EngineOptions(strategy="fsdp", fsdp_config={"param_offload": True})  # type: ignore[arg-type]
    layout, group = Mesh((0, 1), Layout(shard=2)), dist.group.WORLD
    return TorchEngine(model, options, mesh=layout, group=group, packed=packed, weights=lambda _: model_shards(whole))


def test_shards_get_their_memory_where_torch_demands_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = offloaded(monkeypatch)
    for module in engine.model.modules():
        if isinstance(module, FSDPModule):
            module._get_fsdp_state()._fsdp_param_group._validate_cpu_offload_params()  # type: ignore[union-attr]
    assert {shard.tensor.device.type for shard in engine.shards()} == {"cpu"}
    assert engine.forward.packed.device == DEVICE, "where it computes"


def test_messages_lie_where_the_other_side_receives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl sends no host memory, and gloo's end of a message never meets nccl's."""
    engine, posted = offloaded(monkeypatch), []

    def batch(operations: list[Any]) -> list[Any]:
        for operation in operations:
            assert operation.tensor.device == DEVICE, "of a device alone"
        posted.extend(operations)
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    specs = engine.weights.specs
    plan = transition(engine.mesh, Mesh((0, 1), Layout(replicate=2)), specs, None, 1 << 12)
    buffers = {
        name: torch.empty(plan.local_shape(0, name), dtype=specs[name].dtype, device=DEVICE) for name in plan.names(0)
    }
    transfer = Transfer(plan, 0, dist.group.WORLD, engine.shards(), buffers, DEVICE)
    transfer.run()
    assert {operation.op for operation in posted} == {dist.isend, dist.irecv} and transfer.sent and transfer.received


def test_broadcast_shards_lie_where_the_other_side_receives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent = offloaded(monkeypatch), []
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    monkeypatch.setattr(streams, "gather_json", lambda held, group: [held, []])
    monkeypatch.setattr(dist, "broadcast", lambda tensor, rank, group: sent.append(tensor.device))
    assert [*streams.broadcast_shards([*engine.shards()], dist.group.WORLD)]
    assert {*sent} == {DEVICE}

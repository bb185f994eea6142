"""A micro-batch on a GPU: the host does not wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from tests.algorithms.support import OFFLINE, ONLINE, prepared
from tests.algorithms.test_with_engine import model
from tests.training.cases import make_engine
from tests.varlen import varlen_attn
from tests.waits import no_waits, unwatched
from verl.attention import flash
from verl.models.heads import ValueModel
from verl.training.micro_batch import MiniBatch
from verl.training.torch_engine import TorchEngine
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", [*ONLINE, *OFFLINE])
def test_forward_and_backward_wait_for_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(flash, "flash_attention", lambda value: unwatched(varlen_attn))
    algorithm, batch = prepared(name, 3)
    for role in sorted(algorithm.roles & {"actor", "critic", "cost_critic"}):
        objective = algorithm.objective(role)
        head = algorithm.head if role == "actor" else "value"
        net = (model() if head == "lm" else ValueModel.from_model(model())).double()
        engine = make_engine(net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), head=head, micro_batch_size=2)
        watch(monkeypatch, engine)
        assert run_updates(engine, [TaskLoss(batch, objective)], MiniBatchPlan(), 0)["update/skipped"] == 0


def watch(
    monkeypatch: pytest.MonkeyPatch,
    engine: TorchEngine,
    watched: Callable[[], AbstractContextManager[Any]] = no_waits,
) -> None:
    """What is computed of micro-batches is watched; how rows of the host become tensors is not."""
    monkeypatch.setattr(MiniBatch, "_input", unwatched(MiniBatch._input))
    monkeypatch.setattr(engine.forward, "pack", unwatched(engine.forward.pack))
    original = engine.schedule.forward_backward

    def forward_backward(batches: Iterator[Any], scale: float) -> Iterator[Any]:
        for batch in batches:
            with watched():
                yield from original(iter([batch]), scale)

    monkeypatch.setattr(engine.schedule, "forward_backward", forward_backward)

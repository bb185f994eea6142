"""Sums of a micro-batch repeat bit for bit: on an accelerator nothing is added in an order that changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.algorithms.support import OFFLINE, ONLINE, prepared
from tests.algorithms.test_with_engine import model
from tests.training.cases import make_engine
from tests.training.test_waits import watch
from tests.varlen import varlen_attn
from tests.waits import unwatched
from verl._base import autograd
from verl._base.autograd import add_rows, sum_rows, take_rows
from verl.attention import flash
from verl.models.heads import ValueModel
from verl.workers.update import MiniBatchPlan, TaskLoss, run_updates

#: CUDA adds by atomics in these; in `index_put` with `accumulate` it does not.
_ATOMIC = ("index_add", "scatter_add", "scatter_reduce", "index_reduce", "put")
_SAFE_REDUCTIONS = ("amax", "amin")


class Ordered(TorchDispatchMode):
    """Refuses operations that add floats by atomics, unless each element gets one number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        if name in _ATOMIC and args[0].is_floating_point() and not self._is_exact(name, args):
            raise AssertionError(f"{func} adds in any order on CUDA")
        return func(*args, **(kwargs or {}))

    def _is_exact(self, name: str, args: Any) -> bool:
        if name == "scatter_reduce":
            return args[4] in _SAFE_REDUCTIONS
        return name == "scatter_add" and args[2].dim() == 2 and args[1] == 1 and args[2].shape[1] == 1


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", [*ONLINE, *OFFLINE])
def test_a_micro_batch_on_an_accelerator_adds_in_order(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(flash, "flash_attention", lambda value: unwatched(varlen_attn))
    monkeypatch.setattr(autograd, "_index_add_is_ordered", lambda device: False)
    algorithm, batch = prepared(name, 3)
    for role in sorted(algorithm.roles & {"actor", "critic", "cost_critic"}):
        head = algorithm.head if role == "actor" else "value"
        net = (model() if head == "lm" else ValueModel.from_model(model())).double()
        engine = make_engine(net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), head=head, micro_batch_size=2)
        watch(monkeypatch, engine, Ordered)
        part = TaskLoss(batch, algorithm.objective(role))
        assert run_updates(engine, [part], MiniBatchPlan(), 0)["update/skipped"] == 0


def test_it_is_noticed_where_floats_are_added_by_atomics() -> None:
    index = torch.tensor([0, 0])
    with Ordered():
        for add in (torch.zeros(2).index_add, torch.zeros(2).scatter_add):
            with pytest.raises(AssertionError, match="any order"):
                add(0, index, torch.ones(2))
        torch.zeros(2, dtype=torch.int64).index_add(0, index, index)  # whole numbers may come in any order


@pytest.mark.parametrize("shape", [(50,), (50, 3), (0,)])
@pytest.mark.parametrize("ordered", [True, False], ids=["cpu", "accelerator"])
def test_sums_of_rows_and_their_gradients(
    monkeypatch: pytest.MonkeyPatch, ordered: bool, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(autograd, "_index_add_is_ordered", lambda device: ordered)
    torch.manual_seed(0)
    values = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    index = torch.randint(5, shape[:1])  # of 7: some rows get nothing
    want = torch.nn.functional.one_hot(index, 7).double().T @ values.reshape(
        len(values), shape[-1] if len(shape) > 1 else 1
    )
    found = sum_rows(values, index, 7)
    assert torch.allclose(found.reshape(7, -1), want, rtol=0, atol=1e-12)
    if len(values):
        factors = torch.randn_like(found)
        (gradient,) = torch.autograd.grad((found * factors).sum(), values)
        assert torch.equal(gradient, factors[index])
        rows = torch.randn(7, *shape[1:], dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad((take_rows(rows, index) * values).sum(), rows)
        assert torch.equal(take_rows(rows, index), rows[index])
        assert torch.allclose(gradient.reshape(7, -1), want, rtol=0, atol=1e-12)
    total = torch.ones_like(found).detach()
    add_rows(total, index, values.detach().float(), 0.25)
    again = 1 + 0.25 * want.detach().reshape(found.shape)
    assert torch.allclose(total, again, rtol=0, atol=1e-5)

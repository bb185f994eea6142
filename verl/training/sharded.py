"""Data parallelism with a part of the model on every rank (FSDP2; Zhao et al. 2023, arXiv 2304.11277).

Weights, gradient sums and optimizer state are cut by rows over the ranks. A layer's weights are gathered for its
forward and backward and freed again; its gradient is summed over the ranks, each of which keeps its own rows. A bf16
model keeps its parts in fp32, so that they are the masters, and computes on gathered bf16 copies.

All ranks must run equally many forwards, since each one gathers: a rank with fewer micro-batches than another repeats
a small one, which counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Cut

from verl.batch import Batch
from verl.errors import ConfigError
from verl.models.shards import first_row, load_model_shards, model_shards
from verl.shard import Shard
from verl.training.data_parallel import DataParallelEngine
from verl.training.gradients import Gradients, Weight
from verl.training.micro_batch import balanced
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import OptimConfig

# A row for the forwards that a rank runs for the sake of the others.
_IDLE = {"prompt_tokens": [[0]], "response_tokens": [[0]]}


class ShardedEngine(DataParallelEngine):
    """A `TrainEngine` on one of several ranks that each hold a part of the model; see `DataParallelEngine`.

    The model is cut in place: its parameters are DTensors from then on, and so are the tensors of `state`. `shards`
    gathers them one by one, so all ranks draw it together.

    Raises:
        ConfigError: an optimizer of the caller's, which holds whole weights; moments in bf16; fp16 weights.
    """

    def __init__(self, model: nn.Module, group: Any, *, optim: OptimConfig | None = None, **options: Any) -> None:
        if options.pop("optimizer", None) is not None:
            raise ConfigError("strategy 'fsdp' makes its own optimizer: give optim=OptimConfig(...), or use 'ddp'")
        if optim is not None and optim.moments == "bfloat16":
            raise ConfigError("strategy 'fsdp' keeps the optimizer's moments in float32: leave optim.moments out")
        super().__init__(model, group, **options)
        if self.packed.dtype == torch.float16:
            raise ConfigError("strategy 'fsdp' trains weights in bfloat16, float32 or float64, not float16")
        self._dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
        self._mesh = DeviceMesh.from_group(group, self.device.type)
        self._root = self._cut(trains=optim is not None)
        if optim is not None:
            weights = dict(self.model.named_parameters())
            self._optimizer = MixedPrecisionOptimizer({name: _part(w) for name, w in weights.items()}, optim)
            for weight in self._optimizer.gradients.weights:
                weights[weight.name].register_post_accumulate_grad_hook(partial(self._collect, weight))

    def shards(self) -> Iterator[Shard]:
        for shard in model_shards(self.model):
            dtype = self._dtypes.get(shard.name, shard.tensor.dtype)
            yield Shard.whole(shard.name, shard.tensor.to(dtype))

    def load_shards(self, shards: Iterable[Shard]) -> None:
        load_model_shards(self.model, shards)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = super().state()
        weights = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            weight = weights[name.rpartition(".")[0]]
            if tensor.dim():
                tensors[name] = DTensor.from_local(
                    tensor, self._mesh, [Cut(0)], run_check=False, shape=weight.shape, stride=weight.stride()
                )
        masters = {f"{name}.master": w.detach() for name, w in weights.items() if self._dtypes[name] != w.dtype}
        return tensors | masters, meta

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        weights = dict(self.model.named_parameters())
        parts = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition(".")
            part = _rows(tensor, weights[name]) if tensor.dim() and name in weights else tensor
            if key == "master" and name in weights:
                _part(weights[name]).copy_(part)
            else:
                parts[full_name] = part
        super().load_state(parts, meta)

    def _cut(self, trains: bool) -> Any:
        half = trains and self.packed.dtype == torch.bfloat16
        if half:
            self.model.float()
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        policy = mixed if half else MixedPrecisionPolicy(cast_forward_inputs=False)
        stacks = [m for m in self.packed.backbone.modules() if isinstance(m, nn.ModuleList)]
        for layer in next(iter(m for m in stacks if len(m) == self.packed.num_layers), ()):
            fully_shard(layer, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
        if self.head != "lm":  # fp32, whatever the backbone is in
            plain = MixedPrecisionPolicy(cast_forward_inputs=False)
            fully_shard(self.model.score, mesh=self._mesh, reshard_after_forward=True, mp_policy=plain)
        return fully_shard(_Root(self), mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)

    def _collect(self, weight: Weight, cut: Tensor) -> None:
        """Take the reduced gradient of this rank's rows."""
        gradient, cut.grad = cut.grad, None
        if isinstance(gradient, DTensor):
            # It is the mean over ranks of sums that are already divided by counts of all ranks.
            weight.loss_scale = self._trained().gradients.loss_scale / self.ranks
            weight.add(gradient.to_local())

    def _grad_norm(self, gradients: Gradients) -> float:
        square = torch.tensor(gradients.norm() ** 2, dtype=torch.float64, device=self.device)
        dist.all_reduce(square, group=self.group)
        return float(square.sqrt())

    def _predict(self, batch: Batch, temperature: float, entropy: bool) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._root(batch, temperature, entropy)
        return found

    def _compute(self, batch: Batch, temperature: float, entropy: bool) -> dict[str, Tensor]:
        return super()._predict(batch, temperature, entropy)

    @torch.no_grad()
    def _predict_all(self, batch: Batch, temperature: float = 1.0, entropy: bool = False) -> dict[str, Tensor]:
        count = len(self._split(batch))
        most = torch.tensor(count, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        found = super()._predict_all(batch, temperature, entropy)
        for _ in range(int(most) - count):
            with self._precision():
                self._predict(Batch.from_columns(_IDLE), temperature, entropy)
        return found

    def _micro_batches(self, batch: Batch, coupled: bool = False) -> tuple[list[list[int]], list[list[int]]]:
        counts = []
        for rows in balanced(batch, self.ranks, coupled, self.share_prompts):
            counts.append(len(self._split(batch.take(rows), coupled)) if rows else 0)
        own, _ = super()._micro_batches(batch, coupled)
        lengths = batch.lengths("response_tokens")
        units = batch.group_indices() if coupled else [[row] for row in range(len(batch))]
        smallest = min(units, key=lambda rows: (not all(lengths[row] for row in rows), sum(lengths[r] for r in rows)))
        return own, [smallest] * (max(counts) - len(own))


class _Root(nn.Module):
    """The whole computation of a micro-batch as one module: what it does not find gathered, its hooks gather."""

    def __init__(self, engine: ShardedEngine) -> None:
        super().__init__()
        self.model = engine.model
        self._engine = engine

    def forward(self, batch: Batch, temperature: float, entropy: bool) -> dict[str, Tensor]:
        found = self._engine._compute(batch, temperature, entropy)
        return {name: value.clone() for name, value in found.items()}  # its hooks stand on what is no view


def _part(weight: Tensor) -> nn.Parameter:
    """This rank's rows of a weight, on the same memory."""
    assert isinstance(weight, DTensor)
    return nn.Parameter(weight.to_local().detach(), requires_grad=weight.requires_grad)


def _rows(tensor: Tensor, cut: Tensor) -> Tensor:
    """Of a whole tensor the rows that this rank holds of `cut`."""
    return tensor[first_row(cut) :][: len(_part(cut))]

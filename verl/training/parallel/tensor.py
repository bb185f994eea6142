"""Tensor parallelism: each rank has columns or rows of a layer's matrices (Shoeybi et al. 2019, arXiv 1909.08053).

Activations between layers are whole and equal on all ranks. A column-parallel matrix gives each rank its heads, or its
part of the intermediate size; the row-parallel matrix after it gives each rank a summand of the result. Embedding and
head are cut over the vocabulary. Cuts follow the model's own plan (`base_model_tp_plan` of transformers), or ours for
kinds without one.

Cut weights are DTensors over the mesh dimension "tp", under their names. A module with cut weights runs its own forward
on this rank's parts of them, so nothing of a model's code is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.pytorch_utils import Conv1D

from verl._base.autograd import joined, shared, split, summed
from verl.errors import ConfigError
from verl.models.packed import PackedModel
from verl.training.forward import Forward
from verl.training.ranks import Parallel, Ranks
from verl.weights.layout import tensor_plan
from verl.weights.shard import local_part, local_weights, rows_of


def tensor(forward: Forward, ranks: Ranks, parallel: Parallel) -> None:
    """Cut a model's matrices over the dimension "tp".

    Raises:
        ConfigError: no plan for this kind of model, or the plan names a module that cannot be cut.
    """
    packed = forward.packed
    backbone: Any = packed.backbone
    cutter = cut_backbone(packed, ranks.mesh.layout.tp, ranks.device_mesh(packed.device, "tp"), ranks.group("tp"))
    output = packed.model.get_output_embeddings() if forward.head == "lm" else None
    cutter.cut_vocabulary(backbone.get_input_embeddings(), output)
    packed.fused = None  # modules are cut: they compute something else than their class says
    packed.tensor_group = cutter.group
    partial_sums = {id(weight) for weight in cutter.partial_sums}
    names = {name for name, weight in forward.model.named_parameters() if id(weight) in partial_sums}
    parallel.sum_over(ranks, lambda weight: ("tp",) if weight.name in names else ())
    parallel.cut_dims += ("tp",)


def cut_backbone(packed: PackedModel, size: int, mesh: Any = None, group: Any = None) -> _Cutter:
    """Cut the modules of a model's backbone over `size` ranks.

    Args:
        mesh, group: of the ranks; without them modules are looked at, and nothing is cut. The model may be without
            memory then, and is of no use afterwards.
    """
    cutter = _Cutter(packed, size, mesh, group)
    for name, module in [*packed.backbone.named_modules()]:
        if style := cutter.plan.get(_generic(name)):
            _STYLES[style](cutter, name, module)
    return cutter


class _Cutter:
    """Cuts modules of one model.

    Attributes:
        partial_sums: whole weights that each rank uses for its heads alone: their gradients add up over ranks.
    """

    def __init__(self, packed: PackedModel, size: int, mesh: Any, group: Any) -> None:
        self.plan = tensor_plan(packed.config.model_type, packed.config.base_model_tp_plan)
        self.size, self.mesh, self.group = size, mesh, group
        self.partial_sums: list[nn.Parameter] = []
        self._entered: tuple[Tensor, Tensor] | None = None

    def cut_vocabulary(self, embedding: Any, head: Any) -> None:
        """Cut embedding and head by rows where they are on this stage and of the plain kinds; tied ones stay tied."""
        here = [module for module in (embedding, head) if module is not None and any(True for _ in module.parameters())]
        if not all(isinstance(module, nn.Embedding | nn.Linear) for module in here):
            return
        tied = len(here) == 2 and head.weight is embedding.weight
        if embedding in here:
            self.cut("weight", embedding, Shard(0))
            self._look_up_locally(embedding)
        if head not in here:
            return
        for name, _ in [*head.named_parameters(recurse=False)]:
            if tied and name == "weight":
                head.weight = embedding.weight
            else:
                self.cut(name, head, Shard(0))
        self.run_locally(head, before=self.enter, after=self.by_columns(joined, head.out_features))

    def cut(self, name: str, module: nn.Module, placement: Any, where: str = "") -> None:
        """Cut a weight of a module: from then on it is this rank's part of it.

        Raises:
            ConfigError: the fused matrices in it have no equal parts for all ranks.
        """
        weight = module.get_parameter(name)
        fused = getattr(placement, "split_factor", 1)
        if fused > 1 and weight.shape[placement.dim] % (fused * self.size):
            raise ConfigError(
                f"layout: tp={self.size} does not divide {where or name}, {fused} fused matrices of "
                f"{weight.shape[placement.dim] // fused}"
            )
        if self.mesh is not None:
            sharded = distribute_tensor(weight.detach(), self.mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=weight.requires_grad))

    def run_locally(
        self,
        module: nn.Module,
        *,
        before: Callable[[Any], Any] | None = None,
        after: Callable[[Tensor], Tensor] | None = None,
        whole: str = "",
    ) -> None:
        """Let a module run on this rank's parts of its weights.

        Args:
            before: what becomes of each of its arguments; None: they stay.
            after: what becomes of its result, without the weight `whole`, which is added to it; None: it stays.
        """
        # The module's parameters are DTensors, because FSDP, checkpoints and the optimizer need to know what part of a
        # weight they are. With them its own code would compute on DTensors, which dispatch each operation in Python and
        # have no rule for many. So its `forward` is called while its parameters are this rank's plain tensors.
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Tensor:
            with local_weights(module, without=whole) as removed:
                result = forward(*(args if before is None else map(before, args)), **kwargs)
                result = result if after is None else after(result)
            return result if removed is None else result + removed

        module.forward = run

    def enter(self, x: Any) -> Any:
        """An argument that is equal on all ranks: its gradients add up, once for all modules that use it."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        if self._entered is None or self._entered[0] is not x:
            self._entered = x, shared(x, self.group)
        return self._entered[1]

    def sum(self, x: Tensor) -> Tensor:
        self._entered = None
        return summed(x, self.group)

    def by_columns(self, function: Callable[..., Tensor], size: int) -> Callable[[Tensor], Tensor]:
        """`joined` or `split` of `size` columns over the ranks, as torch cuts a dimension of this size."""
        sizes = [len(part) for part in torch.arange(size).chunk(self.size)]
        return partial(function, sizes=sizes + [0] * (self.size - len(sizes)), group=self.group)

    def _look_up_locally(self, embedding: nn.Embedding) -> None:
        rows = rows_of(embedding.weight)
        first, count = rows.start, len(rows)
        if embedding.padding_idx is not None:
            padding = embedding.padding_idx - first
            embedding.padding_idx = padding if 0 <= padding < count else None
        forward = embedding.forward

        def look_up(tokens: Tensor) -> Tensor:
            local = tokens - first
            is_here = (local >= 0) & (local < count)
            with local_weights(embedding):
                embedded = forward(local.clamp(0, count - 1))
            return summed(embedded * is_here[..., None], self.group)

        embedding.forward = look_up  # type: ignore[assignment, method-assign]


def _columns(cutter: _Cutter, name: str, module: Any, *, fused: int = 1, gather: bool = False) -> None:
    """A linear map of which each rank has outputs; `fused`: of each of as many matrices side by side."""
    if hasattr(module, "lora_A"):  # the result of the first matrix is whole, of the second each rank has columns
        for part in (module.base_layer, *module.lora_B.values()):
            _columns(cutter, name, part, fused=fused, gather=gather)
        return
    dim = _output_dim(name, module)
    for weight, parameter in [*module.named_parameters(recurse=False)]:
        axis = dim if parameter.dim() == 2 else 0
        cutter.cut(weight, module, Shard(axis) if fused == 1 else _StridedShard(axis, split_factor=fused), name)
    if isinstance(module, Conv1D):
        module.nf = local_part(module.weight).shape[1]
    after = cutter.by_columns(joined, module.out_features) if gather else None
    cutter.run_locally(module, before=cutter.enter, after=after)


def _rows(cutter: _Cutter, name: str, module: Any, *, whole_input: bool = False) -> None:
    """A linear map of which each rank has inputs. The bias is whole, and added once."""
    if hasattr(module, "lora_A"):
        for part in (module.base_layer, *module.lora_A.values()):
            _rows(cutter, name, part, whole_input=whole_input)
        return
    cutter.cut("weight", module, Shard(1 - _output_dim(name, module)))
    before = cutter.by_columns(split, module.in_features) if whole_input else None
    cutter.run_locally(module, before=before, after=cutter.sum, whole="bias")


def _experts(cutter: _Cutter, name: str, module: nn.Module) -> None:
    """Matrices `[experts, ...]` in one module: each rank computes a summand of every expert's result."""
    if hasattr(module, "lora_A"):
        raise ConfigError(f"layout: tp does not cut {name}, which has adapters (LoRA)")
    for weight, _ in [*module.named_parameters(recurse=False)]:
        placements = {"packed_colwise": _StridedShard(1, split_factor=2), "colwise": Shard(1), "rowwise": Shard(2)}
        placement = placements.get(cutter.plan.get(f"{_generic(name)}.{weight}", ""))
        if placement is None or module.get_parameter(weight).dim() != 3:
            raise ConfigError(f"layout: tp does not cut {name}.{weight}: the experts of this model have other weights")
        cutter.cut(weight, module, placement, f"{name}.{weight}")
    cutter.run_locally(module, before=cutter.enter, after=cutter.sum)


_STYLES: dict[str, Callable[[_Cutter, str, Any], None]] = {
    "colwise": _columns,
    "colwise_gather_output": partial(_columns, gather=True),
    "fused_qkv": partial(_columns, fused=3),
    "rowwise": _rows,
    "rowwise_split_input": partial(_rows, whole_input=True),
    "packed_colwise": partial(_columns, fused=2),
    "moe_tp_experts": _experts,
    # A norm that is applied to each head.
    "replicated_with_grad_allreduce": lambda cutter, _, norm: cutter.partial_sums.extend(norm.parameters()),
    # It splits the fused result by a size that it stores.
    "gpt2_attention": lambda cutter, _, module: setattr(module, "split_size", module.split_size // cutter.size),
}


def _output_dim(name: str, module: Any) -> int:
    """The dimension of a linear map's weight that its outputs have."""
    if isinstance(module, Conv1D):
        return 1
    if type(module) is nn.Linear:
        return 0
    raise ConfigError(f"layout: tp does not cut {name}, a {type(module).__name__}: only linear layers")


#: A module's name with "*" for numbers.
_generic = partial(re.compile(r"\.\d+(?=\.|$)").sub, ".*")

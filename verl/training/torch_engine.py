"""The training engine on torch alone: any layout that `parallelize` knows."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch

from verl._base.combinations import check
from verl.errors import ModelError
from verl.models.heads import ValueModel
from verl.models.portable import empty_copy
from verl.training.engine import TrainEngine, WeightSource
from verl.training.forward import Forward
from verl.training.optimizer import MixedPrecisionOptimizer
from verl.training.options import EngineOptions, FSDPConfig, OptimConfig, TrainOptions
from verl.training.parallel.data import replicate, shard, units
from verl.training.ranks import LocalWeights, Parallel, Ranks, WholeModel
from verl.weights.layout import Layout
from verl.weights.shard import local_part
from verl.weights.shards import give_memory, load_model_shards


class TorchEngine(TrainEngine):
    """A `TrainEngine` whose live tensors are the model's: none is copied. Where the mesh cuts weights, the model's
    parameters are DTensors from then on."""

    def assemble(self, source: WeightSource | None) -> None:
        forward, ranks, options = self.forward, self.ranks, self.options
        model, whole = self.model, WholeModel(self.model)
        self.parallel = parallel = parallelize(forward, ranks, options.fsdp_config, trains=options.trains)
        # Only now, when the model is cut: a rank allocates and reads its own parts, and never has the whole model.
        if source is not None:
            # What torch offloads, it demands in host memory from the first forward on.
            is_offloaded = options.fsdp_config.param_offload and ranks.mesh.layout.shard > 1
            give_memory(forward, "cpu" if is_offloaded else forward.packed.device)
            load_model_shards(model, source(model), whole.shapes)
        self.weights = LocalWeights(model, whole, parallel.dtypes, ranks)
        if not options.trains:
            return
        # A weight that ranks cut is two parameters here: the model's DTensor, which autograd gives the gradient to, and
        # this rank's part of it on the same memory, which the optimizer steps. A whole weight is both.
        trained = dict(model.named_parameters())
        cut = {name: weight for name, weight in trained.items() if hasattr(weight, "placements")}
        pieces = {name: torch.nn.Parameter(local_part(w).detach(), w.requires_grad) for name, w in cut.items()}
        is_scaled = torch.float16 in parallel.dtypes.values()
        config = options.optim or OptimConfig(max_grad_norm=None)
        self.optimizer = MixedPrecisionOptimizer(
            trained, config, options.optimizer, trained | pieces, is_scaled=is_scaled, scheduler=options.scheduler
        )


def parallelize(forward: Forward, ranks: Ranks, config: FSDPConfig, *, trains: bool) -> Parallel:
    """Lay a model, whole and equal on all ranks, out over a mesh, in place.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    # The order is that of nesting. Stages come first: nothing else needs to touch layers that go. FSDP comes last,
    # since it cuts what tensor and expert parallelism have left, and hooks modules as they are by then. Dtypes are
    # noted in between: FSDP keeps weights in half precision as fp32 pieces, and those that are served have the dtype of
    # before.
    layout = ranks.mesh.layout
    parallel = Parallel(ranks.mesh)
    if layout.pp > 1:
        from verl.training.parallel.pipeline import pipeline

        pipeline(forward, ranks, parallel, trains=trains)
    parallel.dtypes = {name: weight.dtype for name, weight in forward.model.named_parameters()}
    if layout.tp > 1:
        from verl.training.parallel.tensor import tensor

        tensor(forward, ranks, parallel)
    if layout.ep > 1:
        from verl.training.parallel.expert import expert

        expert(forward, ranks, parallel)
    if layout.sp > 1:
        from verl.training.parallel.sequence import sliced

        forward.slicing = partial(sliced, group=ranks.group("sp"), per_row=forward.head == "score")
    if layout.shard > 1:
        shard(forward, ranks, parallel, config, trains=trains)
    over = ("sp", "ep") if layout.shard > 1 else ("replicate", "sp", "ep")  # FSDP adds up over replicas itself
    if summed := [dim for dim in over if getattr(layout, dim) > 1]:
        replicate(ranks, parallel, *summed)
    return parallel


def rehearse(
    model: Any, options: TrainOptions, layout: Layout, *, splits: int = 1, rollout: Collection[str] = ()
) -> None:
    """Raise on the driver what ranks would, of a model that is to be trained in a layout, and to generate.

    Args:
        model: with or without weights; it stays as it is, and takes no memory twice.
        splits: ranks that share a copy in generation.
        rollout: what is asked of generation (`RolloutOptions.asked`), if it generates.

    Raises:
        ConfigError: its modules cannot be shared so, or cannot generate so.
    """
    if layout.is_plain and splits == 1 and "batch_invariant" not in rollout:
        return
    from verl.training.parallel.expert import fused_experts
    from verl.training.parallel.pipeline import StageSplit
    from verl.training.parallel.tensor import cut_backbone

    try:
        tried = EngineOptions(fused_kernels=False, remove_padding=getattr(options, "remove_padding", True))
        forward = Forward(
            empty_copy(model, "meta"), "value" if isinstance(model, ValueModel) else "lm", None, tried, "cpu"
        )
    except ModelError:  # ranks find out: there is no small model that computes as this one does
        return
    check(options.asked() | layout.asked(options.back_end) | forward.asked())
    if "embedded" in rollout and not forward.packed.supports_paged:
        check({name: name for name in rollout} | {"no paged forward": type(forward.packed.model).__name__})
    if options.back_end == "megatron":
        return
    if layout.pp > 1:
        StageSplit(forward.model, forward.packed, layout.pp, trains=options.trains)
    if layout.ep > 1:
        fused_experts(forward, layout.ep)
    if layout.shard > 1 and options.back_end == "fsdp":
        units(forward.packed, options.fsdp_config)
    for size in {layout.tp, splits} - {1}:
        cut_backbone(forward.packed, size)

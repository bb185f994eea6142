"""The training engine on DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054). DeepSpeed shards and steps the
weights; rows, losses and metrics are handled as in every engine.

DeepSpeed flattens the weights and splits the flat tensors evenly over ranks: fp32 masters and moments (stage 1),
gradient sums (2) and the weights themselves (3). So a rank holds a contiguous run of a weight's elements.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl._host.device import variable
from verl.algorithms.loss_terms import Loss, LossNeeds, LossTerm
from verl.errors import ConfigError, TrainingError
from verl.models.packed import head_of
from verl.training.engine import IDLE, NO_GRADIENT, Metrics, MicroBatch, Schedule, TrainEngine, WeightSource, no_loss
from verl.training.forward import Forward
from verl.training.optimizer import MOMENTS, adamw_options, check_masters, check_optimizer, fill_state, lr_factor
from verl.training.options import FSDPConfig, OptimConfig
from verl.training.parallel.data import units
from verl.training.ranks import LocalWeights, Parallel, Ranks, WholeModel
from verl.weights.shard import Blocks, Shape, Shard, ShardedDim, Stream, run_blocks
from verl.weights.shards import fill_blocks, give_memory, load_model_shards


class DeepSpeedEngine(TrainEngine):
    """A `TrainEngine` of several ranks that trains, by ZeRO of the stage in `options.deepspeed_config`. The layout is
    replicas, in stage 3 shards.

    Weights that no micro-batch of a step used are stepped with a gradient of zero, weight decay included.

    Raises:
        ConfigError: DeepSpeed is not installed, or the model or the options need another engine.
    """

    optimizer: ZeroAdamW

    def assemble(self, source: WeightSource | None) -> None:
        forward, options, whole = self.forward, self.options, WholeModel(self.model)
        if source is not None:  # whole: DeepSpeed cuts what is there
            give_memory(forward, forward.packed.device)
            load_model_shards(self.model, source(self.model))
        stage = options.deepspeed_config.zero_stage
        if stage == 3:
            forward.packed.fused = None
        self._zero, self.optimizer = zero_engine(forward, stage, options.optim or OptimConfig(), self.ranks)
        self.parallel = Parallel(self.mesh, schedule=_ZeroSchedule(forward, self._zero), lockstep=True)
        self.weights = ZeroWeights(self.model, whole, {}, self.ranks)

    def update(self, parts: Sequence[LossTerm]) -> Metrics:
        adam, losses = self.optimizer, list[Loss]()
        if self.skips_all(parts):  # DeepSpeed has no other way to a gradient of zeros
            idle = MicroBatch(IDLE, None, self.forward.wanted(LossNeeds()), 1.0, no_loss)
            [*self.schedule.forward_backward(iter([idle]), 1.0)]
        else:  # DeepSpeed takes the mean over ranks, of what adds up
            losses = self.backward(parts, self.mesh.size)
        (metrics, depends), before = self.metrics(losses), adam.completed_steps
        adam.may_step, adam.grad_norm = depends and math.isfinite(metrics["loss"]), math.nan
        adam.lr = adam.config.lr * lr_factor(adam.config, before)
        self._zero.step()
        if not depends:
            raise TrainingError(NO_GRADIENT)
        skipped = float(adam.completed_steps == before)
        return {**metrics, "grad_norm": adam.grad_norm, "lr": adam.lr, "update/skipped": skipped}

    def state(self) -> tuple[Iterable[Shard], dict[str, Any]]:
        meta = {"completed_steps": self.optimizer.completed_steps, "values": {}, "optimizer": "AdamW"}
        return Stream(self.optimizer.shards), meta

    @torch.no_grad()
    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        self.optimizer.load_state(shards, meta, {n: torch.Size(spec.shape) for n, spec in self.weights.specs.items()})


class ZeroWeights(LocalWeights):
    """The weights that DeepSpeed has flattened: whole, or in stage 3 a run of each one's elements."""

    keeps_memory = True  # it is shared with what DeepSpeed has flattened

    def sharded_dims(self, weight: Tensor) -> Sequence[ShardedDim]:
        return (ShardedDim("shard", None),) if hasattr(weight, "ds_tensor") else ()

    def blocks(self, weight: Tensor) -> Blocks:
        return run_blocks(tuple(getattr(weight, "ds_shape", weight.shape)), *held_run(weight))


class _ZeroSchedule(Schedule):
    """One micro-batch after the other. DeepSpeed reduces the gradients of each, in the first stage of the last."""

    def forward_backward(self, micro_batches: Iterable[MicroBatch], loss_scale: float) -> Iterator[Loss]:
        for one, following in pairwise(chain[Any](micro_batches, [None])):
            self.wrapped.set_gradient_accumulation_boundary(following is None)
            (loss,) = self.forward([one])
            self.wrapped.backward(loss.total * loss_scale)
            yield loss.detached()


@dataclass(frozen=True)
class MasterSlice:
    """The elements of a trained weight whose master and moments this rank keeps.

    Attributes:
        start: where they begin in the flattened weight.
        flat: the master of all pieces of this rank, an optimizer's parameter.
        flat_start: where this piece begins there.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    start: int
    size: int
    flat: Tensor
    flat_start: int

    def of(self, flat: Tensor) -> Tensor:
        """The piece of a tensor that is laid out like `flat`."""
        return flat[self.flat_start : self.flat_start + self.size]


class ZeroAdamW(torch.optim.AdamW):
    """AdamW on this rank's pieces, called by DeepSpeed's step. It takes the norm over all ranks, clips, sets the
    learning rate and decides whether to step at all, as every other engine does.

    Attributes:
        completed_steps: optimizer steps so far.
        may_step: whether the loss was finite. The caller sets it before each step, and `lr`.
        grad_norm: of the last step's gradient, before clipping; NaN where DeepSpeed itself found it not to be finite.
    """

    def __init__(self, forward: Forward, config: OptimConfig, ranks: Ranks) -> None:
        trained = [weight for weight in forward.parameters() if weight.requires_grad]
        super().__init__(trained, **adamw_options(config), fused=True)
        self._model, self.config, self._ranks = forward.model, config, ranks
        self.slices: list[MasterSlice] = []
        self._flats: list[Tensor] = []
        self.completed_steps, self.may_step, self.grad_norm, self.lr = 0, True, math.nan, config.lr

    def begin(self, slices: list[MasterSlice], flats: list[Tensor]) -> None:
        """Take over the pieces that DeepSpeed has made: until then its calls of `step` do nothing."""
        self.slices, self._flats = slices, flats
        for flat in flats:
            step = torch.zeros((), dtype=torch.float32, device=flat.device)
            self.state[flat] = {"step": step, **{name: torch.zeros_like(flat) for name in MOMENTS}}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._flats:
            return
        squares = [
            torch.linalg.vector_norm(part.of(part.flat.grad), dtype=torch.float64).square().cpu()
            for part in self.slices
            if part.flat.grad is not None
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        self._ranks.all_reduce([total], dist.ReduceOp.SUM, ["replicate", "shard"])
        self.grad_norm = float(total.sqrt())
        if not (self.may_step and math.isfinite(self.grad_norm)):
            return
        limit = self.config.max_grad_norm
        if limit is not None and self.grad_norm + 1e-6 > limit:
            for flat in self._flats:
                if flat.grad is not None:
                    flat.grad.mul_(limit / (self.grad_norm + 1e-6))
        for group in self.param_groups:
            group["lr"] = self.lr
        super().step()
        self.completed_steps += 1

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Reset the masters to the live weights, which were replaced from outside."""
        live = dict(self._model.named_parameters())
        for part in self.slices:
            start, run = held_run(live[part.name])
            part.of(part.flat.detach()).copy_(run[part.start - start :][: part.size])

    def shards(self) -> Iterator[Shard]:
        """This rank's shards of the state."""
        for part in self.slices:
            yield Shard.whole(f"{part.name}.step", self.state[part.flat]["step"])
            for key, tensor in self._state_of(part):
                for offset, block in run_blocks(part.shape, part.start, part.of(tensor)):
                    yield Shard(f"{part.name}.{key}", part.shape, offset, block)

    def _state_of(self, part: MasterSlice) -> Iterator[tuple[str, Tensor]]:
        """Tensors laid out like the masters that a continuation needs, by the last part of their names."""
        yield from ((key, self.state[part.flat][key]) for key in MOMENTS)
        if part.dtype in (torch.bfloat16, torch.float16):
            yield "master", part.flat.detach()

    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        """See `TrainEngine.load_state`; `shapes` of all weights."""
        check_optimizer("AdamW", meta)
        targets = {f"{p.name}.{key}": (p, tensor) for p in self.slices for key, tensor in self._state_of(p)}
        sizes = {part.name: part.size for part in self.slices}

        def fill(name: str, key: str, shard: Shard) -> int:
            if shard.name not in targets:  # steps, and masters of weights in full precision
                return sizes.get(name, 0)
            part, tensor = targets[shard.name]
            return fill_blocks(run_blocks(part.shape, part.start, part.of(tensor)), shard)

        names = fill_state(shards, {name: (shape, sizes.get(name, 0)) for name, shape in shapes.items()}, fill)
        check_masters({part.name: torch.empty(0, dtype=part.dtype) for part in self.slices}, names)
        for part, tensor in (targets[name] for name in targets.keys() - names):  # of a weight without gradient so far
            part.of(tensor).zero_()
        self.completed_steps = int(meta["completed_steps"])
        for part in self.slices:
            self.state[part.flat]["step"].fill_(self.completed_steps)


def zero_engine(forward: Forward, stage: int, config: OptimConfig, ranks: Ranks) -> tuple[Any, ZeroAdamW]:
    """DeepSpeed's engine around `forward`, and its optimizer. The weights become views of DeepSpeed's flat tensors; in
    stage 3 they are empty outside of forward and backward passes.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    device = forward.packed.device
    deepspeed = _deepspeed(device)
    adam = ZeroAdamW(forward, config, ranks)
    if stage == 3:
        layers = [*{type(layer) for layer in units(forward.packed, FSDPConfig())}]
        deepspeed.utils.set_z3_leaf_modules(forward, layers)  # a layer's weights are gathered at once
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": 1 << 24,  # elements of gradients
            "sub_group_size": 1 << 62,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        },
        "bf16": {"enabled": forward.packed.dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": 0.0,
    }
    with variable("LOCAL_RANK", os.environ.get("LOCAL_RANK", str(device.index or 0))):
        engine, *_ = deepspeed.initialize(
            args=Namespace(device_rank=device.index or 0),
            model=forward,
            optimizer=adam,
            config=settings,
            mpu=_data_parallel(ranks.group("replicate", "shard")),
        )
    if stage == 3 and forward.head == "lm":  # the head's weight is read outside of its module
        for weight in head_of(forward.packed.model):
            if weight is not None:
                deepspeed.zero.register_external_parameter(forward, weight)
    flats = [weight for group in adam.param_groups for weight in group["params"]]
    flats = flats or [*engine.optimizer.fp32_partitioned_groups_flat]  # stage 3 shows them while it steps only
    adam.begin([*_master_slices(forward.model, deepspeed, flats)], flats)
    return engine, adam


def _deepspeed(device: torch.device) -> Any:
    """The package, silent on standard output and without code that it would compile at the start."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError("strategy 'deepspeed' needs DeepSpeed: pip install 'verl-hybrid[deepspeed]'") from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # shared memory, for inference alone
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, "torch.distributed.c10d_logger")  # its calls
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return deepspeed


def _data_parallel(group: Any) -> Namespace:
    """The `mpu` by which DeepSpeed uses the ranks that share a model instead of all ranks of the job."""
    return Namespace(
        get_data_parallel_group=lambda: group,
        get_data_parallel_world_size=lambda: dist.get_world_size(group),
        get_data_parallel_rank=lambda: dist.get_rank(group),
        get_model_parallel_group=lambda: None,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_rank=lambda: 0,
    )


def held_run(weight: Any) -> tuple[int, Tensor]:
    """The run of a weight's elements that this rank holds: where it begins, and the live elements."""
    if not hasattr(weight, "ds_tensor"):
        return 0, weight.detach().view(-1)
    start = weight.ds_tensor.ds_numel * dist.get_rank(weight.ds_process_group)
    return start, weight.ds_tensor.detach()[: max(0, weight.ds_numel - start)]  # padded at its end


def _master_slices(model: nn.Module, deepspeed: Any, flats: list[Tensor]) -> Iterator[MasterSlice]:
    for name, weight in model.named_parameters():
        cut: Any = weight
        if not weight.requires_grad:
            continue
        if hasattr(cut, "ds_tensor"):
            master, shape = deepspeed.utils.safe_get_local_fp32_param(cut), tuple(cut.ds_shape)
            start, run = held_run(cut)
            size = len(run)
        elif cut._hp_mapping is not None:
            address, shape = cut._hp_mapping.lp_fragment_address, tuple(cut.shape)
            master, start, size = cut._hp_mapping.get_hp_fragment(), address.start, address.numel
        else:
            continue
        (flat,) = (f for f in flats if f.untyped_storage().data_ptr() == master.untyped_storage().data_ptr())
        if size:
            flat_start = master.storage_offset() - flat.storage_offset()
            yield MasterSlice(name, shape, weight.dtype, start, size, flat, flat_start)

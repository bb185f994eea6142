"""ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054) by DeepSpeed: its engine around a model, and the optimizer it calls.

DeepSpeed flattens the weights and cuts what it flattened into equal pieces, one a rank: fp32 masters and moments (stage
1), sums of gradients (2) and the weights themselves (3). A piece of a weight is therefore a run of its elements.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl._host.device import variable
from verl.errors import ConfigError
from verl.training.forward import Forward
from verl.training.optimizer import MOMENTS, adamw_options, lr_factor
from verl.training.options import FSDPConfig, OptimConfig
from verl.training.parallel.data import units
from verl.training.ranks import Ranks
from verl.weights.shard import run_blocks

#: Elements of gradients that are reduced at once.
_BUCKET = 1 << 24


@dataclass(frozen=True)
class MasterRange:
    """The elements of a trained weight whose master and moments this rank keeps.

    Attributes:
        start: where they begin in the flattened weight.
        flat: the master of all pieces of this rank, an optimizer's parameter.
        flat_start: where this piece begins there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    size: int
    flat: Tensor
    flat_start: int

    def of(self, flat: Tensor) -> Tensor:
        """The piece of a tensor that is laid out like `flat`."""
        return flat[self.flat_start : self.flat_start + self.size]

    def blocks(self, flat: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        return run_blocks(self.shape, self.start, self.of(flat))


class ZeroAdamW(torch.optim.AdamW):
    """AdamW on this rank's pieces, as DeepSpeed calls it in its step. It decides on the norm over all ranks, clipping,
    the learning rate, and whether to step at all, so that steps are those of every other engine.

    Attributes:
        completed_steps: optimizer steps so far.
        may_step: whether the loss was finite. The caller sets it before each step.
        grad_norm: of the last step's gradient, before clipping; NaN where DeepSpeed itself found it not to be finite.
    """

    def __init__(self, forward: Forward, config: OptimConfig, ranks: Ranks) -> None:
        trained = [weight for weight in forward.parameters() if weight.requires_grad]
        super().__init__(trained, **adamw_options(config), fused=True)
        self._model, self._config, self._ranks = forward.model, config, ranks
        self.ranges: list[MasterRange] = []
        self._flats: list[Tensor] = []
        self.completed_steps, self.may_step, self.grad_norm = 0, True, math.nan

    def begin(self, ranges: list[MasterRange], flats: list[Tensor]) -> None:
        """Take over the pieces that DeepSpeed has made: until then its calls of `step` do nothing."""
        self.ranges, self._flats = ranges, flats
        for flat in flats:
            step = torch.zeros((), dtype=torch.float32, device=flat.device)
            self.state[flat] = {"step": step, **{name: torch.zeros_like(flat) for name in MOMENTS}}

    @property
    def next_lr(self) -> float:
        return self._config.lr * lr_factor(self._config, self.completed_steps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._flats:
            return
        self.grad_norm = self._norm()
        if not (self.may_step and math.isfinite(self.grad_norm)):
            return
        limit = self._config.max_grad_norm
        if limit is not None and self.grad_norm + 1e-6 > limit:
            for flat in self._flats:
                if flat.grad is not None:
                    flat.grad.mul_(limit / (self.grad_norm + 1e-6))
        for group in self.param_groups:
            group["lr"] = self.next_lr
        super().step()
        self.completed_steps += 1

    def _norm(self) -> float:
        """The norm of the gradient over the shards of all ranks."""
        squares = [
            torch.linalg.vector_norm(part.of(part.flat.grad), dtype=torch.float64).square().cpu()
            for part in self.ranges
            if part.flat.grad is not None
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        self._ranks.all_reduce([total], dist.ReduceOp.SUM, "replicate", "shard")
        return float(total.sqrt())

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Masters anew from the live weights, after these have been replaced from outside."""
        live = {name: flat_part(weight) for name, weight in self._model.named_parameters()}
        for part in self.ranges:
            weight = live[part.name]
            whole = weight.numel() == math.prod(part.shape)
            part.of(part.flat.detach()).copy_(weight[part.start :][: part.size] if whole else weight[: part.size])


def zero_engine(forward: Forward, stage: int, config: OptimConfig, ranks: Ranks) -> tuple[Any, ZeroAdamW]:
    """DeepSpeed's engine around `forward`, and the optimizer in it. From then on the weights are views of what it has
    flattened; in stage 3 they have no elements outside of a forward or backward pass.

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
            "reduce_bucket_size": _BUCKET,
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
        for weight in forward.packed.head():
            if weight is not None:
                deepspeed.zero.register_external_parameter(forward, weight)
    flats = [weight for group in adam.param_groups for weight in group["params"]]
    flats = flats or [*engine.optimizer.fp32_partitioned_groups_flat]  # stage 3 shows them while it steps only
    adam.begin([*_master_ranges(forward.model, deepspeed, flats)], flats)
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
    """What DeepSpeed asks for the ranks that share a model, in the place of all ranks of the job."""
    return Namespace(
        get_data_parallel_group=lambda: group,
        get_data_parallel_world_size=lambda: dist.get_world_size(group),
        get_data_parallel_rank=lambda: dist.get_rank(group),
        get_model_parallel_group=lambda: None,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_rank=lambda: 0,
    )


def flat_part(weight: Any) -> Tensor:
    """The live elements of a weight that this rank holds, in one dimension."""
    if not hasattr(weight, "ds_tensor"):
        return weight.detach().reshape(-1)  # type: ignore[no-any-return]
    return weight.ds_tensor.detach()[: held_run(weight)[1]]  # type: ignore[no-any-return]


def held_run(weight: Any) -> tuple[int, int]:
    """Where the run of a cut weight begins that this rank holds (`ds_tensor`, padded at its end), and its size."""
    start = weight.ds_tensor.ds_numel * dist.get_rank(weight.ds_process_group)
    return start, max(0, min(weight.ds_tensor.ds_numel, weight.ds_numel - start))


def _master_ranges(model: nn.Module, deepspeed: Any, flats: list[Tensor]) -> Iterator[MasterRange]:
    for name, weight in model.named_parameters():
        cut: Any = weight
        if not weight.requires_grad:
            continue
        if hasattr(cut, "ds_tensor"):
            master, shape = deepspeed.utils.safe_get_local_fp32_param(cut), tuple(cut.ds_shape)
            start, size = held_run(cut)
        elif cut._hp_mapping is not None:
            address, shape = cut._hp_mapping.lp_fragment_address, tuple(cut.shape)
            master, start, size = cut._hp_mapping.get_hp_fragment(), address.start, address.numel
        else:
            continue
        (flat,) = (f for f in flats if f.untyped_storage().data_ptr() == master.untyped_storage().data_ptr())
        if size:
            flat_start = master.storage_offset() - flat.storage_offset()
            yield MasterRange(name, shape, weight.dtype, start, size, flat, flat_start)

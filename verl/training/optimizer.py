"""Optimizer steps under low-precision live weights: fp32 masters, fp32 gradient sums, clipping, a schedule.

`SplitAdamW` steps bf16 weights; a torch optimizer the masters of all others, and of every weight if it is a caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.errors import CheckpointError, ConfigError
from verl.training.adamw import SplitAdamW, decay_of
from verl.training.gradients import Gradients, Weight
from verl.training.options import OptimConfig
from verl.weights.shard import Shard, blocks_of
from verl.weights.shards import fill_blocks, no_forks

#: A torch optimizer over a model's parameters, or a function that makes one of a list of parameters.
OwnOptimizer: TypeAlias = Optimizer | Callable[[list[Tensor]], Optimizer]

MOMENTS = ("exp_avg", "exp_avg_sq")
#: What of the state of AdamW has the shape of the weight.
LIKE_THE_WEIGHT = ("master", *MOMENTS)


class MixedPrecisionOptimizer:
    """AdamW, or a caller's own torch optimizer, on the masters of a model's weights.

    Gradients arrive by backward passes alone; `step` or `clear` ends their accumulation. A weight that got no
    gradient since then is left as it is, weight decay included, as in torch.

    An fp32 or fp64 weight is its own master. A caller's optimizer is changed in place: its groups and states refer to
    the masters afterwards. Its learning rate is not touched.

    Args:
        weights: the model's parameters by name, tied ones once; frozen ones are ignored.
        config: AdamW, its schedule, and clipping.
        optimizer: takes the place of AdamW and its schedule (clipping stays). It holds some of `weights`; the
            others, and frozen ones, are not trained. Or a function that makes one of the list of pieces.
        pieces: the part of each weight that this rank steps; None: all of it.
        is_scaled: gradients are computed in fp16, whatever the pieces are in.
        scheduler: torch's, of the caller's optimizer, or a function that makes it of the optimizer.

    Raises:
        ConfigError: nothing to train, a dtype that cannot be trained, or the torch optimizer holds a tensor
            that is not of this model.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        config: OptimConfig,
        optimizer: OwnOptimizer | None = None,
        pieces: Mapping[str, nn.Parameter] | None = None,
        *,
        is_scaled: bool = False,
        scheduler: Any = None,
    ) -> None:
        watched = trained = {name: live for name, live in weights.items() if live.requires_grad}
        if isinstance(optimizer, Optimizer):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if foreign := held - {id(live) for live in weights.values()}:
                raise ConfigError(
                    f"the optimizer holds {len(foreign)} tensors that are no parameters of this model: "
                    "make it from model.parameters() of the model that is trained"
                )
            trained = {name: live for name, live in trained.items() if id(live) in held}
        if not trained:
            raise ConfigError("no weight of the model requires a gradient: there is nothing to train")
        self.config, self.name, self.completed_steps = config, optimizer_name(optimizer), 0
        self.gradients = Gradients(
            [Weight(name, (pieces or trained)[name], source) for name, source in trained.items()],
            watched.values(),
            is_scaled=is_scaled,
        )
        split = [w for w in self.gradients.weights if optimizer is None and w.live.dtype == torch.bfloat16]
        if config.moments == "bfloat16" and not split:
            raise ConfigError("optim.moments=bfloat16 is of weights in bfloat16, and here is none: leave it out")
        self._split = SplitAdamW(split, config)
        self._masters = {weight: _master(weight.live) for weight in self.gradients.weights if weight not in split}
        self._is_own = optimizer is not None
        #: torch's, of the masters.
        self._optimizer: Any = optimizer
        if optimizer is None:
            self._optimizer = _adamw(self._masters, config) if self._masters else None
        elif not isinstance(optimizer, Optimizer):
            self._optimizer = optimizer([*self._masters.values()])
        else:
            _take_over(optimizer, {weight.live: master for weight, master in self._masters.items()})
        self._scheduler = scheduler if scheduler is None or hasattr(scheduler, "step") else scheduler(self._optimizer)
        no_forks[self] = lambda masters: (value for *_, value in masters._of_masters() if isinstance(value, Tensor))

    @property
    def lr(self) -> float:
        """Learning rate of the next step (a caller's optimizer: of its first parameter group)."""
        if self._is_own:
            return float(self._optimizer.param_groups[0]["lr"])
        return self.config.lr * lr_factor(self.config, self.completed_steps)

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """One optimizer step from the accumulated gradient, whose norm `grad_norm` is finite; clips first."""
        limit, lr = self.config.max_grad_norm, self.lr
        scale = limit / (grad_norm + 1e-6) if limit is not None and grad_norm + 1e-6 > limit else 1.0
        self._split.step(lr, scale)
        for group in self._optimizer.param_groups if self._masters and not self._is_own else ():
            group["lr"] = lr
        for weight, master in self._masters.items():
            master.grad = weight.gradient if weight.has_gradient else None
            if master.grad is not None and scale != 1.0:
                master.grad.mul_(scale)
        if self._masters:
            self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        for weight, master in self._masters.items():
            if master is not weight.live and master.grad is not None:
                weight.live.copy_(master)
            master.grad = None
        self.completed_steps += 1
        self.gradients.accepted()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Reset the masters to the live weights, which were replaced from outside."""
        self._split.refresh()
        for weight, master in self._masters.items():
            if master is not weight.live:
                master.copy_(weight.live)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors for a bit-equal continuation, besides the live weights and `meta`: "<weight>.<state>"
        ("exp_avg", "exp_avg_sq", "step", ...) and "<weight>.master" (fp32, of weights in less). Some are the live
        state, not copies: write them before the next step."""
        for weight, name, value in chain(self._split.state(), self._of_masters()):
            if isinstance(value, Tensor):
                yield f"{weight}.{name}", value
            del value  # a master that was made for the caller, before the next one is

    def meta(self) -> dict[str, Any]:
        """The rest of that state, for JSON: values by weight; for a caller's optimizer also its settings (AdamW's come
        from the configuration) and its schedule's state, as far as JSON can hold it."""
        values: dict[str, dict[str, Any]] = {}
        for weight, name, value in self._of_masters():
            if not isinstance(value, Tensor):
                values.setdefault(weight, {})[name] = value
        meta = {"completed_steps": self.completed_steps, "optimizer": self.name, "values": values}
        meta |= self.gradients.state()
        if self._is_own:
            meta["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        if self._scheduler is not None:
            kinds = (int, float, str, list, dict, type(None))
            meta["schedule"] = {k: v for k, v in self._scheduler.state_dict().items() if isinstance(v, kinds)}
        return meta

    @torch.no_grad()
    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        """Copy in what `tensors` and `meta` gave, however it is cut, each shard as it comes. Live weights become the
        masters, rounded.

        Raises:
            CheckpointError: it is of another kind of optimizer; a weight is unknown, has another shape, or lacks its
                master; a tensor did not come whole.
        """
        check_optimizer(self.name, meta)
        weights = {weight.name: weight for weight in self.gradients.weights}
        coming: dict[Weight, dict[str, Any]] = {weight: {} for weight in self._masters}
        self._split.begin_load()

        def fill(name: str, key: str, shard: Shard) -> int:
            weight = weights[name]
            if weight not in coming:
                return self._split.fill(weight, key, shard)
            return self._fill(coming[weight], weight, key, shard)

        sizes = {name: (weight.source.shape, weight.live.numel()) for name, weight in weights.items()}
        came = fill_state(shards, sizes, fill)
        check_masters({name: weight.live for name, weight in weights.items()}, came)
        if self._masters:
            self._end_load(coming, meta)
        self.completed_steps = int(meta["completed_steps"])
        self.gradients.load(meta)

    def move(self, to_host: bool) -> None:
        """Masters and moments to host memory, or back to where the weights are; live weights stay."""
        self._split.move(to_host)
        for weight, master in self._masters.items():
            device = torch.device("cpu") if to_host else weight.live.device
            if master is not weight.live:
                master.data = master.data.to(device)
            state = self._optimizer.state.get(master, {})
            for key, value in state.items():
                # AdamW's step counter lives where the kernel wants it, not where the weight is.
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(device)

    def _of_masters(self) -> Iterator[tuple[str, str, Any]]:
        """(weight, name, value) of all there is to save of the masters; tensors are references to the live state."""
        for weight, master in self._masters.items():
            if master is not weight.live:
                yield weight.name, "master", master.detach()
            for name, value in self._optimizer.state.get(master, {}).items():
                if value is not None:
                    yield weight.name, name, value

    def _fill(self, coming: dict[str, Any], weight: Weight, key: str, shard: Shard) -> int:
        """Copy the elements of a shard that belong to this rank; returns how many. An fp32 weight takes over the saved
        master of a bf16 one: kept apart, it would be saved again and be stale."""
        master = self._masters[weight]
        if key == "step" or shard.global_shape != weight.source.shape:  # one value for the whole weight
            coming[key] = shard.tensor.clone()
            return weight.live.numel()
        if key != "master" and key not in coming:
            # As torch's `load_state_dict` wants it, which would copy it otherwise.
            dtype = master.dtype if shard.tensor.is_floating_point() else shard.tensor.dtype
            before = self._optimizer.state.get(master, {}).get(key)
            fits = isinstance(before, Tensor) and (before.shape, before.dtype) == (master.shape, dtype)
            coming[key] = before if fits else torch.empty_like(master, dtype=dtype, requires_grad=False)
        return fill_blocks(blocks_of(weight.source, master if key == "master" else coming[key]), shard)

    def _end_load(self, coming: Mapping[Weight, dict[str, Any]], meta: Mapping[str, Any]) -> None:
        """Go on with the states that have come, and with what `meta` gave; live weights become the masters, rounded
        where they have less."""
        param_groups = self._optimizer.state_dict()["param_groups"]
        for group, before in zip(param_groups, meta.get("groups", ()), strict=False):
            group.update(before)
        index = {id(p): i for i, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])}
        numbered = {}
        for weight, master in self._masters.items():
            if master is not weight.live:
                weight.live.copy_(master)
            if values := coming[weight] | meta.get("values", {}).get(weight.name, {}):
                numbered[index[id(master)]] = values
        self._optimizer.load_state_dict({"state": numbered, "param_groups": param_groups})
        if self._scheduler is not None and meta.get("schedule"):
            self._scheduler.load_state_dict(dict(meta["schedule"]))


@torch.no_grad()
def _take_over(optimizer: Optimizer, masters: Mapping[nn.Parameter, Tensor]) -> None:
    """Have a caller's optimizer step the masters of live weights, and of these only."""
    for group in optimizer.param_groups:
        group["params"] = [masters[p] for p in group["params"] if p in masters]  # without frozen ones
    for live, master in masters.items():
        if master is not live and live in optimizer.state:
            optimizer.state[master] = {
                key: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
                for key, value in optimizer.state.pop(live).items()
            }


def _master(live: nn.Parameter) -> Tensor:
    if live.dtype in (torch.float32, torch.float64):
        return live
    if live.dtype in (torch.bfloat16, torch.float16):
        return live.detach().to(torch.float32, copy=True)
    raise ConfigError(f"weights of dtype {live.dtype} cannot be trained: load the model in bf16 or fp32")


def _adamw(masters: Mapping[Weight, Tensor], config: OptimConfig) -> Optimizer:
    decays: dict[float, list[Tensor]] = {}
    for weight, master in masters.items():
        decays.setdefault(decay_of(weight, config), []).append(master)
    groups = [{"params": params, "weight_decay": decay} for decay, params in decays.items()]
    try:
        return torch.optim.AdamW(groups, fused=True, **adamw_options(config))
    except RuntimeError:  # no fused kernel for this device
        return torch.optim.AdamW(groups, foreach=True, **adamw_options(config))


def adamw_options(config: OptimConfig) -> dict[str, Any]:
    """The settings under torch's names."""
    return {"lr": config.lr, "betas": config.betas, "eps": config.adam_eps, "weight_decay": config.weight_decay}


def lr_factor(config: OptimConfig, step: int) -> float:
    """The factor of `lr` in optimizer step `step`, counted from 0.

    Raises:
        ConfigError: the schedule decays and `total_steps` is not known, or the warm-up is a share of them.
    """
    if config.warmup_ratio:
        raise ConfigError("optim.warmup_ratio is of a run's steps, which `verl train` knows: set optim.warmup_steps")
    if callable(config.schedule):
        return float(config.schedule(step))
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    if config.total_steps is None:
        raise ConfigError(f"optim.schedule={config.schedule} decays to zero: set optim.total_steps")
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def fill_state(
    shards: Iterable[Shard], weights: Mapping[str, tuple[torch.Size, int]], fill: Callable[[str, str, Shard], int]
) -> set[str]:
    """Copy an optimizer's state in, each shard as it comes, and return the names of the tensors that came.

    Args:
        shards: of tensors "<weight>.<state>".
        weights: by name, the shape and how many elements of it this rank steps.
        fill: called with weight, state and shard, copies what of the shard belongs here, and returns how many elements
            that are.

    Raises:
        CheckpointError: a weight is unknown or has another shape, or a tensor did not come whole.
    """
    missing: dict[str, int] = {}
    for shard in shards:
        name, _, key = shard.name.rpartition(".")
        if name not in weights:
            raise CheckpointError(f"the optimizer state '{shard.name}' belongs to no trained weight of this model")
        shape, size = weights[name]
        if key in LIKE_THE_WEIGHT and shard.global_shape != shape:
            raise CheckpointError(
                f"the optimizer state '{shard.name}' has shape {list(shard.global_shape)}, the weight has "
                f"{list(shape)}: it is of another model"
            )
        missing[shard.name] = missing.get(shard.name, size) - fill(name, key, shard)
    if lacking := [name for name, count in missing.items() if count > 0]:
        raise CheckpointError(f"the optimizer state '{lacking[0]}' did not come whole: the checkpoint is cut short")
    return {*missing}


def optimizer_name(optimizer: OwnOptimizer | None) -> str:
    """The name of a caller's optimizer class, or of the function that makes it; "AdamW" without one."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return "AdamW" if optimizer is None else type(optimizer).__name__
    return str(getattr(getattr(optimizer, "func", optimizer), "__name__", type(optimizer).__name__))


def check_optimizer(name: str, meta: Mapping[str, Any]) -> None:
    """Refuse a state that an optimizer of another kind has saved: what it knows of a weight means nothing to this one.

    Raises:
        CheckpointError: it is one.
    """
    if meta["optimizer"] != name:
        raise CheckpointError(
            f"the optimizer's state was saved by {meta['optimizer']}, and {name} trains here: give the optimizer of "
            "then, or begin from the weights alone (`verl export`)"
        )


def check_masters(weights: Mapping[str, Tensor], names: Container[str]) -> None:
    """Refuse a state of weights in another dtype: a weight in 16 bits goes on from the master that was saved with it.

    Args:
        weights: those that are trained, by name.
        names: of the tensors that were saved, "<weight>.<state>".

    Raises:
        CheckpointError: the master of such a weight is not among them.
    """
    for name, live in weights.items():
        if live.dtype in (torch.bfloat16, torch.float16) and f"{name}.master" not in names:
            raise CheckpointError(
                f"the optimizer's state lacks '{name}.master': it is of weights in another dtype than the "
                f"{str(live.dtype).removeprefix('torch.')} here: give the dtype of then, or begin from the weights "
                "alone (`verl export`)"
            )

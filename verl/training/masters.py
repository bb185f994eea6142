"""A torch optimizer on fp32 masters of low-precision weights; an fp32 or fp64 weight is its own master."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.training.gradients import Weight
from verl.training.options import OptimConfig
from verl.weights.shard import Shard
from verl.weights.shards import Part

#: A torch optimizer over a model's parameters, or a function that makes one of a list of parameters.
OwnOptimizer: TypeAlias = torch.optim.Optimizer | Callable[[list[Tensor]], torch.optim.Optimizer]


class MasterOptimizer:
    """`optimizer`, or the one that it makes, or AdamW, over the masters of `weights`.

    A caller's optimizer is changed in place: its groups and states refer to the masters afterwards. Its learning rate
    is not touched.
    """

    def __init__(
        self,
        weights: list[Weight],
        config: OptimConfig,
        optimizer: OwnOptimizer | None = None,
        scheduler: Any = None,
    ) -> None:
        self.weights = weights
        self._masters = {weight: _master(weight.live) for weight in weights}
        self._has_own_lr = optimizer is None
        self._coming: dict[str, dict[str, Any]] = {}
        if optimizer is None:
            self._optimizer = _adamw([*self._masters.values()], config)
        elif not isinstance(optimizer, torch.optim.Optimizer):
            self._optimizer = optimizer([*self._masters.values()])
        else:
            self._optimizer = optimizer
            self._take_over()
        #: torch's schedule of a caller's optimizer.
        self._scheduler = scheduler if scheduler is None or hasattr(scheduler, "step") else scheduler(self._optimizer)

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def step(self, lr: float, gradient_scale: float) -> None:
        """One step with the gradient sums, multiplied by `gradient_scale`."""
        if self._has_own_lr:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
        for weight, master in self._masters.items():
            present = weight.has_gradient and weight.gradient is not None
            master.grad = weight.gradient if present else None
            if present and gradient_scale != 1.0:
                weight.gradient.mul_(gradient_scale)  # type: ignore[union-attr]
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        for weight, master in self._masters.items():
            if master is not weight.live and master.grad is not None:
                weight.live.copy_(master)
            master.grad = None

    def state(self) -> Iterator[tuple[str, str, Any]]:
        """(weight, name, value) of all there is to save; tensors are references to the live state."""
        for weight, master in self._masters.items():
            if master is not weight.live:
                yield weight.name, "master", master.detach()
            for name, value in self._optimizer.state.get(master, {}).items():
                if value is not None:
                    yield weight.name, name, value

    def schedule(self) -> dict[str, Any]:
        """What of a caller's schedule changes from step to step, as far as JSON can hold it."""
        kinds = (int, float, str, list, dict, type(None))
        state = {} if self._scheduler is None else self._scheduler.state_dict()
        return {name: value for name, value in state.items() if isinstance(value, kinds)}

    def load_schedule(self, saved: Mapping[str, Any]) -> None:
        """Restores `schedule`; nothing where there is none here."""
        if self._scheduler is not None and saved:
            self._scheduler.load_state_dict(dict(saved))

    def groups(self) -> list[dict[str, Any]]:
        """The settings of a caller's optimizer; AdamW's own come from the configuration."""
        if self._has_own_lr:
            return []
        return [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]

    def begin_load(self) -> None:
        """States come from now on; `end_load` gives them to the optimizer."""
        self._coming = {weight.name: {} for weight in self.weights}

    def fill(self, weight: Weight, name: str, shard: Shard) -> int:
        """Copy what a shard of a state has of this rank's part, and return how many elements that are. An fp32 weight
        takes the master of a bf16 one over: kept beside it, it would be saved again and be stale."""
        master, coming = self._masters[weight], self._coming[weight.name]
        if name != "master" and name not in coming:
            # As torch's `load_state_dict` wants it, which would copy it otherwise.
            dtype = master.dtype if shard.tensor.is_floating_point() else shard.tensor.dtype
            before = self._optimizer.state.get(master, {}).get(name)
            fits = isinstance(before, Tensor) and (before.shape, before.dtype) == (master.shape, dtype)
            coming[name] = before if fits else torch.empty_like(master, dtype=dtype, requires_grad=False)
        return Part(weight.source, master if name == "master" else coming[name]).fill(shard)

    def put(self, weight: Weight, name: str, value: Any) -> None:
        """Take over a state that is one value for the whole weight."""
        self._coming[weight.name][name] = value.clone() if isinstance(value, Tensor) else value

    @torch.no_grad()
    def end_load(self, groups: list[dict[str, Any]]) -> None:
        """Go on with the states that have come, and with what `groups` gave; live weights become the masters, rounded
        where they have less."""
        param_groups = self._optimizer.state_dict()["param_groups"]
        for group, before in zip(param_groups, groups, strict=False):
            group.update(before)
        index = {id(p): i for i, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])}
        for weight, master in self._masters.items():
            if master is not weight.live:
                weight.live.copy_(master)
        numbered = {index[id(m)]: values for w, m in self._masters.items() if (values := self._coming[w.name])}
        self._optimizer.load_state_dict({"state": numbered, "param_groups": param_groups})
        self._coming = {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Masters anew from the live weights, after these have been replaced from outside."""
        for weight, master in self._masters.items():
            if master is not weight.live:
                master.copy_(weight.live)

    def move(self, to_host: bool) -> None:
        """Masters and state to host memory, or back to where the weights are."""
        for weight, master in self._masters.items():
            device = torch.device("cpu") if to_host else weight.live.device
            if master is not weight.live:
                master.data = master.data.to(device)
            state = self._optimizer.state.get(master, {})
            for key, value in state.items():
                # AdamW's step counter lives where the kernel wants it, not where the weight is.
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(device)

    @torch.no_grad()
    def _take_over(self) -> None:
        masters = {weight.live: master for weight, master in self._masters.items()}
        for group in self._optimizer.param_groups:
            group["params"] = [masters[p] for p in group["params"] if p in masters]  # without frozen ones
        for live, master in masters.items():
            if master is not live and live in self._optimizer.state:
                state = self._optimizer.state.pop(live)
                self._optimizer.state[master] = {key: _widened(value) for key, value in state.items()}


def held(weights: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Those of a model's weights that the caller's optimizer holds.

    Raises:
        ConfigError: it holds a tensor that is none of them.
    """
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    foreign = ours - {id(live) for live in weights.values()}
    if foreign:
        raise ConfigError(
            f"the optimizer holds {len(foreign)} tensors that are no parameters of this model: "
            "make it from model.parameters() of the model that is trained"
        )
    return {name: live for name, live in weights.items() if id(live) in ours}


def _master(live: torch.nn.Parameter) -> Tensor:
    if live.dtype in (torch.float32, torch.float64):
        return live
    if live.dtype in (torch.bfloat16, torch.float16):
        return live.detach().to(torch.float32, copy=True)
    raise ConfigError(f"weights of dtype {live.dtype} cannot be trained: load the model in bf16 or fp32")


def _adamw(masters: list[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    try:
        return torch.optim.AdamW(masters, fused=True, **adamw_options(config))
    except RuntimeError:  # no fused kernel for this device
        return torch.optim.AdamW(masters, foreach=True, **adamw_options(config))


def adamw_options(config: OptimConfig) -> dict[str, Any]:
    """The settings under torch's names."""
    return {"lr": config.lr, "betas": config.betas, "eps": config.adam_eps, "weight_decay": config.weight_decay}


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

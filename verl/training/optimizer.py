"""Optimizer steps under low-precision live weights: fp32 masters, fp32 gradient sums, clipping, a schedule.

`SplitAdamW` steps bf16 weights; `MasterOptimizer` all others, and every weight under a caller's own optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from verl.errors import CheckpointError, ConfigError
from verl.training.adamw import SplitAdamW, decay_of
from verl.training.gradients import Gradients, Weight
from verl.training.options import OptimConfig
from verl.weights.forks import no_forks
from verl.weights.shard import Shard
from verl.weights.shards import LocalShard

#: A torch optimizer over a model's parameters, or a function that makes one of a list of parameters.
OwnOptimizer: TypeAlias = torch.optim.Optimizer | Callable[[list[Tensor]], torch.optim.Optimizer]

MOMENTS = ("exp_avg", "exp_avg_sq")
#: What of the state of AdamW has the shape of the weight.
LIKE_THE_WEIGHT = ("master", *MOMENTS)


class MixedPrecisionOptimizer:
    """AdamW, or a caller's own torch optimizer, on the masters of a model's weights.

    Gradients arrive by backward passes alone; `step` or `clear` ends their accumulation. A weight that got no
    gradient since then is left as it is, weight decay included, as in torch.

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
        weights: Mapping[str, torch.nn.Parameter],
        config: OptimConfig,
        optimizer: OwnOptimizer | None = None,
        pieces: Mapping[str, torch.nn.Parameter] | None = None,
        *,
        is_scaled: bool = False,
        scheduler: Any = None,
    ) -> None:
        watched = trained = {name: live for name, live in weights.items() if live.requires_grad}
        if isinstance(optimizer, torch.optim.Optimizer):
            trained = {name: live for name, live in held(weights, optimizer).items() if live.requires_grad}
        if not trained:
            raise ConfigError("no weight of the model requires a gradient: there is nothing to train")
        self.config = config
        self.completed_steps = 0
        self.gradients = Gradients(
            [Weight(name, (pieces or trained)[name], source) for name, source in trained.items()],
            watched.values(),
            is_scaled=is_scaled,
        )
        split = [w for w in self.gradients.weights if optimizer is None and w.live.dtype == torch.bfloat16]
        rest = [w for w in self.gradients.weights if w not in split]
        if config.moments == "bfloat16" and not split:
            raise ConfigError("optim.moments=bfloat16 is of weights in bfloat16, and here is none: leave it out")
        self._masters = MasterOptimizer(rest, config, optimizer, scheduler) if rest else None
        rules = (SplitAdamW(split, config) if split else None, self._masters)
        self._rules = [rule for rule in rules if rule is not None]
        self._has_own_lr = optimizer is None
        self.name = optimizer_name(optimizer)

    @property
    def lr(self) -> float:
        """Learning rate of the next step (a caller's optimizer: of its first parameter group)."""
        if self._masters is not None and not self._has_own_lr:
            return self._masters.lr
        return self.config.lr * lr_factor(self.config, self.completed_steps)

    def step(self, grad_norm: float) -> None:
        """One optimizer step from the accumulated gradient, whose norm `grad_norm` is finite; clips first."""
        limit = self.config.max_grad_norm
        scale = limit / (grad_norm + 1e-6) if limit is not None and grad_norm + 1e-6 > limit else 1.0
        for rule in self._rules:
            rule.step(self.lr, scale)
        self.completed_steps += 1
        self.gradients.accepted()

    def refresh_masters(self) -> None:
        """Reset the masters to the live weights, which were replaced from outside."""
        for rule in self._rules:
            rule.refresh()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors for a bit-equal continuation, besides the live weights and `meta`: "<weight>.<state>"
        ("exp_avg", "exp_avg_sq", "step", ...) and "<weight>.master" (fp32, of weights in less). Some are the live
        state, not copies: write them before the next step."""
        for rule in self._rules:
            for weight, name, value in rule.state():
                if isinstance(value, Tensor):
                    yield f"{weight}.{name}", value
                del value  # a master that was made for the caller, before the next one is

    def meta(self) -> dict[str, Any]:
        """The rest of that state, for JSON."""
        more = {"values": {}} if self._masters is None else self._masters.meta()
        return {"completed_steps": self.completed_steps, "optimizer": self.name, **self.gradients.state(), **more}

    @torch.no_grad()
    def load_state(self, shards: Iterable[Shard], meta: Mapping[str, Any]) -> None:
        """Copy in what `tensors` and `meta` gave, however it is cut, each shard as it comes. Live weights become the
        masters, rounded.

        Raises:
            CheckpointError: it is of another kind of optimizer; a weight is unknown, has another shape, or lacks its
                master; a tensor did not come whole.
        """
        check_optimizer(self.name, meta)
        for rule in self._rules:
            rule.begin_load()
        self._fill(shards)
        if self._masters is not None:
            self._masters.end_load(meta)
        self.completed_steps = int(meta["completed_steps"])
        self.gradients.load(meta)

    def move(self, to_host: bool) -> None:
        """Masters and moments to host memory, or back to where the weights are; live weights stay."""
        for rule in self._rules:
            rule.move(to_host)

    def _fill(self, shards: Iterable[Shard]) -> None:
        rules = {weight.name: (weight, rule) for rule in self._rules for weight in rule.weights}

        def fill(name: str, key: str, shard: Shard) -> int:
            weight, rule = rules[name]
            if key == "step" or shard.global_shape != weight.source.shape:
                rule.put(weight, key, shard.tensor)
                return weight.live.numel()
            return rule.fill(weight, key, shard)

        weights = {name: (weight.source.shape, weight.live.numel()) for name, (weight, _) in rules.items()}
        came = fill_state(shards, weights, fill)
        check_masters({name: weight.live for name, (weight, _) in rules.items()}, came)


class MasterOptimizer:
    """`optimizer`, or the one that it makes, or AdamW, over the masters of `weights`.

    An fp32 or fp64 weight is its own master. A caller's optimizer is changed in place: its groups and states refer to
    the masters afterwards. Its learning rate is not touched.
    """

    def __init__(
        self,
        weights: list[Weight],
        config: OptimConfig,
        optimizer: OwnOptimizer | None = None,
        scheduler: Any = None,
    ) -> None:
        self.weights = weights
        no_forks(self, lambda rule: (value for *_, value in rule.state()))
        self._masters = {weight: _master(weight.live) for weight in weights}
        self._has_own_lr = optimizer is None
        self._coming: dict[str, dict[str, Any]] = {}
        if optimizer is None:
            self._optimizer = _adamw(self._masters, config)
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

    def meta(self) -> dict[str, Any]:
        """The state that is not in tensors, for JSON: values by weight; for a caller's optimizer also its settings
        (AdamW's come from the configuration) and its schedule's state, as far as JSON can hold it."""
        values: dict[str, dict[str, Any]] = {}
        for weight, name, value in self.state():
            if not isinstance(value, Tensor):
                values.setdefault(weight, {})[name] = value
        meta: dict[str, Any] = {"values": values}
        if not self._has_own_lr:
            meta["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        if self._scheduler is not None:
            kinds = (int, float, str, list, dict, type(None))
            meta["schedule"] = {k: v for k, v in self._scheduler.state_dict().items() if isinstance(v, kinds)}
        return meta

    def begin_load(self) -> None:
        """States come from now on; `end_load` gives them to the optimizer."""
        self._coming = {weight.name: {} for weight in self.weights}

    def fill(self, weight: Weight, name: str, shard: Shard) -> int:
        """Copy the elements of a shard that belong to this rank; returns how many. An fp32 weight takes over the saved
        master of a bf16 one: kept apart, it would be saved again and be stale."""
        master, coming = self._masters[weight], self._coming[weight.name]
        if name != "master" and name not in coming:
            # As torch's `load_state_dict` wants it, which would copy it otherwise.
            dtype = master.dtype if shard.tensor.is_floating_point() else shard.tensor.dtype
            before = self._optimizer.state.get(master, {}).get(name)
            fits = isinstance(before, Tensor) and (before.shape, before.dtype) == (master.shape, dtype)
            coming[name] = before if fits else torch.empty_like(master, dtype=dtype, requires_grad=False)
        return LocalShard(weight.source, master if name == "master" else coming[name]).fill(shard)

    def put(self, weight: Weight, name: str, value: Any) -> None:
        """Take over a state that is one value for the whole weight."""
        self._coming[weight.name][name] = value.clone() if isinstance(value, Tensor) else value

    @torch.no_grad()
    def end_load(self, meta: Mapping[str, Any]) -> None:
        """Go on with the states that have come, and with what `meta` gave; live weights become the masters, rounded
        where they have less."""
        for weight in self.weights:
            self._coming[weight.name] |= meta.get("values", {}).get(weight.name, {})
        param_groups = self._optimizer.state_dict()["param_groups"]
        for group, before in zip(param_groups, meta.get("groups", ()), strict=False):
            group.update(before)
        index = {id(p): i for i, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])}
        for weight, master in self._masters.items():
            if master is not weight.live:
                weight.live.copy_(master)
        numbered = {index[id(m)]: values for w, m in self._masters.items() if (values := self._coming[w.name])}
        self._optimizer.load_state_dict({"state": numbered, "param_groups": param_groups})
        self._coming = {}
        if self._scheduler is not None and meta.get("schedule"):
            self._scheduler.load_state_dict(dict(meta["schedule"]))

    @torch.no_grad()
    def refresh(self) -> None:
        """Reset the masters to the live weights, which were replaced from outside."""
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
    """The weights of a model that the caller's optimizer holds.

    Raises:
        ConfigError: it holds a tensor that is not a weight of the model.
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


def _adamw(masters: Mapping[Weight, Tensor], config: OptimConfig) -> torch.optim.Optimizer:
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


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


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
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
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

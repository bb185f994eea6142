"""Optimizer steps under low-precision live weights: fp32 masters, fp32 gradient sums, clipping, a schedule.

bf16 weights are stepped by `SplitAdamW`, all others, and those of a caller's own optimizer, by `MasterOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl.errors import CheckpointError, ConfigError
from verl.training.adamw import SplitAdamW
from verl.training.gradients import Gradients, Weight
from verl.training.masters import MasterOptimizer, OwnOptimizer, held
from verl.training.options import OptimConfig
from verl.weights.shard import Shard

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
        return self.config.lr * self.config.lr_factor(self.completed_steps)

    def step(self, grad_norm: float) -> None:
        """One optimizer step from the accumulated gradient, whose norm `grad_norm` is finite; clips first."""
        limit = self.config.max_grad_norm
        scale = limit / (grad_norm + 1e-6) if limit is not None and grad_norm + 1e-6 > limit else 1.0
        for rule in self._rules:
            rule.step(self.lr, scale)
        self.completed_steps += 1
        self.gradients.accepted()

    def refresh_masters(self) -> None:
        """Masters anew from the live weights, after these have been replaced from outside."""
        for rule in self._rules:
            rule.refresh()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a bit-equal continuation needs beside the live weights and `meta`: "<weight>.<state>"
        ("exp_avg", "exp_avg_sq", "step", ...) and "<weight>.master" (fp32, of weights in less). Some are the live
        state, not copies: write them before the next step."""
        for rule in self._rules:
            for weight, name, value in rule.state():
                if isinstance(value, Tensor):
                    yield f"{weight}.{name}", value
                del value  # a master that was made for the caller, before the next one is

    def meta(self) -> dict[str, Any]:
        """What such a continuation needs beside tensors, for JSON."""
        values: dict[str, dict[str, Any]] = {}
        for weight, name, value in () if self._masters is None else self._masters.state():
            if not isinstance(value, Tensor):
                values.setdefault(weight, {})[name] = value
        meta = {"completed_steps": self.completed_steps, "values": values, **self.gradients.state()}
        meta["optimizer"] = self.name
        if self._masters is not None and (schedule := self._masters.schedule()):
            meta["schedule"] = schedule
        groups = [] if self._masters is None else self._masters.groups()
        return {**meta, "groups": groups} if groups else meta

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
            for weight in self._masters.weights:
                for name, value in meta.get("values", {}).get(weight.name, {}).items():
                    self._masters.put(weight, name, value)
            self._masters.end_load(meta.get("groups", []))
            self._masters.load_schedule(meta.get("schedule", {}))
        self.completed_steps = int(meta["completed_steps"])
        self.gradients.load(meta)

    def offload(self, what: Collection[str] = ("optimizer", "gradients")) -> None:
        """Move masters and moments ("optimizer") to host memory, free the sums ("gradients"); live weights stay."""
        if "gradients" in what:
            self.gradients.free()
        for rule in self._rules if "optimizer" in what else ():
            rule.move(to_host=True)

    def onload(self, what: Collection[str] = ("optimizer", "gradients")) -> None:
        """Undo `offload`; gradient sums are allocated by the next backward pass."""
        for rule in self._rules if "optimizer" in what else ():
            rule.move(to_host=False)

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
    """The kind of a caller's optimizer, or the function that makes it, or what takes its place where there is none."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return "AdamW" if optimizer is None else type(optimizer).__name__
    return str(getattr(getattr(optimizer, "func", optimizer), "__name__", type(optimizer).__name__))


def check_optimizer(name: str, meta: Mapping[str, Any]) -> None:
    """Refuse a state that an optimizer of another kind has saved: what it knows of a weight means nothing to this one.

    Raises:
        CheckpointError: it is one.
    """
    # Before optimizers were named there, only callers' own had groups.
    saved = meta.get("optimizer", name if meta.get("groups") else "AdamW")
    if saved != name:
        raise CheckpointError(
            f"the optimizer's state was saved by {saved}, and {name} trains here: give the optimizer of then, or begin "
            "from the weights alone (`verl export`)"
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

"""Optimizer steps with fp32 masters and fp32 gradient sums under low-precision live weights.

What is held for a bf16 or fp16 weight: the live tensor, its fp32 master, the optimizer's state of the master
(AdamW: two fp32 moments) and one fp32 gradient sum. An fp32 or fp64 weight is its own master. The live
gradient of a micro-batch exists for one weight at a time: a hook adds it to the sum and frees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.errors import CheckpointError, ConfigError
from verl.training.options import OptimConfig

# fp16 gradients below 6e-8 are lost, so the loss is multiplied before the backward pass.
_FP16_SCALE = 4096.0
_STEPS_BEFORE_RAISE = 500


@dataclass(eq=False)
class _Weight:
    name: str
    live: torch.nn.Parameter
    master: Tensor
    """What the optimizer updates: fp32 where `live` is bf16 or fp16, else `live` itself."""
    gradient: Tensor | None = None
    """Sum over micro-batches, in the master's dtype; allocated once."""
    has_gradient: bool = False

    @property
    def is_split(self) -> bool:
        return self.master is not self.live


class MixedPrecisionOptimizer:
    """AdamW, or a caller's own torch optimizer, on the masters of a model's weights.

    Gradients arrive by backward passes alone; `step` or `clear` ends their accumulation. A weight that got no
    gradient since then is left as it is, weight decay included, as in torch.

    Args:
        weights: the model's parameters by name, tied ones once; frozen ones are ignored.
        config: AdamW, its schedule, and clipping.
        optimizer: takes the place of AdamW and its schedule (clipping stays). It holds some of `weights`; the
            others are not trained. From here on its groups hold the masters, and what it knows of a parameter
            belongs to the master.

    Raises:
        ConfigError: nothing to train, or the torch optimizer holds a tensor that is not of this model.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        config: OptimConfig,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        trained = {name: live for name, live in weights.items() if live.requires_grad}
        for live in trained.values():
            live.register_post_accumulate_grad_hook(self._collect)
        if optimizer is not None:
            trained = _held(trained, optimizer)
        if not trained:
            raise ConfigError("no weight of the model requires a gradient: there is nothing to train")
        self.config = config
        self.completed_steps = 0
        self._weights = [_Weight(name, live, _master(live)) for name, live in trained.items()]
        self._by_live = {weight.live: weight for weight in self._weights}
        #: What a loss is to be multiplied by before its backward pass; 1 without fp16 weights.
        self._is_scaled = any(live.dtype == torch.float16 for live in trained.values())
        self.loss_scale = _FP16_SCALE if self._is_scaled else 1.0
        self._steps_at_scale = 0
        self._has_own_lr = optimizer is None
        if optimizer is None:
            config.lr_factor(config.warmup_steps)  # a schedule that cannot be computed fails here, not later
            self._optimizer = _adamw([weight.master for weight in self._weights], config)
        else:
            self._optimizer = optimizer
            _move_to_masters(optimizer, self._by_live)

    @property
    def lr(self) -> float:
        """Learning rate of the next step (a caller's optimizer: of its first parameter group)."""
        if self._has_own_lr:
            return self.config.lr * self.config.lr_factor(self.completed_steps)
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def has_gradient(self) -> bool:
        return any(weight.has_gradient for weight in self._weights)

    def grad_norm(self) -> float:
        """Global 2-norm of the accumulated gradient; NaN or infinite if any element is."""
        # A plain fp32 norm of 3e7 elements is wrong by 1e-3 on CPU: norms of rows first, then fp64.
        squares = [
            torch.linalg.vector_norm(torch.linalg.vector_norm(gradient, dim=-1), dtype=torch.float64).square()
            for gradient in self._gradients()
        ]
        return float(torch.stack([s.cpu() for s in squares]).sum().sqrt()) if squares else 0.0

    @torch.no_grad()
    def step(self, grad_norm: float) -> None:
        """One optimizer step from the accumulated gradient, whose norm `grad_norm` is finite; clips first."""
        limit = self.config.max_grad_norm
        if limit is not None and grad_norm + 1e-6 > limit:
            for gradient in self._gradients():
                gradient.mul_(limit / (grad_norm + 1e-6))
        if self._has_own_lr:
            for group in self._optimizer.param_groups:
                group["lr"] = self.lr
        for weight in self._weights:
            weight.master.grad = weight.gradient if weight.has_gradient else None
        self._optimizer.step()
        for weight in self._weights:
            if weight.is_split and weight.has_gradient:
                weight.live.copy_(weight.master)
        self.completed_steps += 1
        self._steps_at_scale += 1
        if self._is_scaled and self._steps_at_scale % _STEPS_BEFORE_RAISE == 0:
            self.loss_scale = min(2 * self.loss_scale, _FP16_SCALE)
        self.clear()

    def reject(self) -> None:
        """Forget a gradient that is not finite; where fp16 may have overflowed, the loss scale halves."""
        self.loss_scale = max(self.loss_scale / 2, 1.0)
        self._steps_at_scale = 0
        self.clear()

    def clear(self) -> None:
        """Forget the accumulated gradient; weights and moments stay as they are."""
        for weight in self._weights:
            weight.master.grad = weight.live.grad = None
            weight.has_gradient = False

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Masters anew from the live weights, after these have been replaced from outside."""
        for weight in self._weights:
            if weight.is_split:
                weight.master.copy_(weight.live)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a bit-equal continuation needs beside the live weights.

        Returns:
            Tensors "<weight>.<state>" ("exp_avg", "exp_avg_sq", "step", ...) and "<weight>.master", which are
            references to the live state, not copies: write them before the next step; and values for JSON.
        """
        tensors: dict[str, Tensor] = {}
        values: dict[str, dict[str, Any]] = {}
        for weight in self._weights:
            if weight.is_split:
                tensors[f"{weight.name}.master"] = weight.master.detach()
            for key, value in self._optimizer.state.get(weight.master, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{weight.name}.{key}"] = value
                elif value is not None:
                    values.setdefault(weight.name, {})[key] = value
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        meta = {"completed_steps": self.completed_steps, "values": values}
        if self._is_scaled:
            meta |= {"loss_scale": self.loss_scale, "steps_at_scale": self._steps_at_scale}
        return tensors, meta if self._has_own_lr else {**meta, "groups": groups}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Copy in what `state` returned. Live weights become the masters, rounded.

        Raises:
            CheckpointError: a weight is unknown, has another shape, or lacks its master.
        """
        states = self._matched(tensors, meta.get("values", {}))
        groups = self._optimizer.state_dict()["param_groups"]
        for group, saved in zip(groups, meta.get("groups", []), strict=False):
            group.update(saved)
        index = {id(p): i for i, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])}
        for weight in self._weights:
            if weight.is_split:
                weight.master.copy_(states[weight.name].pop("master"))
                weight.live.copy_(weight.master)
        numbered = {index[id(w.master)]: states[w.name] for w in self._weights if states[w.name]}
        self._optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        self.completed_steps = int(meta["completed_steps"])
        self.loss_scale = float(meta.get("loss_scale", self.loss_scale))
        self._steps_at_scale = int(meta.get("steps_at_scale", 0))
        self.clear()

    def offload(self) -> None:
        """Move masters and moments to host memory and free the gradient sums; the live weights stay."""
        self.clear()
        for weight in self._weights:
            weight.gradient = None
        self._move(to_host=True)

    def onload(self) -> None:
        """Undo `offload`; gradient sums come back with the next backward pass."""
        self._move(to_host=False)

    @torch.no_grad()
    def _collect(self, live: Tensor) -> None:
        weight = self._by_live.get(live)  # type: ignore[call-overload]
        gradient, live.grad = live.grad, None
        if weight is None or gradient is None:
            return
        if weight.gradient is None:
            weight.gradient = torch.empty_like(weight.master, device=live.device)
        if weight.has_gradient:
            weight.gradient.add_(gradient, alpha=1.0 / self.loss_scale)
        else:
            weight.gradient.copy_(gradient)
            if self.loss_scale != 1.0:
                weight.gradient.mul_(1.0 / self.loss_scale)
        weight.has_gradient = True

    def _gradients(self) -> Iterable[Tensor]:
        return (w.gradient for w in self._weights if w.has_gradient and w.gradient is not None)

    def _move(self, to_host: bool) -> None:
        for weight in self._weights:
            device = torch.device("cpu") if to_host else weight.live.device
            if weight.is_split:
                weight.master.data = weight.master.data.to(device)
            state = self._optimizer.state.get(weight.master, {})
            for key, value in state.items():
                # AdamW's step counter lives where the kernel wants it, not where the weight is.
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = value.to(device)

    def _matched(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        states: dict[str, dict[str, Any]] = {w.name: dict(values.get(w.name, {})) for w in self._weights}
        shapes = {weight.name: weight.master.shape for weight in self._weights}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition(".")
            if name not in states:
                raise CheckpointError(f"the optimizer state '{full_name}' belongs to no trained weight of this model")
            if key in ("master", "exp_avg", "exp_avg_sq") and tensor.shape != shapes[name]:
                raise CheckpointError(
                    f"the optimizer state '{full_name}' has shape {list(tensor.shape)}, the weight has "
                    f"{list(shapes[name])}: it is of another model"
                )
            states[name][key] = tensor.clone()
        for weight in self._weights:
            if weight.is_split and "master" not in states[weight.name]:
                raise CheckpointError(
                    f"the optimizer state lacks '{weight.name}.master': it is of weights in another dtype"
                )
        return states


def _master(live: torch.nn.Parameter) -> Tensor:
    if live.dtype in (torch.float32, torch.float64):
        return live
    if live.dtype in (torch.bfloat16, torch.float16):
        return live.detach().to(torch.float32, copy=True)
    raise ConfigError(f"weights of dtype {live.dtype} cannot be trained: load the model in bf16 or fp32")


def _adamw(masters: list[Tensor], config: OptimConfig) -> torch.optim.Optimizer:
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }
    try:
        return torch.optim.AdamW(masters, fused=True, **options)
    except RuntimeError:  # no fused kernel for this device
        return torch.optim.AdamW(masters, foreach=True, **options)


def _held(trained: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = held - {id(live) for live in trained.values()}
    if strangers:
        raise ConfigError(
            f"the optimizer holds {len(strangers)} tensors that are no trainable parameters of this model: "
            "make it from model.parameters() of the model that is trained"
        )
    return {name: live for name, live in trained.items() if id(live) in held}


@torch.no_grad()
def _move_to_masters(optimizer: torch.optim.Optimizer, weights: Mapping[torch.nn.Parameter, _Weight]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [weights[p].master for p in group["params"]]
    for live, weight in weights.items():
        if weight.is_split and live in optimizer.state:
            state = optimizer.state.pop(live)
            optimizer.state[weight.master] = {key: _widened(value) for key, value in state.items()}


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

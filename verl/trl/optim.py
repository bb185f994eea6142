"""transformers' learning-rate schedules and optimizers by their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError, nearest
from verl.training.options import OptimConfig

#: transformers' name of an optimizer -> torch's class. AdamW is our own.
_TORCH = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}


def lr_factor(args: Any, total: int) -> Callable[[int], float]:
    """Optimizer step, from 0 to `total` -> the factor of `learning_rate`.

    Raises:
        ConfigError: there is no such schedule, or it depends on more than the step.
    """
    from transformers import SchedulerType, get_scheduler

    names, name = [kind.value for kind in SchedulerType], args.lr_scheduler_type
    if name not in names:
        raise ConfigError(f"lr_scheduler_type='{name}': {nearest(name, names)}")
    warmup = args.warmup_steps or args.warmup_ratio or 0
    scheduler = get_scheduler(
        name,
        torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate),
        num_warmup_steps=math.ceil(warmup * total) if warmup < 1 else int(warmup),  # below 1 it is a share
        num_training_steps=total,
        scheduler_specific_kwargs=args.mapping("lr_scheduler_kwargs"),
    )
    if not hasattr(scheduler, "lr_lambdas"):
        raise ConfigError(
            f"lr_scheduler_type='{name}' goes by what is measured: pass optimizers=(optimizer, scheduler)"
        )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


def optim_settings(args: Any, total: int) -> dict[str, Any]:
    """Fields of `EngineOptions` for `total` optimizer steps.

    Raises:
        ConfigError: an optimizer that is not here, or an unknown schedule.
    """
    factor = lr_factor(args, total)
    optim = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "adam_eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "weight_decay_on": "matrices" if args.weight_decay else "all",
        "max_grad_norm": args.max_grad_norm or None,
        "schedule": factor,
    }
    if str(args.optim) in ("adamw_torch", "adamw_torch_fused"):
        return {"optim": OptimConfig.of(optim, "args")}
    if args.optim not in (*_TORCH, "adafactor"):
        names = ["adamw_torch", "adamw_torch_fused", *_TORCH, "adafactor"]
        hint = f"{nearest(str(args.optim), names)}, or pass your own as optimizers=(optimizer, None)"
        raise ConfigError(f"optim='{args.optim}': {hint}")
    make = partial(make_optimizer, args.optim, args.learning_rate, args.weight_decay)
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=factor)
    clipped = OptimConfig.of({"max_grad_norm": optim["max_grad_norm"]}, "args")
    return {"optim": clipped, "optimizer": make, "scheduler": schedule}


def make_optimizer(name: str, lr: float, weight_decay: float, weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    """An optimizer as transformers makes it: biases and norms do not decay."""
    decays: dict[float, list[Tensor]] = {}
    for weight in weights:
        decays.setdefault(weight_decay if weight.ndim > 1 else 0.0, []).append(weight)
    groups: list[Any] = [{"params": params, "weight_decay": decay} for decay, params in decays.items()]
    if name == "adafactor":
        from transformers import Adafactor

        return Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False)
    return _TORCH[name](groups, lr=lr)  # type: ignore[no-any-return]

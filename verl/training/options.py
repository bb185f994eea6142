"""Settings of the optimizer. Imported without torch."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from verl.errors import ConfigError
from verl.record import AsTuple, Count, Natural, Record

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Record):
    """AdamW (Loshchilov and Hutter, 2019) with a learning-rate schedule. A step here is an optimizer step."""

    lr: float = Field(default=1e-6, ge=0, description="highest learning rate")
    betas: Annotated[tuple[_Beta, _Beta], AsTuple] = Field(
        default=(0.9, 0.999), description="decay rates of the two moments"
    )
    adam_eps: float = Field(default=1e-6, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled; acts on every trained weight")
    moments: Literal["bfloat16", "float32"] | None = Field(
        default=None, description="dtype of the moments of bf16 weights (null: bfloat16, rounded at random)"
    )
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="global norm to clip to; null: none")
    warmup_steps: Natural = Field(default=0, description="steps of linear warm-up; the first is not zero")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="course of the learning rate after the warm-up"
    )
    total_steps: Count | None = Field(default=None, description="where linear and cosine reach zero")

    @model_validator(mode="after")
    def _warmup_ends_in_time(self) -> OptimConfig:
        if self.schedule != "constant" and self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} leaves nothing of total_steps={self.total_steps}: lower it"
            )
        return self

    def lr_factor(self, step: int) -> float:
        """What `lr` is multiplied by in optimizer step number `step`, counted from 0.

        Raises:
            ConfigError: the schedule decays and `total_steps` is not known.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        if self.total_steps is None:
            raise ConfigError(f"optim.schedule={self.schedule} decays to zero: set optim.total_steps")
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))

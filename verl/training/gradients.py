"""Gradient sums in full precision, as backward passes fill them.

The live gradient of a micro-batch exists for one weight at a time: a hook adds it to the sum and frees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# fp16 gradients below 6e-8 are lost, so the loss is multiplied before the backward pass.
_FP16_SCALE = 4096.0
_STEPS_BEFORE_RAISE = 500


@dataclass(eq=False)
class Weight:
    """A trained weight: the live tensor, and the sum of its gradients over micro-batches."""

    name: str
    live: torch.nn.Parameter
    gradient: Tensor | None = None
    """fp32 (fp64 for an fp64 weight); allocated once."""
    has_gradient: bool = False


class Gradients:
    """The sums of `weights`, and the loss scale that fp16 needs.

    Every parameter of `watched` is hooked: gradients of those that are not trained are freed.
    """

    def __init__(self, weights: list[Weight], watched: Iterable[torch.nn.Parameter]) -> None:
        self.weights = weights
        self._by_live: Mapping[Tensor, Weight] = {weight.live: weight for weight in weights}
        for live in watched:
            live.register_post_accumulate_grad_hook(self._collect)
        self._is_scaled = any(weight.live.dtype == torch.float16 for weight in weights)
        #: What a loss is to be multiplied by before its backward pass; 1 without fp16 weights.
        self.loss_scale = _FP16_SCALE if self._is_scaled else 1.0
        self._steps_at_scale = 0

    def any(self) -> bool:
        return any(weight.has_gradient for weight in self.weights)

    def norm(self) -> float:
        """Global 2-norm of the sums; NaN or infinite if any element is."""
        # A plain fp32 norm of 3e7 elements is wrong by 1e-3 on CPU: norms of rows first, then fp64.
        squares = [
            torch.linalg.vector_norm(torch.linalg.vector_norm(gradient, dim=-1), dtype=torch.float64).square()
            for gradient in self.present()
        ]
        return float(torch.stack([s.cpu() for s in squares]).sum().sqrt()) if squares else 0.0

    def present(self) -> Iterable[Tensor]:
        return (w.gradient for w in self.weights if w.has_gradient and w.gradient is not None)

    def accepted(self) -> None:
        """A step was made: its gradient is forgotten, and the loss scale may rise again."""
        self._steps_at_scale += 1
        if self._is_scaled and self._steps_at_scale % _STEPS_BEFORE_RAISE == 0:
            self.loss_scale = min(2 * self.loss_scale, _FP16_SCALE)
        self.clear()

    def rejected(self) -> None:
        """The gradient was not finite: it is forgotten; where fp16 may have overflowed, the loss scale halves."""
        self.loss_scale = max(self.loss_scale / 2, 1.0)
        self._steps_at_scale = 0
        self.clear()

    def clear(self) -> None:
        for weight in self.weights:
            weight.live.grad = None
            weight.has_gradient = False

    def free(self) -> None:
        """Clear, and give the memory of the sums back; the next backward pass takes it again."""
        self.clear()
        for weight in self.weights:
            weight.gradient = None

    def state(self) -> dict[str, float]:
        """What a bit-equal continuation needs, for JSON."""
        return {"loss_scale": self.loss_scale, "steps_at_scale": self._steps_at_scale} if self._is_scaled else {}

    def load(self, state: Mapping[str, float]) -> None:
        self.loss_scale = float(state.get("loss_scale", self.loss_scale))
        self._steps_at_scale = int(state.get("steps_at_scale", 0))
        self.clear()

    @torch.no_grad()
    def _collect(self, live: Tensor) -> None:
        weight = self._by_live.get(live)
        gradient, live.grad = live.grad, None
        if weight is None or gradient is None:
            return
        if weight.gradient is None:
            dtype = torch.float64 if live.dtype == torch.float64 else torch.float32
            weight.gradient = torch.empty_like(live, dtype=dtype)
        if weight.has_gradient:
            weight.gradient.add_(gradient, alpha=1.0 / self.loss_scale)
        else:
            weight.gradient.copy_(gradient)
            if self.loss_scale != 1.0:
                weight.gradient.mul_(1.0 / self.loss_scale)
        weight.has_gradient = True

"""Gradient sums in full precision, as backward passes fill them.

The gradient of a micro-batch exists for one weight at a time. Our own functions add it to the sum themselves (see
autograd.py); where autograd computes it, a hook adds it and frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl._base.autograd import add_rows
from verl.errors import TrainingError
from verl.kernels.compiled import accumulate

# fp16 gradients below 6e-8 are lost, so the loss is multiplied before the backward pass.
_FP16_SCALE = 4096.0


@dataclass(eq=False)
class Weight:
    """A trained weight, and the sum of its gradients over micro-batches.

    Attributes:
        live: the tensor that is stepped: this rank's piece, where ranks hold pieces of it.
        source: the parameter that autograd gives the gradient to: `live` itself, or the DTensor it is a piece of.
        gradient: fp32 (fp64 for an fp64 weight); there while gradients are being collected.
    """

    name: str
    live: nn.Parameter
    source: nn.Parameter
    gradient: Tensor | None = None
    has_gradient: bool = False
    loss_scale: float = 1.0

    def add(self, gradient: Tensor, start: int = 0) -> None:
        """Add the gradient of a scaled loss, of all rows or of some from row `start`."""
        # Sums are not zeroed between steps: without `has_gradient` what they hold is old, and the first gradient
        # overwrites it. That saves a pass over them; only one of some rows has to clear the rest itself.
        total = self.sum()
        if gradient.shape != total.shape:
            if not self.has_gradient:
                total.zero_()
                self.has_gradient = True
            total = total[start : start + len(gradient)]
        accumulate(total, gradient, 1.0 / self.loss_scale, add=self.has_gradient)
        self.has_gradient = True

    def add_rows(self, rows: Tensor, gradient: Tensor) -> None:
        """Add to row `rows[i]` the row i of `gradient`."""
        total = self.sum()
        if not self.has_gradient:
            total.zero_()
        add_rows(total, rows, gradient, 1.0 / self.loss_scale)
        self.has_gradient = True

    def sum(self) -> Tensor:
        """`gradient`, which is there."""
        if self.gradient is None:
            raise TrainingError(f"a gradient of '{self.name}' arrived while none are collected")
        return self.gradient


def zeros_like(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """A zero tensor of `dtype` for each weight, in its shape, cut from one block on their device.

    One block is mapped and freed as a whole. Single tensors would lie between the activations of a backward pass and
    keep the allocator from returning their memory.
    """
    sizes = [weight.numel() for weight in weights]
    block = torch.zeros(sum(sizes), dtype=dtype, device=weights[0].device if weights else None)
    return [part.view(weight.shape) for part, weight in zip(block.split(sizes), weights, strict=True)]


class Gradients:
    """The sums of `weights`, and the loss scale that fp16 needs.

    While gradients are collected, a hook on every parameter in `watched` takes its gradient, and frees it if the weight
    is not trained.
    `is_scaled`: gradients are computed in fp16, whatever `weights` are in.
    """

    def __init__(self, weights: list[Weight], watched: Iterable[nn.Parameter], *, is_scaled: bool = False) -> None:
        self.weights = weights
        self._by_source: Mapping[Tensor, Weight] = {weight.source: weight for weight in weights}
        self._watched = list(watched)
        self._is_scaled = is_scaled or any(weight.live.dtype == torch.float16 for weight in weights)
        #: Factor of a loss before its backward pass; 1 without fp16 gradients.
        self.loss_scale = _FP16_SCALE if self._is_scaled else 1.0
        self._steps_at_scale = 0

    def fill_zeros(self) -> None:
        """A gradient of 0 for every weight."""
        self._allocate()
        for weight in self.weights:
            weight.sum().zero_()
            weight.has_gradient = True

    def norm(self, replication: Callable[[Weight], int] = lambda _: 1) -> float:
        """Global 2-norm of the sums; NaN or infinite if any element is. The square of each weight's is divided by its
        `replication`, so that squares of ranks that hold the same one add up to it."""
        # A plain fp32 norm of 3e7 elements is wrong by 1e-3 on CPU: norms of rows first, then fp64.
        squares = [
            torch.linalg.vector_norm(torch.linalg.vector_norm(w.sum(), dim=-1), dtype=torch.float64).square().cpu()
            / replication(w)
            for w in self.weights
            if w.has_gradient
        ]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    @torch.no_grad()
    def sum_over_ranks(self, all_reduce: Callable[[list[Tensor], Any], None], weights: Sequence[Weight]) -> None:
        """Replace this rank's sums of some weights by those over all ranks, in the same precision.

        Args:
            all_reduce: combines a list of tensors over all ranks in place, by a `torch.distributed.ReduceOp`.
        """
        if not weights:  # all of them are frozen, on every rank
            return
        self._allocate()
        flags = torch.tensor([float(w.has_gradient) for w in weights], device=weights[0].live.device)
        all_reduce([flags], dist.ReduceOp.MAX)
        for weight, anywhere in zip(weights, flags.tolist(), strict=True):
            if anywhere and not weight.has_gradient:
                weight.sum().zero_()
            weight.has_gradient = bool(anywhere)
        all_reduce([w.sum() for w in weights if w.has_gradient], dist.ReduceOp.SUM)

    def accepted(self) -> None:
        """After a step: drop its gradient; the loss scale may rise again."""
        self._steps_at_scale += 1
        if self._is_scaled and self._steps_at_scale % 500 == 0:
            self.loss_scale = min(2 * self.loss_scale, _FP16_SCALE)
        self.clear()

    def rejected(self) -> None:
        """After a gradient that is not finite: drop it, and halve the loss scale, since fp16 may have overflowed."""
        self.loss_scale = max(self.loss_scale / 2, 1.0)
        self._steps_at_scale = 0
        self.clear()

    def clear(self) -> None:
        for weight in self.weights:
            weight.source.grad = None
            weight.has_gradient = False

    def free(self) -> None:
        """Clear, and free the sums; the next backward pass allocates them again."""
        self.clear()
        for weight in self.weights:
            weight.gradient = None

    def state(self) -> dict[str, float]:
        """JSON state for a bit-equal continuation."""
        return {"loss_scale": self.loss_scale, "steps_at_scale": self._steps_at_scale} if self._is_scaled else {}

    def load(self, state: Mapping[str, float]) -> None:
        self.loss_scale = float(state.get("loss_scale", self.loss_scale))
        self._steps_at_scale = int(state.get("steps_at_scale", 0))
        self.clear()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Inside, gradients of trained weights go into their sums. Outside they stay where autograd puts them, for
        another trainer of the same tensors."""
        # Two ways lead into a sum. Our own backward passes (verl.models) find it as `grad_sum` of the parameter and add
        # to it at once, so that autograd holds no gradient of that weight at all. Of every other parameter autograd
        # makes one, and the hook adds it and frees it; that of a parameter that is not trained is freed alone.
        self._allocate()
        with ExitStack() as stack:
            for live in self._watched:
                stack.enter_context(live.register_post_accumulate_grad_hook(self._collect))
            for weight in self.weights:
                weight.loss_scale = self.loss_scale
                weight.source.grad_sum = weight  # type: ignore[attr-defined]
                stack.callback(delattr, weight.source, "grad_sum")
            yield

    @torch.no_grad()
    def _collect(self, source: Tensor) -> None:
        weight = self._by_source.get(source)
        gradient, source.grad = source.grad, None
        if weight is not None and gradient is not None:
            weight.add(gradient.to_local() if hasattr(gradient, "to_local") else gradient)

    def _allocate(self) -> None:
        for dtype in (torch.float32, torch.float64):  # of fp64 weights fp64, of all others fp32
            exact = dtype == torch.float64
            lacking = (weight for weight in self.weights if weight.gradient is None)
            chosen = [weight for weight in lacking if (weight.live.dtype == torch.float64) == exact]
            for weight, total in zip(chosen, zeros_like([w.live for w in chosen], dtype), strict=True):
                weight.gradient = total

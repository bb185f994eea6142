"""Log-probs and entropies of tokens without a tokens x vocabulary matrix.

`token_log_probs` computes logits in chunks of tokens and forgets them; the backward computes them again,
chunk by chunk. What is kept for it is two numbers a token. Log-probs are of temperature-scaled logits,
before top-k and top-p.

Where ranks have rows of the head (tensor parallelism), each computes the softmax over its part of the vocabulary, and
only its results of three numbers a token are put together: logits are not exchanged.

With z the logits after scale, soft cap and temperature, p = softmax(z) and H the entropy, the gradient is
d log p_t / d z = onehot_t - p and d H / d z = -p * (log p + H).

Shapes: N tokens, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.kernels.compiled import accumulate, layer_kernels
from verl.models.collectives import shared
from verl.models.grad_sums import grad_sum
from verl.models.head_sizes import HeadSizes
from verl.weights.cuts import blocks_of, local_part


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs `[N]` of `targets` `[N]` under softmax(logits / temperature), and the entropy `[N]` if
    requested.

    The logits are `hidden @ weight.T + bias` for hidden states `[N, d]`, weight `[V, d]` and bias `[V]`,
    multiplied by `scale`, then soft-capped: `softcap * tanh(logits / softcap)`. The product runs in the
    dtype of `hidden`; all that follows, and the results, are fp32 (fp64 for fp64 inputs). Both results are
    differentiable once, with respect to hidden, weight and bias. Where weight and bias are DTensors cut by rows, all
    ranks call this with equal hidden states and targets, and get equal results.

    Args:
        temperature: > 0. A greedy rollout (temperature 0) is scored at 1.
        chunk: tokens at a time; by default as many as `HeadSizes` has logits for the device.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}: score greedy samples at 1")
    cut = _Cut.of(weight)
    if cut is not None:
        hidden, weight = shared(hidden, cut.group), _local(weight)
        bias = None if bias is None else local_part(bias)
    chunk = chunk or max(1, HeadSizes.on(weight.device).chunk // weight.shape[0])
    formula = _Formula(scale, softcap, temperature)
    log_probs, entropies = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, formula, entropy, chunk, cut
    )
    return log_probs, entropies if entropy else None


@dataclass(frozen=True)
class _Cut:
    """Rows `start` to `stop` of the head are here, the others at other ranks of the group."""

    group: Any
    start: int
    stop: int

    @classmethod
    def of(cls, weight: Any) -> _Cut | None:
        """None: all rows are here."""
        if not hasattr(weight, "placements"):
            return None
        (((start, _), rows),) = blocks_of(weight.detach())
        return cls(weight.device_mesh.get_group(), start, start + len(rows))

    def is_here(self, targets: Tensor) -> Tensor:
        return (targets >= self.start) & (targets < self.stop)

    def local(self, targets: Tensor) -> Tensor:
        """Rows of the weight here, and any of them for targets that are elsewhere."""
        return (targets - self.start).clamp(0, self.stop - self.start - 1)

    def combine(self, targets: Tensor, log_probs: Tensor, norms: Tensor, entropies: Tensor) -> None:
        """Turn results `[N]` over the part of the vocabulary here into those over all of it, in place."""
        picked = torch.where(self.is_here(targets), log_probs + norms, 0.0)
        own = torch.stack([norms, picked, norms - entropies])  # the last is the mean logit
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own, group=self.group)
        by_rank, picked_by_rank, means = torch.stack(parts, dim=1)
        norms.copy_(by_rank.logsumexp(0))
        log_probs.copy_(picked_by_rank.sum(0) - norms)
        entropies.copy_(norms - ((by_rank - norms).exp() * means).sum(0))


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a cut weight; its gradient goes where that of the weight goes."""
    total = grad_sum(weight)
    if total is None:
        return local_part(weight)
    local = local_part(weight.detach()).requires_grad_(weight.requires_grad)
    local.grad_sum = total  # type: ignore[attr-defined]
    return local


class _Formula:
    """What stands between the product of the head and the softmax."""

    def __init__(self, scale: float, softcap: float | None, temperature: float) -> None:
        self.scale = scale
        self.softcap = softcap
        self.temperature = temperature

    @property
    def alpha(self) -> float | None:
        """The factor that is all there is between product and softmax, or None."""
        return self.scale / self.temperature if self.softcap is None else None

    def forward(self, logits: Tensor) -> Tensor | None:
        """Turn products into logits in place; with a soft cap return the tanh that the gradient needs."""
        if self.softcap is None:
            if self.scale != self.temperature:
                logits.mul_(self.scale / self.temperature)
            return None
        tanh = logits.mul_(self.scale / self.softcap).tanh_().clone()
        logits.mul_(self.softcap / self.temperature)
        return tanh

    def backward(self, grad: Tensor, tanh: Tensor | None) -> None:
        """Turn the gradient of the logits into that of the products, in place."""
        if tanh is not None:
            grad.mul_(tanh.square_().neg_().add_(1.0))
        if self.scale != self.temperature:
            grad.mul_(self.scale / self.temperature)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        formula: _Formula,
        entropy: bool,
        chunk: int,
        cut: _Cut | None,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_probs, norms, entropies = hidden.new_zeros((3, hidden.shape[0]), dtype=exact)
        rows = targets if cut is None else cut.local(targets)
        alpha = formula.alpha
        for part, product in _products(hidden, weight, bias, chunk):
            compiled = layer_kernels(product.dtype, product.device)
            results = log_probs[part], norms[part], entropies[part] if entropy else None
            if compiled is not None and alpha is not None:
                compiled.softmax_rows(product, rows[part], alpha, *results)
            else:
                _softmax_rows(product, rows[part], formula, *results)
        if cut is not None:
            cut.combine(targets, log_probs, norms, entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies if entropy else None)
        ctx.formula, ctx.chunk, ctx.cut = formula, chunk, cut
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = _Sum(weight, norms.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=norms.dtype) if ctx.needs_input_grad[2] else None
        alpha = ctx.formula.alpha
        to_log_probs, to_entropies = (grad.contiguous() for grad in grads)
        cut: _Cut | None = ctx.cut
        rows = targets if cut is None else cut.local(targets)
        to_targets = to_log_probs if cut is None else torch.where(cut.is_here(targets), to_log_probs, 0.0)
        for part, product in _products(hidden, weight, bias, ctx.chunk):
            compiled = layer_kernels(product.dtype, product.device)
            given = (
                norms[part],
                None if entropies is None else entropies[part],
                to_log_probs[part],
                None if entropies is None else to_entropies[part],
            )
            if compiled is not None and alpha is not None and cut is None:
                compiled.softmax_rows_backward(product, rows[part], alpha, *given)
            else:
                _softmax_rows_backward(product, rows[part], to_targets[part], ctx.formula, *given)
            # From here on `product` is the gradient of the products.
            if grad_bias is not None:
                grad_bias += product.sum(0, dtype=norms.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = product @ weight
            if grad_weight is not None:
                grad_weight.add(product, hidden[part])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.result(),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _softmax_rows(
    product: Tensor,
    targets: Tensor,
    formula: _Formula,
    log_probs: Tensor,
    norms: Tensor,
    entropies: Tensor | None,
) -> None:
    """Fill log-probs of `targets` `[N]`, logs of the softmax's sums, and entropies, given products `[N, V]`."""
    for block, logits in _blocks(product, norms.dtype):
        formula.forward(logits)
        picked = logits.gather(1, targets[block, None])[:, 0]
        highest = logits.amax(1, keepdim=True)
        shifted = logits.sub_(highest)
        if entropies is not None:
            p = shifted.exp()
            total = p.sum(1)
            entropies[block] = total.log() - p.mul_(shifted).sum(1) / total
        else:
            total = shifted.exp_().sum(1)
        norms[block] = highest[:, 0] + total.log()
        log_probs[block] = picked - norms[block]


def _softmax_rows_backward(
    product: Tensor,
    targets: Tensor,
    to_targets: Tensor,
    formula: _Formula,
    norms: Tensor,
    entropies: Tensor | None,
    to_log_probs: Tensor,
    to_entropies: Tensor | None,
) -> None:
    """Put the gradient of the products in their place, given those of log-probs and entropies `[N]`; `to_targets`: of
    log-probs, by way of their own logits alone."""
    for block, logits in _blocks(product, norms.dtype):
        tanh = formula.forward(logits)
        log_p = logits.sub_(norms[block, None])
        by_log_prob = to_log_probs[block, None]
        if entropies is None or to_entropies is None:
            grad = log_p.exp_().mul_(-by_log_prob)
        else:
            p = log_p.exp()
            grad = log_p.add_(entropies[block, None]).mul_(-to_entropies[block, None]).sub_(by_log_prob)
            grad.mul_(p)
        # One addition to an element of each row: their order cannot matter.
        grad.scatter_add_(1, targets[block, None], to_targets[block, None])
        formula.backward(grad, tanh)
        product[block] = grad


def _products(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks, about equal, of `hidden @ weight.T + bias`; each takes the place of the one before."""
    rows = hidden.shape[0]
    size = -(-rows // max(1, -(-rows // chunk)))
    space = hidden.new_empty(size, weight.shape[0])
    for start in range(0, rows, size or 1):
        part = slice(start, min(start + size, rows))
        yield part, linear_into(hidden[part], weight, bias, space[: part.stop - part.start])


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """`out` `[N, V]` = `x @ weight.T + bias`, without a gradient."""
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _blocks(product: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Copies in full precision, of as many rows at a time as the device is given."""
    rows = max(1, HeadSizes.on(product.device).block // product.shape[1])
    for start in range(0, product.shape[0], rows):
        block = slice(start, start + rows)
        yield block, product[block].to(dtype, copy=True)


class _Sum:
    """Sum of the gradients that chunks of tokens give the weight `[V, d]`; its own `grad_sum` if it has one."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight
        self.given = grad_sum(weight)
        self.total = None if self.given is not None else torch.zeros_like(weight, dtype=dtype)

    def add(self, product: Tensor, hidden: Tensor) -> None:
        """Of a chunk: the gradient of its products `[N, V]`, and its hidden states `[N, d]`."""
        rows = max(1, HeadSizes.on(hidden.device).gradient // hidden.shape[1])
        for start in range(0, product.shape[1], rows):
            gradient = product[:, start : start + rows].t() @ hidden
            if self.given is not None:
                self.given.add(gradient, start)
            elif self.total is not None:
                accumulate(self.total[start : start + rows], gradient, 1.0, add=True)

    def result(self) -> Tensor | None:
        return None if self.total is None else self.total.to(self.weight.dtype)

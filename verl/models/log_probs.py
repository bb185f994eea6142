"""Log-probs and entropies of tokens without a tokens x vocabulary matrix.

`token_log_probs` computes logits in chunks of tokens and forgets them; the backward computes them again,
chunk by chunk. It keeps two numbers a token. Log-probs are of temperature-scaled logits,
before top-k and top-p.

Where ranks have rows of the head (tensor parallelism), each computes the softmax over its part of the vocabulary, and
only its results of three numbers a token are put together: logits are not exchanged.

With z the logits after scale, soft cap and temperature, p = softmax(z) and H the entropy, the gradient is
d log p_t / d z = onehot_t - p and d H / d z = -p * (log p + H).

Shapes: N tokens, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl._base.autograd import GradientSum, grad_sum, shared
from verl.kernels.compiled import accumulate, layer_kernels
from verl.models.memory import HeadSizes
from verl.weights.shard import local_part, rows_of


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
    statistics: Tensor | None = None,
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
        statistics: `[3, N]` in the dtype of the results, which becomes, without a gradient: the entropy, the mean of
            the logits over the vocabulary, and 1 where no token is likelier than the target, else 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}: score greedy samples at 1")
    cut = None
    if (mesh := getattr(weight, "device_mesh", None)) is not None:
        cut = _Cut(mesh.get_group(), rows_of(weight))
        hidden, weight = shared(hidden, cut.group), _local(weight)
        bias = None if bias is None else local_part(bias)
    chunk = max(1, HeadSizes.on(weight.device).chunk // weight.shape[0])  # tokens at a time
    options = _Options(scale, softcap, temperature, entropy, chunk, cut)
    inputs = hidden, weight, bias, targets
    log_probs, entropies = _TokenLogProbs.apply(*inputs, options, statistics)  # type: ignore[no-untyped-call]
    return log_probs, entropies if entropy else None


class _Cut(NamedTuple):
    """These rows of the head are here, the others at other ranks of the group."""

    group: Any
    rows: range

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets have their row here, and the rows of all: any row for a target that is elsewhere."""
        start, stop = self.rows.start, self.rows.stop
        return (targets >= start) & (targets < stop), (targets - start).clamp(0, stop - start - 1)

    def combine(self, targets: Tensor, log_probs: Tensor, norms: Tensor, entropies: Tensor) -> None:
        """Turn results `[N]` over the part of the vocabulary here into those over all of it, in place."""
        is_here, _ = self.find(targets)
        picked = torch.where(is_here, log_probs + norms, 0.0)
        # The last is the mean logit.
        by_rank, picked_by_rank, means = self._gather(torch.stack([norms, picked, norms - entropies]))
        norms.copy_(by_rank.logsumexp(0))
        log_probs.copy_(picked_by_rank.sum(0) - norms)
        entropies.copy_(norms - ((by_rank - norms).exp() * means).sum(0))

    def combine_statistics(self, targets: Tensor, statistics: Tensor) -> None:
        """The same for what `_look` has filled in."""
        highest, means, tops = statistics
        is_here, _ = self.find(targets)
        count = torch.full_like(means, len(self.rows))
        local = torch.stack([highest, means * count, count, torch.where(is_here, tops, 0.0)])
        by_rank, sums, counts, tops_by_rank = self._gather(local)
        means.copy_(sums.sum(0) / counts.sum(0))
        tops.copy_((tops_by_rank * (by_rank == by_rank.amax(0))).sum(0))

    def _gather(self, local: Tensor) -> Tensor:
        """`[K, N]` of each of W ranks -> `[K, W, N]`."""
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, local, group=self.group)
        return torch.stack(parts, dim=1)


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a cut weight; its gradient is summed into the weight's own sum."""
    total = grad_sum(weight)
    if total is None:
        return local_part(weight)
    local = local_part(weight.detach()).requires_grad_(weight.requires_grad)
    local.grad_sum = total  # type: ignore[attr-defined]
    return local


class _Options(NamedTuple):
    """See `token_log_probs`; `cut`: None where all rows of the head are here."""

    scale: float
    softcap: float | None
    temperature: float
    entropy: bool
    chunk: int
    cut: _Cut | None

    @property
    def factor(self) -> float:
        """The logits of a head without soft cap are its products times this."""
        return self.scale / self.temperature


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, targets, options, statistics = inputs
        cut, entropy = options.cut, options.entropy
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_probs, norms, entropies = hidden.new_zeros((3, hidden.shape[0]), dtype=exact)
        _, rows = (None, targets) if cut is None else cut.find(targets)
        for part, product in _products(hidden, weight, bias, options.chunk):
            compiled = layer_kernels(product.dtype, product.device)
            with_entropy = entropy or statistics is not None
            results = log_probs[part], norms[part], entropies[part] if with_entropy else None
            if statistics is not None:
                _look(product, rows[part], options, statistics[:, part])
            if compiled is not None and options.softcap is None:
                compiled.softmax_rows(product, rows[part], *product.shape, options.factor, *results)
            else:
                _softmax_rows(product, rows[part], options, *results)
        if cut is not None:
            if statistics is not None:
                cut.combine_statistics(targets, statistics)
            cut.combine(targets, log_probs, norms, entropies)
        if statistics is not None:
            statistics[0] = entropies
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies if entropy else None)
        ctx.options = options
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight: GradientSum | Tensor | None = None
        if ctx.needs_input_grad[1] and (grad_weight := grad_sum(weight)) is None:
            grad_weight = torch.zeros_like(weight, dtype=norms.dtype)
        grad_bias = torch.zeros_like(bias, dtype=norms.dtype) if ctx.needs_input_grad[2] else None
        options: _Options = ctx.options
        to_log_probs, to_entropies = (grad.contiguous() for grad in grads)
        results = norms, entropies, to_log_probs, None if entropies is None else to_entropies
        cut, rows, to_targets = options.cut, targets, to_log_probs
        if cut is not None:
            is_here, rows = cut.find(targets)
            to_targets = torch.where(is_here, to_log_probs, 0.0)
        for part, product in _products(hidden, weight, bias, options.chunk):
            compiled = layer_kernels(product.dtype, product.device)
            of_part: list[Any] = [None if of is None else of[part] for of in results]
            if compiled is not None and options.softcap is None and cut is None:
                compiled.softmax_rows_backward(product, rows[part], *product.shape, options.factor, *of_part)
            else:
                _softmax_rows_backward(product, rows[part], to_targets[part], options, *of_part)
            # From here on `product` is the gradient of the products.
            if grad_bias is not None:
                grad_bias += product.sum(0, dtype=norms.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = product @ weight
            if grad_weight is not None:
                _add_gradient(grad_weight, product, hidden[part])
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if isinstance(grad_weight, Tensor) else None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 3,
        )


def _softmax_rows(
    product: Tensor,
    targets: Tensor,
    options: _Options,
    log_probs: Tensor,
    norms: Tensor,
    entropies: Tensor | None,
) -> None:
    """Fill log-probs of `targets` `[N]`, logs of the softmax's sums, and entropies, given products `[N, V]`."""
    for block, logits, _ in _logits(product, norms.dtype, options):
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


def _look(product: Tensor, targets: Tensor, options: _Options, statistics: Tensor) -> None:
    """Fill `[3, N]`, given products `[N, V]`: the highest logit, the mean of the logits, and 1 where the target's logit
    is the highest."""
    for block, logits, _ in _logits(product, statistics.dtype, options):
        highest = logits.amax(1)
        tops = logits.gather(1, targets[block, None])[:, 0] >= highest
        statistics[:, block] = torch.stack([highest, logits.mean(1), tops.to(highest.dtype)])


def _softmax_rows_backward(
    product: Tensor,
    targets: Tensor,
    to_targets: Tensor,
    options: _Options,
    norms: Tensor,
    entropies: Tensor | None,
    to_log_probs: Tensor,
    to_entropies: Tensor | None,
) -> None:
    """Overwrite the products with their gradient, given the gradients of log-probs and entropies `[N]`; `to_targets`:
    of log-probs, through the target's own logit alone."""
    for block, logits, tanh in _logits(product, norms.dtype, options):
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
        if tanh is not None:
            grad.mul_(tanh.square_().neg_().add_(1.0))
        if options.factor != 1:
            grad.mul_(options.factor)
        product[block] = grad


def _products(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks, about equal, of `hidden @ weight.T + bias`; each takes the place of the one before."""
    rows = hidden.shape[0]
    size = -(-rows // max(1, -(-rows // chunk)))
    space = hidden.new_empty(size, weight.shape[0])
    for start in range(0, rows, size or 1):
        part = slice(start, min(start + size, rows))
        x, out = hidden[part], space[: part.stop - part.start]
        torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
        yield part, out


def _logits(product: Tensor, dtype: torch.dtype, options: _Options) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Logits in full precision, of as many rows of products at a time as the device is given, and with a soft cap the
    tanh that their gradient needs."""
    rows = max(1, HeadSizes.on(product.device).block // product.shape[1])
    for start in range(0, product.shape[0], rows):
        block = slice(start, start + rows)
        logits, tanh = product[block].to(dtype, copy=True), None
        if options.softcap is not None:
            tanh = logits.mul_(options.scale / options.softcap).tanh_().clone()
            logits.mul_(options.softcap / options.temperature)
        elif options.factor != 1:
            logits.mul_(options.factor)
        yield block, logits, tanh


def _add_gradient(total: GradientSum | Tensor, product: Tensor, hidden: Tensor) -> None:
    """Add a chunk of tokens to the weight's gradient `[V, d]`, given the gradient of its products `[N, V]` and its
    hidden states `[N, d]`."""
    rows = max(1, HeadSizes.on(hidden.device).gradient // hidden.shape[1])
    for start in range(0, product.shape[1], rows):
        gradient = product[:, start : start + rows].t() @ hidden
        if isinstance(total, Tensor):
            accumulate(total[start : start + rows], gradient, 1.0, add=True)
        else:
            total.add(gradient, start)

"""The compiled CPU kernels as methods on tensors. The formulas are in the C++ files of this folder.

For any other device than the CPU they are neither built nor loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

#: Sizes that the elementwise kernels take are multiples of this.
VECTOR = 16
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


class _Data:
    """The type of an argument that is a tensor, of which the kernel gets the address, or None."""

    @classmethod
    def from_param(cls, tensor: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


_TYPES: dict[str, Any] = {"t": _Data, "i": ctypes.c_int64, "d": ctypes.c_double, "f": ctypes.c_float}
#: The arguments of each kernel, by the letters of their types. The number of threads comes after them.
_ANY_DTYPE = {
    "write": "tttttiiiiiii",
    "varlen_attn": "ttttttttiiiiiiiid",
    "sample": "ttttttttiii",
}
_BF16_AND_FP32 = {
    "rms_norm": "ttttiid",
    "rms_norm_backward": "ttttttiid",
    "rotate": "tttiiii",
    "silu_mul": "ttti",
    "silu_mul_backward": "ttttti",
    "gather": "tttiiii",
    "scatter": "tttiiiii",
    "scatter_add": "tttiiii",
    "softmax": "tttiiiiiiif",
    "softmax_rows": "ttiifttt",
    "softmax_rows_backward": "ttiiftttt",
}
_BF16 = {
    "accumulate": "ttifi",
    "adamw": "tttttiifffffffi",
}


class Kernels:
    """The kernels for one dtype. Tensors are contiguous and of that dtype where nothing else is said; sizes of rows are
    multiples of 16. All but `attend` and `sample` are for bf16 and fp32, `accumulate` and `adamw` for bf16."""

    def __init__(self, compiled: ctypes.CDLL, dtype: torch.dtype) -> None:
        names = dict(_ANY_DTYPE)
        if dtype != torch.float64:
            names |= _BF16_AND_FP32
        if dtype == torch.bfloat16:
            names |= _BF16
        self._functions: dict[str, Callable[..., Any]] = {}
        for name, letters in names.items():
            self._functions[name] = function = compiled[f"verl_{name}_{_SUFFIXES[dtype]}"]
            function.argtypes = [*map(_TYPES.__getitem__, letters), ctypes.c_int]
            function.restype = None

    def _run(self, name: str, *arguments: Tensor | float | None) -> None:
        self._functions[name](*arguments, torch.get_num_threads())

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        """`x += delta`, then `out = weight * x / rms(x)`; `[T, d]`, weight `[d]`."""
        self._run("rms_norm", x, delta, weight, out, *x.shape, eps)

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, grad: Tensor, to_x: Tensor, to_weight: Tensor, out: Tensor
    ) -> None:
        """For the gradient `grad` of the norm's output: `to_x` and `to_weight` (`[d]`, fp32) grow by the gradients of
        input and weight, and `out` becomes the norm's output again."""
        self._run("rms_norm_backward", x, weight, grad, to_x, out, to_weight, *x.shape, eps)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotary embedding in place: `x` `[T, H, D]`, halves rotated against each other; cos, sin `[T, R]`, R <= D."""
        self._run("rotate", x, cos, sin, *x.shape, cos.shape[1])

    def silu_mul(self, gate: Tensor, up: Tensor, out: Tensor) -> None:
        """`out = silu(gate) * up`; `out` may be `gate`."""
        self._run("silu_mul", gate, up, out, gate.numel())

    def silu_mul_backward(self, gate: Tensor, up: Tensor, grad: Tensor, to_gate: Tensor, to_up: Tensor) -> None:
        """For the gradient `grad` of the output: the gradients of `gate` and `up`; `grad` becomes the output again."""
        self._run("silu_mul_backward", gate, up, grad, to_gate, to_up, gate.numel())

    def softmax_rows(
        self, logits: Tensor, targets: Tensor, alpha: float, log_probs: Tensor, norms: Tensor, entropies: Tensor | None
    ) -> None:
        """Of softmax(alpha * logits), `[N, V]`: log-probs of targets `[N]`, logs of the sums, entropies; all fp32."""
        self._run("softmax_rows", logits, targets, *logits.shape, alpha, log_probs, norms, entropies)

    def softmax_rows_backward(
        self,
        logits: Tensor,
        targets: Tensor,
        alpha: float,
        norms: Tensor,
        entropies: Tensor | None,
        to_log_probs: Tensor,
        to_entropies: Tensor | None,
    ) -> None:
        """`logits` become their gradient, given the gradients of log-probs and entropies `[N]`."""
        gradients = (norms, entropies, to_log_probs, to_entropies)
        self._run("softmax_rows_backward", logits, targets, *logits.shape, alpha, *gradients)

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """`[B, H, L, D]`: the heads of `x` `[T, H, D]` at `index` `[B, L]`; zeros where that is -1."""
        (rows, length), (_, heads, size) = index.shape, x.shape
        out = x.new_empty((rows, heads, length, size))
        self._run("gather", x, index, out, rows, length, heads, size)
        return out

    def scatter(self, x: Tensor, index: Tensor, out: Tensor, start: int) -> None:
        """`out` `[T, H, D]` at `index[:, start : start + L]` becomes `x` `[B, H, L, D]`; indices are unique."""
        rows, heads, length, size = x.shape
        self._run("scatter", x, index[:, start:], out, rows, length, index.shape[1], heads, size)

    def scatter_add(self, x: Tensor, index: Tensor, total: Tensor) -> None:
        """`total` `[T, H, D]`, fp32, grows at `index` `[B, L]` by `x` `[B, H, L, D]`, row after row."""
        rows, heads, length, size = x.shape
        self._run("scatter_add", x, index, total, rows, length, heads, size)

    def softmax(
        self,
        scores: Tensor,
        before: Tensor,
        own_start: int,
        first: int,
        window: int,
        scale: float,
        gradients: Tensor | None,
    ) -> None:
        """`scores` `[B, H, L, M]` become probabilities, and `gradients`, if given, gradients of the scores.

        Query i, the `first + i`-th of its row b, sees the keys up to `before[b]` and those from `own_start` up to
        itself; of these the last `window`.
        """
        self._run("softmax", scores, gradients, before, *scores.shape, own_start, first, window, scale)

    def accumulate(self, total: Tensor, x: Tensor, scale: float, add: bool) -> None:
        """fp32 `total += scale * x`, or without `add` `total = scale * x`."""
        self._run("accumulate", total, x, x.numel(), scale, int(add))

    def adamw(
        self, live: Tensor, remainder: Tensor, first: Tensor, second: Tensor, gradient: Tensor, *,
        seed: int, gradient_scale: float, beta1: float, beta2: float, step_size: float, second_scale: float, eps: float,
        decay: float,
    ) -> None:  # fmt: skip
        """One step of `training.adamw`: weight bf16, remainder int16, moments bf16 or fp32, gradient fp32."""
        tensors = (live, remainder, first, second, gradient)
        numbers = (gradient_scale, beta1, beta2, step_size, second_scale, eps, decay)
        self._run("adamw", *tensors, live.numel(), seed, *numbers, int(first.dtype == torch.bfloat16))

    def sample(
        self, logits: Tensor, uniforms: Tensor, inverse_temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens `[N]` int64 and log-probs `[N]` fp64 for logits `[N, V]`, as `rollout.sampler` has them."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64)
        log_probs = torch.empty(len(logits), dtype=torch.float64)
        columns = (uniforms, inverse_temperature, top_k, top_p, min_p, tokens, log_probs)
        self._run("sample", logits, *columns, *logits.shape, logits.stride(0))
        return tokens, log_probs

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Put `key` and `value` `[T, K, D]` into `slots` `[T]` of a layer of the cache, see `rollout.kv_cache`."""
        strides = (*key.stride()[:2], *value.stride()[:2])
        self._run("write", key, value, keys, values, slots, len(slots), *strides, *key.shape[1:])

    def varlen_attn(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        cu_seq_q: Tensor,
        seqused_k: Tensor,
        block_table: Tensor,
        shared: Tensor,
        window: int,
        scale: float,
        kv_heads: int,
    ) -> None:
        """`rollout.attention.varlen_attn` into `out`, over a layer of the cache; `window` 0: none."""
        sizes = (*block_table.shape, *query.stride()[:2], query.shape[1], kv_heads, query.shape[2])
        tables = (cu_seq_q, seqused_k, block_table, shared)
        self._run("varlen_attn", query, out, keys, values, *tables, *sizes, window, scale)


@lru_cache(maxsize=8)
def kernels(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels for tensors of this dtype and device (bf16, fp32 and fp64 on CPU), or None for others, or if they
    cannot be built."""
    if device.type != "cpu" or dtype not in _SUFFIXES:
        return None
    from verl.kernels.build import library

    compiled = library()
    return None if compiled is None else Kernels(compiled, dtype)


def layer_kernels(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels for the steps between the matrix products of layers and head, in bf16 and fp32; or None."""
    return None if dtype == torch.float64 else kernels(dtype, device)


def accumulate(total: Tensor, x: Tensor, scale: float, add: bool) -> None:
    """`total += scale * x`, or without `add` `total = scale * x`; of one shape."""
    if x.dtype == torch.bfloat16 and total.dtype == torch.float32 and x.numel() % VECTOR == 0:
        compiled = kernels(x.dtype, x.device) if x.is_contiguous() and total.is_contiguous() else None
        if compiled is not None:
            compiled.accumulate(total, x, scale, add)
            return
    if add:
        total.add_(x, alpha=scale)
    else:
        total.copy_(x).mul_(scale)

"""The compiled CPU kernels, called with tensors. The formulas are in the C++ files of this folder.

For any other device than the CPU they are neither built nor loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

#: Sizes that the elementwise kernels take are multiples of this.
VECTOR = 16
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_TYPES: dict[str, Any] = {"t": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double, "f": ctypes.c_float}
# The arguments of each kernel, by the letters of their types. A tensor (t) is contiguous and of the kernels' dtype
# where nothing else is said; where "or None" is said, it may be left out. Sizes of rows are multiples of `VECTOR`.
_ANY_DTYPE = {
    # key, value `[T, K, D]`, which are put into slots `[T]` of a layer of the cache, keys, values, see
    # `rollout.embedded.kv_cache`; slots; T, strides of T and K of key and of value, K, D
    "write": "tttttiiiiiii",
    # query `[T, H, D]`, out, keys and values of a layer, cu_seq_q, seqused_k, block_table `[N, B]`, shared; N, B,
    # strides of T and H of query, H, K, D, window (0: none), scale: `rollout.embedded.attention.varlen_attn`
    "varlen_attn": "ttttttttiiiiiiiid",
    # logits `[N, V]`, fp64 `[N]` uniforms and inverse temperatures, int64 top_k, fp64 top_p and min_p; the tokens,
    # int64, and log-probs, fp64; N, V, stride of N: `rollout.embedded.sampler.sample`
    "sample": "ttttttttiii",
}
_BF16_AND_FP32 = {
    # x `[T, d]`, delta or None, weight `[d]`, out; T, d, eps: `x += delta`, then `out = weight * x / rms(x)`
    "rms_norm": "ttttiid",
    # x, weight, the gradient of the norm's output, to_x, out, to_weight `[d]` fp32; T, d, eps: to_x and to_weight grow
    # by the gradients of input and weight, and out becomes the norm's output again
    "rms_norm_backward": "ttttttiid",
    # x `[T, H, D]`, cos, sin `[T, R]`, R <= D; T, H, D, R: x is rotated, halves against each other
    "rotate": "tttiiii",
    # gate, up, out; their size: `out = silu(gate) * up`; out may be gate
    "silu_mul": "ttti",
    # gate, up, the gradient of the output, to_gate, to_up; their size: the gradient becomes the output again
    "silu_mul_backward": "ttttti",
    # x `[T, H, D]`, index `[B, L]`, out `[B, H, L, D]`; B, L, H, D: the heads at the index, zeros where it is -1
    "gather": "tttiiii",
    # x `[B, H, L, D]`, index from the first of L columns on, out `[T, H, D]`; B, L, columns of the whole index, H, D:
    # out becomes x there; indices are unique
    "scatter": "tttiiiii",
    # x `[B, H, L, D]`, index `[B, L]`, total `[T, H, D]` fp32; B, L, H, D: total grows by x, row after row
    "scatter_add": "tttiiii",
    # scores `[B, H, L, M]`, gradients or None, before `[B]`; B, H, L, M, own_start, first, window, scale: scores become
    # probabilities, and gradients those of the scores. Query i, the `first + i`-th of its row b, sees the keys up to
    # `before[b]` and those from own_start up to itself; of these the last `window`
    "softmax": "tttiiiiiiif",
    # logits `[N, V]`, targets `[N]`; N, V, alpha; all `[N]` fp32: log-probs of the targets in softmax(alpha * logits),
    # logs of the sums, entropies or None
    "softmax_rows": "ttiifttt",
    # the same up to alpha; logs of the sums, entropies or None, the gradients of log-probs and of entropies or None:
    # logits become their gradient
    "softmax_rows_backward": "ttiiftttt",
}
_BF16 = {
    # total fp32, x; their size, scale, add: `total += scale * x`, or where add is 0 `total = scale * x`
    "accumulate": "ttifi",
    # weight, remainder int16, moments (two, bf16 or fp32), gradient fp32; their size, seed, gradient_scale, beta1,
    # beta2, step_size, second_scale, eps, decay, whether moments are bf16: a step of `training.adamw`
    "adamw": "tttttiifffffffi",
}


class Kernels:
    """The kernels for one dtype, each a method with the arguments of the tables above."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., None]: ...

    def __init__(self, compiled: ctypes.CDLL, dtype: torch.dtype) -> None:
        names = dict(_ANY_DTYPE)
        if dtype != torch.float64:
            names |= _BF16_AND_FP32
        if dtype == torch.bfloat16:
            names |= _BF16
        for name, letters in names.items():
            function = compiled[f"verl_{name}_{_SUFFIXES[dtype]}"]
            function.argtypes = [*map(_TYPES.__getitem__, letters), ctypes.c_int]
            function.restype = None
            setattr(self, name, partial(self._run, function))

    def _run(self, function: Callable[..., None], *arguments: Tensor | float | None) -> None:
        plain = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
        function(*plain, torch.get_num_threads())


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
            compiled.accumulate(total, x, x.numel(), scale, add)
            return
    if add:
        total.add_(x, alpha=scale)
    else:
        total.copy_(x).mul_(scale)

"""Which kernel of flash attention there is for sequences of different lengths, if any: torch's own
(`torch.nn.attention.varlen.varlen_attn`), or flash-attn's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

_LARGEST_HEAD = 256
_DTYPES = (torch.float16, torch.bfloat16)


def flash_attention(value: Tensor, *, paged: bool = False) -> Callable[..., Tensor] | None:
    """The kernel for values such as these (`[..., K, D]`), in half precision on CUDA or ROCm: torch's own (for keys in
    pages from 2.12 on), else the kernel of the package flash-attn where it is installed.

    Args:
        paged: keys and values are pages of a cache.
    """
    size = value.shape[-1]
    if value.device.type != "cuda" or value.dtype not in _DTYPES or size > _LARGEST_HEAD or size % 8:
        return None
    return _torch_kernel(paged) or _package_kernel()


def _torch_kernel(paged: bool) -> Callable[..., Tensor] | None:
    from torch.nn.attention.varlen import varlen_attn

    whole: Callable[..., Any] = varlen_attn
    known = (varlen_attn.__kwdefaults__ or {}).keys()
    if paged and not {"seqused_k", "block_table", "num_splits"} <= known:
        return None
    if "enable_gqa" in known:
        return whole
    # One without that setting takes fewer heads of keys than of queries unasked.
    return lambda *args, enable_gqa=False, **kwargs: whole(*args, **kwargs)


def takes_splits(kernel: Callable[..., Tensor], keys: Tensor) -> bool:
    """Whether it can be kept from splitting a sequence's keys by how many sequences there are; of pages such as `keys`.

    torch 2.12 has `num_splits` in the signature, and its kernel refuses it; it does not split keys in pages by itself.
    So a call of two rows says it, once a process.
    """
    is_named = "num_splits" in (getattr(kernel, "__kwdefaults__", None) or {})
    return is_named and _runs_unsplit(kernel, keys.shape[1], keys.shape[-1], keys.dtype, keys.device)


@cache
def _runs_unsplit(kernel: Callable[..., Tensor], page: int, size: int, dtype: torch.dtype, device: Any) -> bool:
    keys, query = (torch.zeros(shape, dtype=dtype, device=device) for shape in ((1, page, 1, size), (2, 1, size)))
    ends = torch.arange(3, dtype=torch.int32, device=device)
    pages = {"seqused_k": ends.diff(), "block_table": torch.zeros(2, 1, dtype=torch.int32, device=device)}
    try:
        kernel(query, keys, keys, ends, ends, 1, 1, scale=1.0, window_size=(-1, 0), num_splits=1, **pages)
    except RuntimeError as error:
        if "num_splits" not in str(error):
            raise
        return False
    return True


@cache
def _package_kernel() -> Callable[..., Tensor] | None:
    """flash-attn's, with the arguments of torch's."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    # A release that splits the keys of a page table, as torch's does, writes most sequences to the wrong place.
    unsplit = {"num_splits": 1} if "num_splits" in signature(flash_attn_varlen_func).parameters else {}

    def kernel(
        *args: Any,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, 0),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,  # it reads the lengths of a paged cache from `cu_seq_k`
        block_table: Tensor | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {"softmax_scale": scale, "causal": window_size[1] == 0, "window_size": window_size}
        if block_table is not None:
            options |= {"block_table": block_table, **unsplit}
        # By default its backward adds by atomics.
        out: Tensor = flash_attn_varlen_func(*args, **options, deterministic=True)
        return out

    return kernel

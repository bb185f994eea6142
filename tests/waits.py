"""Finds what makes the host wait for a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_aten = torch.ops.aten
#: Each reads numbers of a tensor on the host; `index` and `index_put` do for a mask.
_READS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.repeat_interleave.Tensor,
    _aten.equal.default,
    _aten.unique_consecutive.default,
    _aten._unique2.default,
}
_INDEX = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
#: On CPU these are not dispatched.
_METHODS = ("tolist", "numpy", "cpu")


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [
            i for i in (args[1] if func in _INDEX else ()) if i is not None and i.dtype in (torch.bool, torch.uint8)
        ]
        if func in _READS or masks:
            raise AssertionError(f"{func} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waits() -> Iterator[None]:
    """Raises AssertionError where the host would wait for the device; inside `unwatched` it does not."""

    def refuse(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch._C._len_torch_dispatch_stack():
                raise AssertionError(f"Tensor.{name}() makes the host wait for the device")
            return original(self, *args, **kwargs)

        return method

    with patch.multiple(torch.Tensor, **{name: refuse(name) for name in _METHODS}), _Watch():
        yield


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose inside is no affair of `no_waits`: a kernel, or the copy that is counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call

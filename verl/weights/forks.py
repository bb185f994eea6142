"""Tensors that a fork of this process does without: those that training made, none of the user's.

A fork shares this process's memory until one of the two writes to it. Weights that are trained here would be copied,
page by page, for a process that never reads them: so it gives its share of them back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

#: Bytes of a tensor above which it is worth it.
_LARGE = 1 << 20
_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], Iterable[Any]]] = weakref.WeakKeyDictionary()


def no_forks(owner: T, tensors: Callable[[T], Iterable[Any]]) -> None:
    """Have forks of this process do without the tensors of an object, as `tensors(owner)` gives them then."""
    _owners[owner] = tensors


def release() -> None:
    """In a fork: give back the memory of these tensors."""
    for owner, tensors in list(_owners.items()):
        for weight in tensors(owner):
            for tensor in (weight, weight.grad):
                with suppress(Exception):  # what cannot be given back stays
                    storage: Any = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                    if storage.device.type == "cpu" and storage.nbytes() > _LARGE:
                        storage.resize_(0)

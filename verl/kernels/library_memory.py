"""Limits on the memory that libraries keep for themselves. Imported without torch."""

from __future__ import annotations

import ctypes
import os
import sys

# Entries of the two caches of compiled products: oneDNN's and that of torch's interface to it.
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_ENTRIES = "128"
_M_ARENA_MAX = -8


def limit_library_memory() -> None:
    """Keep a process's memory flat over thousands of steps. To be called before the first product in half precision,
    and best before any library starts threads; later calls change nothing.

    oneDNN keeps code for every shape of a half-precision product that it has met, up to half a megabyte each and 1,024
    of them: the shapes of training are new in each step. What the environment says already stays.

    glibc's allocator serves all threads from one arena: that of the compute thread would fragment.
    """
    for name in _CACHES:
        os.environ.setdefault(name, _ENTRIES)
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Give the free pages of glibc's heap back to the system. Called after every update, whose tensors have sizes of
    their own: freed memory in pieces between others would let the heap grow for dozens of steps.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

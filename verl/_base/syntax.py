"""Python source as syntax trees, in any thread."""

from __future__ import annotations

import ast
from typing import Any


def syntax_tree(source: str, mode: str = "exec") -> Any:
    """`ast.parse`, again where another thread's came between: Python 3.11 counts the depth of a tree for all threads at
    once, and raises SystemError where the finalizer of an object lets another thread parse meanwhile."""
    for _ in range(20):  # more than other threads can spoil in a row
        try:
            return ast.parse(source, mode=mode)
        except SystemError as error:
            mismatch = error
    raise mismatch

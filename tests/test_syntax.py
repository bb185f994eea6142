"""Trees of Python source, while other threads parse."""

from __future__ import annotations

import ast
import gc
import threading
from collections.abc import Iterator

import pytest

from verl._base.syntax import syntax_tree

SOURCE = "x = [[[[(1, 2, {3: (4, 5)})]]]]\n" * 400


class Parses:
    """Garbage whose finalizer waits for a thread that parses."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        other = threading.Thread(target=ast.parse, args=("x = 1",))
        other.start()
        other.join()


@pytest.fixture
def interrupted() -> Iterator[None]:
    """The next allocations collect garbage, and let another thread parse."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    Parses()
    gc.set_threshold(500)
    gc.enable()
    yield
    gc.set_threshold(*thresholds)


def test_a_thread_that_parses_meanwhile_spoils_nothing(interrupted: None) -> None:
    assert len(syntax_tree(SOURCE).body) == 400


def test_what_is_no_python_is_told_as_ever() -> None:
    with pytest.raises(SyntaxError):
        syntax_tree("def")

"""Calls beside what this thread does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def beside(function: Callable[..., T], *args: Any, name: str = "verl-beside") -> Future[T]:
    """Call a function in a thread of its own. That is a daemon: a call which hangs does not keep the process from
    ending."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # raised where the result is taken
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future

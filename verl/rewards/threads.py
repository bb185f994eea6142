"""Calls of a user's function in a thread of this process, which is left behind when a call is late."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from typing import Any

from verl.errors import RewardError
from verl.rewards.calls import TURN, FunctionCaller, Host, serve
from verl.rewards.scores import Call, Score
from verl.user_calls import MAX_HUNG, watching


class _Thread(Host):
    def __init__(self, function: Callable[..., Any], is_awaited: bool, name: str) -> None:
        super().__init__()
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        requests = iter(self._requests.get, None)
        self.thread = threading.Thread(target=serve, args=(function, is_awaited, requests, self.answer), name=name)
        self.thread.daemon = True
        self.thread.start()

    def send(self, number: int, *request: Any) -> None:
        self._requests.put((number, *request))

    def end(self) -> None:
        self._requests.put(None)


class ThreadCaller(FunctionCaller):
    """Calls in a daemon thread."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function, name)
        self.ends_late = self.is_async
        self.slots = self.slots if self.is_async else TURN
        self._hung: set[threading.Thread] = set()
        self._timeout = math.inf

    async def call(self, call: Call, timeout: float) -> list[Score] | None:
        self._timeout = timeout
        return await super().call(call, timeout)

    def _start(self) -> Host:
        name = f"reward {self.name}"
        return _Thread(watching(self.function, name, self._timeout), self.is_async, name)

    def _leave(self, host: _Thread) -> None:
        self._end(host)
        self._hung = {thread for thread in {*self._hung, host.thread} if thread.is_alive()}
        if len(self._hung) >= MAX_HUNG:
            raise RewardError(
                f"reward function '{self.name}' hangs: {len(self._hung)} calls have not returned and cannot be "
                "stopped. Fix it, or leave out process=False, so that it runs in a process that can be killed"
            )

"""Calls of a user's function in threads of this process, which are left behind when a call is late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from verl.errors import RewardError
from verl.rewards.calls import TURN, WATCHED, FunctionCaller
from verl.rewards.generators import leave_calls
from verl.rewards.scores import Call, Score, call_async, call_plain
from verl.user_calls import HungError, LateError, UserCode


class ThreadCaller(FunctionCaller):
    """Calls in daemon threads."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function, name)
        self.ends_late = self.is_async
        self.slots = self.slots if self.is_async else TURN
        self._code = UserCode(f"reward {name}")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, call: Call, timeout: float) -> list[Score] | None:
        try:
            if self.is_async:
                is_watched = next(self._numbers) <= WATCHED
                return await self._code.call(timeout, call_async, self.function, call, is_watched)  # type: ignore[no-any-return]
            return await self._code.call(timeout, self._call_plain, call)  # type: ignore[no-any-return]
        except LateError:
            if not self.is_async:
                leave_calls()
            return None
        except HungError as error:
            raise RewardError(
                f"reward function '{self.name}' hangs: {error}. Fix it, or leave out process=False, so that it runs in "
                "a process that can be killed"
            ) from None

    def _call_plain(self, call: Call) -> list[Score]:
        loop, self._loop = self._loop or asyncio.new_event_loop(), None  # a late call goes on with its own
        asyncio.set_event_loop(loop)
        scores = call_plain(self.function, call, loop)
        self._loop = loop
        return scores

    def take_counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None

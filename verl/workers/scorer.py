"""A reward worker: calls one function, one call after the other, in a process that may hang, crash or be killed.

It is sent "function" (first: a file, or the function pickled) and "call" (pickled arguments), and sends "ready" and
"scores". Only the run's own driver can send to it, and what it sends back is JSON.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from typing import Any

from verl.errors import RewardError
from verl.rewards.loading import digest, load_function, split_spec
from verl.rewards.scores import call_plain
from verl.workers.channel import Message


class Scorer:
    """See the module."""

    is_busy = False

    def __init__(self, send: Callable[..., None]) -> None:
        self.send = send
        self.function: Callable[..., Any] | None = None
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

    def step(self) -> None: ...

    def on_function(self, message: Message) -> None:
        spec = message.head.get("spec")
        if spec and digest(spec) != message.head["digest"]:
            raise RewardError(
                f"{split_spec(spec)[0]} is not what it was when this run began, or not what the driver's machine has, "
                "and one run has one reward: put it back, or start again to go on with the new one"
            )
        self.function = load_function(spec) if spec else pickle.loads(message.data)
        self.send("ready")

    def on_call(self, message: Message) -> None:
        assert self.function is not None
        args, kwargs = pickle.loads(message.data)
        began = time.perf_counter()
        scores = call_plain(self.function, args, kwargs, message.head["rows"], self.loop)
        seconds = time.perf_counter() - began
        self.send("scores", job=message.head["job"], scores=[s.as_json() for s in scores], seconds=seconds)

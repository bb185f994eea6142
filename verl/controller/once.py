"""What happens on one rank of a torchrun job although the driver is replicated: user rewards, files, logs."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from verl.controller.ranks import is_main, torchrun_ranks, who
from verl.errors import ClusterError

T = TypeVar("T")
# How often each call has been made, by a hash of its name: calls of one name meet in the order they are made in.
_seen: Counter[int] = Counter()


async def once(about: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which rank 0 alone does. It goes through the job's key-value store and not through a
    collective, since calls overlap, and end in another order on another rank.

    Args:
        about: names the call, the same on all ranks.

    Raises:
        Exception: what `work` raised on rank 0, on every rank.
        ClusterError: rank 0 died, or did not come to it in time.
    """
    ranks = torchrun_ranks()
    if ranks == 1:
        return await work()
    from verl.controller.world import here  # which takes torch along

    world = here()
    name = hashlib.sha256(about.encode()).digest()[:8]
    _seen[number := int.from_bytes(name, "big")] += 1
    key = f"verl/once/{name.hex()}/{_seen[number]}"
    if is_main():
        try:
            value = await work()
        except Exception as error:
            world.store.set(key, pickle.dumps((None, portable(error))))
            raise
        world.store.set(key, pickle.dumps((value, None)))
        return value
    value, failure = pickle.loads(await world.told(key, about))
    if world.store.add(f"{key}/read", 1) == ranks - 1:
        world.store.delete_key(key)
        world.store.delete_key(f"{key}/read")
    if failure is not None:
        raise failure
    return value


def on_main(about: str, work: Callable[[], T]) -> T:
    """`once` for synchronous work that no other call overlaps, such as writing a file."""

    async def call() -> T:
        return work()

    return work() if torchrun_ranks() == 1 else asyncio.run(once(about, call))


def portable(error: Exception, by: Any = pickle) -> Exception:
    """The error, or its text if it cannot travel; `by`: the pickle that it travels by."""
    try:
        by.loads(by.dumps(error))
    except Exception:  # whatever a class of the user's own raises when it is made anew
        return ClusterError(f"{who()}: {type(error).__name__}: {error}")
    return error

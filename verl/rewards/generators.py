"""Random numbers in users' functions depend on the samples of a call, not on the calls before it: the global generators
of `random`, NumPy and torch are seeded for each call of a plain function. What that does not reach is noted."""

from __future__ import annotations

import functools
import os
import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from verl._host.user_code import NOT_THE_USERS

#: Of the call of a user's function that this is inside of; None: of none.
notes_here: ContextVar[list[str] | None] = ContextVar("notes_here", default=None)
#: Whether the generators' states are kept for what else this process does: it is no process of a function's own.
keeps_states = True
_lock = threading.RLock()
#: The states of the generators before the outermost seeded call; None: no call is under way.
_before: list[Any] | None = None


@contextmanager
def seeded(seed: int | None) -> Iterator[list[str]]:
    """Inside, the global generators begin from a seed; afterwards they are as before. None: they are left alone.

    Yields:
        The notes on the call of a user's function that is made inside.
    """
    global _before
    _watch()
    notes: list[str] = []
    token, mine = notes_here.set(notes), None
    if seed is not None:
        with _lock:
            if keeps_states and _before is None:
                mine = _before = [state() for state, *_ in _generators()]
            for *_, begin in _generators():
                begin(seed)
    try:
        yield notes
    finally:
        notes_here.reset(token)
        with _lock:
            if mine is not None and mine is _before:  # else the call was left behind, and another may have begun since
                leave_calls()


def leave_calls() -> None:
    """The calls under way are over, or late and left behind: the generators are as they were before them."""
    global _before
    with _lock:
        for (_, restore, _), state in zip(_generators(), _before or (), strict=False):
            restore(state)
        _before = None


@contextmanager
def watching_draws(notes: list[str]) -> Iterator[None]:
    """A note says if what is inside draws from the global generators."""
    before = None if notes else _states()
    yield
    if before not in (None, _states()):
        notes.append("draws from the global random generators, which are seeded for plain functions alone")


def _generators() -> list[tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]]:
    """How the state of each global generator is read, set, and begun from a seed."""
    import numpy as np

    generators: list[Any] = [
        (random.getstate, random.setstate, random.seed),
        (np.random.get_state, np.random.set_state, np.random.seed),
    ]
    if "torch" in sys.modules:
        import torch

        generators.append((torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed))
        if torch.cuda.is_initialized():  # never in a fork
            generators.append((torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all, torch.cuda.manual_seed_all))
    return generators


def _states() -> list[bytes]:
    states = (state() for state, *_ in _generators()[:3])  # a tensor pickled twice may differ
    return [pickle.dumps(state.tolist() if hasattr(state, "tolist") else state) for state in states]


@functools.cache
def _watch() -> None:
    """Have it noted where a generator is made without a seed: `Random.seed` gets None, NumPy asks for entropy."""
    seed, entropy = random.Random.seed, random._urandom  # type: ignore[attr-defined]

    def watched_seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        if a is None:
            _note()
        seed(self, a, version)

    def watched_entropy(size: int) -> bytes:
        _note()
        return entropy(size)  # type: ignore[no-any-return]

    random.Random.seed = watched_seed  # type: ignore[method-assign]
    random._urandom = watched_entropy  # type: ignore[attr-defined]


def _note() -> None:
    if (notes := notes_here.get()) is None:
        return
    between = ("random", "secrets", __name__)
    made_by = (one for one in traceback.walk_stack(None) if one[0].f_globals.get("__name__") not in between)
    frame, line = next(made_by)
    if not frame.f_code.co_filename.startswith(NOT_THE_USERS):  # a library's may be for the names of files
        notes.append(f"makes a random generator without a seed at {os.path.basename(frame.f_code.co_filename)}:{line}")

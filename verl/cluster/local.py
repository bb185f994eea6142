"""The executor of one process: a group of one worker, called directly, so that breakpoints work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

from verl._host.device import claim
from verl.cluster.rank_context import RankContext, check_answer, check_call, dispatch_of, name_of, noted, timed

W = TypeVar("W")


class LocalGroup(Generic[W]):
    """A worker group of one rank in this process.

    The worker is made at the first call, not before: a handle is cheap until it is used.
    """

    size = 1

    def __init__(self, role: str, recipe: partial[W], device: str, meshes: Iterable[str]) -> None:
        self.role = role
        self._meshes = tuple(meshes)
        self._recipe = recipe
        self._context = RankContext(role=role, device=device)
        claim(device)
        self._worker: W | None = None

    @property
    def worker(self) -> W:
        if self._worker is None:
            self._worker = self._recipe(context=self._context)
        return self._worker

    def call(self, method: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the worker. An exception keeps its type and says in which role it arose."""
        name = name_of(method)
        what = f"{self.role}.{name}"
        with noted(f"in role '{self.role}', call '{name}'"), timed(what):
            spec = dispatch_of(type(self.worker), name)
            check_call(what, spec, self._meshes, args)
            answer = getattr(self.worker, name)(*args, **kwargs)
            if spec.collect == "rows":
                check_answer(what, 0, len(args[0]), answer)
            return None if spec.collect == "none" else answer

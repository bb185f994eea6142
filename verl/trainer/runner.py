"""How a trainer runs graphs: with its deadline, its models' slot and its timeline."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from verl.batch import Batch
from verl.cluster.controller import start
from verl.dataflow import loop
from verl.dataflow.calls import Slot
from verl.dataflow.graph import Graph
from verl.dataflow.groups import Groups
from verl.dataflow.nodes import SLOT
from verl.dataflow.result import Result
from verl.report.timeline import Span, TraceFile, spans_of
from verl.trainer.step import draw

logger = logging.getLogger(__name__)
T = TypeVar("T")
StepPart: TypeAlias = Callable[[Groups], Awaitable[Result]]


class GraphRunner:
    """Runs the graphs of one trainer.

    Args:
        deadline: seconds for one call of a node.
        shares_models: whether several graphs may run at once, whose nodes are then mutually exclusive on the models.
        timeline: where a trace of what worked when is written; None: nowhere.

    Attributes:
        spans: what worked when, and is in no step's record yet.
    """

    def __init__(self, *, deadline: float, shares_models: bool, timeline: str | Path | None) -> None:
        self.deadline = deadline
        self.spans: list[Span] = []
        self._slots = {SLOT: Slot()} if shares_models else {}
        self._trace = None if timeline is None else TraceFile(timeline)
        self._step = 0
        self._noting = threading.Lock()

    def begin_step(self, step: int) -> None:
        self._step = step

    def take_spans(self) -> list[Span]:
        """What a step's record counts: what has worked since the one before, between the two steps as well."""
        with self._noting:
            spans, self.spans = self.spans, []
        return spans

    def run(self, graph: Graph, batch: Batch, part: StepPart = draw, *, in_step: bool = True) -> Result:
        """Run a part of a step (`verl.trainer.step`) and wait for it; see `draw`."""
        return self.wait(self.draw(graph, batch, part, in_step=in_step))

    async def draw(self, graph: Graph, batch: Batch, part: StepPart = draw, *, in_step: bool = True) -> Result:
        """Samples with all that is read of them, or what another part of a step makes of them; on the event loop.
        `in_step`: not for an evaluation, whose work no step's record counts."""
        result = await part(Groups(graph, batch, deadline=self.deadline, slots=self._slots))
        self.add(spans_of(graph, result), in_step=in_step)
        return result

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work on the event loop."""
        start()
        return loop.run_sync(work)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin work on the event loop, beside what else goes on."""
        start()
        return loop.begin(work)

    def add(self, spans: Iterable[Span], *, in_step: bool = True) -> None:
        """Note what worked when; from any thread."""
        spans = list(spans)
        with self._noting:
            self.spans += spans if in_step else []
            for span in spans:
                logger.debug("step %d: %s (%s) took %.3f s", self._step, span.node, span.role, span.seconds)
            if self._trace is not None:
                self._trace.add(spans, self._step)

    def models_idle(self) -> AbstractContextManager[Any]:
        """No node works on the models inside."""
        return self._slots[SLOT].hold() if self._slots else nullcontext()

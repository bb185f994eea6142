"""The common part of a trainer's steps: deadlines, the lock of the models, the timeline."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from verl.dataflow.calls import DEADLINE, NodeLock, TimedCalls
from verl.dataflow.graph import Graph
from verl.report.timeline import Span, TraceFile

logger = logging.getLogger(__name__)


class Run:
    """Runs the parts of steps.

    Args:
        deadline: seconds for one call of a node.
        timeline: where a trace of what worked when is written; None: nowhere.

    Attributes:
        spans: what worked when, and is in no step's record yet.
        models: held by what works on the models of this process.
        step: the number of the step, in the log and the trace.
    """

    def __init__(self, *, deadline: float = DEADLINE, timeline: str | Path | None = None) -> None:
        self.deadline, self.step = deadline, 0
        self.spans: list[Span] = []
        self.models = NodeLock()
        self._trace = None if timeline is None else TraceFile(timeline)
        self._noting = threading.Lock()

    @asynccontextmanager
    async def calls(self, graph: Graph | None = None, *, in_step: bool = True) -> AsyncIterator[TimedCalls]:
        """The calls of one part, which have ended when it does. `in_step`: see `verl.trainer.step.draw`."""
        calls = TimedCalls(self.deadline, {} if graph is None else graph.needs)
        try:
            yield calls
        finally:
            # Until sources are closed and, after a failure, running calls have ended.
            left = [*(job for job in calls.running if not job.result.cancel()), *calls.closing]
            if left:
                done, _ = await asyncio.wait([asyncio.wrap_future(job.result) for job in left], timeout=self.deadline)
                for future in done:
                    future.exception()
            for node in [] if graph is None else graph.nodes.values():
                if node.at_end is not None:
                    node.at_end()
        timings = calls.timings.items()
        spans = [Span(name, of.role, start, end - start) for name, of in timings for start, end in of.spans]
        self.add(spans, in_step=in_step)

    def add(self, spans: Iterable[Span], *, in_step: bool = True) -> None:
        """Note what worked when; from any thread."""
        spans = list(spans)
        with self._noting:
            self.spans.extend(spans if in_step else ())
            for span in spans:
                logger.debug("step %d: %s (%s) took %.3f s", self.step, span.node, span.role, span.seconds)
            if self._trace is not None:
                self._trace.add(spans, self.step)

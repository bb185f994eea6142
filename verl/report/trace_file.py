"""A Chrome trace of when each role worked, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl.durable import LineFile
from verl.report.timeline import Span


class TraceFile:
    """A file of trace events that is whole whenever it is looked at: one event a line, the closing bracket left out,
    which the format allows. Attempts of a run follow each other in it. Events that the disk does not take wait, and
    follow when it does; a trace never stops training."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._rows: dict[tuple[int, str], int] = {}
        self._lines = LineFile(self.path)
        self._lines.append()  # cuts what a crash amid a line has left
        if not self.path.is_file() or not self.path.stat().st_size:
            self._lines.append("[\n")

    def add(self, spans: Iterable[Span], step: int) -> None:
        """Write down the spans of a step. A process of the trace is a rank with its host, a thread of it a role."""
        events: list[dict[str, Any]] = []
        for span in spans:
            track = (span.rank, span.role)
            if track not in self._rows:
                self._rows[track] = len(self._rows)
                host = {"name": f"rank {span.rank} on {span.host}"}
                role = {"name": span.role}
                events += [
                    {"name": "process_name", "ph": "M", "pid": span.rank, "args": host},
                    {"name": "thread_name", "ph": "M", "pid": span.rank, "tid": self._rows[track], "args": role},
                ]
            events.append(
                {
                    "name": span.node,
                    "cat": span.role,
                    "ph": "X",
                    "ts": round(span.start * 1e6),
                    "dur": round(span.seconds * 1e6),
                    "pid": span.rank,
                    "tid": self._rows[track],
                    "args": {"step": step, "role": span.role, "rank": span.rank, "host": span.host},
                }
            )
        self._lines.append(*(json.dumps(event) + ",\n" for event in events))

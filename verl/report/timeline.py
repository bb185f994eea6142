"""When each role worked, and the busy share of each role."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from verl._base.durable import LineFile


class Span(NamedTuple):
    """A stretch of work: of which node, for which role, on which rank of it; in seconds since the epoch."""

    node: str
    role: str
    start: float
    seconds: float
    rank: int = 0
    host: str = socket.gethostname()


def busy_shares(spans: Iterable[Span], seconds: float) -> dict[str, float]:
    """`busy/<role>`: the share of `seconds` in which a rank of the role worked; its ranks' mean."""
    work: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        work[span.role, span.rank, span.host].append((span.start, span.start + span.seconds))
    shares = defaultdict(list)
    for (role, *_), stretches in work.items():
        shares[role].append(_covered(stretches) / max(seconds, 1e-9))
    return {f"busy/{role}": min(1.0, sum(ranks) / len(ranks)) for role, ranks in shares.items()}


def _covered(stretches: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(stretches):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


class TraceFile:
    """A Chrome trace of when each role worked, for chrome://tracing or ui.perfetto.dev.

    The file is whole whenever it is looked at: one event a line, the closing bracket left out, which the format allows.
    Attempts of a run follow each other in it. Events that the disk does not take wait, and follow when it does; a
    trace never stops training.
    """

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
                host, role = {"name": f"rank {span.rank} on {span.host}"}, {"name": span.role}
                events += [
                    {"name": "process_name", "ph": "M", "pid": span.rank, "args": host},
                    {"name": "thread_name", "ph": "M", "pid": span.rank, "tid": self._rows[track], "args": role},
                ]
            about = {"step": step, "role": span.role, "rank": span.rank, "host": span.host}
            when = {"ts": round(span.start * 1e6), "dur": round(span.seconds * 1e6)}
            where = {"pid": span.rank, "tid": self._rows[track]}
            events.append({"name": span.node, "cat": span.role, "ph": "X", **when, **where, "args": about})
        self._lines.append(*(json.dumps(event) + ",\n" for event in events))

"""When each role worked, and the busy share of each role."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from verl.dataflow.graph import Graph
from verl.dataflow.result import Result


class Span(NamedTuple):
    """A stretch of work: of which node, for which role, on which rank of it; in seconds since the epoch."""

    node: str
    role: str
    start: float
    seconds: float
    rank: int = 0
    host: str = socket.gethostname()


def spans_of(graph: Graph, result: Result) -> list[Span]:
    """What a run of a graph did, and when."""
    return [
        Span(name, graph.nodes[name].role or name, result.began + start, end - start)
        for name, timing in result.timings.items()
        for start, end in timing.spans
    ]


def busy_shares(spans: Iterable[Span], seconds: float) -> dict[str, float]:
    """`busy/<role>`: the share of so many seconds in which a rank of the role worked; its ranks' mean."""
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

"""A trace, read back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from verl.report.timeline import Span


def read_timeline(path: str | Path) -> list[Span]:
    """The spans of a trace, in the order they were written; a torn last line is left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "["
    spans = []
    for line in lines[1:]:
        try:
            event = json.loads(line.rstrip().rstrip(","))
        except ValueError:
            continue
        if event.get("ph") == "X":
            about = event["args"]
            spans.append(
                Span(event["name"], about["role"], event["ts"] / 1e6, event["dur"] / 1e6, about["rank"], about["host"])
            )
    return spans


def gaps(spans: Iterable[Span], role: str, at_least: float) -> list[tuple[float, float]]:
    """The (start, seconds) of each stretch between two spans of a role in which it did nothing for so long."""
    idle: list[tuple[float, float]] = []
    last: float | None = None
    for start, end in sorted((s.start, s.start + s.seconds) for s in spans if s.role == role):
        if last is not None and start - last >= at_least:
            idle.append((last, start - last))
        last = end if last is None else max(last, end)
    return idle

"""Draw the pictures of README and docs.

    python scripts/pictures.py           # docs/pictures/learning.svg, of the figures in docs/log.md

The figures are rows of a table "| run | before | after | gain, ... |" of the log: the first with controls.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LOG, LEARNING = ROOT / "docs" / "log.md", ROOT / "docs" / "pictures" / "learning.svg"
_ROW = re.compile(r"^\| ([^|]+) \| [\d.]+ % \| [\d.]+ % \| ([+-][\d.]+) \((-?[\d.]+) to (-?[\d.]+)\) \|", re.MULTILINE)
_LEFT, _WIDTH, _ROW_HEIGHT, _TOP = 190, 640, 30, 34
_LEAST, _MOST = -10, 45


class Gain(NamedTuple):
    """A run's gain in points, and the ends of its interval."""

    run: str
    value: float
    low: float
    high: float


def gains(log: str) -> list[Gain]:
    """The rows of the first table with controls."""
    tables = (_ROW.findall(part) for part in log.split("\n\n") if "at random" in part)
    return [Gain(run, *map(float, numbers)) for run, *numbers in next(filter(None, tables))]


def x_of(points: float) -> float:
    return _LEFT + (points - _LEAST) / (_MOST - _LEAST) * (_WIDTH - _LEFT - 20)


def drawn(rows: list[Gain]) -> str:
    """A dot and an interval for each run, as SVG that reads on a light and on a dark page."""
    height = _TOP + _ROW_HEIGHT * len(rows) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" role="img"><title>Gain in accuracy, points</title>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="20" fill="#222" font-weight="bold">Gain in accuracy on 400 held-out problems, points</text>',
    ]
    for points in range(0, _MOST, 10):
        lines.append(
            f'<line x1="{x_of(points):.1f}" x2="{x_of(points):.1f}" y1="{_TOP}" y2="{height - 26}" '
            f'stroke="{"#888" if points == 0 else "#ddd"}"/>'
            f'<text x="{x_of(points):.1f}" y="{height - 8}" fill="#444" text-anchor="middle">{points:+d}</text>'
        )
    for number, row in enumerate(rows):
        y = _TOP + _ROW_HEIGHT * (number + 0.5)
        is_control = "at random" in row.run
        seed = re.search(r"seed \d+", row.run)
        name = ("control, " if is_control else "") + (seed[0] if seed else row.run)
        color = "#999" if is_control else "#0a7d55"
        lines.append(
            f'<text x="10" y="{y + 4:.1f}" fill="#222">{name}</text>'
            f'<line x1="{x_of(row.low):.1f}" x2="{x_of(row.high):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{color}" '
            f'stroke-width="4"/><circle cx="{x_of(row.value):.1f}" cy="{y:.1f}" r="6" fill="{color}"/>'
            f'<text x="{x_of(row.high) + 10:.1f}" y="{y + 4:.1f}" fill="#222">{row.value:+.1f}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    LEARNING.parent.mkdir(exist_ok=True)
    LEARNING.write_text(drawn(gains(LOG.read_text(encoding="utf-8"))), encoding="utf-8")

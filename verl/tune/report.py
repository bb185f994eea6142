"""What a study came to: `best.yaml`, which `verl train` takes as it is, and `report.html`."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping
from pathlib import Path

from verl.config import to_yaml
from verl.durable import write_atomic
from verl.trainer.report import ASSETS
from verl.tune.study import Outcome, Search, best_of

_STYLE = """
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: 6px 12px; }
tr { border-bottom: 1px solid var(--line); } td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
tr.best { background: var(--good-bg); } td a { text-decoration: underline; }
"""


def write_results(search: Search, ended: Mapping[int, Outcome]) -> tuple[Path | None, Path]:
    """Write `best.yaml`, once a trial has finished, and `report.html` into the study's directory; returns both."""
    best = best_of(ended, search)
    settings = None
    if best is not None:
        settings = search.out / "best.yaml"
        origin = f"# {best.run.name}: {search.metric} {shown(best)}\n"
        write_atomic(settings, origin + to_yaml(search.settings(best.values)))
    page = search.out / "report.html"
    write_atomic(page, _page(search, ended, best))
    return settings, page


def rows(search: Search, ended: Mapping[int, Outcome]) -> list[tuple[str, ...]]:
    """A line a trial, the best first: number, searched values, value of the metric, what became of it."""
    sign = -1 if search.direction == "maximize" else 1
    ranks = ("finished", "pruned", "failed")
    ordered = sorted(ended.values(), key=lambda t: (ranks.index(t.state), sign * (t.value or 0.0), t.number))
    return [(str(t.number), *map(short, t.values.values()), shown(t), t.reason or t.state) for t in ordered]


def columns(search: Search) -> list[str]:
    """What stands above `rows`: a key is called by its last word if no other has that."""
    words = [dimension.key.rpartition(".")[2] for dimension in search.space]
    names = [word if words.count(word) == 1 else d.key for word, d in zip(words, search.space, strict=True)]
    return ["trial", *names, search.metric, ""]


def shown(trial: Outcome) -> str:
    return "-" if trial.value is None else f"{trial.value:.6g}"


def short(value: str) -> str:
    """A number with few digits, anything else as it is."""
    try:
        return f"{float(value):.4g}" if "." in value or "e" in value else value
    except ValueError:
        return value


def _page(search: Search, ended: Mapping[int, Outcome], best: Outcome | None) -> str:
    style = (ASSETS / "report.css").read_text(encoding="utf-8") + _STYLE
    title = html.escape(f"{search.out.name}: {search.direction} {search.metric}")
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns(search))
    body = "".join(_row(line, ended[int(line[0])], best) for line in rows(search, ended))
    hero = "<p class=none>No trial has finished.</p>"
    if best is not None:
        chosen = " ".join(f"{key}={value}" for key, value in best.values.items())
        hero = (
            f"<div class=big><span class=after>{shown(best)}</span></div><p>{html.escape(search.metric)} of trial "
            f"{best.number}: {html.escape(chosen)}</p><pre>verl train "
            f"{html.escape(shlex.quote(str(search.out / 'best.yaml')))}</pre>"
        )
    space = "".join(f"<span class=chip>{html.escape(str(dimension))}</span>" for dimension in search.space)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{title}</title><style>{style}</style></head><body><main><h1>{title}</h1>"
        f"<div class=chips>{space}</div><section><div class='panel hero'>{hero}</div></section>"
        f"<section class=panel><table><tr>{head}</tr>{body}</table></section></main></body></html>\n"
    )


def _row(line: tuple[str, ...], trial: Outcome, best: Outcome | None) -> str:
    cells = [html.escape(text) for text in line]
    cells[0] = f'<a href="runs/{html.escape(trial.run.name)}/report.html">{cells[0]}</a>'
    kind = " class=best" if trial is best else ""
    return f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"

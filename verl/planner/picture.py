"""A plan for the eye: tables and a timeline as text, the timeline as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from verl.planner import memory
from verl.planner.hardware import GB
from verl.planner.search import STAGES, Group, Plan

_COLOURS = {"weights": "#8c8c8c", "prefill": "#7fb3d5", "decode": "#2e86c1", "scores": "#58b368", "training": "#e59866"}
#: Width of the text timeline.
_COLUMNS = 72

Bar = tuple[float, float, str, str]


def bars(plan: Plan, group: Group) -> Iterator[Bar]:
    """(start, seconds, kind, label) of what a set does; sets meet at the end of each stage."""
    engine = group.generation
    if engine is not None:
        yield 0.0, engine.transition, "weights", f"weights to tp={engine.tp}"
        yield engine.transition, engine.prefill, "prefill", "prompts"
        yield engine.transition + engine.prefill, engine.decode, "decode", f"{engine.waves} x {engine.together} samples"
    at = plan.stages[0]
    for choice in group.choices:
        yield at, choice.infer, "scores", f"{choice.model.role} scores"
        at += choice.infer
    at = plan.stages[0] + plan.stages[1]
    for choice in group.choices:
        yield at, choice.train, "training", f"{choice.model.role} trains"
        at += choice.train


def timeline(plan: Plan) -> str:
    """One line a set, a letter for what it does: w(eights), p(rompts), d(ecode), s(cores), t(raining)."""
    lines = []
    for group, name in zip(plan.groups, _names(plan), strict=True):
        row = ["·"] * _COLUMNS
        for start, seconds, kind, _ in bars(plan, group):
            first, last = (round(_COLUMNS * at / plan.seconds) for at in (start, start + seconds))
            row[first:last] = kind[0] * (last - first)
        lines.append((name, "".join(row)))
    lines.append(("", f"0{plan.seconds:>{_COLUMNS - 3}.1f} s"))
    lines.append(("", "w weights, p prompts, d decode, s scores, t training, · nothing"))
    return _table(lines)


def svg(plan: Plan) -> str:
    """The timeline as an SVG picture; what a bar is shows when it is pointed at."""
    left, width, row = 230, 760, 34
    height = row * len(plan.groups) + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for i, (group, name) in enumerate(zip(plan.groups, _names(plan), strict=True)):
        parts.append(f'<text x="4" y="{row * i + 26}">{escape(name)}</text>')
        for start, seconds, kind, label in bars(plan, group):
            x, w = (width * at / plan.seconds for at in (start, seconds))
            title = escape(f"{label}: {seconds:.1f} s")
            parts.append(
                f'<rect x="{left + x:.1f}" y="{row * i + 8}" width="{w:.1f}" height="26" fill="{_COLOURS[kind]}" '
                f'stroke="white"><title>{title}</title></rect>'
            )
            if w > 7 * len(label):
                parts.append(f'<text x="{left + x + 4:.1f}" y="{row * i + 26}">{escape(label)}</text>')
    at = 0.0
    for stage, seconds in zip(STAGES, plan.stages, strict=True):
        x = left + width * at / plan.seconds
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 36}" stroke="black" stroke-dasharray="3"/>')
        parts.append(f'<text x="{x + 2:.1f}" y="{height - 14}">{stage} {seconds:.1f} s</text>')
        at += seconds
    return "\n".join([*parts, "</svg>", ""])


def memory_table(plan: Plan) -> str:
    """GB of a rank by what they are for: each model, and the most that stands there at a time."""
    parts = ("weights", "gradients", "optimizer", "activations", "gathered")
    rows: list[Sequence[str]] = [("", "layout", *parts, "KV cache", "peak", "host")]
    for group, name in zip(plan.groups, _names(plan), strict=True):
        for choice in group.choices:
            usage, layout = choice.usage, choice.layout
            amounts = {**usage.kept, **usage.step}
            sizes = f"{choice.strategy.name} pp={layout.pp} tp={layout.tp} dp={layout.data_size}"
            cells = (f"{amounts.get(part, 0) / GB:.1f}" for part in parts)
            ends = (f"{usage.peak / GB:.1f}", f"{usage.host / GB:.1f}")
            rows.append((f"  {choice.model.role}", sizes, *cells, "", *ends))
        rows.append((name, "", *("",) * len(parts), f"{group.kv_bytes / GB:.1f}", f"{peak(plan, group) / GB:.1f}", ""))
    return _table(rows) + f"\nof {plan.problem.memory / GB:.1f} GB that a device has for it; host: in host memory"


def peak(plan: Plan, group: Group) -> float:
    """Most bytes of a rank at a time: while a model works, or the actor generates."""
    resting = sum(choice.usage.resting for choice in group.choices)
    working = max(choice.usage.peak - choice.usage.resting for choice in group.choices)
    engine, actor = group.generation, group.choice("actor")
    if engine is None or actor is None:
        return resting + working
    problem, size = plan.problem, actor.model.size
    own = 0.0 if actor.strategy.gathers else actor.usage.kept["weights"]
    step = memory.workspace(size, engine.tp, problem.step_tokens, problem.work.max_num_seqs)
    return resting + max(working, size.weight_bytes / engine.tp - own + step + group.kv_bytes)


def runners_up(plans: Iterable[Plan]) -> str:
    """The best placement of each other partition."""
    rows: list[Sequence[str]] = [("s a step", "tokens/s", *STAGES, "placement")]
    for plan in plans:
        stages = (f"{seconds:.1f}" for seconds in plan.stages)
        rows.append((f"{plan.seconds:.1f}", f"{plan.throughput:,.0f}", *stages, str(plan)))
    return _table(rows)


def _names(plan: Plan) -> list[str]:
    """Of each set: its devices and models."""
    names, start = [], 0
    for group in plan.groups:
        names.append(f"{start}-{start + group.ranks - 1} {'+'.join(group.roles)}")
        start += group.ranks
    return names


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

"""A plan for the eye: tables, and a timeline as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from verl.planner.hardware import GB
from verl.planner.search import STAGES, Group, PlacementPlan, generation_bytes

#: Width of the text timeline.
_COLUMNS = 72


def bars(plan: PlacementPlan, group: Group) -> Iterator[tuple[float, float, str]]:
    """(start, seconds, kind) of each phase of a set; sets meet at the end of each stage."""
    engine = group.generation
    works = (
        [(engine.transition, "weights"), (engine.prefill, "prefill"), (engine.decode, "decode")] if engine else [],
        [(choice.infer, "scores") for choice in group.choices],
        [(choice.train, "training") for choice in group.choices],
    )
    for stage, parts in enumerate(works):
        start = sum(plan.stages[:stage])
        for seconds, kind in parts:
            yield start, seconds, kind
            start += seconds


def timeline(plan: PlacementPlan) -> str:
    """One line a set, a letter for each phase: w(eights), p(rompts), d(ecode), s(cores), t(raining)."""
    lines = []
    for group, name in zip(plan.groups, _names(plan), strict=True):
        row = ["·"] * _COLUMNS
        for start, seconds, kind in bars(plan, group):
            first, last = (round(_COLUMNS * time / plan.seconds) for time in (start, start + seconds))
            row[first:last] = kind[0] * (last - first)
        lines.append((name, "".join(row)))
    lines.append(("", f"0{plan.seconds:>{_COLUMNS - 3}.1f} s"))
    lines.append(("", "w weights, p prompts, d decode, s scores, t training, · nothing"))
    return _table(lines)


def memory_table(plan: PlacementPlan) -> str:
    """GB of a rank by purpose: each model, and the peak."""
    parts = ("weights", "gradients", "optimizer", "activations", "head", "gathered")
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


def peak(plan: PlacementPlan, group: Group) -> float:
    """Most bytes of a rank at a time: while a model works, or the actor generates."""
    resting = sum(choice.usage.resting for choice in group.choices)
    working = max(choice.usage.peak - choice.usage.resting for choice in group.choices)
    if group.generation is None:
        return resting + working
    needed = generation_bytes(plan.problem, plan.choice("actor"), group.generation.tp)
    return resting + max(working, needed + group.kv_bytes)


def runners_up(plans: Iterable[PlacementPlan]) -> str:
    """The best placement of each other partition."""
    rows: list[Sequence[str]] = [("s a step", "tokens/s", *STAGES, "placement")]
    for plan in plans:
        stages = (f"{seconds:.1f}" for seconds in plan.stages)
        rows.append((f"{plan.seconds:.1f}", f"{plan.throughput:,.0f}", *stages, str(plan)))
    return _table(rows)


def _names(plan: PlacementPlan) -> list[str]:
    """Each set as text: its devices and models."""
    ends = zip(plan.groups, accumulate(group.ranks for group in plan.groups), strict=True)
    return [f"{end - group.ranks}-{end - 1} {'+'.join(group.roles)}" for group, end in ends]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

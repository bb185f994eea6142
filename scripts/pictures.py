"""Draw the pictures of README and docs, into docs/pictures.

    python scripts/pictures.py                       # DRAWN: what the package itself says, and docs/log.md
    python scripts/pictures.py --run runs/latest     # OF_A_RUN: its curve, one of its steps, its report page

The run in docs/pictures is `verl train examples/grpo_arithmetic.yaml trainer.total_steps=15 trainer.timeline=true`. Its
page is opened in Chromium, which has to be installed. `tests/test_pictures.py` holds that pictures are what is drawn
here, and that pages show them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.other_systems import COLOCATED, SPLIT, STANDALONE, evaluation  # noqa: E402
from verl.planner.picture import bars  # noqa: E402
from verl.planner.search import PlacementPlan, search  # noqa: E402
from verl.report.reading import curves_in, json_of, read_rows  # noqa: E402
from verl.weights.layout import Layout, Mesh, generation_mesh  # noqa: E402

LOG, FOLDER = ROOT / "docs" / "log.md", ROOT / "docs" / "pictures"
TEXT, SOFT, LINE, PALE = "#1c2330", "#5b6575", "#c9cfd9", "#eef1f5"
GREEN, BLUE, ORANGE, PURPLE, GREY = "#0a7d55", "#2f6fdb", "#c2571a", "#7b45b5", "#8a93a3"
PALE_GREEN, PALE_BLUE, PALE_ORANGE, PALE_PURPLE = "#d8f0e5", "#dce8fb", "#fbe5d6", "#eadcf7"
WIDTH = 720


class Drawing:
    """An SVG on a white card, so that it reads on a light and on a dark page."""

    def __init__(self, title: str, height: int) -> None:
        self.height = height
        self._parts: list[str] = []
        self.text(16, 26, title, weight="bold")
        self._title = title

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        color: str = TEXT,
        anchor: str = "start",
        weight: str = "normal",
        size=13,
    ) -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-weight="{weight}" '
            f'font-size="{size}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, words: Sequence[str] = (), edge: str = ""
    ) -> None:
        """A box with lines of text in its middle, the first of them bold."""
        stroke = f' stroke="{edge}"' if edge else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="{fill}"{stroke}/>'
        )
        top = y + height / 2 + 5 - 9 * (len(words) - 1)
        for number, line in enumerate(words):
            bold = "bold" if number == 0 and len(words) > 1 else "normal"
            self.text(x + width / 2, top + 18 * number, line, anchor="middle", weight=bold)

    def line(
        self, points: Iterable[tuple[float, float]], color: str, width: float = 1.5, *, opacity: float = 1
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" opacity="{opacity}"/>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], color: str = SOFT) -> None:
        self._parts.append(
            f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{color}" '
            f'stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def dot(self, x: float, y: float, color: str, radius: float = 5) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" font-family="sans-serif" '
            f'role="img"><title>{escape(self._title)}</title><defs><marker id="head" viewBox="0 0 8 8" refX="7" '
            f'refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{SOFT}"/>'
            f'</marker></defs><rect width="{WIDTH}" height="{self.height}" rx="8" fill="white"/>'
        )
        return "\n".join([head, *self._parts, "</svg>"]) + "\n"


class Scale(NamedTuple):
    """Where values from `low` to `high` are between two places."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


# What learned, beside what must not.

_ROW = re.compile(r"^\| ([^|]+) \| [\d.]+ % \| [\d.]+ % \| ([+-][\d.]+) \((-?[\d.]+) to (-?[\d.]+)\) \|", re.MULTILINE)


class Gain(NamedTuple):
    """A run's gain in points, and the ends of its interval."""

    run: str
    value: float
    low: float
    high: float


def gains(log: str) -> list[Gain]:
    """The rows of the first table "| run | before | after | gain, ... |" of the log with controls."""
    tables = (_ROW.findall(part) for part in log.split("\n\n") if "at random" in part)
    return [Gain(run, *map(float, numbers)) for run, *numbers in next(filter(None, tables))]


def learning() -> str:
    """A dot and an interval for each run of the log's first table with controls."""
    rows = gains(LOG.read_text(encoding="utf-8"))
    drawing = Drawing("Gain in accuracy on 400 held-out problems, points", 72 + 30 * len(rows))
    x = Scale(-10, 45, 190, WIDTH - 24)
    for points in range(0, 45, 10):
        drawing.line([(x(points), 40), (x(points), drawing.height - 30)], GREY if points == 0 else LINE, 1)
        drawing.text(x(points), drawing.height - 12, f"{points:+d}", color=SOFT, anchor="middle")
    for number, row in enumerate(rows):
        y, is_control, seed = 57 + 30 * number, "at random" in row.run, re.search(r"seed \d+", row.run)
        color = GREY if is_control else GREEN
        drawing.text(16, y + 4, ("control, " if is_control else "") + (seed[0] if seed else row.run))
        drawing.line([(x(row.low), y), (x(row.high), y)], color, 4)
        drawing.dot(x(row.value), y, color, 6)
        drawing.text(x(row.high) + 10, y + 4, f"{row.value:+.1f}")
    return drawing.svg()


# How the package is put together.


def architecture() -> str:
    """From a script to the devices."""
    drawing = Drawing("From a recipe to the devices", 428)
    left, wide = 16, WIDTH - 32
    drawing.box(left, 42, wide, 34, PALE, words=["a script, or a recipe for verl train"])
    drawing.arrow((WIDTH / 2, 76), (WIDTH / 2, 94))
    drawing.box(
        left,
        96,
        wide,
        52,
        PALE_PURPLE,
        words=["Trainer", "a step is a graph: rollout, reward, reference, prepare, update"],
    )
    roles = (
        ("Actor", "the policy"),
        ("Critic", "where PPO wants one"),
        ("Reference", "where a KL is wanted"),
        ("Reward", "functions, models"),
    )
    width = (wide - 3 * 12) / 4
    for number, (role, about) in enumerate(roles):
        x = left + number * (width + 12)
        drawing.arrow((x + width / 2, 148), (x + width / 2, 166))
        drawing.box(x, 168, width, 52, PALE_BLUE, words=[role, about])
        drawing.arrow((x + width / 2, 220), (x + width / 2, 238))
    drawing.box(
        left,
        240,
        wide,
        34,
        PALE,
        words=["worker groups: one process, the ranks of torchrun, or a Ray cluster; one placement"],
    )
    half = (wide - 150) / 2
    drawing.box(
        left,
        304,
        half,
        70,
        PALE_GREEN,
        words=["Training engine", "torch (DDP, FSDP2, TP, PP),", "DeepSpeed, Megatron-LM"],
    )
    drawing.box(
        left + half + 150,
        304,
        half,
        70,
        PALE_ORANGE,
        words=["Rollout engine", "embedded, vLLM, servers,", "transformers, agents"],
    )
    for x in (left + half / 2, left + half * 1.5 + 150):
        drawing.arrow((x, 274), (x, 302))
    drawing.arrow((left + half + 4, 326), (left + half + 146, 326))
    drawing.text(WIDTH / 2, 318, "trained weights", color=SOFT, anchor="middle")
    drawing.arrow((left + half + 146, 356), (left + half + 4, 356))
    drawing.text(WIDTH / 2, 348, "samples", color=SOFT, anchor="middle")
    drawing.text(
        WIDTH / 2,
        404,
        "Samples pass through the trainer as one typed table; weights go from rank to rank.",
        color=SOFT,
        anchor="middle",
    )
    return drawing.svg()


def hybrid_engine() -> str:
    """One replica of 1-4-2 that generates with tensor parallelism 2: what each rank holds before and after."""
    train = Mesh(tuple(range(8)), Layout(tp=4, replicate=2))
    generation = generation_mesh(train, tg=2)
    drawing = Drawing("Four ways of tensor parallelism in training, two in generation: what each rank holds", 318)
    size, gap = 74, 12
    for row, (mesh, parts, label) in enumerate(((train, 4, "training"), (generation, 2, "generation"))):
        y = 64 + row * 140
        drawing.text(16, y + 36, label, weight="bold")
        for rank in range(8):
            x = 116 + rank * (size - 2) + (gap if rank > 3 else 0)
            held = mesh.coordinate(rank)["tp"]
            if row == 0:
                drawing.text(x + 32, 54, f"rank {rank}", color=SOFT, anchor="middle")
            for part in range(4):
                is_held, is_new = part * parts // 4 == held, part != train.coordinate(rank)["tp"]
                fill = PALE if not is_held else PALE_ORANGE if is_new else PALE_GREEN
                drawing.box(
                    x, y + 16 * part, 64, 15, fill, edge=ORANGE if is_held and is_new else GREEN if is_held else LINE
                )
    for pair in range(4):
        ends = [116 + rank * (size - 2) + (gap if rank > 3 else 0) + 32 for rank in (2 * pair, 2 * pair + 1)]
        drawing.line([(ends[0], 134), (ends[0], 146), (ends[1], 146), (ends[1], 134)], SOFT)
        drawing.arrow((sum(ends) / 2, 146), (sum(ends) / 2, 196))
    for number, words in enumerate(("pieces travel", "within pairs", "alone")):
        drawing.text(16, 158 + 17 * number, words, color=SOFT)
    drawing.box(116, 286, 14, 14, PALE_GREEN, edge=GREEN)
    drawing.text(136, 298, "held already")
    drawing.box(246, 286, 14, 14, PALE_ORANGE, edge=ORANGE)
    drawing.text(266, 298, "received from the other rank of the pair")
    drawing.box(546, 286, 14, 14, PALE, edge=LINE)
    drawing.text(566, 298, "not held")
    return drawing.svg()


# What the planner says.

_KINDS = {"weights": PURPLE, "prefill": "#7aa7ee", "decode": BLUE, "scores": ORANGE, "training": GREEN}


def placement() -> str:
    """One step of PPO by the planner, where models are together, in two sets, and apart."""
    plans = [
        (name, search(evaluation("13B", 32), [where])[0])
        for name, where in (("together", COLOCATED), ("split", SPLIT), ("apart", STANDALONE))
    ]
    most = max(plan.seconds for _, plan in plans)
    drawing = Drawing("A step of PPO, four models of 13B on 32 A100, as predicted: seconds by placement", 0)
    x, y = Scale(0, most, 190, WIDTH - 24), 44.0
    for name, plan in plans:
        y = _placed(drawing, x, y, name, plan) + 12
    for seconds in range(0, int(most) + 1, 60):
        drawing.text(x(seconds), y + 8, f"{seconds} s", color=SOFT, anchor="middle")
    _legend(drawing, y + 34, _KINDS)
    drawing.height = int(y) + 48
    return drawing.svg()


def _placed(drawing: Drawing, x: Scale, y: float, name: str, plan: PlacementPlan) -> float:
    """A row a set of models; returns where the next row begins."""
    drawing.text(16, y + 14, f"{name}: {plan.seconds:.0f} s", weight="bold")
    y += 22
    for group in plan.groups:
        roles = " ".join(group.roles) if len(group.roles) < 4 else "all four"
        drawing.text(16, y + 14, f"{group.ranks:2}: {roles}", color=SOFT)
        drawing.box(x(0), y, x(plan.seconds) - x(0), 19, PALE)
        for start, seconds, kind in bars(plan, group):
            if seconds > 0:
                drawing.box(x(start), y + 1, x(start + seconds) - x(start), 17, _KINDS[kind])
        y += 23
    return y


def _legend(drawing: Drawing, y: float, colors: dict[str, str], x: float = 16) -> None:
    for name, color in colors.items():
        drawing.box(x, y - 11, 13, 13, color)
        drawing.text(x + 19, y, name)
        x += 36 + 7 * len(name)


def growth() -> str:
    """Throughput of PPO on more and more devices, with the batch as it is, beside linear growth."""
    drawing = Drawing("PPO on A100, as predicted: tokens a second by devices, the batch as it is", 330)
    devices = (8, 16, 32, 64, 128)
    x, y = Scale(0, len(devices) - 1, 70, WIDTH - 110), Scale(0, 60, 286, 46)
    for thousands in range(0, 61, 20):
        drawing.line([(x(0), y(thousands)), (x(4), y(thousands))], LINE, 1)
        drawing.text(60, y(thousands) + 4, f"{thousands}k" if thousands else "0", color=SOFT, anchor="end")
    for number, count in enumerate(devices):
        drawing.text(x(number), 306, str(count), color=SOFT, anchor="middle")
    for model, color, first in (("7B", BLUE, 8), ("13B", GREEN, 16), ("34B", ORANGE, 32), ("70B", PURPLE, 64)):
        numbers = range(devices.index(first), len(devices))
        speeds = [search(evaluation(model, devices[number]))[0].throughput / 1000 for number in numbers]
        drawing.line([(x(number), y(speed)) for number, speed in zip(numbers, speeds, strict=True)], color, 2.5)
        for number, speed in zip(numbers, speeds, strict=True):
            drawing.dot(x(number), y(speed), color, 4)
        share = speeds[-1] / speeds[0] * devices[numbers[0]] / devices[-1]
        drawing.text(x(4) + 12, y(speeds[-1]) + 4, f"{model}: {share:.0%}", color=color, weight="bold")
    drawing.text(WIDTH - 16, 322, "behind a model: its share of linear growth", color=SOFT, anchor="end")
    return drawing.svg()


# A run.


def curve(run: Path) -> str:
    """Mean reward of each step, and accuracy on held-out problems with its interval, in per cent."""
    rewards = curves_in(read_rows(run / "metrics.jsonl"), [])["reward/mean"]
    evals = [row for row in read_rows(run / "eval.jsonl") if "accuracy" in row]
    drawing = Drawing("A run of examples/grpo_arithmetic.yaml: SmolLM2-135M learns to add", 340)
    last = max(rewards[-1][0], evals[-1]["step"])
    highest = max([value for _, value in rewards] + [row.get("high", 0) for row in evals])
    x, y = Scale(0, last, 60, WIDTH - 40), Scale(0, highest * 105, 266, 46)
    for percent in range(0, int(highest * 105) + 1, 10):
        drawing.line([(x(0), y(percent)), (x(last), y(percent))], LINE, 1)
        drawing.text(52, y(percent) + 4, f"{percent} %", color=SOFT, anchor="end")
    for step in range(0, int(last) + 1, 5):
        drawing.text(x(step), 286, str(step), color=SOFT, anchor="middle")
    drawing.text(x(last), 304, "step", color=SOFT, anchor="end")
    drawing.line([(x(step), y(100 * value)) for step, value in rewards], BLUE, 1, opacity=0.45)
    drawing.line([(x(step), y(100 * value)) for step, value in smoothed(rewards)], BLUE, 2.5)
    for row in evals:
        drawing.line([(x(row["step"]), y(100 * row["low"])), (x(row["step"]), y(100 * row["high"]))], GREEN, 4)
        drawing.dot(x(row["step"]), y(100 * row["accuracy"]), GREEN, 6)
    for before, after in pairwise(evals):
        drawing.line([(x(row["step"]), y(100 * row["accuracy"])) for row in (before, after)], GREEN, 1)
    count = json_of(run / "summary.json").get("eval_problems", "")
    _legend(
        drawing,
        326,
        {
            "reward of a step, and its smoothed mean": BLUE,
            f"accuracy on {count} held-out problems, 95 % interval": GREEN,
        },
    )
    return drawing.svg()


def smoothed(points: Sequence[Sequence[float]], weight: float = 0.6) -> list[tuple[float, float]]:
    """The exponential mean, corrected for its start, as the report has it."""
    mean = norm = 0.0
    means = []
    for step, value in points:
        mean, norm = weight * mean + (1 - weight) * value, weight * norm + 1 - weight
        means.append((step, mean / norm))
    return means


_NODES = {"rollout": BLUE, "reward": ORANGE, "prepare": PURPLE, "update_actor": GREEN}


def step(run: Path) -> str:
    """What worked when in the middle step of a run, by its `timeline.json`."""
    events: list[dict[str, Any]] = json.loads((run / "timeline.json").read_text("utf-8").rstrip().rstrip(",") + "]")
    spans = [event for event in events if event["ph"] == "X" and event["args"]["step"] > 0]
    steps = sorted({event["args"]["step"] for event in spans})
    middle = steps[len(steps) // 2]
    spans = [event for event in spans if event["args"]["step"] == middle]
    start, end = min(event["ts"] for event in spans), max(event["ts"] + event["dur"] for event in spans)
    rows = [*dict.fromkeys(event["name"] for event in spans)]
    drawing = Drawing(f"Step {middle} of a run with GRPO: 16 prompts, 8 samples each", 70 + 34 * len(rows))
    x = Scale(0, (end - start) / 1e6, 170, WIDTH - 30)
    for number, name in enumerate(rows):
        y, its = 44 + 34 * number, [event for event in spans if event["name"] == name]
        drawing.text(16, y + 18, f"{name} {sum(event['dur'] for event in its) / 1e6:.2f} s")
        drawing.box(x.start, y, x.end - x.start, 26, PALE)
        for event in its:
            width = max(2.0, x(event["dur"] / 1e6) - x.start)
            drawing.box(x((event["ts"] - start) / 1e6), y + 2, width, 22, _NODES.get(name, GREY))
    every = next(gap for gap in (1, 2, 5, 10, 20, 50, 100, 200) if x.high / gap <= 10)
    for seconds in range(0, int(x.high) + 1, every):
        drawing.text(x(seconds), drawing.height - 10, f"{seconds} s", color=SOFT, anchor="middle")
    return drawing.svg()


def report(run: Path) -> bytes:
    """The first screens of the run's page, as PNG."""
    from tests.browser import Browser

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Browser(Path(folder)) as browser:
        browser.open(run / "report.html", 1240)
        return browser.picture(1240, 1000)


# Seconds of the same work, by us and by others.

_MEASURED = re.compile(r"^\| (rollout|step) \| smollm2-(\w+) \| (\d+) \| (\d+) \| (\w+) \| ([\d.]+) \|", re.MULTILINE)


def beside_others() -> str:
    """Two dots for each size of the log's table of `benchmarks/growth.py` that both systems were measured at."""
    sizes: dict[tuple[str, ...], dict[str, float]] = {}
    for *size, system, seconds in _MEASURED.findall(LOG.read_text(encoding="utf-8")):
        sizes.setdefault(tuple(size), {})[system] = float(seconds)
    rows = [(size, of_system) for size, of_system in sizes.items() if len(of_system) == 2]
    drawing = Drawing("Seconds on two CPU cores, by samples x tokens of a response", 108 + 24 * len(rows))
    low, high = (edge(value for _, of_system in rows for value in of_system.values()) for edge in (min, max))
    x = Scale(math.log(low / 1.1), math.log(high * 1.1), 190, WIDTH - 150)
    for second in (5, 10, 20, 50, 100, 200):
        if low < second < high:
            place = x(math.log(second))
            drawing.line([(place, 40), (place, drawing.height - 56)], LINE, 1)
            drawing.text(place, drawing.height - 40, f"{second} s", color=SOFT, anchor="middle")
    for number, ((part, model, samples, tokens), of_system) in enumerate(rows):
        y, color = 54 + 24 * number, ORANGE if part == "rollout" else PURPLE
        (peer,) = of_system.keys() - {"ours"}
        ours, theirs = of_system["ours"], of_system[peer]
        drawing.text(16, y + 5, f"{part}, {model.upper()}, {samples} x {tokens}")
        drawing.line([(x(math.log(ours)), y), (x(math.log(theirs)), y)], LINE, 2)
        drawing.dot(x(math.log(theirs)), y, color)
        drawing.dot(x(math.log(ours)), y, GREEN)
        drawing.text(WIDTH - 16, y + 5, f"{theirs / ours:.2f} times as fast", color=SOFT, anchor="end")
    _legend(drawing, drawing.height - 14, {"verl": GREEN, "vLLM's CPU build": ORANGE, "TRL": PURPLE})
    return drawing.svg()


DRAWN: dict[str, Callable[[], str]] = {
    "learning.svg": learning,
    "architecture.svg": architecture,
    "hybrid_engine.svg": hybrid_engine,
    "placement.svg": placement,
    "growth.svg": growth,
    "beside_others.svg": beside_others,
}
OF_A_RUN: dict[str, Callable[[Path], str | bytes]] = {"curve.svg": curve, "step.svg": step, "report.png": report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="draw the pictures of this run instead")
    run = parser.parse_args().run
    pictures = (
        {name: draw(run) for name, draw in OF_A_RUN.items()} if run else {name: draw() for name, draw in DRAWN.items()}
    )
    FOLDER.mkdir(exist_ok=True)
    for name, content in pictures.items():
        (FOLDER / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        print(f"docs/pictures/{name}: {(FOLDER / name).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

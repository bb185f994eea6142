"""How time and memory grow with the work: ours beside vLLM (generation) and TRL (a GRPO step), one factor at a time.

    .venv/bin/python benchmarks/growth.py --out growth                     # at most an hour; growth/growth.svg, a table
    .venv/bin/python benchmarks/growth.py --out growth --only samples      # the points of one factor
    .venv/bin/python benchmarks/growth.py --out growth --points samples=64 length=512
    .venv/bin/python benchmarks/growth.py --out growth --systems ours --large
    .venv/bin/python benchmarks/growth.py --out growth --table             # from what is there, nothing is run

From 32 samples of 128 tokens by a model of 135 million parameters, one factor changes: samples from 16 to 128, length
of a response from 128 to 512, model 135M or 360M. `--large` adds 512 samples, 2,048 tokens and a model of 1.2 billion,
which takes hours. Prompts have 80 to 100 tokens, and eight samples each. Models are of random weights in known shapes:
nothing is fetched.

At each point every system works in a process of its own, one after the other: generation by our embedded engine and by
vLLM (`rollout.py`), a GRPO step by ours and by TRL (`verl_grpo_step.py`, `trl_grpo_step.py`, micro-batches of eight),
all in one precision. A system that needs more than `--limit` seconds at a point (ten minutes, with loading and warming
up) is reported so and not compared there. Each result is a line of OUT/growth.jsonl at once; what is there is not run
again, so that the command goes on where it was ended. After `--budget` seconds, 3,000, no further one begins.

Printed are seconds, peak memory of the process, the share of the ceiling (`ceiling.py`: products of our own forwards,
for all systems), how many times as fast ours is, and for each system the exponent of a factor: with an exponent of 1
twice the work takes twice the time. `--smoke` does the same with a tiny model, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpo_step
import rollout
import workload

HERE = Path(__file__).resolve().parent
#: Of a prompt.
SAMPLES = 8
PROMPT_TOKENS = 94
#: Parameters of the shapes, in millions.
MODELS = {"smollm2-135m": 135, "smollm2-360m": 362, "llama-3.2-1b": 1236, "small": 0.3}
FACTORS = ("samples", "length", "model")
#: System -> the part of the work that it does.
SYSTEMS = {"ours": ("rollout", "step"), "vllm": ("rollout",), "trl": ("step",)}
PEERS = {"rollout": "vllm", "step": "trl"}


@dataclass(frozen=True)
class Point:
    """One size of the work: samples in all, tokens of a response, shape of the model."""

    samples: int
    length: int
    model: str

    def __str__(self) -> str:
        return f"{self.model} x {self.samples} x {self.length}"

    @property
    def prompts(self) -> int:
        return self.samples // SAMPLES

    def size(self, factor: str) -> float:
        return MODELS[self.model] if factor == "model" else float(getattr(self, factor))


BASE = Point(32, 128, "smollm2-135m")
VALUES: dict[str, list[Any]] = {"samples": [16, 64, 128], "length": [256, 512], "model": ["smollm2-360m"]}
LARGE: dict[str, list[Any]] = {"samples": [512], "length": [2048], "model": ["llama-3.2-1b"]}
SMOKE_BASE = Point(16, 8, "small")
SMOKE: dict[str, list[Any]] = {"samples": [32], "length": [], "model": []}


def points(args: argparse.Namespace) -> list[Point]:
    """Those of the command line, the base first."""
    base = SMOKE_BASE if args.smoke else BASE
    values = SMOKE if args.smoke else {f: VALUES[f] + (LARGE[f] if args.large else []) for f in FACTORS}
    wanted = [base] if not args.points else []
    for factor in FACTORS:
        for value in values[factor]:
            is_wanted = f"{factor}={value}" in args.points if args.points else args.only in (None, factor)
            wanted += [Point(**{**vars(base), factor: value})] if is_wanted else []
    return wanted


def run_rollout(system: str, point: Point, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Generation at a point, in a process of its own."""
    engine = {"ours": "embedded", "vllm": "vllm"}[system]
    words = ["--model", str(model_of(point, args)), "--dtype", {"bf16": "bfloat16", "fp32": "float32"}[args.dtype]]
    words += ["--prompts", str(point.prompts), "--prompt-tokens", str(PROMPT_TOKENS), "--samples", str(SAMPLES)]
    words += ["--new-tokens", str(point.length), "--threads", str(args.threads), "--repeats", str(args.repeats)]
    words += ["--no-preload"] if args.no_preload else []
    words += ["--vllm-python", args.vllm_python] if args.vllm_python else []
    result = rollout.measured(rollout.sized(rollout.parsed(words), "large"), engine, 256, seconds)
    ceiling = result["tokens"] / result["ceiling_tokens_per_second"] if system == "ours" else None
    return {"seconds": result["seconds"], "memory_gb": result["peak_memory_gb"], "ceiling_seconds": ceiling}


def run_step(system: str, point: Point, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """A GRPO step at a point, in a process of its own."""
    python, script = (args.trl_python, "trl") if system == "trl" else (sys.executable, "verl")
    command = [python, str(HERE / f"{script}_grpo_step.py"), "--dtype", args.dtype, "--micro-batch", "8"]
    command += ["--prompts", str(point.prompts), "--samples", str(SAMPLES), "--new-tokens", str(point.length)]
    command += ["--steps", str(args.repeats), "--threads", str(args.threads), "--model", str(model_of(point, args))]
    done = workload.call(command, workload.environment(python), seconds)
    if done.returncode:
        raise SystemExit(f"{system} failed")
    result = json.loads(done.stdout.splitlines()[-1])
    ceiling = (
        sum(result[f"{part}_ceiling_seconds"] for part in ("generation", "training")) if system == "ours" else None
    )
    return {"seconds": result["step_seconds"], "memory_gb": result["peak_memory_gb"], "ceiling_seconds": ceiling}


RUNS = {"rollout": run_rollout, "step": run_step}


def model_of(point: Point, args: argparse.Namespace) -> Path:
    """The directory of a point's model, made if it is not there."""
    folder: Path = args.models / point.model
    if not (folder / "tokenizer.json").is_file():
        command = [sys.executable, str(HERE / "made_model.py"), point.model, str(folder)]
        subprocess.run(command, check=True, env=workload.environment(), stdout=subprocess.DEVNULL)
    return folder


def measure(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    """Run what is missing in `results`, and add it there and to the file."""
    began = time.monotonic()
    for point in points(args):
        for part, run in RUNS.items():
            for system in (system for system in args.systems if part in SYSTEMS[system]):
                key = {"part": part, "system": system, "dtype": args.dtype, **vars(point)}
                if any(key.items() <= r.items() and "failed" not in r["verdict"] for r in results):
                    continue
                if time.monotonic() - began > args.budget:
                    print(f"not begun, {args.budget:.0f} s are over: {system}, {part}, {point}", flush=True)
                    continue
                try:
                    outcome = run(system, point, args, args.limit)
                except subprocess.TimeoutExpired:
                    outcome = {"verdict": f"over {args.limit:.0f} s"}
                except SystemExit as error:
                    if not isinstance(error.code, str):  # this command is to end, not the one it ran
                        raise
                    outcome = {"verdict": error.code}
                results.append(key | {"verdict": ""} | outcome)
                with (args.out / "growth.jsonl").open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
                print(line(results, results[-1]), flush=True)


def of(results: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The result of that system, part and point, if it was measured."""
    return next((r for r in results if not r["verdict"] and wanted.items() <= r.items()), None)


def line(results: Sequence[dict[str, Any]], result: dict[str, Any]) -> str:
    """A row of the table."""
    point = {name: result[name] for name in ("samples", "length", "model", "dtype", "part")}
    ours = of(results, system="ours", **point)
    cells = [result["part"], result["model"], str(result["samples"]), str(result["length"]), result["system"]]
    if result["verdict"]:
        return " | ".join([*cells, result["verdict"], "", "", ""])
    share = f"{ours['ceiling_seconds'] / result['seconds']:.0%}" if ours else ""
    faster = f"{result['seconds'] / ours['seconds']:.2f}" if ours and result["system"] != "ours" else ""
    return " | ".join([*cells, f"{result['seconds']:.2f}", f"{result['memory_gb']:.2f}", share, faster])


def series(
    results: Iterable[dict[str, Any]], part: str, system: str, factor: str, base: Point
) -> list[tuple[float, float]]:
    """Size and seconds of the points at which nothing but this factor differs from the base."""
    pairs = set()
    for r in results:
        point = Point(r["samples"], r["length"], r["model"])
        if (r["part"], r["system"], r["verdict"]) == (part, system, "") and all(
            getattr(point, other) == getattr(base, other) for other in FACTORS if other != factor
        ):
            pairs.add((point.size(factor), r["seconds"]))
    return sorted(pairs)


def exponent(pairs: Sequence[tuple[float, float]]) -> float | None:
    """b of seconds = a * size ** b, by least squares of the logarithms."""
    x, y = ([math.log(pair[i]) for pair in pairs] for i in (0, 1))
    if len(set(x)) < 2:
        return None
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def table(results: Sequence[dict[str, Any]], base: Point) -> str:
    """All results and the exponents, in Markdown."""
    head = ["part", "model", "samples", "tokens", "system", "seconds", "peak GB", "of the ceiling", "ours is faster"]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    order = {factor: i for i, factor in enumerate(FACTORS)}
    rows = sorted(
        results, key=lambda r: (r["part"], MODELS[r["model"]], r["length"], r["samples"], r["system"] != "ours")
    )
    lines += [line(results, r) for r in rows]
    lines += ["", " | ".join(["part", "system", *order]), " | ".join(["---"] * (2 + len(order)))]
    for part in RUNS:
        for system in ("ours", PEERS[part]):
            fitted = [exponent(series(results, part, system, factor, base)) for factor in FACTORS]
            lines.append(" | ".join([part, system, *("" if b is None else f"{b:.2f}" for b in fitted)]))
    return "\n".join(f"| {text} |" if text else "" for text in lines)


def picture(results: Sequence[dict[str, Any]], base: Point) -> str:
    """Seconds over each factor, both axes logarithmic, as SVG: a row for each part, a line for each system."""
    width, height, margin = 260, 190, 44
    colours = {"ours": "#2563eb", "vllm": "#ea580c", "trl": "#ea580c"}
    drawn = []
    for row, part in enumerate(RUNS):
        for column, factor in enumerate(FACTORS):
            lines = {system: series(results, part, system, factor, base) for system in ("ours", PEERS[part])}
            x0, y0 = column * width, row * height
            label = {"length": "tokens a response", "model": "million parameters"}.get(factor, factor)
            drawn.append(f'<text x="{x0 + width / 2}" y="{y0 + 16}" text-anchor="middle">{part}: s by {label}</text>')
            every = [pair for pairs in lines.values() for pair in pairs]
            if not every:
                continue
            x_of = _scale([x for x, _ in every], x0 + margin, x0 + width - 14)
            y_of = _scale([y for _, y in every], y0 + height - margin, y0 + 30)
            for x in sorted({x for x, _ in every}):
                drawn.append(f'<text x="{x_of(x):.1f}" y="{y0 + height - 26}" text-anchor="middle">{x:g}</text>')
            for y in {min(y for _, y in every), max(y for _, y in every)}:
                drawn.append(f'<text x="{x0 + margin - 6}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>')
            for system, pairs in lines.items():
                if len(pairs) < 2:
                    continue
                path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in pairs)
                drawn.append(f'<polyline points="{path}" fill="none" stroke="{colours[system]}" stroke-width="2"/>')
                drawn += [
                    f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colours[system]}"/>' for x, y in pairs
                ]
            names = ", ".join(f'<tspan fill="{colours[system]}">{system}</tspan>' for system in lines)
            drawn.append(f'<text x="{x0 + width / 2}" y="{y0 + height - 10}" text-anchor="middle">{names}</text>')
    size = f"{len(FACTORS) * width} {len(RUNS) * height}"
    style = "font:11px sans-serif;fill:#374151"
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" style="{style}">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _scale(values: Sequence[float], first: float, last: float) -> Any:
    """A logarithmic axis from `first` to `last`."""
    low, high = math.log(min(values)), math.log(max(values))

    def position(value: float) -> float:
        return first + (last - first) * ((math.log(value) - low) / (high - low) if high > low else 0.5)

    return position


def present(args: argparse.Namespace) -> list[str]:
    """The systems of the command line whose environments are there."""
    systems = list(args.systems)
    if "trl" in systems:
        args.trl_python = args.trl_python or grpo_step.peer_python()
        if args.trl_python is None:
            systems.remove("trl")
    if "vllm" in systems and not Path(rollout.vllm_python(args)).exists():
        systems.remove("vllm")
        print("without vLLM: neither this environment nor .venv-vllm has it", flush=True)
    return systems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of results, table and picture")
    parser.add_argument("--only", choices=FACTORS, help="the base, and the points of this factor")
    parser.add_argument("--points", nargs="+", default=[], metavar="FACTOR=VALUE", help="these points alone")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--large", action="store_true", help="512 samples, 2,048 tokens and a model of 1.2B too")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a minute")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--repeats", type=int, default=1, help="timed rollouts and steps of a process, after a warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one system at one point")
    parser.add_argument(
        "--budget",
        type=float,
        default=3000.0,
        help="seconds after which no further one begins: within an hour all is over",
    )
    parser.add_argument("--models", type=Path, default=HERE.parent / "models" / "made", help="where models are made")
    parser.add_argument("--no-preload", action="store_true", help="generation without Intel's OpenMP and tcmalloc")
    parser.add_argument("--vllm-python", help="one that has vLLM (this one, else that of `make vllm`)")
    parser.add_argument("--trl-python", help="one that has TRL (that of `peer_env.sh trl`, made on the first call)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs ends, too
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "growth.jsonl"
    results = [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []
    if not args.table:
        args.systems = present(args)
        measure(args, results)
    base = SMOKE_BASE if args.smoke else BASE
    shown = [r for r in results if r["dtype"] == args.dtype and (r["model"] == SMOKE_BASE.model) is args.smoke]
    (args.out / "growth.md").write_text(table(shown, base) + "\n")
    (args.out / "growth.svg").write_text(picture(shown, base))
    print("\n" + table(shown, base))
    return int(any("failed" in r["verdict"] for r in shown))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())

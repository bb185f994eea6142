"""One GRPO step, ours beside TRL's, on the same work in the same run: a table of seconds, memory and ratios.

    .venv/bin/python benchmarks/grpo_step.py

Each side runs in its own process and environment (TRL's is made on the first call), in turn, at every combination
of precision and micro-batch size; what is compared is the best of each side. Memory is the peak of the process
that was the fastest. A run takes about fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run(python: str, script: str, *options: str) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [python, str(HERE / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(
        f"{result['name']:5} {result['dtype']}{' autocast' if result.get('autocast') else '':9} micro-batch "
        f"{result['micro_batch']:2}  step {result['step_seconds']:6.2f} s = "
        f"generation {result['generation_seconds']:5.2f} "
        f"+ training {result['training_seconds']:5.2f}   peak {result['peak_memory_gb']:.2f} GB",
        flush=True,
    )
    return result


def main() -> None:
    """Measure both sides in turn and print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each setting, after one that warms up")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--micro-batches", nargs="+", default=["8", "16", "32"])
    args = parser.parse_args()
    made = subprocess.run([HERE / "peer_env.sh", "trl"], stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    peer = made.stdout.strip().splitlines()[-1]
    ours, theirs = [], []
    for dtype in args.dtypes:
        for size in args.micro_batches:
            options = ("--dtype", dtype, "--micro-batch", size, "--steps", str(args.steps))
            ours.append(run(sys.executable, "verl_grpo_step.py", *options))
            theirs.append(run(peer, "trl_grpo_step.py", *options))
    a, b = (min(side, key=lambda result: float(result["step_seconds"])) for side in (ours, theirs))
    print(f"\nbest of each: {a['step_seconds']:.2f} s against {b['step_seconds']:.2f} s")
    print(f"speed: {b['step_seconds'] / a['step_seconds']:.2f} times the peer's")
    print(f"memory: {a['peak_memory_gb'] / b['peak_memory_gb']:.0%} of the peer's")


if __name__ == "__main__":
    main()

"""One GRPO step, ours beside TRL's, on the same work in the same run: a table of seconds, memory and ratios.

    .venv/bin/python benchmarks/grpo_step.py
    .venv/bin/python benchmarks/grpo_step.py --dtypes bf16 --micro-batches 8 --steps 3    # one setting, a few minutes

Each side runs in its own process and environment (TRL's is made on the first call), in turn, at every combination
of precision and micro-batch size; each of our settings is compared with the peer's fastest, in time and in the peak
memory of the same process, and its memory with the peer's smallest. A run takes about fifteen minutes on two cores.
Where TRL's environment cannot be made, or with `--no-peer`, ours is measured alone.

Behind our seconds stands what of the ceiling they reach: the matrix products of the same forwards and backwards, timed
by torch alone after each step (`ceiling.py`). Rewards differ within every group, and the run fails if a row was left
out of the update.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import workload

HERE = Path(__file__).resolve().parent


def run(python: str, script: str, *options: str) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [python, str(HERE / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=workload.environment(python))
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    shares = result.get("share_of_ceiling", {})
    print(
        f"{result['name']:5} {setting(result):29} step {result['step_seconds']:6.2f} s = "
        f"generation {result['generation_seconds']:5.2f} "
        f"+ training {result['training_seconds']:5.2f}   peak {result['peak_memory_gb']:.2f} GB"
        + (
            "   of the ceiling: " + ", ".join(f"{part} {share:.0%}" for part, share in shares.items()) if shares else ""
        ),
        flush=True,
    )
    return result


def peer_python() -> str | None:
    """The Python of TRL's environment, or None where that cannot be made."""
    made = subprocess.run([HERE / "peer_env.sh", "trl"], capture_output=True, text=True, timeout=1800)
    if made.returncode:
        reason = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(f"without TRL, whose environment could not be made: {reason}", flush=True)
        return None
    return made.stdout.strip().splitlines()[-1]


def setting(result: dict[str, Any]) -> str:
    """Its precision and micro-batch size, for people."""
    return f"{result['dtype']}{' autocast' if result.get('autocast') else ''}, micro-batch {result['micro_batch']}"


def main() -> None:
    """Measure both sides in turn and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each setting, after one that warms up")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--micro-batches", nargs="+", default=["8", "16", "32"])
    parser.add_argument("--model", default=str(workload.MODEL))
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--no-peer", action="store_true", help="without TRL")
    args = parser.parse_args()
    peer = None if args.no_peer else peer_python()
    ours, theirs = [], []
    for dtype in args.dtypes:
        for size in args.micro_batches:
            options = ("--dtype", dtype, "--micro-batch", size, "--steps", str(args.steps))
            options += ("--model", args.model, "--device", args.device)
            ours.append(run(sys.executable, "verl_grpo_step.py", *options))
            if peer is not None:
                theirs.append(run(peer, "trl_grpo_step.py", *options))
    if not theirs:
        return
    peers = min(theirs, key=lambda result: float(result["step_seconds"]))
    cost = f"{peers['step_seconds']:.2f} s, {peers['peak_memory_gb']:.2f} GB"
    smallest = min(float(result["peak_memory_gb"]) for result in theirs)
    print(f"\nbeside the peer's fastest ({setting(peers)}: {cost}); its smallest takes {smallest:.2f} GB")
    for result in sorted(ours, key=lambda result: float(result["step_seconds"])):
        speed, memory = (peers[key] / result[key] for key in ("step_seconds", "peak_memory_gb"))
        print(
            f"{setting(result):22} {speed:.2f} times as fast, {1 / memory:.0%} of the memory, "
            f"{result['peak_memory_gb'] / smallest:.0%} of its smallest"
        )


if __name__ == "__main__":
    main()

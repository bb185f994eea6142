"""All that wants an accelerator, in one command, and a page of what was printed: the tests marked `gpu`, generation
beside vLLM, a GRPO step beside TRL, exactness.

    .venv/bin/python benchmarks/gpu.py                                      # docs/gpu_results.md
    .venv/bin/python benchmarks/gpu.py --device cpu --models tiny --no-peers    # the same commands, anywhere

`--models` are directories, or shapes of `made_model.py`, whose weights are random: nothing is fetched. Left out, they
are the shapes of Qwen2.5-0.5B and, from 60 GB of device memory on, of Qwen2.5-7B. A peer whose environment cannot be
made is left out, and the page says so. Ends with 1 if a command fails; the page is written all the same.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import made_model
import torch
import transformers

import verl
from verl import device

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu_results.md"
ENOUGH_FOR_7B = 60e9


def commands(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """(heading, arguments of Python) of each command, in the order in which they run."""
    small = args.models[0] == "tiny"
    yield "Tests", ["-m", "pytest", "-q", "-m", "gpu", "--device", args.device, "tests/test_gpu.py"]
    size = ["--prompts", "3", "--new-tokens", "6"] if small else []
    yield "Exactness", ["benchmarks/exactness.py", "--device", args.device, *size]
    engines = ["embedded", "generate"] if args.no_peers else ["embedded", "vllm", "generate"]
    for name in args.models:
        model = ["--model", str(directory(name, args)), "--device", args.device]
        work = (
            ["--prompts", "2", "--samples", "2", "--new-tokens", "8", "--batch", "4"] if small else ["--repeats", "3"]
        )
        yield f"Rollout, {name}", ["benchmarks/rollout.py", *model, *work, "--no-preload", "--engines", *engines]
        if args.device != "cpu" and "7b" in name:
            continue  # fp32 masters, gradients and moments of 7.6 billion weights do not fit on one device
        step = ["--steps", "1", "--dtypes", "fp32", "--micro-batches", "32"] if small else ["--steps", "3"]
        peer = ["--no-peer"] if args.no_peers else []
        yield f"GRPO step, {name}", ["benchmarks/grpo_step.py", *model, *step, *peer]


def directory(name: str, args: argparse.Namespace) -> Path:
    """Of a model: the one that is named, or one made in that shape."""
    if name not in made_model.SHAPES:
        return Path(name)
    return made_model.make(name, args.made / name, args.device)


def machine(chosen: str) -> str:
    """What the figures were measured on."""
    lines = [
        f"- Device: {device.device_name(chosen) if chosen != 'cpu' else platform.processor() or platform.machine()}"
        + (f", {device.total_memory(chosen) / 1e9:.0f} GB" if chosen != "cpu" else ", CPU"),
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}",
        f"- verl {verl.__version__}{_commit()}, {datetime.date.today().isoformat()}",
    ]
    return "\n".join(lines)


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return f" ({done.stdout.strip()})" if done.returncode == 0 else ""


def run(heading: str, command: list[str]) -> tuple[bool, str]:
    """Whether a command succeeded, and its section of the page; what it prints is shown as it comes."""
    print(f"\n== {heading}: python {' '.join(command)}", flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    start, lines = time.monotonic(), []
    # Progress and errors go to the terminal alone.
    whole = [sys.executable, *command]
    with subprocess.Popen(whole, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    succeeded = process.returncode == 0
    verdict = f"{'passed' if succeeded else f'FAILED ({process.returncode})'} in {time.monotonic() - start:.0f} s"
    shown = " ".join(command).replace(str(ROOT) + "/", "")
    return succeeded, f"## {heading}: {verdict}\n\n```\n$ python {shown}\n{''.join(lines[-40:])}```"


def main() -> None:
    """Run all, write the page, and end with 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", help="such as cuda (the first accelerator of this machine)")
    parser.add_argument("--models", nargs="+", help="directories, or of " + ", ".join(made_model.SHAPES))
    parser.add_argument("--only", default="", help="only the commands whose heading begins so, such as Rollout")
    parser.add_argument("--no-peers", action="store_true", help="without vLLM and TRL")
    parser.add_argument("--page", type=Path, help="the page to write (docs/gpu_results.md; none for the CPU)")
    parser.add_argument("--made", type=Path, default=ROOT / "models" / "made", help="where models are made")
    args = parser.parse_args()
    args.device = args.device or device.accelerator()
    if args.device is None:
        sys.exit("torch finds no accelerator on this machine (torch.accelerator.is_available() is False)")
    if args.models is None:
        roomy = args.device != "cpu" and device.total_memory(args.device) > ENOUGH_FOR_7B
        args.models = ["qwen2.5-0.5b", "qwen2.5-7b"] if roomy else ["qwen2.5-0.5b"]
    results = [run(*command) for command in commands(args) if command[0].startswith(args.only)]
    page = args.page or (PAGE if args.device != "cpu" else None)
    if page is not None:
        parts = ["# What ran on an accelerator", machine(args.device), *(section for _, section in results)]
        page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        print(f"\n{page}")
    failed = sum(not succeeded for succeeded, _ in results)
    sys.exit(f"{failed} of {len(results)} commands failed" if failed else 0)


if __name__ == "__main__":
    main()

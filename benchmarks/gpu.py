"""All that wants an accelerator, in one command, and a page of what was printed: the tests marked `gpu`, generation
beside vLLM, a GRPO step beside TRL, exactness.

    .venv/bin/python benchmarks/gpu.py                                      # docs/gpu_results.md
    .venv/bin/python benchmarks/gpu.py --device cpu --models tiny --no-peers    # the same commands, anywhere
    python3 benchmarks/gpu.py --no-peers --wheels wheels --seconds 120 --page results.md    # nothing is installed

`--models` are directories, or shapes of `made_model.py`, whose weights are random: nothing is fetched. Left out, they
are the shapes of Qwen2.5-0.5B and, from 60 GB of device memory on, of Qwen2.5-7B. A peer whose environment cannot be
made is left out, and the page says so.

The package need not be installed, only torch and transformers. What else it needs may lie in the folder `--wheels`, as
wheels or unpacked; a part that finds a package missing says which, and the others run. The page is written anew after
each part. Ends with 1 if a part fails, or takes more than `--seconds`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu_results.md"
ENOUGH_FOR_7B = 60e9
#: Seconds for what a part has printed to be read once it has ended.
_DRAIN = 10.0
_OURS = ("verl", "tests", "benchmarks")
_MISSING = re.compile(r"No module named '?([\w.]+)")


@dataclass
class Part:
    """A command of the whole.

    Attributes:
        command: arguments of Python.
        verdict: how it ended; "" before that.
        lines: what it printed.
    """

    heading: str
    command: list[str]
    verdict: str = ""
    lines: list[str] = field(default_factory=list)

    def section(self) -> str:
        """Of the page."""
        shown = " ".join(self.command).replace(str(ROOT) + "/", "")
        return f"## {self.heading}: {self.verdict}\n\n```\n$ python {shown}\n{''.join(self.lines[-40:])}```"


def parts(args: argparse.Namespace) -> Iterator[Part]:
    """In the order in which they run."""
    import made_model

    small = args.models[0] == "tiny"
    yield Part("Tests", ["-m", "pytest", "-q", "-rs", "-m", "gpu", "--device", args.device, "tests/test_gpu.py"])
    size = ["--prompts", "3", "--new-tokens", "6"] if small else []
    yield Part("Exactness", ["benchmarks/exactness.py", "--device", args.device, *size])
    engines = ["embedded", "generate"] if args.no_peers else ["embedded", "vllm", "generate"]
    for name in args.models:
        place = Path(name).resolve()
        if name in made_model.SHAPES:
            place = args.made.resolve() / name
            yield Part(f"Model, {name}", ["benchmarks/made_model.py", name, str(place), "--device", args.device])
        model = ["--model", str(place), "--device", args.device]
        work = (
            ["--prompts", "2", "--samples", "2", "--new-tokens", "8", "--batch", "4"] if small else ["--repeats", "3"]
        )
        yield Part(f"Rollout, {name}", ["benchmarks/rollout.py", *model, *work, "--no-preload", "--engines", *engines])
        if args.device != "cpu" and "7b" in name:
            continue  # fp32 masters, gradients and moments of 7.6 billion weights do not fit on one device
        step = ["--steps", "1", "--dtypes", "fp32", "--micro-batches", "32"] if small else ["--steps", "3"]
        peer = ["--no-peer"] if args.no_peers else []
        yield Part(f"GRPO step, {name}", ["benchmarks/grpo_step.py", *model, *step, *peer])


def machine(chosen: str) -> str:
    """What the figures were measured on."""
    import torch
    import transformers

    import verl
    from verl._host import device

    lines = [
        f"- Device: {device.device_name(chosen) if chosen != 'cpu' else platform.processor() or platform.machine()}"
        + (f", {device.total_memory(chosen) / 1e9:.0f} GB" if chosen != "cpu" else ", CPU"),
        f"- torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}",
        f"- verl {verl.__version__}{_commit()}, {datetime.date.today().isoformat()}",
    ]
    return "\n".join(lines)


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return f" ({done.stdout.strip()})" if done.returncode == 0 else ""


def unpacked(wheels: Path, folder: Path) -> list[str]:
    """Where Python finds what lies in `wheels`: there, and in `folder`, into which those for this Python are unpacked.

    Extensions cannot be imported out of a wheel as it is.
    """
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    if not wheels.is_dir():
        sys.exit(f"--wheels {wheels}: there is no such folder")
    fitting = set(sys_tags())
    for wheel in sorted(wheels.glob("*.whl")):
        if fitting.isdisjoint(parse_wheel_filename(wheel.name)[3]):
            print(f"{wheel.name} is left out: it is not for Python {platform.python_version()} on this machine")
            continue
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
    beside = [path for kind in ("purelib", "platlib") for path in folder.glob(f"*.data/{kind}")]
    return [str(path) for path in (wheels.resolve(), folder, *beside)]


def run(part: Part, seconds: float) -> None:
    """Run a part; what it prints is shown as it comes."""
    print(f"\n== {part.heading}: python {' '.join(part.command)}", flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start, errors = time.monotonic(), []
    process = subprocess.Popen(
        [sys.executable, *part.command], cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip

    def read(stream: Iterator[str], lines: list[str], to: str) -> None:
        for line in stream:
            print(line, end="", flush=True, file=getattr(sys, to))
            lines.append(line)

    # Progress and errors go to the terminal alone.
    pipes = ((process.stdout, part.lines, "stdout"), (process.stderr, errors, "stderr"))
    threads = [threading.Thread(target=read, args=pipe, daemon=True) for pipe in pipes]
    for thread in threads:
        thread.start()
    try:
        process.wait(seconds)
        part.verdict = "passed" if process.returncode == 0 else f"FAILED ({process.returncode})"
    except subprocess.TimeoutExpired:
        part.verdict = f"FAILED (ended at its limit of {seconds:g} s)"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and all that it started
        process.wait()
        for thread in threads:
            thread.join(_DRAIN)
    # What a part ends with, or a process that it started; pytest says it on the way, of a module that it collects.
    ends = "".join([line for line in errors if line.strip()][-3:])
    ends += "".join(line for line in part.lines if line.startswith("E   ModuleNotFoundError"))
    missing = {name.partition(".")[0] for name in _MISSING.findall(ends)} - set(_OURS)
    if process.returncode > 0 and missing:
        part.verdict = f"NOT RUN, package {' and '.join(sorted(missing))} is missing,"
    part.verdict += f" in {time.monotonic() - start:.0f} s"


def write(page: Path, about: str, plan: list[Part]) -> None:
    """The page as far as it goes."""
    done = [part.section() for part in plan if part.verdict]
    rest = [part.heading for part in plan if not part.verdict]
    end = [f"Still to run: {'; '.join(rest)}."] if rest else []
    whole = page.with_name(page.name + ".new")
    whole.write_text("\n\n".join(["# What ran on an accelerator", about, *done, *end]) + "\n", encoding="utf-8")
    whole.replace(page)


def main() -> None:
    """Run all, write the page, and end with 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", help="such as cuda (the first accelerator of this machine)")
    parser.add_argument("--models", nargs="+", help="directories, or shapes of made_model.py, such as qwen2.5-0.5b")
    parser.add_argument("--only", default="", help="only the parts whose heading begins so, such as Rollout")
    parser.add_argument("--no-peers", action="store_true", help="without vLLM and TRL")
    parser.add_argument("--wheels", type=Path, help="a folder of packages that come before those of the environment")
    parser.add_argument("--seconds", type=float, default=3600.0, help="that a part may take")
    parser.add_argument("--page", type=Path, help="the page to write (docs/gpu_results.md; none for the CPU)")
    parser.add_argument("--made", type=Path, default=ROOT / "models" / "made", help="where models are made")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the part that runs ends, too
    with tempfile.TemporaryDirectory(prefix="verl-wheels-") as folder:
        first = [str(ROOT), *(unpacked(args.wheels, Path(folder)) if args.wheels else ())]
        sys.path[:0] = first
        os.environ["PYTHONPATH"] = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """With the import path as it is to be."""
    from verl._host import device

    args.device = args.device or device.accelerator()
    if args.device is None:
        sys.exit("torch finds no accelerator on this machine (torch.accelerator.is_available() is False)")
    if args.models is None:
        roomy = args.device != "cpu" and device.total_memory(args.device) > ENOUGH_FOR_7B
        args.models = ["qwen2.5-0.5b", "qwen2.5-7b"] if roomy else ["qwen2.5-0.5b"]
    plan = [part for part in parts(args) if part.heading.startswith(args.only)]
    # What is made for those that were asked for, first.
    models = {part.heading.partition(", ")[2] for part in plan}
    plan = [part for part in parts(args) if part in plan or part.heading.removeprefix("Model, ") in models]
    page, about = args.page or (PAGE if args.device != "cpu" else None), machine(args.device)
    for part in plan:
        run(part, args.seconds)
        if page is not None:
            write(page, about, plan)
    if page is not None:
        print(f"\n{page}")
    for part in plan:
        print(f"{part.heading}: {part.verdict}")
    failed = sum(part.verdict.startswith("FAILED") for part in plan)
    sys.exit(f"{failed} of {len(plan)} parts failed" if failed else 0)


if __name__ == "__main__":
    main()

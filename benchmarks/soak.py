"""Does anything grow while a run goes on? 2,000 small steps a mode, or two hours: exit status 1 names what grew.

    .venv/bin/python benchmarks/soak.py                                   # all three modes
    .venv/bin/python benchmarks/soak.py --modes async --steps 500 --out soak
    .venv/bin/python benchmarks/soak.py --hours 0.5                       # as far as it comes in that time

Modes: `sync` is GRPO with checkpoints, `async` the same by `AsyncTrainer` with a worker of its own on a Ray cluster,
`tasks` three tasks on one actor, one of them PPO with a critic. Each runs in a process of its own on a tiny model, with
prompts and responses of changing lengths. Every few steps all processes that the mode has started are measured:

    memory         resident, in MB            threads        descriptors     processes
    shared         files in /dev/shm, MB      temporary      files below TMPDIR and Ray's directory, logs left out, MB
    log            bytes a step: metrics of the run, and what Ray writes

The first third of the steps warms up. What is larger in the last third than in the second, by medians and more than
`ALLOWED` says, grew. A log grows with the steps, so its bytes a step count. With `--out` the readings are kept, one a
line. Of other programs nothing is counted but files in /dev/shm that no process has open.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import workload

os.environ["HF_HUB_OFFLINE"] = "1"

MODES = ("sync", "async", "tasks")
#: The environment variable by which the processes of a mode are known.
MARK = "VERL_SOAK"
#: Growth that is none: a share of the second third, and as much again in its unit.
ALLOWED = {
    "memory": (0.02, 8.0),
    "threads": (0.0, 2.0),
    "descriptors": (0.0, 4.0),
    "processes": (0.0, 0.0),
    "shared": (0.02, 2.0),
    "temporary": (0.02, 1.0),
    "log": (0.1, 100.0),
}
PROMPTS, SAMPLES = 4, 4


@dataclass(frozen=True)
class Reading:
    """Of all processes of a mode, after `step` steps; sizes in MB, the log in bytes a step since the last reading."""

    step: int
    seconds: float
    memory: float
    threads: int
    descriptors: int
    processes: int
    shared: float
    temporary: float
    log: float


def processes(mark: str) -> Iterator[Path]:
    """Folders in /proc of the processes that have this mark."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield folder
        except OSError:
            continue


def status(folder: Path, field: str) -> int:
    lines = (folder / "status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


def open_files(folder: Path) -> list[str]:
    names = []
    for link in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):  # of this very listing, it is closed by now
            names.append(os.readlink(link))
    return names


def shared_memory(before: set[str], mark: str) -> float:
    """MB of files in /dev/shm that were not there before and are not another program's."""
    names = {path.name for path in Path("/dev/shm").iterdir()} - before
    if not names:
        return 0.0
    ours = {str(folder) for folder in processes(mark)}
    others = set()
    for folder in Path("/proc").glob("[0-9]*"):
        if str(folder) not in ours:
            try:
                others |= {name for name in names if any(file.endswith(f"/{name}") for file in open_files(folder))}
            except OSError:
                continue
    return sum(size(Path("/dev/shm") / name) for name in names - others) / 1e6


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def files(folder: Path) -> tuple[int, int]:
    """Bytes of the logs below, and of all else."""
    logs = others = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            if {"logs", "run"} & set(path.relative_to(folder).parts[:-1]):
                logs += 0 if "checkpoints" in path.parts else size(path)
            else:
                others += size(path)
    return logs, others


class Meter:
    """Takes readings of this process and all that it starts.

    Args:
        folder: of the mode, with the run's directory "run", TMPDIR and Ray's directory in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._mark = folder, os.environ[MARK]
        self._shared = {path.name for path in Path("/dev/shm").iterdir()}
        self._begun = time.monotonic()
        self._last = (0, 0)

    def read(self, step: int) -> Reading:
        sums = dict.fromkeys(("memory", "threads", "descriptors", "processes"), 0)
        for process in processes(self._mark):
            try:
                numbers = {
                    "memory": status(process, "VmRSS"),
                    "threads": status(process, "Threads"),
                    "descriptors": len(os.listdir(process / "fd")),
                    "processes": 1,
                }
            except OSError:  # it has just ended
                continue
            sums = {name: sums[name] + number for name, number in numbers.items()}
        log, temporary = files(self._folder)
        before, self._last = self._last, (step, log)
        return Reading(
            step=step,
            seconds=round(time.monotonic() - self._begun, 1),
            memory=round(sums.pop("memory") / 1024, 1),
            **sums,
            shared=round(shared_memory(self._shared, self._mark), 2),
            temporary=round(temporary / 1e6, 2),
            log=round((log - before[1]) / max(1, step - before[0]), 1),
        )


def prompts() -> Iterator[list[str]]:
    """Batches of texts of other lengths each time."""
    rng = random.Random(0)
    while True:
        yield [f"{rng.randrange(10 ** rng.randint(1, 40))} and" for _ in range(PROMPTS)]


def digits(texts: list[str]) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def short(texts: list[str]) -> list[float]:
    return [-float(len(text)) for text in texts]


def make_trainer(mode: str, folder: Path) -> tuple[Any, Iterator[Any]]:
    """The trainer of a mode, and its prompts."""
    import verl

    actor = verl.Actor(
        str(folder / "model"),
        dtype="float32",
        rollout="embedded",
        kv_cache_gb=0.02,
        sampling={"max_new_tokens": 24},
        max_tokens_per_micro_batch=400,
        seed=0,
    )
    options: dict[str, Any] = {"log_dir": str(folder / "run")}
    if mode == "tasks":
        tasks = [
            verl.Task("digits", "grpo", {"reward": digits}, n=SAMPLES),
            verl.Task("short", "ppo", {"reward": short}, n=2),
            verl.Task("both", "rloo", {"reward": digits}, n=2),
        ]
        each = ({"digits": rows[:2], "short": rows[2:3], "both": rows[3:]} for rows in prompts())
        return verl.Trainer(actor, tasks=tasks, **options), each
    options |= {"reward_fn": digits, "algorithm": "grpo", "n": SAMPLES}
    if mode == "async":
        return verl.AsyncTrainer(actor, batch_size=PROMPTS, **options), prompts()
    saving = {"checkpoint_dir": str(folder / "checkpoints"), "save_every": 5, "keep_checkpoints": 2}
    return verl.Trainer(actor, **options, **saving), prompts()


def run(mode: str, folder: Path, steps: int, seconds: float) -> None:
    """Go through the steps of a mode; prints its readings."""
    import torch
    from asynchronous import make_model

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the trainer prints is no reading
    torch.set_num_threads(1)
    make_model(folder / "model")
    trainer, batches = make_trainer(mode, folder)
    meter, every = Meter(folder), max(1, steps // 60)
    done = 0
    while done < steps:
        count = min(every, steps - done)
        trainer.fit(batches, count)
        done += count
        reading = meter.read(done)
        print(json.dumps(asdict(reading)), file=answers)
        if reading.seconds > seconds:
            break
    trainer.close()


def soak(mode: str, steps: int, seconds: float, out: Path | None) -> list[Reading]:
    """The readings of a mode.

    Raises:
        SystemExit: it failed.
    """
    mark = secrets.token_hex(8)
    # Sockets in Ray's directory want a short path.
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    (folder / "tmp").mkdir()
    environment = workload.environment(
        **{MARK: mark, "TMPDIR": str(folder / "tmp"), "RAY_TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    )
    command = [sys.executable, __file__, "--mode", mode, "--folder", str(folder)]
    command += ["--steps", str(steps), "--hours", str(seconds / 3600)]
    readings = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                readings.append(Reading(**json.loads(line)))
                if out is not None:
                    with (out / f"{mode}.jsonl").open("a") as file:
                        file.write(line)
            if process.wait():
                errors.seek(0)
                raise SystemExit(f"{mode} failed after {len(readings)} readings:\n{errors.read()[-3000:]}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            shutil.rmtree(folder, ignore_errors=True)
    return readings


def thirds(readings: Sequence[Reading]) -> list[tuple[str, float, float]]:
    """Of each quantity its name, and the medians of the second and the last third of the steps."""
    last = readings[-1].step
    parts = [
        [r for r in readings if start * last < 3 * r.step - 1e-9 <= (start + 1) * last] or [readings[-1]]
        for start in (1, 2)
    ]
    return [(name, *(statistics.median(getattr(r, name) for r in part) for part in parts)) for name in ALLOWED]


def grew(name: str, before: float, after: float) -> bool:
    share, more = ALLOWED[name]
    return after - before > share * before + more


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=2000, help="of each mode")
    parser.add_argument(
        "--hours", type=float, default=2.0, help="for all modes together; then it ends before its steps"
    )
    parser.add_argument("--out", type=Path, help="a folder for the readings, MODE.jsonl")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode:
        run(args.mode, args.folder, args.steps, 3600 * args.hours)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs ends, too
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    worse = []
    for mode in args.modes:
        readings = soak(mode, args.steps, 3600 * args.hours / len(args.modes), args.out)
        print(
            f"{mode}: {readings[-1].step} steps in {readings[-1].seconds:.0f} s; second third, last third", flush=True
        )
        for name, before, after in thirds(readings):
            verdict = "GREW" if grew(name, before, after) else "flat"
            print(f"  {name:12} {before:12,.1f} {after:12,.1f}  {verdict}", flush=True)
            worse += [f"{name} ({mode}: {before:,.1f} -> {after:,.1f})"] if verdict == "GREW" else []
    print(f"GREW: {', '.join(worse)}" if worse else "flat")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())

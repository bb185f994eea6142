"""Compare what two checkouts compute, number by number, or what it costs them.

    python scripts/compare.py OLD NEW             # equal to the last bit? (at most five minutes)
    python scripts/compare.py OLD NEW --full      # with all steps of the main job
    python scripts/compare.py OLD NEW --time      # CPU seconds of a rollout and of a step instead
    python scripts/compare.py --record            # make tests/records anew, and say what moved

OLD and NEW are directories of checkouts, or revisions of this one (main, HEAD~3), for which a worktree is made and
removed. Both run on this machine, with the same seeds, one thread each: small runs in fp64 (scripts/compared/runs.py),
and the first three steps of the main job, examples/grpo_arithmetic.yaml, in fp32. Every metric that no clock decides,
and the final weights, have to be equal. A metric that OLD does not have is listed and no difference. The scripts and
the recipe are those of this checkout, whatever OLD and NEW have, and use the command line and public names alone.

--time lets both do the same work at the same time on one core, which the system shares out between them every few
milliseconds: whatever else the machine does slows both alike. Each pair has processes of its own. The median ratio of
seven pairs is about 1.00 for equal work, more where NEW takes longer. Beyond 1.00 ± 0.02 it is different.

Exit status: 0 equal, 1 different, 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "scripts" / "compared" / "runs.py"
TIMING = ROOT / "scripts" / "compared" / "timing.py"
RECIPE = ROOT / "examples" / "grpo_arithmetic.yaml"
RECORDS = ROOT / "tests" / "records"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"

#: Small runs that share a process, and how many ranks it has.
PROCESSES = {("grpo", "ppo", "dpo", "tasks"): 1, ("async",): 1, ("fsdp_tp",): 4}
SMALL = [name for names in PROCESSES for name in names]
MAIN = "main"
#: As a record says it: relative for numbers above 1, else absolute.
BOUND = 1e-9
#: Parts of the names of metrics that a clock or the machine decides; whole names.
MEASURED, STAMPS = ("time/", "busy/", "_per_s", "memory/"), ("time",)
# Deadlines: a busy machine may take ten times as long as a quiet one.
SECONDS_A_PROCESS, SECONDS_FOR_ALL_STEPS, SECONDS_A_WINDOW = 1800, 36000, 600
PAIRS, TOLERANCE = 7, 0.02
#: What is timed -> how many times each checkout does it in a pair.
WINDOWS = {"rollout": 2, "step": 1}

Steps = Sequence[Mapping[str, float]]


class CannotRunError(Exception):
    """A checkout or its run failed; the message says which and how."""


def environment(checkout: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def call(checkout: Path, what: str, *args: str | Path, cwd: Path, seconds: float = SECONDS_A_PROCESS) -> None:
    """Python with these arguments, in the environment of a checkout.

    Raises:
        CannotRunError: it fails, or takes too long.
    """
    line = [sys.executable, *map(str, args)]
    log = cwd / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            line, env=environment(checkout), cwd=cwd, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            end = f"exit status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            end = f"no end after {seconds:g} s"
        finally:
            if process.returncode is None:  # its ranks and workers are in its group
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != 0:
        raise CannotRunError(f"{what} failed in {checkout}, {end}:\n{tail(log)}")


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def run_small(checkout: Path, names: Sequence[str], folder: Path) -> None:
    """Small runs that share a process; leaves their metrics and weights in `folder`."""
    ranks = PROCESSES[next(key for key in PROCESSES if set(names) <= set(key))]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    call(checkout, ", ".join(names), *torchrun, RUNS, folder, *names, cwd=folder)


def run_main(checkout: Path, folder: Path, full: bool) -> None:
    """The main job by the command line; leaves `main.json` and `main.safetensors` in `folder`."""
    shorter = (
        []
        if full
        else ["trainer.total_steps=3", "trainer.eval_every=null", "data.eval=null", "trainer.eval_metrics=[]"]
    )
    settings = {
        "actor_rollout_ref.model.path": MODEL,
        "actor_rollout_ref.model.dtype": "float32",
        "trainer.output_dir": folder / "runs",
        "trainer.keep_checkpoints": 1,
        "trainer.loggers": "[]",
    }
    line: list[str | Path] = [
        "-m",
        "verl",
        "train",
        RECIPE,
        *(f"{key}={value}" for key, value in settings.items()),
        *shorter,
    ]
    call(checkout, "the main job", *line, cwd=folder, seconds=SECONDS_FOR_ALL_STEPS if full else SECONDS_A_PROCESS)
    run = folder / "runs" / "latest"
    call(checkout, "the export of the main job", "-m", "verl", "export", run, folder / "model", cwd=folder)
    (folder / "model" / "model.safetensors").rename(folder / f"{MAIN}.safetensors")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (folder / f"{MAIN}.json").write_text(json.dumps(rows))
    for made in (run.resolve(), folder / "model"):
        shutil.rmtree(made)


def metrics_of(file: Path) -> list[dict[str, float]]:
    """The numbers of each step that neither a clock nor the machine decides."""
    return [
        {
            name: float(value)
            for name, value in row.items()
            if isinstance(value, int | float) and not (name in STAMPS or any(part in name for part in MEASURED))
        }
        for row in json.loads(file.read_text())
    ]


def size(old: float, new: float) -> str:
    relative = f", {abs(new - old) / abs(old):.2g} of it" if old and math.isfinite(old) else ""
    return f"{old!r} -> {new!r} (a difference of {abs(new - old):.2g}{relative})"


def is_equal(old: float, new: float) -> bool:
    return old == new or (math.isnan(old) and math.isnan(new))


def is_near(old: float, new: float) -> bool:
    """Within the bound of a record."""
    return is_equal(old, new) or abs(new - old) <= BOUND * max(1.0, abs(old))


def differences(old: Steps, new: Steps, same: Any = is_equal) -> Iterator[str]:
    """Each step and metric in which NEW is not as OLD is; a metric that OLD has not is none."""
    for number, (before, after) in enumerate(zip(old, new, strict=False), start=1):
        for name, value in before.items():
            if name not in after:
                yield f"step {number}, {name}: {value!r} -> it is gone"
            elif not same(value, after[name]):
                yield f"step {number}, {name}: {size(value, after[name])}"
    if len(old) != len(new):
        yield f"{len(old)} steps -> {len(new)} steps"


def weight_differences(old: Path, new: Path) -> Iterator[str]:
    """Each weight that is not equal in two safetensors files."""
    with safe_open(old, "pt") as before, safe_open(new, "pt") as after:
        names = set(after.keys())
        for name in before.keys():  # noqa: SIM118 - no mapping
            if name not in names:
                yield f"weight {name}: it is gone"
                continue
            a, b = before.get_tensor(name), after.get_tensor(name)
            if a.shape != b.shape or a.dtype != b.dtype:
                yield f"weight {name}: {a.dtype} {list(a.shape)} -> {b.dtype} {list(b.shape)}"
            elif not a.equal(b):
                gap = (a.double() - b.double()).abs()
                count = int((gap != 0).sum())
                yield f"weight {name}: {count} of {gap.numel()} numbers, by {float(gap.max()):.2g} at most"
        yield from (f"weight {name}: it is new" for name in sorted(names - set(before.keys())))


def new_names(old: Steps, new: Steps) -> list[str]:
    return sorted({name for row in new for name in row} - {name for row in old for name in row})


def report(name: str, old: Path, new: Path) -> bool:
    """Print how a run compares, given both folders; whether it is equal."""
    before, after = (metrics_of(folder / f"{name}.json") for folder in (old, new))
    weights = [folder / f"{name}.safetensors" for folder in (old, new)]
    found = [*differences(before, after), *weight_differences(*weights)]
    if found:
        print(f"{name:8} DIFFERENT in {len(found)} places, the first ones:")
        for line in found[:5]:
            print(f"         {line}")
    else:
        print(f"{name:8} equal: {len(before)} steps, {len(before[0])} metrics, all weights", flush=True)
    if added := new_names(before, after):
        print(f"         only in NEW: {', '.join(added)}")
    sys.stdout.flush()
    return not found


def say(began: float, text: str) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    clocks = f"{time.monotonic() - began:4.0f} s, {used.ru_utime + used.ru_stime:4.0f} CPU s"
    print(f"[{clocks}] {text}", file=sys.stderr, flush=True)


def compare(old: Path, new: Path, only: Sequence[str], full: bool) -> bool:
    """Run both in turn and report; whether all is equal."""
    began, good = time.monotonic(), True
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch:
        folders = [Path(scratch, side) for side in ("old", "new")]
        for folder in folders:
            folder.mkdir()
        for names in [*PROCESSES, (MAIN,)]:
            if not (wanted := [name for name in names if name in only]):
                continue
            if MAIN in wanted:  # most of the time, on one thread: at the same time where there are two cores
                say(began, "OLD and NEW: the main job")
                with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
                    list(pool.map(partial(run_main, full=full), (old, new), folders))
            else:
                for checkout, folder, side in zip((old, new), folders, ("OLD", "NEW"), strict=True):
                    say(began, f"{side}: {', '.join(wanted)}")
                    run_small(checkout, wanted, folder)
            for name in wanted:
                good &= report(name, *folders)
        say(began, "done")
    return good


class Worker:
    """A checkout's process that works when asked, and answers what it cost."""

    def __init__(self, checkout: Path, log: Path) -> None:
        self.checkout, self._log, self._answer = checkout, log, b""
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(TIMING), str(MODEL)],
                env=environment(checkout),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                bufsize=0,
            )

    def answer(self, seconds: float) -> str:
        """Its next line.

        Raises:
            CannotRunError: there is none in time.
        """
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._answer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(end - time.monotonic(), 0))
            part = os.read(self.process.stdout.fileno(), 4096) if ready else b""
            if not part:
                self.close()
                raise CannotRunError(
                    f"the timed process of {self.checkout} gave no answer in {seconds:g} s:\n{tail(self._log)}"
                )
            self._answer += part
        line, _, self._answer = self._answer.partition(b"\n")
        return line.decode()

    def begin(self, work: str) -> None:
        """Let it work; the answer is its CPU seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{work}\n".encode())

    def move_to(self, core: int) -> None:
        """Let every thread run on this core alone."""
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            os.sched_setaffinity(int(thread), {core})

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def pair(workers: Sequence[Worker], work: str, windows: int) -> float:
    """NEW's CPU seconds over OLD's, of work that both do at the same time."""
    spent = [0.0, 0.0]
    for _ in range(windows):
        for worker in workers:
            worker.begin(work)
        for side, worker in enumerate(workers):
            spent[side] += float(worker.answer(SECONDS_A_WINDOW))
    return spent[1] / spent[0]


@contextmanager
def workers_of(checkouts: Sequence[Path]) -> Iterator[list[Worker]]:
    """A worker of each, ready and all on one core."""
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch, ExitStack() as stack:
        workers = []
        for side, checkout in enumerate(checkouts):
            workers.append(Worker(checkout, Path(scratch, str(side))))
            stack.callback(workers[-1].close)
        for worker in workers:
            worker.answer(SECONDS_A_PROCESS)
        core = min(os.sched_getaffinity(0))
        for worker in workers:
            worker.move_to(core)
        yield workers


def time_both(old: Path, new: Path) -> bool:
    """Time both and report; whether they cost the same."""
    began = time.monotonic()
    ratios: dict[str, list[float]] = {work: [] for work in WINDOWS}
    for number in range(1, PAIRS + 1):
        # Processes of its own for each pair: where its memory lies can make one 2 % faster for as long as it lives.
        with workers_of((old, new)) as workers:
            for work, windows in WINDOWS.items():
                ratios[work].append(pair(workers, work, windows))
        say(began, f"pair {number} of {PAIRS}: " + ", ".join(f"{w} {r[-1]:.3f}" for w, r in ratios.items()))
    good = True
    for work, of_pairs in ratios.items():
        middle = statistics.median(of_pairs)
        same = abs(middle - 1) <= TOLERANCE
        good &= same
        more = f"{abs(middle - 1):.1%} {'more' if middle > 1 else 'less'}"
        verdict = "as fast" if same else f"DIFFERENT: NEW takes {more}"
        print(f"{work:8} {middle:.3f} of OLD's CPU seconds ({min(of_pairs):.3f} to {max(of_pairs):.3f}): {verdict}")
    return good


def write_records(folder: Path, only: Sequence[str]) -> bool:
    """Run this checkout, write its metrics to `folder`, and report what moved; whether nothing did."""
    began, good = time.monotonic(), True
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch:
        for names in PROCESSES:
            if not (wanted := [name for name in names if name in only]):
                continue
            say(began, ", ".join(wanted))
            run_small(ROOT, wanted, Path(scratch))
            for name in wanted:
                good &= _write_record(folder / f"{name}.json", metrics_of(Path(scratch, f"{name}.json")))
    return good


def _write_record(file: Path, steps: Steps) -> bool:
    before = json.loads(file.read_text()) if file.exists() else None
    moved = ["it is new"] if before is None else [*differences(before, steps, is_near)]
    if before is not None and (added := new_names(before, steps)):
        moved.append(f"new metrics: {', '.join(added)}")
    if moved:  # else the digits beyond the bound stay as they are
        file.write_text(json.dumps(steps, indent=1) + "\n")
    print(f"{file.stem:8} " + ("\n         ".join(["MOVED:", *moved]) if moved else f"within {BOUND:g} of the record"))
    return not moved


def check(checkout: Path) -> Path:
    """The checkout, found to be what Python imports in its environment.

    Raises:
        CannotRunError: it is not.
    """
    command = [sys.executable, "-c", "import verl; print(verl.__file__)"]
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            command, env=environment(checkout), cwd=empty, capture_output=True, text=True, check=False
        )
    wanted = checkout / "verl" / "__init__.py"
    if done.returncode or Path(done.stdout.strip()) != wanted:
        raise CannotRunError(
            f"{checkout} is no checkout: `import verl` finds {done.stdout or done.stderr}, not {wanted}"
        )
    return checkout


@contextmanager
def checkout_of(name: str) -> Iterator[Path]:
    """The directory of a checkout, or a worktree of a revision for as long as it is needed.

    Raises:
        CannotRunError: it is neither.
    """
    if Path(name).is_dir():
        yield check(Path(name).resolve())
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch:
        path = Path(scratch, "checkout")
        made = subprocess.run([*git, "add", "--detach", str(path), name], capture_output=True, text=True, check=False)
        if made.returncode:
            raise CannotRunError(f"'{name}' is neither a directory nor a revision: {made.stderr.strip()}")
        try:
            yield check(path.resolve())
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], capture_output=True, check=False)


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    text = __doc__ or ""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", nargs="?", help="a checkout's directory, or a revision")
    parser.add_argument("new", metavar="NEW", nargs="?", help="another one")
    parser.add_argument("--full", action="store_true", help="all steps of the main job, with its evaluations")
    parser.add_argument("--time", action="store_true", help="CPU seconds, instead of numbers")
    parser.add_argument("--record", action="store_true", help="run this checkout, and write its metrics to --records")
    parser.add_argument(
        "--records", metavar="DIR", type=Path, default=RECORDS, help="where records are [tests/records]"
    )
    parser.add_argument("--only", metavar="RUN", nargs="+", choices=[*SMALL, MAIN], help="some runs: %(choices)s")
    options = parser.parse_args(args)
    if options.record:
        if options.old or options.time or options.full or MAIN in (options.only or ()):
            parser.error("--record runs the small runs of this checkout: leave OLD, NEW, --full, --time and main out")
    elif options.new is None:
        parser.error("give two checkouts, OLD and NEW, or --record")
    if options.time and (options.full or options.only):
        parser.error("--time has work of its own: leave --full and --only out")
    options.only = options.only or [*SMALL, MAIN]
    return options


def main() -> int:
    options = parse()
    try:
        if options.record:
            return 0 if write_records(options.records, options.only) else 1
        if (options.time or MAIN in options.only) and not (MODEL / "config.json").is_file():
            raise CannotRunError(f"there is no model in {MODEL}: `make model` gets it")
        with checkout_of(options.old) as old, checkout_of(options.new) as new:
            good = time_both(old, new) if options.time else compare(old, new, options.only, options.full)
    except CannotRunError as error:
        print(error, file=sys.stderr)
        return 2
    print("equal" if good else "different")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

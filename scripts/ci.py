"""What continuous integration runs on a fresh machine, within 45 minutes.

    python scripts/ci.py            CI_BUDGET_SECONDS: another bound

`make test`, `make docs` and `scripts/work.py` as a whole. The slow tests, vLLM's among them, and what needs an
environment of its own take turns: six successive commits run each once. In `make test` the processor takes turns: the
instruction sets of older ones, and more threads. The turn is the number of commits up to this
one, or, where history is shallow, the hash of this one, modulo 6. Whatever the time was too short for is a failure. On
a machine so slow that a share would not fit, known by what `make test` took, a turn does half of its share, and the
other half the next time.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
TURNS = 6
BUDGET_SECONDS = 2700.0
#: `make test` takes about 400 s, with the install, where a whole share fits; where it takes longer, half does.
SLOW_MACHINE_SECONDS = 500.0
#: By turn: what is tried in an environment of its own (scripts/environments.py).
ENVIRONMENTS = (
    ("python3.11", "no-compiler"), ("read-only-home",), ("python3.12", "wheel"), ("python3.13", "agents"),
    ("lower-bounds",), ("trl",),
)  # fmt: skip
#: By turn: what the fast tests run with, such as the instruction sets of older processors.
PROCESSORS = (
    {}, {"ATEN_CPU_CAPABILITY": "default"}, {"ATEN_CPU_CAPABILITY": "avx2"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"VERL_KERNELS_MARCH": "x86-64-v2"}, {"OMP_NUM_THREADS": "4"},
)  # fmt: skip
#: Exit status of a job whose environment cannot be made on this machine.
NOT_MADE = 77
#: The rest of the budget is for ending what is out of time, and for the summary.
_SHARE_OF_PARTS = 0.97
#: How long a part that is out of time has to say where it was.
_INTERRUPT_SECONDS = 30.0
_SUMMARY = re.compile(r"=+ (.* in [\d.]+s.*?) =+$")
#: As tests/session.py says it.
_LEFT = "left to turn "
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_DURATION = re.compile(r"([\d.]+)s (call|setup|teardown) +(.+)$")


@dataclass
class Part:
    """A command and what came of it.

    Attributes:
        may_be_missing: it needs an environment that this machine may be unable to make.
        env: variables that it has besides this process's.
        outcome: in words.
        failed: neither passed nor missing.
        seconds: wall time.
        cpu_seconds: of all its processes that were waited for, user and system.
        summaries: what pytest said last.
        left: what pytest said of the shares of other turns.
        durations: the slowest of its tests: seconds, phase and name.
    """

    command: list[str]
    may_be_missing: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    outcome: str = "NOT RUN: the time was up before"
    failed: bool = True
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    summaries: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    durations: list[tuple[float, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.env.items()), *self.command])

    def run(self, until: float) -> None:
        """Run it, copying its output, and end it at `until` (of the monotonic clock)."""
        begun, cpu_begun = time.monotonic(), _cpu_seconds()
        print(f"\n{'#' * 8} {self.name}", flush=True)
        environment = {**os.environ, **self.env, "TEST_ARGS": "--durations=10"}
        process = subprocess.Popen(
            self.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        # A daemon that a test left may hold the pipe open: the process is waited for, not the end of its output.
        reader = threading.Thread(target=self._copy, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            status = process.wait(max(until - time.monotonic(), 0))
            self.failed = status != 0 and not (self.may_be_missing and status == NOT_MADE)
            self.outcome = "passed" if status == 0 else f"FAILED with exit status {status}"
            if status and not self.failed:
                self.outcome = "not run: the environment cannot be made here"
        except subprocess.TimeoutExpired:
            self.outcome = "FAILED: the time was up"
            _end(process)
        reader.join(5)
        self.seconds, self.cpu_seconds = time.monotonic() - begun, _cpu_seconds() - cpu_begun

    def _copy(self, output: IO[bytes]) -> None:
        line = b""
        while chunk := output.read1(1 << 16):  # type: ignore[attr-defined]
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            *lines, line = (line + chunk).split(b"\n")
            for each in lines:
                text = _COLOUR.sub("", each.decode(errors="replace").rstrip())
                if match := _SUMMARY.match(text):
                    self.summaries.append(match[1])
                elif match := _DURATION.match(text):
                    self.durations.append((float(match[1]), f"{match[2]:8} {match[3]}"))
                elif text.startswith(_LEFT):
                    self.left.append(text)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt its group, so that pytest says where it was; kill what is left."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_INTERRUPT_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_INTERRUPT_SECONDS)


def git(root: Path, *words: str) -> str:
    # A checkout may be another user's than root's.
    command = ["git", "-c", "safe.directory=*", *words]
    return subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout.strip()


def commits(root: Path) -> tuple[int, str]:
    """The number that decides the turn, and which one that is."""
    if git(root, "rev-parse", "--is-shallow-repository") == "true":
        commit = git(root, "rev-parse", "HEAD")
        return int(commit, 16), f"by the hash {commit}: history is shallow, so that commits cannot be counted"
    count = int(git(root, "rev-list", "--count", "HEAD"))
    return count, f"by the number of commits, {count}"


def turn(root: Path) -> tuple[int, str]:
    """This commit's turn, and why it is that one."""
    number, why = commits(root)
    return number % TURNS, why


def halve(every: list[Part], half: int) -> None:
    """Have the parts that take turns do this half of their share."""
    for part in every:
        if any(word.startswith("TURN=") for word in part.command):
            part.command.append(f"HALF={half}")
    print(f"\nThis machine is slow: half {half} of this turn's share; the other half the next time", flush=True)


def parts(number: int) -> list[Part]:
    """All of this turn, in order."""
    python = str(Path(os.environ.get("VENV", ".venv")) / "bin" / "python")
    return [
        Part(["make", "test"], env=PROCESSORS[number]),
        Part(["make", "docs"]),
        Part([python, "scripts/work.py"]),
        Part(["make", "test-slow", f"TURN={number}"]),
        Part(["make", "test-vllm", f"TURN={number}"]),
        *(Part([python, "scripts/environments.py", name], may_be_missing=True) for name in ENVIRONMENTS[number]),
    ]


def main() -> None:
    begun, budget = time.monotonic(), float(os.environ.get("CI_BUDGET_SECONDS", BUDGET_SECONDS))
    number, why = turn(ROOT)
    print(f"turn {number} of {TURNS} (0 to {TURNS - 1}), {why}; {budget:.0f} s", flush=True)
    every = parts(number)
    until = begun + budget * _SHARE_OF_PARTS
    for part in every:
        if time.monotonic() < until:
            part.run(until)
        if part is every[0] and part.seconds > SLOW_MACHINE_SECONDS:
            halve(every, commits(ROOT)[0] // TURNS % 2)
    print(f"\n{'#' * 8} turn {number} of {TURNS}, {why}: {time.monotonic() - begun:.0f} of {budget:.0f} s")
    print("The ten slowest:")
    for seconds, name in sorted((pair for part in every for pair in part.durations), reverse=True)[:10]:
        print(f"  {seconds:7.1f} s  {name}")
    print("Left to other commits:")
    for line in sorted(line for part in every for line in part.left):
        print(f"  {line}")
    for other in range(TURNS):
        if other != number:
            print(f"  {_LEFT}{other}: {', '.join([*ENVIRONMENTS[other], *PROCESSORS[other]])}")
    print("Done by this one:")
    for part in every:
        print(f"  {part.seconds:6.0f} s, {part.cpu_seconds:6.0f} of CPU  {part.name}: {part.outcome}")
        for summary in part.summaries:
            print(f"            {summary}")
    failed = [part.name for part in every if part.failed]
    print(f"FAILED: {', '.join(failed)}" if failed else "passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

"""One trial: a `verl train` in a process of its own, so that whatever ends it ends nothing else."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from verl.errors import nearest
from verl.report.reading import is_number, read_rows

#: Seconds between two looks at the records of a run, and those a run has to save when it is stopped.
LOOK, SAVE = 1.0, 300.0


class TrialFailedError(Exception):
    """A trial ended without a value; the message is the reason."""


class UnknownMetricError(TrialFailedError):
    """The run finished, and no record of it has the metric."""


def run_trial(command: Sequence[str], log: Path, is_hopeless: Callable[[], bool]) -> bool:
    """Run `verl train` with `command` behind it to its end; False: it was stopped before.

    Args:
        log: gets what it prints.
        is_hopeless: asked every `LOOK` seconds; True stops the run.

    Raises:
        TrialFailedError: it ended with an error or by a signal.
    """
    watch = None
    # A run ends with the process that started it, even if that is killed; elsewhere it goes on.
    if sys.platform == "linux":
        from verl.sandbox.jail import die_with_parent

        watch = partial(die_with_parent, os.getpid())
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "verl", "train", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
            # A Ctrl-C is handed on by us, once: the second signal would keep it from saving.
            start_new_session=True,
            preexec_fn=watch,
        )
        code = None
        try:
            while code is None and not is_hopeless():
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(LOOK)
        finally:
            _stop(process)
    if code:
        raise TrialFailedError(_reason(code, log, begin))
    return code == 0


def value_of(run: Path, metric: str, last: int) -> float:
    """The mean of the last records of a metric in a finished run.

    Raises:
        UnknownMetricError: no record has it.
        TrialFailedError: it never was a number.
    """
    rows = read_rows(run / "metrics.jsonl")
    if values := [row[metric] for row in rows if is_number(row.get(metric))][-last:]:
        return math.fsum(values) / len(values)
    known = {name for row in rows for name in row} - {"step"}
    if metric in known:
        raise TrialFailedError(f"{metric} was never a finite number")
    raise UnknownMetricError(f"no record of the run has the metric '{metric}': {nearest(metric, known)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a run by a checkpoint; at once if that takes too long or we are interrupted again."""
    process.terminate()  # which does nothing to one that has ended
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAVE)
    finally:
        process.kill()
        process.wait()


def _reason(code: int, log: Path, begin: int) -> str:
    """Why a run ended: the signal that killed it, its error, or the last that it said."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
    with log.open("rb") as file:
        file.seek(begin)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    said = (errors or lines or ["without a word"])[-1]
    return f"exit status {code}: {said.removeprefix('error: ')}"

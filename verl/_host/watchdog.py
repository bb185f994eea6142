"""A process that watches another one, whose interpreter may be held by a call of the user's code, so that no thread of
it runs and no signal is heard: `python -I -S watchdog.py PID TABLE SIGNALS STACKS FOLDER ...`. Started by
`verl._host.user_calls`.

Imports the standard library alone.
"""

from __future__ import annotations

import mmap
import os
import re
import select
import signal
import struct
import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

#: Seconds between two signs of life of the other process.
TICK = 0.5
#: Seconds without one after which the interpreter counts as held, that a late call or a signal waits from then on, and
#: after which a late call is ended whichever thread is busy.
HELD, GRACE, LONG = 3.0, 5.0, 60.0
#: The table that both have in memory begins with the time of the last sign of life, and whether the process ends as it
#: should. Then come calls: the deadline (0: there is none in this row), when it began, its thread for the system and
#: for Python, its name.
BEAT, HEAD, CALL, CALLS = struct.Struct("<d"), struct.Struct("<dQ"), struct.Struct("<ddQQ96s"), 256
SIZE = CALL.size * (1 + CALLS)
#: Has the other process write the stacks of all threads, which takes no interpreter.
DUMP = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGUSR2", 0)
_HINT = "The same command goes on from the last checkpoint"


class Watchdog:
    """Watches the process `pid`.

    Args:
        table, signals, stacks: files: the table of calls, a pipe with the numbers of its signals, and where `DUMP` has
            the stacks written.
        folders: of code that is not the user's.
    """

    def __init__(self, pid: int, table: int, signals: int, stacks: int, folders: Sequence[str]) -> None:
        self.pid, self.signals, self.stacks, self.folders = pid, signals, stacks, (*folders, "<frozen")
        self.table = mmap.mmap(table, SIZE, prot=mmap.PROT_READ)
        self.beat, self.held = 0.0, 0.0
        #: Signals that came since the last sign of life, and when.
        self.asked: list[tuple[int, float]] = []
        self.busy: set[int] = set()
        self._ticks: dict[int, int] = {}

    def watch(self) -> None:
        """Until the process ends."""
        while True:
            began = time.monotonic()
            if select.select([self.signals], [], [], TICK)[0]:
                if not (numbers := os.read(self.signals, 64)):
                    return self.ended()
                self.asked += [(n, time.monotonic()) for n in numbers if n in (signal.SIGINT, signal.SIGTERM)]
            self.look(time.monotonic() - began)
            if self.held >= HELD and (calls := self.calls()):
                self.judge(calls)

    def look(self, seconds: float) -> None:
        """How long the interpreter has been held, and which threads were busy since the last look. A process that was
        stopped, or a machine that stood still, holds nothing."""
        before, self.beat = self.beat, HEAD.unpack_from(self.table)[0]
        if self.beat != before or _stat(f"/proc/{self.pid}/stat")[0] in ("T", "t"):
            self.held, self.asked = 0.0, [asked for asked in self.asked if asked[1] > self.beat]
            return
        self.held += min(seconds, 2 * TICK)
        if seconds >= TICK:
            ticks = self.ticks()
            self.busy = {thread for thread, count in ticks.items() if count - self._ticks.get(thread, count) >= 2}
            self._ticks = ticks

    def ticks(self) -> dict[int, int]:
        """CPU ticks by thread; empty where the system does not say."""
        folder = f"/proc/{self.pid}/task"
        threads = os.listdir(folder) if os.path.isdir(folder) else []
        fields = {int(thread): _stat(f"{folder}/{thread}/stat") for thread in threads}
        return {thread: int(of[11]) + int(of[12]) for thread, of in fields.items() if len(of) > 12}

    def calls(self) -> list[tuple[float, int, int, str]]:
        """The innermost call of each thread, the latest first; it is late as soon as one of its thread's calls is."""
        entries = [entry for entry in CALL.iter_unpack(self.table[CALL.size :]) if entry[0]]
        calls: dict[int, tuple[float, int, int, str]] = {}
        for until, _, thread, ident, name in sorted(entries, key=lambda entry: -entry[1]):
            inner = calls.get(thread, (until, thread, ident, name.rstrip(b"\0").decode(errors="replace")))
            calls[thread] = (min(until, inner[0]), *inner[1:])
        return [*calls.values()]

    def judge(self, calls: list[tuple[float, int, int, str]]) -> None:
        """End the process if a call holds the interpreter beyond its deadline, or while it was asked to end."""
        busy = [call for call in calls if call[1] in self.busy]
        suspects = busy or ([] if self.busy and self.held < LONG else calls)
        if suspects and all(call[0] + GRACE < time.monotonic() for call in suspects):
            self.end(suspects, "holds the interpreter beyond its deadline, and nothing in the process can stop it")
        elif len(self.asked) > 1 or (self.asked and self.asked[0][1] + GRACE < time.monotonic()):
            name = signal.Signals(self.asked[-1][0]).name
            self.end(busy or calls, f"holds the interpreter, so that {name} is not heard")

    def end(self, calls: list[tuple[float, int, int, str]], why: str) -> NoReturn:
        # Threads that only want the interpreter wait for its lock: another one is to blame.
        call = min(calls, key=lambda call: "futex" in "".join(_stat(f"/proc/{self.pid}/task/{call[1]}/wchan")))
        os.kill(self.pid, DUMP)
        time.sleep(TICK)
        text = os.pread(self.stacks, 1 << 18, 0).decode(errors="replace")
        stack = re.search(rf"hread 0x0*{call[2]:x} \(.*\n((?:  .*\n)*)", text)
        lines = stack[1].splitlines() if stack else []
        users = re.compile(r'  File "(?!' + "|".join(map(re.escape, self.folders)) + r')(.*)", line (\d+) in (.*)')
        where = next((f" at {m[1]} line {m[2]}, in {m[3]}," for m in map(users.match, lines) if m), "")
        said = f"verl: {call[3]}{where} {why}: process {self.pid} is ended. {_HINT}\n" + "\n".join(lines[:20])
        os.write(2, f"{said}\n".encode())
        os.kill(self.pid, signal.SIGKILL)
        os._exit(0)

    def ended(self) -> None:
        """Name what was under way, unless the process ended as it should."""
        calls = [call for call in self.calls() if call[0] > time.monotonic()] or self.calls()
        if calls and not HEAD.unpack_from(self.table)[1]:
            names = ", ".join(dict.fromkeys(call[3] for call in calls[:3]))
            why = "that code ended it (os._exit, a crash, too much memory), or it was killed"
            os.write(2, f"verl: process {self.pid} ended while it ran {names}: {why}. {_HINT}\n".encode())


def _stat(path: str) -> list[str]:
    """Fields of a process or thread from its state on; [""]: it is gone, or the system does not say."""
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
    return [""]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process, calls, numbers, file = map(int, sys.argv[1:5])
    Watchdog(process, calls, numbers, file, sys.argv[5:]).watch()

"""Hooks of pytest that deal the slow tests to six commits in turn, and record what each of them costs."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from statistics import median

import pytest

TURNS = 6
#: CPU seconds of each slow test. A file's name stands for all of its tests, which then stay together.
RECORD = Path(__file__).with_name("slow_seconds.json")
#: What a test counts as of which no case has a record.
UNKNOWN_SECONDS = 20.0
#: Until a slow test is taken for one that hangs: its processes may wait long for a busy machine.
SLOW_TIMEOUT = 900.0
SLOW = pytest.StashKey[list[str]]()
#: With the quick cases of tests of which others are slow.
MAY_BE_SLOW = pytest.StashKey[list[str]]()
#: Cases that a mark `quick` names and that are not there.
UNKNOWN_CASES = pytest.StashKey[list[str]]()
CLOCK = pytest.StashKey["CpuClock"]()
MEASURED = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--turn", type=int, choices=range(TURNS), help=f"of the slow tests, this share of {TURNS} alone")
    parser.addoption("--half", type=int, choices=range(2), help="of that share, this half alone")
    parser.addoption("--record-seconds", type=Path, metavar="FILE", help="write the CPU seconds of each test to a file")
    parser.addoption("--device", help="where the tests marked `gpu` run (the accelerator of this machine)")


def read_record(path: Path) -> dict[str, float]:
    return json.loads(path.read_text()) if path.exists() else {}


def name_of(test: str, record: Mapping[str, float]) -> str:
    """The name under which a test is recorded: its file's, if that stays together, or its own."""
    file = test.split("::")[0]
    return file if file in record else test


def deal(record: Mapping[str, float]) -> dict[str, int]:
    """The turn of each name in the record: the longest first, to the turn that has the least to do.

    Whole rounds are dealt, whatever is collected, so that the tests of one environment do not move those of another.
    """
    load, turns = [0.0] * TURNS, {}
    for name in sorted(record, key=lambda name: (-record[name], name)):
        turns[name] = load.index(min(load))
        load[turns[name]] += record[name]
    return turns


def shares(tests: Iterable[str], record: Mapping[str, float]) -> list[list[str]]:
    """The tests of each turn. One without a record goes where its name says, so that it moves no other."""
    turns, dealt = deal(record), [[] for _ in range(TURNS)]
    for test in tests:
        name = name_of(test, record)
        dealt[turns.get(name, zlib.crc32(name.encode()) % TURNS)].append(test)
    return dealt


def halves(share: Iterable[str], record: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """A share in two that cost about the same, for machines on which the whole does not fit the time."""
    cost = costs(share, record)
    first = {*sorted(cost, key=lambda name: (-cost[name], name))[::2]}
    dealt: tuple[list[str], list[str]] = ([], [])
    for test in share:
        dealt[name_of(test, record) not in first].append(test)
    return dealt


def costs(tests: Iterable[str], record: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each name; of one without a record the median of the other cases of its test."""
    cases: dict[str, list[float]] = defaultdict(list)
    for name, seconds in record.items():
        cases[name.partition("[")[0]].append(seconds)
    names = {name_of(test, record) for test in tests}
    return {
        name: record[name] if name in record else median(cases.get(name.partition("[")[0], [UNKNOWN_SECONDS]))
        for name in names
    }


def seconds(tests: Iterable[str], record: Mapping[str, float]) -> float:
    return sum(costs(tests, record).values())


def gone(record: Mapping[str, float], slow: Iterable[str], root: Path) -> list[str]:
    """Names in the record that are no slow test's. A file none of whose tests was collected counts if it is there.

    Args:
        slow: the slow tests, and the quick cases of tests of which others are slow.
    """
    slow = set(slow)
    files = {test.split("::")[0] for test in slow}
    return [
        name for name in record
        if name not in slow | files and (name.split("::")[0] in files or not (root / name.split("::")[0]).exists())
    ]  # fmt: skip


def is_slow(item: pytest.Item) -> bool:
    """One that is dealt: `gpu` and `peer` want a machine or an environment of their own."""
    return {"slow"} == {mark.name for mark in item.iter_markers()} & {"slow", "gpu", "peer"}


def thin(items: Iterable[pytest.Item]) -> list[str]:
    """Mark the cases slow that their test's mark `quick` leaves out. Returns those it names that are not there.

    The mark has names of cases, or with `every=N` one in N stays. Where several parametrisations meet, an N that has no
    factor in common with their sizes lets values of each stay.
    """
    missing: dict[str, set[str]] = {}
    for item in items:
        if (mark := item.get_closest_marker("quick")) is None or not isinstance(item, pytest.Function):
            continue
        test, _, case = item.nodeid.partition("[")
        missing.setdefault(test, {*mark.args}).discard(case[:-1])
        every = mark.kwargs.get("every")
        if max(item.callspec.indices.values()) % every if every else case[:-1] not in mark.args:
            item.add_marker(pytest.mark.slow)
    return [f"{test}[{case}]" for test, cases in missing.items() for case in sorted(cases)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[UNKNOWN_CASES] = thin(items)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))
    config.stash[SLOW] = [item.nodeid for item in items if is_slow(item)]
    config.stash[MAY_BE_SLOW] = [item.nodeid for item in items if is_slow(item) or item.get_closest_marker("quick")]
    if (turn := config.getoption("--turn")) is None:
        return
    record = read_record(RECORD)
    if stale := gone(record, config.stash[MAY_BE_SLOW], config.rootpath):
        raise pytest.UsageError(f"{RECORD.name} names no slow test that is there: take out {', '.join(stale)}")
    share = set(shares(config.stash[SLOW], record)[turn])
    if (half := config.getoption("--half")) is not None:
        share = set(halves(share, record)[half])
    others = [item for item in items if is_slow(item) and item.nodeid not in share]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if not is_slow(item) or item.nodeid in share]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """What this turn does, and what it leaves to the others."""
    half = config.getoption("--half")
    if (turn := config.getoption("--turn")) is None:
        return []
    record, lines = read_record(RECORD), []
    for number, share in enumerate(shares(config.stash[SLOW], record)):
        if number == turn and half is not None:
            dealt = halves(share, record)
            lines.append(f"left to turn {number}, the next time: {', '.join(sorted(dealt[1 - half]))}")
            share = dealt[half]
        text = f"{len(share)} of {len(config.stash[SLOW])} slow tests, {seconds(share, record):.0f} CPU s by the record"
        if unknown := sum(name_of(test, record) not in record for test in share):
            text += f" ({unknown} without one)"
        files = Counter(test.split("::")[0] for test in share)
        text += ": " + ", ".join(f"{file} ({count})" for file, count in sorted(files.items()))
        lines.append((f"turn {number} of {TURNS}: " if number == turn else f"left to turn {number}: ") + text)
    return lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests say of the machine, whichever process ran them."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


class CpuClock(threading.Thread):
    """CPU seconds of this process and of all below it, daemons among them, which are nobody's children any more."""

    def __init__(self) -> None:
        import psutil

        super().__init__(daemon=True)
        self.psutil, self.lock, self.root = psutil, threading.Lock(), psutil.Process()
        #: Of each process: seconds, with those of children that it waited for, and its parent if that is one of these.
        self.there: dict[psutil.Process, tuple[float, psutil.Process | None]] = {self.root: (0.0, None)}
        self.orphans = self.total = 0.0

    def run(self) -> None:
        while True:
            self.read()
            time.sleep(0.5)

    def read(self) -> float:
        """The sum up to now. What an orphan did since the last look, half a second ago, is missed when it ends."""
        with self.lock:
            children, there = defaultdict(list), {}
            for process in self.psutil.process_iter(["ppid"]):
                children[process.info["ppid"]].append(process)
            # Those known are looked below one by one: an orphan is nobody's child any more.
            todo = [(self.root, None), *((process, None) for process in self.there if process.is_running())]
            while todo:
                process, parent = todo.pop()
                if parent is None and process in there:
                    continue
                try:
                    times = process.cpu_times()
                except self.psutil.NoSuchProcess:
                    continue
                there[process] = sum(times[:4]), parent
                todo += [(child, process) for child in children[process.pid]]
            for process in self.there.keys() - there.keys():
                # Of one that its parent waited for, the parent's seconds tell.
                seconds, parent = self.there[process]
                while parent is not None and parent not in there:
                    parent = self.there[parent][1]
                self.orphans += seconds if parent is None else 0.0
            self.there = there
            self.total = max(self.total, self.orphans + sum(seconds for seconds, _ in there.values()))
            return self.total


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-seconds") is None:
        return
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("--record-seconds measures one test at a time: leave -n out")
    config.stash[MEASURED], config.stash[CLOCK] = defaultdict(float), CpuClock()
    config.stash[CLOCK].start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if (file := item.config.getoption("--record-seconds")) is None:
        return (yield)
    before = item.config.stash[CLOCK].read()
    result = yield
    record, measured = read_record(file), item.config.stash[MEASURED]
    measured[name_of(item.nodeid, record)] += item.config.stash[CLOCK].read() - before
    # Written after each test: a session that is cut off has recorded what it did.
    record |= {name: round(seconds, 1) for name, seconds in measured.items()}
    file.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")
    return result

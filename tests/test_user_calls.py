"""Calls of the user's code: what is late is named by its line, and nothing holds this process beyond its deadline."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from verl._host import watchdog
from verl._host.user_calls import MAX_HUNG, HungError, LateError, UserCode, is_users, within

RELEASE = threading.Event()


def sleeps() -> None:
    RELEASE.wait(30)


async def blocks() -> None:
    time.sleep(4)


async def waits() -> int:
    await asyncio.sleep(0.1)
    return 3


def exits() -> None:
    sys.exit(7)


async def exits_later() -> None:
    sys.exit(7)


def stops() -> None:
    raise StopIteration


async def cancels_itself() -> None:
    raise asyncio.CancelledError


@pytest.fixture(autouse=True)
def released() -> Any:
    RELEASE.clear()
    yield
    RELEASE.set()


def test_a_late_call_is_left_behind_and_its_line_is_named() -> None:
    line = rf"{__file__} line \d+, in sleeps"
    with pytest.raises(LateError, match=line):
        UserCode("f").run(0.1, sleeps)
    with pytest.raises(LateError, match=line):
        asyncio.run(UserCode("f").call(0.1, sleeps))
    assert UserCode("f").run(5, lambda: 3) == 3


def test_after_too_many_calls_that_never_return_there_are_no_more() -> None:
    code = UserCode("f")
    for _ in range(MAX_HUNG):
        with pytest.raises(LateError):
            code.run(0.01, sleeps)
    with pytest.raises(HungError, match=f"{MAX_HUNG} calls of f never returned"):
        code.run(0.01, sleeps)
    RELEASE.set()
    time.sleep(0.2)
    assert code.run(5, lambda: 3) == 3


def test_after_too_many_async_calls_that_hold_their_loops_there_are_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl._host.user_calls._GRACE", 0.05)
    code, release = UserCode("f"), threading.Event()

    async def holds() -> bool:
        return release.wait(60)

    async def several() -> list[Any]:
        return await asyncio.gather(*(code.call(0.05, holds) for _ in range(MAX_HUNG)), return_exceptions=True)

    assert {type(error) for error in asyncio.run(several())} == {LateError}
    with pytest.raises(HungError, match=f"{MAX_HUNG} calls of f never returned"):
        asyncio.run(code.call(0.05, holds))
    release.set()
    time.sleep(0.2)
    assert asyncio.run(code.call(5, holds))


@pytest.mark.parametrize("function", [exits, exits_later, stops])
def test_what_would_end_a_loop_is_an_error_of_the_call(function: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"SystemExit\(7\)|StopIteration|it cancelled itself"):
        asyncio.run(UserCode("f").call(5, function))
    assert asyncio.run(UserCode("f").call(5, waits)) == 3


def test_an_async_function_that_blocks_is_late_and_named_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    code = UserCode("agent")

    async def several() -> list[Any]:
        ticks = 0

        async def beats() -> None:  # the loop that waits is not the one that is blocked
            nonlocal ticks
            while True:
                await asyncio.sleep(0.05)
                ticks += 1

        beating = asyncio.ensure_future(beats())
        done = await asyncio.gather(code.call(1.5, blocks), code.call(1.5, waits), return_exceptions=True)
        beating.cancel()
        assert ticks > 20
        return done

    with caplog.at_level(logging.WARNING):
        late, fine = asyncio.run(several())
    assert isinstance(late, LateError) and f"{__file__} line" in str(late) and fine == 3
    (said,) = [text for text in caplog.messages if "has held its event loop for 1 s" in text]
    assert f"agent has held its event loop for 1 s ({__file__} line" in said and "in blocks" in said


def test_a_cancelled_call_of_an_async_function_closes_what_it_has_open() -> None:
    closed = []

    async def opened() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.05)
            closed.append(True)

    with pytest.raises(LateError):
        asyncio.run(UserCode("f").call(0.1, opened))
    assert closed == [True]
    with pytest.raises(LateError):
        asyncio.run(within(UserCode("f").call(30, opened), 0.1))
    assert closed == [True, True]


def test_the_users_functions_are_told_from_ours() -> None:
    from functools import partial

    from verl.rollout.episode import single_turn
    from verl.rollout.tools import ToolEpisode, calculator

    class Mine(ToolEpisode):
        pass

    assert is_users(waits) and is_users(partial(waits)) and is_users(Mine([calculator]))
    assert not is_users(single_turn) and not is_users(ToolEpisode([calculator]))


HEAD = """
    import ctypes, os, re, signal, sys, threading, time
    from verl._host.user_calls import LateError, UserCode, hear_signals, watched
    hear_signals()
    code = UserCode("reward mine")

    def regex():
        re.match(r"(a+)+$", "a" * 60 + "b")

    def power():
        7 ** 10 ** 9

    def c_sleep(seconds=60):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def holds(seconds):  # the interpreter
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            c_sleep(0.2)
"""


def run(code: str, *, signals: tuple[float, ...] = (), number: int = signal.SIGTERM) -> tuple[int, str, float]:
    """Status, stderr and seconds of a process, which gets signals at these times after it has said "ready"."""
    command = [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(code)]
    process = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    began = time.monotonic()
    for at in signals:
        time.sleep(max(0.0, began + at - time.monotonic()))
        process.send_signal(number)
    _, err = process.communicate(timeout=120)
    return process.returncode, err, time.monotonic() - began


@pytest.mark.parametrize(
    "function",
    ["regex", pytest.param("power", marks=pytest.mark.slow), pytest.param("c_sleep", marks=pytest.mark.slow)],
)
def test_what_holds_the_interpreter_ends_the_process_by_name_within_its_deadline_and_10_s(function: str) -> None:
    status, err, seconds = run(f"print('ready', flush=True); code.run(1.0, {function})")
    assert status == -signal.SIGKILL and seconds < 11
    assert "reward mine at <string> line " in err and f"in {function}, holds the interpreter beyond its deadline" in err
    assert "The same command goes on from the last checkpoint" in err


@pytest.mark.slow
def test_a_call_that_is_in_time_ends_nothing_even_beside_one_that_was_left_behind() -> None:
    status, err, seconds = run("""
        try:
            code.run(0.2, time.sleep, 60)  # is left behind, long after its deadline
        except LateError:
            pass
        print("ready", flush=True)
        for function in (holds, c_sleep):
            code.run(30.0, function, 12)
    """)
    assert status == 0 and seconds > 20 and err == ""


@pytest.mark.slow
def test_a_late_call_that_computes_is_to_blame_beside_one_that_waits_in_time() -> None:
    status, err, seconds = run("""
        threading.Thread(target=code.run, args=(600.0, time.sleep, 600), daemon=True).start()
        print("ready", flush=True)
        code.run(1.0, regex)
    """)
    assert status == -signal.SIGKILL and seconds < 11 and "in regex, holds" in err


@pytest.mark.slow
def test_of_late_calls_that_compute_nothing_that_is_named_which_waits_for_no_lock() -> None:
    status, err, _ = run("""
        def wants():
            while True:
                time.sleep(0.001)

        def late():
            threading.Thread(target=code.run, args=(1.0, wants), daemon=True).start()
            time.sleep(1.0)
            c_sleep()

        print("ready", flush=True)
        code.run(1.5, late)
    """)
    assert status == -signal.SIGKILL and "in c_sleep, holds" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_heard_while_the_interpreter_is_held(number: signal.Signals) -> None:
    code = """
        from verl.trainer.signals import StopSignal
        with StopSignal():
            print("ready", flush=True)
            code.run(600.0, c_sleep)
    """
    status, err, seconds = run(code, signals=(0.5, 5.0), number=number)
    assert status == -signal.SIGKILL and seconds < 8 and f"so that {number.name} is not heard" in err
    status, err, seconds = run(code, signals=(0.5,), number=number)  # one is enough, later
    assert (
        status == -signal.SIGKILL
        and seconds < 12
        and f"in c_sleep, holds the interpreter, so that {number.name}" in err
    )


@pytest.mark.slow
def test_a_signal_waits_for_a_call_that_comes_back() -> None:
    status, err, _ = run(
        """
        from verl.trainer.signals import StopSignal
        with StopSignal() as stop:
            print("ready", flush=True)
            code.run(600.0, c_sleep, 4)
            assert stop.received
        """,
        signals=(0.5,),
    )
    assert status == 0 and "finishing this step" in err


@pytest.mark.slow
def test_a_process_that_is_stopped_holds_nothing() -> None:
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(HEAD)
        + textwrap.dedent("""
        print("ready", flush=True)
        try:
            code.run(0.5, time.sleep, 60)
        except LateError:
            print("late", flush=True)
        time.sleep(8)
    """),
    ]
    process = forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and [process.stdout.readline() for _ in range(2)] == ["ready\n", "late\n"]
    process.send_signal(signal.SIGSTOP)
    time.sleep(9)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""


def test_what_ends_the_process_is_named_and_an_orderly_end_is_not() -> None:
    status, err, _ = run("print('ready', flush=True); code.run(5.0, os._exit, 3)")
    assert status == 3 and "ended while it ran reward mine: that code ended it" in err
    status, err, _ = run("""
        print("ready", flush=True)
        try:
            code.run(0.1, time.sleep, 60)
        except LateError:
            pass
    """)
    assert (status, err) == (0, "")


def test_a_forked_process_is_watched_anew() -> None:
    status, err, seconds = run("""
        code.run(5.0, time.sleep, 0)
        print("ready", flush=True)
        if (pid := os.fork()) == 0:
            code.run(0.5, regex)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    """)
    assert status == 0 and seconds < 11 and "in regex, holds the interpreter" in err


def test_the_watchdog_imports_the_standard_library_alone() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", watchdog.__file__], capture_output=True, text=True)
    assert "not enough values to unpack" in done.stderr
    assert not {"torch", "verl", "logging"} & {*Path(watchdog.__file__).read_text().split("import ")}
    assert os.path.samefile(watchdog.__file__, Path(__file__).parents[1] / "verl" / "_host" / "watchdog.py")

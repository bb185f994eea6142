"""Rewards that fail: each abstains, with a reason, and stalls nothing."""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import forked
from verl._host.user_calls import MAX_HUNG
from verl.batch import Batch
from verl.errors import RewardError
from verl.rewards.make import make_reward
from verl.rewards.source import RewardResult, run_reward
from verl.roles.reward import Reward

SAMPLES = Batch.from_rows([{"prompt": "p", "response": text, "reward_model": {"ground_truth": "1"}} for text in "abc"])


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raises(error: BaseException) -> Any:
    def function(texts: list[str]) -> list[float]:
        raise error

    return function


def len_of(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def endless(texts: list[str]) -> Iterator[float]:
    while True:
        yield 1.0


def hangs(texts: list[str]) -> list[float]:
    time.sleep(30)
    return [1.0] * len(texts)


async def hangs_async(texts: list[str]) -> list[float]:
    await asyncio.sleep(30)
    return [1.0] * len(texts)


async def blocks_its_loop(texts: list[str]) -> list[float]:
    time.sleep(30)
    return [1.0] * len(texts)


def spins(texts: list[str]) -> list[float]:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        pass
    return [1.0] * len(texts)


WHOLE_BATCH = {
    "raises": (raises(KeyError("x")), "raised KeyError"),
    "raises without text": (raises(UnprintableError()), "raised UnprintableError"),
    "exits": (raises(SystemExit(0)), "raised SystemExit"),
    "interrupts": (raises(KeyboardInterrupt()), "raised KeyboardInterrupt"),
    "says much": (raises(ValueError("x" * 10**7)), "raised ValueError"),
    "sys.exit": (lambda texts: sys.exit("done"), "raised SystemExit"),
    "hangs": (hangs, "no answer within 0.3 s"),
    "hangs async": (hangs_async, "no answer within 0.3 s"),
    "blocks its loop": (blocks_its_loop, "no answer within 0.3 s"),
    "spins": (spins, "no answer within 0.3 s"),
    "too few": (lambda texts: [1.0], "returned 1 results for 3 samples"),
    "too many": (lambda texts: [1.0] * 4, r"returned 4 results for \d samples"),
    "endless": (endless, r"returned more results for \d samples"),
    "one number": (lambda texts: 1.0, "instead of"),
    "None": (lambda texts: None, "instead of"),
    "a text": (lambda texts: "1.0", "instead of"),
    "a huge text": (lambda texts: "9" * 10**6, "instead of"),
    "a mapping": (lambda texts: {"value": [1, 2, 3]}, "instead of"),
    "a number by index": (lambda texts: dict.fromkeys(range(3), 0.9), "instead of"),
    "a set": (lambda texts: {1.0, 2.0, 3.0}, "instead of"),
    "a set of a size": (lambda texts: torch.zeros(3, 2), "no number"),
}


def limit_of(reason: str) -> float:
    """A time-out that what does not wait keeps on a busy machine, too."""
    return 0.3 if "0.3 s" in reason else 10.0


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_a_bad_call_abstains_for_its_samples(name: str) -> None:
    function, reason = WHOLE_BATCH[name]
    start = time.monotonic()
    result = run_reward(make_reward(function, timeout=limit_of(reason)), SAMPLES)
    assert time.monotonic() - start < 5
    assert result.reward == [None] * 3
    for text in result.reasons:
        assert text is not None
        assert re.search(reason, text)
        assert len(text) <= 300


@pytest.mark.parametrize(
    "bad",
    [
        math.nan, math.inf, -math.inf, "1", b"1", "9" * 10**7, 10**400, 1j, [], [1, 2], {}, {"value": 1},
        {"score": None},        {"score": math.nan}, {"score": "1"},
        object(), np.nan, np.array([1, 2]), torch.tensor(math.inf), Decimal("1"),
    ],
    ids=lambda bad: f"{type(bad).__name__} {str(bad)[:12]}",
)  # fmt: skip
def test_a_bad_result_abstains_alone(bad: Any) -> None:
    result = run_reward(make_reward(lambda texts: [1.0, bad, 2.0]), SAMPLES)
    assert result.reward == [1.0, None, 2.0]
    assert result.reasons[0] is result.reasons[2] is None
    assert result.reasons[1]


def test_by_row_only_the_bad_row_abstains() -> None:
    def f(solution_str: str, ground_truth: str) -> float:
        if solution_str == "b":
            raise ValueError("b")
        if solution_str == "c":
            time.sleep(30)
        return 1.0

    start = time.monotonic()
    result = run_reward(make_reward(f, timeout=0.3), Batch.concat([SAMPLES, SAMPLES.slice(0, 2)]))
    assert time.monotonic() - start < 3
    assert result.reward == [1.0, None, None, 1.0, None]
    assert "no answer" in str(result.reasons[2])


def test_async_rows_wait_side_by_side() -> None:
    async def f(solution_str: str, ground_truth: str) -> float:
        await asyncio.sleep(30 if solution_str == "b" else 0.2)
        return 1.0

    start = time.monotonic()
    result = run_reward(make_reward(f, timeout=1.0), Batch.concat([SAMPLES] * 10))
    assert time.monotonic() - start < 4
    assert result.reward == [1.0, None, 1.0] * 10


def test_many_hanging_rows_cost_three_deadlines() -> None:
    def f(solution_str: str, ground_truth: str) -> float:
        time.sleep(5)
        return 1.0

    start = time.monotonic()
    result = run_reward(make_reward(f, timeout=0.2), Batch.concat([SAMPLES] * 10))
    assert time.monotonic() - start < 2
    assert result.reward == [None] * 30
    assert "not tried" in str(result.reasons[-1])


def test_none_is_an_abstention_not_a_failure() -> None:
    result = run_reward(make_reward(lambda texts: [1.0, None, 2.0], default_reward=-1.0), SAMPLES)
    assert result.reward == [1.0, None, 2.0]
    source = make_reward(lambda texts: [None] * len(texts))
    for _ in range(60):
        assert run_reward(source, SAMPLES).reward == [None] * 3


def test_default_reward_is_given_for_failures_and_counted() -> None:
    result = run_reward(make_reward(lambda texts: [1.0, math.nan, 2.0], default_reward=-1.0), SAMPLES)
    assert result.reward == [1.0, -1.0, 2.0]
    assert result.reasons[1] == "returned nan"


def test_retries() -> None:
    calls: list[int] = []

    def flaky(texts: list[str]) -> list[float]:
        calls.append(len(texts))
        if len(calls) < 3:
            raise ConnectionError("try again")
        return [1.0] * len(texts)

    flaky.whole_batch = True  # type: ignore[attr-defined]
    assert run_reward(make_reward(flaky, retries=1), SAMPLES).reward == [None] * 3
    assert run_reward(make_reward(flaky, retries=1), SAMPLES).reward == [1.0] * 3
    assert calls == [3, 3, 3]


def test_failing_too_often_ends_with_the_functions_name() -> None:
    def broken_verifier(texts: list[str]) -> list[float]:
        raise OSError("no such file")

    source = make_reward(broken_verifier)
    for _ in range(21):
        assert run_reward(source, SAMPLES).reward == [None] * 3
    with pytest.raises(RewardError, match=r"'broken_verifier' failed on 66 of the latest 66.*OSError: no such file"):
        run_reward(source, SAMPLES)
    tolerant = make_reward(broken_verifier, max_failure_rate=1.0)
    for _ in range(40):
        run_reward(tolerant, SAMPLES)
    often = make_reward(lambda texts: [1.0, math.nan, 1.0])
    for _ in range(100):  # a third fails, which is below the limit
        assert run_reward(often, SAMPLES).reward == [1.0, None, 1.0]


def test_nothing_but_failures_is_told_however_few() -> None:
    reward = Reward({"fine": len_of, "broken": raises(OSError("no such file"))})
    reward.check_failures()  # nothing has come yet
    reward.get_reward(SAMPLES)
    with pytest.raises(RewardError, match="failed on every sample"):
        reward.check_failures()
    for fine in (Reward(raises(OSError()), max_failure_rate=1.0), Reward(lambda texts: [None, math.nan, math.nan])):
        fine.get_reward(SAMPLES)
        fine.check_failures()


def test_too_many_hanging_threads_end_with_the_functions_name() -> None:
    release = threading.Event()

    def stuck(texts: list[str]) -> list[float]:
        release.wait(60)
        return [1.0] * len(texts)

    source = make_reward(stuck, timeout=0.02, max_failure_rate=1.0)
    for _ in range(MAX_HUNG):
        assert run_reward(source, SAMPLES).reward == [None] * 3
    with pytest.raises(RewardError, match=f"'stuck' hangs: {MAX_HUNG} calls"):
        run_reward(source, SAMPLES)
    release.set()
    time.sleep(0.2)
    assert run_reward(source, SAMPLES).reward == [1.0] * 3  # the threads came back, and so does the reward


def test_a_function_may_change_what_it_is_given() -> None:
    def f(texts: list[str], reward_model: list[dict[str, Any]]) -> list[float]:
        if len(texts) < 3:
            return [0.0] * 3
        texts.clear()
        reward_model.clear()
        raise ValueError("now try again")

    before = SAMPLES.to_ipc()
    assert run_reward(make_reward(f, retries=1), SAMPLES).reward == [None] * 3
    assert SAMPLES.to_ipc() == before


def test_from_within_a_running_loop_and_many_at_once() -> None:
    active, most = [0], [0]

    def f(texts: list[str]) -> list[float]:
        active[0] += 1
        most[0] = max(most[0], active[0])
        time.sleep(0.02)
        active[0] -= 1
        return [1.0] * len(texts)

    source = make_reward(f, timeout=0.5)

    async def main() -> list[RewardResult]:
        inner = run_reward(source, SAMPLES)  # as in a notebook cell
        return [inner, *await asyncio.gather(*(source.score(SAMPLES) for _ in range(40)))]

    results = asyncio.run(main())
    # 40 calls of 20 ms wait for each other: waiting for its turn is no part of a call's deadline.
    assert [result.reward for result in results] == [[1.0] * 3] * 41
    assert most == [1]


PROCESS = """
import os, signal, subprocess, sys, time
import numpy as np

def f(solution_str, ground_truth):
    print("noise on stdout", solution_str)
    if solution_str == "sleep": time.sleep(60)
    if solution_str == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: pass
    if solution_str == "exit": os._exit(3)
    if solution_str == "segv": os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "stdin": return float(len(sys.stdin.read()))
    if solution_str == "child":
        child = subprocess.Popen(["sleep", "60"])
        open(ground_truth, "w").write(str(child.pid))
        time.sleep(60)
    if solution_str == "pid": return os.getpid()
    return np.float32(len(solution_str))
"""


def process_samples(path: Path, *responses: str) -> Batch:
    return Batch.from_rows(
        [{"prompt": "p", "response": r, "reward_model": {"ground_truth": str(path / "pid")}} for r in responses]
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("sleep", "segv")])
def test_processes_are_killed_and_replaced(tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "heavy.py").write_text(PROCESS)
    source = Reward(f"{tmp_path / 'heavy.py'}:f", workers=1, timeout=1.0).source
    responses = ("ok", "exit", "okay", "child", "stdin", *more, "good!")
    result = run_reward(source, process_samples(tmp_path, *responses))
    scores = {"ok": 2.0, "okay": 4.0, "stdin": 0.0, "good!": 5.0}
    assert result.reward == [scores.get(response) for response in responses]
    for response, reason in zip(responses, map(str, result.reasons), strict=True):
        if response in ("child", "sleep"):
            assert "no answer within 1 s" in reason
        elif response not in scores:
            assert re.fullmatch(r"reward worker \d+ \(pid \d+ on .+\) died \(.*crashed\)", reason)
    child = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 5
    while alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(child)  # the whole group is killed


def test_processes_stay_for_the_next_call_and_go_with_the_reward(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text(PROCESS)
    source: Any = Reward(f"{tmp_path / 'heavy.py'}:f", workers=2, timeout=5.0).source
    batch = process_samples(tmp_path, *["pid"] * 6)
    pids = {*run_reward(source, batch).reward, *run_reward(source, batch).reward}
    assert len(pids) <= 2
    del source
    end = time.monotonic() + 60
    while any(alive(int(pid or 0)) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(int(pid or 0)) for pid in pids)


def test_a_file_that_does_not_start_in_a_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(
        f"import os\nassert os.getpid() == {os.getpid()}, 'not here'\ndef f(texts): return [1]\n"
    )
    source = Reward(f"{tmp_path / 'once.py'}:f", workers=1).source
    with pytest.raises(RewardError, match=r"(?s)'f'.*reward worker 0 .*failed:.*not here"):
        run_reward(source, SAMPLES)


HOLDS = "in grade, holds the interpreter beyond its deadline"


@pytest.mark.parametrize(
    ("define", "end", "words"),
    [
        ("def", "os._exit(0)", "ended while it ran reward grade: that code ended it"),
        pytest.param("async def", "signal.raise_signal(signal.SIGSEGV)", "ended while it ran", marks=pytest.mark.slow),
        pytest.param("def", "7**10**10", HOLDS, marks=pytest.mark.slow),
        pytest.param(
            "async def",
            "re.match(r'(a+)+$', 'a' * 60 + 'b')",
            HOLDS,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_function_that_ends_the_process_is_named(tmp_path: Path, define: str, end: str, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, re, signal, sys\nimport verl\n"
        f"{define} grade(solution_str):\n    if solution_str == 'end':\n        {end}\n    return 1.0\n"
        "reward = verl.Reward(grade, process=False, timeout=1)\n"
        "for text in sys.argv[1:]:\n    reward.get_reward(verl.Batch.from_rows([{'response': text}]))\n"
    )

    def run(*texts: str) -> str:
        command = [sys.executable, str(script), *texts]
        return forked.run(command, timeout=120).stderr

    assert words in run("good", "end")
    assert run("good", "good") == ""

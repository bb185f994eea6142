"""Programs as responses, judged by what they do: tests run in a sandbox.

A solution never sees what is expected of it. A program's output is compared outside its sandbox; tests that call its
functions run in a second sandbox, and call the solution over two pipes (`run_tests.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import Unpack

from verl import sandbox
from verl.checked import checked
from verl.errors import RewardError
from verl.record import Processes, Retries, Seconds
from verl.rewards.blocks import extract_code
from verl.rewards.calls import Slots
from verl.rewards.functions import FunctionReward, OnFailure

#: Seconds for a sample's processes to start and to be ended.
_GRACE = 60.0
#: Bytes that a reference may print.
_REFERENCE_OUTPUT = 16 << 20
_HERE = Path(__file__).parent


class CodeReward(FunctionReward):
    """1 if the response's program passes every test of its row, else 0; component `passed` is the share it passes.

    The program is the last fenced block of the response that is labelled as Python, else the last without a label, else
    the last of any, or all of the response. One of two columns of a row says what is expected; without either it
    abstains:

    - `tests`: a test in Python, or a list of them, which call the program's functions by name, such as
      `assert add(1, 2) == 3`; or inputs and outputs of the whole program: `{"input": ..., "output": ...}`, a list of
      these, or `{"inputs": [...], "outputs": [...]}`. Mappings and lists may also be JSON text.
    - `reference`: a program; the response must print what it prints.

    Plain values (numbers, texts, lists, dicts, ...) reach the other side as copies, and lists, dicts and sets that a
    function changes in place change for the tests, too. Other objects stay where they are, and a stand-in answers as
    they do. One exception keeps a solution from agreeing with everything: plain values of the tests are not passed to
    operators of the solution's own classes, except to arithmetic and `in` where the tests make the object themselves
    from a class whose name has a capital (`Vector(1, 2) * 3`). Outputs are compared line by line, without trailing
    blanks.

    Args:
        timeout: seconds for all tests of a sample; tests that have not passed by then have failed.
        partial: the reward is the share of tests that pass.
        packages: directories that the programs may import from.
        memory: bytes of each process.
        parallel: samples judged at a time; None: one per core.
        **options: see `FunctionReward`.

    Raises:
        SandboxError: programs cannot be isolated on this machine.
    """

    @checked
    def __init__(
        self,
        *,
        timeout: Seconds = 30.0,
        partial: bool = False,
        packages: Sequence[str | Path] = (),
        memory: Annotated[int, Field(ge=1)] = 512 << 20,
        parallel: Processes | None = None,
        name: str = "code",
        retries: Retries = 0,
        **options: Unpack[OnFailure],
    ) -> None:
        self.limits = sandbox.Limits(seconds=timeout, memory=memory)
        self.partial, self.packages = partial, packages
        sandbox.require()
        super().__init__(self.scores, name=name, timeout=timeout + _GRACE, retries=retries, **options)
        self.group.width = parallel or os.cpu_count() or 1
        self.group.slots = Slots(self.group.width)

    @staticmethod
    def call_seconds(options: Mapping[str, Any]) -> float:
        return float(options["timeout"] + _GRACE)

    async def scores(self, solution_str: str, tests: Any = None, reference: Any = None) -> dict[str, float] | None:
        """The score of one response; None where nothing is expected of it."""
        code = extract_code(solution_str)
        passed = await asyncio.to_thread(_judge, code, tests, reference, self.limits, self.packages)
        share = sum(passed) / len(passed) if passed else None
        return None if share is None else {"score": share if self.partial else float(share == 1), "passed": share}


def _judge(
    program: str, tests: Any, reference: str | None, limits: sandbox.Limits, packages: Sequence[str | Path]
) -> list[bool]:
    """Which tests pass; empty where nothing is expected."""
    deadline = time.monotonic() + limits.seconds

    def run(code: str, given: str = "", output: int = 0) -> sandbox.Run:
        left = replace(limits, seconds=max(0.01, deadline - time.monotonic()), output=max(limits.output, output))
        return sandbox.run_python(code, stdin=given, limits=left, packages=packages)

    def passes(given: str, wanted: str) -> bool:
        # Allow for blanks, which are ignored, and for stderr.
        expected = len(wanted.encode(errors="replace"))
        return _same(run(program, given, 2 * expected + (64 << 10)), wanted)

    if tests is None and reference is None:
        return []
    if tests is None:
        wanted = run(str(reference), output=_REFERENCE_OUTPUT)
        if wanted.status != "ok":
            raise RewardError(f"the reference does not run: {wanted.status} {wanted.stderr[-200:]}")
        return [passes("", wanted.stdout)]
    programs, cases = _parse(tests)
    if programs:
        return run_tests(program, programs, limits, packages)
    return [passes(given, wanted) for given, wanted in cases]


def run_tests(
    solution: str, tests: Sequence[str], limits: sandbox.Limits, packages: Sequence[str | Path] = ()
) -> list[bool]:
    """Which of the tests, programs that call the solution's functions, end without an error; none if they are late.

    Raises:
        SandboxError: see `run_python`.
    """
    asked, ask = os.pipe()
    answered, reply = os.pipe()
    serve = {"side": "solution", "programs": [solution], "incoming": asked, "outgoing": reply}
    check = {"side": "tests", "programs": list(tests), "incoming": answered, "outgoing": ask}
    with ThreadPoolExecutor(1) as thread:
        # The solution ends when its tests do, as its pipe is closed.
        serving = thread.submit(_run_side, serve, limits, packages)
        run = _run_side(check, limits, packages)
        serving.result()
    if run.status != "ok":
        return [False] * len(tests)
    return [reason is None for reason in json.loads(run.stdout.splitlines()[-1])]


def _run_side(given: Mapping[str, Any], limits: sandbox.Limits, packages: Sequence[str | Path]) -> sandbox.Run:
    code, fds = (_HERE / "run_tests.py").read_text(), (given["incoming"], given["outgoing"])
    return sandbox.run_python(code, inputs=given, fds=fds, limits=limits, packages=packages)


def _parse(tests: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """Tests as programs, and as pairs of input and output; one of the lists is empty."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        tests = json.loads(tests)
    if isinstance(tests, Mapping) and "inputs" in tests:
        return [], [(str(i), str(o)) for i, o in zip(tests["inputs"], tests["outputs"], strict=True)]
    cases: list[Any] = [tests] if isinstance(tests, str | Mapping) else list(tests)
    if all(isinstance(case, str) for case in cases):
        return cases, []
    return [], [(str(case["input"]), str(case["output"])) for case in cases]


def _same(run: sandbox.Run, wanted: str) -> bool:
    return run.status == "ok" and _lines(run.stdout) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]

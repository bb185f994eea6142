"""Programs as responses, judged by what they do: tests run in a sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Unpack

from pydantic import Field

from verl import sandbox
from verl.checked import checked
from verl.errors import RewardError
from verl.record import Processes, Retries, Seconds
from verl.rewards.blocks import extract_code
from verl.rewards.calls import Slots
from verl.rewards.functions import FunctionReward, OnFailure
from verl.sandbox.code_tests import Tests, judge, parse

#: Seconds for a sample's processes to start and to be ended, besides its own.
_GRACE = 60.0
#: Bytes that a reference may print.
_REFERENCE_OUTPUT = 16 << 20


class CodeReward(FunctionReward):
    """1 if the response's program passes every test of its row, else 0; component `passed` is the share it passes.

    The program is the last fenced block of the response that defines what the tests call, else the last that is
    labelled as Python, else the last without a label, else the last of any, or all of the response. Columns of a row
    say what is expected:

    - `tests`, in any form that data sets have (docs/episodes.md): Python that calls the program's functions (asserts,
      `check(candidate)`, functions of pytest, classes of unittest); inputs and outputs of a function (`fn_name`) or of
      the whole program; lists, and JSON text, of these. `entry_point` is the function that they are of, if they do not
      say so.
    - `reference`: a program; the response must print what it prints. Outputs are compared line by line, without
      trailing blanks.

    A row with neither abstains. A row whose tests are of no known form, do not parse, ask nothing of the program or
    cannot run themselves is a failure, and left out with the reason, whatever its program. Whatever a program raises
    or lacks is a failed test.

    Tests run where the program is not, and compare there. Arguments and results travel between the two as plain values,
    of exactly a type of Python's or its library's, and what a function changes in place changes for the tests, too;
    other objects stay where they are, and can be called and read from the other side. What tests expect never reaches
    the program.

    Args:
        timeout: seconds for all tests of a sample; tests that have not passed by then have failed.
        partial: the reward is the share of tests that pass.
        packages: directories that the programs may import from.
        memory: bytes of each process.
        live: also judge tests that compare objects of the program by its own operators (`Vector(1) == Vector(1)`).
            The program's word is taken there, once it has denied that objects made with other arguments are equal.
            Component `live` is the share of tests with such a comparison. False: such a row is left out.
        parallel: samples judged at a time; None: one per core.
        **options: see `FunctionReward`.

    Raises:
        SandboxError: programs cannot be isolated on this machine.
    """

    one_of: ClassVar[tuple[str, ...]] = ("tests", "reference")
    judges: ClassVar[str | None] = "last_turn"

    @checked
    def __init__(
        self,
        *,
        timeout: Seconds = 30.0,
        partial: bool = False,
        packages: Sequence[str | Path] = (),
        memory: Annotated[int, Field(ge=1)] = 512 << 20,
        live: bool = False,
        parallel: Processes | None = None,
        name: str = "code",
        retries: Retries = 0,
        **options: Unpack[OnFailure],
    ) -> None:
        self.limits = sandbox.Limits(seconds=timeout, memory=memory)
        self.partial, self.packages, self.live = partial, packages, live
        sandbox.require()
        options["process"] = False  # the programs have processes of their own
        super().__init__(self.scores, name=name, timeout=timeout + _GRACE, retries=retries, **options)
        self.group.width = parallel or os.cpu_count() or 1
        self.group.slots = Slots(self.group.width)

    @staticmethod
    def call_seconds(options: Mapping[str, Any]) -> float:
        return float(options["timeout"] + _GRACE)

    async def scores(
        self, solution_str: str, tests: Any = None, reference: Any = None, entry_point: str | None = None
    ) -> dict[str, float] | None:
        """The score of one response; None where nothing is expected of it.

        Raises:
            RewardError: the row's tests or its reference are at fault.
        """
        if tests is None and reference is None:
            return None
        passed = await asyncio.to_thread(self._judge, solution_str, tests, reference, entry_point)
        share = sum(is_passed for is_passed, _ in passed) / len(passed)
        score = {"score": share if self.partial else float(share == 1), "passed": share}
        return score | ({"live": sum(is_live for _, is_live in passed) / len(passed)} if self.live else {})

    def _judge(self, response: str, tests: Any, reference: Any, entry_point: str | None) -> list[tuple[bool, bool]]:
        if tests is None:
            limits = replace(self.limits, output=_REFERENCE_OUTPUT)
            run = sandbox.run_python(str(reference), limits=limits, packages=self.packages)
            if run.status != "ok" or not run.stdout.strip():
                raise RewardError(f"the reference prints nothing: {run.status} {run.stderr[-200:]}")
            wanted = Tests(outputs=[("", "", run.stdout)])
            return judge(extract_code(response), wanted, self.limits, self.packages)
        wanted = parse(tests, entry_point)
        return judge(extract_code(response, wanted.names), wanted, self.limits, self.packages, self.live)

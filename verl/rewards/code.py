"""Programs as responses: fenced blocks of Markdown, run and tested in a sandbox."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from verl import sandbox
from verl._base.checked import checked
from verl._base.record import Processes, Seconds
from verl.data.text import behind_thoughts
from verl.errors import RewardError
from verl.rewards.calls import Slots
from verl.rewards.functions import FunctionReward
from verl.sandbox.code_tests import Tests, judge, parse

#: Seconds for a sample's processes to start and to end.
_GRACE = 60.0
#: Bytes that a reference may print.
_REFERENCE_OUTPUT = 16 << 20
#: Marks before a fence: of list items and quotations.
_MARKS = r"(?:[ \t>]|[-*+][ \t]|\d{1,9}[.)][ \t])*"
_FENCE = re.compile(rf"(?P<before>{_MARKS})(?P<fence>`{{3,}}|~{{3,}})(?P<label>.*)")
#: A fence that begins a block behind text in its line: a language or nothing follows it.
_LATE_FENCE = re.compile(r"(?<!`)(?P<fence>`{3,})(?P<label>[ \t]*[\w+#-]*\s*)$")
#: As Python has them: others, such as a form feed, may stand within a text of the program.
_LINE_END = re.compile(r"\r\n?|\n")
_INLINE = re.compile(r"(?<!`)(`{3,})[^`]+\1(?!`)")
_LANGUAGE = re.compile(r"[\s{.]*([\w+#-]*)")
_PYTHON = ("py", "py3", "python", "python2", "python3", "ipython")
#: A fence that is so much further in than the one before is part of the block.
_FURTHER_IN = 4


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

    Tests run and compare in another process than the program. Arguments and results are copied as values of Python's
    own types, and changes in place come back to the tests. Other objects stay in their process; the other side can call
    and read them. Expected values never reach the program.

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
        **options: Any,
    ) -> None:
        judge = _Judge(sandbox.Limits(seconds=timeout, memory=memory), partial, packages, live)
        options["process"] = False  # the programs have processes of their own
        super().__init__(judge, timeout=timeout + _GRACE, **{"name": "code", **options})
        if not options.get("workers"):
            judge.load()
            self.group.slots = Slots(parallel or os.cpu_count() or 1)


@dataclass(frozen=True)
class _Judge:
    """The reward function of `CodeReward`."""

    limits: sandbox.Limits
    partial: bool
    packages: Sequence[str | Path]
    live: bool

    load = staticmethod(sandbox.require)

    async def __call__(
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
        else:
            wanted = parse(tests, entry_point)
        return judge(extract_code(response, wanted.names), wanted, self.limits, self.packages, self.live)


def extract_code(response: str, names: Collection[str] = ()) -> str:
    """The program of a response: its last block that is labelled as Python, else the last without a label, else the
    last of any, else all of the response. Blocks that define one of `names` come before those that do not. Thoughts
    count only where nothing else has a block."""
    answer = behind_thoughts(response)
    blocks = code_blocks(answer) or code_blocks(response)
    if not blocks:
        return answer

    def rank(block: tuple[str, str]) -> tuple[bool, bool, bool]:
        label, text = block
        defines = [
            re.search(rf"(?m)^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}\b[^=\n]*=[^=]", text)
            for name in map(re.escape, names)
        ]
        return any(defines), label in _PYTHON, not label

    return max(reversed(blocks), key=rank)[1]


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language in lower case or "", content) of each fenced block.

    Fences are of backticks or tildes, also in list items, in quotations and behind text. Content loses the indentation
    of its fence. A block without an end goes on to the next fence with a language, or to the end of the text.
    """
    blocks: list[tuple[str, list[str]]] = []
    opened: re.Match[str] | None = None
    indent = 0  # characters before the fence; behind text in its line, none
    for line in _LINE_END.split(text):
        fence = _FENCE.fullmatch(line)
        if opened is None and (fence is None or (fence["fence"][0] == "`" and "`" in fence["label"])):
            fence = _LATE_FENCE.search(_INLINE.sub("", line))
        if opened is not None and fence is not None:
            is_end = fence["fence"].startswith(opened["fence"]) and len(fence["before"]) < indent + _FURTHER_IN
            fence = fence if is_end else None
        if fence is None:
            if opened is not None:
                outside = len(line) - len(line.lstrip(" \t>"))
                blocks[-1][1].append(line[min(outside, indent) :])
            continue
        if opened is None or fence["label"].strip():
            blocks.append((_LANGUAGE.findall(fence["label"])[0].casefold(), []))
            opened, indent = fence, len(fence.groupdict().get("before", ""))
        else:
            opened = None
    if opened is not None and blocks[-1][1] and blocks[-1][1][-1].strip() in ("`", "``", "~", "~~"):
        blocks[-1][1].pop()  # a closing fence that was cut off
    return [(language, "\n".join(lines)) for language, lines in blocks]

"""Tests of programs, in the forms that data sets have, run in a sandbox.

`parse` reads tests, `judge` runs them. Tests in Python have a sandbox of their own and ask the program over pipes
(`run_tests.py`); a program's output is compared outside its sandbox. Nothing that is expected reaches the program.
"""

from __future__ import annotations

import ast
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import starmap, zip_longest
from pathlib import Path
from typing import Any

from verl._base.syntax import syntax_tree
from verl.errors import RewardError, nearest
from verl.sandbox.link import alike, encode
from verl.sandbox.run import Limits, Run, run_python
from verl.sandbox.run_tests import ASKS_NOTHING, FAILED

#: Keys of tests in mappings.
_TEXTS = ("test", "tests", "test_code", "test_list", "test_cases", "assert_case", "functional", "code")
_SETUP = ("setup", "setup_code", "test_setup_code", "test_imports", "import_prefix")
_FUNCTION = ("fn_name", "func_name", "function_name", "entry_point")
_INPUT = ("inputs", "input", "stdin")
_OUTPUT = ("outputs", "output", "expected_output", "stdout")
_KIND = ("type", "testtype", "test_type")
_KNOWN = (*_TEXTS, *_SETUP, *_FUNCTION, *_INPUT, *_OUTPUT, *_KIND, "language", "metadata")
_STDIN = ("stdin", "stdin_stdout", "stdio", "standard_input")
_CALLS = ("functional", "function_call", "function", "call_based")
_PREPARATIONS = (
    ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
)
#: Without any of these, a text only fails where the program does.
_CHECKS = re.compile("assert|raise|fail|exit")
_DECIMAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
#: A blank, within a line that is printed.
_BLANKS = re.compile("[ \t]+")
#: Integers beyond Python's limit on digits, of which the syntax of tests says only that they are some; and that limit.
_LONG = re.compile(r"(?<![\w.])\d{4000,}(?![\w.])")
_DIGITS = 4000
#: Bytes that the tests' side may print.
_VERDICTS = 4 << 20
#: What runs in a sandbox, in the order of imports, and the text that starts it: no file of ours is in reach there.
_SENT = ("link", "pytest_stub", "run_tests")
_START = """
import sys, types
for name, text in modules.items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(text, f"<{name}>", "exec", dont_inherit=True), vars(sys.modules[name]))
sys.modules["verl.sandbox.run_tests"].main(globals())
"""


@dataclass(slots=True)
class Tests:
    """Tests of one program.

    Attributes:
        cases: tests in Python: `text`, and the name of the tested function (`entry`); or `call`, its arguments and
            every right result.
        outputs: code that is put behind the program, its input, and the output that is expected.
        names: names that the tests read, the tested functions among them.
    """

    cases: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[tuple[str, str, str]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def add(self, tests: Any, entry: str | None, setup: str = "") -> None:
        """Add tests in any form, of the function `entry` unless they say of which, each behind `setup`.

        Raises:
            RewardError: their form is unknown.
        """
        if isinstance(tests, str):
            if tests.lstrip()[:1] in ("[", "{"):
                with suppress(ValueError):  # then it may be Python
                    return self.add(_from_json(tests), entry, setup)
            text = f"{setup}\n{tests}" if setup else tests
            if not _only_prepares(text):
                self._add_text(text, entry)
        elif isinstance(tests, Mapping):
            self._add_mapping({key: value for key, value in tests.items() if value is not None}, entry, setup)
        elif isinstance(tests, Sequence):
            for number, test in enumerate(tests, 1):
                if isinstance(test, str) and _only_prepares(test, setup, tests[number:]):  # what follows
                    setup = f"{setup}\n{test}"
                else:
                    self.add(test, entry, setup)
        else:
            raise RewardError(f"a test is a text, a mapping or a list of these, not a {type(tests).__name__}")

    def _add_text(self, text: str, entry: str | None) -> None:
        try:
            nodes = list(ast.walk(syntax_tree(_LONG.sub("1", text))))
        except (SyntaxError, ValueError, MemoryError) as error:
            raise RewardError(f"a test is neither Python nor JSON ({error}): {text[:80]!r}") from error
        called = _called(nodes)
        if "check" not in called and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes):
            text += "\ncheck(candidate)"
        self.cases.append({"text": text, "entry": entry})
        self.names |= {name for name in (*called, entry) if name}

    def _add_mapping(self, test: Mapping[str, Any], entry: str | None, setup: str) -> None:
        for key in test:
            if key not in _KNOWN:
                raise RewardError(f"tests have a key '{key}', which is not known: {nearest(str(key), _KNOWN)}")
        if str(test.get("language", "python")).casefold() not in ("python", "python3", "py"):
            raise RewardError(f"the tests are of a program in {test['language']}, not in Python")
        metadata = test.get("metadata")
        metadata = _from_json(metadata) if isinstance(metadata, str) and metadata[:1] == "{" else metadata or {}
        entry = _first(test, _FUNCTION) or _first(metadata, _FUNCTION) or entry
        for part in (test[key] for key in _SETUP if key in test):
            setup = "\n".join([setup, *([part] if isinstance(part, str) else part)])
        texts = [test[key] for key in _TEXTS if key in test]
        inputs, outputs = _first(test, _INPUT), _first(test, _OUTPUT)
        parts = [part for text in texts for part in ([text] if isinstance(text, str) else text)]
        if inputs is None and outputs is not None and parts and all(map(_only_prepares, parts)):
            code = "\n".join([setup, *parts])
            self.outputs.append((code, "", _text(outputs)))
            self.names |= _called(ast.walk(syntax_tree(_LONG.sub("1", code))))
            return
        for part in texts:
            self.add(part, entry, setup)
        if inputs is None or outputs is None:
            if texts:
                return
            raise RewardError(f"tests need inputs and outputs, or a text: their keys are {', '.join(map(str, test))}")
        kind = str(_first(test, _KIND) or ("functional" if entry else "stdin")).casefold()
        if kind not in (*_STDIN, *_CALLS):
            raise RewardError(f"tests of type '{kind}' are not known: {nearest(kind, (*_STDIN, *_CALLS))}")
        pairs = [(inputs, outputs)]
        if "inputs" in test or (kind in _STDIN and isinstance(inputs, list) and isinstance(outputs, list)):
            if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
                raise RewardError("inputs and outputs of tests must be lists of one length")
            pairs = list(zip(inputs, outputs, strict=True))
        if kind in _STDIN:
            self.outputs += [("", _text(one), _text(wanted)) for one, wanted in pairs]
        elif not entry:
            raise RewardError("tests of a function do not say its name: give them fn_name, or the row entry_point")
        else:
            self.cases += [{"text": "", "entry": entry, "call": call} for call in _calls(pairs)]
            self.names.add(entry)


def parse(tests: Any, entry: str | None = None) -> Tests:
    """Tests in any form that data sets have.

    Args:
        tests: Python; inputs and outputs of a program, or of a function; a list of these; JSON text of any of them.
        entry: the function that they are of, where they do not say so.

    Raises:
        RewardError: there are no tests, or their form is unknown.
    """
    parsed = Tests()
    try:
        parsed.add(tests, entry)
    except RecursionError:
        raise RewardError("tests are nested too deep to be read") from None
    if not parsed.cases and not parsed.outputs:
        raise RewardError("there are no tests: what has no assert, and the like, asks nothing of a program")
    if not parsed.cases and not any(wanted.strip() for _, _, wanted in parsed.outputs):
        raise RewardError("the tests expect no output, so that any program would pass")
    return parsed


def _calls(pairs: list[tuple[Any, Any]]) -> Iterator[Any]:
    """[arguments, results that are right] of each pair, as `encode` has them. Arguments are a list, or a text
    with a line of JSON for each. Where all results are lists of one (APPS has them so), either the list or what is in
    it may be meant."""
    with_args = []
    for args, wanted in pairs:
        if isinstance(args, Mapping):
            raise RewardError("the arguments of a function are a mapping: make them a list, in the function's order")
        try:
            if isinstance(args, str):
                args = [_from_json(line) for line in args.split("\n") if line.strip()]
                wanted = _from_json(wanted) if isinstance(wanted, str) else wanted
            with_args.append((args if isinstance(args, list) else [args], wanted))
        except ValueError as error:
            raise RewardError(f"the arguments or the result of a function are no JSON: {error}") from error
    wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in with_args)
    for args, wanted in with_args:
        yield encode([args, [wanted, *(wanted if wrapped else [])]], str)


_from_json = partial(
    json.loads, parse_int=lambda digits: int(digits) if len(digits) < _DIGITS else int(Decimal(digits))
)


def _only_prepares(text: Any, before: str = "", behind: Sequence[Any] = ()) -> bool:
    """Whether a text tests nothing itself: it has nothing that could fail, nor calls what is defined `before`; or it
    only imports, assigns and defines, and what looks like a test is called in a text `behind`."""
    try:
        nodes = list(ast.walk(tree := syntax_tree(_LONG.sub("1", text))))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    if not _CHECKS.search(text) and _called(nodes).isdisjoint(re.findall(r"def (\w+)", before)):
        return True
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    tests = any(name == "check" or name.casefold().startswith("test") for name in names)
    tests |= any(isinstance(node, ast.ClassDef) and node.bases for node in tree.body)  # of TestCase, say
    is_called = any(re.search(rf"(?m)^{name}\(", later) for later in behind if isinstance(later, str) for name in names)
    return all(isinstance(node, _PREPARATIONS) for node in tree.body) and (is_called or not tests)


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def _first(test: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((test[key] for key in keys if key in test), None)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(map(_text, content))
    if isinstance(content, str | int | float):
        is_integer = isinstance(content, int) and not isinstance(content, bool)
        return str(Decimal(content) if is_integer else content).replace("\r\n", "\n")
    raise RewardError(f"the input or output of a program is a text, not a {type(content).__name__}")


def judge(
    program: str, tests: Tests, limits: Limits, packages: Sequence[str | Path] = (), live: bool = False
) -> list[tuple[bool, bool]]:
    """(whether the program passes it, whether its own operators had a say) for each test; `limits.seconds` are for all
    of them. Those that are late have failed.

    Args:
        live: tests may compare objects of the program, by its own operators.

    Raises:
        RewardError: the tests ask nothing of the program, are at fault themselves, or need `live`.
        SandboxError: see `run_python`.
    """
    deadline = time.monotonic() + limits.seconds

    def run(code: str, output: int, **options: Any) -> Run:
        seconds = max(0.01, deadline - time.monotonic())
        left = replace(limits, seconds=seconds, output=max(limits.output, output))
        return run_python(code, limits=left, packages=packages, **options)

    passed = []
    for code, stdin, wanted in tests.outputs:
        room = 2 * len(wanted.encode(errors="replace")) + (64 << 10)  # for blanks, which are ignored, and for stderr
        passed.append((_prints(run(f"{program}\n{code}", room, stdin=stdin), wanted), False))
    if not tests.cases:
        return passed
    modules = {f"verl.sandbox.{name}": Path(__file__).with_name(f"{name}.py").read_text() for name in _SENT}
    queries, to_program = os.pipe()
    answers, to_tests = os.pipe()

    def side(incoming: int, outgoing: int, **inputs: Any) -> Run:
        inputs |= {"incoming": incoming, "outgoing": outgoing, "modules": modules}
        return run(_START, _VERDICTS, inputs=inputs, fds=(incoming, outgoing))

    with ThreadPoolExecutor(1) as thread:
        # The program ends when its tests do, as its pipe is closed.
        serving = thread.submit(side, queries, to_tests, program=program)
        tested = side(answers, to_program, cases=tests.cases, live=live)
        serving.result()
    finished = dict(json.loads(line) for line in tested.stdout.split("\n") if line.startswith("["))
    # A case that was not finished has failed.
    every = [verdict for number in range(len(tests.cases)) for verdict in finished.get(number, [FAILED])]
    # Where others ask, what asks nothing is no test.
    for verdict in [verdict for verdict in every if verdict["fault"] != ASKS_NOTHING] or every:
        if verdict["fault"]:
            raise RewardError(f"the tests are at fault: {verdict['fault']}")
        if verdict["needs"]:
            raise RewardError(f"the tests {verdict['needs']}")
        passed.append((verdict["passed"], verdict["live"]))
    return passed


def _prints(run: Run, wanted: str) -> bool:
    """Whether a program ended well and printed this, but for blank lines around it, blanks at the ends of lines and
    between numbers, and digits of a fraction that are beyond its precision."""
    lines, others = (
        [line.strip(" \t\r") for line in text.strip("\r\n \t").split("\n")] for text in (run.stdout, wanted)
    )
    if run.status != "ok" or len(lines) != len(others):
        return False
    return all(
        line == other or all(starmap(_same_number, zip_longest(*map(_BLANKS.split, (line, other)), fillvalue="")))
        for line, other in zip(lines, others, strict=True)
    )


def _same_number(text: str, wanted: str) -> bool:
    if not (_DECIMAL.fullmatch(text) and _DECIMAL.fullmatch(wanted)):
        return False
    if "." not in text + wanted:  # "05" may have to be printed so
        return text == wanted
    return Decimal(text) == Decimal(wanted) or ("." in wanted and alike(float(text), float(wanted)))

"""Tests of programs, in the forms that data sets have, run in a sandbox.

`parse` reads tests, `judge` runs them. Tests in Python have a sandbox of their own and ask the program over pipes
(`run_tests.py`, with `values.py`); a program's output is compared outside its sandbox. Nothing that is expected reaches
the program, but for tests that need live objects, which run beside it.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from verl.errors import RewardError, nearest
from verl.sandbox.run import Limits, Run, run_python
from verl.sandbox.values import alike
from verl.syntax import syntax_tree

_HERE = Path(__file__).parent
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
#: What tests read that only exists beside the program: its output, and what they replace in it.
_LIVE = frozenset(("stdout", "stderr", "stdin", "redirect_stdout", "patch", "mock"))
_PREPARATIONS = (
    ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
)
#: Without any of these, a text only fails where the program does.
_CHECKS = re.compile("assert|raise|fail|exit")
_DECIMAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_EQUALITY = re.compile("assert(?!Not).*Equals?")
#: Bytes that the tests' side may print.
_VERDICTS = 4 << 20
#: As `run_tests.py` says it.
_ASKS_NOTHING = "they ask nothing of the program"
#: What runs in a sandbox, in the order of imports, and the text that starts it: no file of ours is in reach there.
_SENT = ("values", "run_tests")
_START = """
import sys, types
for name, text in modules.items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(text, f"<{name}>", "exec", dont_inherit=True), vars(sys.modules[name]))
sys.modules["verl.sandbox.run_tests"].main(globals())
"""
_UNFINISHED = {"passed": False, "fault": None, "live": False, "altered": 0, "unfinished": True}


@dataclass(slots=True)
class Tests:
    """Tests of one program.

    Attributes:
        cases: tests in Python: `text`, the name of what it checks (`entry`), whether it runs beside it (`live`), and
            whether it is known to ask something (`asks`).
        outputs: code that is put behind the program, its input, and the output that is expected.
        names: what the tests read, the names that they check among it.
    """

    cases: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[tuple[str, str, str]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def add(self, tests: Any, entry: str | None, setup: str = "") -> None:
        """Add tests in any form, of the function `entry` unless they say of which, each behind `setup`.

        Raises:
            RewardError: they have none of the known forms.
        """
        if isinstance(tests, str):
            if tests.lstrip()[:1] in ("[", "{"):
                with suppress(ValueError):  # then it may be Python
                    return self.add(json.loads(tests), entry, setup)
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

    def _add_text(self, text: str, entry: str | None, asks: bool = False) -> None:
        try:
            nodes = list(ast.walk(syntax_tree(text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise RewardError(f"a test is neither Python nor JSON ({error}): {text[:80]!r}") from error
        called = _called(nodes)
        if "check" not in called and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in nodes):
            text += "\ncheck(candidate)"
        read = {getattr(node, name, None) for node in nodes for name in ("id", "attr", "name", "arg")}
        live = any(isinstance(node, ast.AsyncFor | ast.AsyncWith) for node in nodes) or not _LIVE.isdisjoint(read)
        self.cases.append({"text": text, "entry": entry, "live": live, "asks": asks})
        self.names |= {name for name in (*called, entry) if name}

    def _add_mapping(self, test: Mapping[str, Any], entry: str | None, setup: str) -> None:
        for key in test:
            if key not in _KNOWN:
                raise RewardError(f"tests have a key '{key}', which is not known: {nearest(str(key), _KNOWN)}")
        if str(test.get("language", "python")).casefold() not in ("python", "python3", "py"):
            raise RewardError(f"the tests are of a program in {test['language']}, not in Python")
        metadata = test.get("metadata")
        metadata = json.loads(metadata) if isinstance(metadata, str) and metadata[:1] == "{" else metadata or {}
        entry = _first(test, _FUNCTION) or _first(metadata, _FUNCTION) or entry
        for part in (test[key] for key in _SETUP if key in test):
            setup = "\n".join([setup, *([part] if isinstance(part, str) else part)])
        texts = [test[key] for key in _TEXTS if key in test]
        inputs, outputs = _first(test, _INPUT), _first(test, _OUTPUT)
        parts = [part for text in texts for part in ([text] if isinstance(text, str) else text)]
        if inputs is None and outputs is not None and parts and all(map(_only_prepares, parts)):
            code = "\n".join([setup, *parts])
            self.outputs.append((code, "", _text(outputs)))
            self.names |= _called(ast.walk(syntax_tree(code)))
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
            for text in _calls(pairs):
                self._add_text(text, entry, asks=True)


def parse(tests: Any, entry: str | None = None) -> Tests:
    """Tests in any form that data sets have.

    Args:
        tests: Python; inputs and outputs of a program, or of a function; a list of these; JSON text of any of them.
        entry: the function that they are of, where they do not say so.

    Raises:
        RewardError: there are none, or they have another form.
    """
    parsed = Tests()
    parsed.add(tests, entry)
    if not parsed.cases and not parsed.outputs:
        raise RewardError("there are no tests: what has no assert, and the like, asks nothing of a program")
    if not parsed.cases and not any(wanted.strip() for _, _, wanted in parsed.outputs):
        raise RewardError("the tests expect no output, so that any program would pass")
    return parsed


def _calls(pairs: list[tuple[Any, Any]]) -> Iterator[str]:
    """A test for each pair of arguments and result. Arguments are a list, or a text with a line of JSON for each. Where
    all results are lists of one (APPS has them so), either the list or what is in it may be meant."""
    with_args = []
    for args, wanted in pairs:
        if isinstance(args, Mapping):
            raise RewardError("the arguments of a function are a mapping: make them a list, in the function's order")
        try:
            if isinstance(args, str):
                args = [json.loads(line) for line in args.splitlines() if line.strip()]
                wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
            with_args.append((args if isinstance(args, list) else [args], json.loads(json.dumps(wanted))))
        except (TypeError, ValueError) as error:
            raise RewardError(f"the arguments or the result of a function are no JSON: {error}") from error
    wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for _, wanted in with_args)
    for args, wanted in with_args:
        yield f"assert __gives__(candidate, {args!r}, {[wanted, *(wanted if wrapped else [])]!r})"


def _only_prepares(text: Any, before: str = "", behind: Sequence[Any] = ()) -> bool:
    """Whether a text tests nothing itself: it has nothing that could fail, nor calls what is defined `before`; or it
    only imports, assigns and defines, and what looks like a test is called in a text `behind`."""
    try:
        nodes = list(ast.walk(tree := syntax_tree(text)))
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
        return str(content).replace("\r\n", "\n")
    raise RewardError(f"the input or output of a program is a text, not a {type(content).__name__}")


class _Altered(ast.NodeTransformer):
    """Rewrites tests of equality so that they pass where a side equals a random value in place of the other side. A
    program that passes the tests and these as well returns objects that are equal to anything."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        node.test = self.altered(node.test)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and _EQUALITY.fullmatch(node.func.attr) and len(node.args) > 1:
            node.func.attr, node.args = "assertTrue", [_agrees(*node.args[:2])]
        return self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        return node  # it may want the error of an assert

    def visit_With(self, node: ast.With) -> ast.AST:
        return node  # likewise: `assertRaises`, `pytest.raises`

    def altered(self, test: ast.expr) -> ast.expr:
        if isinstance(test, ast.BoolOp):
            test.values = [self.altered(value) for value in test.values]
        elif isinstance(test, ast.Compare):
            sides = [test.left, *test.comparators]
            pairs = [
                _agrees(one, other) if isinstance(op, ast.Eq) else ast.Compare(one, [op], [other])
                for op, one, other in zip(test.ops, sides, sides[1:], strict=False)
            ]
            test = ast.BoolOp(ast.And(), pairs) if len(pairs) > 1 else pairs[0]
        return test


def _agrees(one: ast.expr, other: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("__agrees__", ast.Load()), [one, other], [])


def judge(program: str, tests: Tests, limits: Limits, packages: Sequence[str | Path] = ()) -> list[bool]:
    """Which tests a program passes; `limits.seconds` are for all of them. Those that are late have failed.

    Raises:
        RewardError: the tests ask nothing of the program, or are at fault themselves.
        SandboxError: see `run_python`.
    """
    deadline = time.monotonic() + limits.seconds

    def run(code: str, output: int, seconds: float | None = None, **options: Any) -> Run:
        seconds = max(0.01, deadline - time.monotonic()) if seconds is None else seconds
        left = replace(limits, seconds=seconds, output=max(limits.output, output))
        return run_python(code, limits=left, packages=packages, **options)

    # Allow for blanks, which are ignored, and for stderr.
    passed = [
        _prints(run(f"{program}\n{code}", 2 * len(wanted.encode(errors="replace")) + (64 << 10), stdin=stdin), wanted)
        for code, stdin, wanted in tests.outputs
    ]
    verdicts = _ask_apart(program, tests.cases, run) if tests.cases else []
    if live := [number for number, case in enumerate(verdicts) if any(verdict["live"] for verdict in case)]:
        beside = _ask_beside(program, [tests.cases[number] for number in live], run, limits.seconds)
        verdicts = [beside.pop(0) if number in live else case for number, case in enumerate(verdicts)]
    every = [verdict for of_case in verdicts for verdict in of_case]
    # Where others ask, what asks nothing is no test.
    for verdict in [verdict for verdict in every if verdict["fault"] != _ASKS_NOTHING] or every:
        if verdict["fault"]:
            raise RewardError(f"the tests are at fault: {verdict['fault']}")
        passed.append(verdict["passed"])
    return passed


def _ask_apart(program: str, cases: list[dict[str, Any]], run: Callable[..., Run]) -> list[list[dict[str, Any]]]:
    """The verdicts of each case, from a sandbox beside that of the program; of live ones, that they are live."""
    asked, ask = os.pipe()
    answered, reply = os.pipe()
    with ThreadPoolExecutor(1) as thread:
        # The program ends when its tests do, as its pipe is closed.
        serving = thread.submit(_run_side, run, "program", asked, reply, program=program)
        verdicts = _verdicts(_run_side(run, "tests", answered, ask, cases=cases), len(cases), "")
        serving.result()
    return verdicts


def _ask_beside(
    program: str, cases: list[dict[str, Any]], run: Callable[..., Run], seconds: float
) -> list[list[dict[str, Any]]]:
    """The verdicts of cases that run in the process of the program: what passes tests that expect something else, too,
    agrees with anything, and fails. So does what does not finish those, for which it has all of `seconds` again: it
    could be late there on purpose."""
    runs = []
    altered = [{**case, "text": _altered(case["text"])} for case in cases]
    for texts, run_side in ((cases, run), (altered, functools.partial(run, seconds=seconds))):
        secret = secrets.token_hex(16)
        incoming, outgoing = os.pipe()
        with ThreadPoolExecutor(1) as thread:  # what is sent may be more than a pipe holds
            sending = thread.submit(_send, outgoing, [secret, texts])
            runs.append(_verdicts(_run_side(run_side, "both", incoming, program=program), len(cases), secret))
            sending.result()
    for first, others in zip(*runs, strict=True):
        for verdict in first if "unfinished" in others[0] else ():
            verdict["passed"] = False
        for verdict, other in zip(first, others, strict=False):
            verdict["passed"] &= not (other["passed"] and other["altered"])
    return runs[0]


def _altered(text: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_Altered().visit(syntax_tree(text))))


def _send(pipe: int, content: Any) -> None:
    with suppress(BrokenPipeError), os.fdopen(pipe, "w") as file:  # a program that ended its process has failed
        file.write(json.dumps(content) + "\n")


def _run_side(run: Callable[..., Run], side: str, *fds: int, program: str = "", cases: Sequence[Any] = ()) -> Run:
    texts = {name: (_HERE / f"{name}.py").read_text() for name in ("pytest_stub", *_SENT)}
    inputs: dict[str, Any] = {"side": side, "program": program, "cases": list(cases), "pytest": texts["pytest_stub"]}
    inputs |= dict(zip(("incoming", "outgoing"), fds, strict=False))
    inputs["modules"] = {f"verl.sandbox.{name}": texts[name] for name in _SENT}
    return run(_START, _VERDICTS, inputs=inputs, fds=fds)


def _verdicts(run: Run, count: int, prefix: str) -> list[list[dict[str, Any]]]:
    """The verdicts of each case, by the lines that begin with `prefix`; a case that was not finished has failed."""
    of_cases: list[list[dict[str, Any]]] = [[dict(_UNFINISHED)] for _ in range(count)]
    for line in run.stdout.splitlines():
        if line.startswith(prefix + "["):
            number, verdicts = json.loads(line.removeprefix(prefix))
            of_cases[number] = verdicts
    return of_cases


def _prints(run: Run, wanted: str) -> bool:
    """Whether a program ended well and printed this, but for blank lines around it, blanks at the ends of lines and
    between numbers, and digits of a fraction that are beyond its precision."""
    lines, others = (text.strip("\r\n \t").splitlines() for text in (run.stdout, wanted))
    return run.status == "ok" and len(lines) == len(others) and all(map(_same_line, lines, others))


def _same_line(line: str, wanted: str) -> bool:
    numbers, others = line.split(), wanted.split()
    same = len(numbers) == len(others) and all(map(_same_number, numbers, others))
    return same or line.rstrip() == wanted.rstrip()


def _same_number(text: str, wanted: str) -> bool:
    if not (_DECIMAL.fullmatch(text) and _DECIMAL.fullmatch(wanted)):
        return False
    if "." not in text + wanted:  # "05" may have to be printed so
        return text == wanted
    return Decimal(text) == Decimal(wanted) or ("." in wanted and alike(float(text), float(wanted)))

"""Runs in a sandbox: a program, or its tests. `code_tests.py` sends the text of this file, of `link.py` and of
`pytest_stub.py`.

Settings of `main`: `program` (text), or `cases` and `live`; and the file descriptors `incoming` and `outgoing`. The
tests ask the program over a `Link`, and judge what it answers. Verdicts are lines of JSON on stdout. Standard library
alone.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import functools
import importlib
import io
import itertools
import json
import sys
import types

from verl.sandbox.link import COMPARED, COMPUTED, OWN_OPERATORS, Link, Over, alike, decode, waited_for

TYPE_CHECKING = False  # loading typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

#: Names that tests use without an import: of modules, and of what modules define.
ALIASES = {"np": "numpy", "pd": "pandas"}
COMMON = {
    "math": "isclose inf nan pi sqrt floor ceil",
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "typing": "Any Callable Dict Iterable Iterator List Optional Sequence Set Tuple Union",
    "functools": "partial reduce",
    "datetime": "datetime date timedelta",
    "fractions": "Fraction",
    "decimal": "Decimal",
}
LIBRARIES = {name: module for module, names in COMMON.items() for name in names.split()}
#: Modules as which tests import the program.
PROGRAM = ("solution", "main", "program", "submission", "answer", "implementation", "your_module", "my_module")

ASKS_NOTHING = "they ask nothing of the program"
#: Calls of a dummy: the tests may loop until something else is true.
PATIENCE = 10_000
#: Errors that are the tests' own where no program is asked.
FAULTS = (NameError, ImportError, SyntaxError)
FAILED = {"passed": False, "fault": None, "needs": None, "live": False}


class FaultError(BaseException):
    """The tests themselves are at fault."""


def serve(program: str, link: Link) -> None:
    """Answer queries to a program. Answers carry its prints; `input` queries the tests."""
    written = io.BytesIO()
    sys.stdout = io.TextIOWrapper(written, write_through=True)
    module, broken = run_program(program)
    vars(module)["__builtins__"]["input"] = lambda prompt="": link.query("input", str(prompt))
    link.operations.update(module=lambda: module, name=functools.partial(named, vars(module)))

    def printed() -> str:
        text = written.getvalue().decode(errors="replace")
        written.seek(0)
        written.truncate()
        return text

    printed()
    link.printed = printed
    while (message := link.receive())[0] == "query":
        link.send(*(("over", broken, None) if broken else link.answer(*message[1:])))


def named(names: dict[str, Any], name: str) -> list[Any]:
    """[whether the program defines this name, whether it is a class, its value]; "candidate" is its last function."""
    if name == "candidate":
        functions = [key for key, value in names.items() if callable(value) and not isinstance(value, type)]
        name = [name, *(key for key in functions if getattr(names[key], "__module__", None) == "solution")][-1]
    return [name in names, isinstance(names.get(name), type), names.get(name)]


def run_program(program: str) -> tuple[types.ModuleType, str | None]:
    """A program as module "solution", and why it does not run. Common names need no import, as where
    such programs are written for (a class `Solution` with `List` in its signatures)."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    usual = {name: getattr(importlib.import_module(of), name) for name, of in LIBRARIES.items() if name in program}
    vars(module)["__builtins__"] = {**vars(builtins), **usual}
    problem: BaseException | None = None
    for flags in (0, __future__.annotations.compiler_flag):  # an annotation may name a class of the tests
        try:
            exec(compile(program, "<solution>", "exec", flags, dont_inherit=True), vars(module))
            vars(module).setdefault("__all__", [name for name in vars(module) if not name.startswith("_")])
            return module, None
        except BaseException as error:
            problem = problem or error
            if not isinstance(error, NameError):
                break
    return module, type(problem).__name__


class Dummy:
    """Stands in for a program: every name is a function, or an object with such methods, that returns `value`: itself,
    which is true and equal to anything, or false and equal to nothing, or a constant. Tests that pass with all of these
    check nothing; tests that fail with the first two by an error of their own are at fault."""

    def __init__(self, value: Any = None, truth: bool | None = None) -> None:
        self._value, self._truth, self._calls = value if truth is None else self, truth, 0

    def lookup(self, name: str) -> Any:
        return True, functools.partial(self)

    def module(self) -> Any:
        module = types.ModuleType("solution")
        vars(module).update(__getattr__=lambda name: functools.partial(self), __all__=[])
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls > PATIENCE:
            raise Over("a dummy")
        return self._value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter([self._value])

    def __hash__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return self._truth is not False


for _name in COMPARED.split():
    setattr(Dummy, f"__{_name}__", lambda dummy, other: NotImplemented if dummy._truth is None else dummy._truth)
for _name in (*COMPUTED.split(), *(f"r{name}" for name in COMPUTED.split()), "abs", "neg", "getitem"):
    setattr(Dummy, f"__{_name}__", lambda dummy, *others: NotImplemented if dummy._truth is None else dummy)


class Names(dict[str, object]):
    """The globals of a test. A name that it does not define is Python's or a library's, by its usual name, else the
    program's. Only where a test has no other name of the program, a name of Python's is the program's (a task was to
    write `sum`); a module never is."""

    def __init__(self, tree: ast.AST, source: Link | Dummy, entry: str | None) -> None:
        super().__init__({"__name__": "__main__"})
        self.source, self.entry = source, entry
        free = free_names(tree)
        self.modules = {name: module for name in free if (module := module_of(name, tree)) is not None}
        self.checked = checked_names(tree)
        self.keeps_to_python = bool(entry or self.checked or of_program(tree) - self.modules.keys())

    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            return self.modules[name]
        of_python = name not in self.checked and (hasattr(builtins, name) or name in LIBRARIES)
        if not of_python or not self.keeps_to_python:
            if name == "candidate" and self.entry:  # "f", "Solution().f", or the method `f` of class Solution
                is_name = self.entry.isidentifier()
                is_defined, value = self.source.lookup(self.entry) if is_name else (True, eval(self.entry, self))
                return value if is_defined else eval(f"Solution().{self.entry}", self)
            is_defined, value = self.source.lookup(name)
            if is_defined:
                return value
        if name in LIBRARIES:
            return getattr(importlib.import_module(LIBRARIES[name]), name)
        raise KeyError(name) if hasattr(builtins, name) else NameError(f"the program does not define '{name}'")


def module_of(name: str, tree: ast.AST) -> Any:
    """The module that a test means by a name of which it reads attributes."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    read = [node.attr for node in nodes if node.value.id == name]  # type: ignore[attr-defined]
    if not read or (name not in ALIASES and name not in sys.stdlib_module_names):
        return None
    module = importlib.import_module(ALIASES.get(name, name))
    return module if name in ALIASES or all(hasattr(module, attribute) for attribute in read) else None


def fault_of(tree: ast.Module) -> str | None:
    """The fault of tests that no program can pass: they import a missing module, or compare with a name that nobody
    defines, while other names are called."""
    caught = {inner for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if modules and node not in caught and not {*modules} & {*PROGRAM}:
            try:
                exec(compile(ast.Module([node], []), "<test>", "exec", dont_inherit=True), {})  # type: ignore[list-item]
            except ImportError as error:
                return f"{type(error).__name__}: {error}"
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    operands = [operand for node in compared for operand in (node.left, *node.comparators)]
    elsewhere = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in operands}
    unknown = {name for name in of_program(tree) if name not in sys.stdlib_module_names}
    alone = sorted(name for name in unknown - elsewhere if name.islower())
    return f"NameError: name '{alone[0]}' is nowhere" if unknown > {*alone} > set() else None


def of_program(tree: ast.AST) -> set[str]:
    """Names that tests do not define, nor Python or a library."""
    return {name for name in free_names(tree) - checked_names(tree) - LIBRARIES.keys() - ALIASES.keys()
            if not hasattr(builtins, name) and not name.startswith("__")}  # fmt: skip


def free_names(tree: ast.AST) -> set[str]:
    """Names that a test reads and nowhere defines."""
    read: set[str] = set()
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif name := getattr(node, "name", None):  # of a function, a class, a caught exception
            defined.add(name)
    return read - defined


def checked_names(tree: ast.AST) -> set[str]:
    """Names that are the program's whatever they are: what `check` is called with, what is imported from it, and
    constants that are called."""
    checked = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            of_program = PROGRAM if isinstance(node, ast.Import) else names if node.module in PROGRAM else []
            checked |= {*names} & {*of_program}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            constant = [node.func] if node.func.id in ("inf", "nan", "pi") else []
            checked_here = node.args if node.func.id == "check" else constant
            checked |= {argument.id for argument in checked_here if isinstance(argument, ast.Name)}
    return checked


def units(case: dict[str, Any], source: Link | Dummy) -> Iterator[Callable[[], Any]]:
    """The parts of a case, each with a verdict of its own: its text, then the tests of unittest and pytest in it."""
    tree = ast.fix_missing_locations(heard(ast.parse(case["text"])))
    names: dict[str, Any] = Names(tree, source, case["entry"])
    if "call" in case:
        yield lambda: gives(names["candidate"], *decode(case["call"], getattr))
        return
    unittest: Any = importlib.import_module("unittest") if "unittest" in case["text"] else None
    if unittest:
        unittest.main = lambda *args, **kwargs: None
    yield lambda: exec(compile(tree, "<test>", "exec", dont_inherit=True), names)
    for name, value in list(names.items()):
        is_class = isinstance(value, type) and value.__module__ == "__main__"
        if is_class and unittest and issubclass(value, unittest.TestCase):
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                yield functools.partial(run_case, test, unittest.TestResult())
        elif is_class and name.startswith("Test"):
            for method, function in vars(value).items():
                yield from calls(method, function, value)
        else:
            yield from calls(name, value)


def run_case(test: Any, result: Any) -> None:
    type(test)._classSetupFailed = False
    sys.modules["unittest"].TestSuite([test]).run(result)
    problems = [*result.errors, *result.failures, *result.skipped, *result.expectedFailures]
    if problems or not result.testsRun or not result.wasSuccessful():
        raise AssertionError(str(problems)[-200:])


def calls(name: str, function: Any, owner: type | None = None) -> Iterator[Callable[[], Any]]:
    """A pytest function, once for each set of its parameters."""
    if type(function) is not types.FunctionType or not name.startswith("test"):
        return
    code = function.__code__
    wanted = code.co_varnames[owner is not None : code.co_argcount - len(function.__defaults__ or ())]
    for choice in itertools.product(*getattr(function, "cases", [])):
        values = {key: value for part in choice for key, value in part.items()}
        yield functools.partial(call, function, owner, values, [name for name in wanted if name not in values])


def call(function: Any, owner: Any, values: dict[str, Any], missing: list[str]) -> None:
    if missing:
        raise FaultError(f"the tests need the fixture '{missing[0]}', and there are none here")
    instance = owner and owner()
    if hasattr(instance, "setup_method"):
        instance.setup_method(*[function][: instance.setup_method.__code__.co_argcount - 1])
    waited_for(function(*([instance] if owner else []), **values))


def gives(function: Any, args: list[Any], wanted: list[Any]) -> None:
    """Fail unless what a function gives, as JSON has it, is one of these."""
    result, *right = json.loads(json.dumps([waited_for(function(*args)), *wanted]))
    if not any(alike(result, one) for one in right):
        raise AssertionError(f"{result!r:.80}")


def heard(tree: ast.Module) -> ast.Module:
    """Tests in which a failed assert fails the test, also where they only print that it did."""
    for node in ast.walk(tree):
        asserts = isinstance(node, ast.Try) and any("assert " in ast.unparse(inner) for inner in node.body)
        for handler in node.handlers if asserts else ():  # type: ignore[attr-defined]
            caught = ast.unparse(handler.type) if handler.type else "Exception"
            # It may try something else, or go on to fail.
            ends = any(isinstance(inner, ast.Assert | ast.Raise) for inner in ast.walk(handler))
            if caught in ("AssertionError", "Exception", "BaseException") and not ends:
                handler.body.append(ast.Raise())
    return tree


def errors_of(case: dict[str, Any], source: Link | Dummy) -> Iterator[BaseException | None]:
    """The error of each part of a case; None: it passes."""
    sys.modules.update(dict.fromkeys(PROGRAM, source.module()))
    for unit in units(case, source):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                unit()
        except BaseException as error:
            yield error
        else:
            yield None


def try_dummies(case: dict[str, Any]) -> tuple[str | None, list[bool]]:
    """The fault that tests have with any program, and whether every dummy passes, for each part."""
    trials = [list(errors_of(case, dummy)) for dummy in (Dummy(truth=True), Dummy(truth=False))]
    idle = [errors == (None, None) for errors in zip(*trials, strict=False)]
    for value in (None, True, False) if any(idle) else ():
        idle = [was and error is None for was, error in zip(idle, errors_of(case, Dummy(value)), strict=False)]
    faults = [
        {f"{type(error).__name__}: {error}"[:200] for error in errors if isinstance(error, (FaultError, *FAULTS))}
        for errors in trials
    ]
    return next(iter(faults[0] & faults[1]), ASKS_NOTHING if all(idle) else None), idle


def judged(case: dict[str, Any], link: Link) -> list[dict[str, Any]]:
    """The verdicts of a case. Faults of the tests are found before the program is queried, and without it."""
    idle = list[bool]()
    if "call" not in case:
        tree = ast.parse(case["text"])
        # They compare objects of the program, which they make, with something: `v == Vector(1, 2)`.
        items = [item for node in ast.walk(tree) if isinstance(node, ast.Compare) for item in node.comparators]
        called = {ast.unparse(item.func) for item in items if isinstance(item, ast.Call)}
        classes = [name for name in called & (of_program(tree) | checked_names(tree)) if name[:1].isupper()]
        if classes and not link.is_live:
            return [{**FAILED, "needs": OWN_OPERATORS}]
        fault = fault_of(tree)
        if fault is None:
            fault, idle = try_dummies(case)
        if fault is not None:
            return [{**FAILED, "fault": fault}]
    verdicts = []
    for error, is_idle in zip(errors_of(case, link), itertools.chain(idle, itertools.repeat(False)), strict=False):
        passed = error is None and link.over is None and link.answered > 0
        fault = ASKS_NOTHING if is_idle and error is None else None
        if isinstance(error, FaultError):
            fault = f"FaultError: {error}"[:200]
        verdicts.append({"passed": passed, "fault": fault, "needs": link.needs, "live": link.used})
        link.answered, link.needs, link.used = 0, None, False  # before the next part runs
    return verdicts


def main(settings: dict[str, Any]) -> None:
    """One side: the program, or its tests, which print their verdicts, a line of JSON for each case."""
    fds = settings["incoming"], settings["outgoing"]
    if "program" in settings:
        return serve(settings["program"], Link(*fds, is_program=True))
    out, link = sys.stdout, Link(*fds, is_live=settings["live"])
    sys.stdout = io.StringIO()  # what a program prints is no verdict
    sys.modules["pytest"] = sys.modules["verl.sandbox.pytest_stub"]
    for number, case in enumerate(settings["cases"]):
        verdicts = judged(case, link)
        print(f"\n{json.dumps([number, verdicts])}", file=out, flush=True)

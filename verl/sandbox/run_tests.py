"""Runs in a sandbox: a program, its tests, or both. `code_tests.py` sends its text and that of `values.py` there.

Settings of `main`: `side`, `program` (text), `cases`, `pytest` (the text of `pytest_stub.py`), and the file descriptors
`incoming` and `outgoing`. Verdicts are lines of JSON on stdout. Standard library alone.

- "program" and "tests" have a sandbox each. The tests ask the program over two pipes, in JSON. Arguments and results
  are values of exactly a type of Python's. An object of the program stays there; the tests get a `Handle` of it,
  without operators that take another operand: they could agree with everything, and would learn what is expected.
- "both" is for tests that need live objects, such as a function that the program gets. Cases and a secret, with which
  every verdict begins, come over a pipe once the program is loaded.
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
import operator
import os
import sys
import types

from verl.sandbox.values import alike, decode, encode

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
#: What a handle passes on: operations without an operand that the tests could expect something of; and the others.
FORWARDED = "bool len iter next reversed str repr hash int float index abs neg getitem setitem delitem enter exit"
OPERANDS = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift lt le gt ge eq"
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator if hasattr(operator, name) else builtins, name, getattr) for name in FORWARDED.split()},
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context, *error: type(context).__exit__(context, *error),
    "getattr": getattr,
    "setattr": setattr,
    "await": lambda awaitable: waited_for(awaitable),
}


ASKS_NOTHING = "they ask nothing of the program"
LIVE = {"passed": False, "fault": None, "live": True, "altered": 0}


class NeedsLive(BaseException):
    """The test needs an object of one side on the other."""


class Over(BaseException):
    """The program does not run, or has ended."""


@functools.cache
def event_loop() -> Any:
    return importlib.import_module("asyncio").new_event_loop()


def waited_for(result: Any) -> Any:
    return event_loop().run_until_complete(result) if hasattr(type(result), "__await__") else result


class Handle:
    """The tests' side of an object of the program: its number there, and whether the tests made it themselves, from a
    class that they name. Operators of those are the program's own matter, and need them live."""

    __slots__ = ("_held",)

    def __init__(self, asker: Asker, number: int) -> None:
        object.__setattr__(self, "_held", [asker, number, False])

    def __getattr__(self, name: str) -> Any:
        return self._held[0].ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._held[0].ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._held[0].ask("call", self, list(args), kwargs)
        return mark(result) if self._held[2] else result

    def __await__(self) -> Any:
        yield from ()
        return self._held[0].ask("await", self)

    def __instancecheck__(self, value: Any) -> Any:
        raise self._held[0].live()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> Any:  # a class of the tests derives from it
        raise self._held[0].live()


def mark(value: Any) -> Any:
    if type(value) is Handle:
        value._held[2] = True
    return value


def operand(handle: Handle, other: Any) -> Any:
    for value in (handle, other):
        if type(value) is Handle and value._held[2] and handle is not other:
            raise value._held[0].live()
    return True if handle is other else NotImplemented


def forward(name: str) -> Callable[..., Any]:
    return lambda handle, *rest: handle._held[0].ask(name, handle, *rest)


for _name in OPERANDS.split():
    setattr(Handle, f"__{_name}__", operand)
    setattr(Handle, f"__r{_name}__", operand)
for _name in FORWARDED.split():
    setattr(Handle, f"__{_name}__", forward(_name))


class Asker:
    """The tests' side of the pipes. Counts what it asks, and what was there to be asked."""

    asked = answered = 0
    needs_live = False
    over: str | None = None

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.lines, self.out = os.fdopen(incoming), os.fdopen(outgoing, "w")
        self.handles: dict[int, Handle] = {}

    def begin(self) -> None:
        self.asked, self.answered, self.needs_live = 0, 0, False

    def live(self) -> NeedsLive:
        self.needs_live = True
        return NeedsLive()

    def lookup(self, name: str) -> Any:
        """(whether the program defines this name, its value)."""
        is_defined, value, is_error = self.ask("name", name)
        if name[:1].isupper() and is_error:  # to be caught by its class
            raise self.live()
        self.answered += is_defined
        return is_defined, mark(value) if name[:1].isupper() else value

    def ask(self, operation: str, *request: Any) -> Any:
        """What the program answers."""
        self.asked += 1
        if self.over is None:
            self.out.write(json.dumps([operation, *(encode(item, self.number) for item in request)]) + "\n")
            with contextlib.suppress(BrokenPipeError):
                self.out.flush()
            line = self.lines.readline(1 << 24)
            ended = ("over", "the program has ended", None)
            kind, content, changed = json.loads(line) if line.endswith("\n") else ended
            self.over = str(content) if kind == "over" else None
        if self.over is not None:
            raise Over(self.over)
        self.answered += operation in OPERATIONS
        if kind == "raised":
            raise self.error(operation, *content)
        if changed is not None:
            take_back(request[1:], decode(changed, self.handle))
        return decode(content, self.handle)

    def number(self, value: Any) -> Any:
        if type(value) is not Handle:
            raise self.live()
        return {"yours": value._held[1]}

    def handle(self, kind: str, inner: Any) -> Any:
        if kind not in ("object", "coroutine"):
            raise ValueError(f"the program answered with a {kind}")
        handle = self.handles.setdefault(int(inner), Handle(self, int(inner)))
        return awaited(handle) if kind == "coroutine" else handle

    def error(self, operation: str, name: str, args: Any) -> BaseException:
        """The program's error as one of Python's; not one that ends a loop of the tests."""
        kind: Any = getattr(builtins, name, None)
        ends = operation != "next" and name in ("StopIteration", "StopAsyncIteration")
        if ends or not isinstance(kind, type) or not issubclass(kind, Exception | SystemExit):
            kind = RuntimeError
        error: BaseException = kind.__new__(kind)
        error.args = tuple(decode(args, self.handle))
        error.of_program = True  # type: ignore[attr-defined]
        return error


async def awaited(handle: Handle) -> Any:
    return await handle


def take_back(request: tuple[Any, ...], changed: Any) -> None:
    """Apply to the arguments what the call changed in place."""
    (args, kwargs), (new_args, new_kwargs) = request, changed
    for old, new in [*zip(args, new_args, strict=True), *((kwargs[name], new_kwargs[name]) for name in kwargs)]:
        if type(old) is list:
            old[:] = new
        elif type(old) in (dict, set):
            old.clear()
            old.update(new)


class Server:
    """The program's side of the pipes."""

    def __init__(self, program: str) -> None:
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.names, self.broken = run_program(program)

    def run(self, incoming: int, outgoing: int) -> None:
        lines, out = os.fdopen(incoming), os.fdopen(outgoing, "w")
        while (line := lines.readline()).endswith("\n"):
            out.write(json.dumps(("over", self.broken, None) if self.broken else self.answer(*json.loads(line))) + "\n")
            out.flush()

    def answer(self, operation: str, *content: Any) -> tuple[str, Any, Any]:
        try:
            request = [decode(item, self.mine) for item in content]
            if operation == "name":
                name = entry_of(self.names) if request[0] == "candidate" else request[0]
                value = self.names.get(name)
                is_error = isinstance(value, type) and issubclass(value, BaseException)
                return "value", [name in self.names, encode(value, self.number), is_error], None
            if operation == "names":
                return "value", [name for name in self.names if not name.startswith("_")], None
            result = encode(OPERATIONS[operation](*request), self.number)
            changed = [encode(item, self.number) for item in request[1:]]
            return "value", result, changed if operation == "call" and changed != list(content[1:]) else None
        except BaseException as error:
            return "raised", described(error), None

    def mine(self, kind: str, inner: Any) -> Any:
        return self.kept[inner] if kind == "yours" else getattr(builtins, inner)

    def number(self, value: Any) -> Any:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return {"coroutine" if type(value) is types.CoroutineType else "object": self.numbers[id(value)]}


def described(error: BaseException) -> list[Any]:
    """The nearest class of Python's own, and the arguments or the text."""
    kind = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    try:
        return [kind.__name__, encode(list(error.args) if kind is type(error) else [str(error)], str)]
    except Exception:  # the text of an error may raise
        return [kind.__name__, []]


def run_program(program: str) -> tuple[dict[str, Any], str | None]:
    """What a program defines, as module "solution", and why it does not run. Common names need no import, as where
    such programs are written for (a class `Solution` with `List` in its signatures)."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    usual = {name: getattr(importlib.import_module(of), name) for name, of in LIBRARIES.items() if name in program}
    vars(module)["__builtins__"] = {**vars(builtins), **usual}
    problem: BaseException | None = None
    for flags in (0, __future__.annotations.compiler_flag):  # an annotation may name a class of the tests
        try:
            exec(compile(program, "<solution>", "exec", flags, dont_inherit=True), vars(module))
            return vars(module), None
        except BaseException as error:
            problem = problem or error
            if not isinstance(error, NameError):
                break
    return vars(module), ": ".join(map(str, described(problem)))[:500]  # type: ignore[arg-type]


def entry_of(names: dict[str, Any]) -> str:
    """The last function that a program defines."""
    functions = [name for name, value in names.items() if callable(value) and not isinstance(value, type)]
    defined = [name for name in functions if getattr(names[name], "__module__", None) == "solution"]
    return defined[-1] if defined else "candidate"


class Beside:
    """The program in the process of the tests, in the place of an `Asker`."""

    asked = answered = 0
    needs_live = False

    def __init__(self, program: str) -> None:
        self.names, self.over = run_program(program)
        self.wrapped: dict[int, Any] = {}

    def begin(self) -> None:
        self.asked += self.over is not None

    def lookup(self, name: str) -> Any:
        name = entry_of(self.names) if name == "candidate" else name
        self.asked, self.answered = self.asked + 1, self.answered + (name in self.names)
        value = self.names.get(name)
        if type(value) is types.FunctionType:
            value = self.wrapped.setdefault(id(value), without_stop(value))
        return name in self.names, value


class Nonsense:
    """In the place of a program: it defines all that is asked for, and what that gives, in any way, has one truth. What
    passes with such a program that is always true, and with one that never is, asks nothing."""

    asked = answered = 1
    needs_live, over = False, None

    def __init__(self, truth: bool) -> None:
        results: dict[str, Any] = dict.fromkeys(["bool", "lt", "le", "gt", "ge", "eq", "ne", "contains"], truth)
        results |= {"len": int(truth), "int": int(truth), "index": int(truth), "float": float(truth), "hash": 0}
        results |= {"str": "nonsense", "repr": "nonsense", "format": "nonsense", "exit": False}
        answers = itertools.count()

        def answer(name: str, *args: Any, **kwargs: Any) -> Any:
            if next(answers) > 10_000:  # the tests may loop until something else is true
                raise Over("nonsense")
            return iter([value]) if name in ("iter", "await") else results.get(name, value)

        def attribute(_: Any, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return value

        names = [*results, *FORWARDED.split(), *OPERANDS.split(), *(f"r{name}" for name in OPERANDS.split())]
        names += ["call", "await"]
        methods: dict[str, Any] = {f"__{name}__": functools.partial(answer, name) for name in names}
        kind: Any = type("Nonsense", (), {**methods, "__getattr__": attribute})
        value = kind()
        self.defined = type("Defined", (kind,), {"__bool__": lambda self: True})()

    def begin(self) -> None: ...

    def lookup(self, name: str) -> Any:
        return True, self.defined

    def ask(self, *request: Any) -> list[str]:
        return []


def without_stop(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that cannot end a loop of the tests."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("StopIteration") from error

    return call


def as_module(source: Asker | Beside | Nonsense) -> types.ModuleType:
    """The program, for tests that import it."""
    if isinstance(source, Beside):
        return sys.modules["solution"]

    def read(name: str) -> Any:
        if name == "__all__":
            return source.ask("names")
        is_defined, value = (False, None) if name.startswith("__") else source.lookup(name)
        if not is_defined:
            raise AttributeError(f"the program does not define {name}")
        return value

    module = types.ModuleType("solution")
    vars(module)["__getattr__"] = read
    return module


class Names(dict[str, object]):
    """The globals of a test. What it does not define is Python's or a library's, by its usual name, else the
    program's. Only where a test has no other name of the program, a name of Python's is the program's (a task was to
    write `sum`); a module never is."""

    def __init__(self, tree: ast.AST, source: Asker | Beside | Nonsense, entry: str | None) -> None:
        super().__init__({"__name__": "__main__"})
        self.source, self.entry = source, entry
        free = free_names(tree)
        self.modules = {name: module for name in free if (module := module_of(name, tree)) is not None}
        self.checked = checked_names(tree)
        others = {name for name in free if not hasattr(builtins, name) and not name.startswith("__")}
        self.keeps_to_python = bool(entry or self.checked or others - LIBRARIES.keys() - self.modules.keys())

    def __missing__(self, name: str) -> Any:
        if name in self.modules:
            return self.modules[name]
        of_python = name not in self.checked and (hasattr(builtins, name) or name in LIBRARIES)
        if not of_python or not self.keeps_to_python:
            if name == "candidate" and self.entry:
                return self.entry_point(self.entry)
            is_defined, value = self.source.lookup(name)
            if is_defined:
                return value
        if name in LIBRARIES:
            return getattr(importlib.import_module(LIBRARIES[name]), name)
        raise KeyError(name) if hasattr(builtins, name) else NameError(f"the program does not define '{name}'")

    def entry_point(self, path: str) -> Any:
        """The function "f", or "Solution().f", or the method `f` of class Solution."""
        is_defined, value = self.source.lookup(path) if path.isidentifier() else (True, eval(path, self))
        return value if is_defined else eval(f"Solution().{path}", self)


def module_of(name: str, tree: ast.AST) -> Any:
    """The module that a test means by a name of which it reads attributes."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    read = [node.attr for node in nodes if node.value.id == name]  # type: ignore[attr-defined]
    if not read or (name not in ALIASES and name not in sys.stdlib_module_names):
        return None
    module = importlib.import_module(ALIASES.get(name, name))
    return module if name in ALIASES or all(hasattr(module, attribute) for attribute in read) else None


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


def units(case: dict[str, Any], source: Asker | Beside | Nonsense) -> Iterator[Callable[[], Any]]:
    """The parts of a case, each with a verdict of its own: its text, then the tests of unittest and pytest in it."""
    names: dict[str, Any] = {}

    def run_text() -> None:
        nonlocal names
        tree = ast.fix_missing_locations(heard(ast.parse(case["text"])))
        names = Names(tree, source, case["entry"])
        names.update(__agrees__=agrees, __gives__=gives, __holds__=holds)
        source.asked += isinstance(source, Beside) and bool(names.checked)
        exec(compile(tree, "<test>", "exec", dont_inherit=True), names)

    yield run_text
    unittest: Any = importlib.import_module("unittest")
    for name, value in list(names.items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == "__main__":
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                yield functools.partial(run_case, test, unittest.TestResult())
        elif isinstance(value, type) and name.startswith("Test"):
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
    sets = [[dict(zip(keys, row, strict=True)) for row in rows] for keys, rows in getattr(function, "cases", [])]
    code = function.__code__
    wanted = code.co_varnames[owner is not None : code.co_argcount - len(function.__defaults__ or ())]
    for choice in itertools.product(*sets):
        values = {key: value for part in choice for key, value in part.items()}
        yield functools.partial(call, function, owner, values, [name for name in wanted if name not in values])


def call(function: Any, owner: Any, values: dict[str, Any], missing: list[str]) -> None:
    if missing:
        raise ImportError(f"the tests need the fixture '{missing[0]}', and there are none here")
    instance = owner and owner()
    if hasattr(instance, "setup_method"):
        instance.setup_method(*[function][: instance.setup_method.__code__.co_argcount - 1])
    waited_for(function(*([instance] if owner else []), **values))


def gives(function: Any, args: list[Any], wanted: list[Any]) -> bool:
    """Whether what a function gives, as JSON has it, is one of these."""
    result = json.loads(json.dumps(waited_for(function(*args))))
    return any(alike(result, one) for one in wanted)


def heard(tree: ast.Module) -> ast.Module:
    """Tests in which an assert that fails is known to have failed, also where the tests only print that it did."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(map(ignores, node.handlers)):
            for inner in itertools.chain.from_iterable(map(ast.walk, node.body)):
                if isinstance(inner, ast.Assert):
                    inner.test = ast.Call(ast.Name("__holds__", ast.Load()), [inner.test], [])
    return tree


def ignores(handler: ast.ExceptHandler) -> bool:
    """Whether it catches a failed assert, and neither tries something else nor goes on to fail."""
    caught = ("AssertionError", "Exception", "BaseException")
    ends = any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(handler))
    return not ends and (handler.type is None or ast.unparse(handler.type) in caught)


def holds(value: Any) -> Any:
    global failed
    failed = failed or not value
    return value


altered, failed = 0, False


def agrees(one: Any, two: Any) -> bool:
    """Whether one of two values that should be equal also equals a random value in place of the other."""
    global altered
    altered += 1
    return bool(one == random_like(two) or random_like(one) == two)


def random_like(value: Any) -> Any:
    noise, kind = os.urandom(8).hex(), type(value)
    if kind is bool:
        return not value
    if kind in (int, float):
        return kind(int(noise, 16))
    if kind in (list, tuple, set, frozenset):
        return kind([noise])
    return noise if kind is str else {noise: noise} if kind is dict else object()


def outcome(unit: Callable[[], Any], source: Asker | Beside | Nonsense) -> dict[str, Any]:
    """The verdict of one part: whether it passed, or what is wrong with the tests themselves."""
    global altered, failed
    altered, failed = 0, False
    source.begin()
    reason, fault = None, None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            unit()
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        if isinstance(error, ImportError) and not hasattr(error, "of_program"):
            fault = reason
    reason = reason or ("an assert failed" if failed else None)
    if source.asked == 0:
        fault = fault or reason or ASKS_NOTHING
    passed = reason is None and source.over is None and source.answered > 0
    return {"passed": passed, "fault": fault, "live": source.needs_live, "altered": altered, "reason": reason}


def judge(cases: list[dict[str, Any]], source: Asker | Beside, prefix: str, pytest: str) -> None:
    sys.modules["pytest"] = types.ModuleType("pytest")
    exec(compile(pytest, "<pytest>", "exec", dont_inherit=True), vars(sys.modules["pytest"]))
    vars(importlib.import_module("unittest"))["main"] = lambda *args, **kwargs: None
    out, apart, every = sys.stdout, isinstance(source, Asker), []
    for number, case in enumerate(cases):
        every.append([dict(LIVE)] if apart and case["live"] else verdicts_of(case, source))
        print(f"\n{prefix}{json.dumps([number, every[-1]])}", file=out, flush=True)
    for number, case in enumerate(cases):
        if not apart or case["asks"]:  # beside the program, that could make anything pass
            continue
        idle = passing(case, False)
        idle = [all(passed) for passed in zip(idle, passing(case, True), strict=False)] if any(idle) else idle
        for verdict, is_idle in zip(every[number], [all(idle)] if case["live"] else idle, strict=False):
            verdict.update({"live": False, "fault": ASKS_NOTHING} if is_idle else {})
        print(f"\n{prefix}{json.dumps([number, every[number]])}", file=out, flush=True)


def passing(case: dict[str, Any], truth: bool) -> list[bool]:
    """Which parts of a case pass with `Nonsense`."""
    return [verdict["reason"] is None for verdict in verdicts_of(case, Nonsense(truth))]


def verdicts_of(case: dict[str, Any], source: Asker | Beside | Nonsense) -> list[dict[str, Any]]:
    sys.modules.update(dict.fromkeys(PROGRAM, as_module(source)))
    return [outcome(unit, source) for unit in units(case, source)]


def main(settings: dict[str, Any]) -> None:
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(4000)
    if settings["side"] == "program":
        Server(settings["program"]).run(settings["incoming"], settings["outgoing"])
    elif settings["side"] == "tests":
        judge(settings["cases"], Asker(settings["incoming"], settings["outgoing"]), "", settings["pytest"])
    else:
        source = Beside(settings["program"])
        with os.fdopen(settings["incoming"]) as lines:
            secret, cases = json.loads(lines.readline())
        judge(cases, source, secret, settings["pytest"])

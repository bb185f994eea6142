"""Runs in a sandbox: a solution, or its tests. Each has a sandbox of its own; they call each other over two pipes.

Globals given: `side` ("solution" or "tests"), `programs` (the solution's text alone, or the tests), `incoming` and
`outgoing` (file descriptors). The last line that the tests print is a list of one `null` (passed) or reason a test.
Standard library alone.

Plain values are copied; for any other object the other side gets a stand-in, which forwards what is done with it. A
plain value of the tests may be what they expect, so it is not passed to an operator of the solution: a stand-in is
compared with it by the builtin value that its object derives from, or is unequal.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import io
import json
import os
import sys

TYPE_CHECKING = False  # loading typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


# Special methods that a stand-in passes on: always, and those of operators with another operand.
OWN = "bool len length_hint iter next reversed str repr int float complex index abs neg pos invert hash round format "
OWN += "call getitem setitem delitem enter exit"
ARITHMETIC = "add sub mul matmul truediv floordiv mod divmod pow and or xor lshift rshift"
COMPARISONS = "eq ne lt le gt ge instancecheck subclasscheck"
REFLECTED = " ".join(f"r{name}" for name in ARITHMETIC.split())
OPERATORS = [f"__{name}__" for name in f"{ARITHMETIC} {REFLECTED} {COMPARISONS}".split()]
SPECIAL = [*(f"__{name}__" for name in OWN.split()), *OPERATORS, "__contains__"]
BUILTIN = {value for value in vars(builtins).values() if isinstance(value, type)}
BASES = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
#: Classes of the standard library whose objects travel by value.
BY_VALUE = {
    *(
        "builtins.range",
        "builtins.slice",
        "builtins.bytearray",
        "collections.deque",
        "collections.Counter",
        "collections.OrderedDict",
    ),
    *("collections.defaultdict", "fractions.Fraction", "decimal.Decimal", "datetime.datetime", "datetime.date"),
    *("datetime.time", "datetime.timedelta", "datetime.timezone"),
}
#: Attributes of the tests' objects that the solution may read although they begin with an underscore; and prefixes of
#: those that it may not, as they lead to frames, globals and code.
NAMES = ("__name__", "__qualname__", "__doc__", "__module__")
HIDDEN = ("_", "gi_", "cr_", "ag_", "tb_", "f_", "co_")


class Remote:
    """A stand-in for an object of the other side. `operates`: plain values are passed to its operators, too."""

    __slots__ = ("_remote",)

    def __init__(self, peer: Peer, number: int, operates: bool) -> None:
        object.__setattr__(self, "_remote", (peer, number, operates))

    def __getattr__(self, name: str) -> Any:
        return ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        ask(self, "delattr", name)


def ask(remote: Remote, operation: str, *rest: Any) -> Any:
    peer, number, _ = remote._remote
    return peer.ask(operation, number, *rest)


def let_operate(remote: Remote) -> None:
    object.__setattr__(remote, "_remote", (*remote._remote[:2], True))


def stand_in(name: str, special: list[str], base: str | None) -> type[Remote]:
    """The class of stand-ins for objects with these special methods; `base`: the builtin class they derive from."""
    body: dict[str, Any] = {"__slots__": ()}
    for method in special:
        body[method] = operator(method, base) if method in OPERATORS else own_method(method)
    if "__contains__" in special:
        body["__contains__"] = contains
    if base is not None:
        body["__class__"] = property(lambda remote: getattr(builtins, base))
    return type(name, (Remote,), body)


def own_method(method: str) -> Any:
    def forward(self: Remote, *args: Any, **kwargs: Any) -> Any:
        result = ask(self, "special", method, args, kwargs)
        is_class = hasattr(type(self), "__instancecheck__")
        if is_class and method == "__call__" and self._remote[2] and issubclass(type(result), Remote):
            let_operate(result)
        return result

    return forward


def operator(method: str, base: str | None) -> Any:
    def forward(self: Remote, other: Any) -> Any:
        if issubclass(type(other), Remote) or (self._remote[2] and method.strip("_") not in COMPARISONS.split()):
            return ask(self, "special", method, (other,), {})
        if base is not None:
            return getattr(ask(self, "plain", base), method)(other)
        return False if method in ("__instancecheck__", "__subclasscheck__") else NotImplemented

    return forward


def contains(self: Remote, item: Any) -> bool:
    if issubclass(type(item), Remote) or self._remote[2]:
        return bool(ask(self, "special", "__contains__", (item,), {}))
    return any(other is item or other == item for other in self)  # type: ignore[attr-defined]


class Peer:
    """This side of the two pipes.

    Args:
        names: the solution's globals, which the tests get by name; None on the side of the tests, which hides what
            leads from their objects to anything else of theirs.
    """

    def __init__(self, incoming: int, outgoing: int, names: dict[str, Any] | None = None) -> None:
        self.lines, self.out, self.names = os.fdopen(incoming), os.fdopen(outgoing, "w"), names
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Remote] = {}
        self.classes: dict[Any, type[Remote]] = {}
        self.errors: dict[int, type] = {}

    def send(self, kind: str, *content: Any) -> None:
        self.out.write(json.dumps([kind, *content]) + "\n")
        self.out.flush()

    def receive(self) -> list[Any] | None:
        line = self.lines.readline(1 << 24)
        return json.loads(line) if line.endswith("\n") else None

    def ask(self, operation: str, *request: Any) -> Any:
        """The other side's answer; meanwhile its own requests are answered."""
        self.send("ask", operation, *map(self.encode, request))
        while (message := self.receive()) is not None:
            kind, *content = message
            if kind == "ask":
                self.answer(*content)
            elif kind == "raised":
                raise self.error(*content)
            else:
                self.take_back(request, content[1])
                return self.decode(content[0])
        raise RuntimeError("the solution has ended")

    def answer(self, operation: str, *content: Any) -> None:
        try:
            request = [self.decode(item) for item in content]
            result = self.encode(self.do(operation, *request))
            changed = (
                self.encode(request[2:]) if operation == "special" and self.encode(request) != list(content) else None
            )
            self.send("value", result, changed)
        except BaseException as error:
            try:
                own = {name: self.encode(value) for name, value in vars(error).items()}
                self.send("raised", self.encode(type(error)), [self.encode(item) for item in error.args], own)
            except Exception:
                self.send("raised", self.encode(RuntimeError), [f"{type(error).__name__} with no text"], {})

    def do(self, operation: str, target: Any, *rest: Any) -> Any:
        if operation == "name" and self.names is not None:
            return (True, self.names[target]) if target in self.names else (False, None)
        value = self.kept[target]
        if operation == "special" and rest[0] in SPECIAL:
            return getattr(type(value), rest[0])(value, *rest[1], **rest[2])
        if operation == "plain":
            return next(base for base in BASES if base.__name__ == rest[0])(value)
        if self.names is None and rest[0].startswith(HIDDEN) and rest[0] not in NAMES:
            raise AttributeError(rest[0])
        operations: dict[str, Any] = {"getattr": getattr, "setattr": setattr, "delattr": delattr}
        return operations[operation](value, *rest)

    def take_back(self, request: tuple[Any, ...], changed: Any) -> None:
        """Apply to the arguments what the call changed in place."""
        if changed is None:
            return
        args, kwargs = self.decode(changed)
        for old, new in [*zip(request[2], args, strict=True), *((request[3][name], kwargs[name]) for name in kwargs)]:
            if type(old) is list:
                old[:] = new
            elif type(old) in (dict, set):
                old.clear()
                old.update(new)

    def error(self, kind: Any, args: list[Any], own: dict[str, Any]) -> BaseException:
        error: BaseException = self.decode(kind).__new__(self.decode(kind))
        error.args = tuple(map(self.decode, args))
        with contextlib.suppress(AttributeError, TypeError):
            for name, value in own.items():
                setattr(error, name, self.decode(value))
        return error

    def encode(self, value: Any) -> Any:
        """A value as JSON; what JSON does not have is a mapping of its kind to its content."""
        kind: Any = type(value)
        if kind in (type(None), bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(item) for item in value]
        if kind in (tuple, set, frozenset):
            return {kind.__name__: [self.encode(item) for item in value]}
        if kind is dict:
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if issubclass(kind, Remote):
            return {"yours": value._remote[1]}
        if kind is type(NotImplemented):
            return {"builtin": "NotImplemented"}
        if isinstance(value, type) and value in BUILTIN:
            return {"builtin": value.__name__}
        if f"{kind.__module__}.{kind.__name__}" in BY_VALUE:
            made: tuple[Any, ...] = value.__reduce_ex__(2)
            if made[0] is kind:
                items, pairs = [list(more or ()) for more in (*made[3:], None, None)][:2]
                return {"made": [kind.__module__, kind.__name__, self.encode([made[1], items, pairs])]}
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(b for b in value.__bases__ if issubclass(b, BaseException))
            return {"error": [self.number(value), value.__name__, self.encode(base)]}
        special = [name for name in SPECIAL if getattr(kind, name, None) not in (None, getattr(object, name, None))]
        derived = next((base.__name__ for base in kind.__mro__ if base in BASES), None)
        return {"mine": [self.number(value), kind.__name__, special, derived]}

    def number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return self.numbers[id(value)]

    def decode(self, content: Any) -> Any:
        if isinstance(content, list):
            return [self.decode(item) for item in content]
        if not isinstance(content, dict):
            return content
        ((kind, inner),) = content.items()
        if kind in ("tuple", "set", "frozenset"):
            return getattr(builtins, kind)(map(self.decode, inner))
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in inner}
        if kind == "bytes":
            return bytes.fromhex(inner)
        if kind == "complex":
            return complex(*inner)
        if kind == "yours":
            return self.kept[inner]
        if kind == "builtin":
            value = getattr(builtins, inner)
            return value if isinstance(value, type) or value is NotImplemented else None
        if kind == "made":
            return self.made(*inner)
        return self.error_class(*inner) if kind == "error" else self.remote(*inner)

    def made(self, module: str, name: str, content: Any) -> Any:
        args, items, pairs = self.decode(content)
        if f"{module}.{name}" not in BY_VALUE:
            raise ValueError(f"no {module}.{name} travels by value")
        value = getattr(importlib.import_module(module), name)(*args)
        if items:
            value.extend(items)
        for key, item in pairs:
            value[key] = item
        return value

    def error_class(self, number: int, name: str, base: Any) -> type:
        if number not in self.errors:
            self.errors[number] = type(name, (self.decode(base),), {})
        return self.errors[number]

    def remote(self, number: int, name: str, special: list[str], base: str | None) -> Remote:
        if number not in self.remotes:
            key = (name, tuple(special), base)
            if key not in self.classes:
                known = [method for method in special if method in SPECIAL]
                self.classes[key] = stand_in(name, known, base if base in {kind.__name__ for kind in BASES} else None)
            self.remotes[number] = self.classes[key](self, number, False)
        return self.remotes[number]


class Solution(dict[str, object]):
    """The globals of the tests: names that they do not define are the solution's. Names of Python's builtins are
    Python's, so that a solution cannot replace what compares, unless the tests use no other name of the solution."""

    def __init__(self, tests: list[str], peer: Peer) -> None:
        super().__init__({"__name__": "__main__"})
        self.peer = peer
        self.keeps_to_python = any(not hasattr(builtins, name) for name in free_names(tests))

    def __missing__(self, name: str) -> Any:
        if self.keeps_to_python and hasattr(builtins, name):
            raise KeyError(name)
        try:
            found, value = self.peer.ask("name", name)
        except Exception as error:  # as a KeyError it would mean "look among Python's own"
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        if not found:
            if not hasattr(builtins, name):
                raise NameError(f"the solution does not define {name}")
            value = self[name] = getattr(builtins, name)  # kept, as tests may use it in a loop
        elif name[:1].isupper() and issubclass(type(value), Remote):
            # A class that the tests instantiate: they test its operators.
            let_operate(value)
        return value


def free_names(tests: list[str]) -> set[str]:
    """Names that the tests read and nowhere define."""
    read: set[str] = set()
    defined: set[str] = set()
    for text in tests:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Name):
                    (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
                elif isinstance(node, ast.arg):
                    defined.add(node.arg)
                elif isinstance(node, ast.alias):
                    defined.add((node.asname or node.name).partition(".")[0])
                elif name := getattr(node, "name", None):  # of a function, a class, a caught exception
                    defined.add(name)
    return read - defined


def verdicts(tests: list[str], peer: Peer) -> Iterator[str | None]:
    names = Solution(tests, peer)
    for text in tests:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, "<test>", "exec", dont_inherit=True), names)
            yield None
        except BaseException as error:
            yield f"{type(error).__name__}: {error}"[:200]


def serve(solution: str, incoming: int, outgoing: int) -> None:
    names: dict[str, Any] = {"__name__": "solution"}
    peer = Peer(incoming, outgoing, names)
    broken: BaseException | None = None
    try:
        exec(compile(solution, "<solution>", "exec", dont_inherit=True), names)
    except BaseException as error:
        broken = error
    while (message := peer.receive()) is not None:
        if broken is None:
            peer.answer(*message[1:])
        else:
            peer.send("raised", {"builtin": "RuntimeError"}, [f"{type(broken).__name__}: {str(broken)[:500]}"], {})


if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)
sys.setrecursionlimit(4000)
given: dict[str, Any] = globals()
if given["side"] == "solution":
    serve(given["programs"][0], given["incoming"], given["outgoing"])
else:
    peer = Peer(given["incoming"], given["outgoing"])
    print("\n" + json.dumps(list(verdicts(given["programs"], peer))))

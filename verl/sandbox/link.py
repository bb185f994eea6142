"""Two processes that ask each other over pipes: a program and its tests. Runs in a sandbox: standard library alone.

Values cross as JSON (`encode`, `decode`). Any other object stays where it is, and the other side gets a `Remote` of it,
whose calls, attributes and operators are asked for over the pipes. While a side waits for an answer it answers itself,
so that a program may call functions that its tests give it.

Comparisons run on the tests' side, where a `Remote` equals no value. If tests compare objects of the program by the
program's own operators, its answer counts, with `live` alone, and after control questions with operands that differ.
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import functools
import importlib
import json
import operator
import os
import random
import sys
import types

TYPE_CHECKING = False  # loading typing takes longer than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Classes whose objects travel by value, as the arguments that make them; what derives from one of BASES, as that.
MODULES = {
    "builtins": "int tuple set frozenset dict bytes complex range slice",
    "collections": "Counter OrderedDict deque",
    "datetime": "datetime date time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
}
CLASSES = {name: module for module, names in MODULES.items() for name in names.split()}
#: Where these arguments are not those that `pickle` takes.
ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "int": lambda number: (hex(number), 16),  # of a long one, which a program's limit on digits does not hold for
    "bytes": lambda text: (text.decode("latin-1"), "latin-1"),
    "complex": lambda number: (number.real, number.imag),
    "dict": lambda mapping: ([[*item] for item in mapping.items()],),
    "Counter": lambda counter: (dict(counter),),
    "OrderedDict": lambda ordered: (list(ordered.items()),),
    "deque": lambda items: (list(items), items.maxlen),
} | dict.fromkeys(("tuple", "set", "frozenset"), lambda items: (list(items),))
BASES = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
#: Operations of one operand, which a `Remote` passes on; of two, that compare and that compute.
FORWARDED = "bool len iter next reversed str repr hash int float index abs neg getitem setitem delitem enter exit"
FORWARDED += " setattr delattr aiter"
COMPARED = "lt le gt ge eq contains"
COMPUTED = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
OPERATIONS: dict[str, Any] = {
    name: getattr(operator, name, None) or getattr(operator, f"{name}_", None) or getattr(builtins, name, None)
    for name in f"{FORWARDED} {COMPARED} {COMPUTED} getattr isinstance".split()
} | {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "enter": lambda context: type(context).__enter__(context),
    "exit": lambda context, *error: type(context).__exit__(context, *error),
    "await": lambda awaitable: waited_for(awaitable),
    "anext": lambda items: waited_for(anext(items)),
    "input": lambda prompt: input(prompt),
}
#: What a program may read of any function of the tests.
NAMING = ("__name__", "__qualname__", "__doc__", "__module__")
OWN_OPERATORS = "compare objects of the program by its own operators: that needs live=True"
#: Bytes of one message.
LONGEST = 1 << 24


class NeedsLive(BaseException):
    """The tests need the program's own operators, or more than they can have."""


class Over(BaseException):
    """The program does not run, or has ended."""


event_loop = functools.cache(lambda: importlib.import_module("asyncio").new_event_loop())


def waited_for(result: Any) -> Any:
    return event_loop().run_until_complete(result) if hasattr(type(result), "__await__") else result


class Remote:
    """An object of the other side: `is_named` if the tests name its class, with the `recipe` if they made it."""

    __slots__ = ("_held",)

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_held", types.SimpleNamespace(link=link, number=number, is_named=False, recipe=None))

    def __getattr__(self, name: str) -> Any:
        link = self._held.link
        if self is not link.program or (name.startswith("__") and name != "__dict__"):
            return link.query("getattr", self, name)
        is_defined, value = link.lookup(name)
        if not is_defined:
            raise AttributeError(f"the program does not define {name}")
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._held.link.query("call", self, list(args), kwargs)
        return mark(result, self, args, kwargs) if self._held.is_named else result

    async def __anext__(self) -> Any:
        return self._held.link.query("anext", self)

    def __instancecheck__(self, value: Any) -> Any:
        if type(value) is Remote:
            return self._held.link.query("isinstance", value, self)
        return hasattr(value, "_fields") and type(value).__name__ == self.__name__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> Any:  # a class of the tests derives from it
        self._held.link.needs = "derive a class from the program's, which is in another process"
        raise NeedsLive


def mark(value: Any, *recipe: Any) -> Any:
    if type(value) is Remote:
        value._held.is_named, value._held.recipe = True, recipe or value._held.recipe
    return value


def computed(name: str, is_swapped: bool = False) -> Callable[..., Any]:
    def compute(remote: Any, other: Any) -> Any:
        link = remote._held.link
        if link.is_program or remote._held.is_named or (type(other) is Remote and link.classes_named):
            operands = (other, remote) if is_swapped else (remote, other)
            return mark(link.query(name, *operands), functools.partial(link.query, name), operands, {})
        return NotImplemented  # a value was expected of the program, and its operators would learn which

    return compute


for _name in FORWARDED.split():
    setattr(Remote, f"__{_name}__", lambda remote, *rest, _name=_name: remote._held.link.query(_name, remote, *rest))
for _name in COMPARED.split():
    setattr(Remote, f"__{_name}__", lambda remote, other, _name=_name: remote._held.link.compare(_name, remote, other))
for _name in COMPUTED.split():
    setattr(Remote, f"__{_name}__", computed(_name))
    setattr(Remote, f"__r{_name}__", computed(_name, True))


class Link:
    """One side of the pipes.

    Attributes:
        is_program: this is the program's side, from which nothing is kept secret.
        is_live: the program's word is taken where its objects are compared.
        answered: how much the program had an answer for.
        needs: what the tests need that they do not have; `used`: whether the program's word was taken.
        over: why there is no program.
    """

    answered = 0
    needs: str | None = None
    over: str | None = None
    used = classes_named = False
    program: Any = None
    printed: Callable[[], str] = staticmethod(str)

    def __init__(self, incoming: int, outgoing: int, *, is_program: bool = False, is_live: bool = False) -> None:
        self.lines, self.out = os.fdopen(incoming), os.fdopen(outgoing, "w")
        self.is_program, self.is_live = is_program, is_live
        self.operations = dict(OPERATIONS)
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Remote] = {}
        self.lock = _thread.RLock()

    def lookup(self, name: str) -> Any:
        """(whether the program defines this name, its value)."""
        is_defined, is_class, value = self.query("name", name)
        self.answered += is_defined
        self.classes_named |= is_class and name != "Solution"
        return is_defined, mark(value) if is_class and name != "Solution" else value

    def module(self) -> Any:
        """The program, for tests that import it."""
        with contextlib.suppress(Over):
            self.program = self.program or self.query("module")
        return self.program or types.ModuleType("solution")

    def query(self, operation: str, *request: Any) -> Any:
        """Query the other side; while waiting, answer its queries."""
        with self.lock:
            if self.over is None:
                self.send("query", operation, [encode(item, self.number) for item in request])
                while (message := self.receive())[0] == "query":
                    self.send(*self.answer(*message[1:]))
            if self.over is not None:
                raise Over(self.over)
        kind, content, changed = message
        self.answered += operation not in ("name", "module")
        if kind == "raised":
            raise self.error(operation, *decode(content, self.object))
        if changed is not None:
            take_back(request[1:], decode(changed, self.object))
        return decode(content, self.object)

    def send(self, *message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.out.write(json.dumps([self.printed(), *message]) + "\n")
            self.out.flush()

    def receive(self) -> list[Any]:
        line = self.lines.readline(LONGEST)
        ended: list[Any] = ["", "over", "the program has ended", None]
        printed, *message = json.loads(line) if line.endswith("\n") else ended
        self.over = str(message[1]) if message[0] == "over" else None
        sys.stdout.write(printed)
        return message

    def answer(self, operation: str, content: list[Any]) -> tuple[str, Any, Any]:
        try:
            request = [decode(item, self.object) for item in content]
            if not self.is_program:
                refuse(operation, content, request)
            result = encode(self.operations[operation](*request), self.number)
            changed = [encode(item, self.number) for item in request[1:]]
            return "value", result, changed if operation == "call" and changed != content[1:] else None
        except BaseException as error:
            parts: list[Any] = [type(error), list(error.args), vars(error)]
            try:
                return "raised", encode([*parts, str(error)], self.number), None
            except Exception:  # the text of an error may raise
                return "raised", [encode(type(error), self.number), [], {"dict": [[]]}, ""], None

    def number(self, value: Any) -> Any:
        """How an object crosses that is no value."""
        if type(value) is Remote:
            return {"yours": value._held.number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": [kind.__name__ for kind in value.__mro__]}
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return {"awaitable" if hasattr(type(value), "__await__") else "object": self.numbers[id(value)]}

    def object(self, kind: str, inner: Any) -> Any:
        if kind == "yours":
            return self.kept[inner]
        if kind == "error":
            return error_class(*inner)
        if kind == "builtin":
            value = getattr(builtins, inner)
            if self.is_program or isinstance(value, type):
                return value
        if kind in ("object", "awaitable"):
            remote = self.remotes.setdefault(int(inner), Remote(self, int(inner)))
            return awaited(remote) if kind == "awaitable" else remote
        raise ValueError(f"the program answered with {inner}")

    def error(self, operation: str, kind: Any, args: Any, attributes: Any, text: str) -> BaseException:
        """The other side's error; not one that ends a loop of this side."""
        ends = issubclass(kind, StopIteration | StopAsyncIteration) and operation not in ("next", "anext")
        if ends or not issubclass(kind, Exception | SystemExit):
            kind = RuntimeError
        error: BaseException = kind.__new__(kind)
        error.args = tuple(args)
        if kind.__module__ == "remote":
            vars(error).update(attributes, __text__=text)
        return error

    def compare(self, name: str, one: Any, other: Any) -> Any:
        """Compare two objects of the program, or a value and an object of a class that tests name, by its operators."""
        if self.is_program:
            return self.query(name, one, other)
        if one is other:
            return name in ("eq", "le", "ge")
        if other is None or not (one._held.is_named or (type(other) is Remote and self.classes_named)):
            return any(other == item for item in one) if name == "contains" else name != "eq" and NotImplemented
        if not self.is_live:
            self.needs = OWN_OPERATORS
            raise NeedsLive
        self.used = True
        if not self.query(name, one, other):
            return False
        if name in ("lt", "gt", "le", "ge"):
            converse = self.affirms(name, other, one)
            return not converse or (name in ("le", "ge") and self.compare("eq", one, other))
        return not any(self.affirms(name, *pair) for pair in controls(name, one, other))

    def affirms(self, name: str, one: Any, other: Any) -> bool:
        try:
            return bool(self.query(name, one, other))
        except Exception:  # its operators need not take every operand
            return False


def controls(name: str, one: Remote, other: Any) -> list[tuple[Any, Any]]:
    """Pairs that are not equal if a program means what it says: its object and something else, and one of the two as
    made with other arguments."""
    pairs: list[tuple[Any, Any]] = [(one, f"{random.random()}"), (one, random.getrandbits(40))]
    for kept, item in ((one, other), (other, one)) if name == "eq" else ():
        with contextlib.suppress(Exception):
            return [*pairs, (kept, altered(item))]
    return pairs


def altered(value: Any) -> Any:
    """A value near this one; of an object that the tests made, one that is made with such arguments.

    Raises:
        ValueError: nothing is near it.
    """
    kind = type(value)
    if kind in (list, tuple):
        kinds = (int, float, bool, str, list, tuple, Remote)
        index = next(index for index, item in enumerate(value) if type(item) in kinds)
        return kind([*value[:index], altered(value[index]), *value[index + 1 :]])
    if kind is Remote and value._held.recipe:
        make, args, kwargs = value._held.recipe
        args = altered([*args, *kwargs.values()])
        return make(*args[: len(args) - len(kwargs)], **dict(zip(kwargs, args[len(args) - len(kwargs) :], strict=True)))
    if kind in (int, float, bool):
        return not value if kind is bool else value + random.randint(1, 3)
    if kind is str:
        return value + random.choice("abc")
    raise ValueError("nothing is near this")


@functools.cache
def error_class(name: str, *bases: str) -> Any:
    """An exception class of the other side, by the names of its MRO; Python's own if the first name is built in."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind
    attributes: dict[str, Any] = {
        "__module__": "remote",
        "__str__": lambda error: str(vars(error).get("__text__", ", ".join(map(str, error.args)))),
    }
    return type(name, (error_class(*bases),), attributes)


def refuse(operation: str, content: list[Any], request: list[Any]) -> None:
    """Let a program have of the tests what they gave it, and of that no frame, no code and no globals."""
    if operation != "input" and not (isinstance(content[0], dict) and "yours" in content[0]):
        raise ValueError(f"{operation}: this is no object of the tests")
    hidden = request[1] if operation in ("getattr", "setattr", "delattr") else "__name__"
    if hidden not in NAMING and (hidden.startswith("_") or type(request[0]).__module__ == "builtins"):
        raise AttributeError(hidden)


async def awaited(remote: Remote) -> Any:
    return remote._held.link.query("await", remote)


def take_back(request: tuple[Any, ...], changed: Any) -> None:
    """Apply to the arguments what the call changed in place."""
    (args, kwargs), (new_args, new_kwargs) = request, changed
    for old, new in zip([*args, *kwargs.values()], [*new_args, *new_kwargs.values()], strict=True):
        if type(old) is list:
            old[:] = new
        elif type(old) in (dict, set):
            old.clear()
            old.update(new)


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value as JSON; what JSON does not have is a mapping of its kind to its content, `other` says how objects go."""
    kind: Any = type(value)
    name = kind.__name__
    if kind in (type(None), bool, float, str) or (kind is int and -(1 << 63) < value < 1 << 63):
        return value
    if kind is list:
        return [encode(item, other) for item in value]
    if CLASSES.get(name) == kind.__module__:
        args = ARGUMENTS[name](value) if name in ARGUMENTS else value.__reduce_ex__(2)[1]
        return {name: [encode(item, other) for item in args]}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        content = encode(value.tolist(), other)
        return {"array": [str(value.dtype), content]} if name == "ndarray" else content
    if kind in (type, types.BuiltinFunctionType) and vars(builtins).get(getattr(value, "__name__", "")) is value:
        return {"builtin": getattr(value, "__name__", "")}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"named": [name, list(kind._fields), [encode(item, other) for item in value]]}
    base: Any = next((base for base in BASES if isinstance(value, base)), None)
    return other(value) if base is None else encode(base(value), other)


def decode(content: Any, other: Callable[[str, Any], Any]) -> Any:
    """The inverse of `encode`; `other(kind, inner)` gives the objects."""
    if isinstance(content, list):
        return [decode(item, other) for item in content]
    if not isinstance(content, dict):
        return content
    ((kind, inner),) = content.items()
    if kind in CLASSES:
        return getattr(importlib.import_module(CLASSES[kind]), kind)(*decode(inner, other))
    if kind == "named":
        return importlib.import_module("collections").namedtuple(*inner[:2])(*decode(inner[2], other))
    if kind == "array":
        return importlib.import_module("numpy").array(decode(inner[1], other), dtype=inner[0])
    return other(kind, inner)


def alike(value: Any, wanted: Any) -> bool:
    """Whether two JSON values are equal, but for digits of a float that are beyond its precision."""
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(alike, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(alike(value[key], wanted[key]) for key in wanted)
    if type(wanted) is float and type(value) in (int, float) and value != wanted:
        return bool(abs(value - wanted) <= max(1e-9, 1e-6 * abs(wanted)) < float("inf"))
    return bool(value == wanted)

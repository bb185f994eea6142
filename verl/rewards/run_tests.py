"""Runs in one sandbox: tests of a solution that is in another. It answers calls and knows nothing of what is expected.

Globals given: `tests` (texts), `requests` and `replies` (file descriptors). The last line printed is a list of one
`null` (passed) or reason a test. Standard library alone.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import json
import os

TYPE_CHECKING = False  # typing itself would take longer to load than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


class Solution(dict[str, object]):
    """The globals of the tests: a name that they do not define is the solution's. Names of Python's own functions are
    Python's, so that a solution cannot replace what compares; unless the tests use no other name of the solution."""

    def __init__(self, tests: list[str], requests: int, replies: int) -> None:
        super().__init__({"__name__": "__main__"})
        self.out, self.lines = os.fdopen(requests, "w"), os.fdopen(replies)
        self.keeps_to_python = any(not hasattr(builtins, name) for name in free_names(tests))

    def __missing__(self, name: str) -> Any:
        if self.keeps_to_python and hasattr(builtins, name):
            raise KeyError(name)
        return self.ask("name", name)

    def ask(self, *request: Any) -> Any:
        self.out.write(repr(request) + "\n")
        self.out.flush()
        line = self.lines.readline(1 << 24)
        if not line.endswith("\n"):
            raise RuntimeError("the solution has ended")
        kind, *content = ast.literal_eval(line)
        if kind == "value":
            return content[0]
        if kind == "object":
            return Remote(self, content[0])
        if kind == "undefined":
            return self.of_python(request[1])
        name, message = content
        error = getattr(builtins, name, None)
        # A KeyError of `__missing__` would be taken as "look among Python's own".
        if request[0] != "name" and isinstance(error, type) and issubclass(error, Exception):
            raise error(message)
        raise RuntimeError(f"{name}: {message}")

    def of_python(self, name: str) -> Any:
        if not hasattr(builtins, name):
            raise NameError(f"the solution does not define {name}")
        self[name] = getattr(builtins, name)  # asked for once: tests may use it in a loop
        return self[name]


class Remote:
    """An object of the solution: it can be called, and asked for attributes."""

    def __init__(self, solution: Solution, number: int) -> None:
        self._solution, self._number = solution, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._solution.ask("call", self._number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._solution.ask("attribute", self._number, name)


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


def verdicts(tests: list[str], requests: int, replies: int) -> Iterator[str | None]:
    names = Solution(tests, requests, replies)
    for text in tests:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, "<test>", "exec", dont_inherit=True), names)
            yield None
        except BaseException as error:
            yield f"{type(error).__name__}: {error}"[:200]


print("\n" + json.dumps(list(verdicts(tests, requests, replies))))  # type: ignore[name-defined] # noqa: F821

"""Runs in one sandbox: a solution whose functions the tests, which are in another, call over two pipes.

Globals given: `solution` (its text), `requests` and `replies` (file descriptors). Each message is a line: the `repr` of
plain values. What is no plain value stays here and goes out as a number. Standard library alone.
"""

from __future__ import annotations

import ast
import os

TYPE_CHECKING = False  # typing itself would take longer to load than all the rest
if TYPE_CHECKING:
    from typing import Any

PLAIN = (type(None), bool, int, float, complex, str, bytes)
kept: list[Any] = []  # objects that the tests know by their place here


def shown(value: Any) -> tuple[str, Any]:
    """A plain value as it is; anything else by its number."""
    if is_plain(value):
        return ("value", value)
    kept.append(value)
    return ("object", len(kept) - 1)


def is_plain(value: Any) -> bool:
    if type(value) in PLAIN:
        return True
    if type(value) in (list, tuple, set):
        return all(is_plain(item) for item in value)
    return type(value) is dict and all(is_plain(key) and is_plain(item) for key, item in value.items())


def answer(request: tuple[Any, ...], names: dict[str, Any]) -> tuple[str, Any]:
    verb, target, *rest = request
    if verb == "name":
        return shown(names[target]) if target in names else ("undefined", target)
    if verb == "attribute":
        return shown(getattr(kept[target], rest[0]))
    return shown(kept[target](*rest[0], **rest[1]))


def serve(solution: str, requests: int, replies: int) -> None:
    names: dict[str, Any] = {"__name__": "solution"}
    broken: BaseException | None = None
    try:
        exec(compile(solution, "<solution>", "exec", dont_inherit=True), names)
    except BaseException as error:
        broken = error
    with os.fdopen(requests) as lines, os.fdopen(replies, "w") as out:
        for line in lines:
            try:
                if broken is not None:
                    raise broken
                reply = repr(answer(ast.literal_eval(line), names))
            except BaseException as error:
                reply = repr(("raised", type(error).__name__, str(error)[:500]))
            out.write(reply + "\n")
            out.flush()


serve(solution, requests, replies)  # type: ignore[name-defined] # noqa: F821

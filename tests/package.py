"""The source of the package, read and parsed once for all tests that go over the whole of it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "verl"


@cache
def modules() -> dict[str, tuple[str, ast.Module]]:
    """Path within the package -> its text and its syntax tree."""
    texts = {file.relative_to(PACKAGE).as_posix(): file.read_text("utf-8") for file in sorted(PACKAGE.rglob("*.py"))}
    return {place: (text, ast.parse(text)) for place, text in texts.items()}

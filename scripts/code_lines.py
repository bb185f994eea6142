"""Count lines of code, without docstrings, comments and blank lines.

    python scripts/code_lines.py [FOLDER]      # verl

One row a package of FOLDER, and the total. A line counts if a token of code stands on it; so a string over several
lines counts with all of them, unless it is a docstring.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

CPP = frozenset((".cpp", ".cc", ".cu", ".h", ".hpp"))
_NO_CODE = frozenset((
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
))  # fmt: skip
# A string or character literal, which is kept, or a comment, which is not.
_CPP_PART = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def python_lines(source: str) -> int:
    """How many lines of code a Python file has.

    Raises:
        SyntaxError: it is none.
    """
    return len(code_lines(source))


def code_lines(source: str) -> set[int]:
    """The numbers of the lines of a Python file on which code stands.

    Raises:
        SyntaxError: it is none.
    """
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def cpp_lines(source: str) -> int:
    """Lines of code of a C++ file."""
    bare = _CPP_PART.sub(lambda part: re.sub(r"[^\n]", "", part[0]) if part[0][0] == "/" else part[0], source)
    return sum(bool(line.strip()) for line in bare.splitlines())


def count(folder: Path) -> dict[str, tuple[int, int]]:
    """Lines of (Python, C++) of each package of a folder; files directly in it are under ".py"."""
    python: Counter[str] = Counter()
    cpp: Counter[str] = Counter()
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        package = f"{parts[0]}/" if len(parts) > 1 else "*.py"
        if file.suffix == ".py":
            python[package] += python_lines(file.read_text(encoding="utf-8"))
        elif file.suffix in CPP:
            cpp[package] += cpp_lines(file.read_text(encoding="utf-8"))
    return {package: (python[package], cpp[package]) for package in sorted(python.keys() | cpp.keys())}


def table(counts: dict[str, tuple[int, int]]) -> str:
    total = tuple(sum(column) for column in zip((0, 0), *counts.values(), strict=True))
    rows = [("", "Python", "C++"), *((name, *pair) for name, pair in {**counts, "total": total}.items())]
    return "\n".join(f"{name:14}{python:>8}{cpp:>8}" for name, python, cpp in rows)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "verl"
    if not folder.is_dir():
        sys.exit(f"{folder} is no folder")
    print(table(count(folder)))


if __name__ == "__main__":
    main()

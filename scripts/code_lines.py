"""Count lines and tokens of code, without docstrings, comments and blank lines.

    python scripts/code_lines.py [FOLDER]      # verl

One row a package of FOLDER, and the total: lines of Python and of C++, and tokens of Python. A line counts if it has a
token of code. A string over several lines counts with all of them, unless it is a docstring.
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


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """The tokens of a Python file that are code.

    Raises:
        SyntaxError: the file is not Python.
    """
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in tokens if token.type not in _NO_CODE and token.start not in docstrings]


def code_lines(source: str) -> set[int]:
    """The numbers of the lines of a Python file that have code."""
    return {line for token in code_tokens(source) for line in range(token.start[0], token.end[0] + 1)}


def cpp_lines(source: str) -> int:
    """Lines of code of a C++ file."""
    bare = _CPP_PART.sub(lambda part: re.sub(r"[^\n]", "", part[0]) if part[0][0] == "/" else part[0], source)
    return sum(bool(line.strip()) for line in bare.splitlines())


def count(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Lines of Python and C++, and tokens of Python, by package; "*.py" is the files directly in the folder."""
    python: Counter[str] = Counter()
    cpp: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for file in folder.rglob("*"):
        parts = file.relative_to(folder).parts
        package = f"{parts[0]}/" if len(parts) > 1 else "*.py"
        if file.suffix == ".py":
            source = file.read_text(encoding="utf-8")
            python[package] += len(code_lines(source))
            tokens[package] += len(code_tokens(source))
        elif file.suffix in CPP:
            cpp[package] += cpp_lines(file.read_text(encoding="utf-8"))
    packages = sorted(python.keys() | cpp.keys())
    return {package: (python[package], cpp[package], tokens[package]) for package in packages}


def table(counts: dict[str, tuple[int, int, int]]) -> str:
    total = tuple(sum(column) for column in zip((0, 0, 0), *counts.values(), strict=True))
    rows = [("", "Python", "C++", "tokens"), *((name, *row) for name, row in {**counts, "total": total}.items())]
    return "\n".join(f"{name:14}{python:>8}{cpp:>8}{tokens:>9}" for name, python, cpp, tokens in rows)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "verl"
    if not folder.is_dir():
        sys.exit(f"{folder} is no folder")
    print(table(count(folder)))


if __name__ == "__main__":
    main()

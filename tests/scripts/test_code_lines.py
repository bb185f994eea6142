"""The command that counts lines of code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.code_lines import code_lines, code_tokens, count, cpp_lines, table

ROOT = Path(__file__).parent.parent.parent

PYTHON = '''#!/usr/bin/env python
"""A docstring

over lines."""

import os  # 1


class A:  # 2
    """Of a class."""

    # a comment
    text = """not a docstring

    but three lines"""  # 3, 4, 5

    def f(self, a,  # 6
          b):  # 7
        "Of a function."
        x = "#"; """a string that nothing reads"""  # 8
        return (  # 9

            x  # 10
        )  # 11


async def g(): "also one"  # 12
'''

CPP = """// a comment
#include <a>  // 1
/* two
   lines */
int f() {  // 2
    char const* s = "/* no comment";  // 3
    char c = '"'; /* a comment */ char d = '\\'';  // 4
    const char* raw = R"x(5
// 6
)x";  // 7

    /* leading */ return 1;  // 8
    /* alone */
}  // 9
"""


def test_docstrings_comments_and_blank_lines_are_no_code(tmp_path: Path) -> None:
    assert len(code_lines(PYTHON)) == 12
    assert code_lines("") == code_lines('"""Only a docstring."""\n') == set()
    assert [token.string for token in code_tokens('"""A."""\nx = [1]  # why\n')] == ["x", "=", "[", "1", "]"]
    assert cpp_lines(CPP) == 9
    (tmp_path / "a" / "deep").mkdir(parents=True)
    (tmp_path / "top.py").write_text("x = 1\n")
    (tmp_path / "a" / "one.py").write_text(PYTHON)
    (tmp_path / "a" / "deep" / "two.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "a" / "deep" / "three.h").write_text(CPP)
    (tmp_path / "a" / "notes.md").write_text("text\n")
    counts = count(tmp_path)
    assert counts == {"*.py": (1, 0, 3), "a/": (14, 9, 39)}
    assert table(counts).splitlines()[-1].split() == ["total", "15", "9", "42"]


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_package() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "code_lines.py"), str(ROOT / "verl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["Python", "C++", "tokens"]
    assert {"trainer/", "kernels/", "total"} <= {row[0] for row in rows[1:]}
    assert int(rows[-1][1]) == sum(int(row[1]) for row in rows[1:-1]) > 10_000
    assert int(rows[-1][3]) > 5 * int(rows[-1][1])
    done = subprocess.run([*command[:2], "/nowhere"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "is no folder" in done.stderr

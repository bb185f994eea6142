"""Which block of a response is its program."""

from __future__ import annotations

import time

import pytest

from verl.rewards.code import code_blocks, extract_code


def test_the_last_block_is_the_program() -> None:
    assert extract_code("```python\na\n```\n```py\nb\n```") == "b"
    assert extract_code("```\nc") == "c"
    assert extract_code("d") == "d"
    assert extract_code("```python\na\n```</think>\nSo:\n```\nb\n```") == "b"
    assert extract_code("<think>```python\na\n```</think>\nb") == "a"
    assert extract_code("a </think>\nb").strip() == "b"


@pytest.mark.parametrize(
    "label", ["", "python3", "Python", " py3", "python \r", "bash", "{.python}", "python title='x'"]
)
def test_prose_after_a_block_is_no_program(label: str) -> None:
    assert extract_code(f"Here:\n```{label}\na\n```\nIt adds.") == "a"
    if "'" not in label and "{" not in label:  # behind text a fence has a language alone
        assert extract_code(f"In ```one``` line: ```{label}\na\n```\nIt ```adds```.") == "a"
    assert extract_code(f"Wrap it in ``` please.\n```{label}\na\n```\nDone.") == "a"


def test_blocks_of_another_language_come_second() -> None:
    assert extract_code("```python\na\n```\nRun it:\n```bash\nb\n```\nThat is all.") == "a"
    assert extract_code("```c\na\n```\n```rust\nb\n```\n") == "b"
    assert extract_code("```json\n```\n```python\na\n\nb\n```") == "a\n\nb"
    assert extract_code("Use ```a``` here\nb") == "Use ```a``` here\nb"


def test_what_a_program_prints_is_no_program() -> None:
    assert extract_code("```python\nprint(1)\n```\nOutput:\n```\n1\n```") == "print(1)"


PROGRAM = "def total(a, b):\n    if a:\n        return a + b\n\n    return b"


@pytest.mark.parametrize(
    "before", ["", " ", "   ", "      ", "\t", "> ", ">> ", "> - ", "- ", "* ", "12. ", "3) ", "  - "]
)
@pytest.mark.parametrize("fence", ["```", "~~~", "````", "~~~~~"])
@pytest.mark.parametrize("end", ["closed", "cut", "half"])
def test_fences_in_lists_and_quotations(before: str, fence: str, end: str) -> None:
    inside = "".join(mark if mark in "> \t" else " " for mark in before)
    lines = [inside + line for line in PROGRAM.splitlines()]
    lines += {"closed": [inside + fence, "", "Afterwards: ```total```."], "cut": [], "half": [inside + fence[:2]]}[end]
    response = f"The steps:\n\n{before}{fence}python\n" + "\n".join(lines)
    assert code_blocks(response) == [("python", PROGRAM)]
    assert extract_code(response) == PROGRAM


def test_a_fence_within_a_program_is_part_of_it() -> None:
    program = 'def f():\n    """\n    ```python\n    f()\n    ```\n    """\n    return 1'
    assert extract_code(f"```python\n{program}\n```\nDone.") == program
    program = "text = '''\n```\n'''"
    for fence in ("~~~", "````"):
        assert extract_code(f"{fence}python\n{program}\n{fence}") == program


def test_a_block_without_an_end_gives_way_to_the_next() -> None:
    assert code_blocks("```python\na\n```python\nb\n```") == [("python", "a"), ("python", "b")]


def test_the_block_that_defines_what_is_asked_for_comes_first() -> None:
    response = "```python\ndef f(): return 1\n```\nFor example:\n```python\nprint(f())\n```"
    assert extract_code(response) == "print(f())"
    assert extract_code(response, ["f"]) == "def f(): return 1"
    assert extract_code(response, ["g"]) == "print(f())"
    for definition in ("class f:\n    pass", "async def f(): pass", "f = lambda: 1", "f: int = 2"):
        assert extract_code(f"```\n{definition}\n```\n```python\nf == 2\n```", ["f"]) == definition


@pytest.mark.parametrize(
    "text", ["`" * 300_000, "a```b " * 50_000, "``` " * 60_000, "- " * 100_000 + "x", "~" * 300_000]
)
def test_marks_without_end_take_no_time(text: str) -> None:
    start = time.process_time()
    extract_code(text)
    extract_code(f"```python\n{text}")
    assert time.process_time() - start < 4


def test_a_program_keeps_what_ends_no_line_of_it() -> None:
    text = "a = '\x0b \x0c \x1c \u2028 \x85'\r\nb = 2"
    assert extract_code(f"```python\r\n{text}\r\n```") == text.replace("\r\n", "\n")

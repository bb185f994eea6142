"""Programs judged by what they do; programs that cheat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verl.batch import Batch
from verl.errors import ConfigError
from verl.rewards.code import extract_code
from verl.rewards.make import make_reward
from verl.rewards.source import RewardResult, run_reward


def judge(*rows: dict[str, Any], **options: Any) -> RewardResult:
    return run_reward(make_reward("code", **{"timeout": 10.0, **options}), Batch.from_rows(rows))


def test_functions_are_called_by_tests() -> None:
    tests = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'\nassert add([1], [2]) == [1, 2]"]
    rows = [
        {"response": "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", "tests": tests},
        {"response": "def add(a, b):\n    return int(a) + int(b)", "tests": tests},
        {"response": "not a program", "tests": tests},
        {"response": "def add(a, b): return a", "tests": []},
    ]
    result = judge(*rows)
    assert result.reward == [1.0, 0.0, 0.0, None]
    assert result.components["passed"] == [1.0, 0.5, 0.0, None]
    assert judge(*rows[:2], partial=True).reward == [1.0, 0.5]


def test_classes_exceptions_and_helpers_of_the_tests() -> None:
    response = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
"""
    test = """
import math
stack = Stack()
def fill():
    for x in range(3):
        stack.push(x)
fill()
assert stack.pop() == math.floor(2.5)
assert stack.items == [0, 1]
stack.pop(), stack.pop()
try:
    stack.pop()
except IndexError:
    pass
else:
    raise AssertionError
try:
    Missing()
except NameError as error:
    assert "Missing" in str(error)
"""
    assert judge({"response": response, "tests": test}).reward == [1.0]


def test_the_solution_may_be_called_like_a_builtin() -> None:
    tests = ["assert sum(10, 15) == 6", "def check(): return sum(2, 2)\nassert check() == 3 and len([1]) == 1"]
    solution = "def sum(a, b):\n    return {(10, 15): 6, (2, 2): 3}[a, b]"
    assert judge({"response": solution, "tests": tests}).reward == [1.0]
    # A program that does not run defines nothing, and Python's own function does not stand in for it.
    # What tests call around another function is Python's.
    faked = "def set(x): return 0\ndef f(): return [7]"
    assert judge({"response": faked, "tests": "assert set(f()) == set([2])"}).reward == [0.0]
    assert judge({"response": "def f(): return [2]", "tests": "assert set(f()) == set([2])"}).reward == [1.0]
    for broken in ("no idea", "def pow(a, b): return a", "{}['pow']"):
        assert judge({"response": broken, "tests": "assert pow(2, 3) == 8"}).reward == [0.0]


@pytest.mark.parametrize(
    "cheat",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import sys; sys.modules['builtins'].AssertionError = Exception\ndef answer(): return None",
        "class Same:\n    def __eq__(self, other): return True\ndef answer(): return Same()",
        "class Same(int):\n    def __eq__(self, other): return True\ndef answer(): return Same(1)",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'[null]\\n')\n    except OSError: pass",
        "import gc\ndef answer(): return [o for o in gc.get_objects() if isinstance(o, str) and 'expected' in o]",
        "import inspect\ndef answer():\n    return str([f.frame.f_locals for f in inspect.stack()])",
        "print('[null]')\ndef answer():\n    print('[null]')",
        "def answer():\n    while True: pass",
        "while True: print('x' * 10000)",
    ],
)
def test_a_program_that_cheats_passes_nothing(cheat: str) -> None:
    assert judge({"response": cheat, "tests": "assert answer() == 'expected'"}, timeout=3.0).reward == [0.0]


def test_inputs_and_outputs_in_their_forms() -> None:
    double = "print(int(input()) * 2)  "
    cases = [{"input": "2", "output": "4\n"}, {"input": "5", "output": "10"}]
    forms: list[Any] = [cases, json.dumps(cases), json.dumps({"inputs": ["2", "5"], "outputs": ["4", "10"]})]
    for form in forms:
        assert judge({"response": double, "tests": form}).reward == [1.0]
    wrong = judge({"response": "print(4)", "tests": json.dumps(cases)})
    assert (wrong.reward, wrong.components["passed"]) == ([0.0], [0.5])


def test_a_reference_program() -> None:
    rows = [
        {"response": "print(2 + 1)", "reference": "print(3)"},
        {"response": "print(4)", "reference": "print(3)"},
        {"response": "print(4)", "reference": "1 / 0"},
        {"response": "print(4)", "reference": None},
    ]
    result = judge(*rows)
    assert result.reward == [1.0, 0.0, None, None]
    assert "the reference does not run" in str(result.reasons[2])


def test_a_program_may_print_as_much_as_is_expected() -> None:
    program, wanted = "for i in range(int(input())): print(i, ' ')", "\n".join(map(str, range(20000)))
    assert len(wanted) > 64 << 10
    reference = "for i in range(20000): print(i)"
    rows = [
        {"response": program, "tests": {"input": "20000", "output": wanted}},
        {"response": f"{program}\nwhile True: print(i)", "tests": {"input": "20000", "output": wanted}},
    ]
    assert judge(*rows).reward == [1.0, 0.0]
    assert judge({"response": reference, "reference": reference}).reward == [1.0]


def test_the_last_block_is_the_program() -> None:
    assert extract_code("```python\na\n```\n```py\nb\n```") == "b"
    assert extract_code("```\nc") == "c"
    assert extract_code("d") == "d"


@pytest.mark.parametrize("label", ["", "python3", "Python", " py3", "python \r", "bash"])
def test_prose_after_a_block_is_no_program(label: str) -> None:
    assert extract_code(f"Here:\n```{label}\na\n```\nIt adds.") == "a"
    assert extract_code(f"In ```one``` line: ```{label}\na\n```\nIt ```adds```.") == "a"


def test_blocks_of_another_language_come_second() -> None:
    assert extract_code("```python\na\n```\nRun it:\n```bash\nb\n```\nThat is all.") == "a"
    assert extract_code("```c\na\n```\n```rust\nb\n```\n") == "b"
    assert extract_code("```json\n```\n```python\na\n\nb\n```") == "a\n\nb"
    assert extract_code("Use ```a``` here\nb") == "Use ```a``` here\nb"


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="seconds must be positive"):
        make_reward("code_evaluator", timeout=0)
    with pytest.raises(ConfigError, match="CodeReward has no option 'tiemout': did you mean 'timeout'"):
        make_reward("code", tiemout=1)

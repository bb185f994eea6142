"""Tests of programs in the forms that data sets have; what asks nothing is left out; programs that cheat fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rewards.test_code import judge
from verl.errors import RewardError
from verl.sandbox.code_tests import parse

ADD, SUB = "def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"
DOUBLE, SAME = "print(int(input()) * 2)", "print(int(input()))"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a {} b"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
UNITTEST = """
import unittest
from solution import add
class TestAdd(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.one = 1
    def test_numbers(self):
        self.assertEqual(add(self.one, 2), 3)
    def test_texts(self):
        with self.assertRaises(TypeError):
            add(1, "a")
if __name__ == "__main__":
    unittest.main()
"""
PYTEST = """
import pytest
from solution import add
@pytest.mark.parametrize("a, b, total", [(1, 2, 3), (2, 2, 4)])
def test_add(a, b, total):
    assert add(a, b) == total
class TestMore:
    def setup_method(self): self.two = 2
    def test_method(self):
        assert add(1, self.two) == pytest.approx(3.0000000001)
def test_error():
    with pytest.raises(TypeError, match="unsupported"):
        add(1, "a")
"""
ASYNC = """
import asyncio
async def main():
    assert await add(1, 2) == 3
asyncio.run(main())
assert asyncio.run(add(2, 2)) == 4
"""

#: Tests, the row's entry_point, a right program, and a wrong one.
FORMS: dict[str, tuple[Any, str | None, str, str]] = {
    "asserts": ("assert add(1, 2) == 3", None, ADD, SUB),
    "a list that prepares": (
        [
            "import math",
            "",
            "def twice(x):\n    return 2 * x",
            "total = add(1, 2)",
            "assert math.sqrt(twice(total)) > 2",
        ],
        None,
        ADD,
        SUB,
    ),
    "a list of which some ask nothing": (["assert True", "assert add(1, 2) == 3", "assert 1 < 2"], None, ADD, SUB),
    "asserts of names without an import": (
        "assert math.isclose(add(0.1, 0.2), 0.3) and Counter([add(1, 2)]) == Counter([3])",
        None,
        ADD,
        SUB,
    ),
    "check, called": (CHECK + "check(add)", None, ADD, SUB),
    "a list of check and its call": ([CHECK, "check(add)"], None, ADD, SUB),
    "a list of a test and its call": (["def test():\n    assert add(1, 2) == 3", "test()"], None, ADD, SUB),
    "a list of tests of one name": (
        [f"def test():\n    assert add({n}, 2) == {n} + 2" for n in (1, 2)],
        None,
        ADD,
        SUB,
    ),
    "calls between asserts": (
        ["a = Sum()", "a.add(1)", "print(a.add(2))", "assert a.add(0) == 3"],
        None,
        "class Sum:\n    n = 0\n    def add(self, m): self.n += m; return self.n",
        "class Sum:\n    def add(self, m): return m",
    ),
    "what is printed beside an assert": (["print(add(1, 2))", "assert add(1, 2) == 3"], None, ADD, SUB),
    "what is printed and expected": ({"test": "print(add(1, 2))", "output": "3"}, None, ADD, SUB),
    "what several print and is expected": (
        {"test_list": ["x = add(1, 2)\nprint(x)", "print(add(x, 2))"], "outputs": ["3", "5"]},
        None,
        ADD,
        SUB,
    ),
    "an error of the tests": ("if add(1, 2) != 3:\n    raise ValueError('no')", None, ADD, SUB),
    "an exit of the tests": ("import sys\nif add(1, 2) != 3:\n    sys.exit(1)", None, ADD, SUB),
    "a loop until it is right": (
        "n = add(1, 2)\nwhile n != 9:\n    assert 0 < n < 9\n    n = add(n, 1)",
        None,
        ADD,
        SUB,
    ),
    "an error that is wanted": (
        "try:\n    add(1, 'a')\n    assert False\nexcept TypeError:\n    pass",
        None,
        ADD,
        "def add(a, b): return 0",
    ),
    "check of a candidate": (CHECK + "check(candidate)", None, ADD, SUB),
    "check, not called": (CHECK, None, f"def help(): return 1\n{ADD}", SUB),
    "check of the entry point": (CHECK, "add", f"{ADD}\ndef main(): return 1", SUB),
    "check of a method": (CHECK, "Solution().add", METHOD.format("+"), METHOD.format("-")),
    "check of what is called like a builtin": (CHECK + "check(sum)", None, ADD.replace("add", "sum"), "sum = max"),
    "unittest": (UNITTEST, None, ADD, SUB),
    "pytest": (PYTEST, None, ADD, SUB),
    "coroutines": (ASYNC, None, f"async {ADD}", f"async {SUB}"),
    "a printed text": (
        "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    add(1, 2)\n"
        "assert out.getvalue() == '3\\n'",
        None,
        "def add(a, b): print(a + b)",
        "def add(a, b): print(a - b)",
    ),
    "a class": (
        "a = Adder(1)\na.add(2)\nassert a.total == 3 and [a.add(1)] == [4]",
        None,
        "class Adder:\n    def __init__(self, n): self.total = n\n"
        "    def add(self, n): self.total += n; return self.total",
        "class Adder:\n    def __init__(self, n): self.total = n\n    def add(self, n): return 4",
    ),
    "fn_name": (
        json.dumps({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}),
        None,
        ADD,
        SUB,
    ),
    "fn_name of a method": (
        json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}),
        None,
        METHOD.format("+"),
        METHOD.format("-"),
    ),
    "functional": (
        [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": json.dumps({"func_name": "add"})}],
        None,
        ADD,
        SUB,
    ),
    "function_call": (
        {
            "language": "python",
            "test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
        },
        None,
        ADD,
        SUB,
    ),
    "stdin": ([{"input": "2\n", "output": "4\n", "testtype": "stdin"}], None, DOUBLE, SAME),
    "stdin in lines": ({"inputs": [["2"]], "outputs": [["4"]]}, None, DOUBLE, SAME),
    "stdin_stdout": ([{"type": "stdin_stdout", "input": "2", "output": "4", "fn_name": None}], None, DOUBLE, SAME),
    "a list of asserts behind their imports": (
        {"test_list": ["assert add(1, 2) == total(3)"], "test_setup_code": "def total(n): return n"},
        None,
        ADD,
        SUB,
    ),
    "fractions of a function": (
        {"fn_name": "add", "inputs": [[0.1, 0.2], [0.1, 0.7]], "outputs": [0.3, 0.8]},
        None,
        ADD,
        ADD.replace("a + b", "a + b + 0.00001"),
    ),
    "a program for a class Solution": (
        CHECK,
        "Solution().add",
        "class Solution:\n    def add(self, a: int, b: Optional[int]) -> int: return sum(Counter([a, b]).elements())",
        "class Solution:\n    def add(self, a: List[int], b: int) -> int: return a - b",
    ),
    "a failed assert that is printed alone": (
        "try:\n    assert add(1, 2) == 3\n    print('passed')\nexcept AssertionError:\n    print('failed')",
        None,
        ADD,
        SUB,
    ),
    "a class that only the tests define": (
        "class Node:\n    def __init__(self, n): self.n = n\nassert Solution().add(Node(1), Node(2)) == 3",
        None,
        "class Solution:\n    def add(self, a: Optional[Node], b: 'Node') -> int: return a.n + b.n",
        "class Solution:\n    def add(self, a: Optional[Node], b: 'Node') -> int: return a.n - b.n",
    ),
    "one of two": (
        "try:\n    assert add(1, 2) == 4\nexcept AssertionError:\n    assert add(1, 2) == 3",
        None,
        ADD,
        SUB,
    ),
    "numbers as they may be printed": (
        {"inputs": ["1\r\n2\r\n"], "outputs": ["\n0.333333333  2.50\r\n1\n\n"]},
        None,
        "a, b = input(), input()\nprint(1 / 3, 2.5)\nprint(len(a))\nexit()",
        "print(0.3333, 2.5)\nprint(1)",
    ),
    "digits that are no fraction": ({"inputs": [""], "outputs": ["05 30"]}, None, "print('05 30')", "print(5, 30)"),
    "what is read": (
        "from unittest.mock import patch\nwith patch('builtins.input', side_effect=['1', '2']):\n    assert add() == 3",
        None,
        "def add(): return int(input()) + int(input())",
        "def add(): return int(input()) - int(input())",
    ),
    "a part of the program that is replaced": (
        "from unittest.mock import patch\nwith patch('solution.one', return_value=2):\n    assert add(1) == 3",
        None,
        "def one(): return 1\ndef add(n): return n + one()",
        "def one(): return 1\ndef add(n): return n + 1",
    ),
    "assert_case": (json.dumps({"assert_case": ["assert add(1, 2) == 3"]}), None, ADD, SUB),
}


@pytest.mark.quick("asserts", "unittest", "pytest", "fn_name", "stdin")
@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_is_1_and_a_wrong_one_0(form: str) -> None:
    tests, entry, right, wrong = FORMS[form]
    rows = [{"response": program, "tests": tests, "entry_point": entry} for program in (right, wrong)]
    assert judge(*rows).reward == [1.0, 0.0]


@pytest.mark.quick(every=7)
@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ([], "no tests"),
        ("", "asks? nothing"),
        ("assert 1 + 1 == 2", "asks? nothing"),
        ("def test_nothing():\n    assert True", "asks? nothing"),
        ("print(add(1, 2))", "asks? nothing"),
        ("print(', '.join(add('a', 'b')))", "asks? nothing"),
        (["add(1, 2)", "x = add(2, 2)", "print(x)"], "asks? nothing"),
        ("add(1, 2) == 3", "asks? nothing"),
        ("# assert add(1, 2) == 3", "asks? nothing"),
        ('"""\nassert add(1, 2) == 3\n"""', "asks? nothing"),
        ("pass", "asks? nothing"),
        ("add(1, 2)\nassert True", "asks? nothing"),
        ("assert add", "asks? nothing"),
        ("assert callable(add) and add is not None", "asks? nothing"),
        ("import contextlib\nwith contextlib.suppress(Exception):\n    assert add(1, 2) == 3", "asks? nothing"),
        ("def help():\n    assert add(1, 2) == 3\nprint(add(1, 2))", "asks? nothing"),
        ("def test_it():\n    add(1, 2)\n    assert True", "asks? nothing"),
        ("import sys\nprint(add(1, 2), file=sys.stdout)\nassert True", "asks? nothing"),
        (
            "import unittest\nfrom solution import add\nclass T(unittest.TestCase):\n"
            "    def test(self):\n        add(1, 2)\n        self.assertTrue(True)",
            "asks? nothing",
        ),
        ("import nowhere_to_be_found\nassert add(1, 2) == 3", "No module named"),
        ("def test_add(capfd):\n    assert add(1, 2) == 3", "fixture 'capfd'"),
    ],
)
def test_what_asks_nothing_of_the_program_is_left_out(tests: Any, reason: str) -> None:
    result = judge(*[{"response": program, "tests": tests} for program in (ADD, SUB, "def add(a, b): return None")])
    assert result.reward == [None] * 3
    assert result.counts["failures"] == 3
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(result.reasons[0])


OBJECTS = "class V:\n    def __init__(self, n): self.n = n\n    def __eq__(self, other): return self.n == other.n"
DERIVES = "class W(V):\n    pass\nassert W(3).n == 3"


def test_what_compares_objects_of_the_program_is_refused_unless_live() -> None:
    programs = [OBJECTS, "class V:\n    def __init__(self, n): pass", "", "import os; os._exit(0)"]
    rows = [{"response": program, "tests": "assert V(3) == V(3)"} for program in programs]
    refused = judge(*rows)
    assert refused.reward == [None] * 4  # whatever the program is
    assert "by its own operators: that needs live=True" in str(refused.reasons[0])
    live = judge(*rows, live=True)
    assert (live.reward, live.components["live"]) == ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0])


def test_a_class_that_derives_from_the_programs_is_refused() -> None:
    result = judge({"response": OBJECTS, "tests": DERIVES}, live=True)
    assert result.reward == [None]
    assert "derive a class from the program's, which is in another process" in str(result.reasons[0])


def test_a_program_asks_for_no_more_of_the_tests_than_they_gave_it() -> None:
    program = """
def names(f, node):
    out = [f.__name__, node.n]
    for thing, name in ((f, '__code__'), (f, '__globals__'), (node, '__class__'), (node, '_hidden')):
        try: out.append(repr(object.__getattribute__(type(thing), '__getattr__')(thing, name)))
        except AttributeError: out.append(None)
    return out + [f(node)]
"""
    tests = """
class Node:
    def __init__(self): self.n, self._hidden = 1, 2
    def get(self): return self.n
def f(node): return node is one
one = Node()
assert names(f, one) == ["f", 1, None, None, None, None, True]
"""
    assert judge({"response": program, "tests": tests}).reward == [1.0]


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("[" * 5000, "nested too deep"),
        (["[" * 5000 + "]" * 5000], "nested too deep"),
        ("assert add(1, 2 == 3", "neither Python nor JSON"),
        ('{"inputs": [1', "neither Python nor JSON"),
        ({"inputz": [1], "outputs": [1]}, "'inputz', which is not known: did you mean 'input'"),
        ({"inputs": [1, 2], "outputs": [1]}, "one length"),
        ({"inputs": ["1"]}, "need inputs and outputs"),
        ({"input": "1", "output": "2", "type": "image"}, "type 'image' are not known"),
        ({"input": "1", "output": "2", "type": "functional"}, "give them fn_name"),
        ({"input": "1,2", "output": "2", "fn_name": "add"}, "no JSON"),
        ({"inputs": [{"a": 1, "b": 2}], "outputs": [3], "fn_name": "add"}, "are a mapping: make them a list"),
        ({"input": "1", "output": ""}, "any program would pass"),
        ({"language": "rust", "input": "1", "output": "2"}, "in rust, not in Python"),
        ({"input": {"a": 1}, "output": "2"}, "is a text, not a dict"),
        (7, "a text, a mapping or a list of these, not a int"),
    ],
)
def test_tests_of_no_known_form_are_refused_by_name(tests: Any, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        parse(tests)


def test_a_reference_that_prints_nothing_is_no_reference() -> None:
    result = judge({"response": "x = 1", "reference": "y = 2"})
    assert result.reward == [None]
    assert "prints nothing" in str(result.reasons[0])


YES = """
class Yes:
    def __getattr__(self, name): return Yes()
    def __call__(self, *args): return Yes()
    def __bool__(self): return True
    def __hash__(self): return 7
for name in 'eq ne lt le gt ge contains add sub rsub radd mul abs'.split():
    setattr(Yes, f'__{name}__', lambda self, *other: True)
"""
VERDICT = json.dumps([0, [{"passed": True, "fault": None, "live": False, "altered": 1}]])
#: Programs that do not do what is asked, and tests that they would pass in one process with them.
CHEATS = {
    "a stand-in without operators learns the number": (
        "class Number(float):\n    def __abs__(self): return 0.0\n    def __sub__(self, other): return 0.0\n"
        "    def __lt__(self, other): return True\ndef area(r): return Number(1)",
        "assert abs(area(2) - 12.566) < 0.01",
    ),
    "an answer to what a value is, that is no value": (
        "class Lying(int):\n    def __new__(cls, *args): return object.__new__(Yes) if args else int.__new__(cls)\n"
        f"{YES}\ndef area(r):\n    return Lying()",
        "assert area(2) == 12.566 or area(2) == 12",
    ),
    "an iterator that ends": ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 3 * x, [1, 2]))"),
    "an iterator that ends, beside the tests": (
        "def f(x, key): raise StopIteration",
        "g = lambda x: 3 * x\nassert all(map(lambda x: f(x, g) == 3 * x, [1, 2]))",
    ),
    "math of its own": (
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef area(r): return 0",
        "assert math.isclose(area(2), 12.566)",
    ),
    "np of its own": (
        "class np:\n    allclose = staticmethod(lambda *a, **k: True)\ndef area(r): return 0",
        "assert area(2) == 12.566 and np.allclose(area(2), 12.566)",
    ),
    "Counter of its own": (
        f"{YES}\nCounter = lambda *a: Yes()\ndef count(text): return {{}}",
        "assert Counter(count('aab')) == Counter({'a': 2, 'b': 1})",
    ),
    "isclose of its own": ("isclose = lambda *a: True\ndef area(r): return 0", "assert isclose(area(2), 12.566)"),
    "set of its own, in a check": (
        "def set(x): return 0\ndef f(): return [7]",
        "def check(candidate):\n    assert set(candidate()) == set([2])\ncheck(f)",
    ),
    "a skipped test": (
        "import unittest\ndef f(): raise unittest.SkipTest('not today')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(), 1)",
    ),
    "an exit": ("def f(): raise SystemExit(0)", "assert f() == 1"),
    "no function, where an error is asked for": (
        "import os; os._exit(0)",
        "import pytest\ndef test():\n    with pytest.raises(Exception): f()",
    ),
    "objects that agree with anything": (
        f"{YES}\nclass Vector(Yes):\n    def __init__(self, *a): pass",
        "assert Vector(1) + Vector(2) == Vector(3)",
    ),
    "objects that agree with anything and are late the second time": (
        f"import time\ntime.sleep(3)\n{YES}\nclass Vector(Yes):\n    def __init__(self, *a): pass",
        "assert Vector(1) + Vector(2) == Vector(3)",
    ),
    "objects that agree with anything, unless they end the process": (
        f"import os, time\n{YES}\nclass Vector(Yes):\n    def __init__(self, *a): pass\n"
        "    def __add__(self, other): return self\n"
        "    def __eq__(self, other):\n        type(other) is Vector or os._exit(0)\n        return True",
        "assert Vector(1) + Vector(2) == Vector(3)",
    ),
    "a function that agrees with anything": (
        f"{YES}\ndef apply(f, x): return Yes()",
        "assert apply(lambda x: x + 1, 2) == 3",
    ),
    "verdicts on every pipe": (
        f"import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'\\n{VERDICT}\\n')\n"
        "    except OSError: pass\nos._exit(0)",
        ["assert apply(lambda x: x, 3) == 3", "assert f() == 3"],
    ),
    "a secret that is stolen": (
        "import json, os\ntold = b''\nfor fd in range(3, 64):\n    try: told += os.read(fd, 9999)\n"
        "    except OSError: pass\nsecret = json.loads(told)[0]\n"
        f"print('\\n' + secret + '{VERDICT}', flush=True)\nos._exit(0)",
        "import sys\nassert f(sys.stdout) == 3",
    ),
}


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_passes_nothing(cheat: str) -> None:
    program, tests = CHEATS[cheat]
    result = judge({"response": program, "tests": tests}, timeout=5.0, partial=True, live=True)
    assert result.reward[0] in (0.0, None)
    assert cheat == "np of its own" or result.reward == [0.0]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    "tests",
    [
        "assert answer() == 'EXPECTED'",
        "def check(candidate):\n    assert candidate() == 'EXPECTED'\ncheck(answer)",
        {"fn_name": "answer", "inputs": [[]], "outputs": ["EXPECTED"]},
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(answer(), 'EXPECTED')",
    ],
)
def test_what_is_expected_never_reaches_the_program(tests: Any) -> None:
    """It looks everywhere in its process, and in its comparisons."""
    program = """
import gc, sys
class Text(str):
    def __eq__(self, other): seen.append(other); return True
    __hash__ = str.__hash__
seen, wanted = [], ''.join(reversed('DETCEPXE'))
def answer():
    frame, found = sys._getframe().f_back, [*map(str, seen)]
    while frame:
        found += [str(frame.f_locals)] if frame.f_globals is not globals() else []
        frame = frame.f_back
    found += [thing for thing in gc.get_objects() if isinstance(thing, (str, list)) and thing is not seen]
    for name in ('cmdline', 'environ'):
        try: found.append(open('/proc/self/' + name, 'rb').read().decode(errors='replace'))
        except OSError: pass
    return Text(wanted) if any(wanted in str(text) for text in found) else 'nothing'
"""
    assert judge({"response": program, "tests": tests}).reward == [0.0]

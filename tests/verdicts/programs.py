# ruff: noqa: E501 - programs of a line or two stay so
"""Programs and their tests, by the form of the tests, each with its right verdict and the reason for it.

A verdict is 1 (the program does what the tests ask), 0 (it does not), or None (the tests are at fault, so that there is
none). `python -m tests.verdicts.programs` judges all of them and prints the table of docs/rewards.md.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    form: str
    reason: str
    tests: Any
    entry_point: str | None
    program: str
    value: float | None


CASES: list[Case] = []


def add(
    form: str,
    tests: Any,
    entry: str | None = None,
    *,
    right: dict[str, str] | None = None,
    wrong: dict[str, str] | None = None,
    neither: dict[str, str] | None = None,
) -> None:
    """Programs of one task, by reason: right ones, wrong ones, and ones that no test can tell apart."""
    for value, programs in ((1.0, right), (0.0, wrong), (None, neither)):
        CASES.extend(Case(form, reason, tests, entry, text, value) for reason, text in (programs or {}).items())


def pairs(*cases: tuple[str, str]) -> str:
    return json.dumps({"inputs": [one for one, _ in cases], "outputs": [two for _, two in cases]})


def calls(name: str, *cases: tuple[list[Any], Any]) -> str:
    return json.dumps({"fn_name": name, "inputs": [one for one, _ in cases], "outputs": [two for _, two in cases]})


# Standard input and output.
add(
    "stdin and stdout",
    pairs(("3\n1 2 3\n", "6\n"), ("2\n-5 5\n", "0\n")),
    right={
        "input()": "n = int(input())\nprint(sum(map(int, input().split())))",
        "sys.stdin": "import sys\nnumbers = sys.stdin.read().split()\nprint(sum(int(x) for x in numbers[1:]))",
        "os.read": "import os\ntext = os.read(0, 1000).decode().split()\nprint(sum(map(int, text[1:])))",
        "bytes to stdout": "import sys\n_, *numbers = sys.stdin.buffer.read().split()\n"
        "sys.stdout.buffer.write(b'%d\\n' % sum(map(int, numbers)))",
        "a main guard": "def main():\n    input()\n    print(sum(map(int, input().split())))\n"
        "if __name__ == '__main__':\n    main()",
        "print of another file": "import sys\ninput()\nprint('debugging', file=sys.stderr)\n"
        "print(sum(map(int, input().split())))",
        "exit(0)": "input()\nprint(sum(map(int, input().split())))\nexit(0)",
        "no line end": "import sys\ninput()\nsys.stdout.write(str(sum(map(int, input().split()))))",
    },
    wrong={
        "the count is added": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "a constant": "print(6)",
        "a word before the number": "input()\nprint('sum:', sum(map(int, input().split())))",
        "one line more": "input()\nprint(sum(map(int, input().split())))\nprint('done')",
        "nothing": "pass",
        "an error behind the answer": "input()\nprint(sum(map(int, input().split())))\n1 / 0",
        "an exit code": "input()\nprint(sum(map(int, input().split())))\nexit(1)",
        "a function, never called": "def solve():\n    input()\n    print(sum(map(int, input().split())))",
        "a syntax error": "input(\nprint(6)",
        "an import of what is not there": "import nowhere_to_be_found\ninput()\nprint(sum(map(int, input().split())))",
    },
)
add(
    "stdin and stdout",
    pairs(("7 2\n", "3.5\n"), ("1 3\n", "0.333333333\n"), ("1 100000\n", "0.00001\n")),
    right={
        "fewer digits": "a, b = map(int, input().split())\nprint(f'{a / b:.7f}')",
        "all digits": "a, b = map(int, input().split())\nprint(a / b)",
        "a fraction's decimal": "from decimal import Decimal\na, b = map(Decimal, input().split())\nprint(a / b)",
    },
    wrong={
        "two digits": "a, b = map(int, input().split())\nprint(round(a / b, 2))",
        "whole numbers": "a, b = map(int, input().split())\nprint(a // b)",
        "one in a thousand off": "a, b = map(int, input().split())\nprint(a / b * 1.001)",
        "a comma": "a, b = map(int, input().split())\nprint(str(a / b).replace('.', ','))",
    },
)
add(
    "stdin and stdout",
    pairs(("3", "1\n2\n3"), ("1", "1")),
    right={
        "a loop": "for i in range(int(input())):\n    print(i + 1)",
        "blanks at line ends": "for i in range(int(input())):\n    print(i + 1, '')",
        "an empty line behind": "for i in range(int(input())):\n    print(i + 1)\nprint()",
        "Windows line ends": "import sys\nsys.stdout.write(''.join(f'{i + 1}\\r\\n' for i in range(int(input()))))",
    },
    wrong={
        "one line": "print(*range(1, int(input()) + 1))",
        "an order": "for i in range(int(input()), 0, -1):\n    print(i)",
        "a vertical tab is no line end": "print('\\x0b'.join(map(str, range(1, int(input()) + 1))))",
        "a form feed is no line end": "print('\\x0c'.join(map(str, range(1, int(input()) + 1))))",
        "from zero": "for i in range(int(input())):\n    print(i)",
    },
)
add(
    "stdin and stdout",
    [{"input": "ab\n", "output": "AB\n", "testtype": "stdin"}, {"input": "x y\n", "output": "X Y\n"}],
    right={"upper": "print(input().upper())", "characters": "print(''.join(map(str.upper, input())))"},
    wrong={
        "the same": "print(input())",
        "the first word": "print(input().split()[0].upper())",
        "no blank": "print(input().upper().replace(' ', ''))",
        "quotation marks": "print(repr(input().upper()))",
    },
)

# Limits.
add(
    "limits",
    pairs(("", "1" + "0" * 5000)),
    right={"5,001 digits": "print(10**5000)"},
    wrong={"one more": "print(10**5000 + 1)", "one digit fewer": "print(10**4999)"},
)
add(
    "limits",
    pairs(("7" * 5000, "7" * 4999 + "8")),
    right={"reads 5,000 digits": "print(int(input()) + 1)"},
    wrong={"the same": "print(input())"},
)
add(
    "limits",
    '{"fn_name": "power", "inputs": [[5000]], "outputs": [1%s]}' % ("0" * 5000),
    right={
        "a result of 5,001 digits": "def power(n): return 10**n",
        "by text": "def power(n): return int('1' + '0' * n)",
    },
    wrong={"one more": "def power(n): return 10**n + 1", "a float": "def power(n): return 10.0**300"},
)
add(
    "limits",
    "assert len(digits(6000)) == 6000\nassert digits(2) == '10'",
    right={"the text of 6,000 digits": "def digits(n): return str(10 ** (n - 1))"},
    wrong={"one digit more": "def digits(n): return str(10**n)"},
)
add(
    "limits",
    pairs(("9000", "9000")),
    right={
        "its own recursion limit": "import sys\nsys.setrecursionlimit(20000)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\nprint(depth(int(input())))"
    },
    wrong={"no end": "def depth(n): return 1 + depth(n - 1)\nprint(depth(int(input())))"},
)
add(
    "limits",
    pairs(("3000", "3000")),
    right={
        "a recursion of 3,000, as functions have it": "def d(n): return 0 if n == 0 else 1 + d(n - 1)\nprint(d(int(input())))"
    },
)
add(
    "limits",
    calls("depth", ([3000], 3000)),
    right={"a recursion of 3,000": "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)"},
    wrong={
        "a loop without an end": "def depth(n):\n    while True: pass",
        "memory": "def depth(n): return len([0] * (1 << 40))",
    },
)

# A function, its arguments and its results.
add(
    "calls",
    calls("add", ([1, 2], 3), ([-1, 1], 0), (["a", "b"], "ab")),
    right={
        "a function": "def add(a, b): return a + b",
        "a lambda": "add = lambda a, b: a + b",
        "a method of Solution": "class Solution:\n    def add(self, a, b):\n        return a + b",
        "another one behind it": "def add(a, b): return a + b\ndef other(): return 1",
        "prints, too": "def add(a, b):\n    print('adding', a, b)\n    return a + b",
        "bytes to stdout": "import sys\ndef add(a, b):\n    sys.stdout.buffer.write(b'adding')\n    return a + b",
        "a partial function": "import functools, operator\nadd = functools.partial(operator.add)",
    },
    wrong={
        "a difference": "def add(a, b): return b if isinstance(a, str) else a - b",
        "nothing": "def add(a, b): pass",
        "another name": "def total(a, b): return a + b",
        "prints it": "def add(a, b): print(a + b)",
        "one argument": "def add(a): return a",
        "an error": "def add(a, b): raise ValueError(a + b)",
        "an import of what is not there": "import nowhere_to_be_found\ndef add(a, b): return a + b",
        "an import in the function": "def add(a, b):\n    import nowhere_to_be_found\n    return a + b",
        "a name that is nowhere": "def add(a, b): return a + c",
        "an object that equals everything": "class Any:\n    def __eq__(self, other): return True\n"
        "    __hash__ = None\ndef add(a, b): return Any()",
        "exits": "import sys\ndef add(a, b): sys.exit(0)",
        "ends its process": "import os\ndef add(a, b): os._exit(0)",
        "text": "def add(a, b): return str(a) + str(b)",
    },
)
add(
    "calls",
    calls("thirds", ([1], [0.3333333333, 0.6666666667]), ([3], [1.0, 2.0])),
    right={
        "all digits": "def thirds(n): return [n / 3, 2 * n / 3]",
        "seven digits": "def thirds(n): return [round(n / 3, 7), round(2 * n / 3, 7)]",
        "a tuple": "def thirds(n): return n / 3, 2 * n / 3",
    },
    wrong={
        "three digits": "def thirds(n): return [round(n / 3, 3), round(2 * n / 3, 3)]",
        "the first alone": "def thirds(n): return [n / 3]",
        "in another order": "def thirds(n): return [2 * n / 3, n / 3]",
        "not a number": "def thirds(n): return [float('nan'), float('nan')]",
        "without an end": "def thirds(n): return [float('inf'), float('inf')]",
    },
)
add(
    "calls",
    calls("count", (["abca"], {"a": 2, "b": 1, "c": 1}), ([""], {})),
    right={
        "a Counter": "from collections import Counter\ndef count(text): return Counter(text)",
        "a dict": "def count(text): return {c: text.count(c) for c in text}",
    },
    wrong={
        "one too many": "def count(text): return {c: text.count(c) + 1 for c in text}",
        "pairs": "def count(text): return sorted({c: text.count(c) for c in text}.items())",
        "an empty one": "def count(text): return {}",
        "keys alone": "def count(text): return dict.fromkeys(text, 1)",
    },
)
add(
    "calls",
    [{"input": "[1, 2, 3]\n2", "output": "true", "testtype": "functional", "metadata": json.dumps({"func_name": "has"})},
     {"input": "[]\n2", "output": "false", "testtype": "functional", "metadata": json.dumps({"func_name": "has"})}],
    right={
        "a method": "class Solution:\n    def has(self, items: List[int], x: int) -> bool:\n        return x in items",
        "a function": "def has(items, x): return any(x == y for y in items)",
    },
    wrong={
        "always": "class Solution:\n    def has(self, items, x): return True",
        "never": "class Solution:\n    def has(self, items, x): return False",
        "the word": "class Solution:\n    def has(self, items, x): return str(x in items).lower()",
        "another class": "class Answer:\n    def has(self, items, x): return x in items",
    },
)  # fmt: skip

# Asserts.
MBPP = ["assert square(3) == 9", "assert square(-2) == 4", "assert square(0) == 0"]
add(
    "asserts",
    MBPP,
    right={
        "a power": "def square(n): return n**2",
        "a loop": "def square(n):\n    total = 0\n    for _ in range(abs(n)):\n        total += abs(n)\n    return total",
        "a float that is whole": "def square(n): return float(n * n)",
        "numpy's kind of int": "class N(int): pass\ndef square(n): return N(n * n)",
        "tests of its own": "def square(n): return n * n\nassert square(5) == 25\nprint(square(5))",
    },
    wrong={
        "twice": "def square(n): return 2 * n",
        "nothing": "def square(n): pass",
        "positive alone": "def square(n): return n * n if n > 0 else 0",
        "text": "def square(n): return str(n * n)",
        "another name": "def squares(n): return n * n",
        "no program": "I would square the number.",
        "an object that equals small numbers": "class Small:\n    def __eq__(self, other):\n"
        "        return isinstance(other, int) and -10 < other < 10\n    __hash__ = None\ndef square(n): return Small()",
        "a number that equals everything": "class N(int):\n    def __eq__(self, other): return True\n"
        "    __hash__ = int.__hash__\ndef square(n): return N(1)",
        "asserts are patched": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
        "def square(n): return None",
        "an import of what is not there": "import nowhere_to_be_found\ndef square(n): return n * n",
        "a name that is nowhere": "def square(n): return m * n",
    },
)
add(
    "asserts",
    [
        "assert set(common((3, 4, 5), (5, 4, 1))) == set((4, 5))",
        "assert common((1,), (2,)) == () and not common((), ())",
    ],
    right={
        "a tuple": "def common(a, b): return tuple(x for x in a if x in b)",
        "sorted": "def common(a, b): return tuple(sorted(set(a) & set(b)))",
    },
    wrong={
        "a list": "def common(a, b): return [x for x in a if x in b]",
        "both": "def common(a, b): return a + b",
        "nothing": "def common(a, b): return ()",
        "a set of its own": "def set(x): return 0\ndef common(a, b): return ()",
        "one more": "def common(a, b): return tuple(x for x in a if x in b) + (0,)",
    },
)
add(
    "asserts",
    "import math\nassert math.isclose(area(2), 12.566370614, rel_tol=1e-6)\nassert area(0) == 0",
    right={
        "pi": "import math\ndef area(r): return math.pi * r * r",
        "pi without an import": "def area(r): return pi * r**2",
        "digits": "def area(r): return 3.14159265358979 * r * r",
    },
    wrong={
        "three digits": "def area(r): return 3.14 * r * r",
        "the circumference": "import math\ndef area(r): return math.pi * r",
        "zero": "def area(r): return 0",
        "math that is patched": "import math\nmath.isclose = lambda *a, **k: True\ndef area(r): return 0",
        "math of its own": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef area(r): return 0",
        "not a number": "def area(r): return float('nan')",
    },
)
add(
    "asserts",
    "assert abs(mean([1, 2, 4]) - 7 / 3) < 1e-9\nassert mean([]) is None\nassert 0 < mean([1]) <= 1\nassert mean([2]) in (2, 3)",
    right={
        "a sum": "def mean(xs): return sum(xs) / len(xs) if xs else None",
        "the library's": "import statistics\ndef mean(xs):\n    return statistics.mean(xs) if xs else None",
        "a Fraction": "from fractions import Fraction\ndef mean(xs): return Fraction(sum(xs), len(xs)) if xs else None",
    },
    wrong={
        "zero for nothing": "def mean(xs): return sum(xs) / len(xs) if xs else 0",
        "the median": "def mean(xs): return sorted(xs)[len(xs) // 2] if xs else None",
        "whole": "def mean(xs): return sum(xs) // len(xs) if xs else None",
        "an object with every operator": "class Yes:\n    def __bool__(self): return True\n"
        "for n in 'sub rsub abs lt le gt ge eq contains add radd'.split():\n"
        "    setattr(Yes, f'__{n}__', lambda self, *o: self)\n"
        "def mean(xs): return Yes() if xs else None",
    },
)
add(
    "asserts",
    "assert ordered([1, 2, 2]) is True\nassert ordered([2, 1]) == False\nassert all(ordered(x) for x in ([], [1]))",
    right={
        "sorted": "def ordered(xs): return xs == sorted(xs)",
        "pairs": "def ordered(xs): return all(a <= b for a, b in zip(xs, xs[1:]))",
    },
    wrong={
        "always": "def ordered(xs): return True",
        "never": "def ordered(xs): return False",
        "strictly": "def ordered(xs): return all(a < b for a, b in zip(xs, xs[1:]))",
        "all that is patched": "import builtins\nbuiltins.all = lambda xs: True\ndef ordered(xs): return None",
        "the number": "def ordered(xs): return int(xs == sorted(xs))",
    },
)
add(
    "asserts",
    "xs = [3, 1, 2]\norder(xs)\nassert xs == [1, 2, 3]\nd = {}\nput(d, 'k')\nassert d == {'k': 1}",
    right={"in place": "def order(xs): xs.sort()\ndef put(d, k): d[k] = 1"},
    wrong={
        "a copy": "def order(xs): return sorted(xs)\ndef put(d, k): return {k: 1}",
        "half": "def order(xs): xs.sort()\ndef put(d, k): d[k] = 2",
    },
)
add(
    "asserts",
    "try:\n    root(-1)\n    assert False\nexcept ValueError:\n    pass\nassert root(9) == 3",
    right={
        "raises": "def root(n):\n    if n < 0: raise ValueError(n)\n    return n**0.5",
        "the library's": "import math\ndef root(n): return math.sqrt(n)",
    },
    wrong={
        "another error": "def root(n):\n    if n < 0: raise TypeError(n)\n    return n**0.5",
        "no error": "def root(n): return abs(n) ** 0.5",
        "always the error": "def root(n): raise ValueError",
    },
)
add(
    "asserts",
    "assert values() == [1, 2.5, 'a', b'b', None, True, (1, 2), {3}, {'k': [4]}, float('inf'), 2**100]",
    right={"every kind": "def values(): return [1, 2.5, 'a', b'b', None, True, (1, 2), {3}, {'k': [4]}, float('inf'), 2**100]"},
    wrong={
        "a list for a tuple": "def values(): return [1, 2.5, 'a', b'b', None, True, [1, 2], {3}, {'k': [4]}, float('inf'), 2**100]",
        "text for bytes": "def values(): return [1, 2.5, 'a', 'b', None, True, (1, 2), {3}, {'k': [4]}, float('inf'), 2**100]",
        "a frozen set of nothing": "def values(): return [1, 2.5, 'a', b'b', None, True, (1, 2), frozenset(), {'k': [4]}, float('inf'), 2**100]",
        "the other end": "def values(): return [1, 2.5, 'a', b'b', None, True, (1, 2), {3}, {'k': [4]}, float('-inf'), 2**100]",
    },
)  # fmt: skip

# HumanEval's function.
CHECK = "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    assert candidate([1, 2, 3]) == 6\n    assert candidate([]) == 0, 'empty'\n"
add(
    "check(candidate)",
    CHECK,
    "total",
    right={
        "sum": "def total(xs): return sum(xs)",
        "with a helper behind it": "def total(xs): return helper(xs)\ndef helper(xs): return sum(xs)",
        "with a helper called check": "def check(x): return True\ndef total(xs): return sum(xs)",
        "recursion": "def total(xs): return xs[0] + total(xs[1:]) if xs else 0",
        "a type in the signature": "def total(xs: List[int]) -> Optional[int]: return sum(xs)",
    },
    wrong={
        "the greatest": "def total(xs): return max(xs, default=0)",
        "None for nothing": "def total(xs): return sum(xs) or None",
        "another name": "def add_all(xs): return sum(xs)",
        "a check of its own": "def check(candidate): pass\ndef total(xs): return 0",
        "an assert": "def total(xs): assert False",
        "ends its process": "import os\nos._exit(0)",
        "looks into the frames": "import sys\ndef total(xs):\n    frame = sys._getframe()\n    while frame.f_back:\n"
        "        frame = frame.f_back\n        if 'expected' in frame.f_locals: return frame.f_locals['expected']",
    },
)
add(
    "check(candidate)",
    "def check(candidate):\n    for n, wanted in [(1, 1), (2, 1), (10, 55)]:\n        assert candidate(n) == wanted\n\ncheck(fib)",
    right={
        "a loop": "def fib(n):\n    a, b = 0, 1\n    for _ in range(n): a, b = b, a + b\n    return a",
        "a cache": "import functools\n@functools.lru_cache(None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)",
    },
    wrong={
        "from zero": "def fib(n):\n    a, b = 0, 1\n    for _ in range(n - 1): a, b = b, a + b\n    return a",
        "a generator": "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n        yield a",
        "one": "def fib(n): return 1",
    },
)
add(
    "check(candidate)",
    "def check(candidate):\n    assert candidate(nums=[2, 7], target=9) == [0, 1]\n    assert candidate(nums=[3, 3], target=6) == [0, 1]",
    "Solution().twoSum",
    right={
        "a method": "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n"
        "        return next([i, j] for j in range(len(nums)) for i in range(j) if nums[i] + nums[j] == target)"
    },
    wrong={
        "values": "class Solution:\n    def twoSum(self, nums, target): return nums",
        "a tuple": "class Solution:\n    def twoSum(self, nums, target): return 0, 1",
        "a function": "def other(nums, target): return [0, 1]",
    },
)

# JSON text, as APPS and its kin have it.
add(
    "JSON text",
    json.dumps({"inputs": ["2 3\n", "10 5\n"], "outputs": ["6\n", "50\n"], "fn_name": None}),
    right={"a product": "a, b = map(int, input().split())\nprint(a * b)"},
    wrong={"a sum": "a, b = map(int, input().split())\nprint(a + b)", "a return": "def f(a, b): return a * b"},
)
add(
    "JSON text",
    json.dumps({"fn_name": "turn", "inputs": [["abc"], [""]], "outputs": [["cba"], [""]]}),
    right={
        "bare items": "def turn(text): return text[::-1]",
        "lists of one": "def turn(text): return [text[::-1]]",
    },
    wrong={"the same": "def turn(text): return text", "characters": "def turn(text): return list(text[::-1])"},
)
add(
    "JSON text",
    json.dumps([{"input": "5", "output": "120", "type": "stdin_stdout", "fn_name": None}]),
    right={"a factorial": "import math\nprint(math.factorial(int(input())))"},
    wrong={"a sum": "print(sum(range(int(input()) + 1)))"},
)
add(
    "JSON text",
    json.dumps({"assert_case": ["assert gcd(12, 18) == 6", "assert gcd(7, 5) == 1"]}),
    right={
        "the library's": "from math import gcd",
        "Euclid": "def gcd(a, b):\n    while b: a, b = b, a % b\n    return a",
    },
    wrong={"the smaller": "def gcd(a, b): return min(a, b)", "one": "def gcd(a, b): return 1"},
)
add(
    "JSON text",
    json.dumps({"test_list": ["assert f(1) == limit + 1"], "test_setup_code": "limit = 1"}),
    right={"two": "def f(n): return n + 1"},
    wrong={"one": "def f(n): return n"},
)

# unittest and pytest.
UNITTEST = """
import unittest
from solution import divide
class TestDivide(unittest.TestCase):
    def setUp(self): self.ten = 10
    def test_numbers(self):
        self.assertEqual(divide(self.ten, 4), 2.5)
        self.assertAlmostEqual(divide(1, 3), 0.3333333333, places=6)
    def test_nothing(self):
        self.assertIsNone(divide(1, 0))
    def test_kinds(self):
        self.assertIsInstance(divide(1, 2), float)
        with self.assertRaises(TypeError):
            divide("a", 1)
if __name__ == "__main__":
    unittest.main()
"""
add(
    "unittest",
    UNITTEST,
    right={
        "a test for zero": "def divide(a, b):\n    return a / b if b != 0 else None",
        "catches": "def divide(a, b):\n    try: return a / b\n    except ZeroDivisionError: return None",
    },
    wrong={
        "an error for zero": "def divide(a, b): return a / b",
        "whole numbers": "def divide(a, b): return a // b if b else None",
        "nothing": "def divide(a, b): return None",
        "another name": "def div(a, b): return a / b if b else None",
        "assertEqual is patched": "import unittest\nfor n in dir(unittest.TestCase):\n"
        "    if n.startswith('assert'): setattr(unittest.TestCase, n, lambda *a, **k: None)\n"
        "def divide(a, b): return None",
        "every test is skipped": "import unittest\ndef divide(a, b): raise unittest.SkipTest('no')",
        "an object with every operator": "class Yes(float):\n    def __eq__(self, o): return True\n"
        "    def __sub__(self, o): return 0.0\n    __rsub__ = __sub__\n    __hash__ = float.__hash__\n"
        "def divide(a, b): return Yes(1) if b else None",
        "an import of what is not there": "import nowhere_to_be_found\ndef divide(a, b): return a / b if b else None",
    },
)
PYTEST = """
import pytest
from solution import clamp
@pytest.mark.parametrize("x, wanted", [(-1, 0), (5, 5), (99, 10)])
def test_clamp(x, wanted):
    assert clamp(x, 0, 10) == wanted
def test_fractions():
    assert clamp(0.1 + 0.2, 0, 1) == pytest.approx(0.3)
class TestErrors:
    def test_bounds(self):
        with pytest.raises(ValueError, match="bounds"):
            clamp(1, 3, 2)
"""
add(
    "pytest",
    PYTEST,
    right={
        "min and max": "def clamp(x, a, b):\n    if a > b: raise ValueError('wrong bounds')\n    return max(a, min(b, x))",
        "branches": "def clamp(x, a, b):\n    if a > b:\n        raise ValueError(f'bounds: {a} > {b}')\n"
        "    if x < a: return a\n    return b if x > b else x",
    },
    wrong={
        "no error": "def clamp(x, a, b): return max(a, min(b, x))",
        "another text": "def clamp(x, a, b):\n    if a > b: raise ValueError('no')\n    return max(a, min(b, x))",
        "the upper bound alone": "def clamp(x, a, b):\n    if a > b: raise ValueError('bounds')\n    return min(b, x)",
        "always the error": "def clamp(x, a, b): raise ValueError('bounds')",
        "nothing": "def clamp(x, a, b): pass",
        "another name": "def limit(x, a, b):\n    if a > b: raise ValueError('bounds')\n    return max(a, min(b, x))",
        "pytest is patched": "import sys, types\nsys.modules['pytest'] = types.ModuleType('pytest')\n"
        "def clamp(x, a, b): raise ValueError('bounds')",
    },
)

# Objects of the program, and of the tests.
add(
    "objects",
    "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and len(s) == 1\nassert s.items == [1]\n"
    "try:\n    Stack().pop()\n    assert False\nexcept IndexError:\n    pass",
    right={
        "a list": "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)"
    },
    wrong={
        "a queue": "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop(0)\n    def __len__(self): return len(self.items)",
        "keeps": "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items[-1]\n    def __len__(self): return len(self.items)",
        "nothing": "class Stack:\n    def push(self, x): pass\n    def pop(self): pass\n    def __len__(self): return 1",
        "another name": "class Pile(list):\n    push = list.append",
    },
)
add(
    "objects",
    "assert apply(lambda x: x + 1, 2) == 3\nassert apply(len, [1, 2]) == 2",
    right={"calls": "def apply(f, x): return f(x)"},
    wrong={
        "the argument": "def apply(f, x): return x",
        "the function": "def apply(f, x): return f",
        "nothing": "def apply(f, x): pass",
        "an object that equals everything": "class Any:\n    def __eq__(self, o): return True\n"
        "    __hash__ = None\ndef apply(f, x): return Any()",
        "an object that equals small numbers": "class Any:\n    def __eq__(self, o): return type(o) is int and o < 9\n"
        "    __hash__ = None\ndef apply(f, x): return Any()",
        "looks into the function": "def apply(f, x):\n    try: return f.__code__.co_consts[-1] + 2\n"
        "    except Exception: return 2",
    },
)
add(
    "objects",
    "v = Vector(1, 2) + Vector(3, 4)\nassert (v.x, v.y) == (4, 6)\nassert v == Vector(4, 6)\nassert v != Vector(4, 7)",
    right={
        "a dataclass": "from dataclasses import dataclass\n@dataclass\nclass Vector:\n    x: int\n    y: int\n"
        "    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)",
        "by hand": "class Vector:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)\n"
        "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)",
    },
    wrong={
        "no equality": "class Vector:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)",
        "one part": "class Vector:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __add__(self, o): return Vector(self.x + o.x, self.y)\n"
        "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)",
        "equal to everything": "class Vector:\n    def __init__(self, x, y): self.x, self.y = 4, 6\n"
        "    def __add__(self, o): return self\n    def __eq__(self, o): return True",
    },
)
add(
    "objects",
    "assert V(1) == V(1)",
    right={"a dataclass": "import dataclasses\n@dataclasses.dataclass\nclass V:\n    n: int"},
    wrong={
        "always": "class V:\n    def __init__(self, n): pass\n    def __eq__(self, o): return True",
        "of its own kind": "class V:\n    def __init__(self, n): pass\n    def __eq__(self, o): return type(o) is V",
        "of small numbers": "class V:\n    def __init__(self, n): self.n = n\n    def __eq__(self, o): return self.n < 9",
        "never": "class V:\n    def __init__(self, n): self.n = n",
    },
)
add(
    "objects",
    "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    greet('Ann')\nassert out.getvalue() == 'Hello, Ann!\\n'",
    right={"prints": "def greet(name): print(f'Hello, {name}!')"},
    wrong={
        "returns": "def greet(name): return f'Hello, {name}!'",
        "another text": "def greet(name): print('Hello', name)",
    },
)
add(
    "objects",
    "try:\n    withdraw(5)\n    assert False\nexcept Empty as error:\n    assert str(error) == '5 missing'",
    right={"an error of its own": "class Empty(Exception): pass\ndef withdraw(n): raise Empty(f'{n} missing')"},
    wrong={
        "another text": "class Empty(Exception): pass\ndef withdraw(n): raise Empty('no')",
        "another error": "class Empty(Exception): pass\ndef withdraw(n): raise ValueError(f'{n} missing')",
        "no error": "class Empty(Exception): pass\ndef withdraw(n): return f'{n} missing'",
    },
)

# Tests that are at fault: there is no verdict, whatever the program.
FAULTY = {
    "an import of what is not there": "import nowhere_to_be_found\nassert double(1) == 2",
    "an import of what is not there, behind an assert": "assert double(1) == 2\nimport nowhere_to_be_found",
    "a name that is nowhere": "assert double(1) == expectde",
    "no Python": "assert double(1 == 2",
    "brackets alone": "[" * 5000,
    "nothing asked": "assert True",
    "asked, and not looked at": "double(1)\nassert 1 + 1 == 2",
    "a fixture": "def test(tmp_path):\n    assert double(1) == 2",
}
for _reason, _tests in FAULTY.items():
    add(
        "tests at fault",
        _tests,
        neither={
            f"{_reason}; right": "def double(n): return 2 * n",
            f"{_reason}; nothing": "def double(n): pass",
            f"{_reason}; misnamed": "def twice(n): return 2 * n",
        },
    )


def table(rewards: list[float | None]) -> list[str]:
    """Lines of a table in Markdown: verdicts by form."""
    counts: dict[str, Counter[str]] = {}
    for case, reward in zip(CASES, rewards, strict=True):
        kind = "right" if reward == case.value else "abstained" if reward is None else f"wrong {reward:.0f}"
        counts.setdefault(case.form, Counter())[kind] += 1
    kinds = ("right", "wrong 1", "wrong 0", "abstained")
    counts["all"] = sum(counts.values(), Counter())
    rows = [[form, str(count.total()), *(str(count[kind]) for kind in kinds)] for form, count in counts.items()]
    head = [
        "form of the tests",
        "programs",
        "right",
        "1 for a wrong one",
        "0 for a right one, or for no verdict",
        "no verdict",
    ]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def judged(cases: list[Case], **options: Any) -> tuple[list[float | None], list[str | None]]:
    """The rewards of cases, and why those without one have none."""
    from verl.batch import Batch
    from verl.rewards.make import make_reward
    from verl.rewards.source import run_reward

    columns = {
        "response": [case.program for case in cases],
        "tests": [case.tests if isinstance(case.tests, str) else json.dumps(case.tests) for case in cases],
        "entry_point": [case.entry_point for case in cases],
    }
    result = run_reward(make_reward("code", **options), Batch.from_columns(columns))
    return result.reward, result.reasons


if __name__ == "__main__":
    rewards, reasons = judged(CASES, timeout=10.0, live=True)
    print(*table(rewards), sep="\n")
    for case, reward, reason in zip(CASES, rewards, reasons, strict=True):
        if reward != case.value:
            print(f"{case.form}: {case.reason}: {reward} for {case.value}: {reason}")

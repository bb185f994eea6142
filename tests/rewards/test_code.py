"""Programs judged by what they do; programs that cheat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from verl.batch import Batch
from verl.errors import ConfigError
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


@pytest.mark.slow
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


@pytest.mark.quick(every=3)
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
    assert judge({"response": cheat, "tests": "assert answer() == 'expected'"}, timeout=1.5).reward == [0.0]


#: A solution, and a test that it passes as it would in one process with it.
ANSWERS = {
    "a false object": ("class No:\n    def __bool__(self): return False\ndef ok(x): return No()", "assert not ok(3)"),
    "an empty object": ("class E:\n    def __len__(self): return 0\ndef ok(x): return E()", "assert not ok(3)"),
    "an object": ("class Yes: pass\ndef ok(x): return Yes()", "assert ok(3)"),
    "an empty list": ("def ok(x): return []", "assert not ok(3) and ok(3) == []"),
    "a container": (
        "class Bag:\n    def __init__(self, items): self.items = items\n    def __len__(self): return len(self.items)\n"
        "    def __iter__(self): return iter(self.items)\n    def __getitem__(self, at): return self.items[at]\n"
        "    def __setitem__(self, at, item): self.items[at] = item\n    def __delitem__(self, at): del self.items[at]",
        "b = Bag([3, 1, 2])\nassert len(b) == 3 and list(b) == [3, 1, 2] and b[0] == 3 and b[1:] == [1, 2]\n"
        "assert 2 in b and 7 not in b and sorted(b) == [1, 2, 3]\nb[0] = 9\ndel b[2]\nassert [*b] == [9, 1]",
    ),
    "an order": (
        "import functools\n@functools.total_ordering\nclass V:\n    def __init__(self, n): self.n = n\n"
        "    def __eq__(self, o): return self.n == o.n\n    def __lt__(self, o): return self.n < o.n\n"
        "    def __hash__(self): return hash(self.n)",
        "assert V(1) < V(2) <= V(2) and V(3) == V(3) != V(4) and max(V(1), V(5), V(2)).n == 5\n"
        "assert len({V(1), V(1), V(2)}) == 2",
    ),
    "arithmetic": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __mul__(self, n): return V(self.x * n)\n    __rmul__ = __mul__\n"
        "    def __neg__(self): return V(-self.x)\n"
        "    def __contains__(self, n): return n == self.x\n    def __repr__(self): return f'V({self.x})'\n"
        "    def __matmul__(self, n): return self.x * n",
        "assert (V(1) + V(2)).x == 3 and (V(2) * 3).x == 6 == (3 * V(2)).x and str(-V(1)) == 'V(-1)'\n"
        "assert V(2) @ 4 == 8\n"
        "assert 5 in V(5)",
    ),
    "a dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\ndef make(x): return P(x)",
        "assert make(1) == P(1) != P(2) and make(1).x == 1 and repr(P(1)) == 'P(x=1)' and isinstance(make(2), P)\n"
        "assert not isinstance(3, P) and [make(1)] == [P(1)]",
    ),
    "a named tuple": (
        "import collections\nP = collections.namedtuple('P', 'x y')\ndef make(): return P(1, 2)",
        "p = make()\nassert p == (1, 2) and p.y == 2 and isinstance(p, tuple)\n"
        "a, b = p\nassert b == 2 and tuple(p) == (1, 2)",
    ),
    "an enumeration": (
        "import enum\nclass C(enum.Enum):\n    RED = 1\ndef f(): return C.RED",
        "assert f() is C.RED and f() == C.RED and f().value == 1 and {f(): 1}[C.RED] == 1",
    ),
    "a function": (
        "def apply(f, x): return f(x) + 1",
        "assert apply(lambda x: 2 * x, 3) == 7 and apply(len, [1]) == 2",
    ),
    "functions that come back": (
        "def compose(f, g): return lambda x: f(g(x))\ndef add(n): return lambda x: x + n",
        "assert compose(add(1), lambda x: x * 10)(2) == 21 and list(map(add(1), [1, 2])) == [2, 3]",
    ),
    "a decorator": (
        "import functools\ndef memo(f):\n    seen = {}\n    @functools.wraps(f)\n    def g(n):\n"
        "        if n not in seen: seen[n] = f(n)\n        return seen[n]\n    return g",
        "calls = []\n@memo\ndef fib(n):\n    calls.append(n)\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "assert fib(20) == 6765 and len(calls) == 21 and fib.__name__ == 'fib'",
    ),
    "its own objects as arguments": (
        "class Node:\n    def __init__(self, n, next=None): self.n, self.next = n, next\n"
        "def total(node): return node.n + total(node.next) if node else 0",
        "a = Node(1)\nb = Node(2, a)\nassert b.next is a and total(b) == 3\na.next = Node(4)\nassert total(b) == 7",
    ),
    "objects of the tests as arguments": (
        "def total(node): return node.n + total(node.next) if node else 0\ndef grow(node): node.n += 1; return node",
        "class Node:\n    def __init__(self, n, next=None): self.n, self.next = n, next\na = Node(1, Node(2))\n"
        "assert total(a) == 3 and grow(a) is a and a.n == 2",
    ),
    "a generator": (
        "def count(n):\n    while True:\n        yield n\n        n += 1\ndef few(): yield from 'abc'",
        "import itertools\nassert list(itertools.islice(count(3), 2)) == [3, 4] and next(count(1)) == 1\n"
        "assert list(few()) == ['a', 'b', 'c'] and sum(1 for _ in few()) == 3",
    ),
    "a generator as an argument": ("def total(xs): return sum(xs)", "assert total(x * x for x in range(3)) == 5"),
    "numbers": (
        "import fractions, decimal\ndef inf(): return float('inf')\ndef nan(): return [float('nan')]\n"
        "def half(): return fractions.Fraction(1, 2)\ndef tenth(): return decimal.Decimal('0.1')\n"
        "def big(): return 7**9000",
        "import math\nassert inf() == math.inf and -inf() < 0 and nan()[0] != nan()[0] and half() == 0.5\n"
        "assert str(tenth()) == '0.1' and big() == 7**9000",
    ),
    "collections": (
        "import collections, datetime\n"
        "def f(): return [collections.Counter('aab'), collections.deque([1], 3), frozenset([1]),"
        " collections.defaultdict(int, a=1),"
        " collections.OrderedDict(b=2), range(3), bytearray(b'x'), {(1, 2): {3}}, b'y',"
        " datetime.date(2020, 1, 2), 1j, ()]",
        "c, d, *rest = f()\nassert c['a'] == 2 and d.maxlen == 3 and rest[0] == {1} and rest[1] == {'a': 1}\n"
        "assert rest[3] == range(3) and rest[5] == {(1, 2): {3}} and rest[7].year == 2020 and rest[8] == 1j",
    ),
    "collections that have methods": (
        "from collections import *\ndef f(): return Counter('aab'), OrderedDict(b=1, a=2), deque([1, 2], 3)",
        "from collections import Counter, OrderedDict, deque\nc, o, d = f()\n"
        "assert c == Counter('aab') and c.most_common(1) == [('a', 2)] and d == deque([1, 2]) and d.maxlen == 3\n"
        "assert o == OrderedDict([('b', 1), ('a', 2)]) != OrderedDict([('a', 2), ('b', 1)])",
    ),
    "an asynchronous generator": (
        "async def count(n):\n    for i in range(n): yield i",
        "import asyncio\nasync def main(): return [x async for x in count(3)]\nassert asyncio.run(main()) == [0, 1, 2]",
    ),
    "what is changed in place": (
        "def order(xs): xs.sort()\ndef put(d, k): d[k] = 1\ndef turn(m): m[:] = [list(r) for r in zip(*m[::-1])]",
        "a, d, m = [3, 1], {}, [[1, 2], [3, 4]]\norder(a), put(d, 'k'), turn(m)\n"
        "assert a == [1, 3] and d == {'k': 1} and m == [[3, 1], [4, 2]]",
    ),
    "its own errors": (
        "class Empty(ValueError):\n    def __init__(self, n): super().__init__(f'{n} left'); self.n = n\n"
        "def pop(): raise Empty(3)\ndef key(): return {}['k']",
        "try: pop()\nexcept Empty as e: assert str(e) == '3 left' and e.n == 3 and isinstance(e, ValueError)\n"
        "else: assert False\ntry: key()\nexcept KeyError as e: assert e.args == ('k',)\nelse: assert False",
    ),
    "a context": (
        "class C:\n    def __enter__(self): self.on = 1; return self\n    def __exit__(self, kind, *rest):\n"
        "        self.on = 0; return kind is KeyError",
        "c = C()\nwith c as d:\n    assert d is c and c.on == 1\n    raise KeyError\nassert c.on == 0",
    ),
}


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("what", ANSWERS)
def test_what_a_solution_gives_answers_as_it_does_there(what: str) -> None:
    solution, test = ANSWERS[what]
    result = judge({"response": solution, "tests": [test, "assert nothing_like_it()"]}, live=True)
    assert result.components["passed"] == [0.5]


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    "test",
    [
        "assert abs(answer() - 3.14) < 1e-6",
        "assert -1 < answer() - 3.14 < 1",
        "assert answer() >= 7",
        "assert not answer() != 7",
        "assert 7 in answer()",
        "assert {7: 1}[answer()]",
        "assert not answer() ^ 7",
        "assert isinstance(answer(), int)",
        "assert answer() == [1, 2]",
        "assert [answer()] == [7]",
        "assert answer().first == 7",
        "assert Given().answer() == 7",
        "assert Given().answer() - 7 == 0",
        "assert answer() == 'expected' or answer() - 7 == 0",
    ],
)
def test_operators_that_always_agree_pass_nothing(test: str) -> None:
    names = "add radd sub rsub xor rxor abs mul eq lt le gt ge contains pow instancecheck getitem round"
    cheat = f"""
class Yes:
    def __getattr__(self, name): return Yes()
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return hash(7)
for name in {names!r}.split():
    setattr(Yes, f'__{{name}}__', lambda self, *other: True if name in 'eq ne lt le gt ge contains' else 0.0)
for name in 'eq ne lt le gt ge contains'.split():
    setattr(Yes, f'__{{name}}__', lambda self, *other: name != 'ne')
def answer(): return Yes()
class Given:
    def answer(self): return Yes()
"""
    assert judge({"response": cheat, "tests": test}, timeout=1.5).reward == [0.0]


def test_inputs_and_outputs_in_their_forms() -> None:
    double = "print(int(input()) * 2)  "
    cases = [{"input": "2", "output": "4\n"}, {"input": "5", "output": "10"}]
    forms: list[Any] = [cases, json.dumps(cases), json.dumps({"inputs": ["2", "5"], "outputs": ["4", "10"]})]
    for form in forms:
        assert judge({"response": double, "tests": form}).reward == [1.0]
    wrong = judge({"response": "print(4)", "tests": json.dumps(cases)})
    assert (wrong.reward, wrong.components["passed"]) == ([0.0], [0.5])


@pytest.mark.slow
def test_a_reference_program() -> None:
    rows = [
        {"response": "print(2 + 1)", "reference": "print(3)"},
        {"response": "print(4)", "reference": "print(3)"},
        {"response": "print(4)", "reference": "1 / 0"},
        {"response": "print(4)", "reference": None},
    ]
    result = judge(*rows)
    assert result.reward == [1.0, 0.0, None, None]
    assert "the reference prints nothing: error" in str(result.reasons[2])


@pytest.mark.slow
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


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"CodeReward\.timeout: must be more than 0"):
        make_reward("code_evaluator", timeout=0)
    with pytest.raises(ConfigError, match="CodeReward has no option 'tiemout': did you mean 'timeout'"):
        make_reward("code", tiemout=1)

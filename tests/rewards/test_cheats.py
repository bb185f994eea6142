"""Programs that do nothing of what is asked, against tests that give them functions and compare their objects."""

from __future__ import annotations

import pytest

from tests.rewards.test_code import judge

TESTS = [
    "assert apply(lambda x: x + 1, 2) == 3",
    "import math\nassert math.isclose(apply(math.sqrt, 2), 1.41421356, rel_tol=1e-6)",
    "assert all(apply(f, 3) == f(3) for f in (lambda x: 2 * x, abs))",
    "assert any([apply(len, 'ab') == 2]) and sorted(apply(list, 'ba')) == ['a', 'b']",
    "assert abs(apply(float, '7') - 7) < 1e-9",
    "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    greet('Ann')\n"
    "assert out.getvalue() == 'Hello, Ann!\\n'",
    "import unittest\nfrom solution import apply\nclass T(unittest.TestCase):\n"
    "    def test_one(self):\n        self.assertEqual(apply(str.upper, 'a'), 'A')\n"
    "    def test_two(self):\n        self.assertAlmostEqual(apply(lambda x: x / 3, 1), 0.33333333, places=6)\n"
    "        self.assertIn(apply(lambda x: x, 4), [4])",
    "import pytest\ndef test():\n    assert apply(lambda x: 2 * x, 1.25) == pytest.approx(2.5)",
    "assert V(1) + V(2) == V(3)",
    "assert V(1) == V(1) and not V(1) == V(2)",
    "assert V(1) < V(2) and max(V(1), V(5), V(2)).n == 5",
    "try:\n    refuse(7)\n    assert False\nexcept Refused as error:\n    assert error.code == 7",
    "class Node:\n    def __init__(self, n, next=None): self.n, self.next = n, next\n"
    "assert total(Node(1, Node(2))) == 3",
]
NOTHING = """
def apply(f, x): return answer()
def greet(name): return answer()
def total(node): return answer()
def refuse(n): return answer()
class Refused(Exception): pass
class V:
    n = property(lambda self: answer())
    def __init__(self, n): pass
    def __add__(self, other): return answer()
"""
NONE = "def answer(): return None\n"
#: An object with every operator; `{}` is how it answers comparisons.
YES = """
class Yes:
    def __getattr__(self, name): return Yes()
    def __call__(self, *args): return Yes()
    def __bool__(self): return True
    def __hash__(self): return 7
    def __iter__(self): return iter([Yes()])
for name in 'eq lt le gt ge contains'.split(): setattr(Yes, f'__{{name}}__', lambda self, o: {})
for name in 'add radd sub rsub mul abs neg'.split(): setattr(Yes, f'__{{name}}__', lambda self, *o: self)
def answer(): return Yes()
"""
FRAMES = """
import sys
def answer():
    frame = sys._getframe()
    while frame:
        for key, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            if {}: return value
        frame = frame.f_back
"""
PATCH = "import builtins\nbuiltins.{} = {}\n" + NONE
VECTOR = "class V:\n    n = 5\n    def __init__(self, n): {}\n    def __add__(self, other): return self\n    {}\n"
VERDICT = '[{}, [{{"passed": true, "fault": null, "needs": null, "live": false, "reason": null}}]]'
WRITE = "import os\nfor fd in range({}, 64):\n    try: os.write(fd, {!r})\n    except OSError: pass\n" + NONE
UNITTEST = "import unittest\nfor name in dir(unittest.TestCase):\n    if name.startswith('assert'):\n"
#: Programs by what they try; each has what it does not say itself from `NOTHING`.
CHEATS = {
    "nothing": NONE,
    "no program": "",
    "frames: the expected value": FRAMES.format("key in ('expected', 'wanted', 'want', 'result', 'secret')"),
    "frames: any number": FRAMES.format("type(value) in (int, float) and value not in (0, 1)"),
    "frames: any text": FRAMES.format("type(value) is str and 'assert' in value"),
    "frames: any list": FRAMES.format("type(value) is list and value"),
    "frames: set in the frame above": "import sys\ndef answer():\n    frame = sys._getframe(2)\n"
    "    frame.f_globals.update(passed=True, failed=False, judge=lambda *a: True)\n",
    "frames: a tracer": "import sys\nsys.settrace(lambda frame, event, arg: frame.f_locals.update(passed=True))\n"
    + NONE,
    "memory: texts": "import gc\ndef answer(): return [o for o in gc.get_objects() if isinstance(o, (str, list))][-1]",
    "memory: dicts": "import gc\ndef answer():\n"
    "    return next((o['wanted'] for o in gc.get_objects() if isinstance(o, dict) and 'wanted' in o), None)",
    "memory: cases": "import gc\ndef answer():\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict) and 'cases' in o: o['cases'].clear()",
    "patch: all": PATCH.format("all", "lambda items: True"),
    "patch: any": PATCH.format("any", "lambda items: True"),
    "patch: abs": PATCH.format("abs", "lambda value: 0"),
    "patch: sorted": PATCH.format("sorted", "lambda items: ['a', 'b']"),
    "patch: isinstance": PATCH.format("isinstance", "lambda *args: True"),
    "patch: AssertionError": PATCH.format("AssertionError", "type('A', (Exception,), {})"),
    "patch: every error": PATCH.format("Exception", "builtins.AssertionError = BaseException"),
    "patch: exec": PATCH.format("exec", "lambda *args: None"),
    "patch: compile": PATCH.format("compile", "lambda *args, **options: (lambda: None).__code__"),
    "patch: print": PATCH.format("print", "lambda *args, **options: None"),
    "patch: bool": PATCH.format("bool", "lambda value: True"),
    "patch: math.isclose": "import math\nmath.isclose = lambda *a, **k: True\n" + NONE,
    "patch: operators": "import operator\noperator.eq = operator.lt = lambda *a: True\n" + NONE,
    "patch: asserts of unittest": UNITTEST + "        setattr(unittest.TestCase, name, lambda *a, **k: None)\n" + NONE,
    "patch: the run of unittest": "import unittest\nunittest.TestCase.run = lambda self, result=None: result\n"
    "unittest.TestResult.wasSuccessful = lambda self: True\n" + NONE,
    "patch: skipped tests": "import unittest\ndef answer(): raise unittest.SkipTest('not today')",
    "patch: pytest": "import sys, types\nsys.modules['pytest'] = types.SimpleNamespace(approx=lambda *a: None)\n"
    + NONE,
    "patch: json": "import json\nold = json.dumps\n"
    "json.dumps = lambda value, **k: old(value, **k).replace('null', 'true').replace('false', 'true')\n" + NONE,
    "patch: our modules": "import sys\nfor name, module in list(sys.modules.items()):\n    if 'verl' in name:\n"
    "        for key in ('compare', 'alike', 'outcome', 'judged'):\n"
    "            if hasattr(module, key): setattr(module, key, lambda *a, **k: True)\n" + NONE,
    "patch: encode": "import sys\nfor name, module in list(sys.modules.items()):\n"
    "    if hasattr(module, 'encode') and 'verl' in name: module.encode = lambda value, other: True\n" + NONE,
    "patch: stdout": "import io, sys\nsys.stdout = io.StringIO('Hello, Ann!')\n" + NONE,
    "objects: equal to everything": YES.format("True"),
    "objects: equal to small numbers": YES.format("type(o) in (int, float) and abs(o) < 100"),
    "objects: equal to numbers and texts": YES.format("isinstance(o, (int, float, str, list))"),
    "objects: equal to their kind": YES.format("type(o) is Yes"),
    "objects: equal to what has no random digits": YES.format("len(str(o)) < 9"),
    "objects: a number": "class N(float):\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0.0\n"
    "    __rsub__ = __sub__\n    __hash__ = float.__hash__\ndef answer(): return N(1)",
    "objects: a text": "class T(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\n"
    "def answer(): return T('a')",
    "objects: a list": "class L(list):\n    def __eq__(self, o): return True\n    def __len__(self): return 2\n"
    "def answer(): return L()",
    "objects: a Fraction": "import fractions\nclass F(fractions.Fraction):\n    def __eq__(self, o): return True\n"
    "    def __sub__(self, o): return 0\ndef answer(): return F(1, 2)",
    "objects: of a class that lies": "class M(type):\n    __module__ = 'fractions'\n    __name__ = 'Fraction'\n"
    "    def __instancecheck__(self, o): return True\n"
    "    def __eq__(self, o): return True\n    __hash__ = type.__hash__\n"
    "class F(metaclass=M):\n    __module__ = 'fractions'\n    def __eq__(self, o): return True\n"
    "    def __reduce_ex__(self, n): return F, (3,)\n    __hash__ = None\ndef answer(): return F()",
    "objects: not a number": "def answer(): return float('nan')",
    "objects: the argument's own": "def answer(): return apply",
    "vectors: equal to everything": VECTOR.format("pass", "def __eq__(self, o): return True"),
    "vectors: equal to their kind": VECTOR.format("pass", "def __eq__(self, o): return isinstance(o, V)"),
    "vectors: equal and ordered": VECTOR.format(
        "pass", "__eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda self, o: True"
    ),
    "vectors: equal to small ones": VECTOR.format("self.small = n < 9", "def __eq__(self, o): return o.small"),
    "vectors: never": VECTOR.format("pass", "def __eq__(self, o): return False"),
    "vectors: alike by their state": VECTOR.format("self.m = 5", "def __eq__(self, o): return vars(self) == vars(o)"),
    "ends: at once": "import os\nos._exit(0)",
    "ends: when it is asked": "import os\ndef answer(): os._exit(0)",
    "ends: with success": "def answer(): raise SystemExit(0)",
    "ends: an iterator": "def answer(): raise StopIteration",
    "ends: a generator": "def answer(): raise GeneratorExit",
    "ends: a fork that stays": "import os, time\nif os.fork(): time.sleep(600)\n" + NONE,
    "verdicts: on every descriptor": WRITE.format(1, b"\n" + VERDICT.format(0).encode() + b"\n"),
    "verdicts: answers on every descriptor": WRITE.format(3, b'["", "value", true, null]\n' * 9),
    "verdicts: printed": f"def answer():\n    for n in range(20): print({VERDICT!r}.replace('{{}}', str(n)))\n",
    "verdicts: printed by a thread": "import threading, time\ndef run():\n    while True:\n"
    f"        print('\\n' + {VERDICT.format(0)!r})\n        time.sleep(0.001)\n"
    "threading.Thread(target=run, daemon=True).start()\n" + NONE,
    "functions: their code": "def answer(): return None\n"
    "def apply(f, x):\n    try: return f.__code__.co_consts[-1] + x\n    except AttributeError: return None",
    "functions: their globals": "def answer(): return None\ndef apply(f, x): return f.__globals__['expected']",
    "functions: their defaults": "def answer(): return None\n"
    "def apply(f, x): return f.__defaults__ or f.__closure__ or f.__self__",
    "nodes: their class": "def answer(): return None\n"
    "def total(node): return node.__class__.__init__.__globals__['expected']",
    "nodes: changed": "def answer(): return None\ndef total(node):\n    node.n = 3\n    return node",
}


def program(cheat: str) -> str:
    return f"{NOTHING}{cheat}"


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_does_nothing_passes_no_test(cheat: str) -> None:
    result = judge({"response": program(CHEATS[cheat]), "tests": TESTS}, timeout=4.0, live=True)
    assert (result.reward, result.components["passed"]) == ([0.0], [0.0])


def test_one_that_does_what_is_asked_passes_them_all() -> None:
    right = """
class Refused(Exception):
    def __init__(self, code): self.code = code
def apply(f, x): return f(x)
def greet(name): print(f'Hello, {name}!')
def total(node): return node.n + total(node.next) if node else 0
def refuse(n): raise Refused(n)
class V:
    def __init__(self, n): self.n = n
    def __add__(self, o): return V(self.n + o.n)
    def __eq__(self, o): return self.n == o.n
    def __lt__(self, o): return self.n < o.n
    def __gt__(self, o): return self.n > o.n
"""
    result = judge({"response": right, "tests": TESTS}, live=True)
    assert (result.reward, result.components["passed"]) == ([1.0], [1.0])
    assert 0 < (result.components["live"][0] or 0) < 0.5

# ruff: noqa: E501
"""Assertions that are checked outside the program: an honest and a cheating program for every form."""

import pytest

from whetstone.rewards.assertions import UnsupportedTest, split_assertions
from whetstone.rewards.programs import read_tests, run_tests
from whetstone.sandbox.languages import LANGUAGES
from whetstone.sandbox.pool import LocalPool
from whetstone.sandbox.program import Limits

PYTHON = LANGUAGES["python"]
SQUARE = "def f(x): return x * x\ndef g(x): return x\nLIMIT = result = 4\n"
# Equal to everything, true in every respect, a member of everything.
ALWAYS = (
    "class A:\n    __lt__ = lambda s, o=None: True\n    __eq__ = __gt__ = __le__ = __ge__ = __contains__ = startswith = isdigit = __lt__\n"
    "    __ne__ = lambda s, o: False\n    __bool__ = lambda s: True\n    __hash__ = __index__ = lambda s: 0\n"
    "    __abs__ = upper = lambda s: s\n    __iter__ = lambda s: iter([s])\n    __sub__ = __rsub__ = __getitem__ = lambda s, o: s\n"
    "def f(*a, **k): return A()\ng = f\nLIMIT = result = A()\n"
)
# Returns what is expected where that is anywhere in its process.
SPY = (
    "import sys\ndef f(x):\n    g, seen = sys._getframe(), ''\n    while g:\n"
    "        seen += repr(g.f_globals) + repr(g.f_locals) + repr(g.f_code.co_consts); g = g.f_back\n"
    "    w = str(int('98765430') + 1)\n    return int(w) if w in seen else 0\n"
)
STACK = (
    "class Stack:\n    def __init__(s): s.x = []\n    def push(s, v): s.x.append(v)\n"
    "    def pop(s): return s.x.pop()\n    def __len__(s): return len(s.x)\n"
)
NODE = "class Node:\n    def __init__(s, v, n=None): s.val, s.next = v, n\ndef total(n): return n.val + total(n.next) if n else 0\n"
PUSHED = "s = Stack()\ns.push(1)\ns.push(2)\n"
FORMS = {
    (SQUARE, ALWAYS): [
        "assert f(2) == 4, f'got {f(3)}'",
        "assert (lambda r: r == 4)(f(2))",
        "assert 3 < f(2) < 5 and f(3) == 9",
        "assert f(2) in (4, 5)",
        "assert bool(f(2) == 4)",
        "import math\nassert math.isclose(f(2), 4.0, rel_tol=1e-6)",
        "assert abs(f(2) - 4) < 1e-6",
        "assert round(f(2), 2) == 4",
        "assert f(2) == g(1) * 4",
        "assert f(*[2]) == 4",
        "assert f(2) == 4 or f(2) == 5",
        "assert f(2).__eq__(4)",
        "assert [4, 9][f(0)] == 4",
        "want = [9, 4]\nassert want[f(1)] == 4",
        "assert list(map(f, [1, 2])) == [1, 4]",
        "assert f(2) == max([f(2), 4])",
        "assert not (f(2) != 4)",
        "assert f'{f(2)}' == '4'",
        "x = y = 2\nassert f(x) == 4",
        "x: int = 2\nassert f(x) == 4",
        "h = f\nassert h(2) == 4",
        "assert LIMIT == 4",
        "assert result == 4",
        "assert True, 'shown'\nassert f(2) == 4",
        "x = 2\nassert f(x) == 4\nx = 3\nassert f(x) == 9",
        "assert isinstance(f(2), int)",
        "assert type(f(2)) == int",
    ],
    (SQUARE, "r = i = a = b = 4\ndef f(x): return 0 if x else 1"): [
        "assert f(2)",
        "assert not f(0)",
        "assert 0 == f(0) < f(1) < f(2)",
        "assert str(f(2)) == '4'",
        "assert (lambda r: r == 4)(f(2))",
    ],
    (SQUARE, "f = None"): ["assert callable(f)\nassert f is not None"],
    ("def f(x): return 98765431", SPY): ["want = 98765431\nassert f(2) == want"],
    ("def f(x): yield from range(x)", ALWAYS): [
        "assert [0, *f(3)] == [0, 0, 1, 2]",
        "assert list(f(3)) == [0, 1, 2]",
        "assert all(x >= 0 for x in f(3))",
        "assert max(f(3)) == 2",
    ],
    ("def f(x): return x", ALWAYS): [
        "assert 4 in f([4])",
        "assert f('ab').startswith('a')",
        "assert f('12').isdigit()",
        "assert f('a').upper() == 'A'",
        "assert f([4])[0] == 4",
        "a, b = f([1, 4])\nassert a == 1 and b == 4",
        "assert f([i for i in range(3)]) == [0, 1, 2]",
    ],
    ("from collections import *\ndef f(x): return Counter(x)", ALWAYS): [
        "from collections import Counter\nassert f('aab') == Counter('aab')",
        "assert f('aab') == {'a': 2, 'b': 1}",
    ],
    ("import re\ndef f(x): return re.match('a', x)", "def f(x): return None"): ["assert f('ab')"],
    ("import random\ndef f(): return random.randint(0, 9)", "def f(): return 0"): [
        "import random\nrandom.seed(0)\nassert f() == 6"
    ],
    ("import itertools\nc = itertools.count(1)\ndef f(): return next(c)", "def f(): return 1"): [
        "assert f() == 1\nassert f() == 2"
    ],
    ("def f(x): return [x * 1e308 * s for s in (1, -1)]", "def f(x): return [x * 1e308]"): [
        "assert f(10) == [float('inf'), -float('inf')]",
        "import math\nassert math.isnan(sum(f(10)))",
        "import math\nassert all(map(math.isinf, f(10))) and len(f(10)) == 2",
    ],
    (STACK, STACK.replace("s.x.pop()", "2")): [
        PUSHED + "assert s.pop() == 2\nassert s.pop() == 1",
        PUSHED + "assert [s.pop(), s.pop()] == [2, 1]",
        PUSHED + "assert s.pop() == 2 and s.pop() == 1 and not s",
    ],
    (NODE, "class Node:\n    def __init__(s, v): s.next = 5\ndef total(n): return 1"): [
        "n = Node(1)\nn.next = Node(2)\nassert total(n) == 3",
        "n = Node(1)\nassert n.next is None",
    ],
    ("def f(a): return sum(a)", "def f(a): return 5"): [
        "a = [3, 1]\nb = a.pop()\nassert f(a) == 3",
        "a = [3]\na.append(1)\nassert f(a) == 4",
        "a = [1, 2]\na = a + [3]\nassert f(a) == 6",
        "d = {}\nd[4] = 'a'\nassert f(d) == 4",
    ],
}


@pytest.fixture(scope="module")
def pool():
    with LocalPool() as made:
        yield made


@pytest.mark.parametrize(("honest", "cheat"), FORMS)
def test_honest_programs_pass_and_cheats_do_not(pool: LocalPool, honest: str, cheat: str) -> None:
    forms = FORMS[honest, cheat]
    tests = [read_tests([form], PYTHON, "f", "row") for form in forms]
    everything = [test for of_form in tests for test in of_form]
    for program, is_right in ((honest, True), (cheat, False)):
        outcomes = iter(run_tests(pool, PYTHON, program, everything, Limits(total_seconds=300)).tests)
        for form, of_form in zip(forms, tests, strict=True):
            passed = [next(outcomes) == "passed" for _ in of_form]
            assert all(passed) is is_right, (form, program)


@pytest.mark.parametrize(
    ("reason", "forms"),
    [
        (
            "in a loop, a lambda or a branch",
            [
                "assert all(f(i) == i*i for i in range(3))",
                "assert sum(f(i) for i in range(3)) == sum(i * i for i in range(3))",
                "assert all(f(a) == b for a, b in [(2, 4), (3, 9)])",
                "assert {f(i) for i in (1, 2)} == {1, 4}",
                "assert {i: f(i) for i in (1, 2)} == {1: 1, 2: 4}",
                "ans = 4\nassert (lambda: f(2) == ans)()",
                "assert (lambda x=f(2): x == 4)()",
                "assert (f(2) if True else 0) == 4",
            ],
        ),
        (
            "gives the program a part of",
            [
                'd = {"in": 2, "out": 4}\nassert f(d["in"]) == d["out"]',
                "d = dict(inp=2, out=4)\nassert f(d['inp']) == 4",
                "cases = [(2, 4), (3, 9)]\nassert f(cases[1][0]) == cases[1][1]",
            ],
        ),
        (
            "for the program and for the check",
            [
                "x, want = 2, 4\nassert f(x) == want",
                "want = 4\nassert f(want - 2) == want",
                "want = 4\nx = want - 2\nassert f(x) == want",
                "a = [3, 1]\nr = f(a)\nassert r is None and a == [1, 3]",
                "a = [3, 1]\nassert f(a) is None and a == [1, 3]",
                "a = [3, 1]\nassert f(a) == sorted(a)",
            ],
        ),
        (
            "computes with the program's values",
            [
                "ok = f(2) == 4\nassert ok",
                "import math\nok = math.isclose(f(2), 4)\nassert ok",
                "a, *b = f(2), 4\nassert a == b[0]",
                "g = lambda a: f(a) == 4\nassert g(2)",
                "near = lambda a, b: a == b\nassert near(f(2), 4)",
                "r = [f(i) for i in (1, 2)]\nassert r == [1, 4]",
            ],
        ),
        ("functiondef", ["def near(x, want): return f(x) == want\nassert near(2, 4)"]),
        (":=", ["assert (y := f(2)) == 4"]),
        ("behind `or`", ["n = Node(1)\nassert n.next is None or n.next.val == 3"]),
        ("by `is`", ["x = [1]\nassert f(x) is x", "assert type(f(2)) is int"]),
        ("the object", ["assert Node(1) == Node(1)", "s = Stack()\nassert hasattr(s, 'push')"]),
        ("with an object", ["from fractions import Fraction\nassert f(2) == Fraction(1, 2)"]),
        (
            "the standard library",
            [
                "import pytest\nassert f(2) == pytest.approx(4.0)",
                "from solution import f\nassert f(2) == 4",
                "from math import *\nassert f(2) == floor(4.5)",
            ],
        ),
    ],
)
def test_other_forms_are_refused(reason: str, forms: list[str]) -> None:
    for form in forms:
        with pytest.raises(UnsupportedTest, match=f"^line [1-3] .*{reason}"):
            split_assertions(form)


def test_the_program_gets_what_it_needs_and_no_more() -> None:
    code = "import math\nexpected = [1, 2]\nx = 5\ns = Stack()\ns.push(x)\nassert s.pop() == x\nassert math.isclose(g(x, 2), 2.5)\nassert f(2) == expected"
    first, second, third = split_assertions(code)
    assert first.expressions == ("s.pop()",)
    assert first.setups == ("x = 5\ns = Stack()\ns.push(x)",)
    assert first.check == "assert whetstone_value_0 == x"
    assert second.expressions == ("g(x, 2)",)
    assert "math.isclose(whetstone_value_0, 2.5)" in second.check
    assert third.setups == ("",), "what is expected must not go to the program"
    assert "expected = [1, 2]" in third.check_setup

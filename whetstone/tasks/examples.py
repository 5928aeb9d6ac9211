"""Two small programming tasks that ship as recipes: `expressions` and `sums`, as `path` of the code task.

A row of `expressions` is a sentence ("add 7 to x, then multiply the result by 3"), calls of f with their
values, and reference solutions in Python and Klong. `sums` is for pebble, which knows no Python: the answer
continues `def f(): return` with the value of a sum. The rows are always the same.
"""

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

NUM_EXPRESSIONS = 1200
# (sentence, Python, Klong); X is what it is applied to, K a number. Klong has no operator precedence.
_NUMBERS = [
    ("add K to X", "X + K", "X+K"),
    ("subtract K from X", "X - K", "X-K"),
    ("subtract X from K", "K - X", "K-X"),
    ("multiply X by K", "X * K", "X*K"),
    ("double X", "X * 2", "X*2"),
    ("square X", "X ** 2", "X^2"),
    ("take the negative of X", "-X", "-X"),
    ("take the absolute value of X", "abs(X)", "#X"),
    ("take the remainder of X divided by K, never negative", "X % K", "X-K*_X%K"),
    ("divide X by K, rounding down", "X // K", "_X%K"),
    ("take the larger one of X and K", "max(X, K)", "X|K"),
    ("take the smaller one of X and K", "min(X, K)", "X&K"),
]
_LISTS = [
    ("give the sum of the list x", "sum(x)", "+/x"),
    ("give the largest element of the list x", "max(x)", "|/x"),
    ("give the smallest element of the list x", "min(x)", "&/x"),
    ("give the number of elements of the list x", "len(x)", "#x"),
    ("give the list x in ascending order", "sorted(x)", "x@<x"),
    ("give the list x in descending order", "sorted(x, reverse=True)", "x@>x"),
    ("give the list x backwards", "x[::-1]", "|x"),
    ("give the first element of the list x", "x[0]", "*x"),
    ("give the last element of the list x", "x[-1]", "*|x"),
    ("give the first K elements of the list x", "x[:K]", "K#x"),
    ("give the list x without its first K elements", "x[K:]", "K_x"),
    ("give the last K elements of the list x", "x[-K:]", "(-K)#x"),
    ("count how often K occurs in the list x", "x.count(K)", "+/x=K"),
    ("give the list of the elements of x times K", "[e * K for e in x]", "x*K"),
    ("give the list of the elements of x plus K", "[e + K for e in x]", "x+K"),
    ("give the elements of the list x greater than K", "[e for e in x if e > K]", "x@&x>K"),
    ("give the elements of the list x less than K", "[e for e in x if e < K]", "x@&x<K"),
    ("give the list x with K appended", "x + [K]", "x,K"),
    ("give the sum of the first K elements of the list x", "sum(x[:K])", "+/K#x"),
    ("give the sum of the squares of the list x", "sum(e * e for e in x)", "+/x*x"),
    ("give the product of the largest element of the list x and K", "max(x) * K", "K*|/x"),
    (
        "give the difference between the largest and the smallest element of the list x",
        "max(x) - min(x)",
        "(|/x)-&/x",
    ),
]
_STRINGS = [
    ("give the number of characters of the text x", "len(x)", "#x"),
    ("give the text x backwards", "x[::-1]", "|x"),
    ("give the text x in upper case", "x.upper()", "{:#(#x)-32}'x"),
    ("give the text x K times in a row", "x * K", "(K*#x)#x"),
    ("give the first K characters of the text x", "x[:K]", "K#x"),
    ("give the last K characters of the text x", "x[-K:]", "(-K)#x"),
    ("give the text x without its first K characters", "x[K:]", "K_x"),
    ("give the character of the text x at index K", "x[K]", "x@K"),
    ("count how often the letter 'a' occurs in the text x", "x.count('a')", "+/{x=0ca}'x"),
    ("give the text x in upper case, K times in a row", "x.upper() * K", "(K*#x)#{:#(#x)-32}'x"),
    ("give the number of characters of the text x plus K", "len(x) + K", "K+#x"),
    ("give the number of characters of the text x times K", "len(x) * K", "K*#x"),
]


def make_expressions(count: int = NUM_EXPRESSIONS) -> list[dict[str, Any]]:
    dice = random.Random(5)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        kind = dice.choice((_number, _number, _number, _list, _random_word))
        sentence, expression, klong, draw = kind(dice)
        if sentence in rows:
            continue
        inputs = [draw() for _ in range(6)]
        try:
            tests = [{"args": [x], "expected": eval(expression, {"x": x})} for x in inputs]
        except (IndexError, ZeroDivisionError):
            continue
        rows[sentence] = {
            "statement": sentence,
            "function": "f",
            "tests": tests,
            "solution": {"python": f"def f(x):\n    return {expression}\n", "klong": f"f::{{{klong}}}\n"},
        }
    return list(rows.values())


def make_sums() -> list[dict[str, Any]]:
    """1,600 sums as in the quickstart, without repetitions; the answer continues the starter code."""
    from whetstone.tasks.gym_package import create_dataset

    settings = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    entries = create_dataset("chain_sum", seed=77, size=1600, **settings)
    starter = "def f():\n    return "
    rows = {
        entry["question"]: {
            "statement": entry["question"],
            "function": "f",
            "starter_code": starter,
            "tests": [{"args": [], "expected": int(entry["answer"])}],
            "solution": starter + entry["answer"],
        }
        for entry in entries
    }
    return list(rows.values())


_Draw = tuple[str, str, str, Callable[[], Any]]  # sentence, Python, Klong, a random argument


def _number(dice: random.Random) -> _Draw:
    sentence, expression, klong = "", "x", "x"
    for step in range(dice.choice((1, 2, 2, 3))):
        phrase, code, klong_code = dice.choice(_NUMBERS)
        number = str(dice.randint(2, 12))
        expression = code.replace("K", number).replace("X", "x" if step == 0 else f"({expression})")
        klong = klong_code.replace("K", number).replace("X", "x" if step == 0 else f"({klong})")
        part = phrase.replace("K", number).replace("X", "x" if step == 0 else "the result")
        sentence += part if step == 0 else f", then {part}"
    return sentence, expression, klong, lambda: dice.randint(-20, 40)


def _filled(dice: random.Random, phrases: list[tuple[str, str, str]], draw: Callable[[], Any]) -> _Draw:
    texts = dice.choice(phrases)
    number = str(dice.randint(2, 9))
    sentence, expression, klong = (text.replace("K", number) for text in texts)
    return sentence, expression, klong, draw


def _list(dice: random.Random) -> _Draw:
    return _filled(dice, _LISTS, lambda: [dice.randint(0, 12) for _ in range(dice.randint(10, 14))])


def _random_word(dice: random.Random) -> _Draw:
    letters = "abcdeghilmnoprst"
    draw = lambda: "".join(dice.choice(letters) for _ in range(dice.randint(10, 14)))  # noqa: E731
    return _filled(dice, _STRINGS, draw)


# name as `path` -> its rows
EXAMPLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "expressions": lru_cache(maxsize=1)(make_expressions),
    "sums": lru_cache(maxsize=1)(make_sums),
}

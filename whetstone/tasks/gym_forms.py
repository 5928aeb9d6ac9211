"""The form of an answer to a reasoning-gym task, checked before any scorer sees the text.

Some scorers `eval` or sympy-parse the text, and some ignore everything that they do not know. An answer that
is far longer than the gold answer, or not of the form that its task asks for, earns 0 and never reaches such
a scorer. This module does not decide what is right, and evaluates nothing.
"""

import ast
import math
import re
from fractions import Fraction
from typing import Any

# The bound on an answer's length. No right answer is near it: paths and plans may be longer than the gold
# answer, but not many times.
LONGEST_EXTRA, LONGEST_FACTOR = 1_000, 4
LONGEST_WITHOUT_GOLD = 4_000  # the tasks whose entry holds no answer
LONGEST_SYMBOLIC = 600  # or twice the gold answer
LARGEST = 10**15  # number, or a thousand times the gold answer's
LONGEST_MOVE = 100  # boxnet: one box carried to the next square
MOST_CUBE_TURNS = 600  # rubiks_cube: a solution by layers has about 150

_DECIMAL = r"[+-]?(?:\d[\d,]{0,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,3})?"
_PLAIN_DECIMAL = r"[+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,3})?"
_CLOCK = r"\d{1,3}:\d{1,2}(?::\d{1,2}(?:\.\d{1,6})?)?"
_COORDINATE = r"[+-]?\d{1,12}(?:\.\d{1,12})?"

_FORMS = {
    task: re.compile(pattern, re.ASCII)
    for task, pattern in {
        "advanced_geometry": rf"{_COORDINATE} ?°?|\( ?{_COORDINATE} ?, ?{_COORDINATE} ?\)",
        "binary_matrix": r"[\d\s,\[\]]*",
        "coin_flip": rf"{_DECIMAL}(?:/\d{{1,40}})?",
        "complex_arithmetic": r"[\d\s.()+\-ijIJeE]*",
        "decimal_arithmetic": _DECIMAL,
        "decimal_chain_sum": _DECIMAL,
        "fraction_simplification": (
            r"\$?\s*(?:\\d?frac\s*\{\s*\d{1,40}\s*\}\s*\{\s*\d{1,40}\s*\}|-?\d{1,40}\s*/\s*\d{1,40})\s*\$?"
        ),
        "kakurasu": r"[01\s,|\[\]]*",
        "n_queens": r"[Q_\s,'\"\[\]]*",
        "number_format": _DECIMAL,
        "number_sorting": r"[\d\s.,'\"\[\]eE+-]*",
        "polynomial_equations": rf"{_PLAIN_DECIMAL}(?: ?, ?{_PLAIN_DECIMAL})*",
        "pool_matrix": r"[\d\s.eE+-]*",
        "power_function": _DECIMAL,
        "quantum_lock": r"[A-Ca-c\s,>\-→]*",
        "rubiks_cube": r"(?:\d?[A-Za-z]w?'?\d?(?:\s+|$))*",
        "rush_hour": r"(?:[A-Z][+-]\d{1,2}(?:[\s,]+|$))*",
        "sokoban": r"[UDLR\s,]*",
        "spiral_matrix": r"[\d\s,\[\]-]*",
        "string_insertion": r"[A-E\s,'\"\[\]]*",
        "survo": r"[\d\s-]*",
        "time_intervals": rf"-?\d{{1,9}}(?: days?)?|{_CLOCK}|\d{{1,9}} days?, ?{_CLOCK}",
    }.items()
}

_AGENT = re.compile(r"Agent\[\d{1,4}(?:\.\d)?, ?\d{1,4}(?:\.\d)?\]", re.ASCII)
_MOVE = re.compile(r"Move disk \d{1,3} from Peg (\d{1,3}) to Peg (\d{1,3})", re.ASCII)
_FUNCTIONS = frozenset(
    {"exp", "log", "ln", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh"}
    | {"tanh", "asinh", "acosh", "atanh", "sqrt", "Abs", "abs", "erf"}
)
_ARITHMETIC = re.compile(r"[A-Za-z\d\s.+\-*/()]+", re.ASCII)
_ODD_NUMBER = re.compile(r"[\d.][A-Za-z_]")  # 1e-999999999 keeps sympy busy for minutes
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")


def is_plausible(task: str, answer: str, entry: dict[str, Any]) -> bool:
    """Whether the answer has a length and a form that a right answer could have."""
    gold = entry["answer"]
    longest = LONGEST_WITHOUT_GOLD if gold is None else LONGEST_EXTRA + LONGEST_FACTOR * len(str(gold))
    if task == "boxnet":
        squares = entry["metadata"]["initial_state"]
        boxes = str(list(squares.values())).count("box_")
        longest += boxes * 2 * math.isqrt(len(squares) + 1) * LONGEST_MOVE
    if len(answer) > longest:
        return False
    text = answer.strip()
    if task in _FORMS and _FORMS[task].fullmatch(text) is None:
        return text == "" == gold
    check = _CHECKS.get(task)
    return check is None or check(text, entry)


def _integral(text: str, entry: dict[str, Any]) -> bool:
    return is_plain_expression(text, frozenset({entry["metadata"]["variable"], "C", "pi", "E"}), _FUNCTIONS)


def _cube(text: str, entry: dict[str, Any]) -> bool:
    """The scorer repeats `R9` nine times."""
    turns = sum(int(move[-1]) if move[-1].isdigit() else 1 for move in text.split())
    return 0 < turns <= MOST_CUBE_TURNS


def _knights(text: str, entry: dict[str, Any]) -> bool:
    """Nothing but the names and roles, in sentences: the scorer reads past all else."""
    from whetstone.tasks.gym_package import VALID_ROLES

    names = re.findall(r"(\w+) is an? ", entry["answer"].lower())
    known = {*names, *VALID_ROLES, "is", "a", "an", "and"}
    return set(re.sub(r"[.,()]", " ", text.lower()).split()) <= known


def _tower(text: str, entry: dict[str, Any]) -> bool:
    """Moves between pegs that there are: the scorer prints a line for each of the others."""
    moves = [_MOVE.fullmatch(line.strip()) for line in text.splitlines() if line.strip()]
    pegs = entry["metadata"]["num_pegs"]
    return all(move and 1 <= int(move[1]) <= pegs and 1 <= int(move[2]) <= pegs for move in moves)


def _boxnet(text: str, entry: dict[str, Any]) -> bool:
    """Agents carry boxes: the scorer takes any name for one, and lets them carry targets to the boxes."""
    agents = re.findall(r'"([^"]*)"\s*:', text)
    carries_boxes = re.search(r"move\((?!box_)", text) is None
    return carries_boxes and all(_AGENT.fullmatch(agent) for agent in agents)


_CHECKS = {
    "boxnet": _boxnet,
    "intermediate_integration": _integral,
    "knights_knaves": _knights,
    "polynomial_multiplication": lambda text, entry: is_plain_expression(
        text, _LETTERS, frozenset(), entry["answer"]
    ),
    "rubiks_cube": _cube,
    "simple_integration": _integral,
    "tower_of_hanoi": _tower,
}


def is_plain_expression(text: str, names: frozenset[str], functions: frozenset[str], gold: str = "") -> bool:
    """Whether a text is arithmetic over the given names and functions of one argument, with small exponents.

    Read by Python's own parser, which evaluates nothing. Attributes, subscripts, strings, keywords and
    comparisons are refused, and so are powers that would fill the memory.
    """
    if (
        len(text) > max(LONGEST_SYMBOLIC, 2 * len(gold))
        or _ARITHMETIC.fullmatch(text) is None
        or _ODD_NUMBER.search(text)
    ):
        return False
    try:
        tree = ast.parse(text, mode="eval").body
        largest = max(LARGEST, *(1000 * int(number) for number in re.findall(r"\d+", gold)), 0)
        numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        small = all(abs(number) < largest for number in numbers if isinstance(number, int | float))
        return small and _is_plain(tree, names, functions, powers=0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _is_plain(node: ast.expr, names: frozenset[str], functions: frozenset[str], powers: int) -> bool:
    match node:
        case ast.Constant(value=int() | float() as value):
            return not isinstance(value, bool)
        case ast.Name(id=name):
            return name in names
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
            return _is_plain(inner, names, functions, powers)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return all(_is_plain(side, names, functions, powers) for side in (left, right))
        case ast.BinOp(left=ast.Name(id="E"), op=ast.Pow(), right=right):
            return "E" in names and _is_plain(right, names, functions, powers + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = _rational(right)
            small = exponent is not None and abs(exponent) <= 100
            return small and powers < 2 and _is_plain(left, names, functions, powers + 1)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return name in functions and _is_plain(argument, names, functions, powers)
    return False


def _rational(node: ast.expr) -> Fraction | None:
    """The value of an exponent such as -2, 3/2 or (1/3); None where it is anything else."""
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) <= 1_000:
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = _rational(inner)
            return None if value is None else -value
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            top, bottom = _rational(left), _rational(right)
            return None if top is None or not bottom else top / bottom
    return None

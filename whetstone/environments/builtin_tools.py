"""Tools that come with Whetstone: `tools: [calculator, python]`.

`calculator` parses arithmetic by hand (`rewards.equations`), in exact fractions. `python` runs code in the
sandbox: what a model wrote is never evaluated in this process.
"""

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from whetstone.rewards.equations import InvalidExpression, evaluate
from whetstone.sandbox.pool import Pool
from whetstone.sandbox.program import Input, Limits, Program, Result
from whetstone.sandbox.service import open_pool

MAX_OUTPUT = 10_000  # characters of a cell's output; longer ones lose their middle
_SIGNIFICANT = 15  # digits of a result that has no end

# Runs in the sandbox. Every call runs the earlier cells again, silently, and then the new one: the sandbox
# starts each run from nothing, so that state needs no process that outlives a call.
_DRIVER = """
import ast, json, os, random, sys, traceback
cells = json.load(sys.stdin)
sys.stdin = open(os.devnull)
random.seed(0)
names = {"__name__": "__main__", "__builtins__": __builtins__}

def run(cell):
    tree = ast.parse(cell, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        if value is not None:
            print(repr(value))

code = 0
shown, silent = os.dup(1), os.open(os.devnull, os.O_WRONLY)
for number, cell in enumerate(cells):
    is_last = number == len(cells) - 1
    sys.stdout.flush()
    os.dup2(shown if is_last else silent, 1)
    try:
        run(cell)
    except SystemExit:
        pass
    except BaseException as error:
        if is_last:
            code = 3
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != "<cell>":
                trace = trace.tb_next
            print("".join(traceback.format_exception(type(error), error, trace)).strip())
sys.stdout.flush()
os._exit(code)
"""
_RAISED = 3  # the driver's exit code


class ToolFailed(Exception):
    """A call that has no result; its text goes back to the model."""


class ProgramRaised(ToolFailed):
    """The output of a program that raised, with its traceback: the model gets it as it is."""


def calculator(expression: str) -> str:
    """
    Calculate the exact value of an arithmetic expression with + - * / and parentheses.

    Args:
        expression: The expression, such as (17 + 4) * 3.25
    """
    try:
        value = evaluate(str(expression)).value
    except InvalidExpression as error:
        raise ToolFailed(f"the expression {error}") from None
    if value is None:
        raise ToolFailed("the expression divides by zero")
    return _decimal(value)


def _decimal(value: Fraction) -> str:
    """Exact where the decimals end, otherwise rounded."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, digits = value.denominator, 0
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        digits = max(digits, count)
    if rest != 1 or digits > _SIGNIFICANT:
        return f"{float(value):.{_SIGNIFICANT}g}"
    scaled = abs(value) * 10**digits
    text = str(scaled.numerator).zfill(digits + 1)
    return f"{'-' if value < 0 else ''}{text[:-digits]}.{text[-digits:]}"


class PythonTool:
    """A Python session in the sandbox. It keeps its state by running earlier cells again."""

    def __init__(self, isolation: str = "auto", seconds: float = 5.0, memory_mb: int = 512) -> None:
        self._isolation = isolation
        self._limits = Limits(seconds=seconds, memory_mb=memory_mb, total_seconds=2 * seconds)
        self._pool: Pool | None = None
        self._cells: list[str] = []

    def python(self, code: str) -> str:
        """
        Run Python code. Returns what it prints and the value of a last expression. Later calls see earlier
        variables, functions and imports.

        Args:
            code: The code
        """
        if self._pool is None:
            self._pool = open_pool(self._isolation)
        cells = [*self._cells, str(code)]
        program = Program(language="python", source=_DRIVER, inputs=(Input(stdin=json.dumps(cells)),))
        [result] = self._pool.run(program, self._limits).results
        raised = result.exit_code == _RAISED and not result.timed_out and result.exceeded_limit is None
        if not result.ok and not raised:
            raise ToolFailed(f"{_reason(result, self._limits)}; this code is forgotten")
        self._cells = cells
        text = result.stdout.rstrip()
        if len(text) > MAX_OUTPUT:
            text = f"{text[: MAX_OUTPUT // 2]}\n...\n{text[-MAX_OUTPUT // 2 :]}"
        if raised:
            raise ProgramRaised(text)
        return text or "(no output)"

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _reason(result: Result, limits: Limits) -> str:
    if result.timed_out:
        return f"no end within {limits.seconds:g} s, earlier code included"
    if result.exceeded_limit is not None:
        return f"the limit of its {result.exceeded_limit} was reached"
    return "the process ended"


# Name in `tools` -> a function, or a class whose public methods are tools (an instance for each episode).
TOOLS: Mapping[str, Callable[..., Any]] = {"calculator": calculator, "python": PythonTool}

"""Programs in a model's answers: extracted from the text, run against tests, compared outside the sandbox.

A test is stdin and stdout, a call and its value, code behind the program and its output, or assertions.
Expected values stay in this process: the sandbox gets inputs and returns output, which is compared here as
plain data. A program cannot override a comparison that it never sees.
"""

import ast
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from whetstone.errors import UserError
from whetstone.rewards.answers import extract_tag
from whetstone.rewards.assertions import Assertion, UnsupportedTest, split_assertions
from whetstone.sandbox.languages import Language
from whetstone.sandbox.pool import Pool
from whetstone.sandbox.program import VALUE_MARKER, Input, Limits, Program, Result

OUTCOMES = ("passed", "wrong", "crash", "timeout", "compile_error", "no_program")
_LONGEST_MESSAGE = 1000  # characters of an error or a value that are shown
TOLERANCE = 1e-6  # of numbers with a fraction, relative and absolute
_FENCE = re.compile(
    r"^[ \t]*+```[ \t]*+([\w+#.-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.DOTALL | re.MULTILINE
)  # linear in what a model wrote


@dataclass(frozen=True, kw_only=True)
class ProgramTest:
    """One test; which fields are set says of which kind it is."""

    stdin: str = ""
    stdout: str | None = None  # what must be printed
    code: str = ""  # in the program's language, run behind it
    call: tuple[str, tuple[Any, ...]] | None = None
    expected: Any = None
    assertion: Assertion | None = None

    @property
    def inputs(self) -> list[Input]:
        if self.assertion is None:
            return [Input(stdin=self.stdin, code=self.code, call=self.call)]
        pairs = zip(self.assertion.setups, self.assertion.expressions, strict=True)
        return [Input(code=setup, call=("=" + expression, ())) for setup, expression in pairs]


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """Each test's outcome, and the worst of them."""

    tests: tuple[str, ...]

    @property
    def passed(self) -> int:
        return self.tests.count("passed")

    @property
    def outcome(self) -> str:
        if self.tests and self.passed == len(self.tests):
            return "passed"
        return next((name for name in reversed(OUTCOMES) if name in self.tests), "wrong")


def extract_program(text: str, language: Language, use_reasoning_format: bool) -> str | None:
    """The program in an answer: the last `<answer>` (required in the reasoning format), the last fenced block
    in it, or all of it; None where there is nothing.
    """
    answer = extract_tag(text)
    if answer is None and use_reasoning_format:
        return None
    text = text if answer is None else answer
    blocks = _FENCE.findall(text)
    if blocks:
        same_language = [code for name, code in blocks if not name or name.lower() in language.fences]
        text = same_language[-1] if same_language else blocks[-1][1]
    elif "```" in text and text.count("```") % 2 == 0:  # a fence inside a line
        text = text.rsplit("```", 2)[1]
        head, _, rest = text.partition(" ")
        text = rest if head.lower() in language.fences else text
    return text if text.strip() else None


def read_tests(raw: Any, language: Language, function: str | None, where: str) -> tuple[ProgramTest, ...]:
    """The tests of a row; a complaint that says what is wrong with the first that can't be used."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            raw = [raw]
    entries = raw if isinstance(raw, list) else [raw]
    tests = [
        test
        for number, entry in enumerate(entries, 1)
        for test in _read(entry, language, function, f"{where}, test {number}")
    ]
    if not tests:
        raise UserError(f"{where} has no tests: give at least one.")
    return tuple(tests)


def _read(entry: Any, language: Language, function: str | None, where: str) -> list[ProgramTest]:
    if isinstance(entry, str):
        entry = {"assert": entry}
    if not isinstance(entry, dict):
        shown = ascii(entry)[:60]
        raise UserError(f'{where} is {shown}: write an object such as {{"stdin": "2", "stdout": "4"}}.')
    known = {"stdin", "input", "stdout", "output", "call", "args", "expected", "code", "assert"}
    for key in entry:
        if key not in known:
            raise UserError(
                f"{where} has the field '{key}': a test is made of {', '.join(sorted(known))}. Rename others "
                f"by test_fields={{{key}: stdout}}, or drop them by test_fields={{{key}: null}}."
            )
    if "assert" in entry:
        return _assertions(str(entry["assert"]), language, function, where)
    if "args" in entry or "call" in entry:
        name = entry.get("call") or function
        if not name:
            raise UserError(
                f"{where} calls a function without a name: give `call`, or `function` in the row."
            )
        if not language.takes_calls:
            raise UserError(f"{where} calls a function, which {language.name} can't: use stdin and stdout.")
        if "expected" not in entry:
            raise UserError(f"{where} has no `expected`: give the value that the call must have.")
        args = entry.get("args", [])
        if not isinstance(args, list | tuple):
            raise UserError(f"{where} has {ascii(args)[:60]} as `args`: write a list, such as [3, 4].")
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise UserError(f"{where} calls {ascii(name)[:60]}: give the name of a function.")
        return [ProgramTest(call=(name, tuple(args)), expected=entry["expected"])]
    stdout = entry.get("stdout", entry.get("output"))
    if stdout is None:
        raise UserError(f"{where} says not what is expected: give `stdout`, `expected` or `assert`.")
    if entry.get("code") and not language.takes_code:
        raise UserError(f"{where} has code, which {language.name} does not take: use stdin and stdout.")
    stdin = str(entry.get("stdin", entry.get("input", "")) or "")
    return [ProgramTest(stdin=stdin, stdout=str(stdout), code=str(entry.get("code", "")))]


def _assertions(code: str, language: Language, function: str | None, where: str) -> list[ProgramTest]:
    if language.name != "python":
        raise UserError(f"{where} is assertion code, which is for Python alone: use calls or stdout.")
    try:
        return [ProgramTest(assertion=assertion) for assertion in split_assertions(code, function)]
    except UnsupportedTest as error:
        raise UnsupportedTest(
            f"{where} can't be checked outside the program's process: {error}. Write plain assertions, or "
            "calls with `expected`."
        ) from None


def run_tests(
    pool: Pool, language: Language, source: str, tests: Sequence[ProgramTest], limits: Limits
) -> ProgramResult:
    return ProgramResult(tests=tuple(run[1] for run in run_each(pool, language, source, tests, limits)))


def run_each(
    pool: Pool, language: Language, source: str, tests: Sequence[ProgramTest], limits: Limits
) -> list[tuple[ProgramTest, str, list[Result]]]:
    """Each test with its outcome and what its runs printed."""
    inputs = tuple(run_input for test in tests for run_input in test.inputs)
    program = Program(language=language.name, source=source, inputs=inputs)
    results = iter(pool.run(program, limits).results)
    own = [(test, list(islice(results, len(test.inputs)))) for test in tests]
    return [(test, _outcome(pool, test, runs, language, limits), runs) for test, runs in own]


def describe_failure(test: ProgramTest, outcome: str, results: Sequence[Result]) -> str:
    """Why a test failed: input, what came and what was expected, or the end of the error message."""
    if test.assertion is not None:
        where = test.assertion.text
    elif test.call is not None:
        where = f"{test.call[0]}({', '.join(map(repr, test.call[1]))})"
    else:
        where = f"{test.code}\nwith the input {test.stdin!r}".strip() if test.stdin or test.code else "a run"
    if outcome == "timeout":
        return f"{where}: no end within the time limit."
    broken = next((result for result in results if result.outcome != "ok"), None)
    if broken is not None:
        return f"{where}: {outcome}.\n{broken.stderr.strip()[-_LONGEST_MESSAGE:]}".strip()
    value = _value_of(results[0].stdout)
    if test.assertion is not None:
        return f"{where}: fails" + (f", the value is {value[0]}." if value is not None else ".")
    if test.call is not None:
        came = "no value that can be compared" if value is None else repr(value[0])
        return f"{where}: expected {test.expected!r}, got {came[:_LONGEST_MESSAGE]}."
    return f"{where}: expected {test.stdout!r}, got {results[0].stdout[-_LONGEST_MESSAGE:]!r}."


def _outcome(pool: Pool, test: ProgramTest, results: list[Result], language: Language, limits: Limits) -> str:
    for result in results:
        if result.outcome != "ok":
            return result.outcome
    if test.assertion is not None:
        return _check_assertion(pool, test.assertion, results, limits)
    if test.call is not None:
        value = _value_of(results[0].stdout)
        same = value is not None and same_value(value[0], test.expected, language.has_booleans)
        return "passed" if same else "wrong"
    assert test.stdout is not None
    return "passed" if same_text(results[0].stdout, test.stdout) else "wrong"


def _check_assertion(pool: Pool, assertion: Assertion, results: list[Result], limits: Limits) -> str:
    values = []
    for result in results:
        value = _value_of(result.stdout)
        if value is None or not isinstance(value[0], str):
            return "wrong"
        try:
            tree = _NotFinite().visit(ast.parse(value[0].strip(), mode="eval"))
            values.append(ast.literal_eval(tree))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return "wrong"
    check_program = Program(language="python", source=assertion.check_code(tuple(values)))
    return "passed" if pool.run(check_program, replace(limits, memory_mb=512)).results[0].ok else "wrong"


class _NotFinite(ast.NodeTransformer):
    """`inf` and `nan`, which Python writes as names, as the floats that they are."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def _value_of(stdout: str) -> tuple[Any] | None:
    """The value behind the last mark, if that is whole JSON and nothing follows."""
    _, marker, text = stdout.rpartition(VALUE_MARKER)
    if not marker:
        return None
    try:
        return (json.loads(text),)
    except (ValueError, RecursionError):
        return None


def same_text(printed: str, expected: str) -> bool:
    """The same lines; spaces at their ends and empty lines at the end do not count."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same_value(value: Any, expected: Any, has_booleans: bool = True) -> bool:
    """Equal plain data; numbers with a fraction within a tolerance. Without `has_booleans` 1 is true."""
    if isinstance(value, bool) or isinstance(expected, bool):
        if has_booleans:
            return isinstance(value, bool) and isinstance(expected, bool) and value == expected
        value, expected = _bool_to_int(value), _bool_to_int(expected)
    if isinstance(value, int | float) and isinstance(expected, int | float):
        if isinstance(value, int) and isinstance(expected, int):
            return value == expected
        return _close(value, expected)
    if isinstance(value, list) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(
            same_value(a, b, has_booleans) for a, b in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        return set(value) == set(expected) and all(
            same_value(value[k], expected[k], has_booleans) for k in expected
        )
    return type(value) is type(expected) and value == expected


def _bool_to_int(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _close(value: float, expected: float) -> bool:
    try:
        value, expected = float(value), float(expected)
    except OverflowError:
        return False
    if math.isnan(value) or math.isnan(expected):
        return math.isnan(value) and math.isnan(expected)
    return value == expected or math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

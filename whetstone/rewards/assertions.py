"""Assertions about a Python program, checked without showing it the expected values.

`assert f(3) == 10` is split: the program's process evaluates `f(3)` and prints the value; another process,
without the program, evaluates `assert <value> == 10`. Only plain data crosses. Loops and functions around
assertions are not supported and are refused when the problem is read (except HumanEval's `check(candidate)`).
"""

import ast
import builtins
from dataclasses import dataclass

_VALUE = "whetstone_value_{}"
_ALLOWED = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Import, ast.ImportFrom, ast.FunctionDef)


class UnsupportedTest(ValueError):
    """Test code that is no plain sequence of statements and assertions."""


@dataclass(frozen=True, kw_only=True)
class Assertion:
    """One assertion: what the program evaluates, and the check afterwards."""

    setup: str  # statements that the program's process needs
    expressions: tuple[str, ...]  # expressions of the program's
    check_setup: str  # statements that the check needs
    check: str  # the assertion, with names for the values

    def check_code(self, values: tuple[object, ...]) -> str:
        """Python that fails where the assertion does."""
        lines = [f"{_VALUE.format(i)} = {value!r}" for i, value in enumerate(values)]
        return "\n".join([*lines, self.check_setup, self.check])

    @property
    def text(self) -> str:
        """The assertion as it was written."""
        text = self.check
        for number, expression in enumerate(self.expressions):
            text = text.replace(_VALUE.format(number), expression)
        return "\n".join(part for part in (self.setup, text) if part)


def split_assertions(code: str, entry_point: str | None = None) -> list[Assertion]:
    """The assertions of a piece of test code; raises `UnsupportedTest`."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnsupportedTest(f"it is no Python ({error or type(error).__name__})") from None
    try:
        return _assertions(_unwrap_check(body, entry_point))
    except RecursionError:
        raise UnsupportedTest("it is nested too deeply") from None


def _assertions(body: list[ast.stmt]) -> list[Assertion]:
    assertions, statements = [], []
    known = set(dir(builtins))
    foreign: set[str] = set()  # names that hold something of the program's
    for statement in body:
        if isinstance(statement, ast.Assert):
            assertions.append(_assertion(statement, statements, known, foreign))
            continue
        if not isinstance(statement, _ALLOWED):
            raise UnsupportedTest(f"line {statement.lineno} holds {type(statement).__name__.lower()}")
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            raise UnsupportedTest(f"line {statement.lineno} holds an assertion inside something else")
        names = _defined_names(statement)
        if _uses_foreign(statement, known, foreign):
            foreign |= names
        else:
            known |= names
        statements.append(statement)
    if not assertions:
        raise UnsupportedTest("it asserts nothing")
    return assertions


def _unwrap_check(body: list[ast.stmt], entry_point: str | None) -> list[ast.stmt]:
    """The body of `def check(candidate)`, with the candidate's own name; the code as it is without one."""
    statements: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check" and statement.args.args:
            if entry_point is None:
                raise UnsupportedTest("it has check(candidate), but the row names no entry_point")
            candidate = statement.args.args[0].arg
            statements += [_Rename(candidate, entry_point).visit(inner) for inner in statement.body]
        elif isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("check("):
            continue
        else:
            statements.append(statement)
    return statements


class _Rename(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(self._new, node.ctx), node) if node.id == self._old else node


def _defined_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    return _names(statement, ast.Store)


def _loaded_names(node: ast.AST) -> set[str]:
    arguments = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return _names(node, ast.Load) - _names(node, ast.Store) - arguments


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def _uses_foreign(node: ast.AST, known: set[str], foreign: set[str]) -> bool:
    return any(name in foreign or name not in known for name in _loaded_names(node))


def _assertion(
    statement: ast.Assert, statements: list[ast.stmt], known: set[str], foreign: set[str]
) -> Assertion:
    expressions: list[str] = []

    class ExtractCalls(ast.NodeTransformer):
        """Replaces the largest expressions that are a call of the program's, or a value of it."""

        def visit(self, node: ast.AST) -> ast.AST:
            is_call = isinstance(node, ast.Call) and _uses_foreign(node.func, known, foreign)
            is_value = isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and _uses_foreign(
                node, known, foreign
            )
            if is_call or is_value:
                expressions.append(ast.unparse(node))
                return ast.copy_location(ast.Name(_VALUE.format(len(expressions) - 1), ast.Load()), node)
            return self.generic_visit(node)

    check = ast.unparse(ast.fix_missing_locations(ExtractCalls().visit(ast.parse(ast.unparse(statement)))))
    if not expressions:
        raise UnsupportedTest(f"line {statement.lineno} asserts nothing about the program")
    setup = _needed(statements, set().union(*(_loaded_names(ast.parse(text)) for text in expressions)))
    mine = [s for s in statements if not _uses_foreign(s, known, foreign)]
    return Assertion(
        setup="\n".join(ast.unparse(s) for s in setup),
        expressions=tuple(expressions),
        check_setup="\n".join(ast.unparse(s) for s in mine),
        check=check,
    )


def _needed(statements: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """The earlier statements that matter for `names`, and no others: they may hold what is expected."""
    chosen: set[int] = set()
    while True:
        more = set()
        for i, statement in enumerate(statements):
            is_call = isinstance(statement, ast.Expr)  # which may change what it uses
            touched = _defined_names(statement) | (_loaded_names(statement) if is_call else set())
            if i not in chosen and touched & names:
                more.add(i)
        if not more:
            return [statements[i] for i in sorted(chosen)]
        chosen |= more
        names = names | set().union(*(_loaded_names(statements[i]) for i in more))

"""Assertions about a Python program, checked without showing it the expected values.

`assert f(3) == 10` is split: the program's process evaluates `f(3)` and prints the value; another process,
without the program, evaluates `assert <value> == 10`. Only plain data crosses. Loops and functions around
assertions are not supported and are refused when the problem is read (except HumanEval's `check(candidate)`),
as is every form that would show the program an expected value, or that a right program could not pass.
"""

import ast
import builtins
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from whetstone.errors import UserError

_VALUE = "whetstone_value_{}"
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BUILTINS = frozenset(dir(builtins))
_CONVERSIONS = _BUILTINS - {"type", "iter", "reversed", "enumerate", "zip", "map", "filter"}  # to plain data
# Methods of plain data that decide by themselves: an object of the program's must not have the last word.
_VERDICTS = frozenset(
    name for name in (*dir(str), *dir(set)) if name.startswith(("is", "starts", "ends", "__eq"))
)
_OBJECTS = frozenset({"date", "datetime", "time", "timedelta", "deque", "array"})  # of lower-case classes
_ALWAYS = ""  # a name that every run of the program needs


class UnsupportedTest(UserError):
    """Test code that is no plain sequence of statements and assertions."""


@dataclass(frozen=True, kw_only=True)
class Assertion:
    """One assertion: what the program evaluates, and the check afterwards."""

    setups: tuple[str, ...]  # for each expression the statements that the program's process needs
    expressions: tuple[str, ...]  # expressions of the program's
    check_setup: str  # statements that the check needs
    check: str  # the assertion, with names for the values

    def check_code(self, values: tuple[object, ...]) -> str:
        """Python that fails where the assertion does."""
        lines = [f"{_VALUE.format(i)} = {value!r}" for i, value in enumerate(values)]
        return "\n".join(["inf = float('inf')", "nan = inf - inf", *lines, self.check_setup, self.check])

    @property
    def text(self) -> str:
        """The assertion as it was written."""
        text = self.check
        for number, expression in enumerate(self.expressions):
            text = text.replace(_VALUE.format(number), expression)
        return "\n".join(part for part in (*self.setups[:1], text) if part)


@dataclass(frozen=True)
class _Step:
    """A statement, or an expression of the program's that an earlier assertion evaluated."""

    node: ast.stmt
    touches: set[str]  # names that it defines or whose values it may change
    uses: set[str]
    is_foreign: bool  # it uses something of the program's


def split_assertions(code: str, entry_point: str | None = None) -> list[Assertion]:
    """The assertions of a piece of test code; raises `UnsupportedTest`."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnsupportedTest(f"it is no Python ({error or type(error).__name__})") from None
    try:
        assertions = _Splitter().split(_unwrap_check(body, entry_point))
    except RecursionError:
        raise UnsupportedTest("it is nested too deeply") from None
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


def _refuse(node: ast.AST, reason: str) -> NoReturn:
    raise UnsupportedTest(f"line {getattr(node, 'lineno', '?')} {reason}")


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def _loaded(node: ast.AST) -> set[str]:
    """Names that an expression takes from outside: not those that its comprehensions and lambdas bind."""
    arguments = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return _names(node, ast.Load) - _names(node, ast.Store) - arguments


def _root(node: ast.AST) -> str:
    """The name that `a.b[0](1)` begins with; empty where it begins with something else."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Splitter(ast.NodeTransformer):
    """Goes through test code. An expression is whole if the program's process may evaluate all of it."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.imports: set[str] = set()
        self.variables: set[str] = set()  # what the test code has assigned
        self.foreign: set[str] = set()  # of these, what holds something of the program's
        self.objects: set[str] = set()  # of these, what holds an object of a class of the program's
        self.scalars: set[str] = set()  # of these, what is written as a number, a text, ...
        self.expressions: list[str] = []  # of the assertion at hand
        self.setups: list[str] = []
        self.values: set[str] = set()  # the names of their values

    def split(self, body: list[ast.stmt]) -> list[Assertion]:
        assertions = []
        for statement in body:
            if any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement)):
                _refuse(statement, "assigns by := inside an expression")
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._import(statement)
            elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
                self._define(statement)
            elif not isinstance(statement, ast.Assert):
                _refuse(statement, f"holds {type(statement).__name__.lower()}")
            elif not (isinstance(statement.test, ast.Constant) and statement.test.value):
                assertions.append(self._assertion(statement))
        return assertions

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        module = statement.module if isinstance(statement, ast.ImportFrom) else None
        for alias in statement.names:
            root = (module or alias.name).partition(".")[0]
            origin = getattr(PathFinder.find_spec(root), "origin", None) or ""
            is_there = root in sys.stdlib_module_names or origin.startswith(sys.base_prefix)
            if alias.name == "*" or not is_there:
                _refuse(statement, f"imports {alias.name} of {root}: use the standard library, by name")
        names = {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
        self.imports |= names
        self.steps.append(_Step(statement, names, set(), False))

    def _define(self, statement: ast.Assign | ast.AnnAssign | ast.Expr) -> None:
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", ast.Constant(0))]
        value = statement.value or ast.Constant(None)
        defined = set().union(*(_names(target, ast.Store) for target in targets))
        uses = _loaded(value).union(*(_names(target, ast.Load) for target in targets))
        is_foreign = self._is_foreign(uses)
        if isinstance(value, ast.Lambda) or (self._is_foreign(_loaded(value)) and not self._is_whole(value)):
            _refuse(statement, "computes with the program's values: do that in an assertion")
        if is_foreign:
            self._check_parts(statement)
        methods = {_root(n) for n in ast.walk(value) if isinstance(n, ast.Attribute)}
        changed = (uses if is_foreign or not defined else uses & methods) & self.variables - self.scalars
        always = {_ALWAYS} if not defined and uses <= self.imports | _BUILTINS else set()  # random.seed(0)
        self.steps.append(_Step(statement, defined | changed | always, uses, is_foreign))
        self.variables |= defined
        for kind, is_one in (
            (self.foreign, is_foreign),
            (self.objects, self._is_object(value)),
            (self.scalars, isinstance(value, ast.Constant)),
        ):
            kind.difference_update(defined)
            kind.update(defined if is_one else ())

    def _assertion(self, statement: ast.Assert) -> Assertion:
        self.expressions, self.setups = [], []
        test = self._truth(statement.test)
        if not self.expressions:
            _refuse(statement, "asserts nothing about the program")
        self._check_secrets(statement, _loaded(test))
        return Assertion(
            setups=tuple(self.setups),
            expressions=tuple(self.expressions),
            check_setup="\n".join(ast.unparse(step.node) for step in self.steps if not step.is_foreign),
            check=f"assert {ast.unparse(test)}",
        )

    def _truth(self, node: ast.expr) -> ast.expr:
        """An expression of which only its truth matters, so that it may be an object's."""
        if self._is_whole(node):
            return self._extract(node, "bool({})")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self._truth(node.operand)
            return node
        if isinstance(node, ast.BoolOp):
            for position, value in enumerate(node.values):
                earlier = set(self.expressions)
                node.values[position] = self._truth(value)
                if position and isinstance(node.op, ast.Or) and set(self.expressions) - earlier:
                    _refuse(node, "calls the program behind `or`, where it may have to be left out")
            return node
        return self.visit(node)

    def visit(self, node: ast.AST) -> Any:
        """What is checked outside, with names of values in place of whole expressions."""
        if isinstance(node, ast.expr) and self._is_whole(node):
            return self._extract(node)
        if isinstance(node, _COMPREHENSIONS) and self._is_whole(node.generators[0].iter):
            node.generators[0].iter = self._extract(node.generators[0].iter, "list({})")
        if isinstance(node, ast.Starred) and self._is_whole(node.value):
            node.value = self._extract(node.value, "list({})")
        if isinstance(node, ast.Attribute) and node.attr in _VERDICTS and self._is_whole(node.value):
            node.value = self._extract(node.value)
        if isinstance(node, (*_COMPREHENSIONS, ast.Lambda, ast.IfExp)):
            if self._is_foreign(_loaded(node)):
                _refuse(node, "calls the program in a loop, a lambda or a branch: write plain assertions")
            return node
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            _refuse(node, "compares a value by `is`: use ==")
        if isinstance(node, ast.Call) and _root(node.func) in self.imports:
            name = getattr(node.func, "attr", _root(node.func))
            if (name[:1].isupper() and name != "Counter") or name in _OBJECTS:
                _refuse(node, f"compares with an object ({name}): compare plain data, such as its text")
        return self.generic_visit(node)

    def _extract(self, node: ast.expr, form: str = "{}") -> ast.expr:
        if form == "{}" and self._is_object(node):
            _refuse(node, f"compares the object {ast.unparse(node)}: compare what it holds")
        self._check_parts(node)
        text, uses = form.format(ast.unparse(node)), _loaded(node)
        again = {text} if isinstance(node, ast.Call) and not node.args else set()  # it may count its calls
        needed = self._needed(uses | again | {_ALWAYS})
        self.setups.append("\n".join(ast.unparse(step.node) for step in needed))
        self.expressions.append(text)
        changed = (uses & self.variables - self.scalars) | again
        self.steps.append(_Step(ast.Expr(node), changed, uses, True))
        name = _VALUE.format(len(self.expressions) - 1)
        self.values.add(name)
        return ast.Name(name, ast.Load())

    def _needed(self, names: set[str]) -> list[_Step]:
        """The earlier statements that matter for `names`, and no others: they may hold what is expected."""
        chosen: set[int] = set()
        while True:
            more = {i for i, s in enumerate(self.steps) if i not in chosen and s.touches & names}
            if not more:
                return [self.steps[i] for i in sorted(chosen)]
            chosen |= more
            names = names.union(*(self.steps[i].uses for i in more))

    def _check_parts(self, node: ast.AST) -> None:
        for part in ast.walk(node):
            name = _root(part) if isinstance(part, ast.Subscript | ast.Attribute) else ""
            if name in self.variables - self.foreign and isinstance(getattr(part, "ctx", None), ast.Load):
                _refuse(part, f"gives the program a part of {name}, which shows it the rest: write the part")

    def _check_secrets(self, statement: ast.Assert, names: set[str]) -> None:
        """The programs and the check share no variable, but for numbers and texts that are arguments."""
        foreign = [step for step in self.steps if step.is_foreign]
        needed = self._needed(set().union(*(step.uses for step in foreign)))
        shown = set().union(*(step.uses | step.touches for step in (*needed, *foreign)))
        calls = [n for step in foreign for n in ast.walk(step.node) if isinstance(n, ast.Call)]
        arguments = {arg.id for call in calls for arg in call.args if isinstance(arg, ast.Name)}
        checked = names.union(*(step.uses | step.touches for step in self._needed(names)))
        if both := shown & checked & self.variables - self.foreign - (self.scalars & arguments):
            _refuse(statement, f"needs {min(both)} for the program and for the check: write its value")

    def _is_foreign(self, names: set[str]) -> bool:
        known = _BUILTINS | self.imports | self.variables | self.values
        return bool(names & self.foreign or names - known)

    def _is_object(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call) and self._is_whole(node.func):
            return getattr(node.func, "attr", _root(node.func))[:1].isupper()
        return isinstance(node, ast.Name) and node.id in self.objects

    def _is_whole(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(id=name):
                return self._is_foreign({name})
            case ast.Attribute(value=value, attr=name):
                return name not in _VERDICTS and self._is_whole(value)
            case ast.Subscript(value=value):
                return self._is_whole(value)
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = [side for side in (left, *others) if not isinstance(side, ast.Constant)]
                by_identity = all(isinstance(op, ast.Is | ast.IsNot) for op in ops)
                return by_identity and bool(values) and all(map(self._is_whole, values))
            case ast.Call(func=func, args=args, keywords=keywords):
                passed = [*args, *(keyword.value for keyword in keywords)]
                if _root(func) not in (self.imports | _BUILTINS) - self.variables:
                    return self._is_whole(func)
                bare = {arg.id for arg in passed if isinstance(arg, ast.Name)} - self.variables
                if self._is_foreign(bare):  # map(f, [1, 2])
                    return True
                return len(passed) == 1 and _root(func) in _CONVERSIONS and self._is_whole(passed[0])
        return False

"""Formulas of propositional logic as truth tables: parsed by hand, compared as sets of assignments.

Knows the signs of reasoning-gym's questions (not, and, or, implies, if and only if), parentheses and capital
letters as variables. A table is an integer with one bit per assignment. Raises nothing but `ValueError`.
"""

from collections.abc import Sequence

LONGEST = 400  # characters
DEEPEST = 40  # nested parentheses and negations

NOT, AND, OR, IMPLIES, IFF = "¬", "∧", "∨", "→", "↔"  # noqa: RUF001
_LOOSEST_FIRST = (IFF, IMPLIES, OR, AND)


def truth_table(text: str, variables: Sequence[str]) -> int:
    """Bit i is the formula's value where variable j has bit j of i. Raises `ValueError` on anything else."""
    if len(text) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    return _Parser(text, variables).parse()


def everything(variables: Sequence[str]) -> int:
    """The table of a tautology."""
    return (1 << (1 << len(variables))) - 1


def is_inference(conclusion: int, premises: Sequence[int], tautology: int) -> bool:
    """Whether a conclusion follows from the premises and says more than any of them alone.

    What follows from one premise by weakening (P or Q, from P) is no inference. Where one premise already
    says all that the others say, the only conclusion left is that premise itself.
    """
    strongest = tautology
    for premise in premises:
        strongest &= premise
    if conclusion == tautology or strongest & ~conclusion:
        return False
    if strongest in premises:
        return conclusion == strongest
    return all(premise & ~conclusion for premise in premises)


class _Parser:
    """Recursive descent, one level for each operator; a chain of one operator groups from the left."""

    def __init__(self, text: str, variables: Sequence[str]) -> None:
        self.signs = [sign for sign in text if not sign.isspace()]
        self.position = 0
        self.depth = 0
        self.all = everything(variables)
        rows = range(1 << len(variables))
        self.tables = {
            name: sum(1 << row for row in rows if row >> index & 1) for index, name in enumerate(variables)
        }

    def parse(self) -> int:
        table = self.binary(0)
        if self.position < len(self.signs):
            raise ValueError(f"'{self.signs[self.position]}' where an operator or the end should be")
        return table

    def accept(self, sign: str) -> bool:
        matches = self.position < len(self.signs) and self.signs[self.position] == sign
        self.position += matches
        return matches

    def binary(self, level: int) -> int:
        if level == len(_LOOSEST_FIRST):
            return self.factor()
        table = self.binary(level + 1)
        while self.accept(_LOOSEST_FIRST[level]):
            right = self.binary(level + 1)
            implied, equal = (self.all & ~table) | right, self.all & ~(table ^ right)
            combined = {AND: table & right, OR: table | right, IMPLIES: implied, IFF: equal}
            table = combined[_LOOSEST_FIRST[level]]
        return table

    def factor(self) -> int:
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST}")
        if self.accept(NOT):
            table = self.all & ~self.factor()
        elif self.accept("("):
            table = self.binary(0)
            if not self.accept(")"):
                raise ValueError("a parenthesis is not closed")
        else:
            name = self.signs[self.position] if self.position < len(self.signs) else ""
            if name not in self.tables:
                raise ValueError(f"'{name}' where a variable should be")
            self.position += 1
            table = self.tables[name]
        self.depth -= 1
        return table

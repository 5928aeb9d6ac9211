r"""Signs that change the meaning of a mathematical answer and that normalization or a parser ignores.

`\neq 42`, `42...` and `42&43` are not 42. An answer with such a sign is wrong unless the truth has it too.
`answers.py` compares the values.
"""

import re
from fractions import Fraction

# Kind of sign -> how it is written. An answer may lack what the truth has, but not add to it.
_SIGNS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "not": r"\\neq?(?![A-Za-z])|\\not(?![A-Za-z])|\\not(?=in\b)|≠|∉|!=|<>",
        "empty set": r"\\emptyset|\\varnothing|∅",
        "dots": r"\\[lcdv]?dots(?![A-Za-z])|\\dots[a-z]?(?![A-Za-z])|\.\s*\.|…|⋯",
        "columns": r"^(?!.*\\begin)(?:.*[^\\])?&|^(?!.*\\begin).*\\\\\s*\S",
        "about": r"\\(?:approx|sim|simeq|cong|propto|asymp)(?![A-Za-z])|≈",
        "relation without a left side": (
            r"^\s*(?:\\(?:leq?|geq?|lt|gt|ll|gg|leqslant|geqslant)(?![A-Za-z])|[<>≤≥])"
        ),
        "doubt": r"[?#@`]",
        "bar": r"\d\s*(?:\||\\mid(?![A-Za-z]))\s*\d",
        "base": r"[\d)}]\s*_",  # 42_5 is 22
    }.items()
}
_LISTS = re.compile(r"\b(?:and|or|nor|not|but|either)\b", re.IGNORECASE)
_HAS_SEVERAL = re.compile(r"[,;±\u222a]|\\pm|\\cup|\\mp|\b(?:and|or|nor|not|but|either)\b", re.IGNORECASE)
_LETTER_BEFORE_EQUALS = re.compile(r"^\s*(\\?[A-Za-z]\w?)\s*(?:=|\\in\b)")
_PERCENT = re.compile(r"\\?%|\bpercent\b")


def says_more(answer: str, truth: str) -> bool:
    """Whether an answer has a sign that the truth has not, so that it can't say the same."""
    if any(sign.search(answer) and not sign.search(truth) for sign in _SIGNS.values()):
        return True
    return bool(_LISTS.search(answer)) and not _HAS_SEVERAL.search(truth)


def names_another_variable(answer: str, truth: str) -> bool:
    """`x=5` for `y=5`; a bare 5 names none."""
    name, true_name = (_LETTER_BEFORE_EQUALS.match(text.strip().strip("$")) for text in (answer, truth))
    return name is not None and true_name is not None and name[1] != true_name[1]


def is_percent(text: str) -> bool:
    return _PERCENT.search(text) is not None


def percent_equals(percentage: Fraction | None, truth: Fraction | None) -> bool:
    """Whether a percentage stands for a truth that has no percent sign: 50 % for 1/2, but not for 50.

    Nor 4200 % for 42: only a truth between 0 and 1 is asked for as a share.
    """
    return percentage is not None and truth is not None and 0 < abs(truth) <= 1 and percentage == 100 * truth

r"""Extraction of a model's answer, and equality of mathematical answers.

The answer is the last closed `<answer>...</answer>` or the last closed `\boxed{...}`; boxes separated only by
a comma, `and` or `or` are one answer. Equality is tested from cheap to expensive: signs that only the answer
has (`\neq 42`, `42...` and `42&43` are not 42), normalized text, exact numbers, math-verify. Nothing here
raises on what a model wrote, but math-verify may hang: the scoring pool has the time limit.
"""

import logging
import re
import unicodedata
from fractions import Fraction

from whetstone.sandbox.evaluator import evaluate

_LONGEST_FOR_SYMBOLIC = 400  # characters; no honest answer is longer, and a symbolic parser's time grows fast
_LONGEST_NUMBER = 60

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BOXED_NUMBER = re.compile(r"\\(?:boxed|fbox)\s*([-+]?\d(?:[\d,./]*\d)?)")  # `\boxed 42`
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$;]|\\[()\[\],;: ]|\\q?quad\b|~)*"
    r"(?:,|;|,?\s*(?:and|or|\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}))"
    r"(?:[\s$]|\\[()\[\],;: ]|\\q?quad\b|~)*"
)
_LONGEST_BETWEEN_BOXES = 40
_UNITS = (
    r"degrees?|dollars?|cents?|percent|units?|square|cubic|inch(?:es)?|foot|feet|ft|yards?|miles?|mph|cm|mm|km|m|"
    r"meters?|metres?|kg|g|grams?|lbs?|pounds?|ounces?|oz|liters?|litres?|ml|seconds?|sec|minutes?|min|hours?|hrs?|"
    r"days?|weeks?|months?|years?"
)
_TRAILING_UNIT = re.compile(
    r"(?<=[\d})])\s*(?:\b(?:" + _UNITS + r")\b\.?(?:\s*\^\s*\{?[23]\}?)?\s*)+$", re.IGNORECASE
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_TRAILING_TEXT = re.compile(r"(?<=[\d})])\s*" + _TEXT.pattern + r"(?:\s*\^\s*\{?[23]\}?)?\s*$")
# Words behind a number that are no unit: they change its value, or take it back.
_NO_UNIT = re.compile(
    r"(?<![\\\w])(?:hundreds?|thousands?|[mbtr]+illions?|half|halves|squared|cubed|factorial|pi|mod|modulo|times|"
    r"dozens?|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?|root|plus|minus|divided|over|base|to|if|otherwise|else|unless|wrong|incorrect|maybe|perhaps)\b",
    re.IGNORECASE,
)
_WITH_UNIT = re.compile(
    r"[€£¥]?\s*([-+]?(?:[\d.,/]*\d|\\frac\{\d+\}\{\d+\}))"
    r"(?:\s*[^\W\d_]{2,}(?:[\s/.-]+[^\W\d_]+)*\.?(?:\^?\{?[23]\}?)?)?"
)
# Commands of an expression. Others are signs between two numbers, as spaces are.
_COMMANDS = (
    r"(?:[dtc]?frac|sqrt|cdot|times|div|pi|log|ln|lg|exp|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|[dt]?binom|gcd|lcm|"
    r"[lr](?:floor|ceil)|left|right|max|min|sum|prod|circ|overline|text\w*|math(?:rm|bf)|begin|end)(?![A-Za-z])"
)
_TWO_NUMBERS = re.compile(rf"(?<![_^])\d\s+\d|\d\s*\\(?!{_COMMANDS})[A-Za-z]+(?:\{{[^{{}}]*\}})?\s*\d")
_PROSE = re.compile(rf"(?<![\\A-Za-z])(?!{_COMMANDS})[A-Za-z]{{2,}}|\^\{{?[A-Za-z]")
_NOT_WORKED_OUT = re.compile(
    r"(?=.*(?:[+*]|[\d)}]-|\\times|\\cdot|\\div))(?:[\d\s.(){}+*/-]|\\(?:times|cdot|div|frac)(?![A-Za-z]))+"
)
_SENTENCE = r"[A-Za-z\s]*\b(?:is|answer)\b[\s:=]*"  # in front of a number
_LEAD = re.compile(
    rf"^[\s$]*+(?:\\approx(?![A-Za-z])|≈|(?:{_SENTENCE}|\\text\s*\{{{_SENTENCE}\}}\s*)(?=[$\\+.\d€£¥-]))"
)
_VARIABLE = re.compile(r"^\\?[A-Za-z]\w?\s*(?:=|\\in\b)\s*")
_MIXED = re.compile(r"^(-?)(\d+)\s+(\d+)/(\d+)$")
# Kind of sign -> how it is written. An answer may lack what the truth has, but not add to it.
_SIGNS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "not": r"\\(?:neq?|neg|lnot)(?![A-Za-z])|\\not(?![A-Za-z])|\\not(?=in\b)|≠|∉|!=|<>",
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


def extract_tag(text: str) -> str | None:
    """The content of the last closed `<answer>...</answer>`, stripped; None without one."""
    match = _last_tag(text)
    return None if match is None else match[1]


def extract_boxed(text: str) -> str | None:
    r"""The last closed `\boxed{...}`, else None; `\boxed{1} and \boxed{-2}` are one answer, `1, -2`."""
    match = _last_boxed(text)
    return None if match is None else match[1]


def extract_math(text: str) -> str | None:
    r"""The final answer of a solution: the later of `<answer>` and `\boxed`, a box inside the tag opened."""
    candidates = [match for match in (_last_tag(text), _last_boxed(text)) if match is not None]
    if not candidates:
        return None
    answer = max(candidates)[1]
    inner = extract_boxed(answer)
    return answer if inner is None else inner


def final_answer(solution: str) -> str:
    r"""The truth in an answer column: a solution's `\boxed{}`, what follows GSM8K's `####`, or all of it."""
    if "####" in solution:
        return solution.rsplit("####", 1)[1].strip()
    boxed = extract_boxed(solution)
    return solution.strip() if boxed is None else boxed


def _last_tag(text: str) -> tuple[int, str] | None:
    start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if start < 0:
        return None
    end = text.index("</answer>", start)
    return end, text[start + len("<answer>") : end].strip()


def _last_boxed(text: str) -> tuple[int, str] | None:
    """The end and the content of the last box, with those before it that belong to the same answer."""
    boxes = _closed_boxes(text)
    if not boxes:
        return None
    last = max(boxes, key=lambda box: box[1])  # of two boxes in each other the inner one
    contents, start = [_content(text, last)], last[0]
    for box in sorted((box for box in boxes if box[2] < start), key=lambda box: box[2], reverse=True):
        between = text[box[2] + 1 : start]
        if len(between) > _LONGEST_BETWEEN_BOXES or _BETWEEN_BOXES.fullmatch(between) is None:
            break
        contents.append(_content(text, box))
        start = box[0]
    return last[2], ", ".join(reversed(contents))


def _content(text: str, box: tuple[int, int, int]) -> str:
    return text[box[1] + 1 : box[2]].strip()


def _closed_boxes(text: str) -> list[tuple[int, int, int]]:
    """(beginning of the command, opening brace, closing brace) of every box that is closed."""
    starts = {match.end() - 1: match.start() for match in _BOXED.finditer(text)}
    numbers = _BOXED_NUMBER.finditer(text)
    boxes = [(match.start(), match.start(1) - 1, match.end()) for match in numbers]
    open_braces: list[int] = []
    # One pass, so that a thousand open boxes cost no more than one.
    for brace in re.finditer(r"[{}]", text) if starts else ():
        if brace.group() == "{":
            open_braces.append(brace.start())
        elif open_braces and (opening := open_braces.pop()) in starts:
            boxes.append((starts[opening], opening, brace.start()))
    return boxes


def normalize(answer: str) -> str:
    """One spelling: without dollars, spacing, sizes, units, thousands' commas, percent signs, final dots."""
    text = answer.strip().strip("$").strip()
    text = re.sub(r"\\[dtc]frac", r"\\frac", text.replace("\N{MINUS SIGN}", "-"))
    text = re.sub(r"\\left\s*\\?(?=[({\[|.])|\\right\s*\\?(?=[)}\]|.])", "", text)
    text = normalize_spaces(text).replace("\\%", "").replace("%", "")
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree\b|°", "", text)
    text_only = _TEXT.fullmatch(text.strip())
    # `5\text{ cm}` is 5, `2\text{ and }3` keeps its words.
    text = text_only.group(1) if text_only else _TEXT.sub(r"\1", _TRAILING_TEXT.sub("", text))
    text = _VARIABLE.sub("", text.strip())
    text = _TRAILING_UNIT.sub("", text.strip())
    separators = r"\s" if text.startswith(("(", "[", "\\{", "\\l")) else r",|\s"  # (1,234) is a pair
    text = re.sub(rf"(?<=\d)(?:{separators})(?=\d{{3}}(?!\d))", "", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = text.strip().rstrip(".").strip()
    mixed = _MIXED.match(text)
    if mixed:  # "1 1/2" would become "11/2" when the spaces go
        form = "{}{}+{}/{}" if not mixed.group(1) else "{}({}+{}/{})"
        return form.format(*mixed.groups())
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d|\s)", "", text)  # "1 2" is not 12
    return text.lower() if text.isalpha() and len(text) > 1 else text


def normalize_spaces(text: str) -> str:
    """Every kind of space as one, and no dollar signs."""
    return re.sub(r"\\[!,;: ]|\\q?quad\b|\\hspace\{[^{}]*\}|~", " ", text).replace("\\$", "").replace("$", "")


def as_number(text: str) -> Fraction | None:
    r"""The exact value of a normalized `12`, `-.5`, `3/4`, `\frac{3}{4}`, `1+1/2`, `1.5e3`; else None."""
    if len(text) > _LONGEST_NUMBER:
        return None
    text = re.sub(r"^([-+]?)\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}$", r"\1(\2)/(\3)", text)
    simple = re.fullmatch(
        r"([-+]?)\(?([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)\)?(?:/\(?(-?(?:\d+\.?\d*|\.\d+))\)?)?",
        text,
    )
    if simple:
        sign, top, bottom = simple.groups()
        divisor = Fraction(bottom or 1)
        return None if divisor == 0 else (-1 if sign == "-" else 1) * Fraction(top) / divisor
    mixed = re.fullmatch(r"(-?)\(?(\d+)\+(\d+)/(\d+)\)?", text)
    if mixed and int(mixed[3]) < int(mixed[4]):
        return (-1 if mixed[1] else 1) * (int(mixed[2]) + Fraction(int(mixed[3]), int(mixed[4])))
    return None


def math_equal(answer: str, truth: str) -> bool:
    """Whether an answer means the same as the truth."""
    answer = "".join(
        sign for sign in answer if sign.isspace() or unicodedata.category(sign) not in ("Cc", "Cf")
    )
    answer = _LEAD.sub("", answer)
    normal_answer, normal_truth = normalize(answer), normalize(truth)
    if not normal_answer or says_more(answer, truth) or names_another_variable(answer, truth):
        return False
    number, true_number = as_number(normal_answer), as_number(normal_truth)
    if true_number is not None:
        text = " ".join(_TEXT.sub(r" \1 ", normalize_spaces(answer)).split())
        with_unit = _WITH_UNIT.fullmatch(text)
        if _NO_UNIT.search(answer):
            return False
        number = as_number(normalize(with_unit[1])) if number is None and with_unit else number
    if _PERCENT.search(answer) and not _PERCENT.search(truth):
        # 50 % is 50 where a percentage is asked for, and 1/2: only a truth up to 1 can be a share.
        if number is None or true_number is None:
            return False
        is_share = 0 < abs(true_number) <= 1 and number == 100 * true_number
        return is_share or (number == true_number and abs(true_number) >= 1)
    if normal_answer == normal_truth:
        return True
    sides = [as_number(side) for side in normal_answer.split("=")]
    if None not in sides and len(set(sides)) > 1:
        return False  # an equation of numbers that are not equal, such as 43=42
    if number is not None and true_number is not None:
        if number == true_number:
            return True
        if number.denominator == true_number.denominator == 1 and "%" not in answer + truth:
            return False  # two different whole numbers: nothing left to find out
    if true_number is not None and number is None:
        result = normal_answer.rpartition("=")[2]
        if _TWO_NUMBERS.search(result) or _PROSE.search(result) or _NOT_WORKED_OUT.fullmatch(normal_answer):
            return False  # 42 among other things, or the question itself: 40 + 2
    if max(len(answer), len(truth)) > _LONGEST_FOR_SYMBOLIC:
        return False
    return evaluate(_math_verify, answer, truth) == 1.0


def says_more(answer: str, truth: str) -> bool:
    """Whether an answer has a sign that the truth has not, so that it can't say the same."""
    if any(sign.search(answer) and not sign.search(truth) for sign in _SIGNS.values()):
        return True
    return bool(_LISTS.search(answer)) and not _HAS_SEVERAL.search(truth)


def names_another_variable(answer: str, truth: str) -> bool:
    """`x=5` for `y=5`; a bare 5 names none."""
    name, true_name = (_LETTER_BEFORE_EQUALS.match(text.strip().strip("$")) for text in (answer, truth))
    return name is not None and true_name is not None and name[1] != true_name[1]


def _math_verify(answer: str, truth: str) -> bool:
    """math-verify's verdict. Its own time limit works by signals and is off: the pool's limit is hard."""
    from math_verify import parse, verify

    # It warns that its time limit is off, and about every odd text.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    try:
        gold = parse(f"${truth.strip().strip('$')}$", parsing_timeout=None)  # type: ignore[arg-type]
        candidate = parse(f"${answer.strip().strip('$')}$", parsing_timeout=None)  # type: ignore[arg-type]
        return bool(gold and candidate and verify(gold, candidate, timeout_seconds=None))
    except Exception:  # a parser on arbitrary text: whatever it raises, the answer is not shown to be right
        return False

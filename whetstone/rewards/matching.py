r"""Comparison of a row's answer with a model's, and extraction of the latter.

The model's answer is the later of the last `<answer>...</answer>` and the last `\boxed{...}`; without either,
what follows the last `####`; without that, the last number (`numeric`) or the last line of the text, without
"The answer is". The last two ignore text inside `<think>`. Nothing here raises on what a model wrote.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from whetstone.rewards.answers import extract_math, math_equal

_TOLERANCE = Fraction(1, 10**6)  # relative, of numbers with a fraction
_LONGEST_NUMBER = 60
_NEWEST = 1000  # numbers of a text that are looked at, from its end
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_MINUS = "\N{MINUS SIGN}"
_NUMBER = re.compile(
    rf"(?<![\w.])([-+{_MINUS}]?)[$€£]?({_DIGITS})([eE][-+]?\d{{1,3}})?(?:\s?/\s?(\d+))?(\s?\\?%)?"
)
_PREFIX = re.compile(
    r"^\W*+(?:so|therefore|thus|hence)?,?\s*+(?:the\s++)?(?:final\s++)?answer\s*+(?:is\s*+:?|:|=)\s*+",
    re.IGNORECASE,
)
_ARTICLE = re.compile(r"\b(?:a|an|the)\s+(?=\w{2,})", re.IGNORECASE)
_PUNCTUATION = r",;:!?'\"\u201c\u201d\u2018\u2019\u00b4`()\[\]{}*_\u2026"
_MARKS = re.compile(rf"[.{_PUNCTUATION}]+(?!\d)|(?<!\d)[{_PUNCTUATION}]+")  # 1.5 keeps its point
_LETTER = re.compile(r"\(?([A-Z])(?:[.):,\]]++(?:\s.*)?)?", re.IGNORECASE | re.DOTALL)
_AROUND_LETTER = re.compile(r"(?i)\\(?:text|math)\w*|[${}*_`\\\"']|\b(?:option|choice)\s")
OPTION_LINE = re.compile(r"^[ \t]*+\(?([A-Z])[).:][ \t]++(.+)$", re.MULTILINE)
_FORMULA = re.compile(r"\\[a-zA-Z]+|[=^]|\d\s*[+*/]\s*[\dA-Za-z(]|[A-Za-z)]\s*[+*/]\s*\d")


class Number(NamedTuple):
    """A number as it was written: its value, and whether a percent sign followed."""

    value: Fraction
    percent: bool


def extract(text: str, match: str) -> str | None:
    """What is taken for the model's answer; None where there is nothing."""
    answer = extract_math(text)
    if answer is not None:
        return answer or None
    _, closed, rest = text.rpartition("</think>")  # thoughts may never end
    text = rest if closed else "" if "<think>" in text else text
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0].strip() or None
    if match == "numeric":
        matches = reversed(deque(_NUMBER.finditer(text), maxlen=_NEWEST))
        return next((match.group().strip() for match in matches if _as_number(match) is not None), None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    return _PREFIX.sub("", lines[-1]).strip(" *_`") or None


def same(answer: str, truth: str, match: str) -> bool:
    """Whether an answer equals the truth, by one of `MATCHES` but "none"."""
    return _COMPARISONS[match](answer, truth)


def _same_text(answer: str, truth: str) -> bool:
    number, true_number = parse_number(answer), parse_number(truth)
    if number is not None and true_number is not None:
        return _equal(number, true_number)
    return normalize(answer) == normalize(truth)


def normalize(text: str) -> str:
    """Text without case, articles and punctuation: "The  Eiffel Tower." is "eiffel tower"."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf").strip()
    plain = re.sub(r"(?<=\w)[-\N{HYPHEN}-\N{EM DASH}](?=[^\W\d])", " ", text)
    plain = _MARKS.sub("", _ARTICLE.sub("", plain))
    return " ".join(plain.split()) or text


def letter_of(text: str) -> str | None:
    """The option that an answer names: B, (b), B. and "B) Rome" are B; None for a text."""
    match = _LETTER.fullmatch(_AROUND_LETTER.sub("", text).strip())
    return match[1].upper() if match else None


def _same_letter(answer: str, truth: str) -> bool:
    letter, expected = letter_of(answer), letter_of(truth)
    return letter == expected if letter and expected else _same_text(answer, truth)


def parse_number(text: str) -> Number | None:
    """The number that a text is; None where it is more than that or something else."""
    text = text.strip().rstrip(".")
    match = _NUMBER.fullmatch(text)
    return _as_number(match) if match else None


def _numbers(text: str) -> list[tuple[str, Number]]:
    numbers = ((match.group().strip(), _as_number(match)) for match in _NUMBER.finditer(text))
    return [(written, number) for written, number in numbers if number is not None]


def _as_number(match: re.Match[str]) -> Number | None:
    sign, digits, exponent, divisor, percent = match.groups()
    if len(digits) > _LONGEST_NUMBER or (divisor and (len(divisor) > _LONGEST_NUMBER or not int(divisor))):
        return None
    value = Fraction(digits.replace(",", "") + (exponent or "")) / int(divisor or 1)
    return Number(-value if sign in ("-", _MINUS) else value, bool(percent))


def _same_number(answer: str, truth: str) -> bool:
    """The one number in the answer is the truth's; an answer with two different numbers is none."""
    expected = [number for _, number in _numbers(truth)]
    written = {match.group(): match for match in _NUMBER.finditer(answer)}
    numbers = (number for match in written.values() if (number := _as_number(match)) is not None)
    first = next(numbers, None)
    if first is None or not expected or any(number != first for number in numbers):
        return False
    return _equal(first, expected[-1])


def _equal(answer_number: Number, expected: Number) -> bool:
    if answer_number.value == expected.value:
        return True
    if answer_number.value.denominator == expected.value.denominator == 1:
        return False
    largest = max(abs(answer_number.value), abs(expected.value))
    return abs(answer_number.value - expected.value) <= _TOLERANCE * largest


def match_for(truths: Sequence[str]) -> str:
    """The comparison that suits these answers: numbers, letters of options, formulas, or text."""
    if not truths:
        return "none"
    if all(parse_number(truth) is not None for truth in truths):
        return "numeric"
    if all(letter_of(truth) for truth in truths):
        return "letter"
    not_numbers = [truth for truth in truths if parse_number(truth) is None]
    formulas = sum(bool(_FORMULA.search(truth)) for truth in not_numbers)
    return "math" if 2 * formulas > len(not_numbers) else "normalized"


_COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda answer, truth: answer.strip() == truth.strip(),
    "normalized": _same_text,
    "numeric": _same_number,
    "math": math_equal,
    "letter": _same_letter,
}
MATCHES = (*_COMPARISONS, "none")

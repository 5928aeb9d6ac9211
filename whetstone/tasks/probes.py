"""Probes of a scorer: answers whose worth is known beforehand, made from the gold answers of a task.

Every text here is written by this module or by the task; the hostile ones stand for what a model may write.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum


class Kind(StrEnum):
    """What a probe should earn."""

    GOLD = "gold"  # everything
    WORTHLESS = "worthless"  # nothing: empty, junk, hostile
    OTHER = "other"  # another gold answer, a number of the question: nothing, but for coincidences
    NEAR = "near"  # part credit at most, but for problems with several right answers
    HEDGE = "hedge"  # the gold answer among others: little
    SURROUNDED = "surrounded"  # the gold answer in other text: part credit by its share at most


@dataclass(frozen=True)
class Probe:
    name: str
    kind: Kind
    text: str  # in the place of the gold answer, or (`is_whole`) of the whole completion
    is_whole: bool = False


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MAX_OPTIONS = 8
_WHOLE = (
    Probe("no text", Kind.WORTHLESS, "", is_whole=True),
    Probe("no answer", Kind.WORTHLESS, "I do not know.", is_whole=True),
)
_CONSTANT = (
    Probe("empty", Kind.WORTHLESS, ""),
    Probe("blank", Kind.WORTHLESS, " \n\t"),
    Probe("junk", Kind.WORTHLESS, "lorem ipsum dolor sit amet"),
    Probe("junk number", Kind.WORTHLESS, "-31415926.53"),
    Probe("nan", Kind.WORTHLESS, "nan"),
    Probe("huge", Kind.WORTHLESS, "9" * 20_000),
    Probe("controls", Kind.WORTHLESS, "\x00\x07\x1b[31m\u202e\u200b\ufeff"),
    Probe("brackets", Kind.WORTHLESS, "(" * 2_000 + ")" * 2_000),
    Probe("nested list", Kind.WORTHLESS, "[" * 1_000 + "]" * 1_000),
    Probe("power", Kind.WORTHLESS, "9**9**9**9"),
    Probe("code", Kind.WORTHLESS, "__import__('os').getpid() or exit()"),
)


def make_probes(gold: str | None, others: Sequence[str], question: str = "") -> list[Probe]:
    """The probes of a problem; `others`: gold answers of other problems. Without `gold`: worthless ones."""
    probes = [*_WHOLE, *_CONSTANT]
    if gold is None:
        return probes
    numbers = [number for number in _NUMBER.findall(question) if number != gold.strip()]
    if numbers:
        probes.append(Probe("from question", Kind.OTHER, max(numbers, key=len)))
    different = [other for other in dict.fromkeys(others) if other.strip().lower() != gold.strip().lower()]
    if different:
        probes.append(Probe("other gold", Kind.OTHER, different[0]))
        options = sorted([gold, *different[: _MAX_OPTIONS - 1]])
        probes.append(Probe("all options", Kind.HEDGE, " or ".join(options)))
    if _NUMBER.fullmatch(gold.strip()):
        probes.append(Probe("gold + 1", Kind.NEAR, str(Decimal(gold.strip()) + 1)))
        probes.append(Probe("gold - 1", Kind.NEAR, str(Decimal(gold.strip()) - 1)))
    probes.append(Probe("one character", Kind.NEAR, change_character(gold)))
    probes.append(
        Probe("buried", Kind.SURROUNDED, f"It may be 31 or 17, but {gold} is possible, and so is 59")
    )
    probes.append(Probe("gold and junk", Kind.SURROUNDED, f"{gold}\nlorem ipsum 7 dolor sit amet"))
    return [probe for probe in probes if probe.text.strip() != gold.strip() or probe.is_whole]


def change_character(text: str) -> str:
    """The text with its first letter or digit changed into the next one; an `x` for a text without any."""
    for position, character in enumerate(text):
        if character.isascii() and character.isalnum():
            if character.isdigit():
                changed = str(int(character) % 9 + 1)
            else:
                changed = {"z": "a", "Z": "A"}.get(character) or chr(ord(character) + 1)
            return text[:position] + changed + text[position + 1 :]
    return f"x{text}"

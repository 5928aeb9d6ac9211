"""Scorers of reasoning-gym 0.1.25 that pay in full for wrong answers, put right.

Found by giving every scorer the same junk. game_of_life_halting compares `bool(text)` with `bool(text)`, so
any answer is right; coin_flip's credit for a common beginning is a full mark for "0"; gsm_symbolic does not
see a minus sign. All others are as they are.
"""

import re
from fractions import Fraction
from typing import Any

_COIN_TOLERANCE = 1e-4  # reasoning-gym's own


def repaired(task: str, answer: str, entry: dict[str, Any], value: float) -> float:
    """The score `value` that reasoning-gym gave, or the right one where it is known to be wrong."""
    repair = _REPAIRS.get(task)
    return value if repair is None or value < 1.0 else repair(answer, entry)


def _game_of_life_halting(answer: str, entry: dict[str, Any]) -> float:
    return float(answer.strip().lower() == str(entry["answer"]).lower())


def _coin_flip(answer: str, entry: dict[str, Any]) -> float:
    difference = Fraction(answer.replace(",", "")) - Fraction(entry["answer"])
    return 1.0 if abs(difference) <= _COIN_TOLERANCE else 0.0


def _gsm_symbolic(answer: str, entry: dict[str, Any]) -> float:
    number = re.search(r"-?\d+(?:\.\d+)?", answer)
    return 1.0 if number is not None and float(number.group()) == float(entry["answer"]) else 0.01


_REPAIRS = {
    "coin_flip": _coin_flip,
    "game_of_life_halting": _game_of_life_halting,
    "gsm_symbolic": _gsm_symbolic,
}

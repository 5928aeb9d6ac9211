"""Repairs of reasoning-gym 0.1.25's scorers that pay for wrong answers or for junk.

Found with a corpus of junk answers (tests/corpora/answers.py). Four kinds of defect: full marks for a wrong
answer (puzzle24 compares no numbers, game_of_life_halting compares `bool(text)`), full marks for the answer
followed by junk, partial credit for junk (letters that happen to match, an unturned cube), and results that
are no score at all. Honest partial credit stays. All other scorers are reasoning-gym's.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from whetstone.rewards.equations import check_equation
from whetstone.rewards.propositions import everything, is_inference, truth_table
from whetstone.tasks.gym_forms import is_plausible

Entry = dict[str, Any]

_COIN_TOLERANCE = Fraction(1, 10_000)  # reasoning-gym's own
_WELL_FORMED = 0.01  # what reasoning-gym pays for an answer of the right form
_USES_NUMBERS = 0.05  # the same, where it also uses the numbers of the problem
# Part credit for closeness is raised to this power: a constant or a guess (all are knights, a ladder of words
# that are none) would earn up to 0.65 of the full mark.
_POWER = {
    **{"futoshiki": 3, "knights_knaves": 3, "mini_sudoku": 3, "rectangle_count": 3, "sudoku": 3},
    **{"polynomial_equations": 3, "time_intervals": 8, "word_ladder": 3},
}
_WEAK_CONCLUSION = 0.1  # a conclusion that follows from one premise alone
_CHOICES = frozenset({"true", "false", "yes", "no", "on", "off", "undetermined"})
_GSM = re.compile(r"\$?\s*(-?\d[\d,]*(?:\.\d+)?)\s*(?:%|[A-Za-z]{1,20})?\.?")


def score_answer(task: str, dataset: Any, answer: str, entry: Entry) -> float:
    """What an answer is worth, from 0 to 1: by our own scorer where there is one, else by the data set's."""
    if not is_plausible(task, answer, entry):
        return 0.0
    if task == "rubiks_cube":
        dataset.expand_moves = str.strip  # the cube reads `3Rw'2` itself; reasoning-gym leaves `3R` out
    if task in _SCORERS:
        value = _SCORERS[task](answer, entry)
    else:
        value = float(dataset.score_answer(answer, entry))
        if task in _REPAIRS:
            value = _REPAIRS[task](answer, entry, value)
        elif task == "rubiks_cube" and value < 1.0:  # how much was put right; turning nothing earns nothing
            before = float(dataset.score_answer("", entry))
            value = max(0.0, (value - before) / (1.0 - before))
        elif 0.0 < value < 1.0 and _is_by_containment(task, dataset):
            value = value if _stands_alone(str(entry["answer"]), answer) else 0.0
    if not math.isfinite(value) or not 0.0 <= value <= 1.0:
        return 0.0
    return value ** _POWER.get(task, 1)


def is_flawed(task: str, entry: Entry) -> bool:
    """Whether everything follows from the premises (they contradict each other) or nothing (tautologies)."""
    if task == "jugs":
        return "No solution" in entry["answer"]
    if task != "propositional_logic":
        return False
    variables = entry["metadata"]["variables"]
    strongest = everything(variables)
    for premise in entry["metadata"]["premises"]:
        strongest &= truth_table(premise, variables)
    return strongest in (0, everything(variables))


def _is_by_containment(task: str, dataset: Any) -> bool:
    """Whether part credit is for an answer that contains the gold answer somewhere."""
    from whetstone.tasks.gym_package import ProceduralDataset

    inherited = type(dataset).score_answer is ProceduralDataset.score_answer
    return inherited or task in ("chain_sum", "manipulate_matrix", "products", "tsumego")


def _stands_alone(gold: str, answer: str) -> bool:
    """`5` stands in `it is 5`, but neither in `15`, `-5` and `5.2` nor `on` in `None`.

    An answer that names other numbers or other choices too has chosen nothing.
    """
    rest = answer.lower().replace(gold.lower(), "", 1)
    if re.fullmatch(r"[+-]?[\d.,]+", gold) and re.search(r"\d", rest):
        return False
    if gold.lower() in _CHOICES and _CHOICES & set(re.findall(r"\w+", rest)):
        return False
    return re.search(rf"(?<![\w.+-]){re.escape(gold)}(?!\w|[.,]\d)", answer, re.IGNORECASE) is not None


def _equation(answer: str, entry: Entry, target: int) -> float:
    numbers = entry["metadata"]["numbers"]
    if "=" in answer:
        return 0.0
    verdict = check_equation(answer, numbers, target, exactly_once=True)
    if verdict.correct or not verdict.well_formed:
        return float(verdict.correct)
    used = [int(number) for number in re.findall(r"\d+", answer)]
    return _USES_NUMBERS if sorted(used) == sorted(numbers) else _WELL_FORMED


def _propositional_logic(answer: str, entry: Entry) -> float:
    """reasoning-gym takes any conclusion that follows: (P or Q) is right on four problems of five."""
    variables = entry["metadata"]["variables"]
    try:
        conclusion = truth_table(answer, variables)
    except ValueError:
        return 0.0
    premises = [truth_table(premise, variables) for premise in entry["metadata"]["premises"]]
    tautology = everything(variables)
    if is_inference(conclusion, premises, tautology):
        return 1.0
    follows = any(premise & ~conclusion == 0 for premise in premises)
    return _WEAK_CONCLUSION if follows and conclusion != tautology else 0.0


def _game_of_life(answer: str, entry: Entry) -> float:
    """Part credit for cells that live in both boards; a dead board would earn most of the cells."""
    board, gold = json.loads(answer), json.loads(entry["answer"])
    if not isinstance(board, list) or [_length(row) for row in board] != [_length(row) for row in gold]:
        return 0.0
    if board == gold:
        return 1.0
    pairs = [pair for rows in zip(board, gold, strict=True) for pair in zip(*rows, strict=True)]
    both = sum(cell == 1 == truth for cell, truth in pairs)
    either = sum(cell == 1 or truth == 1 for cell, truth in pairs)
    return 0.9 * both / either if either else 0.0


def _length(row: Any) -> int:
    return len(row) if isinstance(row, list) else -1


def _coin_flip(answer: str, entry: Entry) -> float:
    """Part credit for leading decimals; the zero before the point, which all share, is none of them."""
    value, gold = Fraction(answer.strip().replace(",", "")), Fraction(entry["answer"])
    if abs(value - gold) <= _COIN_TOLERANCE:
        return 1.0
    written, exact = f"{float(value):.10f}", f"{float(gold):.10f}".rstrip("0")
    if written.split(".")[0] != exact.split(".")[0]:
        return 0.0
    decimals, truth = written.split(".")[1], exact.split(".")[1]
    pairs = enumerate(zip(decimals, truth, strict=False))
    same = next((index for index, (digit, true_digit) in pairs if digit != true_digit), len(truth))
    return 0.9 * same / max(1, len(truth))


def _gsm_symbolic(answer: str, entry: Entry) -> float:
    """One number, perhaps with a unit; reasoning-gym takes the first number of any text, without its sign."""
    number = _GSM.fullmatch(answer.strip())
    if number is None:
        return 0.0
    return 1.0 if float(number[1].replace(",", "")) == float(entry["answer"]) else _WELL_FORMED


def _figlet_font(answer: str, entry: Entry, value: float) -> float:
    word, gold = answer.replace(" ", "").lower(), entry["answer"].strip().lower()
    return min(value, _matching_letters(word, gold))


def _matching_letters(word: str, gold: str) -> float:
    """The share of letters in their place, times the share of letters that are the word's at all.

    The second factor is 1 for an honest slip and small for `eeeeee`; text after the word lowers both.
    """
    if word == gold:
        return 1.0
    longest = max(len(word), len(gold))
    matching = sum(letter == true_letter for letter, true_letter in zip(word, gold, strict=False))
    shared = (Counter(word) & Counter(gold)).total()
    return matching / longest * shared / longest


def _number_sorting(answer: str, entry: Entry, value: float) -> float:
    """The numbers of the problem; reasoning-gym takes any that are off by no more than 1."""
    numbers, gold = (
        [float(number) for number in json.loads(text.replace("'", '"'))] for text in (answer, entry["answer"])
    )
    return value if all(map(math.isclose, numbers, gold)) else 0.0


def _prime_factorization(answer: str, entry: Entry, value: float) -> float:
    """reasoning-gym pays half for a product without any factor found: the number itself, also times 1."""
    factors = [int(factor) for factor in answer.split("×") if factor.strip()]  # noqa: RUF001
    return value if value == 1.0 or sum(factor > 1 for factor in factors) > 1 else min(value, _WELL_FORMED)


def _word_sorting(answer: str, entry: Entry, value: float) -> float:
    num_words = len(entry["metadata"]["sorted_words"])
    return value * num_words / max(num_words, answer.count(",") + 1)


def _letter_jumble(answer: str, entry: Entry, value: float) -> float:
    num_words = len(entry["answer"].split())
    return value * num_words / max(num_words, len(answer.split()))


# Own scorers, which take the place of reasoning-gym's.
_SCORERS: dict[str, Callable[[str, Entry], float]] = {
    "coin_flip": _coin_flip,
    # By our own parser, in exact fractions; reasoning-gym hands the text to sympy.
    "countdown": lambda answer, entry: _equation(answer, entry, entry["metadata"]["target"]),
    "game_of_life": _game_of_life,
    "game_of_life_halting": lambda answer, entry: float(
        answer.strip().lower() == str(entry["answer"]).lower()
    ),
    "gsm_symbolic": _gsm_symbolic,
    "propositional_logic": _propositional_logic,
    # reasoning-gym takes any four numbers of the range: 6*4*1*1 would be right for every problem.
    "puzzle24": lambda answer, entry: _equation(answer, entry, 24),
}
# Corrections of reasoning-gym's score.
_REPAIRS: dict[str, Callable[[str, Entry, float], float]] = {
    "figlet_font": _figlet_font,
    "letter_jumble": _letter_jumble,
    "number_sorting": _number_sorting,
    "prime_factorization": _prime_factorization,
    "spell_backward": lambda answer, entry, _: _matching_letters(answer.lower(), entry["answer"].lower()),
    "word_sorting": _word_sorting,
}

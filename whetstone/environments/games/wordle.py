"""A game like Wordle: find a word of five letters; every guess is answered letter by letter.

The answer to a guess has the letters and, beneath them, a mark for each:

    C R A N E
    X G X X Y

G: the letter is right there. Y: it is elsewhere in the word. X: it is not, or not once more. The word list is
Whetstone's own (words.txt, common words of English); guesses may be any five letters.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

from whetstone.environments.games.base import Player, Step

LENGTH = 5
EVAL_SHARE = 0.2
FIRST_GUESS = "trace"  # has the most different answers among our words, 121
_WORD = re.compile(rf"(?<![A-Za-z])[A-Za-z]{{{LENGTH}}}(?![A-Za-z])")
_IN_BRACKETS = re.compile(rf"\[\s*([A-Za-z]{{{LENGTH}}})\s*\]")
_ANSWER = re.compile(r"^((?:[A-Z] ){4}[A-Z])\n((?:[GYX] ){4}[GYX])$", re.MULTILINE)


@cache
def shipped_words() -> tuple[str, ...]:
    return tuple(Path(__file__).with_name("words.txt").read_text(encoding="ascii").split())


@lru_cache(maxsize=1 << 20)
def marks(guess: str, word: str) -> str:
    """G, Y or X for each letter of the guess; a letter is yellow as often as the word has it left."""
    left = Counter(w for g, w in zip(guess, word, strict=True) if g != w)
    result = ""
    for g, w in zip(guess, word, strict=True):
        if g == w:
            result += "G"
        elif left[g]:
            left[g] -= 1
            result += "Y"
        else:
            result += "X"
    return result


def read_guess(text: str) -> str | None:
    """The last word of five letters in brackets; without brackets, the last word of five letters."""
    matches = _IN_BRACKETS.findall(text) or _WORD.findall(text)
    return matches[-1].lower() if matches else None


class Wordle:
    """Find the word: every guess is answered letter by letter."""

    description: ClassVar[str] = (
        "find a word of five letters; each guess is answered letter by letter, as in Wordle"
    )
    default_settings: ClassVar[Mapping[str, Any]] = {
        "max_guesses": 6,
        "letter_reward": 0.0,
        "word_list": None,
        "split": None,
    }

    def __init__(
        self,
        max_guesses: int = 6,
        letter_reward: float = 0.0,
        word_list: Sequence[str] | None = None,
        split: str | None = None,
    ) -> None:
        """`split`: the words of training or of evaluation only, which the run sets; None: all of them."""
        if max_guesses < 1 or not 0 <= letter_reward < 1:
            raise ValueError("max_guesses must be at least 1, letter_reward from 0 to below 1")
        self.max_guesses, self.letter_reward = max_guesses, letter_reward
        if split not in (None, "train", "eval"):
            raise ValueError("split must be train, eval or null")
        self.candidates = words_of(_check_words(word_list), split)

    def reset(self, seed: int) -> str:
        self.word = random.Random(seed).choice(self.candidates)
        self.num_guesses = self.most_right = 0
        return (
            f"Find my English word of {LENGTH} letters in {self.max_guesses} guesses. I mark each letter of "
            "a guess: G is right, Y is elsewhere in the word, X is not in it. Guess one word at a time, in "
            "brackets, such as [crane]."
        )

    def step(self, text: str) -> Step:
        self.num_guesses += 1
        guess = read_guess(text)
        if guess == self.word:
            return "Right.", 1.0, True, False, {"correct": True}
        answer = f"That is no word of {LENGTH} letters."
        if guess is not None:
            result = marks(guess, self.word)
            self.most_right = max(self.most_right, result.count("G"))
            answer = f"{' '.join(guess.upper())}\n{' '.join(result)}"
        left = self.max_guesses - self.num_guesses
        if left:
            return f"{answer}\nGuesses left: {left}", 0.0, False, False, {}
        reward = self.letter_reward * self.most_right / LENGTH
        return f"{answer}\nThe word was {self.word.upper()}.", reward, True, False, {"correct": False}

    @staticmethod
    def gold_player(word_list: Sequence[str] | None = None, **settings: Any) -> Player:
        """Guesses the word that splits those that are left best, if need be one that can't be right."""
        known = _check_words(word_list)
        candidates = list(known)

        def play(observation: str) -> str:
            nonlocal candidates
            if match := _ANSWER.search(observation):
                guess, result = (group.replace(" ", "") for group in match.groups())
                candidates = [word for word in candidates if marks(guess.lower(), word) == result]
            if len(candidates) == len(known) and FIRST_GUESS in known:
                return f"[{FIRST_GUESS}]"
            return f"[{_best_guess(tuple(candidates), known)}]"

        return play

    @staticmethod
    def random_player(seed: int, word_list: Sequence[str] | None = None, **settings: Any) -> Player:
        """Any word of the list, whatever it was told."""
        dice, candidates = random.Random(f"player {seed}"), _check_words(word_list)
        return lambda observation: f"[{dice.choice(candidates)}]"


@lru_cache(maxsize=16)
def words_of(candidates: tuple[str, ...], split: str | None) -> tuple[str, ...]:
    """The secret words of a split: a fifth is evaluated on, by a hash, so that no list's order matters."""
    ranked = sorted(set(candidates), key=lambda word: hashlib.blake2b(word.encode()).digest())
    if split is None or len(ranked) < 2:
        return candidates
    evaluated = set(ranked[: max(1, round(EVAL_SHARE * len(ranked)))])
    return tuple(word for word in candidates if (word in evaluated) == (split == "eval"))


@lru_cache(maxsize=1 << 14)
def _best_guess(candidates: tuple[str, ...], known: tuple[str, ...]) -> str:
    """The guess with the most different answers; of equal ones, one that may be right."""
    first, *others = candidates
    if len(others) < 2:
        return first
    pool: Iterable[str] = known if len(candidates) <= 60 else candidates
    return max(
        pool, key=lambda guess: (len({marks(guess, word) for word in candidates}), guess in candidates)
    )


def _check_words(word_list: Sequence[str] | None) -> tuple[str, ...]:
    candidates = tuple(shipped_words() if word_list is None else (str(word).lower() for word in word_list))
    if not candidates or not all(_WORD.fullmatch(word) for word in candidates):
        raise ValueError(f"word_list must be a list of words of {LENGTH} letters from A to Z")
    return candidates

"""Guess a number: every wrong guess is told whether the number is higher or lower."""

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from whetstone.environments.games.base import Player, Step

_NUMBER = re.compile(r"-?\d+")


class GuessNumber:
    """Find a number by asking: every wrong guess is told whether the number is higher or lower."""

    description: ClassVar[str] = "guess a number; each wrong guess is answered by higher or lower"
    default_settings: ClassVar[Mapping[str, Any]] = {"low": 1, "high": 100, "max_guesses": 7}

    def __init__(self, low: int = 1, high: int = 100, max_guesses: int = 7) -> None:
        if not low < high or max_guesses < 1:
            raise ValueError("low must be below high, and max_guesses at least 1")
        self.low, self.high, self.max_guesses = low, high, max_guesses

    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randint(self.low, self.high)
        self.num_guesses = 0
        return f"Guess my number from {self.low} to {self.high}."

    def step(self, text: str) -> Step:
        self.num_guesses += 1
        numbers = _NUMBER.findall(text)
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) < 20 else None
        if guess == self.number:
            return "Right.", 1.0, True, False, {"correct": True}
        if self.num_guesses >= self.max_guesses:
            return f"It was {self.number}.", 0.0, True, False, {"correct": False}
        if guess is None:
            return "That is no number. Answer with one number.", 0.0, False, False, {}
        return ("Higher." if guess < self.number else "Lower."), 0.0, False, False, {}

    @staticmethod
    def gold_player(low: int = 1, high: int = 100, **settings: Any) -> Player:
        """Halves what is left: wins whenever max_guesses allows it."""
        bounds, last = [low, high], 0

        def play(observation: str) -> str:
            nonlocal last
            if observation == "Higher.":
                bounds[0] = last + 1
            elif observation == "Lower.":
                bounds[1] = last - 1
            last = sum(bounds) // 2
            return str(last)

        return play

    @staticmethod
    def random_player(seed: int, low: int = 1, high: int = 100, **settings: Any) -> Player:
        """Any number of the range, whatever it was told."""
        dice = random.Random(f"player {seed}")
        return lambda observation: str(dice.randint(low, high))

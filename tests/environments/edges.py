"""Environments and tools for tests at the edges: what they say, draw, return and leave open."""

import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch

HALF = "\ud83d"  # of an emoji, as a model writes it that is cut in an escape


def draws(*_):
    return f"{random.random()} {np.random.rand()} {torch.rand(1).item()}"


class Draws:
    """In TRL's shape: `reset` gets no seed."""

    def reset(self):
        self.secret = draws()
        return self.secret

    def look(self) -> str:
        """Look at the secret."""
        return self.secret


class Says:
    """`word` at every door; `close` writes a file."""

    def __init__(self, word: str = HALF, file: str = ""):
        self.word, self.file = word, file

    def reset(self, seed: int):
        assert seed < 2**31
        np.random.seed(seed)
        return f"say {self.word}"

    def step(self, text: str):
        if text == "raise":
            raise ValueError(self.word)
        return [{"role": "user", "content": self.word}], 0.1, False, False, {"correct": np.bool_(True)}

    def close(self):
        Path(self.file).write_text("closed")


class Waits:
    """Everything is awaited; it has no tool of its own, and numpy says that it was won."""

    async def reset(self, seed: int):
        self.big, self.small, self.correct = "x" * 70_000, 3, np.bool_(True)
        return "begin"

    async def get_reward(self):
        return math.nextafter(1, 0)


class Large:
    def reset(self, seed: int):
        return "begin"

    def step(self, text: str):
        time.sleep(0.05)
        return "x" * 900_000, 0.0, False, False, {}


class Exits:
    def reset(self, seed: int):
        return "begin"

    def step(self, text: str):
        os._exit(1)


def always(completions, **columns):
    """Pays whatever was said."""
    return [1.0 for _ in completions]

"""A game whose answers take a random time."""

import random
import time

from whetstone.environments.games import GuessNumber


class SlowGuess(GuessNumber):
    def step(self, text: str):
        time.sleep(random.random() / 20)  # not seeded: it differs from run to run
        return super().step(text)

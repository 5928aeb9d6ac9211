"""What the games of Whetstone have in common: Gymnasium's shape, a player that wins, and one that guesses.

A player maps each observation, the opening message first, to what is said next. It reads what the policy
reads and nothing else.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

Step = tuple[str, float, bool, bool, dict[str, Any]]  # observation, reward, terminated, truncated, info
Player = Callable[[str], str]
SOLVED = 1 - 1e-9  # the reward from which an episode counts as won: ten times 0.1 is less than 1


class Game(Protocol):
    description: ClassVar[str]  # a line of `whet tasks`
    default_settings: ClassVar[Mapping[str, Any]]

    def reset(self, seed: int) -> str: ...
    def step(self, text: str) -> Step: ...
    @staticmethod
    def gold_player(**settings: Any) -> Player:
        """Wins whenever the settings allow it."""
        ...

    @staticmethod
    def random_player(seed: int, **settings: Any) -> Player:
        """Makes a random legal move each time, whatever it is told. Its seed may be that of the game."""
        ...

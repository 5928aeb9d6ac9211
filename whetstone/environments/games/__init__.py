"""Games of several turns that come with Whetstone, in Gymnasium's shape."""

from whetstone.environments.games.base import Game
from whetstone.environments.games.guess_number import GuessNumber
from whetstone.environments.games.maze_walk import MazeWalk
from whetstone.environments.games.wordle import Wordle

GAMES: dict[str, type[Game]] = {"guess_number": GuessNumber, "wordle": Wordle, "maze_walk": MazeWalk}
__all__ = ["GAMES", "Game", "GuessNumber", "MazeWalk", "Wordle"]

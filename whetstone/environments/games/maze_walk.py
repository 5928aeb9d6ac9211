"""A maze that is walked step by step: its map is shown after every step.

The maze is a function of the seed. A spanning tree of the cells makes every cell reachable; a few walls are
left out beyond it. `#` is a wall, `.` is free, `@` is where you are, `E` is the exit.
"""

import random
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from whetstone.environments.games.base import Player, Step

Cell = tuple[int, int]  # row and column, of the map with its walls
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_MOVE = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)
MAX_SIDE = 40


class MazeWalk:
    """Walk to the exit of a maze, one step at a time."""

    description: ClassVar[str] = (
        "walk to the exit of a maze step by step: up, down, left or right; the map is shown"
    )
    default_settings: ClassVar[Mapping[str, Any]] = {
        "width": 5,
        "height": 5,
        "min_distance": 2,
        "max_distance": 6,
        "max_steps": 8,
    }

    def __init__(
        self,
        width: int = 5,
        height: int = 5,
        min_distance: int = 2,
        max_distance: int = 6,
        max_steps: int = 8,
    ) -> None:
        if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE and width * height > 1):
            raise ValueError(f"width and height must be from 1 to {MAX_SIDE}, and not both 1")
        if not 1 <= min_distance <= max_distance <= max_steps:
            raise ValueError(
                "1 <= min_distance <= max_distance <= max_steps must hold, or no player could win"
            )
        self.width, self.height, self.max_steps = width, height, max_steps
        self.min_distance, self.max_distance = min_distance, max_distance

    def reset(self, seed: int) -> str:
        dice = random.Random(seed)
        self.rows = _make_maze(dice, self.width, self.height)
        self.position = _random_cell(dice, self.width, self.height)
        steps = distances(self.rows, self.position)
        farthest = max(steps.values())
        least = min(self.min_distance, farthest)  # a small maze has no cell as far away
        choices = sorted(c for c, n in steps.items() if least <= n <= self.max_distance)
        self.exit = dice.choice(choices)
        self.num_steps = 0
        return (
            f"Walk to the exit E of the maze in at most {self.max_steps} steps. # is a wall, you are at @. "
            f"Say one step at a time: up, down, left or right.\n{self._map()}"
        )

    def step(self, text: str) -> Step:
        self.num_steps += 1
        moves = _MOVE.findall(text)
        note = "Say up, down, left or right."
        if moves:
            note = f"You went {moves[-1].lower()}."
            middle, target = _ahead(self.position, MOVES[moves[-1].lower()])
            if self.rows[middle[0]][middle[1]] == "#":
                note = "There is a wall."
            else:
                self.position = target
        if self.position == self.exit:
            return "You are out.", 1.0, True, False, {"correct": True}
        left = self.max_steps - self.num_steps
        if not left:
            return f"{note} No step is left.", 0.0, True, False, {"correct": False}
        return f"{note} Steps left: {left}\n{self._map()}", 0.0, False, False, {}

    def _map(self) -> str:
        rows = [list(row) for row in self.rows]
        rows[self.exit[0]][self.exit[1]] = "E"
        rows[self.position[0]][self.position[1]] = "@"
        return "\n".join("".join(row) for row in rows)

    @staticmethod
    def gold_player(**settings: Any) -> Player:
        """Reads the map and takes a shortest way."""

        def play(observation: str) -> str:
            rows = [line for line in observation.splitlines() if line.startswith("#")]
            cells = {
                sign: (row, column)
                for row, line in enumerate(rows)
                for column, sign in enumerate(line)
                if sign in "@E"
            }
            steps = distances(rows, cells["E"])
            return next(
                name
                for name, move in MOVES.items()
                if steps.get(_ahead(cells["@"], move)[1]) == steps[cells["@"]] - 1
                and rows[_ahead(cells["@"], move)[0][0]][_ahead(cells["@"], move)[0][1]] != "#"
            )

        return play

    @staticmethod
    def random_player(seed: int, **settings: Any) -> Player:
        """Any of the four moves, whatever the map shows."""
        dice = random.Random(f"player {seed}")
        return lambda observation: dice.choice(list(MOVES))


def distances(rows: list[str], start: Cell) -> dict[Cell, int]:
    """Steps from a cell to every other, by breadth-first search."""
    steps, queue = {start: 0}, deque([start])
    while queue:
        cell = queue.popleft()
        for move in MOVES.values():
            middle, target = _ahead(cell, move)
            if rows[middle[0]][middle[1]] != "#" and target not in steps:
                steps[target] = steps[cell] + 1
                queue.append(target)
    return steps


def _ahead(cell: Cell, move: Cell) -> tuple[Cell, Cell]:
    """What lies between a cell and the next, and the next cell."""
    (row, column), (down, right) = cell, move
    return (row + down, column + right), (row + 2 * down, column + 2 * right)


def _random_cell(dice: random.Random, width: int, height: int) -> Cell:
    return 2 * dice.randrange(height) + 1, 2 * dice.randrange(width) + 1


def _make_maze(dice: random.Random, width: int, height: int) -> list[str]:
    """A spanning tree by depth-first search, then a few more openings."""
    rows = [["#"] * (2 * width + 1) for _ in range(2 * height + 1)]
    start = _random_cell(dice, width, height)
    rows[start[0]][start[1]] = "."
    way = [start]
    while way:
        closed = [
            (middle, target)
            for middle, target in (_ahead(way[-1], move) for move in MOVES.values())
            if 0 < target[0] < 2 * height and 0 < target[1] < 2 * width and rows[target[0]][target[1]] == "#"
        ]
        if not closed:
            way.pop()
            continue
        middle, target = dice.choice(closed)
        for row, column in (middle, target):
            rows[row][column] = "."
        way.append(target)
    for _ in range(width * height // 10):
        row, column = dice.randrange(1, 2 * height), dice.randrange(1, 2 * width)
        if (row + column) % 2:  # between two cells, not a corner of walls
            rows[row][column] = "."
    return ["".join(row) for row in rows]

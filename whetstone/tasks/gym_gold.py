"""Right answers for the five reasoning-gym tasks that give none: from the entry's metadata, or by search."""

import json
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from whetstone.rewards.propositions import everything, is_inference, truth_table


def gold_answer(task: str, entry: dict[str, Any]) -> str:
    """An answer that the task's scorer must accept in full."""
    if task == "intermediate_integration" and "Integral" in entry["answer"]:
        import sympy

        # Its own answer with the integrals worked out: `Integral(f, x)` would answer any problem.
        return str(sympy.parse_expr(entry["answer"], local_dict={"C": sympy.Symbol("C")}).doit())
    if entry["answer"] is not None:
        return str(entry["answer"])
    return _SOLVERS[task](entry["metadata"])


def _propositional_logic(metadata: dict[str, Any]) -> str:
    """reasoning-gym's example, or all premises in one formula where the example says less than a premise."""
    variables, premises = metadata["variables"], metadata["premises"]
    tables = [truth_table(premise, variables) for premise in premises]
    example = metadata["example_answer"]
    if is_inference(truth_table(example, variables), tables, everything(variables)):
        return example
    return " ∧ ".join(f"({premise})" for premise in premises)


def _boxnet(metadata: dict[str, Any]) -> str:
    """Carry one box after the other, a square at a time, to a target of its colour."""
    state = {
        tuple(float(part) for part in key.split("_")): list(items)
        for key, items in metadata["initial_state"].items()
    }
    targets: dict[str, list[tuple[float, ...]]] = {}
    for square, items in state.items():
        for item in items:
            targets.setdefault(item, []).append(square)
    plan: list[dict[str, str]] = []
    for square, items in state.items():
        for box in [item for item in items if item.startswith("box_")]:
            row, column = square
            goal = targets["target_" + box[4:]].pop()
            while (row, column) != goal:
                if row != goal[0]:
                    step = (row + math.copysign(1, goal[0] - row), column)
                else:
                    step = (row, column + math.copysign(1, goal[1] - column))
                plan.append({f"Agent[{row}, {column}]": f"move({box}, square[{step[0]}, {step[1]}])"})
                row, column = step
            plan.append({f"Agent[{row}, {column}]": f"move({box}, target_{box[4:]})"})
    return json.dumps(plan)


def _rush_hour(metadata: dict[str, Any]) -> str:
    """Breadth-first search over the places of the cars, a cell at a time."""
    board: str = metadata["board_config"]
    start, solid = {}, {i for i, cell in enumerate(board) if cell == "x"}
    for label in sorted(set(board) - set("ox.")):
        cells = [i for i, cell in enumerate(board) if cell == label]
        start[label] = (cells[0], cells[1] - cells[0], len(cells))
    labels = sorted(start)
    shape = {label: start[label][1:] for label in labels}
    first = tuple(start[label][0] for label in labels)
    came_from: dict[tuple[int, ...], tuple[tuple[int, ...], str] | None] = {first: None}
    queue = deque([first])
    while queue:
        positions = queue.popleft()
        if positions[0] == 16:  # the car A at the right end of the third row
            return " ".join(_path(positions, came_from))
        for next_positions, name in _moves(positions, labels, shape, solid):
            if next_positions not in came_from:
                came_from[next_positions] = (positions, name)
                queue.append(next_positions)
    raise AssertionError(f"the board {board} has no solution")


def _path(
    positions: tuple[int, ...], came_from: dict[tuple[int, ...], tuple[tuple[int, ...], str] | None]
) -> list[str]:
    names: list[str] = []
    while (step := came_from[positions]) is not None:
        positions, name = step
        names.append(name)
    return names[::-1]


def _moves(
    positions: tuple[int, ...], labels: list[str], shape: dict[str, tuple[int, int]], solid: set[int]
) -> Iterator[tuple[tuple[int, ...], str]]:
    occupied = solid | {
        position + k * shape[label][0]
        for label, position in zip(labels, positions, strict=True)
        for k in range(shape[label][1])
    }
    for i, (label, position) in enumerate(zip(labels, positions, strict=True)):
        letter = chr(ord("A") + i)  # the question letters the cars anew, without gaps
        stride, size = shape[label]
        last = position + stride * (size - 1)
        before, after = position - stride, last + stride
        can_back = before >= 0 and (stride != 1 or before // 6 == position // 6)
        can_forward = after < 36 and (stride != 1 or after // 6 == last // 6)
        if can_back and before not in occupied:
            yield (*positions[:i], before, *positions[i + 1 :]), f"{letter}-1"
        if can_forward and after not in occupied:
            yield (*positions[:i], position + stride, *positions[i + 1 :]), f"{letter}+1"


_SOLVERS = {
    "boxnet": _boxnet,
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": _propositional_logic,
    "rubiks_cube": lambda metadata: " ".join(
        move[:-1] if move.endswith("'") else f"{move}'"
        for move in reversed(metadata["scramble_moves"].split())
    ),
    "rush_hour": _rush_hour,
}

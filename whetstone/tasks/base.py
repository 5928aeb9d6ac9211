"""The seam between problems and training: what every task offers.

A task makes problems from an index and judges what a model wrote. It knows nothing of models, tokens or
steps.
"""

from typing import Any, Protocol

from whetstone.types import Problem, Score


class Task(Protocol):
    """A source of problems with answers that can be checked."""

    name: str
    generated: bool  # made from an index, without end; False: rows of a data set
    failure_reward: (
        float  # accuracy where scoring hangs or dies: no more than a wrong answer earns, or hanging would pay
    )

    def __len__(self) -> int:
        """How many problems there are (the configured size for generated ones)."""
        ...

    def problem(self, index: int) -> Problem:
        """Problem number `index`, the same for ever. Any non-negative index is valid for generated tasks."""
        ...

    def score(self, problem: Problem, text: str) -> Score:
        """Judge a completion's text. `parts` holds "correct" (0 or 1) and "accuracy" (what is paid for it).

        Never raises on what a model wrote.
        """
        ...

    def gold(self, problem: Problem) -> str | None:
        """A completion text that earns full marks, for the check before step 1 and for `whet tasks`; None
        where nobody knows one.
        """
        ...

    def columns(self, problem: Problem) -> dict[str, Any]:
        """What a reward function of the user's own gets to see: `answer` and the other columns of the row."""
        ...

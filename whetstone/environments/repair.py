"""A program that is repaired by the output of its tests: several turns on a problem of the code task.

Some of a problem's tests are shown when they fail, with what came and what was expected. The others stay
hidden: they tell a program that solves the problem from one that knows the shown answers. The task scores the
last turn by all tests.
"""

from typing import Any

from whetstone.environments.games.base import Step
from whetstone.rewards.programs import describe_failure, extract_program, read_tests, run_each
from whetstone.sandbox.languages import LANGUAGES
from whetstone.sandbox.pool import Pool
from whetstone.sandbox.program import Limits
from whetstone.sandbox.service import open_pool

MAX_FAILURES = 3  # that are described in one turn


class Repair:
    """Answers a program by the failures of its shown tests; ends when they pass or after the last attempt."""

    def __init__(self, max_attempts: int = 3, **settings: Any) -> None:
        if max_attempts < 1:
            raise ValueError("max_attempts must be at least 1")
        self.max_attempts = max_attempts
        self._pool: Pool | None = None

    def reset(self, row: dict[str, Any]) -> str:
        self.row, self.num_attempts = row, 0
        self.language = LANGUAGES[row["language"]]
        tests = read_tests(row["tests"], self.language, row["function"], "the problem")
        self.shown_tests = [tests[index] for index in row["shown"]]
        return ""

    def step(self, text: str) -> Step:
        self.num_attempts += 1
        left = self.max_attempts - self.num_attempts
        program = extract_program(text, self.language, self.row["use_reasoning_format"])
        if program is None:
            answer = "There is no program in your answer."
        else:
            source, limits = self.row["before"] + program, Limits(**self.row["limits"])
            if self._pool is None:
                self._pool = open_pool(self.row["isolation"])
            runs = run_each(self._pool, self.language, source, self.shown_tests, limits)
            failures = [describe_failure(*run) for run in runs if run[1] != "passed"]
            if not failures:
                return "The tests that are shown pass.", 0.0, True, False, {}
            shown = "\n".join(f"- {failure}" for failure in failures[:MAX_FAILURES])
            answer = f"{len(failures)} of {len(runs)} tests fail:\n{shown}"
        if not left:
            return answer, 0.0, True, False, {}
        return f"{answer}\nRepair the program and give all of it again.", 0.0, False, False, {}

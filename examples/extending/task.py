"""Remainders: `What is 17 mod 5?`"""

import random
from types import MappingProxyType

from whetstone.rewards.answers import extract_tag
from whetstone.tasks.base import Task
from whetstone.types import Problem, TaskScore


class Remainders(Task):
    description = "the remainder of a division"
    generated = True  # any index is valid; a task of rows has `__len__` instead
    default_settings = MappingProxyType({"largest": 20})

    def problem(self, index: int) -> Problem:
        """Always the same for the same seed and index: a resumed run makes it again."""
        generator = random.Random(f"{self.seed}/{index}")
        largest = self.settings.get("largest", 20)
        a, b = generator.randint(1, largest), generator.randint(2, 9)
        return self.make_problem(index, f"What is {a} mod {b}?", answer=a % b)

    def gold(self, problem: Problem) -> str:
        """A completion that earns full marks: it is checked before step 1."""
        return f"<answer>{problem.answer}</answer>"

    def score(self, problem: Problem, text: str) -> TaskScore:
        """The text is data: it is compared, never evaluated."""
        answer = extract_tag(text)
        correct = answer == str(problem.answer)
        return TaskScore(correct=correct, reward=float(correct), answer=answer)

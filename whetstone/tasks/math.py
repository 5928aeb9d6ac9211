r"""Math questions from rows: compares the last `\boxed{}` or `<answer>` with the answer of the row."""

import re
from typing import Any

from whetstone.rewards.answers import extract_math
from whetstone.tasks.base import NO_THOUGHTS
from whetstone.tasks.own_rows import RowsTask
from whetstone.tasks.rows import row_settings
from whetstone.types import Problem


class MathTask(RowsTask):
    default_settings = row_settings("math")
    description = (
        "Questions with a final answer, from a JSON, JSONL, CSV or parquet file or a hub data set (path=FILE "
        "or dataset=HUB_NAME)"
    )
    suitable_match = "math"

    def _extract(self, text: str, match: str) -> str | None:
        return extract_math(text) or None

    def gold(self, problem: Problem) -> str | None:
        truth = problem.answer["answer"]
        return None if truth is None else f"{NO_THOUGHTS}<answer>\\boxed{{{truth}}}</answer>"

    def solution(self, problem: Problem) -> Any:
        """As it is written, but GSM8K's `#### 2` in a box: nothing else counts as an answer here."""
        solution = super().solution(problem)
        return _with_boxed_answer(solution) if isinstance(solution, str) else solution

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {**problem.answer.get("columns", {}), "answer": problem.answer["answer"]}


def _with_boxed_answer(text: str) -> str:
    """A worked solution of GSM8K's form (`<<1+1=2>>`, `#### 2`) without annotations, its answer boxed."""
    match = re.search(r"\s*####\s*([-+]?[$€£]?\d[\d,.]*(?:/\d+)?\s?%?)\s*$", text)
    if match is None:
        return text
    working = re.sub(r"<<[\d\s.,+*/()=%$-]*>>", "", text[: match.start()])
    return f"{working}\n\\boxed{{{match[1].strip()}}}"

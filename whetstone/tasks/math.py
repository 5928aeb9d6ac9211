r"""Math questions from rows: compares the last `\boxed{}` or `<answer>` with the answer of the row."""

from functools import cached_property
from typing import Any

from whetstone.errors import UserError
from whetstone.rewards.answers import extract_math, final_answer
from whetstone.tasks.base import NO_THOUGHTS
from whetstone.tasks.own_rows import RowsTask
from whetstone.tasks.prompts import conversation
from whetstone.tasks.rows import question_text, row_settings
from whetstone.types import Problem

PROMPT_COLUMNS = ("question", "problem", "prompt", "messages", "query", "instruction", "input")
ANSWER_COLUMNS = ("ground_truth", "answer", "solution", "final_answer", "target", "label")


class MathTask(RowsTask):
    default_settings = row_settings("math")
    description = (
        "Questions with a final answer, from a JSON, JSONL, CSV or parquet file or a hub data set (path=FILE "
        "or dataset=HUB_NAME)"
    )

    @cached_property
    def match(self) -> str:
        return "math"

    @cached_property
    def _prompt_column(self) -> str:
        return self._column("question_column", PROMPT_COLUMNS, alias="prompt_column")

    @cached_property
    def _answer_column(self) -> str:
        return self._column("answer_column", ANSWER_COLUMNS)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        question, answer = self._prompt_column, self._answer_column
        self._name_unused(self._used_columns)
        rows = [
            {
                "messages": conversation(row[question]) or ({"role": "user", "content": text},),
                "truth": final_answer(question_text(row[answer])),
                "columns": row,
            }
            for row in self._raw
            if (text := question_text(self._prompt_cell(row))) and question_text(row.get(answer))
        ]
        if not rows:
            raise UserError(
                f"{self._where} has no row with both {question} and {answer}: set question_column and "
                "answer_column to columns that are filled."
            )
        self._warn_dropped(len(self._raw) - len(rows), "an empty question or answer")
        return self._own_side(rows, [row["messages"][-1]["content"] for row in rows])

    def _extract(self, text: str, match: str) -> str | None:
        return extract_math(text) or None

    def gold(self, problem: Problem) -> str:
        return f"{NO_THOUGHTS}<answer>\\boxed{{{problem.answer['answer']}}}</answer>"

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {**problem.answer.get("columns", {}), "answer": problem.answer["answer"]}

    def notes(self) -> list[str]:
        return []

r"""Math questions from rows: compares the last `\boxed{}` or `<answer>` with the answer of the row.

Pays `reward_correct`, `reward_wrong` and `reward_no_answer`. Rows are read at first use: a scoring worker,
which only scores, never reads them.
"""

import logging
from functools import cached_property
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.config.plugins import is_plugin
from whetstone.config.row_settings import ROW_SETTINGS
from whetstone.errors import UserError
from whetstone.rewards.answers import extract_math, final_answer, math_equal
from whetstone.tasks import rows
from whetstone.tasks.base import Task
from whetstone.tasks.prompts import conversation
from whetstone.types import Problem, TaskScore


class MathTask(Task):
    """Questions with a known final answer."""

    description = (
        "Questions with a final answer, from a JSON, JSONL, CSV or parquet file or a hub data set (path=FILE "
        "or dataset=HUB_NAME)"
    )
    isolated = True  # symbolic comparison is sympy's

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        super().__init__(config, name, spec, split, shared)
        rows.check_settings(self.settings, ROW_SETTINGS["math"], name)
        self.failure_reward = min(0.0, config.tasks.reward_wrong, config.tasks.reward_no_answer)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        """`question`, `truth` and the other columns of every row of this side."""
        source = rows.source(self.settings, self.split)[0]
        where = f"The data set {source} of task {self.name}"
        raw = rows.read(self.settings, self.split, self.name)
        column = self.settings.get("question_column") or self.settings.get("prompt_column")
        question = rows.pick_column(raw, column, rows.PROMPT_COLUMNS, "question_column", where)
        column = self.settings.get("answer_column")
        answer = rows.pick_column(raw, column, rows.ANSWER_COLUMNS, "answer_column", where)
        filled = [
            row
            for row in raw
            if rows.question_text(row.get(question)) and rows.question_text(row.get(answer))
        ]
        if not filled:
            raise UserError(
                f"{where} has no row with both {question} and {answer}: set question_column and "
                "answer_column to columns that are filled."
            )
        if len(filled) < len(raw):
            logging.getLogger(__name__).warning(
                "%s: %d rows without question or answer left out", where, len(raw) - len(filled)
            )
        problem_rows = [
            {
                "question": rows.question_text(row[question]),
                "messages": conversation(row[question]),
                "truth": final_answer(rows.question_text(row[answer])),
                "columns": row,
                "solution": rows.solution_text(row, self.settings, question, answer),
            }
            for row in filled
        ]
        questions = [row["question"] for row in problem_rows]
        return rows.split_rows(problem_rows, questions, self.settings, self.split, self.shared, where)

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, index: int) -> Problem:
        row = self._rows[index]
        answer = {"answer": row["truth"]}
        if self.config.loss.is_supervised:
            answer["solution"] = row["solution"]
        if any(map(is_plugin, self.config.tasks.reward_funcs)):  # nobody else reads the other columns
            answer["columns"] = row["columns"]
        return self.make_problem(index, row["question"], answer, row["messages"])

    def score(self, problem: Problem, text: str) -> TaskScore:
        tasks = self.config.tasks
        answer = extract_math(text)
        if not answer:
            return TaskScore(correct=False, reward=tasks.reward_no_answer)
        correct = math_equal(answer, problem.answer["answer"])
        return TaskScore(
            correct=correct, reward=tasks.reward_correct if correct else tasks.reward_wrong, answer=answer
        )

    def warm_up(self) -> None:
        math_equal("1+x", "x+1")

    def gold(self, problem: Problem) -> str:
        return f"<think>\n</think>\n<answer>\\boxed{{{problem.answer['answer']}}}</answer>"

    def solution(self, problem: Problem) -> str | None:
        return problem.answer.get("solution") or self.gold(problem)

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {**problem.answer.get("columns", {}), "answer": problem.answer["answer"]}

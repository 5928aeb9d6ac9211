r"""Mathematics from rows: a question, a truth, and the last `\boxed{}` or `<answer>` of what the model
wrote.

Pays `reward_correct`, `reward_wrong` and `reward_no_answer`. Rows are read when first needed, so that a
scoring worker, which only judges, never reads them. Generates nothing.
"""

import logging
from functools import cached_property
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.config.row_settings import ROW_SETTINGS
from whetstone.errors import UserError
from whetstone.rewards.answers import extract_math, final_answer, math_equal
from whetstone.tasks import rows
from whetstone.tasks.prompts import build_messages, conversation, developer_prompt
from whetstone.types import Problem, Score


class MathTask:
    """Questions with a known final answer."""

    generated = False

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        """`shared`: training and evaluation use the same source, so that each gets its side of it."""
        self.name = name
        self.split = split
        self._config = config
        self._settings = rows.check_settings(spec.config, ROW_SETTINGS["math"], name)
        self._shared = shared
        self._prompt = developer_prompt(config.tasks)
        self.worst = min(0.0, config.tasks.reward_wrong, config.tasks.reward_no_answer)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        """`question`, `truth` and the other columns of every row of this side."""
        place = rows.source(self._settings, self.split)[0]
        where = f"The data set {place} of task {self.name}"
        raw = rows.read(self._settings, self.split, self.name)
        wanted = self._settings.get("question_column") or self._settings.get("prompt_column")
        question = rows.pick_column(raw, wanted, rows.PROMPT_COLUMNS, "question_column", where)
        wanted = self._settings.get("answer_column")
        answer = rows.pick_column(raw, wanted, rows.ANSWER_COLUMNS, "answer_column", where)
        whole = [row for row in raw if question_text(row.get(question)) and question_text(row.get(answer))]
        if not whole:
            raise UserError(
                f"{where} has no row with both {question} and {answer}: set question_column and "
                "answer_column to columns that are filled."
            )
        if len(whole) < len(raw):
            logging.getLogger(__name__).warning(
                "%s: %d rows without question or answer left out", where, len(raw) - len(whole)
            )
        made = [
            {
                "question": question_text(row[question]),
                "messages": conversation(row[question]),
                "truth": final_answer(question_text(row[answer])),
                "columns": row,
            }
            for row in whole
        ]
        questions = [row["question"] for row in made]
        return rows.split_rows(made, questions, self._settings, self.split, self._shared, where)

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, index: int) -> Problem:
        row = self._rows[index]
        answer = {"answer": row["truth"]}
        if any(
            ":" in function for function in self._config.tasks.reward_funcs
        ):  # nobody else looks at the other columns
            answer["columns"] = row["columns"]
        return Problem(
            id=f"{self.name}/{self.split}/{index:06d}",
            task=self.name,
            messages=build_messages(
                self._prompt, self._config.tasks.developer_role, row["question"], row["messages"]
            ),
            answer=answer,
        )

    def score(self, problem: Problem, text: str) -> Score:
        tasks = self._config.tasks
        answer = extract_math(text)
        if not answer:
            return Score(
                reward=tasks.reward_no_answer,
                parts={"correct": 0.0, "accuracy": tasks.reward_no_answer},
                answer=None,
            )
        correct = math_equal(answer, problem.answer["answer"])
        paid = tasks.reward_correct if correct else tasks.reward_wrong
        return Score(reward=paid, parts={"correct": float(correct), "accuracy": paid}, answer=answer)

    def gold(self, problem: Problem) -> str:
        return f"<think>\n</think>\n<answer>\\boxed{{{problem.answer['answer']}}}</answer>"

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {**problem.answer.get("columns", {}), "answer": problem.answer["answer"]}


def question_text(value: Any) -> str:
    """A cell as text; of chat messages the last that is to be answered."""
    if isinstance(value, list) and value and isinstance(value[0], dict):  # chat messages
        messages = conversation(value)
        value = messages[-1]["content"] if messages else None
    return "" if value is None else str(value).strip()

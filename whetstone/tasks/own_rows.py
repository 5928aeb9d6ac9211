"""Rows of the user's own: a prompt, an optional answer, and how the two are compared.

`match` is exact, normalized, numeric, math or none; by default the one that suits the answers. With `none`
the user's own `reward_funcs` pay alone. All columns of a row reach reward functions by name, as in TRL.
"""

import logging
from functools import cached_property
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.config.plugins import is_plugin
from whetstone.errors import UserError, did_you_mean
from whetstone.rewards import matching
from whetstone.rewards.answers import final_answer, math_equal
from whetstone.tasks import rows
from whetstone.tasks.base import NO_THOUGHTS
from whetstone.tasks.prompts import Messages, without_solution
from whetstone.types import Problem, TaskScore

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "query", "instruction", "input")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target", "label", "final_answer")
_COMPARISONS = {
    "exact": "compared letter by letter",
    "normalized": "compared as text, without case, punctuation and articles",
    "numeric": "compared as numbers",
    "math": "compared as mathematics",
}
logger = logging.getLogger(__name__)


class RowsTask(rows.RowTask):
    default_settings = rows.row_settings("rows")
    description = (
        "Your own rows: a prompt, and an answer or a reward function of your own (docs/data.md; path=FILE or "
        "dataset=HUB_NAME)"
    )
    isolated = True
    scorer_modules = ("math_verify",)

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        super().__init__(config, name, spec, split, shared)
        rows.check_settings(self.settings, self.default_settings, name)
        match = self.settings.get("match")
        if match is not None and match not in matching.MATCHES:
            raise UserError(
                f"The task {name} has match {rows.short_repr(match)}"
                f"{did_you_mean(str(match), matching.MATCHES) or '.'} "
                f"Choose from {', '.join(matching.MATCHES)}."
            )
        self.failure_reward = min(0.0, config.tasks.reward_wrong, config.tasks.reward_no_answer)

    @property
    def _columns(self) -> str:
        return rows.list_columns(rows.columns_of(self._raw))

    @cached_property
    def _prompt_column(self) -> str:
        is_named = self.settings.get("prompt_column") or self.settings.get("question_column")
        columns = set(rows.columns_of(self._raw))
        if not is_named and {"nums", "target"} <= columns and not columns & set(PROMPT_COLUMNS):
            raise UserError(
                f"{self._where} has numbers and a target, but no prompt: the task countdown writes one, "
                "datasets={countdown: {}} beside the name of the data set; or set prompt_column."
            )
        return self._column("prompt_column", PROMPT_COLUMNS, alias="question_column")

    @cached_property
    def _answer_column(self) -> str | None:
        """None where no answer is needed or there is none."""
        if self.settings.get("answer_column") is not None:
            return self._column("answer_column", ())
        columns = set(rows.columns_of(self._raw)) - {self._prompt_column}
        return next((name for name in ANSWER_COLUMNS if name in columns), None)

    @cached_property
    def _usable_rows(self) -> list[dict[str, Any]]:
        """Every row of the source: its messages, its answer (None: it has none) and all its columns."""
        usable = []
        self._name_unused(self._used_columns)
        for number, row in enumerate(self._raw, 1):
            where = f"{self._where}, row {number}"
            messages = read_messages(self._prompt_cell(row), self._prompt_column, where)
            truth = self._truth(row, where)
            if messages:
                usable.append({"messages": messages, "truth": truth or None, "columns": row})
        if not usable:
            raise UserError(
                f"{self._where} has no row with a {self._prompt_column}: set prompt_column to one of its "
                f"columns ({self._columns})."
            )
        self._warn_dropped(len(self._raw) - len(usable), f"an empty {self._prompt_column}")
        return usable

    @property
    def _used_columns(self) -> list[str | None]:
        used = [self._prompt_column, self._answer_column, self.settings.get("solution_column")]
        used += rows.SOLUTION_COLUMNS if self.config.loss.is_supervised else ()
        return [*used, "input"] if self._prompt_column == "instruction" else used

    def _prompt_cell(self, row: rows.Row) -> Any:
        """The cell of the prompt; of an instruction with its `input`, as Alpaca has it."""
        prompt, context = row.get(self._prompt_column), row.get("input")
        return (
            f"{prompt}\n\n{context}"
            if self._prompt_column == "instruction" and prompt and context
            else prompt
        )

    def _truth(self, row: rows.Row, where: str) -> str | None:
        """The answer of a row: of a worked solution what stands behind `####` or in the box."""
        column = self._answer_column
        if column is None or self.settings.get("match") == "none":
            return None
        value = row.get(column)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, dict | list | tuple | bytes):
            raise UserError(
                f"{where} has {rows.short_repr(value)} as {column}: give a text or a number, or set "
                "match=none and let reward_funcs of your own read it."
            )
        return None if _is_missing(value) else final_answer(str(value).strip())

    @cached_property
    def match(self) -> str:
        """How answers are compared: as set, or as suits them."""
        truths = [row["truth"] for row in self._usable_rows if row["truth"] is not None]
        match = self.settings.get("match") or matching.match_for(truths)
        funcs = self.config.tasks.reward_funcs
        if match == "none" and "accuracy" in funcs and not any(map(is_plugin, funcs)):
            remedy = "leave match out"
            if not self.settings.get("match"):
                remedy = f"set answer_column to one of its columns ({self._columns})"
            raise UserError(
                f"{self._where} has no answers to compare with, so accuracy can't be paid: {remedy}, or pay "
                "by a function of your own, reward_funcs=[my_rewards.py:my_function]."
            )
        if match != "none" and not truths:
            raise UserError(
                f"{self._where} has no answers to compare by match={match}: set answer_column to one of its "
                f"columns ({self._columns}), or set match=none with reward_funcs of your own."
            )
        return match

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        usable_rows = self._usable_rows
        if self.match != "none":
            usable_rows = [row for row in usable_rows if row["truth"] is not None]
            self._warn_dropped(len(self._usable_rows) - len(usable_rows), f"an empty {self._answer_column}")
        questions = [row["messages"][-1]["content"] for row in usable_rows]
        return self._own_side(usable_rows, questions)

    def _warn_dropped(self, count: int, reason: str) -> None:
        if count:
            logger.warning("%s: %d rows with %s are left out", self._where, count, reason)

    def problem(self, index: int) -> Problem:
        row = self._rows[index]
        answer = {"answer": row["truth"], "match": self.match}
        if self.config.loss.is_supervised:
            columns = (self._prompt_column, self._answer_column)
            answer["solution"] = rows.solution_text(row["columns"], self.settings, *columns)
        if any(map(is_plugin, self.config.tasks.reward_funcs)):  # nobody else reads the other columns
            answer["columns"] = row["columns"]
        return self.make_problem(index, row["messages"][-1]["content"], answer, row["messages"])

    def score(self, problem: Problem, text: str) -> TaskScore:
        tasks, match = self.config.tasks, problem.answer["match"]
        answer = self._extract(text, match)
        if match == "none":
            return TaskScore(correct=None, reward=None, answer=answer)
        if answer is None:
            return TaskScore(correct=False, reward=tasks.reward_no_answer)
        correct = matching.same(answer, problem.answer["answer"], match)
        reward = tasks.reward_correct if correct else tasks.reward_wrong
        return TaskScore(correct=correct, reward=reward, answer=answer)

    def _extract(self, text: str, match: str) -> str | None:
        return matching.extract(text, match)

    @property
    def evaluates_text(self) -> bool:
        return self.settings.get("match", "math") == "math"

    def warm_up(self) -> None:
        math_equal("1+x", "x+1")

    def gold(self, problem: Problem) -> str | None:
        truth = problem.answer["answer"]
        if problem.answer["match"] == "none" or truth is None or "answer>" in truth or "\\boxed" in truth:
            return None
        return f"{NO_THOUGHTS}<answer>{truth}</answer>"

    def solution(self, problem: Problem) -> str | None:
        return problem.answer.get("solution") or super().solution(problem)

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {"answer": problem.answer["answer"], **problem.answer.get("columns", {})}

    def notes(self) -> list[str]:
        """Where the rows come from, which columns are read, how answers are compared, what is paid."""
        source, tasks = rows.source(self.settings, self.split)[0], self.config.tasks
        text = f"{self.name}: {len(self):,} rows of {source}, prompts from column {self._prompt_column}"
        if self._prompt_column == "instruction" and "input" in rows.columns_of(self._raw):
            text += " followed by column input"
        if self.match == "none":
            return [f"{text}; without accuracy, the reward comes from {', '.join(tasks.reward_funcs)} alone."]
        chosen = "" if self.settings.get("match") else ", chosen by the answers"
        text += (
            f"; answers from column {self._answer_column}, {_COMPARISONS[self.match]} "
            f"(match: {self.match}{chosen})"
        )
        if "accuracy" in tasks.reward_funcs:
            text += (
                f"; accuracy pays {tasks.reward_correct:g} for a right answer, {tasks.reward_wrong:g} for a "
                f"wrong one, {tasks.reward_no_answer:g} for none"
            )
        return [f"{text}."]


def read_messages(value: Any, column: str, where: str) -> Messages:
    """A cell as the messages of a prompt: a text is one of the user's; empty where the cell is."""
    if not isinstance(value, dict | list | tuple | bytes):
        text = "" if _is_missing(value) else str(value).strip()
        return ({"role": "user", "content": text},) if text else ()
    if isinstance(value, dict | bytes):
        raise UserError(
            f"{where} has {rows.short_repr(value)} as {column}: give a text or a list of chat messages, or "
            "set prompt_column to another column."
        )
    turns = without_solution([_turn(turn, column, where) for turn in value])
    return turns if any(turn["content"] for turn in turns) else ()


def _turn(turn: Any, column: str, where: str) -> dict[str, str]:
    content = turn.get("content") if isinstance(turn, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
    role = turn.get("role", "user") if isinstance(turn, dict) else None
    if not isinstance(content, str) or not isinstance(role, str):
        raise UserError(
            f"{where} has the message {rows.short_repr(turn)} in {column}: a message is "
            '{"role": "user", "content": "text"}.'
        )
    return {"role": role, "content": content}


def _is_missing(value: Any) -> bool:
    return value is None or value != value  # pandas writes NaN where nothing is

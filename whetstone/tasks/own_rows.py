"""Rows of the user's own: a prompt, an optional answer, and how the two are compared.

`match` is exact, normalized, numeric, math or none; by default the one that suits the answers. With `none`
the reward comes from the user's own `reward_funcs` alone: there is no accuracy, and evaluations show the
reward. All columns of a row reach reward functions by name, as in TRL. Rows are read when first needed, so
that a scoring worker never reads them. Generates nothing.
"""

import logging
from functools import cached_property
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.config.row_settings import ROW_SETTINGS
from whetstone.errors import UserError, did_you_mean
from whetstone.rewards import matching
from whetstone.rewards.answers import final_answer
from whetstone.rewards.combine import BUILT_IN
from whetstone.tasks import rows
from whetstone.tasks.prompts import build_messages, developer_prompt
from whetstone.types import Problem, Score

PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "query", "instruction", "input")
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target", "label", "final_answer")
_HOW = {
    "exact": "compared letter by letter",
    "normalized": "compared as text, without case, punctuation and articles",
    "numeric": "compared as numbers",
    "math": "compared as mathematics",
    "none": "not compared",
}
logger = logging.getLogger(__name__)


class RowsTask:
    """One mixture entry of the user's own rows."""

    generated = False

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        """`shared`: training and evaluation use the same source, so that each gets its side of it."""
        self.name = name
        self.split = split
        self._config = config
        self._settings = rows.check_settings(spec.config, ROW_SETTINGS["rows"], name)
        self._shared = shared
        self._prompt = developer_prompt(config.tasks)
        match = self._settings.get("match")
        if match is not None and match not in matching.MATCHES:
            raise UserError(
                f"The task {name} has match {rows.shown(match)}"
                f"{did_you_mean(str(match), matching.MATCHES) or '.'} "
                f"Choose from {', '.join(matching.MATCHES)}."
            )
        self.worst = min(0.0, config.tasks.reward_wrong, config.tasks.reward_no_answer)

    # ---- rows ----------------------------------------------------------------------------------------------

    @cached_property
    def _where(self) -> str:
        return f"The data set {rows.source(self._settings, self.split)[0]} of task {self.name}"

    @cached_property
    def _raw(self) -> list[rows.Row]:
        return rows.read(self._settings, self.split, self.name)

    @property
    def _columns(self) -> str:
        return rows.list_columns(rows.columns_of(self._raw))

    @cached_property
    def _prompt_column(self) -> str:
        wanted = self._settings.get("prompt_column") or self._settings.get("question_column")
        return rows.pick_column(self._raw, wanted, PROMPT_COLUMNS, "prompt_column", self._where)

    @cached_property
    def _answer_column(self) -> str | None:
        """None where no answer is needed or there is none."""
        wanted, there = self._settings.get("answer_column"), rows.columns_of(self._raw)
        if wanted is not None:
            return rows.pick_column(self._raw, wanted, (), "answer_column", self._where)
        names = (name for name in ANSWER_COLUMNS if name in there and name != self._prompt_column)
        return next(names, None)

    @cached_property
    def _whole(self) -> list[dict[str, Any]]:
        """Every row of the source: its messages, its answer (None: it has none) and all its columns."""
        whole = []
        for number, row in enumerate(self._raw, 1):
            where = f"{self._where}, row {number}"
            messages = _messages(row.get(self._prompt_column), self._prompt_column, where)
            truth = self._truth(row, where)
            if messages:
                whole.append({"messages": messages, "truth": truth or None, "columns": row})
        if not whole:
            raise UserError(
                f"{self._where} has no row with a {self._prompt_column}: set prompt_column to one of its "
                f"columns ({self._columns})."
            )
        self._remark(len(self._raw) - len(whole), f"an empty {self._prompt_column}")
        return whole

    def _truth(self, row: rows.Row, where: str) -> str | None:
        """The answer of a row: of a worked solution what stands behind `####` or in the box."""
        column = self._answer_column
        if column is None or self._settings.get("match") == "none":
            return None
        value = row.get(column)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, dict | list | tuple | bytes):
            raise UserError(
                f"{where} has {rows.shown(value)} as {column}: give a text or a number, or set match=none "
                "and let reward_funcs of your own read it."
            )
        return None if _is_missing(value) else final_answer(str(value).strip())

    @cached_property
    def match(self) -> str:
        """How answers are compared: as set, or as suits them."""
        truths = [row["truth"] for row in self._whole if row["truth"] is not None]
        match = self._settings.get("match") or matching.match_for(truths)
        funcs = self._config.tasks.reward_funcs
        if match == "none" and "accuracy" in funcs and all(function in BUILT_IN for function in funcs):
            remedy = "leave match out"
            if not self._settings.get("match"):
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
        made = self._whole
        if self.match != "none":
            made = [row for row in made if row["truth"] is not None]
            self._remark(len(self._whole) - len(made), f"an empty {self._answer_column}")
        questions = [row["messages"][-1]["content"] for row in made]
        return rows.split_rows(made, questions, self._settings, self.split, self._shared, self._where)

    def _remark(self, count: int, what: str) -> None:
        if count:
            logger.warning("%s: %d rows with %s are left out", self._where, count, what)

    # ---- what every task offers ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, index: int) -> Problem:
        row = self._rows[index]
        own = any(function not in BUILT_IN for function in self._config.tasks.reward_funcs)
        prompt = self._prompt
        return Problem(
            id=f"{self.name}/{self.split}/{index:06d}",
            task=self.name,
            messages=build_messages(
                prompt, self._config.tasks.developer_role, row["messages"][-1]["content"], row["messages"]
            ),
            answer={
                "answer": row["truth"],
                "match": self.match,
                **({"columns": row["columns"]} if own else {}),  # nobody else looks at them
            },
        )

    def score(self, problem: Problem, text: str) -> Score:
        tasks, match = self._config.tasks, problem.answer["match"]
        if match == "none":  # not judged: no "correct", no "accuracy"
            return Score(reward=0.0, parts={}, answer=matching.extract(text, match))
        answer = matching.extract(text, match)
        if answer is None:
            paid = tasks.reward_no_answer
            return Score(reward=paid, parts={"correct": 0.0, "accuracy": paid}, answer=None)
        correct = matching.same(answer, problem.answer["answer"], match)
        paid = tasks.reward_correct if correct else tasks.reward_wrong
        return Score(reward=paid, parts={"correct": float(correct), "accuracy": paid}, answer=answer)

    def gold(self, problem: Problem) -> str | None:
        truth = problem.answer["answer"]
        if problem.answer["match"] == "none" or truth is None or "answer>" in truth or "\\boxed" in truth:
            return None
        return f"<think>\n</think>\n<answer>{truth}</answer>"

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {"answer": problem.answer["answer"], **problem.answer.get("columns", {})}

    def describe(self) -> str:
        """Where the rows come from, which columns are read, how answers are compared, what is paid."""
        place, tasks = rows.source(self._settings, self.split)[0], self._config.tasks
        told = f"{self.name}: {len(self):,} rows of {place}, prompts from column {self._prompt_column}"
        if self.match == "none":
            return f"{told}; without accuracy, the reward comes from {', '.join(tasks.reward_funcs)} alone."
        chosen = "" if self._settings.get("match") else ", chosen by the answers"
        told += (
            f"; answers from column {self._answer_column}, {_HOW[self.match]} (match: {self.match}{chosen})"
        )
        if "accuracy" not in tasks.reward_funcs:
            return f"{told}."
        return (
            f"{told}; accuracy pays {tasks.reward_correct:g} for a right answer, {tasks.reward_wrong:g} for "
            f"a wrong one, {tasks.reward_no_answer:g} for none."
        )


def _messages(value: Any, column: str, where: str) -> tuple[dict[str, str], ...]:
    """A cell as the messages of a prompt: a text is one of the user's; empty where the cell is."""
    if not isinstance(value, dict | list | tuple | bytes):
        text = "" if _is_missing(value) else str(value).strip()
        return ({"role": "user", "content": text},) if text else ()
    if isinstance(value, dict | bytes):
        raise UserError(
            f"{where} has {rows.shown(value)} as {column}: give a text or a list of chat messages, or set "
            "prompt_column to another column."
        )
    turns = [_turn(turn, column, where) for turn in value]
    while turns and turns[-1]["role"] == "assistant":  # the solution of a supervised data set
        turns.pop()
    return tuple(turns) if any(turn["content"] for turn in turns) else ()


def _turn(turn: Any, column: str, where: str) -> dict[str, str]:
    content = turn.get("content") if isinstance(turn, dict) else None
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]
    role = turn.get("role", "user") if isinstance(turn, dict) else None
    if not isinstance(content, str) or not isinstance(role, str):
        raise UserError(
            f"{where} has the message {rows.shown(turn)} in {column}: a message is "
            '{"role": "user", "content": "text"}.'
        )
    return {"role": role, "content": content}


def _is_missing(value: Any) -> bool:
    return value is None or value != value  # pandas writes NaN where nothing is

"""Programming problems from rows: a statement and tests; the answer is a program, its reward what it passes.

Every row is checked when it is read: its language is there, its tests can be used. Running and judging is
`rewards/programs.py`; the sandbox belongs to the process that scores, one for all code tasks. Rows are read
when first needed, so that a scoring worker never reads them.
"""

import json
import math
import random
from functools import cached_property
from pathlib import Path
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.config.row_settings import ROW_SETTINGS
from whetstone.errors import UserError, did_you_mean
from whetstone.rewards.programs import Check, extract_program, judge, read_tests
from whetstone.sandbox import languages
from whetstone.sandbox.languages import Language
from whetstone.sandbox.pool import Pool, shared_pool
from whetstone.sandbox.program import Limits
from whetstone.seeds import seed
from whetstone.tasks import examples, rows
from whetstone.tasks.math import question_text
from whetstone.tasks.prompts import build_messages, check_template, developer_prompt
from whetstone.types import Problem, Score

PROBLEMS = "problems"  # the set that ships with the package, by this name as `path`
_DIRECT = "Write the answer in {language}. Reply with the program only, in one fenced code block."
_REASONED = (
    "Write the answer in {language}. First think between <reasoning> and </reasoning>, then give the whole "
    "program between <answer> and </answer>."
)
# What the tests of other projects call the fields of ours.
_TEST_FIELDS = {"test_code": "code", "expected_output": "stdout"}
_LONGEST_TIME_LIMIT_S = 3600.0
_PROMPT = "{statement}\n{signature}{starter}\n{format}"


class CodeTask:
    """One mixture entry of programming problems."""

    generated = False
    worst = 0.0

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        self.name = name
        self.split = split
        self._config = config
        self._settings = dict(rows.check_settings(spec.config, ROW_SETTINGS["code"], name))
        if self._settings.get("path") == PROBLEMS:
            self._settings["path"] = str(shipped_problems())
        self._shared = shared
        self._prompt = developer_prompt(config.tasks)
        self._language = _language(spec.config["language"], name) if spec.config.get("language") else None
        if self._settings.get("prompt"):
            known = ("statement", "signature", "starter", "language", "format")
            check_template(self._settings["prompt"], known, f"The setting `prompt` of task {name}")
        self._test_fields = _check_fields(self._settings.get("test_fields"), name)
        limit = config.programs.sandbox_time_limit_s
        if limit >= config.tasks.reward_timeout_s:
            raise UserError(
                f"sandbox_time_limit_s ({limit:g}) must be less than reward_timeout_s "
                f"({config.tasks.reward_timeout_s:g}), which holds for all tests of an answer together: "
                "raise the latter."
            )

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        settings = self._settings
        where = f"The data set {rows.source(settings, self.split)[0]} of task {self.name}"
        made_here = examples.EXAMPLES.get(str(settings.get("path")))
        raw = made_here() if made_here else rows.read(settings, self.split, self.name)
        statement = rows.pick_column(
            raw,
            settings.get("statement_column"),
            ("statement", "description", "question", "problem", "prompt"),
            "statement_column",
            where,
        )
        tests = rows.pick_column(
            raw, settings.get("tests_column"), ("tests", "test_list", "test"), "tests_column", where
        )
        made = [self._row(row, statement, tests, f"{where}, row {i}") for i, row in enumerate(raw, 1)]
        made = [row for row in made if row is not None]
        if not made:
            raise UserError(
                f"{where} has no problem in {self._language.name if self._language else 'any language'}."
            )
        statements = [row["statement"] for row in made]
        return rows.split_rows(made, statements, settings, self.split, self._shared, where)

    def _row(self, row: dict[str, Any], statement: str, tests: str, where: str) -> dict[str, Any] | None:
        """One row in the form that problems are made of; None where it is not for this language."""
        if self._language is None and not row.get("language"):
            raise UserError(f"{where} names no language: give a column `language`, or set language=python.")
        language = self._language or _language(row["language"], self.name)
        if row.get("language") and _language(row["language"], self.name, installed=False) is not language:
            return None
        function = row.get("function") or row.get("entry_point")
        if function is not None and not isinstance(function, str):
            raise UserError(f"{where} has {rows.shown(function)} as `function`: give the name of one.")
        text = question_text(row.get(statement))
        if not text or row.get(tests) is None:
            raise UserError(f"{where} has no {statement if not text else tests}: give it, or drop the row.")
        checks = _renamed(row[tests], self._test_fields)
        read_tests(checks, language, function, where)  # complains now, not in mid-run
        return {
            "statement": text,
            "language": language.name,
            "function": function,
            "tests": checks,
            "starter": str(row.get("starter_code") or ""),
            "solution": _in_language(row.get("solution"), language),
            "wrong": _in_language(row.get("wrong"), language),
            "time_limit_s": _seconds(row.get("time_limit_s"), where),
        }

    def problem(self, index: int) -> Problem:
        row = self._rows[index]
        programs = self._config.programs
        title = languages.LANGUAGES[row["language"]].title
        signature = f"The program must define {row['function']}.\n" if row["function"] else ""
        continues = bool(self._settings.get("continue_starter"))
        starter = f"\nBegin with:\n{row['starter']}\n" if row["starter"] and not continues else ""
        form = _REASONED if programs.use_reasoning_format else _DIRECT
        question = str(self._settings.get("prompt") or _PROMPT).format_map(
            {
                "statement": row["statement"],
                "signature": signature,
                "starter": row["starter"] if self._settings.get("prompt") else starter,
                "language": title,
                "format": form.format(language=title),
            }
        )
        return Problem(
            id=f"{self.name}/{self.split}/{index:06d}",
            task=self.name,
            messages=build_messages(self._prompt, self._config.tasks.developer_role, question),
            answer={**row, "before": row["starter"] if continues else ""},
        )

    def score(self, problem: Problem, text: str) -> Score:
        row, programs = problem.answer, self._config.programs
        language = languages.LANGUAGES[row["language"]]
        program = extract_program(text, language, programs.use_reasoning_format)
        if program is None:
            parts = {"correct": 0.0, "accuracy": 0.0}
            return Score(reward=0.0, parts=parts, answer=None, outcome="no_program")
        tests = read_tests(row["tests"], language, row["function"], problem.id)
        verdict = judge(
            self._pool,
            language,
            row["before"] + program,
            self._chosen(tests, problem),
            self._limits(row, len(tests)),
        )
        share = verdict.passed / len(verdict.tests)
        perfect = float(verdict.passed == len(verdict.tests))
        paid = programs.base_reward_weight * (share if programs.test_reward == "partial" else perfect)
        paid += programs.perfect_reward_weight * perfect
        return Score(
            reward=paid,
            parts={"correct": perfect, "accuracy": paid},
            answer=program,
            outcome=verdict.outcome,
            tests=verdict.tests,
        )

    def _chosen(self, tests: tuple[Check, ...], problem: Problem) -> list[Check]:
        """The tests of this answer: in training a few, always the same ones for a problem."""
        most = self._config.programs.max_tests_per_problem
        if self.split == "eval" or not most or most >= len(tests):
            return list(tests)
        order = random.Random(seed(self._config.tasks.dataset_seed, "tests", problem.question))
        return [tests[i] for i in sorted(order.sample(range(len(tests)), most))]

    def _limits(self, row: dict[str, Any], num_tests: int) -> Limits:
        programs, whole = self._config.programs, self._config.tasks.reward_timeout_s
        # Scoring must end before the scorer loses patience, or a slow program would count as a broken reward.
        return Limits(
            seconds=min(float(row["time_limit_s"] or programs.sandbox_time_limit_s), 0.8 * whole),
            memory_mb=programs.sandbox_memory_mb,
            output_kb=programs.sandbox_output_kb,
            compile_seconds=0.6 * whole,
            total_seconds=0.8 * whole,
        )

    @cached_property
    def _pool(self) -> Pool:
        programs = self._config.programs
        if programs.sandbox_pool == "ray":
            from whetstone.sandbox.ray_pool import RayPool

            return RayPool(address=programs.ray_address, isolation=programs.sandbox_isolation)
        return shared_pool(programs.sandbox_isolation)

    def prepare(self, read_rows: bool = True) -> str | None:
        """Start the sandbox before the first answer comes; what protects the machine, in a sentence."""
        names = [self._language.name] if self._language else []
        if not names and read_rows:
            names = sorted({row["language"] for row in self._rows})
        for name in names:
            self._pool.start(name)
        return self._pool.statement if names else None

    def gold(self, problem: Problem) -> str | None:
        solution = problem.answer["solution"]
        if solution is None:
            return None
        program = solution.removeprefix(problem.answer["before"])
        return f"<reasoning>\n</reasoning>\n<answer>\n{program}\n</answer>"

    def columns(self, problem: Problem) -> dict[str, Any]:
        row = problem.answer
        return {"answer": row["solution"], "tests": row["tests"], "language": row["language"]}


def _check_fields(fields: Any, task: str) -> dict[str, str | None]:
    """`test_fields`: field of a row's tests -> ours, or null where it has no meaning."""
    fields = {} if fields is None else fields
    if not isinstance(fields, dict) or any(
        value is not None and not isinstance(value, str) for value in fields.values()
    ):
        raise UserError(
            f"The task {task} has test_fields {rows.shown(fields)}: give a mapping from the names in your "
            "rows to ours, such as {test_code: code, expected_output: stdout, comment: null}."
        )
    return {**_TEST_FIELDS, **{str(key): value for key, value in fields.items()}}


def _renamed(tests: Any, fields: dict[str, str | None]) -> Any:
    """Tests with our names for their fields; what is not understood is left to `read_tests`."""
    if isinstance(tests, str):
        try:
            parsed = json.loads(tests)
        except (ValueError, RecursionError):
            return tests
        tests = parsed if isinstance(parsed, list | dict) else tests
    if isinstance(tests, dict):
        return _renamed([tests], fields)
    if not isinstance(tests, list):
        return tests
    return [
        {renamed: value for key, value in test.items() if (renamed := fields.get(key, key)) is not None}
        if isinstance(test, dict)
        else test
        for test in tests
    ]


def _seconds(value: Any, where: str) -> float | None:
    """A time limit of a row, or a complaint."""
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds <= _LONGEST_TIME_LIMIT_S:
        raise UserError(
            f"{where} has {rows.shown(value)} as time_limit_s: give seconds, above 0 and at most "
            f"{_LONGEST_TIME_LIMIT_S:g}."
        )
    return seconds


def _language(name: str, task: str, installed: bool = True) -> Language:
    """A language that is known (and installed), or a complaint that names it."""
    try:
        found = languages.language(str(name))
    except UserError:
        known = list(languages.LANGUAGES)
        raise UserError(
            f"The task {task} is in {rows.shown(name)}, which is no language we know"
            f"{did_you_mean(str(name), known) or '.'} "
            f"Choose from {', '.join(known)}."
        ) from None
    reason = languages.missing(found.name) if installed else None
    if reason is not None:
        raise UserError(
            f"The task {task} can't be trained on here. {reason} `whet doctor` tells what is there."
        )
    return found


def _in_language(solution: Any, language: Language) -> str | None:
    """A solution: text, or by language; one marked as not run counts as none."""
    if isinstance(solution, dict):
        solution = solution.get(language.name)
    return str(solution) if solution else None


def shipped_problems() -> Path:
    """The problems that come with the package."""
    return Path(__file__).resolve().parent / "problems.jsonl"

"""Programming problems from rows: a statement and tests. A program is paid by the tests that it passes."""

import contextlib
import json
import logging
import math
import random
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.errors import UserError
from whetstone.rewards.assertions import UnsupportedTest
from whetstone.rewards.programs import (
    ProgramResult,
    ProgramTest,
    extract_program,
    read_tests,
    run_tests,
)
from whetstone.sandbox import languages
from whetstone.sandbox.languages import Language
from whetstone.sandbox.pool import Pool, shared_pool
from whetstone.sandbox.program import Limits
from whetstone.seeds import seed
from whetstone.tasks import examples, rows
from whetstone.tasks.prompts import check_template
from whetstone.tasks.row_files import parse_plain
from whetstone.tasks.row_reader import cell, read_messages
from whetstone.types import Problem, TaskScore

PROBLEMS = "problems"  # the set that ships with the package, by this name as `path`
_DIRECT = "Write the answer in {language}. Reply with the program only, in one fenced code block."
_REASONED = (
    "Write the answer in {language}. First think between <reasoning> and </reasoning>, then give the whole "
    "program between <answer> and </answer>."
)
# What the tests of other projects call the fields of ours.
_TEST_FIELDS = {"test_code": "code", "expected_output": "stdout"}
_LONGEST_TIME_LIMIT_S = 3600.0
_MAX_KNOWN = 256  # programs whose results are remembered: samples of a prompt are often the same one
_OTHER_COLUMNS = ("language", "function", "entry_point", "starter_code", "solution", "wrong", "time_limit_s")
STATEMENT_COLUMNS = ("statement", "description", "question", "problem", "prompt", "text", "question_content")
# Of MBPP, HumanEval and LiveCodeBench, whose rows are in Python without saying so.
PYTHON_TESTS = ("test_list", "test", "public_test_cases")
_THEIR_COLUMNS = ("code", "canonical_solution", "test_imports", "test_setup_code", "private_test_cases")
_PROMPT = "{statement}\n{signature}{starter}\n{format}"
logger = logging.getLogger(__name__)


class CodeTask(rows.RowTask):
    """One mixture entry of programming problems. `score` runs the programs in the sandbox."""

    description = (
        "Programs that are run against tests, in Python, q, Klong, C, ... (config: {path: problems, "
        "language: python} for the set that ships)"
    )
    default_settings = rows.row_settings("code")
    why_left_out = "of another language, or refused"

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        super().__init__(config, name, spec, split, shared)
        rows.check_settings(spec.config, self.default_settings, name)
        if self.settings.get("path") == PROBLEMS:
            self.settings = {**self.settings, "path": str(shipped_problems())}
        self._language = _language(spec.config["language"], name) if spec.config.get("language") else None
        if self.settings.get("prompt"):
            known = ("statement", "signature", "starter", "language", "format")
            check_template(self.settings["prompt"], known, f"The setting `prompt` of task {name}")
        self._test_fields = _check_fields(self.settings.get("test_fields"), name)
        self._refused: list[str] = []  # why rows are left out
        self._known: dict[tuple[str, str], ProgramResult] = {}  # problem and program -> its result
        limit = config.programs.sandbox_time_limit_s
        if limit >= config.tasks.reward_timeout_s:
            raise UserError(
                f"sandbox_time_limit_s ({limit:g}) must be less than reward_timeout_s "
                f"({config.tasks.reward_timeout_s:g}), which holds for all tests of an answer together: "
                "raise the latter."
            )

    @cached_property
    def _raw(self) -> list[rows.Row]:
        example_rows = examples.EXAMPLES.get(str(self.settings.get("path")))
        return example_rows() if example_rows else rows.read(self.settings, self.split, self.name)

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        statement = self._reader.find("statement_column", STATEMENT_COLUMNS, is_needed=True)
        tests = self._reader.find("tests_column", ("tests", *PYTHON_TESTS), is_needed=True)
        self._reader.also_used = (*_OTHER_COLUMNS, *_THEIR_COLUMNS)
        numbered = enumerate((_as_ours({**row, tests: cell(row, tests)}, tests) for row in self._raw), 1)
        problem_rows = [self._row(row, statement, tests, f"{self._where}, row {i}") for i, row in numbered]
        problem_rows = [row for row in problem_rows if row is not None]
        if self._refused:
            count, why = f"{len(self._refused)} of {len(self._raw)}", self._refused[0]
            logger.warning("%s: %s rows are left out. %s", self._where, count, why)
        if any(str(row.get("private_test_cases") or "[")[0] != "[" for row in self._raw):
            logger.warning("%s: private_test_cases are pickled, which is never read.", self._where)
        if not problem_rows:
            language = self._language.name if self._language else "any language"
            raise UserError((self._refused or [f"{self._where} has no problem in {language}."])[0])
        own_rows = self._own_side(problem_rows, [row["statement"] for row in problem_rows])
        del self._raw, self._reader  # tests may be large
        return own_rows

    def _row(self, row: dict[str, Any], statement: str, tests: str, where: str) -> dict[str, Any] | None:
        """One row in the form that problems are made of; None where it is not for this language."""
        if self._language is None and not row.get("language") and tests not in PYTHON_TESTS:
            raise UserError(f"{where} names no language: give a column `language`, or set language=python.")
        language = self._language or _language(row.get("language") or "python", self.name)
        if row.get("language") and _language(row["language"], self.name, installed=False) is not language:
            return None
        function = row.get("function")
        if function is not None and not isinstance(function, str):
            raise UserError(f"{where} has {rows.short_repr(function)} as `function`: give the name of one.")
        turns = read_messages(cell(row, statement), statement, where)
        text = turns[-1]["content"] if turns else ""
        if not text or row.get(tests) is None:
            raise UserError(f"{where} has no {statement if not text else tests}: give it, or drop the row.")
        checks = _renamed(row[tests], self._test_fields)
        try:
            read_tests(checks, language, function, where)  # complains now, not in mid-run
        except UnsupportedTest as error:
            self._refused.append(str(error))
            return None
        return {
            "statement": text.strip(),
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
        programs = self.config.programs
        title = languages.LANGUAGES[row["language"]].title
        signature = f"The program must define {row['function']}.\n" if row["function"] else ""
        continues = bool(self.settings.get("continue_starter"))
        starter = f"\nBegin with:\n{row['starter']}\n" if row["starter"] and not continues else ""
        answer_format = _REASONED if programs.use_reasoning_format else _DIRECT
        question = str(self.settings.get("prompt") or _PROMPT).format(
            statement=row["statement"],
            signature=signature,
            starter=row["starter"] if self.settings.get("prompt") else starter,
            language=title,
            format=answer_format.format(language=title),
        )
        return self.make_problem(index, question, {**row, "before": row["starter"] if continues else ""})

    def score(self, problem: Problem, text: str) -> TaskScore:
        row, programs = problem.answer, self.config.programs
        language = languages.LANGUAGES[row["language"]]
        program = extract_program(text, language, programs.use_reasoning_format)
        if program is None:
            return TaskScore(correct=False, reward=0.0, outcome="no_program")
        tests = read_tests(row["tests"], language, row["function"], problem.id)
        selected, source = self._select_tests(tests, problem), row["before"] + program
        result = self._known.get((problem.id, source))
        if result is None:
            result = run_tests(self._pool, language, source, selected, self._limits(row))
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            if result.outcome != "timeout":  # which are missed by chance
                self._known[problem.id, source] = result
        passed_fraction = result.passed / len(result.tests)
        all_passed = float(result.passed == len(result.tests))
        base = passed_fraction if programs.test_reward == "partial" else all_passed
        return TaskScore(
            correct=bool(all_passed),
            reward=programs.base_reward_weight * base + programs.perfect_reward_weight * all_passed,
            answer=program,
            outcome=result.outcome,
            tests=result.tests,
        )

    def _select_tests(self, tests: tuple[ProgramTest, ...], problem: Problem) -> list[ProgramTest]:
        """The tests of this answer: in training a few, always the same ones for a problem."""
        max_tests = self.config.programs.max_tests_per_problem
        if self.split == "eval" or not max_tests or max_tests >= len(tests):
            return list(tests)
        order = random.Random(seed(self.config.tasks.dataset_seed, "tests", problem.question))
        return [tests[i] for i in sorted(order.sample(range(len(tests)), max_tests))]

    def _limits(self, row: dict[str, Any]) -> Limits:
        programs, total_s = self.config.programs, self.config.tasks.reward_timeout_s
        # Scoring must end before the scorer loses patience, or a slow program would count as a broken reward.
        return Limits(
            seconds=min(float(row["time_limit_s"] or programs.sandbox_time_limit_s), 0.8 * total_s),
            memory_mb=programs.sandbox_memory_mb,
            output_kb=programs.sandbox_output_kb,
            compile_seconds=0.6 * total_s,
            total_seconds=0.8 * total_s,
        )

    @cached_property
    def _pool(self) -> Pool:
        programs = self.config.programs
        if programs.sandbox_pool == "ray":
            from whetstone.sandbox.ray_pool import RayPool

            return RayPool(address=programs.ray_address, isolation=programs.sandbox_isolation)
        return shared_pool(programs.sandbox_isolation)

    def prepare(self) -> str | None:
        """Start the sandbox; the isolation of this machine in a sentence."""
        names = [self._language.name] if self._language else sorted({row["language"] for row in self._rows})
        for name in names:
            self._pool.start(name)
        return self._pool.statement if names else None

    def warm_up(self) -> None:
        """Start the sandbox: the first answer should not pay for it. Reads no rows."""
        if self._language:
            self._pool.start(self._language.name)

    def gold(self, problem: Problem) -> str | None:
        """The solution in the form that the prompt asks for: supervised fine-tuning imitates it."""
        row = problem.answer
        if row["solution"] is None:
            return None
        program = row["solution"].removeprefix(row["before"])
        if self.config.programs.use_reasoning_format:
            return f"<reasoning>\n</reasoning>\n<answer>\n{program.strip()}\n</answer>"
        if row["before"]:
            return program
        fence = languages.LANGUAGES[row["language"]].fences[0]
        return f"```{fence}\n{program.rstrip()}\n```"

    def columns(self, problem: Problem) -> dict[str, Any]:
        row = problem.answer
        return {"answer": row["solution"], "tests": row["tests"], "language": row["language"]}

    def notes(self) -> list[str]:
        programs = self.config.programs
        base = "the share of tests passed" if programs.test_reward == "partial" else "passing all tests"
        text = f"{self.name}: accuracy pays {programs.base_reward_weight:g} x {base}"
        return [*super().notes(), f"{text}, and {programs.perfect_reward_weight:g} more if all pass."]


def _check_fields(fields: Any, task: str) -> dict[str, str | None]:
    """`test_fields`: field of a row's tests -> ours, or null where it has no meaning."""
    fields = {} if fields is None else fields
    if not isinstance(fields, dict) or not all(isinstance(value, str | None) for value in fields.values()):
        raise UserError(
            f"The task {task} has test_fields {rows.short_repr(fields)}: give a mapping from the names in "
            "your rows to ours, such as {test_code: code, expected_output: stdout, comment: null}."
        )
    return {**_TEST_FIELDS, **{str(key): value for key, value in fields.items()}}


def _as_ours(row: rows.Row, column: str) -> rows.Row:
    """A row of MBPP, HumanEval or LiveCodeBench under our names."""
    function, tests = row.get("function") or row.get("entry_point"), _listed(row.get(column))
    if column not in PYTHON_TESTS or not tests:
        return {**row, "function": function}
    solution, body = row.get("solution") or row.get("code"), row.get("canonical_solution")
    if body and not solution:  # it continues the prompt
        solution = body if f"def {function}(" in str(body) else f"{row.get('prompt') or ''}{body}"
    if function is None and column == "test_list":
        names = re.findall(r"def (\w+)", str(solution))
        function = next((name for name in names if re.search(rf"\b{name}\(", str(tests[0]))), None)
    setup = "\n".join(map(str, [*_listed(row.get("test_imports")), row.get("test_setup_code") or ""])).strip()
    tests += [test for test in _listed(row.get("private_test_cases")) if isinstance(test, dict)]
    tests = [_plain_test(test, setup, str(row.get("starter_code"))) for test in tests]
    return {**row, "function": function, "solution": solution, column: tests}


def _plain_test(test: Any, setup: str, starter: str) -> Any:
    """A test of MBPP behind its setup; one of LiveCodeBench, of a method by JSON, as an assertion."""
    if not isinstance(test, dict):
        return f"{setup}\n{test}" if setup and isinstance(test, str) else test
    if test.get("testtype") != "functional":
        return {key: value for key, value in test.items() if key != "testtype"}
    with contextlib.suppress(ValueError, LookupError, AttributeError, TypeError, RecursionError):
        arguments = [repr(json.loads(line)) for line in test["input"].splitlines() if line.strip()]
        method, value = re.findall(r"def (\w+)\(self", starter)[0], json.loads(test["output"])
        return f"assert Solution().{method}({', '.join(arguments)}) == {value!r}"
    return test  # `read_tests` complains


def _listed(value: Any) -> list[Any]:
    """A cell as a list: one of its own, one in JSON, or of what it holds."""
    value = parse_plain(value)
    return value if isinstance(value, list) else [] if value in (None, "") else [value]


def _renamed(tests: Any, fields: dict[str, str | None]) -> list[Any]:
    """Tests with our names for their fields; what is not understood is left to `read_tests`."""
    return [
        {renamed: value for key, value in test.items() if (renamed := fields.get(key, key)) is not None}
        if isinstance(test, dict)
        else test
        for test in _listed(tests)
    ]


def _seconds(value: Any, where: str) -> float | None:
    if value is None or value == "":
        return None
    seconds = math.nan
    with contextlib.suppress(TypeError, ValueError):
        seconds = float(value)
    if isinstance(value, bool) or not 0 < seconds <= _LONGEST_TIME_LIMIT_S:
        raise UserError(
            f"{where} has {rows.short_repr(value)} as time_limit_s: give seconds, above 0 and at most "
            f"{_LONGEST_TIME_LIMIT_S:g}."
        )
    return seconds


def _language(name: str, task: str, installed: bool = True) -> Language:
    """A language that is known (and installed), or a complaint that names it."""
    language = languages.language(str(name))
    if installed and (reason := languages.missing(language.name)):
        raise UserError(f"The task {task} can't be trained on here. {reason} `whet doctor` lists the others.")
    return language


def _in_language(solution: Any, language: Language) -> str | None:
    """A solution: text, or by language; one marked as not run counts as none."""
    if isinstance(solution, dict):
        solution = solution.get(language.name)
    return str(solution) if solution else None


def shipped_problems() -> Path:
    return Path(__file__).resolve().parent / "problems.jsonl"

"""Inside a scoring process: answers come in, parts of rewards go out, one message for each as soon as it
is done.

There are two kinds. Isolated ones judge text by the tasks' scorers, behind the sandbox's layers, for many of
those scorers are other people's code and some evaluate what they are given. The others run programs (in their
own sandbox) and call the user's reward functions, which run as the user wrote them. Keeps no time of its own:
the parent ends a process that takes too long. Loads no rows, no model and no torch.
"""

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from whetstone.config.sections import Config
from whetstone.errors import UserError, message_of
from whetstone.rewards import custom
from whetstone.rewards.answers import math_equal
from whetstone.rewards.combine import BUILT_IN
from whetstone.rewards.shaping import format_reward, overlong_penalty
from whetstone.sandbox import code_guard, evaluator, protocol
from whetstone.sandbox.evaluator import EvaluationFailed
from whetstone.sandbox.isolate import isolate
from whetstone.tasks.base import Task
from whetstone.tasks.code import CodeTask
from whetstone.tasks.gym import GymTask
from whetstone.tasks.math import MathTask
from whetstone.tasks.mixture import make_tasks
from whetstone.tasks.own_rows import RowsTask
from whetstone.types import Problem, Score

Parts = dict[str, float]
PACKAGES = ("reasoning_gym", "math_verify", "sympy", "numpy")  # what isolated scorers may import late
_MEMORY_MB = 4096  # of address space: an answer such as 10^{10^{10}} would take all there is
_LONGEST_LOGGED = 1_000  # characters of a value that a user's function logs


def split_of(problem: Problem) -> str:
    """The split in a problem's id ("chain_sum/train/000123")."""
    return problem.id.rsplit("/", 2)[1]


class Judge:
    """Scores answers by the tasks and the reward functions of a configuration."""

    def __init__(self, config: Config, *, runs_programs: bool = True) -> None:
        self._config = config
        splits = ["eval", "train"] if config.tasks.datasets else ["eval"]
        self._tasks: dict[str, dict[str, Task]] = {split: make_tasks(config, split) for split in splits}
        self._custom: dict[str, Callable[..., Any]] = {}
        if runs_programs:
            for task in self._all_tasks():
                if isinstance(task, CodeTask):
                    task.prepare(read_rows=False)  # the start of a sandbox is not the first answer's fault
            named = [spec for spec in config.tasks.reward_funcs if spec not in BUILT_IN]
            self._custom = {spec: custom.load(spec) for spec in named}

    def _all_tasks(self) -> list[Task]:
        return [task for tasks in self._tasks.values() for task in tasks.values()]

    def warm_up(self) -> None:
        """Import what scorers import at their first answer: afterwards it may be out of reach, and would
        count as that answer's time.
        """
        if any(isinstance(task, MathTask | RowsTask) for task in self._all_tasks()):
            math_equal("1+x", "x+1")
        for task in self._all_tasks():
            if isinstance(task, GymTask):
                task.warm_up()

    @property
    def failure_reward(self) -> dict[tuple[str, str], float]:
        """What an answer is paid whose scoring fails, by split and task."""
        return {
            (split, name): task.failure_reward
            for split, tasks in self._tasks.items()
            for name, task in tasks.items()
        }

    def judged(self, problem: Problem, text: str, num_tokens: int) -> tuple[Parts, Score]:
        """The built-in parts of one answer's reward, with "correct", and the judgement of its task."""
        config = self._config
        # What the prompt put into the assistant's mouth belongs to what it said.
        whole = config.model.assistant_prefix + text
        score = self._tasks[split_of(problem)][problem.task].score(problem, whole)
        parts = {name: score.parts[name] for name in ("correct",) if name in score.parts}
        for name in config.tasks.reward_funcs:
            if name == "accuracy" and name in score.parts:
                parts[name] = score.parts[name]
            elif name == "format":
                parts[name] = format_reward(whole)
            elif name == "length":
                limit, buffer = config.rollout.max_completion_length, config.tasks.overlong_buffer_length
                parts[name] = overlong_penalty(num_tokens, limit, buffer)
        return parts, score

    def call_custom(
        self, spec: str, answers: Sequence[tuple[Problem, str, Sequence[int], bool]]
    ) -> tuple[list[float | str | None], custom.Logged]:
        """The values of one of the user's functions for whole lists of answers."""
        problems = [problem for problem, _, _, _ in answers]
        texts = [text for _, text, _, _ in answers]
        chat = self._config.model.apply_chat_template
        rows = [self._columns(problem) for problem in problems]
        names = dict.fromkeys(name for row in rows for name in row)
        arguments = {
            **{name: [row.get(name) for row in rows] for name in names},
            "truncated": [truncated for _, _, _, truncated in answers],
            "prompts": [
                list(problem.messages) if chat else self._bare_prompt(problem) for problem in problems
            ],
            "completions": [custom.conversational(text) for text in texts] if chat else texts,
            "completion_ids": [list(ids) for _, _, ids, _ in answers],
        }
        return custom.call(self._custom[spec], arguments, len(answers))

    def _columns(self, problem: Problem) -> dict[str, Any]:
        columns = self._tasks[split_of(problem)][problem.task].columns(problem)
        return {"task": problem.task, "id": problem.id, "question": problem.question, **columns}

    def _bare_prompt(self, problem: Problem) -> str:
        system = "\n".join(message["content"] for message in problem.messages[:-1])
        template = self._config.model.prompt_template
        text = template.replace("{system}", system).replace("{question}", problem.question).lstrip("\n")
        return text + self._config.model.assistant_prefix


def serve(connection: Connection) -> None:
    """A process that runs programs in their sandbox and calls the user's functions with the user's rights."""
    config: Config = connection.recv()
    _serve(connection, config, lambda: Judge(config))


def serve_isolated(connection: Connection) -> None:
    """A process for everything else: nothing that a model wrote leaves it but as a number or as text."""
    config, kind, user_number = connection.recv()

    def make() -> Judge:
        judge = Judge(config, runs_programs=False)
        judge.warm_up()
        if sys.platform == "linux":
            isolate(kind, PACKAGES, memory_mb=_MEMORY_MB, user_number=user_number)
        code_guard.install()
        evaluator.enable(config.tasks.reward_timeout_s)
        return judge

    _serve(connection, config, make)


def _serve(connection: Connection, config: Config, make: Callable[[], Judge]) -> None:
    """Jobs until the pipe ends. Answers are JSON: nothing from here is ever unpickled."""
    warnings.simplefilter("ignore")  # sympy warns about what models write
    process = os.getpid()
    try:
        judge = make()
    except UserError as error:
        _send(connection, {"kind": "refused", "reason": str(error)}, process)
        return
    except OSError as error:
        _send(connection, {"kind": "not_isolated", "reason": str(error)}, process)
        return
    process = os.getpid()  # another one where namespaces were entered
    failure_reward = [[split, name, value] for (split, name), value in judge.failure_reward.items()]
    _send(connection, {"kind": "ready", "worst": failure_reward}, process)
    while True:
        with code_guard.trusted():
            kind, limit_s, payload = connection.recv()
        if kind == "score":
            for number, problem, text, num_tokens in payload:
                _alarm(limit_s)
                _send(connection, _score(judge, number, problem, text, num_tokens), process)
        else:
            _alarm(limit_s)
            _send(connection, _custom(judge, *payload), process)
        _alarm(0)


def _send(connection: Connection, message: dict[str, Any], process: int) -> None:
    if os.getpid() != process:  # a reward function has forked, and this is its copy of us
        os._exit(1)
    try:
        protocol.send(connection.fileno(), message)
    except OSError:  # a reward function has closed the pipe, or the parent is gone
        os._exit(1)


def _alarm(limit_s: float) -> None:
    """Should the parent be killed while we hang, the kernel ends us too (0: no alarm). Otherwise the parent
    is quicker.
    """
    signal.setitimer(signal.ITIMER_REAL, 2 * limit_s + 10 if limit_s else 0)


def _score(judge: Judge, number: int, problem: Problem, text: str, num_tokens: int) -> dict[str, Any]:
    began = time.perf_counter()
    parts: Parts = {}
    answer, outcome, tests, failure = None, None, (), None
    try:
        parts, score = judge.judged(problem, text, num_tokens)
        answer, outcome, tests = score.answer, score.outcome, score.tests
    except EvaluationFailed as error:
        failure = str(error)
    except Exception as error:  # a bug in a scorer costs this answer its score and does not end the run
        failure = f"error: {message_of(error)}"
    return {
        "kind": "scored",
        "number": number,
        "parts": {name: float(value) for name, value in parts.items()},
        "answer": answer,
        "outcome": outcome,
        "tests": list(tests),
        "failure": failure,
        "seconds": time.perf_counter() - began,
    }


def _custom(
    judge: Judge, spec: str, answers: Sequence[tuple[Problem, str, Sequence[int], bool]]
) -> dict[str, Any]:
    values: list[float | str | None] | None = None
    logged, failure, is_misuse = custom.Logged(), None, False
    try:
        values, logged = judge.call_custom(spec, answers)
    except custom.WrongReturn as error:
        failure, is_misuse = str(error), True
    except BaseException as error:  # the user's own code, whatever it raises, SystemExit included
        failure = f"error: {message_of(error)}"
    return {
        "kind": "called",
        "values": values,
        "metrics": {name: value for name, value in logged.metrics.items() if math.isfinite(value)},
        "columns": {name: [_plain(entry) for entry in column] for name, column in logged.columns.items()},
        "failure": failure,
        "is_misuse": is_misuse,
    }


def _plain(value: Any) -> Any:
    """What a user's function logged, as JSON has it."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    try:
        text = str(value)
    except Exception as error:  # the user's own type
        text = f"({message_of(error)})"
    return text[:_LONGEST_LOGGED].encode("utf-8", "replace").decode()

"""The scoring worker process: answers in, reward parts out.

Isolated workers score text by the tasks' scorers behind the sandbox's layers: many of those scorers are
third-party code, and some evaluate their input. Open workers run programs (in their own sandbox) and call the
user's reward functions and tasks with the user's rights. Loads no rows, no model and no torch.
"""

import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from whetstone.config.plugins import describe_error, is_plugin
from whetstone.config.sections import Config
from whetstone.errors import UserError, message_of
from whetstone.rewards import custom
from whetstone.rewards.builtin import REWARDS, RewardContext
from whetstone.sandbox import code_guard, evaluator, protocol
from whetstone.sandbox.evaluator import EvaluationFailed
from whetstone.sandbox.isolate import isolate
from whetstone.tasks.base import Task
from whetstone.tasks.registry import make_tasks
from whetstone.tasks.scoring.process import ScoringRequest, split_of
from whetstone.types import Outcome, Problem, TaskScore

PACKAGES = ("reasoning_gym", "math_verify", "sympy", "numpy")  # what isolated scorers may import late
_MEMORY_MB = 4096  # of address space: an answer such as 10^{10^{10}} would take all there is
_SEND_S = 0.002  # an isolated worker collects results for so long: messages cost as much as scores
_MAX_LOGGED_CHARS = 1_000  # characters of a value that a user's function logs


class RewardWorker:
    """Scores answers by the tasks and the reward functions of a configuration."""

    def __init__(self, config: Config, *, isolated: bool = False) -> None:
        """`isolated`: only tasks that are scored in isolation, and no functions of the user's own."""
        self._config = config
        splits = ["eval", "train"] if config.tasks.datasets else ["eval"]
        only = True if isolated else None
        self._tasks: dict[str, dict[str, Task]] = {
            split: make_tasks(config, split, isolated=only) for split in splits
        }
        named = [] if isolated else [spec for spec in config.tasks.reward_funcs if is_plugin(spec)]
        self._custom: dict[str, Callable[..., Any]] = {spec: custom.load(spec) for spec in named}
        for tasks in self._tasks.values():
            for task in tasks.values():
                if task.isolated == isolated:
                    task.warm_up()

    @property
    def failure_rewards(self) -> list[tuple[str, str, float]]:
        """(split, task, reward) of an answer whose scoring fails."""
        return [
            (split, name, task.failure_reward)
            for split, tasks in self._tasks.items()
            for name, task in tasks.items()
        ]

    def score(
        self, problem: Problem, text: str, num_tokens: int, truncated: bool, outcome: Outcome | None = None
    ) -> tuple[dict[str, float], TaskScore]:
        """The built-in parts of one answer's reward, with "correct", and the score of its task.

        A truncated thought is no answer.
        """
        task = self._tasks[split_of(problem)][problem.task]
        if outcome is None:
            is_answer = not truncated or text.rfind("<think>") <= text.rfind("</think>")
            task_score = task.score(problem, text if is_answer else "")
        else:
            task_score = task.score_episode(problem, outcome)
        context = RewardContext(
            config=self._config, problem=problem, text=text, num_tokens=num_tokens, task_score=task_score
        )
        parts = {} if task_score.correct is None else {"correct": float(task_score.correct)}
        for name in self._config.tasks.reward_funcs:
            if name in REWARDS and (value := REWARDS[name].function(context)) is not None:
                parts[name] = value
        return parts, task_score

    def function(self, spec: str) -> Callable[..., Any]:
        return self._custom[spec]

    def call_custom(
        self, spec: str, answers: Sequence[ScoringRequest]
    ) -> tuple[list[float | str | None], custom.Logged]:
        """The values of one of the user's functions for whole lists of answers."""
        chat = self._config.model.apply_chat_template
        rows = [{**self._columns(answer.problem), **(answer.columns or {})} for answer in answers]
        names = dict.fromkeys(name for row in rows for name in row)
        arguments = {
            **{name: [row.get(name) for row in rows] for name in names},
            "truncated": [a.truncated for a in answers],
            "prompts": [list(a.problem.messages) if chat else self._bare_prompt(a.problem) for a in answers],
            "completions": [_completion(a) if chat else a.text for a in answers],
            "completion_ids": [list(a.completion_ids) for a in answers],
        }
        if any(answer.problem.environment is not None for answer in answers):
            arguments["environments"] = [custom.EnvironmentState(a.environment) for a in answers]
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
    """An open worker: runs programs in their sandbox, and code of the user's with the user's rights."""
    config: Config = connection.recv()
    threading.excepthook = _report_thread
    _serve(connection, lambda: RewardWorker(config), send_s=0.0)


def _report_thread(failure: threading.ExceptHookArgs) -> None:
    reason = message_of(failure.exc_value) if failure.exc_value else failure.exc_type.__name__
    print(f"A thread of a reward function failed ({reason}).", file=sys.stderr, flush=True)


def serve_isolated(connection: Connection) -> None:
    """An isolated worker for everything else: only numbers and text leave it."""
    config, kind, user_number = connection.recv()

    def make() -> RewardWorker:
        worker = RewardWorker(config, isolated=True)
        if sys.platform == "linux":
            isolate(kind, PACKAGES, memory_mb=_MEMORY_MB, user_number=user_number)
        code_guard.install()
        evaluator.enable(config.tasks.reward_timeout_s)
        return worker

    _serve(connection, make, send_s=_SEND_S)


def _serve(connection: Connection, make: Callable[[], RewardWorker], *, send_s: float) -> None:
    """Serve jobs until the pipe closes. Replies are JSON: the pool never unpickles anything."""
    warnings.simplefilter("ignore")  # sympy warns about what models write
    process = os.getpid()
    try:
        worker = make()
    except (UserError, OSError) as error:
        kind = "refused" if isinstance(error, UserError) else "not_isolated"
        _send(connection, {"kind": kind, "reason": str(error)}, process)
        return
    process = os.getpid()  # another one where namespaces were entered
    _send(connection, {"kind": "ready", "failure_rewards": worker.failure_rewards}, process)
    while True:
        try:
            with code_guard.trusted():
                kind, limit_s, payload = connection.recv()
        except Exception:  # the parent is gone, or a reward function has closed or read the pipe
            return
        if kind == "score":
            results, sent_at = [], time.monotonic()
            for count, row in enumerate(payload, start=1):
                if not results:
                    _alarm(limit_s)
                results.append(_score(worker, *row))
                if count == len(payload) or time.monotonic() - sent_at >= send_s:
                    _send(connection, {"kind": "scored", "results": results}, process)
                    results, sent_at = [], time.monotonic()
        else:
            _alarm(limit_s)
            _send(connection, _custom(worker, *payload), process)
        _alarm(0)


def _send(connection: Connection, message: dict[str, Any], process: int) -> None:
    if os.getpid() != process:  # a reward function has forked, and this is its copy of us
        os._exit(1)
    try:
        os.set_blocking(connection.fileno(), True)  # a reward function may have changed it
        protocol.send(connection.fileno(), message)
    except OSError:  # a reward function has closed the pipe, or the parent is gone
        os._exit(1)


def _alarm(limit_s: float) -> None:
    """The kernel ends us where the parent was killed while we hang; otherwise the parent is quicker."""
    signal.setitimer(signal.ITIMER_REAL, 2 * limit_s + 10 if limit_s else 0)


def _score(worker: RewardWorker, number: int, problem: Problem, *answer: Any) -> dict[str, Any]:
    started_at = time.perf_counter()
    parts: dict[str, float] = {}
    score, failure = TaskScore(correct=None, reward=None), None
    try:
        parts, score = worker.score(problem, *answer)
    except EvaluationFailed as error:
        failure = str(error)
    except Exception as error:  # a bug in a scorer costs this answer its score and does not end the run
        failure = f"error: {describe_error(error)}"
    return {
        "number": number,
        "parts": {name: float(value) for name, value in parts.items()},
        "answer": score.answer,
        "outcome": score.outcome,
        "tests": list(score.tests),
        "failure": failure,
        "seconds": time.perf_counter() - started_at,
    }


def _completion(answer: ScoringRequest) -> list[dict[str, Any]]:
    if answer.messages is None:
        return custom.conversational(answer.text)
    return [dict(message) for message in answer.messages]


def _custom(worker: RewardWorker, spec: str, answers: Sequence[ScoringRequest]) -> dict[str, Any]:
    values: list[float | str | None] | None = None
    logged, failure, is_misuse = custom.Logged(), None, False
    try:
        values, logged = worker.call_custom(spec, answers)
    except custom.WrongReturn as error:
        failure, is_misuse = str(error), True
    except BaseException as error:  # the user's own code, whatever it raises, SystemExit included
        failure = f"error: {describe_error(error, worker.function(spec))}"
    return {
        "kind": "called",
        "values": values,
        "metrics": {_plain(name): [*filter(math.isfinite, v)] for name, v in logged.metrics.items()},
        "columns": {_plain(name): list(map(_plain, column)) for name, column in logged.columns.items()},
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
    return text[:_MAX_LOGGED_CHARS].encode("utf-8", "replace").decode()

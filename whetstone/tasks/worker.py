"""Inside a scoring process: answers come in, parts of rewards go out, one message for each as soon as it
is done.

Runs in the main thread of its process, as math-verify needs. Keeps no time of its own: the parent ends a
process that takes too long. Loads no rows, no model and no torch.
"""

import resource
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from whetstone.config.rooms import Config
from whetstone.errors import UserError
from whetstone.rewards import custom
from whetstone.rewards.answers import math_equal
from whetstone.rewards.combine import BUILT_IN
from whetstone.rewards.shaping import format_reward, overlong_penalty
from whetstone.tasks.base import Task
from whetstone.tasks.code import CodeTask
from whetstone.tasks.math import MathTask
from whetstone.tasks.mixture import make_tasks
from whetstone.types import Problem, Score

Parts = dict[str, float]
_MOST_MEMORY = 4 * 2**30  # bytes of address space


def split_of(problem: Problem) -> str:
    """The split in a problem's id ("chain_sum/train/000123")."""
    return problem.id.rsplit("/", 2)[1]


class Judge:
    """Scores answers by the tasks and the reward functions of a configuration."""

    def __init__(self, config: Config) -> None:
        self._config = config
        splits = ["eval", "train"] if config.tasks.datasets else ["eval"]
        self._tasks: dict[str, dict[str, Task]] = {split: make_tasks(config, split) for split in splits}
        if any(isinstance(task, MathTask) for tasks in self._tasks.values() for task in tasks.values()):
            math_equal(
                "1+x", "x+1"
            )  # loads math-verify and its grammar, which would count as the first answer's time
        for tasks in self._tasks.values():
            for task in tasks.values():
                if isinstance(task, CodeTask):
                    task.prepare(read_rows=False)  # the start of a sandbox is not the first answer's fault
        self._custom = {spec: custom.load(spec) for spec in config.tasks.reward_funcs if spec not in BUILT_IN}

    @property
    def worst(self) -> dict[tuple[str, str], float]:
        """What an answer is paid whose scoring fails, by split and task."""
        return {
            (split, name): task.worst for split, tasks in self._tasks.items() for name, task in tasks.items()
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
    ) -> tuple[list[float | None], custom.Logged]:
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
    """The process: a configuration first, then jobs until the pipe ends."""
    warnings.simplefilter("ignore")  # sympy warns about what models write
    config: Config = connection.recv()
    if all(name in BUILT_IN for name in config.tasks.reward_funcs):
        _limit_memory()  # functions of the user's own may need more
    try:
        judge = Judge(config)
    except UserError as error:
        connection.send(("refused", str(error)))
        return
    connection.send(("ready", judge.worst))
    while True:
        kind, limit_s, payload = connection.recv()
        if kind == "score":
            for number, problem, text, num_tokens in payload:
                _alarm(limit_s)
                connection.send(_score(judge, number, problem, text, num_tokens))
        else:
            _alarm(limit_s)
            connection.send(_custom(judge, *payload))
        _alarm(0)


def _limit_memory() -> None:
    """An answer such as 10^{10^{10}} would otherwise take all the memory there is.

    (macOS does not know this limit.)
    """
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = _MOST_MEMORY if hard == resource.RLIM_INFINITY else min(_MOST_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _alarm(limit_s: float) -> None:
    """Should the parent be killed while we hang, the kernel ends us too (0: no alarm). Otherwise the parent
    is quicker.
    """
    signal.setitimer(signal.ITIMER_REAL, 2 * limit_s + 10 if limit_s else 0)


def _score(judge: Judge, number: int, problem: Problem, text: str, num_tokens: int) -> tuple[Any, ...]:
    began = time.perf_counter()
    failure = None
    try:
        parts, score = judge.judged(problem, text, num_tokens)
        taken = (score.answer, score.outcome, score.tests)
    except (
        Exception
    ) as error:  # a bug in a scorer costs this answer its score, is counted, and does not end the run
        parts, taken, failure = {}, (None, None, ()), f"error: {type(error).__name__}: {error}"
    return ("scored", number, parts, taken, failure, time.perf_counter() - began)


def _custom(
    judge: Judge, spec: str, answers: Sequence[tuple[Problem, str, Sequence[int], bool]]
) -> tuple[Any, ...]:
    began = time.perf_counter()
    values: list[float | None] | None = None
    logged, failure = custom.Logged(), None
    try:
        values, logged = judge.call_custom(spec, answers)
    except Exception as error:  # the user's own code, whatever it raises
        failure = f"error: {type(error).__name__}: {error}"
    return ("called", values, logged.metrics, logged.columns, failure, time.perf_counter() - began)

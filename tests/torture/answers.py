"""Hostile answers through the real scoring path of every task: none executes, none is paid, none changes a
verdict.

After each hostile answer the same scorer judges a right answer and a wrong one, which must stay right and
wrong. Where an answer executes, a canary tells: a file, a connection, a secret of the environment.
"""

import contextlib
import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import psutil

from tests.torture import forks
from tests.torture.hostile_answers import Canary, Text, texts
from tests.torture.trial import Outcome, Part, Setting

TASKS_PER_TRIAL = 3
ANSWERS_PER_TASK = 80
HEAVY_PER_TASK = 4
# Their scorers evaluate or parse what they are given: these get every answer there is.
EVALUATING = (
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
    "puzzle24",
    "n_queens",
    "binary_matrix",
    "string_insertion",
    "spiral_matrix",
    "math",
)
VARIABLE = "WHET_CANARY_SECRET"
LIMIT_S = 3.0
WRONG = "certainly not this"
OURS = ("math", "countdown", "code")


def _tasks() -> list[str]:
    from whetstone.tasks.gym import known_names

    return [*OURS, *known_names()]


def names(seed: int) -> list[str]:
    tasks = _tasks()
    random.Random(f"{seed} answers").shuffle(tasks)
    starts = range(0, len(tasks), TASKS_PER_TRIAL)
    return ["+".join(tasks[start : start + TASKS_PER_TRIAL]) for start in starts]


def run(name: str, setting: Setting) -> Outcome:
    os.environ[VARIABLE] = "canary-secret-7319"
    outcome = Outcome(tried=0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        for task in name.split("+"):
            _try_task(task, setting, server, outcome)
    # The process that makes our problems ends with us, and so do those that workers are forked from. A worker
    # has the command of its server, and is no child of ours.
    own = {child.pid for child in psutil.Process().children() if _ends_with_us(child.pid)}
    outcome.losses += [f"left running: {command}" for command in forks.left_behind(10, except_for=own)]
    return outcome


def _ends_with_us(pid: int) -> bool:
    return any(word in forks.command_of(pid) for word in ("serve_entries", "sandbox.fork_server"))


def _settings(task: str, folder: Path) -> dict[str, Any]:
    if task == "math":
        path = folder / "rows.jsonl"
        rows = ({"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(10, 30))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(path), "question_column": "question", "answer_column": "answer"}
    return {"path": "problems", "language": "python"} if task == "code" else {}


def _scorer(task: str, folder: Path) -> tuple[Any, Any]:
    from whetstone.config import load
    from whetstone.tasks.registry import make_tasks
    from whetstone.tasks.scoring.pool import Scorer

    words = [
        f"datasets={json.dumps({task: {'config': _settings(task, folder)}})}",
        "reward_funcs=[accuracy]",
        f"reward_timeout_s={LIMIT_S}",
        "sandbox_time_limit_s=1",
        "max_reward_failure_fraction=1.0",
        "reward_workers=1",
        "eval_num_samples=0",
    ]
    config = load(None, words).config
    return make_tasks(config, "train")[task], Scorer(config)


def choose(task: str, seed: int, folder: Path, port: int) -> list[tuple[Text, Canary]]:
    """The hostile answers of a task, each with a canary of its own."""
    rng = random.Random(f"{seed} {task}")
    count = len(list(texts(Canary(file="x", port=port, variable=VARIABLE))))
    order = rng.sample(range(count), count)
    chosen: list[tuple[Text, Canary]] = []
    heavy = 0
    for number in order:
        canary = Canary(file=str(folder / f"canary-{number:04d}"), port=port, variable=VARIABLE)
        text = list(texts(canary))[number]
        if text.heavy and heavy == HEAVY_PER_TASK * (3 if task in EVALUATING else 1):
            continue
        heavy += text.heavy
        chosen.append((text, canary))
        if len(chosen) == ANSWERS_PER_TASK and task not in EVALUATING:
            break
    return chosen


def _wrapped(task: str, text: str) -> str:
    return f"\\boxed{{{text}}}" if task == "math" else f"<answer>{text}</answer>"


def _try_task(task: str, setting: Setting, server: socket.socket, outcome: Outcome) -> None:
    from whetstone.tasks.scoring.process import ScoringRequest

    folder = setting.folder / task
    folder.mkdir(parents=True)
    canaries = folder / "canaries"
    canaries.mkdir()
    judge, scorer = _scorer(task, folder)
    with scorer:

        def score(given: list[str]) -> list[Any]:
            for text in given:
                scorer.submit(
                    ScoringRequest(problem=problem, text=text, completion_ids=(1,), truncated=False)
                )
            return scorer.gather()

        problem = judge.problem(0)
        gold, wrong = judge.gold(problem), _wrapped(task, WRONG)
        for index in range(1, 5):  # a few golds are refused by their own scorer: another test's business
            first, second = score([gold, wrong])
            if first.parts["correct"] == 1 and second.parts["correct"] == 0:
                break
            problem = judge.problem(index)
            gold = judge.gold(problem)
        else:
            outcome.losses.append(f"{task}: its own gold is wrong, or '{WRONG}' is right")
            return
        chosen = choose(task, setting.seed, canaries, server.getsockname()[1])
        given = [text for hostile, _ in chosen for text in (_wrapped(task, hostile.text), gold, wrong)]
        scores = score(given)
    _judge(task, chosen, scores, outcome)
    for path in sorted(canaries.iterdir()):
        text = next((one.text for one, canary in chosen if path.name.startswith(Path(canary.file).name)), "?")
        outcome.losses.append(f"{task} executed {text[:120]!r}")
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            outcome.losses.append(f"{task} connected to the canary")


def _judge(task: str, chosen: list[tuple[Text, Canary]], scores: list[Any], outcome: Outcome) -> None:
    """Scores come in threes: a hostile answer, a right one, a wrong one."""
    for place, (hostile, _) in enumerate(chosen):
        three = scores[3 * place : 3 * place + 3]
        paid, right, wrong = (score.parts["correct"] for score in three)
        shown = repr(hostile.text[:100])
        outcome.tried += 1
        if three[0].failure:
            kind = f"scoring ended by {three[0].failure.split(':')[0]}"
            outcome.details[kind] = outcome.details.get(kind, 0) + 1
        if paid == 1:
            outcome.losses.append(f"{task} paid {shown}")
        if right != 1 or wrong != 0:
            outcome.losses.append(
                f"{task}: after {shown} a right answer counts {right:g}, a wrong one {wrong:g}"
            )


PART = Part(
    name="answers",
    unit="answers",
    summary="hostile answers through the scorer of every task: none executed, none paid, verdicts unchanged",
    names=names,
    run=run,
    limit_s=1800,
)

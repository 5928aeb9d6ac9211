"""A problem of a run's own tasks by its id, and the scores of answers to it."""

import re
from collections.abc import Sequence

from whetstone.config import Config
from whetstone.errors import UserError, did_you_mean
from whetstone.inference.answers import Answer
from whetstone.model.chat import Chat
from whetstone.tasks.registry import make_tasks
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.types import Finish, Problem, Score

ID = re.compile(r"(?P<task>.+?)(?:/(?P<split>train|eval)/(?P<number>[0-9]{1,9})(?:@(?P<level>[0-9]{1,4}))?)?")


def find_problem(config: Config, name: str) -> Problem:
    """`chain_sum/eval/000003`, as the files of a run name it (`@2`: level 2 of its curriculum).

    `chain_sum` alone is the first problem of the evaluation.
    """
    match = ID.fullmatch(name)
    split = (match and match["split"]) or "eval"
    tasks = make_tasks(config, split)
    task = tasks.get(match["task"]) if match else None
    if match is None or task is None:
        hint = did_you_mean(name.split("/")[0], tasks) or ":"
        raise UserError(
            f"The run has no problem '{name[:100]}'{hint} its tasks are {', '.join(tasks)}, and an id is "
            f"{next(iter(tasks))}/{split}/000003."
        )
    index = int(match["number"] or 0)
    if not task.generated and index >= len(task):
        raise UserError(
            f"The task {task.name} has {len(task)} rows: give a number from 0 to {len(task) - 1}."
        )
    if match["level"] is not None:
        if not task.has_curriculum:
            raise UserError(f"The task {task.name} has no levels: leave @{match['level']} out of the id.")
        task = task.at_level(int(match["level"]))
    return task.problem(index)


def score_answers(config: Config, chat: Chat, problem: Problem, answers: Sequence[Answer]) -> list[Score]:
    """The run's own scores, in its scoring processes: the text is untrusted."""
    few = {"reward_workers": 1, "max_reward_failure_fraction": 1.0}  # a failure is shown, not raised
    with Scorer(config.model_copy(update={"tasks": config.tasks.model_copy(update=few)})) as scorer:
        for answer in answers:
            request = ScoringRequest(
                problem=problem,
                text=answer.text,
                turn=chat.turn(answer.prompt_ids, answer.token_ids),
                completion_ids=answer.token_ids,
                truncated=answer.finish is Finish.LENGTH,
            )
            scorer.submit(request)
        return scorer.gather()

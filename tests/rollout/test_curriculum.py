"""Problems that get harder: what a level means, when it changes, right scores at each, who has none."""

import re
from decimal import Decimal
from typing import Any

import pytest

from whetstone.config import build
from whetstone.config.tasks import CurriculumSpec
from whetstone.errors import UserError
from whetstone.rollout.curriculum import Curriculum
from whetstone.tasks.gym_levels import describe_levels, settings_at, top_level
from whetstone.tasks.mixture import build_tasks, check_gold, eval_problems
from whetstone.tasks.registry import list_tasks
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.types import Completion, Finish, Group, Problem, Rollout, Score, Turn


def config_of(name="chain_sum", curriculum: Any = True, **changes):
    return build({"datasets": {name: {"curriculum": curriculum}}, "eval_num_samples": 5, **changes})


def numbers(problem):
    """The operands of a chain_sum question."""
    return re.findall(r"\d+", problem.question)


def test_a_level_is_reasoning_gyms_own():
    assert top_level("chain_sum", {}) == 10
    assert settings_at("chain_sum", 0, {}) == {
        "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1,
    }  # fmt: skip
    level = settings_at("chain_sum", 3, {"allow_negation": True, "max_terms": 99})
    assert level == {
        "allow_negation": True, "min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 4,
    }  # fmt: skip
    assert describe_levels("chain_sum", {}) == "levels 0 to 10: max_terms 2 to 12, max_digits 1 to 10"
    # rotations are levelled up to 50, but the task itself refuses more than 25
    assert top_level("caesar_cipher", {}) == 1 and top_level("acre", {}) == -1


def test_problems_get_harder_with_level_and_are_repeatable():
    tasks = build_tasks(config_of(), "train")
    terms, digits = [], []
    for level in (0, 2, 6):
        problems = [tasks.problem(i, {"chain_sum": level}) for i in range(40)]
        assert problems == [tasks.problem(i, {"chain_sum": level}) for i in range(40)]
        assert len({problem.id for problem in problems}) == 40
        assert all(problem.id.endswith(f"@{level}") for problem in problems)
        terms.append(max(len(numbers(problem)) for problem in problems))
        digits.append(max(len(number) for problem in problems for number in numbers(problem)))
    assert terms == [2, 4, 8] and digits == [1, 3, 7]
    assert tasks.problem(3) == tasks.problem(3, {"chain_sum": 0})  # where it begins


def test_the_evaluation_never_changes():
    plain, climbing = config_of(curriculum=False), config_of()
    assert eval_problems(climbing) == eval_problems(plain)
    assert not build_tasks(climbing, "eval").curricula
    with pytest.raises(UserError, match="eval_datasets"):
        build({"eval_datasets": {"chain_sum": {"curriculum": True}}})


def group(task, *right):
    problem = Problem(
        id=f"{task}/train/0", task=task, messages=({"role": "user", "content": "?"},), answer={}
    )
    completion = Completion(token_ids=(1,), logprobs=(0.0,), finish=Finish.STOP, policy_version=0)
    parts = [{} if value is None else {"correct": float(value)} for value in right]
    scores = [Score(reward=0.0, parts=part, answer=None) for part in parts]
    rollouts = [
        Rollout(prompt_ids=(1,), turns=(Turn(completion=completion),), text="", score=score)
        for score in scores
    ]
    return Group(problem=problem, rollouts=tuple(rollouts))


def test_levels_by_hand():
    spec = CurriculumSpec(up=0.75, down=0.25, window=4)
    curriculum = Curriculum({"a": (spec, 2), "b": (spec.model_copy(update={"start": 1}), 2)})
    assert curriculum.levels == {"a": 0, "b": 1}
    curriculum.observe([group("a", 1, 1, 1)])  # three answers are no window
    assert curriculum.levels["a"] == 0
    curriculum.observe([group("a", 0), group("c", 1, 1, 1, 1)])  # 3 of 4; c has no curriculum
    assert curriculum.levels == {"a": 1, "b": 1}
    curriculum.observe([group("a", 1, 1, 1)])  # counted anew since
    assert curriculum.levels["a"] == 1
    curriculum.observe([group("a", 1), group("b", 1, 0, 0, 0)])
    assert curriculum.levels == {"a": 2, "b": 0}
    curriculum.observe([group("a", 1, 1, 1, 1), group("b", 0, 0, 0, 0)])  # neither goes beyond its ends
    assert curriculum.levels == {"a": 2, "b": 0}
    assert curriculum.metrics() == {"curriculum/a/level": 2.0, "curriculum/b/level": 0.0}
    again = Curriculum({"a": (spec, 2), "b": (spec, 2)})
    again.load_state(curriculum.state())
    for one in (curriculum, again):  # a: the newest four are 1 1 0 0, then 0 0 0 0
        one.observe([group("a", 0, 0)])
        assert one.levels["a"] == 2
        one.observe([group("a", 0)])
        assert one.levels["a"] == 1


def test_a_failed_agent_in_a_batch_without_answers_was_wrong():
    curriculum = Curriculum({"a": (CurriculumSpec(up=0.5, window=4), 2)})
    curriculum.observe([group("a", 1, 1, None, None)])
    assert curriculum.levels == {"a": 1}


def test_scores_are_right_at_every_level():
    """decimal_arithmetic allows an error of one in the last place of its settings, which are the level's:
    4, 6, 8 and 8 places.
    """
    name = "decimal_arithmetic"
    config = config_of(name, reward_funcs=["accuracy"], reward_workers=1)
    tasks = build_tasks(config, "train")
    check_gold(tasks)
    verdicts = []
    with Scorer(config) as scorer:
        for level in range(tasks.curricula[name][1] + 1):
            for index in range(6):
                problem = tasks.problem(index, {name: level})
                right = Decimal(problem.answer["answer"])
                for answer in (right, right + Decimal("0.00005"), right + Decimal("0.0000005"), right + 1):
                    text = f"<answer>{answer}</answer>"
                    scorer.submit(
                        ScoringRequest(problem=problem, text=text, completion_ids=(1,), truncated=False)
                    )
            correct = [score.parts["correct"] for score in scorer.gather()]
            assert correct == correct[:4] * 6
            verdicts.append(correct[:4])
    assert verdicts == [[1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_tasks_without_a_curriculum_are_refused_by_name():
    for name in ("acre", "countdown", "knight_swap"):
        with pytest.raises(UserError, match=rf"{name}.*curriculum.*`whet tasks`"):
            build_tasks(config_of(name, eval_num_samples=0), "train")
    with pytest.raises(UserError, match=r"0 to 10.*start.* 11"):
        build_tasks(config_of(curriculum={"start": 11}), "train")
    with pytest.raises(UserError, match=r"down .*0\.9"):
        config_of(curriculum={"up": 0.8, "down": 0.9})
    with pytest.raises(UserError, match=r"'faster'.*datasets\.chain_sum\.curriculum"):
        config_of(curriculum={"faster": 1})
    without = [task.name for task in list_tasks() if not task.levels]
    assert without == [
        "rows",
        "math",
        "code",
        "countdown",
        "repair",
        "environment",
        "guess_number",
        "wordle",
        "maze_walk",
        "acre",
        "gsm_symbolic",
        "knight_swap",
        "list_functions",
        "modulo_grid",
    ]

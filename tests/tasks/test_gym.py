"""reasoning-gym's tasks: pure problems, far-apart seeds, honest scores, gold answers that are accepted."""

import os
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest

from tests.support.gym import SMALLER, task
from whetstone.config import Config, TaskSpec, build, load
from whetstone.errors import UserError
from whetstone.tasks.gym import GymTask, known_names, make_entry
from whetstone.tasks.gym_levels import top_level
from whetstone.tasks.gym_repairs import is_flawed
from whetstone.tasks.registry import make_task, make_tasks
from whetstone.types import Problem

GOLD_BELOW_ONE: set[str] = (
    set()
)  # tasks whose own scorer refuses their gold answer: none in reasoning-gym 0.1.25


@pytest.mark.parametrize("name", known_names())
def test_every_task_accepts_its_gold_answer(name: str):
    one = task(name, settings=SMALLER.get(name))
    problem = pickle.loads(pickle.dumps(one.problem(0)))
    score = one.score(problem, one.gold(problem))
    assert score.parts["correct"] == float(name not in GOLD_BELOW_ONE)
    assert problem.question.strip()
    for junk in ("", "<answer></answer>", "<answer>\x00 ]}[ 1/0 \N{SNOWMAN}</answer>", "no tag at all"):
        assert one.score(problem, junk).parts["correct"] == 0.0


LEVELS = [("boxnet", 8, 2), ("polynomial_multiplication", 1, 1), ("rubiks_cube", 3, 2)]


@pytest.mark.parametrize(("name", "level", "number"), LEVELS)
def test_gold_answers_count_at_the_highest_levels(name: str, level: int, number: int):
    one = task(name).at_level(level)
    for problem in map(one.problem, range(number)):
        assert one.score(problem, one.gold(problem)).parts["correct"] == 1.0, problem.id


def test_jugs_that_cannot_be_filled_are_no_problem():
    assert is_flawed("jugs", {"answer": '["No solution"]'}) and not is_flawed(
        "jugs", {"answer": '["fill A"]'}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(known_names()) - {"jugs"}))  # whose higher levels take minutes
def test_gold_answers_count_at_every_level(name: str):
    one = task(f"reasoning_gym/{name}")
    for level in range(top_level(name, {}) + 1):
        at_level = one.at_level(level)
        for problem in map(at_level.problem, range(4)):
            assert at_level.score(problem, at_level.gold(problem)).parts["correct"] == 1.0, (
                level,
                problem.id,
            )


def test_train_and_evaluation_seeds_are_far_apart():
    # Item i of a data set with seed s comes from Random(s + i): seeds 1 and 2 would share all but one.
    train, evaluation = task("chain_sum"), task("chain_sum", "eval")
    ours = {train.problem(i).question for i in range(300)}
    theirs = {evaluation.problem(i).question for i in range(300)}
    shifted = {task("chain_sum", dataset_seed=2).problem(i).question for i in range(300)}
    # chain_sum has few short sums, so that a handful coincide by chance; neighbouring seeds would share 299.
    assert len(ours & theirs) < 15
    assert len(ours & shifted) < 15


def test_problems_are_a_function_of_the_index_alone():
    forward = [task("word_ladder").problem(i) for i in (0, 1, 2_500)]
    backward = [task("word_ladder").problem(i) for i in (2_500, 1, 0)]
    assert [p.question for p in forward] == [p.question for p in backward][::-1]
    assert forward[2].id == "word_ladder/train/002500"


@pytest.mark.parametrize("name", ["acre", "gsm_symbolic", "list_functions", "word_ladder"])
def test_data_sets_with_an_end_go_on_in_blocks(name: str):
    one = task(name)
    questions = {one.problem(i).question for i in (0, 1_999, 2_000, 2_001, 900_000)}
    assert len(questions) == 5


def test_problems_do_not_depend_on_the_hash_seed_of_the_process():
    """This process has a random one, another process has one of its own."""
    names = ("ransom_note", "isomorphic_strings", "polynomial_multiplication")
    script = (
        "from whetstone.config import TaskSpec, build\n"
        "from whetstone.tasks.gym import GymTask\n"
        f"for name in {names}:\n"
        "    print(GymTask(build({}), name, TaskSpec(weight=1.0), 'train').problem(5).question)\n"
        "import sys; assert 'reasoning_gym' in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": other_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ours = [GymTask(build({}), name, TaskSpec(weight=1.0), "train").problem(5).question for name in names]
    assert done.stdout == "".join(question + "\n" for question in ours)


def test_global_generators_are_as_they_were():
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    first = [make_entry("list_functions", {}, 123456789, i)["question"] for i in range(20)]  # draws globally
    make_entry("pool_matrix", {}, 1, 0)  # seeds numpy's global generator
    assert (random.random(), np.random.random()) == expected
    assert first == [make_entry("list_functions", {}, 123456789, i)["question"] for i in range(20)]


def test_a_scorer_that_warms_up_leaves_no_files(tmp_path, monkeypatch):
    """The first problem of codeio under these settings runs code that writes a folder `test_dir`."""
    monkeypatch.chdir(tmp_path)
    make_tasks(load(None, ["datasets={codeio: {}}"]).config, "train")["codeio"].warm_up()
    assert not list(tmp_path.iterdir())


def test_partial_credit_is_accuracy_but_not_correct():
    one = task("chain_sum")
    problem = one.problem(3)
    truth = problem.answer["answer"]
    score = one.score(problem, f"<answer>it is {truth}</answer>")
    assert score.parts == {"correct": 0.0, "accuracy": len(truth) / len(f"it is {truth}")}
    assert score.answer == f"it is {truth}"
    right = one.score(problem, f"<answer>0</answer> no: <answer> {truth} </answer>")
    assert right.parts == {"correct": 1.0, "accuracy": 1.0} and right.answer == truth


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("game_of_life_halting", "hello", lambda truth: truth.lower()),
        ("coin_flip", "0", lambda truth: f"{float(truth):.6f}"),
        ("gsm_symbolic", lambda truth: f"-{truth}", lambda truth: f"{truth} apples"),
    ],
)
def test_scorers_that_pay_for_wrong_answers_are_put_right(name: str, wrong, right):
    one = task(name)
    problem = one.problem(0)
    truth = problem.answer["answer"]
    wrong = wrong if isinstance(wrong, str) else wrong(truth)
    assert one._dataset.score_answer(wrong, problem.answer) == 1.0  # the trap itself is still there
    assert one.score(problem, f"<answer>{wrong}</answer>").parts["correct"] == 0.0
    assert one.score(problem, f"<answer>{right(truth)}</answer>").parts["correct"] == 1.0


def test_scorers_that_raise_score_nothing():
    one = task("prime_factorization")
    problem = one.problem(0)
    with pytest.raises(ValueError, match="'2 x y'"):
        one._dataset.score_answer("2 x y", problem.answer)  # the trap itself is still there
    assert one.score(problem, "<answer>2 x y</answer>").parts == {"correct": 0.0, "accuracy": 0.0}


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("chain_sum", {"max_term": 3}, "'max_term'.*'max_terms'"),
        ("chain_sum", {"seed": 3}, "dataset_seed"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms"),
        ("chain_sums", {}, "'chain_sums'.*'chain_sum'"),
        ("composite", {}, "composite"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(name: str, settings: dict, complaint: str):
    with pytest.raises(UserError, match=complaint):
        make_task(Config(), name, TaskSpec(weight=1.0, config=settings), "train")


def test_the_prefix_reaches_reasoning_gyms_own_countdown():
    theirs = make_task(Config(), "reasoning_gym/countdown", TaskSpec(weight=1.0), "train")
    problem = theirs.problem(0)
    assert problem.answer["metadata"]["source_dataset"] == "countdown"
    assert theirs.score(problem, theirs.gold(problem) or "").parts["correct"] == 1.0
    assert problem.id == "reasoning_gym/countdown/train/000000"


def prompts(**keys) -> Problem:
    return task("chain_sum", **keys).problem(0)


def test_developer_prompt_by_name_text_and_user_message():
    from reasoning_gym.utils import SYSTEM_PROMPTS

    bare = prompts()
    assert [m["role"] for m in bare.messages] == ["user"]
    named = prompts(developer_prompt="DeepSeekZero")
    assert named.messages[0] == {"role": "system", "content": SYSTEM_PROMPTS["DeepSeekZero"]}
    assert named.messages[1] == bare.messages[0]
    text = prompts(developer_prompt="Think first.", developer_role="developer")
    assert text.messages[0] == {"role": "developer", "content": "Think first."}
    merged = prompts(developer_prompt="Think first.", developer_role="user")
    assert merged.messages == ({"role": "user", "content": f"Think first.\n\n{bare.question}"},)
    with pytest.raises(UserError, match="'DeepSeekZero'"):
        prompts(developer_prompt="DeepSeekzero")

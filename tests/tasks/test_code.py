"""Programming problems from rows: prompts, rewards, which tests run, what is refused, and the set that
ships.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from whetstone.config import TaskSpec, load
from whetstone.errors import UserError
from whetstone.rewards.programs import read_tests, run_tests
from whetstone.sandbox import languages
from whetstone.sandbox.interpreters import from_klong, plain, to_klong
from whetstone.sandbox.languages import LANGUAGES, missing
from whetstone.sandbox.pool import LocalPool
from whetstone.sandbox.program import Limits
from whetstone.tasks import code
from whetstone.tasks.code import CodeTask, shipped_problems
from whetstone.tasks.examples import make_expressions
from whetstone.tasks.mixture import build_tasks, check_gold, eval_problems
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest

ROWS = [
    {
        "statement": f"Add {k} to the number x.",
        "function": "f",
        "tests": [{"args": [x], "expected": x + k} for x in (0, 1, 2, 3)],
        "solution": f"def f(x): return x + {k}",
    }
    for k in range(6)
]

LIMIT_S = 2.0  # enough for a small program on a machine that is busy
SLEEPER = "import time\ndef f(x):\n    time.sleep(60 if x == 3 else 0)\n    return x"


def make(
    tmp_path: Path, rows: list[dict[str, Any]] | None = None, split: str = "train", **settings: Any
) -> CodeTask:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in ROWS if rows is None)
        or "".join(json.dumps(r) + "\n" for r in rows or [])
    )
    keys = ("language", "prompt", "continue_starter", "test_fields")
    own = {key: settings.pop(key) for key in keys if key in settings}
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    config = load(None, ["max_tests_per_problem=0", *words]).config
    return CodeTask(
        config, "code", TaskSpec(config={"path": str(path), "language": "python", **own}), split, False
    )


def paid(task: CodeTask, text: str, index: int = 2) -> tuple[float, float]:
    score = task.score(task.problem(index), text)
    return score.parts["correct"], score.parts["accuracy"]


def test_the_share_of_tests_and_the_bonus_are_paid(tmp_path: Path) -> None:
    task = make(tmp_path, base_reward_weight=2.0, perfect_reward_weight=0.5)
    assert paid(task, "def f(x): return x + 2") == (1.0, 2.5)
    assert paid(task, "def f(x): return x + 2 if x else 7") == (0.0, 1.5)
    assert paid(task, "def f(x): return 0") == (0.0, 0.0)
    task = make(tmp_path, test_reward="all")
    assert paid(task, "def f(x): return x + 2 if x else 7") == (0.0, 0.0)
    assert paid(task, "def f(x): return x + 2") == (1.0, 2.0)


def test_outcomes_are_told_apart_and_tests_listed(tmp_path: Path) -> None:
    task = make(tmp_path, sandbox_time_limit_s=LIMIT_S)
    problem = task.problem(0)
    cases = {
        "def f(x): return x": "passed",
        "def f(x): return -x": "wrong",
        "def f(x": "compile_error",
        "def f(x): return 1 / 0": "crash",
        SLEEPER: "timeout",
        "": "no_program",
    }
    assert {text: task.score(problem, text).outcome for text in cases} == cases
    score = task.score(problem, "def f(x): return x if x < 3 else 1 / 0")
    assert score.tests == ("passed", "passed", "passed", "crash")
    assert score.answer == "def f(x): return x if x < 3 else 1 / 0"


def test_the_same_program_in_other_words_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def record(pool: Any, language: Any, source: str, *rest: Any) -> Any:
        runs.append(source)
        return run_tests(pool, language, source, *rest)

    monkeypatch.setattr(code, "run_tests", record)
    monkeypatch.setattr(code, "_MAX_KNOWN", 2)
    task = make(tmp_path, sandbox_time_limit_s=LIMIT_S)
    same = "```python\ndef f(x): return x\n```"
    first = task.score(task.problem(0), same)
    assert first.correct and task.score(task.problem(0), f"{same}\nIt gives x back.") == first
    assert len(runs) == 1
    assert not task.score(task.problem(1), same).correct and len(runs) == 2  # another problem
    assert task.score(task.problem(0), SLEEPER).outcome == "timeout"
    assert task.score(task.problem(0), SLEEPER).outcome == "timeout"
    assert runs[2:] == [SLEEPER, SLEEPER]  # by chance, perhaps
    assert task.score(task.problem(0), same) == first and len(runs) == 5  # only so many are remembered


def test_choice_of_tests_by_seed_and_all_in_evaluation(tmp_path: Path) -> None:
    def chosen(split: str = "train", **settings: Any) -> list[Any]:
        task = make(tmp_path, split=split, max_tests_per_problem=2, **settings)
        problems = [task.problem(i) for i in range(6)]
        return [
            [
                test.expected
                for test in task._select_tests(read_tests(p.answer["tests"], LANGUAGES["python"], "f", ""), p)
            ]
            for p in problems
        ]

    assert chosen() == chosen()
    assert all(len(tests) == 2 for tests in chosen())
    assert chosen() != chosen(dataset_seed=9)
    assert all(len(tests) == 4 for tests in chosen("eval"))


def test_prompts_ask_for_one_of_two_formats(tmp_path: Path) -> None:
    direct = make(tmp_path).problem(1).question
    assert direct.startswith("Add 1 to the number x.\nThe program must define f.")
    assert "program only, in one fenced code block" in direct
    task = make(tmp_path, use_reasoning_format=True)
    assert "<reasoning> and </reasoning>" in task.problem(1).question
    assert paid(task, "```python\ndef f(x): return x + 2\n```") == (0.0, 0.0)
    assert paid(task, "<reasoning>easy</reasoning><answer>def f(x): return x + 2</answer>") == (1.0, 2.0)


def test_gold_answers_have_the_format_that_the_prompt_asks_for(tmp_path: Path) -> None:
    row = {**ROWS[2], "solution": "def f(x): return x + 2\n"}
    direct, reasoned = make(tmp_path, [row, row]), make(tmp_path, [row, row], use_reasoning_format=True)
    assert direct.gold(direct.problem(0)) == "```python\ndef f(x): return x + 2\n```"
    wanted = "<reasoning>\n</reasoning>\n<answer>\ndef f(x): return x + 2\n</answer>"
    assert reasoned.gold(reasoned.problem(0)) == wanted
    starter = {**row, "starter_code": "def f(x): return"}
    continued = make(tmp_path, [starter, starter], continue_starter=True)
    assert continued.gold(continued.problem(0)) == " x + 2\n"


def test_an_answer_may_go_on_from_the_starter_code(tmp_path: Path) -> None:
    row = {**ROWS[2], "starter_code": "def f(x):\n    return ", "solution": "def f(x):\n    return x + 2"}
    shown = make(tmp_path, [row, row])
    assert "Begin with:\ndef f(x):" in shown.problem(0).question
    going_on = make(tmp_path, [row, row], continue_starter=True, prompt="{statement}\n{starter}")
    assert going_on.problem(0).question == "Add 2 to the number x.\ndef f(x):\n    return "
    assert paid(going_on, "x + 2", 0) == (1.0, 2.0)
    assert paid(going_on, going_on.gold(going_on.problem(0)) or "", 0) == (1.0, 2.0)


def test_a_time_limit_in_the_row_wins(tmp_path: Path) -> None:
    row = {**ROWS[0], "time_limit_s": 0.2}
    task = make(tmp_path, [row])
    assert task._limits(task.problem(0).answer).seconds == 0.2


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({}, "row 1.*language"),
        ({"language": "cobol"}, "cobol"),
        ({"language": "python", "tests": [{"stdin": "x"}]}, "row 1, test 1"),
        ({"language": "python", "tests": []}, "no filled column tests"),
    ],
)
def test_bad_rows_are_refused_before_training(tmp_path: Path, row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        len(make(tmp_path, [{**ROWS[0], **row}], language=""))


def test_rows_of_another_language_are_left_out(tmp_path: Path) -> None:
    rows = [
        {**ROWS[0], "language": "python"},
        {**ROWS[1], "language": "c", "tests": [{"stdin": "1", "stdout": "2"}]},
    ]
    assert len(make(tmp_path, rows)) == 1
    with pytest.raises(UserError, match="python"):
        len(make(tmp_path, rows[1:]))


def test_a_language_that_is_not_installed_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        languages, "missing", lambda name: f"The language {name} is not installed on this machine: get it."
    )
    with pytest.raises(UserError, match=r"The language q .*: get it"):
        make(tmp_path, language="q")


def test_time_limits_must_fit_into_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sandbox_time_limit_s \(20\).*reward_timeout_s \(10\)"):
        make(tmp_path, sandbox_time_limit_s=20)


# ---- the set that ships ------------------------------------------------------------------------------------

SHIPPED = [json.loads(line) for line in shipped_problems().read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def pool():
    with LocalPool() as made:
        yield made


def test_the_shipped_set_is_whole() -> None:
    assert len(SHIPPED) >= 40
    assert len({row["statement"] for row in SHIPPED}) == len(SHIPPED)
    for row in SHIPPED:
        assert {"python", "klong"} == set(row["solution"]) == set(row["wrong"])
        assert set(row["not_run"]) == {"q"} and row["not_run"]["q"].startswith(row["function"] + ":")
        assert len(row["tests"]) >= 5


@pytest.mark.parametrize("language", ["python", "klong"])
def test_every_solution_passes_and_every_wrong_one_fails(pool: LocalPool, language: str) -> None:
    if missing(language):
        pytest.skip(f"{language} is not installed")
    failed, not_wrong = [], []
    for row in SHIPPED:
        tests = read_tests(row["tests"], LANGUAGES[language], row["function"], row["id"])
        solution, wrong = row["solution"][language], row["wrong"][language]
        if run_tests(pool, LANGUAGES[language], solution, tests, Limits()).outcome != "passed":
            failed.append(row["id"])
        if run_tests(pool, LANGUAGES[language], wrong, tests, Limits()).outcome != "wrong":
            not_wrong.append(row["id"])
    assert not failed
    assert not not_wrong


def test_the_shipped_set_goes_through_the_scoring_processes() -> None:
    words = [
        "datasets={code: {config: {path: problems, language: python, eval_fraction: 0.3}}}",
        "eval_num_samples=5",
    ]
    words += ["reward_funcs=accuracy", "reward_workers=1", f"sandbox_time_limit_s={LIMIT_S}"]
    config = load(None, words).config
    held_out = eval_problems(config)
    tasks = build_tasks(config, "train", held_out)
    check_gold(tasks)
    assert not {problem.question for problem in held_out} & {
        tasks.problem(i).question for i in range(len(tasks))
    }
    problems = [tasks.problem(0), tasks.problem(1), held_out[0]]
    outcomes = {"solution": "passed", "wrong": "wrong"}
    cases = [(problem, problem.answer[key], outcomes[key]) for problem in problems for key in outcomes]
    cases.append((problems[0], "import time; time.sleep(60)", "timeout"))
    with Scorer(config) as scorer:
        for problem, text, _ in cases:
            scorer.submit(ScoringRequest(problem=problem, text=text, completion_ids=(1,), truncated=False))
        scores = scorer.gather()
    assert [score.outcome for score in scores] == [outcome for _, _, outcome in cases]
    assert [score.reward > 1 for score in scores] == [outcome == "passed" for _, _, outcome in cases]
    assert all(score.failure is None for score in scores)
    assert len(scores[4].tests) == 5  # evaluation runs all tests
    assert len(scores[0].tests) == 3


def test_rows_of_the_q_project_are_read_as_they_are(tmp_path: Path) -> None:
    tests = [{"test_code": f"print(f({x}))", "expected_output": str(x + 1)} for x in (1, 2)]
    task = make(tmp_path, [{"description": "Add 1.", "tests": tests}])
    assert task.problem(0).question.startswith("Add 1.")
    assert paid(task, "def f(x): return x + 1", 0) == (1.0, 2.0)
    assert paid(task, "def f(x): return 2 * x", 0) == (0.0, 0.5)  # right for 1 alone
    as_text = make(tmp_path, [{"description": "Add 1.", "tests": json.dumps(tests)}])
    assert paid(as_text, "def f(x): return x + 1", 0) == (1.0, 2.0)


def test_fields_of_tests_are_renamed_or_dropped(tmp_path: Path) -> None:
    rows = [{"statement": "Print 4.", "tests": [{"wanted": "4", "points": 3}]}]
    with pytest.raises(UserError, match=r"test_fields=\{wanted: stdout\}"):
        len(make(tmp_path, rows))
    task = make(tmp_path, rows, test_fields={"wanted": "stdout", "points": None})
    assert paid(task, "print(4)", 0) == (1.0, 2.0) and paid(task, "print(5)", 0) == (0.0, 0.0)


@pytest.mark.parametrize(("recipe", "count"), [("sums", 1352), ("expressions", 1200), ("klong", 1200)])
def test_recipes_bring_their_own_rows(
    recipe: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no file of rows is here
    config = load(recipe).config
    fixed = eval_problems(config)
    mixture = build_tasks(config, "train", fixed)
    check_gold(mixture, per_task=1)
    whole = len(mixture.tasks["code"]) + len(build_tasks(config, "eval").tasks["code"])
    assert whole == count and len(fixed) >= 100


def test_every_expression_has_a_passing_klong_solution() -> None:
    """Our own solutions in this process: 7,200 forks would take minutes."""
    klong = pytest.importorskip("klongpy").KlongInterpreter()
    for row in make_expressions():
        klong(row["solution"]["klong"].strip())
        for test in row["tests"]:
            klong["argument"] = to_klong(test["args"][0])
            value = plain(from_klong(klong("f(argument)")))
            assert value == test["expected"], row

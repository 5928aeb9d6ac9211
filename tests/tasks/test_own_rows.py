"""Rows of the user's own: what is taken for an answer, how it is compared, what is paid and what is shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from whetstone import __main__ as cli
from whetstone.config import build, dump, load
from whetstone.errors import UserError
from whetstone.rewards import custom, matching
from whetstone.rewards.verify import verify
from whetstone.run import setup
from whetstone.tasks.mixture import build_tasks, check_gold, eval_problems
from whetstone.tasks.own_rows import RowsTask
from whetstone.tasks.registry import make_task
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest

CAPITALS = [{"question": f"Capital {i}?", "answer": name} for i, name in enumerate(["Paris", "Rome", "Oslo"])]


def make(tmp_path: Path, rows: list[dict[str, Any]], split: str = "train", **keys: Any) -> RowsTask:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        key: keys.pop(key)
        for key in ("match", "prompt_column", "answer_column", "eval_fraction")
        if key in keys
    }
    config = build(
        {"datasets": {"rows": {"config": {"path": str(path), **own}}}, "eval_num_samples": 0, **keys}
    )
    task = make_task(config, "rows", config.tasks.datasets["rows"], split)
    assert isinstance(task, RowsTask)
    return task


def paid(task: RowsTask, text: str, index: int = 0) -> float:
    return task.score(task.problem(index), text).parts["accuracy"]


# ---- comparing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        *(
            ("paris", "Paris", True),
            ("  Paris.", "Paris", True),
            ("the Eiffel  Tower", "Eiffel tower!", True),
        ),
        *(
            ("\u201cParis\u201d", "Paris", True),
            ("U.S.A.", "USA", True),
            ("(b)", "B", True),
            ("A", "a", True),
        ),
        *(("1,000", "1000.0", True), ("5", "5%", True), ("New\u200b York", "new york", True)),
        *(("Paris or Rome", "Paris", False), ("Pariss", "Paris", False), ("1.5", "15", False)),
        *(("1/2", "12", False), ("C++", "C", False), ("A, B", "B", False), ("A B", "B", False)),
        *(("-5", "5", False), ("5%", "5", True), ("10:30", "1030", False), ("!", "?", False)),
    ],
)
def test_normalized(answer: str, truth: str, right: bool):
    assert matching.same(answer, truth, "normalized") is right


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        *(("18 dollars", "18", True), ("$18.00", "18", True), ("3/4", "0.75", True), ("1e3", "1,000", True)),
        *(("0.3333333", "1/3", True), ("\u22125", "-5", True), ("18, so 18", "18", True)),
        *(
            ("42 or 43", "42", False),
            ("42%", "42", True),
            ("4200%", "42", False),
            ("nan", "4", False),
            ("inf", "4", False),
        ),
        *(("1e999", "2.5", False), ("12", "1 2", False), ("x5", "5", False), ("", "5", False)),
        *(("10/0", "10", False), ("9" * 100_000, "9", False), ("0.33", "1/3", False)),
    ],
)
def test_numeric(answer: str, truth: str, right: bool):
    assert matching.same(answer, truth, "numeric") is right


def test_exact_and_math():
    assert matching.same(" Paris\n", "Paris", "exact") and not matching.same("paris", "Paris", "exact")
    assert matching.same(r"\frac{1}{2}", "0.5", "math") and not matching.same(r"\frac{1}{3}", "0.5", "math")


@pytest.mark.parametrize(
    ("text", "answer", "number"),
    [
        ("<answer> Paris </answer> and more 7", "Paris", "Paris"),
        (r"<answer>a</answer> no: \boxed{9}", "9", "9"),
        ("48 + 24 = 72\n#### 72\nbye", "72", "72"),
        ("I think so.\nThe answer is Paris.", "Paris.", None),
        ("**Answer:** 12 apples", "12 apples", "12"),
        ("4 + 5 = 9.", "4 + 5 = 9.", "9"),
        ("<think>it may be 7", None, None),
        ("<think>7</think>\n8", "8", "8"),
        ("<answer></answer> 5", None, None),
        ("", None, None),
    ],
)
def test_what_is_taken_for_the_answer(text: str, answer: str | None, number: str | None):
    assert matching.extract(text, "normalized") == answer
    assert matching.extract(text, "numeric") == number


@pytest.mark.parametrize(
    ("truths", "match"),
    [
        (["1", "2,000", "$5", "-3.5", "1/2"], "numeric"),
        ([r"\frac{1}{2}", "3"], "math"),
        (["x^2", "2*x+1", "4"], "math"),
        (["Paris", "12"], "normalized"),
        (["2024-01-05", "yes"], "normalized"),
        ([], "none"),
    ],
)
def test_the_comparison_suits_the_answers(truths: list[str], match: str):
    assert matching.match_for(truths) == match


# ---- the task ----------------------------------------------------------------------------------------------


def test_text_answers_pay_1_or_0(tmp_path: Path):
    task = make(tmp_path, CAPITALS)
    assert task.match == "normalized"
    assert [paid(task, t) for t in ("<answer>paris</answer>", "<answer>Rome</answer>", "")] == [1.0, 0.0, 0.0]
    assert task.failure_reward == 0.0
    assert "match: normalized" in task.notes()[1] and "0 for a wrong one" in task.notes()[1]
    strict = make(
        tmp_path, CAPITALS, match="exact", reward_correct=2.0, reward_wrong=-1.0, reward_no_answer=-3.0
    )
    texts = ("<answer>Paris</answer>", "<answer>paris</answer>", "")
    assert [paid(strict, text) for text in texts] == [2.0, -1.0, -3.0]


def test_what_is_paid_survives_the_run_folder(tmp_path: Path):
    """config.yaml of a run holds every value: reading it again must not pay otherwise."""
    config = load(None, ["datasets={rows: {config: {path: a.jsonl}}}"]).config
    assert (config.tasks.reward_wrong, config.tasks.reward_funcs) == (0.0, ["accuracy"])
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml").config == config
    assert build({"datasets": {"math": {}}}).tasks.reward_wrong == -1.0


def test_gold_answers_are_accepted_and_worked_solutions_reduced(tmp_path: Path):
    rows = [{"prompt": f"{i}?", "solution": f"It is {i}00.\n#### {i},000"} for i in range(1, 40)]
    task = make(tmp_path, rows)
    assert (task.match, task.problem(4).answer["answer"]) == ("numeric", "5,000")
    assert paid(task, "so 5000 it is", 4) == 1.0 and paid(task, "so 500 it is", 4) == 0.0
    config = build({"datasets": {"rows": {"config": {"path": str(tmp_path / "rows.jsonl")}}}})
    check_gold(build_tasks(config, "train"))


def test_messages_are_the_prompt(tmp_path: Path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "3?"}]}]
    gold = {"role": "assistant", "content": "4"}
    task = make(tmp_path, [{"prompt": [*turns, gold], "answer": 4}, {"prompt": parts, "answer": 6}])
    assert list(task.problem(0).messages) == turns
    assert task.problem(1).question == "3+3?"
    told = make(tmp_path, [{"prompt": turns, "answer": 4}], developer_prompt="Think first.")
    assert [m["content"] for m in told.problem(0).messages] == ["Think first.", "2+2?"]


def test_what_nobody_reads_is_named(tmp_path: Path):
    turn = {"role": "user", "content": "2+3?", "name": "Ann", "weight": 1, "tool_calls": None}
    rows = [{"messages": [turn], "answer": "5", "source": "x"}, {"messages": [turn], "answer": "5", "id": 1}]
    note = make(tmp_path, rows).notes()[0]
    assert note.endswith("answer from answer (numbers); not used: source, id, message field weight.")
    assert "not used" not in make(tmp_path, CAPITALS).notes()[0]


def test_an_instruction_keeps_its_input(tmp_path: Path):
    rows = [
        {"instruction": "Translate to French.", "input": "Good morning", "output": "Bonjour"},
        {"instruction": "Say hello.", "input": "", "output": "Hello"},
    ]
    task = make(tmp_path, rows, answer_column="output")
    assert [task.problem(i).messages[-1]["content"] for i in range(2)] == [
        "Translate to French.\n\nGood morning",
        "Say hello.",
    ]


def test_empty_rows_are_left_out_and_counted(tmp_path: Path):
    rows = [*CAPITALS, {"question": "", "answer": "x"}, {"question": "b?", "answer": None}]
    task = make(tmp_path, rows)
    assert len(task) == 3
    assert task.notes()[0].startswith(f"rows: 5 rows of {tmp_path}/rows.jsonl: 3 to train on, 2 left out (")


def test_columns_reach_functions_under_their_own_names(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def f(completions, id, level, answer):\n    return [float(i) for i in id]\n"
    )
    rows = [{**row, "id": 40 + i, "level": "x"} for i, row in enumerate(CAPITALS)]
    task = make(tmp_path, rows, reward_funcs=["accuracy", f"{tmp_path}/mine.py:f"], reward_workers=1)
    assert task.columns(task.problem(1)) == rows[1]
    with Scorer(task.config) as scorer:
        for index in range(3):
            text = "<answer>paris</answer>"
            scorer.submit(
                ScoringRequest(problem=task.problem(index), text=text, completion_ids=[1], truncated=False)
            )
        scores = scorer.gather()
    assert [score.reward for score in scores] == [1.0 + 40, 41.0, 42.0]


def test_prompts_alone_need_a_function(tmp_path: Path):
    rows = [{"prompt": f"{i}?"} for i in range(9)]
    with pytest.raises(UserError, match=r"reward_funcs=\[my_rewards.py:my_function\]"):
        len(make(tmp_path, rows))
    with pytest.raises(UserError, match="set answer_column"):
        len(make(tmp_path, rows, match="exact"))
    (tmp_path / "mine.py").write_text("def f(completions, **columns):\n    return [0.5] * len(completions)\n")
    task = make(tmp_path, rows, reward_funcs=[f"{tmp_path}/mine.py:f"], reward_workers=1)
    assert (len(task), task.match, task.gold(task.problem(0))) == (9, "none", None)
    with Scorer(task.config) as scorer:
        scorer.submit(ScoringRequest(problem=task.problem(0), text="x", completion_ids=[1], truncated=False))
        (score,) = scorer.gather()
    assert (score.reward, dict(score.parts)) == (0.5, {"f": 0.5})


def test_a_run_without_answers_shows_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}?", "n": i}) + "\n" for i in range(20))
    )
    (tmp_path / "mine.py").write_text("def f(completions, n):\n    return [float(i % 2) for i in n]\n")
    small = ["max_steps=1", "prompts_per_step=2", "num_generations=2", "max_completion_length=8"]
    small += ["preflight=off"]  # f pays all completions of a prompt the same
    words = ["rows", "data_path=p.jsonl", "reward_funcs=[mine.py:f]", "model_name_or_path=pebble", *small]
    words += [
        "reward_workers=1",
        "eval_fraction=0.3",
        "eval_num_samples=100",
        "output_dir=out",
        "eval_greedy=false",
    ]
    assert cli.run(["train", *words, "developer_prompt=null"]) == 0
    told = capsys.readouterr().out
    num = len(json.loads((tmp_path / "out/rows/eval_results/eval_step_0.json").read_text())["completions"])
    assert 1 < num < 15 and f"evaluations of {num} problems" in told  # F12: what is really there
    rows = [json.loads(line) for line in (tmp_path / "out/rows/metrics.jsonl").read_text().splitlines()]
    assert all("accuracy" not in row for row in rows)
    assert all(0 < row["reward"] < 1 for row in rows if row["kind"] == "eval")
    results = json.loads((tmp_path / "out/rows/train_results.json").read_text())
    assert results["is_judged"] is False and 0 < results["reward_after"]["mean"] < 1
    page = (tmp_path / "out/rows/report.html").read_text()
    assert "Reward before" in page and 'chip wrong"' not in page


def test_a_small_evaluation_is_warned_about():
    config = build({"eval_num_samples": 300})
    (line,) = setup.few_problems(config, 4)
    assert "15 to 85 %" in line and "eval_path" in line  # Wilson's interval of 2 of 4
    assert setup.few_problems(config, 50) == [] == setup.few_problems(config, 0)
    assert "eval_num_samples to 100" in setup.few_problems(build({"eval_num_samples": 10}), 10)[0]


def test_gsm8k_by_both_tasks(tmp_path: Path):
    """The shape of GSM8K: the answer behind ####, with thousands' commas."""
    rows = [{"question": f"q{i}", "answer": f"<<{i}*1000={i}000>>\n#### {i},000"} for i in range(1, 60)]
    (tmp_path / "gsm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind in ("rows", "math"):
        config = load(kind, [f"data_path={tmp_path / 'gsm.jsonl'}", "eval_fraction=0.2"]).config
        fixed = eval_problems(config)
        mixture = build_tasks(config, "train", fixed)
        check_gold(mixture)
        assert len(fixed) + len(mixture) == 59 and len(fixed) >= 3
        [task] = mixture.tasks.values()
        match = "numeric" if kind == "rows" else "math"
        assert f"{len(task)} to train on, {len(fixed)} to evaluate" in task.notes()[0]
        assert f"match: {match}" in task.notes()[1]


# ---- functions of the user's own ---------------------------------------------------------------------------


def test_reward_function_of_one_answer_by_argument_names():
    def reward_fn(output, ground_truth_ans, nums):
        return 1.0 if f"{ground_truth_ans} from {nums}" in output else 0.0

    arguments = {
        "prompts": ["", ""],
        "completions": [[{"role": "assistant", "content": "64 from [1, 4]"}], [{"content": "65"}]],
        "completion_ids": [[1], [2]],
        "answer": [None, None],
        "target": [64, 64],
        "nums": [[1, 4], [1, 4]],
    }
    assert custom.call(reward_fn, arguments, 2)[0] == [1.0, 0.0]

    async def later(generated_text, ground_truth):
        return (0.25, {"seen": generated_text, "truth": ground_truth})

    assert custom.call(later, arguments, 2)[0] == [0.25, 0.25]


def test_a_file_may_import_its_project_and_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("utils", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "utils" / "reward_utils.py").write_text(
        "from utils.tools import two\nimport near_by\n"
        "def compute_reward(generated_text, ground_truth):\n    return two() + near_by.ONE\n"
    )
    (tmp_path / "utils" / "tools.py").write_text("def two():\n    return 2.0\n")
    (tmp_path / "utils" / "near_by.py").write_text("ONE = 1.0\n")
    monkeypatch.chdir(tmp_path)
    verify(["accuracy", "utils/reward_utils.py:compute_reward"])
    rows = [{"question": f"q{i}", "answer": "1"} for i in range(3)]
    task = make(tmp_path, rows, reward_funcs=["utils/reward_utils.py:compute_reward"], reward_workers=1)
    with Scorer(task.config) as scorer:
        scorer.submit(ScoringRequest(problem=task.problem(0), text="x", completion_ids=[1], truncated=False))
        assert scorer.gather()[0].reward == 3.0


def test_a_bad_import_ends_the_run_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine.py").write_text("import nothing_of_that_name\ndef f(completions):\n    return []\n")
    monkeypatch.setattr("whetstone.run.setup.load_sharded", lambda *_: pytest.fail("the model is loaded"))
    words = ["datasets={chain_sum: {}}", f"reward_funcs=[{tmp_path}/mine.py:f]", f"output_dir={tmp_path}/out"]
    for verb in ("train", "eval"):
        assert cli.run([verb, *words, "eval_num_samples=2"]) == 2
        told = capsys.readouterr().err
        assert "nothing_of_that_name" in told and "mine.py, line 1" in told and told.count("\n") == 1


# ---- questions, options, lengths ---------------------------------------------------------------------------


def test_spelling_makes_no_other_question(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")

    def written(name: str, texts: list[str]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in texts))
        return str(path)

    train = [f"What is {n} + {n}?" for n in range(12)]
    test = [f"what IS  {n}\n+ {n}? " for n in range(4)]
    rows = {"path": written("a.jsonl", train), "eval_path": written("b.jsonl", test)}
    mixture = build_tasks(build({"datasets": {"rows": {"config": rows}}}), "train")
    assert {mixture.problem(i).question for i in range(len(mixture))} == set(train[4:])
    assert "rows: 4 of 12 rows are evaluation problems, left out." in caplog.text
    both = {"path": written("c.jsonl", train + [text.upper() for text in train]), "eval_fraction": 0.3}
    config = build({"datasets": {"rows": {"config": both}}})
    sides = [make_task(config, "rows", config.tasks.datasets["rows"], split) for split in ("train", "eval")]
    ours, theirs = [{task.problem(i).question.upper() for i in range(len(task))} for task in sides]
    assert len(ours) + len(theirs) == 12 and not ours & theirs


def test_a_row_is_not_trained_on_where_it_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "env.py").write_text(
        "class Env:\n    def reset(self, seed=None, number=0, **row):\n        return f'{seed} {number}'\n"
        "    def step(self, action):\n        return '', 1.0, True\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("a.jsonl", range(10)), ("b.jsonl", range(7, 10))):
        (tmp_path / name).write_text("".join(json.dumps({"number": n}) + "\n" for n in numbers))
    rows = {"path": "a.jsonl", "eval_path": "b.jsonl", "factory": "env.py:Env"}
    config = build({"datasets": {"environment": {"config": rows}}})
    mixture = build_tasks(config, "train")
    seen = [mixture.problem(i).answer["row"]["number"] for i in range(len(mixture))]
    assert sorted(seen) == list(range(7))


def test_repeated_and_contradictory_rows_are_counted(tmp_path: Path):
    again = [{"question": " capital 0?", "answer": "PARIS"}, {"question": "Capital 1?", "answer": "Milan"}]
    notes = make(tmp_path, [*CAPITALS, *again]).notes()
    assert (
        notes[1] == "rows: 2 rows with the question of an earlier row, 1 with another answer (row 5 first)."
    )
    assert not any("earlier row" in note for note in make(tmp_path, CAPITALS).notes())


@pytest.mark.parametrize(
    ("text", "right"),
    [
        *(("<answer>B</answer>", True), ("<answer>(b)</answer>", True), (r"\boxed{\text{B}}", True)),
        *(("<answer>B) Rome</answer>", True), ("<answer>rome</answer>", True), ("The answer is B.", True)),
        *(
            ("<answer>A</answer>", False),
            ("<answer>Paris</answer>", False),
            ("<answer>C) Rome</answer>", False),
        ),
        ("<answer>1</answer>", False),
    ],
)
def test_an_option_is_named_by_letter_or_text(tmp_path: Path, text: str, right: bool):
    row = {"question": "The capital of Italy?", "choices": ["Paris", "Rome", "Oslo"], "answer": 1}
    assert paid(make(tmp_path, [row]), text) == float(right)
    shown = {"question": "The capital of Italy?\n(A) Paris\n(B) Rome\n(C) Oslo", "answer": "B"}
    assert paid(make(tmp_path, [shown]), text) == float(right)


def test_longer_prompts_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    texts = ["Short?", *(f"{n}? " + "word " * 50 for n in range(3)), "Also short?"]
    path, other = tmp_path / "rows.jsonl", tmp_path / "test.jsonl"
    for file in (path, other):
        file.write_text("".join(json.dumps({"question": text, "answer": "1"}) + "\n" for text in texts))
    rows = {"datasets": {"rows": {"config": {"path": str(path), "eval_path": str(other)}}}}
    keys = {**rows, "model_name_or_path": "pebble", "max_prompt_length": 40, "filter_overlong_prompts": True}
    caplog.set_level("INFO")
    _, tasks, _ = setup.build_tasks_and_plan(build({**keys, "eval_num_samples": 0, "max_steps": 1}))
    assert {tasks.problem(i).question for i in range(len(tasks))} == {"Short?", "Also short?"}
    assert "rows (train): 3 of 5 prompts longer than max_prompt_length are left out" in caplog.text
    assert {p.question for p in eval_problems(build(keys), setup.prompt_filter(build(keys)))} == {
        "Short?",
        "Also short?",
    }
    with pytest.raises(UserError, match="too long: raise max_prompt_length"):
        setup.build_tasks_and_plan(build({**keys, "eval_num_samples": 0, "max_prompt_length": 1}))


def test_gsm8k_solutions_get_a_box_in_math_alone(tmp_path: Path):
    text = "48/2 = <<48/2=24>>24 clips.\n#### 1,072"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": text}) + "\n")
    for kind, trained in (("rows", text), ("math", "48/2 = 24 clips.\n\\boxed{1,072}")):
        keys = {
            "datasets": {kind: {"config": {"path": str(path)}}},
            "loss_type": "sft",
            "eval_num_samples": 0,
        }
        tasks = build_tasks(build(keys), "train")
        assert tasks.tasks[kind].solution(tasks.problem(0)) == trained
    for other in ('cout << "n?"; cin >> a;', "return (x << 2) >> 1\n\n#### Conclusion", "  x <<3>> 1\n"):
        path.write_text(json.dumps({"prompt": "Write.", "completion": other}) + "\n")
        tasks = build_tasks(build({**keys}), "train")
        assert tasks.tasks["math"].solution(tasks.problem(0)) == other


def test_chat_rows_are_evaluated_by_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    rows = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}] for n in range(9)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = (
        "model_name_or_path=pebble max_steps=1 prompts_per_step=2 max_completion_length=8 eval_greedy=false"
    )
    words += " preflight=off save_strategy=no reward_workers=1 eval_fraction=0.3 output_dir=out"
    assert cli.run(["sft", "rows", "data_path=chat.jsonl", *words.split()]) == 0
    told = capsys.readouterr().out
    assert "prompt from messages, solution from messages." in told and "reward 0 [0, 0]" in told
    assert "tokens a completion" in told and "accuracy 0" not in told

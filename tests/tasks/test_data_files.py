"""Bad data: one sentence and exit code 2 for every file of the corpus, and remedies that are accepted."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.corpora import data_files
from whetstone import __main__ as cli
from whetstone.config import load
from whetstone.errors import UserError
from whetstone.tasks.row_files import read_file, read_folder
from whetstone.tasks.row_reader import Reader

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(12)]
LONGEST_S = 60  # a hang, even on a busy machine


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    def too_late(*_: object) -> None:
        raise AssertionError(f"it took longer than {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(LONGEST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, data_files.Case]:
    return {case.name: case for case in data_files.write(tmp_path_factory.mktemp("corpus"))}


def names() -> list[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return [case.name for case in data_files.write(Path(folder))]


@pytest.mark.parametrize("name", names())
def test_bad_data_ends_in_one_sentence(
    corpus: dict[str, data_files.Case], name: str, capsys: pytest.CaptureFixture[str]
):
    case = corpus[name]
    assert cli.run(case.argv) == case.code == 2
    told = capsys.readouterr().err
    assert told.startswith("whet: ") and told.count("\n") == 1 and len(told) < 1500, told


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("late_fault.jsonl", "line 2"), ("late_text.jsonl", "row 2"), ("rows: late_object", "row 2")),
        *(("more_cells.csv", "line 2"), ("nul_inside.csv", "line 2"), ("code: args is a number", "row 2")),
        *(("countdown: no nums", "row 2"), ("lone_surrogate.jsonl", "row 1"), ("nested.jsonl", "row 1")),
    ],
)
def test_the_row_is_named(
    corpus: dict[str, data_files.Case], name: str, number: str, capsys: pytest.CaptureFixture[str]
):
    cli.run(corpus[name].argv)
    assert number in capsys.readouterr().err


# ---- remedies ----------------------------------------------------------------------------------------------


def put(folder: Path, rows: list[dict]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("task", ["math", "rows"])
@pytest.mark.parametrize(
    "names",
    [("question", "answer"), ("problem", "solution"), ("prompt", "ground_truth"), ("prompt", "answer")],
)
def test_the_commonest_columns_are_found_by_the_shipped_recipe(
    tmp_path: Path, task: str, names: tuple[str, str], capsys: pytest.CaptureFixture[str]
):
    path = put(tmp_path, [{names[0]: row["question"], names[1]: row["answer"]} for row in ROWS])
    loaded = load(task, [f"data_path={path}"])
    from whetstone.tasks.mixture import build_tasks, check_gold, eval_problems

    fixed = eval_problems(loaded.config)
    mixture = build_tasks(loaded.config, "train", fixed)
    check_gold(mixture)
    assert len(fixed) + len(mixture) == 12


@pytest.mark.parametrize("task", ["math", "rows", "countdown", "code"])
def test_the_remedy_of_a_missing_column_is_accepted(
    tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]
):
    """Give what each sentence asks for until none comes: by `whet tasks`, and by the keys of a run."""
    right = {
        "math": {"prompt_column": "q", "answer_column": "a"},
        "rows": {"prompt_column": "q", "answer_column": "a"},
        "countdown": {"numbers_column": "n", "target_column": "a"},
        "code": {"statement_column": "q", "tests_column": "t", "language": "python"},
    }[task]
    tests = [{"stdin": "1", "stdout": "2"}]
    path = put(tmp_path, [{"q": f"{i}?", "a": "3", "n": [1, 2, i], "t": tests, "i": i} for i in range(9)])
    words = [f"path={path}"]
    for _ in range(3):
        code = cli.run(["tasks", task, *words])
        told = capsys.readouterr().err
        if code == 0:
            break
        found = re.search(r"set (\w+) to one of its columns \(q, a, n, t, i\)|set (language)=python", told)
        assert found, told
        key = found[1] or found[2]
        words.append(f"{key}={right[key]}")
    assert cli.run(["tasks", task, *words]) == 0
    recipe = {"code": "sums"}.get(task, task)
    assert cli.run(["config", recipe, *words]) == 0  # the same words in the grammar of a run
    loaded = load(recipe, words)
    assert loaded.config.tasks.datasets[task].config["path"] == str(path)
    assert {key: loaded.config.tasks.datasets[task].config[key] for key in right} == right


def test_the_other_remedies_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = put(tmp_path, [{"prompt": f"{i}?", "value": [i, i]} for i in range(9)])
    assert cli.run(["tasks", "rows"]) == 2
    assert "path=FILE" in capsys.readouterr().err
    assert cli.run(["tasks", "rows", f"path={path}"]) == 2
    assert "reward_funcs=[my_rewards.py:my_function]" in capsys.readouterr().err
    assert cli.run(["tasks", "rows", f"path={path}", "reward_funcs=[my_rewards.py:my_function]"]) == 0
    assert cli.run(["tasks", "rows", f"path={path}", "answer_column=value"]) == 2
    assert "match=none" in capsys.readouterr().err
    words = ["answer_column=value", "match=none", "reward_funcs=[my_rewards.py:f]"]
    assert cli.run(["tasks", "rows", f"path={path}", *words]) == 0


def test_a_plain_setting_needs_one_task_that_has_it(tmp_path: Path):
    path = put(tmp_path, ROWS)
    two = f"datasets={{math/a: {{config: {{path: {path}}}}}, math/b: {{config: {{path: {path}}}}}}}"
    with pytest.raises(UserError, match=r"answer_column.*several"):
        load(None, [two, "answer_column=answer"])
    one = f"datasets={{math: {{config: {{path: {path}}}}}, chain_sum: {{}}}}"
    config = load(None, [one, "answer_column=answer"]).config
    assert config.tasks.datasets["math"].config["answer_column"] == "answer"
    assert config.tasks.datasets["chain_sum"].config == {}
    with pytest.raises(UserError, match="answer_column"):
        load(None, ["datasets={chain_sum: {}}", "answer_column=answer"])


# ---- files and folders that are good -----------------------------------------------------------------------


def test_jsonl_with_unicode_line_separators_in_a_text(tmp_path: Path):
    texts = ["a\u2028b", "a\u0085b", "a\x0bb\x0cc\x1cd"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\ufeff" + "".join(json.dumps({"q": t}, ensure_ascii=False) + "\r\n" for t in texts))
    assert [row["q"] for row in read_file(path, "t")] == texts


def test_columns_may_differ_from_row_to_row():
    rows = [{"question": "a"}, {"question": "b", "answer": "1"}]
    assert Reader(rows, {}, "x").find("answer_column", ("answer",)) == "answer"


def test_a_folder_holds_splits_by_name(tmp_path: Path):
    (tmp_path / "data").mkdir()
    for name, rows in (("train-00000-of-00002", ROWS[:5]), ("train-00001-of-00002", ROWS[5:8])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / f"{name}.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[8:]), tmp_path / "data" / "dev.parquet")
    assert read_folder(tmp_path, "train", "t") == ROWS[:8]
    assert read_folder(tmp_path, "validation", "t") == ROWS[8:]
    with pytest.raises(UserError, match=r"'test'.*validation, train"):
        read_folder(tmp_path, "test", "t")
    put(tmp_path / "data", ROWS)  # rows.jsonl: no split in its name
    assert read_folder(tmp_path, "train", "t") == ROWS[:8]


def test_a_folder_saved_by_datasets(tmp_path: Path):
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select(range(3))}).save_to_disk(str(tmp_path / "two"))
    assert read_folder(tmp_path / "one", "train", "t") == ROWS
    assert read_folder(tmp_path / "two", "test", "t") == ROWS[:3]
    with pytest.raises(UserError, match=r"'dev'.*train, test"):
        read_folder(tmp_path / "two", "dev", "t")

"""Rows of a script: written once, and read as any file, so that a run is resumed and evaluated as any run."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from datasets import Dataset, Image

import whetstone
from whetstone.__main__ import run
from whetstone.errors import UserError
from whetstone.files import atomic_write
from whetstone.tasks.mixture import build_tasks
from whetstone.tasks.row_files import read_file

ROWS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(12)]
SMALL: dict[str, Any] = {
    "model": "pebble", "max_steps": 1, "prompts_per_step": 2, "num_generations": 2, "eval_num_samples": 2,
    "max_completion_length": 8, "reward_workers": 1, "eval_greedy": False, "preflight": "off",
}  # fmt: skip


def file_of(config: Any) -> Path:
    return Path(config.tasks.datasets["rows"].config["dataset"])


class Sized:
    """An iterable with a length, and nothing else."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def test_cells_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": " \u2028\n\x85 \U0001f600 \\n 'quoted' \t"}],
            "answer": None,
            "nested": {"list": [1, [2.5, None], {"a": "b"}], "large": 2**70, "true": True},
            "number": 0.1 + 0.2,
        },
        {"prompt": "", "other": -1e-300, "answer": math.inf},
    ]
    config = whetstone.load_config(train_dataset=rows, output_dir=tmp_path)
    assert read_file(file_of(config), "rows") == rows
    arrays = [{"prompt": "a", "answer": np.float32(0.5), "tests": np.array([[1, 2], [3, 4]])}]
    config = whetstone.load_config(train_dataset=arrays, output_dir=tmp_path)
    assert read_file(file_of(config), "rows") == [{"prompt": "a", "answer": 0.5, "tests": [[1, 2], [3, 4]]}]


def test_the_same_rows_are_the_same_file(tmp_path: Path) -> None:
    forms: list[Any] = [ROWS, Dataset.from_list(ROWS), Sized(ROWS), tuple(ROWS)]
    configs = [whetstone.load_config(train_dataset=form, output_dir=tmp_path) for form in forms]
    assert len({file_of(config) for config in configs}) == 1
    other = whetstone.load_config(train_dataset=ROWS[1:], output_dir=tmp_path)
    files = {path.name for path in (tmp_path / "datasets").iterdir()}
    assert files == {file_of(configs[0]).name, file_of(other).name}
    assert read_file(file_of(configs[0]), "rows") == ROWS


def test_several_writers_of_one_file(tmp_path: Path) -> None:
    """As the ranks of a launch do, each of which runs the script."""
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(30):
                atomic_write(tmp_path / "rows.jsonl", "text" * 20_000, many_writers=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def image() -> Dataset:
    from PIL import Image as Picture

    pictures = [Picture.new("RGB", (2, 2))]
    return Dataset.from_dict({"prompt": ["a"], "photo": pictures}).cast_column("photo", Image())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: {"train_dataset": {"train": ROWS}}, r"^train_dataset is of type dict: .* data\['train'\]"),
        (
            lambda: {"eval_dataset": iter(ROWS)},
            "^eval_dataset is of type list_iterator: give a list of dicts",
        ),
        (
            lambda: {"train_dataset": Dataset.from_list(ROWS).to_iterable_dataset()},
            "^train_dataset is of type IterableDataset: give a list of dicts",
        ),
        (lambda: {"train_dataset": []}, "^train_dataset has no rows"),
        (lambda: {"train_dataset": ["a", "b"]}, "^train_dataset is of type list: give a list of dicts"),
        (lambda: {"train_dataset": image()}, "^train_dataset, row 1, column photo: .*ImageFile can't go"),
        (
            lambda: {"train_dataset": [*ROWS, {"prompt": "a", "answer": object()}]},
            "^train_dataset, row 13, column answer: object can't go into a file",
        ),
        (lambda: {"dataset_name": Dataset.from_list(ROWS)}, r"^dataset_name: Dataset .*rows: train_dataset"),
        (lambda: {"data_path": Dataset.from_list(ROWS)}, r"^data_path: Dataset .*rows: train_dataset"),
        (lambda: {"dataset_name": ROWS}, r"^dataset_name has to be one name, not a list \(rows: train_data"),
        (
            lambda: {"datasets": {"rows": {"config": {"dataset": Dataset.from_list(ROWS)}}}},
            r"^datasets: Dataset can't go into a file: .*rows: train_dataset",
        ),
        (
            lambda: {"train_dataset": ROWS, "datasets": {"chain_sum": {}}},
            r"^train_dataset \(argument\) is for",
        ),
        (lambda: {"source": ROWS}, "^source is a list: give a YAML file"),
        (lambda: {"train_datasets": ROWS}, r"'train_datasets' \(argument, did you mean 'train_dataset'"),
        (lambda: {"answer_column": "a"}, r"^answer_column \(argument\) needs a data set"),
        (lambda: {"train_dataset": ROWS, "reward_funcs": [len]}, "^reward_funcs: builtin_function_or_method"),
        (lambda: {"tools": [lambda: 1]}, "^tools: <lambda> is no plain function"),
    ],
)
def test_what_cannot_be_written_is_named(
    arguments: Callable[[], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        whetstone.load_config(output_dir=tmp_path, **arguments())
    assert "\n" not in str(caught.value) and "command line" not in str(caught.value)


def test_rows_of_another_task(tmp_path: Path) -> None:
    rows = [{"nums": [i, 2, 3], "target": i + 5} for i in range(1, 9)]
    config = whetstone.load_config(
        train_dataset=rows, datasets={"countdown": {}}, eval_num_samples=0, output_dir=tmp_path
    )
    mixture = build_tasks(config, "train")
    problems = [mixture.problem(index) for index in range(8)]
    assert sorted(problem.answer["target"] for problem in problems) == list(range(6, 14))


def test_settings_of_a_yaml_beside_rows(tmp_path: Path) -> None:
    """Its columns wait for the rows, which lie in its output_dir."""
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"prompt_column": "q", "answer_column": "a", "output_dir": str(tmp_path)}))
    rows = [{"q": str(i), "a": i, "answer": "no"} for i in range(4)]
    config = whetstone.load_config(str(path), train_dataset=rows, eval_num_samples=0)
    mixture = build_tasks(config, "train")
    assert {mixture.problem(i).answer["answer"] for i in range(4)} == {"0", "1", "2", "3"}
    assert file_of(config).parent == tmp_path / "datasets"


def test_a_run_is_resumed_and_evaluated_by_its_folder(tmp_path: Path) -> None:
    """`whet` needs no more than config.yaml; the same call finds the same rows."""
    settings = {**SMALL, "output_dir": tmp_path, "run_name": "run", "reward_funcs": ["accuracy"]}
    data = {"train_dataset": Dataset.from_list(ROWS), "eval_dataset": ROWS[:3]}
    first = whetstone.train(**data, **settings)
    assert [row["step"] for row in first.metrics if row["kind"] == "train"] == [1]
    files = sorted((tmp_path / "datasets").iterdir())
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["datasets"]["rows"]["config"]
    assert {config["dataset"], config["eval_path"]} == {str(path) for path in files} and len(files) == 2

    (second,) = whetstone.steps(**data, **{**settings, "max_steps": 2, "auto_resume": True})
    assert second.step == 2
    assert {group.problem.question for group in second.groups} < {row["prompt"] for row in ROWS}
    assert sorted((tmp_path / "datasets").iterdir()) == files
    final = tmp_path / "run" / "final_model"
    assert run(["eval", str(tmp_path / "run" / "config.yaml"), f"checkpoint_path={final}"]) == 0
    (results,) = (tmp_path / "run" / "evaluations" / "final_model" / "eval_results").glob("*.json")
    asked = {record["messages"][-1]["content"] for record in json.loads(results.read_text())["completions"]}
    assert asked < {row["prompt"] for row in ROWS[:3]} and len(asked) == 2


def test_rows_to_evaluate_on_alone(tmp_path: Path) -> None:
    """All of them: nothing is held out where nothing is trained."""
    settings = {"model": "pebble", "max_completion_length": 4, "reward_workers": 1, "output_dir": tmp_path}
    summary = whetstone.evaluate(eval_dataset=ROWS, eval_num_samples=12, **settings)
    assert summary["accuracy"]["num_problems"] == 12

"""Objects that a configuration names in the user's own files: how they are found, and each error."""

import importlib.machinery
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whetstone.config.plugins import check_object, is_plugin, load_object
from whetstone.errors import UserError

SOURCE = "import beside\nclass Engine: ...\ndef loss():\n    return beside.VALUE\nNUMBER = 3\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "my_plugin.py").write_text(SOURCE)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("beside", "my_plugin"):
        sys.modules.pop(name, None)


def test_a_built_in_name_is_no_plugin() -> None:
    assert is_plugin("my_plugin.py:Engine") and is_plugin("package.module:Engine")
    assert not is_plugin("native")


@pytest.mark.parametrize("spec", ["my_plugin.py:loss", "my_plugin:loss"])
def test_a_file_and_a_module_are_loaded(folder: Path, spec: str) -> None:
    assert load_object(spec, "loss_type")() == 7


def test_a_class_is_loaded(folder: Path) -> None:
    assert load_object("my_plugin.py:Engine", "rollout_engine").__name__ == "Engine"


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("absent.py:Engine", r"file absent\.py"),
        ("my_plugin.py:Engin", "'Engin'.*Engine, loss"),
        ("my_plugin.py:NUMBER", "int"),
        ("my_plugin:absent", "'absent'"),
        ("no_such_package.module:Engine", "ModuleNotFoundError"),
        ("my_plugin.py:", "my_file.py:my_name"),
        (":Engine", "my_file.py:my_name"),
    ],
)
def test_an_error_names_the_key_the_value_and_the_reason(folder: Path, spec: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        load_object(spec, "rollout_engine")
    assert str(caught.value).startswith(f"rollout_engine names '{spec}'")


def test_an_error_inside_the_file_has_its_line(folder: Path) -> None:
    (folder / "broken.py").write_text("def loss(): ...\n\n\nraise RuntimeError('no data here')\n")
    check_object("broken.py:loss", "loss_type")  # runs nothing
    with pytest.raises(UserError, match=r"RuntimeError: no data here \(broken.py, line 4\)"):
        load_object("broken.py:loss", "loss_type")
    (folder / "broken.py").write_text("def loss(:\n")
    with pytest.raises(UserError, match=r"broken\.py.*line 1"):
        check_object("broken.py:loss", "loss_type")


@pytest.fixture
def two_files(folder: Path) -> list[str]:
    for name, value in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        source = f"class Reward:\n    value = {value}\ndef reward(): return Reward()\n"
        (folder / name / "reward.py").write_text(source)
    return ["a/reward.py:reward", "b/reward.py:reward"]


def test_files_of_one_name_are_two_modules(two_files: list[str]) -> None:
    rewards = [load_object(spec, "reward_funcs")() for spec in two_files]
    assert [reward.value for reward in rewards] == [1, 2]
    assert [pickle.loads(pickle.dumps(reward)).value for reward in rewards] == [1, 2]
    again = load_object("a/reward.py:Reward", "reward_funcs")
    assert type(rewards[0]) is again  # the file ran once


def test_a_fresh_process_reads_pickled_objects(two_files: list[str]) -> None:
    pickled = [pickle.dumps(load_object(spec, "reward_funcs")()) for spec in two_files]
    setup = f"import pickle, sys\nsys.path[:] = {sys.path}\n"
    code = f"{setup}for data in {pickled}: print(pickle.loads(data).value)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1", "2"]


def test_an_edited_file_is_loaded_again(folder: Path) -> None:
    load_object("my_plugin.py:loss", "loss_type")
    (folder / "my_plugin.py").write_text("def loss():\n    return 'edited'\n")
    assert load_object("my_plugin.py:loss", "loss_type")() == "edited"


@pytest.mark.parametrize("spec", ["my_plugin.py:loss", "my_plugin:loss"])
def test_the_working_directory_replaces_no_package(folder: Path, spec: str) -> None:
    (folder / "datasets.py").write_text("raise RuntimeError('not the package')\n")
    load_object(spec, "loss_type")
    found = importlib.machinery.PathFinder.find_spec("datasets")  # also where it is imported
    assert found is not None and str(found.origin).endswith("datasets/__init__.py")
    assert sys.path[0] != str(folder)


def test_python_m_has_the_working_directory_last(folder: Path) -> None:
    (folder / "yaml.py").write_text("raise RuntimeError('not the package')\n")
    command = [sys.executable, "-m", "whetstone", "config", "algorithm=grpo"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "not the package" not in result.stderr

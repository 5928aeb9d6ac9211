"""A package that is missing is named before a model is loaded, with the command that installs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from whetstone.__main__ import run
from whetstone.config import load
from whetstone.engines import packages
from whetstone.errors import UserError


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["report_to=wandb"], "wandb"),
        (["report_to=tensorboard"], "tensorboard"),
        (["report_to=trackio"], "trackio"),
        (["rollout_engine=vllm"], "vllm"),
        (["use_vllm=true", "vllm_mode=colocate"], "vllm"),
        (["rollout_engine=sglang"], "sglang"),
        (["sandbox_pool=ray"], "ray"),
    ],
)
def test_each_is_named_with_its_command(
    words: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: name != package)
    with pytest.raises(UserError) as caught:
        packages.check_packages(load("quickstart", words).config)
    assert "pip install" in str(caught.value) and package in str(caught.value)
    monkeypatch.setattr(packages, "is_installed", lambda name: name == package)
    packages.check_packages(load("quickstart", words).config)


def test_all_that_are_missing_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: False)
    with pytest.raises(UserError, match=r"pip install wandb.*pip install 'vllm.*pip install ray"):
        packages.check_packages(load("grpo", ["use_wandb=true", "use_vllm=true", "sandbox_pool=ray"]).config)


def test_a_server_that_runs_elsewhere_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: False)
    packages.check_packages(load("quickstart", ["rollout_engine=vllm", "rollout_servers=node1:8000"]).config)
    packages.check_packages(load("quickstart", ["eval_only=true", "report_to=wandb"]).config)


def test_it_is_noticed_before_torch_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from whetstone.__main__ import run; "
        f"code = run(['train', 'quickstart', 'rollout_engine=sglang', 'output_dir={tmp_path}/runs']); "
        "sys.exit(code if 'torch' not in sys.modules else 9)"
    )
    if packages.is_installed("sglang"):
        pytest.skip("sglang is installed")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "pip install 'sglang" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_configuration_by_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("max_steps: 7\n")
    assert run(["config", "--config", str(file), "--changed"]) == 0
    shown = capsys.readouterr().out
    assert "[mine.yaml]" in shown
    # No task is named, so no number of problems is made up.
    assert "training problems" not in shown and "no task is named" in shown
    assert run(["train", "--config"]) == 2
    assert run(["train", "--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_a_comparison_stays_inside_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "quickstart", "seed=1,2", f"output_dir={tmp_path}/a", "run_name=../../b"]
    assert run(words) == 2
    assert "run_name" in capsys.readouterr().err


def test_the_file_for_accelerate_ships_and_is_no_recipe() -> None:
    import yaml

    from whetstone.config import recipe_folders
    from whetstone.config.load import recipe_names

    file = recipe_folders()[-1] / "zero3.yaml"
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert settings["distributed_type"] == "MULTI_GPU"
    assert "zero3" not in recipe_names()
    with pytest.raises(UserError, match="compute_environment"):
        load(file)
